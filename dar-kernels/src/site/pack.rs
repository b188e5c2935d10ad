use cubecl::prelude::*;

use super::{GATES, GateOperands, ROWS, SCALARS, SiteOperands, packed_axes, packed_length};
use crate::KernelError;
use crate::launch::{element_index, elements};
use crate::operand::{Check, F32, Operand};

/// Units of a cube: a site is small, so that many cubes share it.
const UNITS: usize = 64;

/// The operands of [`pack_site`].
#[derive(Debug, Clone, Copy)]
pub struct PackSite<'a> {
    /// Input, all nine in f32, f16 or bf16.
    pub parameters: SiteOperands<'a>,
    /// Input, in the same type: the gain of the norm of the branch behind the read, if that is folded in. `[d_model]`
    pub gain: Option<Operand<'a>>,
    /// Output, f32. `[10 * d_model + 8]`, with `gain` `[10 * d_model + 8 + d_model]`
    pub site: Operand<'a>,
}

/// Packs the parameters of a site's gates into one f32 buffer.
///
/// # Errors
/// If an operand has another shape, element type or a too short buffer.
pub fn pack_site(client: &Client, operands: PackSite) -> Result<(), KernelError> {
    let PackSite { parameters, gain, site } = operands;
    let SiteOperands { alpha, beta, rho } = parameters;

    let mut check = Check::of("pack_site");
    let dtype = alpha.weight.dtype;
    let d_model = match *alpha.weight.shape {
        [rows @ (2..), 2] if rows.is_multiple_of(2) => rows / 2,
        _ => return Err(check.wrong_shape("alpha.weight", &alpha.weight, "[2 * d_model, 2] with d_model ≥ 1")),
    };
    check.storage("alpha.weight", &alpha.weight, client)?;
    parameters.check(&mut check, d_model, dtype)?;
    if let Some(gain) = &gain {
        check.fits("gain", gain, dtype, "[d_model]", &[d_model])?;
    }
    let length = packed_length(d_model, true, gain.is_some());
    check.fits("site", &site, F32, packed_axes(true, gain.is_some()), &[length])?;
    let address = check.address(client)?;

    let (count, dim) = elements(client, length, UNITS);
    let [alpha, beta, rho] =
        [alpha, beta, rho].map(|GateOperands { weight, bias, scale }| [weight, bias, scale].map(|x| x.argument(1)));
    let ([alpha_weight, alpha_bias, alpha_scale], [beta_weight, beta_bias, beta_scale]) = (alpha, beta);
    let [rho_weight, rho_bias, rho_scale] = rho;
    pack_site_kernel::launch(
        client,
        count,
        dim,
        address,
        alpha_weight,
        alpha_bias,
        alpha_scale,
        beta_weight,
        beta_bias,
        beta_scale,
        rho_weight,
        rho_bias,
        rho_scale,
        gain.map(|gain| gain.argument(1)).into(),
        site.argument(1),
        length,
        d_model,
        dtype,
    );
    Ok(())
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn pack_site_kernel<P: Float>(
    alpha_weight: &[P],         // [2, d_model, 2]
    alpha_bias: &[P],           // [2]
    alpha_scale: &[P],          // [1]
    beta_weight: &[P],          // [2, d_model, 2]
    beta_bias: &[P],            // [2]
    beta_scale: &[P],           // [1]
    rho_weight: &[P],           // [2, d_model, 1]
    rho_bias: &[P],             // [1]
    rho_scale: &[P],            // [1]
    gain: ComptimeOption<&[P]>, // [d_model]
    site: &mut [f32],           // [5, 2, d_model], then [8], then [d_model]
    length: usize,
    d_model: usize,
    #[define(P)] _dtype: ElemType,
) {
    let position = element_index();
    if position >= length {
        terminate!();
    }
    if position < ROWS * d_model {
        let gate = position / (2 * d_model);
        let row = position % (2 * d_model); // of a weight: stream and feature
        if gate < 2 {
            site[position] = f32::cast_from(alpha_weight[2 * row + gate]);
        } else if gate < 4 {
            site[position] = f32::cast_from(beta_weight[2 * row + gate - 2]);
        } else {
            site[position] = f32::cast_from(rho_weight[row]);
        }
    } else if position < ROWS * d_model + SCALARS {
        let scalar = position - ROWS * d_model;
        if scalar < 2 {
            site[position] = f32::cast_from(alpha_bias[scalar]);
        } else if scalar < 4 {
            site[position] = f32::cast_from(beta_bias[scalar - 2]);
        } else if scalar == 4 {
            site[position] = f32::cast_from(rho_bias[0]);
        } else if scalar == GATES {
            site[position] = f32::cast_from(alpha_scale[0]);
        } else if scalar == GATES + 1 {
            site[position] = f32::cast_from(beta_scale[0]);
        } else {
            site[position] = f32::cast_from(rho_scale[0]);
        }
    } else {
        #[comptime]
        match gain {
            ComptimeOption::Some(gain) => {
                site[position] = f32::cast_from(gain[position - (ROWS * d_model + SCALARS)]);
            }
            ComptimeOption::None => {}
        }
    }
}
