use dar_kernels::site::{PackSite, pack_site, packed_length};

use super::support::{Buffer, F16, F32, STORAGE, SiteBuffers, clients, stores};
use crate::support::host::values;

/// Weight, bias and scale of alpha, beta and rho.
fn parameters(d_model: usize) -> [[Vec<f64>; 3]; 3] {
    let gate = |seed, outputs| {
        [values(seed, 2 * d_model * outputs, 1.0), values(seed + 1, outputs, 1.0), values(seed + 2, 1, 1.0)]
    };
    [gate(10, 2), gate(20, 2), gate(30, 1)]
}

/// Columns of the weights become rows, biases and scales follow, whatever the type.
#[test]
fn any_width() {
    for (client, device) in clients() {
        for dtype in STORAGE.into_iter().filter(|&dtype| stores(&client, dtype)) {
            for d_model in [1, 3, 37, 130, 257] {
                let parameters = parameters(d_model);
                let buffers = SiteBuffers::new(&client, d_model, dtype, Some(&parameters));
                let gain = vec![1.5; d_model];
                let gain_buffer = Buffer::new(&client, &[d_model], dtype, &gain);
                let pack = |gain: Option<&Buffer>| {
                    let site = Buffer::output(&client, &[packed_length(d_model, true, gain.is_some())], F32);
                    let gain = gain.map(Buffer::operand);
                    let operands = PackSite { parameters: buffers.operands(), gain, site: site.operand() };
                    pack_site(&client, operands).unwrap();
                    site.read()
                };

                let [[alpha, alpha_bias, alpha_scale], [beta, beta_bias, beta_scale], [rho, rho_bias, rho_scale]] =
                    parameters;
                let column = |weight: &[f64], output| weight.iter().copied().skip(output).step_by(2).collect();
                let expected = [
                    column(&alpha, 0),
                    column(&alpha, 1),
                    column(&beta, 0),
                    column(&beta, 1),
                    rho,
                    alpha_bias,
                    beta_bias,
                    rho_bias,
                    alpha_scale,
                    beta_scale,
                    rho_scale,
                ];
                let expected = expected.concat();
                let about = format!("d_model {d_model} in {dtype} on {device}");
                assert_eq!(pack(None), expected, "{about}");
                assert_eq!(pack(Some(&gain_buffer)), [expected, gain].concat(), "{about}");
            }
        }
    }
}

#[test]
fn refusals_name_operation_argument_expected_and_got() {
    for (client, _) in clients() {
        let buffers = SiteBuffers::new(&client, 8, F32, None);
        let half = SiteBuffers::new(&client, 8, F16, None);
        let (site, short) = (Buffer::output(&client, &[88], F32), Buffer::output(&client, &[80], F32));
        let right = PackSite { parameters: buffers.operands(), gain: None, site: site.operand() };
        let mut mixed = right;
        mixed.parameters.beta.bias = half.operands().beta.bias;
        let mut odd = right;
        odd.parameters.alpha.weight = right.parameters.alpha.bias;
        assert_eq!(pack_site(&client, right), Ok(()));
        for (operands, message) in [
            (
                PackSite { site: short.operand(), ..right },
                "pack_site: `site` has shape [80], expected [10 * d_model + 8] = [88]",
            ),
            (
                PackSite { gain: Some(site.operand()), ..right },
                "pack_site: `gain` has shape [88], expected [d_model] = [8]",
            ),
            (mixed, "pack_site: `beta.bias` has element type f16, expected f32"),
            (odd, "pack_site: `alpha.weight` has shape [2], expected [2 * d_model, 2] with d_model ≥ 1"),
        ] {
            assert_eq!(pack_site(&client, operands).unwrap_err().to_string(), message);
        }
    }
}
