//! A trained plain model becomes a model of another scheme that computes the same function.

use std::path::Path;

use burn::module::Module;
use burn::store::{ModuleSnapshot, SafetensorsStore};
use burn::tensor::{Device, Int, Tensor};
use dar_burn::ResidualConfig;
use dar_burn::model::{Decoder, DecoderConfig, FeedForwardConfig};
use dar_burn::upcycle::{UpcycleError, upcycle};

use crate::nn::toy::{schemes, vec};
use crate::support::devices::flex;
use crate::support::host::relative_error;

const LAYERS: usize = 6;

fn config(layers: usize, d_model: usize, residual: ResidualConfig) -> DecoderConfig {
    DecoderConfig::new(20, d_model, layers, 2, 1, FeedForwardConfig::Dense { d_ff: 24 }, residual)
}

/// A plain model, saved as burnpack and as safetensors.
fn plain(folder: &Path, device: &Device) -> Decoder {
    let model = config(LAYERS, 16, ResidualConfig::Standard).init(device);
    model.initialize();
    model.clone().save_file(folder.join("plain.bpk")).unwrap();
    model.save_into(&mut SafetensorsStore::from_file(folder.join("plain.safetensors"))).unwrap();
    model
}

#[test]
fn every_scheme_continues_a_plain_checkpoint() {
    let (device, folder) = (flex(), tempfile::tempdir().unwrap());
    let tokens = Tensor::<2, Int>::from_data([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]], &device);
    let truth = vec(plain(folder.path(), &device).forward(tokens.clone()).logits);
    for (name, residual) in schemes().into_iter().filter(|(name, _)| name != "cascade") {
        for file in ["plain.bpk", "plain.safetensors"] {
            let fresh = config(LAYERS, 16, residual.clone()).init(&device);
            let model = upcycle(fresh, &folder.path().join(file)).unwrap();
            let error = relative_error(&vec(model.forward(tokens.clone()).logits), &truth, 1e-3);
            // eps · entries² / mean square, with 13 sources of the full form.
            assert!(error <= 2e-4, "{name}, {file}: {error:.1e}");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let (device, folder) = (flex(), tempfile::tempdir().unwrap());
    plain(folder.path(), &device);
    let file = folder.path().join("plain.bpk");
    let refusal = |layers, d_model, residual, file: &Path| {
        upcycle(config(layers, d_model, residual).init(&device), file).expect_err("a refusal")
    };

    let cascade = refusal(LAYERS, 16, ResidualConfig::Cascade, &file);
    assert!(matches!(cascade, UpcycleError::Parallel), "{cascade}");
    assert!(cascade.to_string().contains("reads the same state for attention and feed-forward"), "{cascade}");

    let deeper = refusal(LAYERS + 1, 16, ResidualConfig::dar_full(), &file);
    let UpcycleError::Missing { missing, .. } = &deeper else { panic!("{deeper}") };
    assert!(missing.iter().all(|path| path.starts_with("layers.6.")), "{deeper}");

    let shallower = refusal(LAYERS - 1, 16, ResidualConfig::dar_full(), &file);
    let UpcycleError::Unused { unused, .. } = &shallower else { panic!("{shallower}") };
    assert!(unused.iter().all(|path| path.starts_with("layers.5.")), "{shallower}");

    let wider = refusal(LAYERS, 32, ResidualConfig::dar_full(), &file);
    assert!(matches!(wider, UpcycleError::Load { .. }), "{wider}");

    let absent = refusal(LAYERS, 16, ResidualConfig::dar_full(), &folder.path().join("absent.bpk"));
    assert!(
        absent.to_string().ends_with("absent.bpk: it is not a file, expected a .safetensors or a burnpack file"),
        "{absent}"
    );

    // Residual parameters of one scheme are no start for another, not even where they fit.
    let trained = folder.path().join("dar.bpk");
    config(LAYERS, 16, ResidualConfig::dar_full()).init(&device).save_file(&trained).unwrap();
    let not_plain = refusal(LAYERS, 16, ResidualConfig::dar_block(2), &trained);
    let UpcycleError::NotPlain { parameters, .. } = &not_plain else { panic!("{not_plain}") };
    assert!(parameters.iter().all(|path| path.starts_with("residual.scheme.Dar.")), "{not_plain}");

    let text = folder.path().join("text.safetensors");
    std::fs::write(&text, "no tensors").unwrap();
    let corrupt = refusal(LAYERS, 16, ResidualConfig::dar_full(), &text);
    assert!(matches!(corrupt, UpcycleError::Load { .. }), "{corrupt}");
}

/// A module that only shares the name of the residual has to be in the checkpoint.
#[test]
fn a_namesake_is_not_the_residual() {
    mod theirs {
        #[derive(burn::module::Module, Debug)]
        pub struct Residual {
            pub linear: burn::nn::Linear,
        }
    }
    #[derive(Module, Debug)]
    struct Small {
        linear: burn::nn::Linear,
    }
    #[derive(Module, Debug)]
    struct Large {
        linear: burn::nn::Linear,
        theirs: theirs::Residual,
        residual: dar_burn::Residual,
    }
    let (device, folder) = (flex(), tempfile::tempdir().unwrap());
    let linear = || burn::nn::LinearConfig::new(4, 4).init(&device);
    let file = folder.path().join("small.bpk");
    Small { linear: linear() }.save_file(&file).unwrap();
    let residual = ResidualConfig::dar_full().init(&dar_burn::BranchLayout::new(4, 4), &device);
    let large = Large { linear: linear(), theirs: theirs::Residual { linear: linear() }, residual };
    let error = upcycle(large, &file).expect_err("a refusal");
    let UpcycleError::Missing { missing, .. } = &error else { panic!("{error}") };
    assert!(missing.iter().all(|path| path.starts_with("theirs.linear.")), "{error}");
}
