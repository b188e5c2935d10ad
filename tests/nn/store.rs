use burn::module::Module;
use burn::store::{ModuleSnapshot, SafetensorsStore};
use burn::tensor::Tensor;
use dar_burn::{BranchLayout, Residual, ResidualConfig};

use super::toy::{Stir, Toy, schemes, tensor, vec};
use crate::support::devices::flex;

fn hidden(toy: &Toy, residual: Residual) -> Vec<f64> {
    let x: Tensor<2> = tensor(1, [4, 8], 1.0, &flex());
    vec(Toy { residual, ..toy.clone() }.forward(x))
}

/// What was stirred and saved loads into a fresh module, and computes the same bits.
#[test]
fn parameters_survive_files() {
    let device = flex();
    let layout = BranchLayout::new(8, 10);
    let folder = tempfile::tempdir().unwrap();
    for (index, (name, config)) in schemes().into_iter().enumerate() {
        let toy = Toy::new(&config, &layout, &device);
        let stirred = toy.residual.clone().map(&mut Stir::new());
        let truth = hidden(&toy, stirred.clone());
        let fresh = || config.init(&layout, &device);
        if !matches!(config, ResidualConfig::Standard | ResidualConfig::Cascade) {
            assert_ne!(hidden(&toy, fresh()), truth, "{name}: stirring does nothing");
        }

        let file = folder.path().join(format!("{index}.bpk"));
        stirred.clone().save_file(&file).unwrap();
        assert_eq!(hidden(&toy, fresh().load_file(&file)), truth, "{name}: bpk");

        let file = folder.path().join(format!("{index}.safetensors"));
        stirred.save_into(&mut SafetensorsStore::from_file(&file)).unwrap();
        let mut loaded = fresh();
        let result = loaded.load_from(&mut SafetensorsStore::from_file(&file)).unwrap();
        assert!(result.is_success(), "{name}: {result:?}");
        assert_eq!(hidden(&toy, loaded), truth, "{name}: safetensors");
    }
}

/// A file of another configuration is refused, not half loaded.
#[test]
fn a_file_of_other_sites_is_refused() {
    let device = flex();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dar.bpk");
    let residual = |branches| ResidualConfig::dar_block(1).init(&BranchLayout::new(8, branches), &device);
    residual(4).save_file(&file).unwrap();
    assert!(residual(6).try_load_file(&file).is_err());
}
