use cubecl::prelude::*;

use super::{GATES, GateOperands, ROWS, SCALARS, SiteOperands};
use crate::launch::{element_index, elements};
use crate::operand::Operand;
use crate::rows::{Rows, SUM_UNITS, sum_of_column};

/// The second stage of the gradients of a site: sums rows that are laid out as `[10 * d_model]` of the gates' rows,
/// those of a query, that of a gain, and `[8]` scalars, straight into the parameters' own shapes.
pub(crate) struct SiteSum<'a> {
    pub(crate) gradients: SiteOperands<'a>,
    /// All queries, of which that of `read` is written. `[reads, 2, d_model]`
    pub(crate) d_query: Option<Operand<'a>>,
    /// `[d_model]`
    pub(crate) d_gain: Option<Operand<'a>>,
    pub(crate) read: usize,
    pub(crate) d_model: usize,
}

impl SiteSum<'_> {
    pub(crate) fn sum(self, client: &Client, stage: &Rows, address: AddressType) {
        let Self { gradients: SiteOperands { alpha, beta, rho }, d_query, d_gain, read, d_model } = self;
        let row = stage.operand();
        let &[rows, length] = row.shape else { unreachable!("rows of a first stage have two axes") };
        let (count, dim) = elements(client, length, SUM_UNITS);
        let arguments = |GateOperands { weight, bias, scale }: GateOperands| {
            (weight.argument(1), bias.argument(1), scale.argument(1))
        };
        let (alpha_weight, alpha_bias, alpha_scale) = arguments(alpha);
        let (beta_weight, beta_bias, beta_scale) = arguments(beta);
        let (rho_weight, rho_bias, rho_scale) = arguments(rho);
        sum_site_kernel::launch(
            client,
            count,
            dim,
            address,
            row.argument(1),
            alpha_weight,
            alpha_bias,
            alpha_scale,
            beta_weight,
            beta_bias,
            beta_scale,
            rho_weight,
            rho_bias,
            rho_scale,
            d_query.map(|d_query| d_query.argument(1)).into(),
            d_gain.map(|d_gain| d_gain.argument(1)).into(),
            read,
            rows,
            length,
            d_model,
        );
    }
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "one argument a tensor and size")]
fn sum_site_kernel(
    row: &[f32],                             // [rows, length]
    alpha_weight: &mut [f32],                // [2, d_model, 2]
    alpha_bias: &mut [f32],                  // [2]
    alpha_scale: &mut [f32],                 // [1]
    beta_weight: &mut [f32],                 // [2, d_model, 2]
    beta_bias: &mut [f32],                   // [2]
    beta_scale: &mut [f32],                  // [1]
    rho_weight: &mut [f32],                  // [2, d_model, 1]
    rho_bias: &mut [f32],                    // [1]
    rho_scale: &mut [f32],                   // [1]
    mut d_query: ComptimeOption<&mut [f32]>, // [reads, 2, d_model]
    mut d_gain: ComptimeOption<&mut [f32]>,  // [d_model]
    read: usize,
    rows: usize,
    length: usize,
    d_model: usize,
) {
    let column = element_index();
    if column >= length {
        terminate!();
    }
    let total = sum_of_column(row, column, rows, length);
    let scalars = length - SCALARS;
    if column < ROWS * d_model {
        let gate = column / (2 * d_model);
        let feature = column % (2 * d_model); // row of a weight: stream and feature
        if gate < 2 {
            alpha_weight[2 * feature + gate] = total;
        } else if gate < 4 {
            beta_weight[2 * feature + gate - 2] = total;
        } else {
            rho_weight[feature] = total;
        }
    } else if column < scalars {
        let row = column - ROWS * d_model;
        let before = comptime!(if d_query.is_some() { 2usize } else { 0 }) * d_model; // the query's rows
        if row < before {
            if comptime!(d_query.is_some()) {
                let d_query = d_query.as_mut().unwrap();
                d_query[2 * read * d_model + row] = total;
            }
        } else if comptime!(d_gain.is_some()) {
            let d_gain = d_gain.as_mut().unwrap();
            d_gain[row - before] = total;
        }
    } else {
        let scalar = column - scalars;
        if scalar < 2 {
            alpha_bias[scalar] = total;
        } else if scalar < 4 {
            beta_bias[scalar - 2] = total;
        } else if scalar == 4 {
            rho_bias[0] = total;
        } else if scalar == GATES {
            alpha_scale[0] = total;
        } else if scalar == GATES + 1 {
            beta_scale[0] = total;
        } else {
            rho_scale[0] = total;
        }
    }
}
