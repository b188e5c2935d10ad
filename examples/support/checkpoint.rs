use std::path::{Path, PathBuf};

use burn::config::Config;
use burn::module::Module;
use burn::tensor::Device;
use dar_burn::model::{Decoder, DecoderConfig};

use super::cli::{Failure, failed, failed_to};
use super::vocabulary::Vocabulary;

/// The folder of one saved model, and the files in it.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    folder: PathBuf,
}

impl Checkpoint {
    /// The checkpoint in `folder`, there or not.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// The checkpoint in `folder`, or in the folder `checkpoint` inside it.
    pub fn find(folder: &Path) -> Result<Self, Failure> {
        let candidates = [folder.to_owned(), folder.join("checkpoint")];
        let found = candidates.into_iter().map(Self::at).find(|checkpoint| checkpoint.config().is_file());
        found.ok_or_else(|| {
            let what = if folder.is_dir() { "holds no checkpoint" } else { "does not exist" };
            Failure::run(format!(
                "{} {what}: pass the `checkpoint` folder of a scheme that `train` wrote, such as \
                 runs/tiny/dar_block/checkpoint",
                folder.display()
            ))
        })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The model's configuration, JSON.
    pub fn config(&self) -> PathBuf {
        self.folder.join("config.json")
    }

    /// The parameters, Burn's own format.
    pub fn model(&self) -> PathBuf {
        self.folder.join("model.bpk")
    }

    /// The optimiser's moments, Burn's own format.
    pub fn optimiser(&self) -> PathBuf {
        self.folder.join("optimiser.bpk")
    }

    /// How far the training is, JSON.
    pub fn state(&self) -> PathBuf {
        self.folder.join("state.json")
    }

    /// The tokenizer, for models of other tokens than bytes.
    pub fn tokenizer(&self) -> PathBuf {
        self.folder.join("tokenizer.json")
    }

    /// The tokens that the model speaks.
    pub fn vocabulary(&self) -> Result<Vocabulary, Failure> {
        let tokenizer = self.tokenizer();
        Vocabulary::open(tokenizer.is_file().then_some(&*tokenizer))
    }

    /// The configuration of the saved model.
    pub fn load_config(&self) -> Result<DecoderConfig, Failure> {
        let path = self.config();
        let config = DecoderConfig::load(&path).map_err(failed_to("read", &path))?;
        config.validate().map_err(failed(path.display()))?;
        Ok(config)
    }

    /// The saved model.
    pub fn load_model(&self, device: &Device) -> Result<Decoder, Failure> {
        let path = self.model();
        self.load_config()?.init(device).try_load_file(&path).map_err(failed_to("read", &path))
    }
}
