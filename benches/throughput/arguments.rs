//! The command line, and what follows from the device where it says nothing.

use std::str::FromStr;

use burn::backend::DispatchDevice;
use burn::tensor::{DType, FloatDType};
use clap::Parser;
use dar_burn::ResidualConfig;
use dar_burn::device::{DeviceChoice, OpenDevice};
use dar_burn::model::{DecoderConfig, FeedForwardConfig, MoeConfig, Preset};

use crate::rows::Row;
use crate::support::cli::{Failure, failed};
use crate::support::machine;

/// Tokens/s and peak memory of whole training steps, for every residual scheme.
///
/// The device is the best that starts here, or the one that DAR_BENCH_DEVICE names; DAR_BENCH_QUICK=1 is --quick.
#[derive(Parser, Debug)]
#[command(name = "throughput")]
pub struct Cli {
    /// Only rows whose name contains this
    filter: Option<String>,

    /// Models, comma-separated: tiny, tiny_moe, small, small_moe, 0.1B, 0.3B, 0.5B, 1B, 7B-MoE [default: as large as suits
    /// the device]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    size: Option<Vec<Size>>,

    /// Rows, comma-separated: a method, or METHOD:leanest or METHOD:composed [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    row: Option<Vec<Row>>,

    /// Layers in a block of the block forms [default: 2; 3 for 7B-MoE]
    #[arg(long, value_name = "K")]
    block: Option<usize>,

    /// Sequences a step [default: by size]
    #[arg(long, value_name = "N")]
    batch: Option<usize>,

    /// Tokens a sequence [default: by size]
    #[arg(long, value_name = "N")]
    sequence: Option<usize>,

    /// Element type of parameters, states and moments: f32, f16 or bf16 [default: bf16 on a GPU that computes in it]
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    dtype: Option<FloatDType>,

    /// How often each scheme has its turn [default: 5]
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,

    /// Timed steps a turn [default: 3]
    #[arg(long, value_name = "N")]
    steps: Option<usize>,

    /// Untimed steps before them [default: 2]
    #[arg(long, value_name = "N")]
    warm_up: Option<usize>,

    /// Few repetitions of a tiny model: shows that the benchmark works
    #[arg(long)]
    quick: bool,

    /// Print the peak memory of one row and nothing else
    #[arg(long, hide = true, value_name = "ROW")]
    pub memory_of: Option<Row>,

    /// What `cargo bench` passes.
    #[arg(long, hide = true)]
    bench: bool,
}

/// All that is run.
pub struct Arguments {
    pub models: Vec<Model>,
    pub rows: Vec<Row>,
    pub rounds: usize,
    pub steps: usize,
    pub warm_up: usize,
    pub quick: bool,
}

/// One model and the batches it trains on.
#[derive(Debug, Clone)]
pub struct Model {
    pub name: String,
    pub dtype: FloatDType,
    pub batch: usize,
    pub sequence: usize,
    block: usize,
    decoder: DecoderConfig,
}

/// The backbone by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Size {
    Tiny,
    TinyMoe,
    Small,
    SmallMoe,
    Preset(Preset),
}

impl Arguments {
    /// Also opens the device, with the element type of the models as its default.
    pub fn new(cli: &Cli) -> Result<(Self, OpenDevice), Failure> {
        let mut opened = machine::device()?;
        // Run by anything but `cargo bench`, such as `cargo test --benches`, it only shows that it works.
        let quick = cli.quick || machine::quick_by_environment() || !(cli.bench || cli.memory_of.is_some());
        let hardware = !opened.software && opened.choice != DeviceChoice::Flex;
        let wanted = if hardware { FloatDType::BF16 } else { FloatDType::F32 };
        let dtype = cli.dtype.unwrap_or(if opened.device.supports_dtype(wanted) { wanted } else { FloatDType::F32 });
        if !opened.device.supports_dtype(dtype) {
            return Err(Failure::usage(format!("{} does not compute in {dtype:?}", opened.name)));
        }
        opened.device.configure(dtype).map_err(failed("cannot choose the element type"))?;

        let sizes = match &cli.size {
            Some(sizes) => sizes.clone(),
            // Devices that compile their kernels take a minute for every new model.
            None if quick && opened.choice != DeviceChoice::Flex => vec![Size::Tiny],
            None if quick => vec![Size::Tiny, Size::TinyMoe],
            None => Size::of_device(&opened, hardware, dtype),
        };
        let models = sizes.into_iter().map(|size| Model::new(cli, size, dtype, hardware, quick));
        let mut rows = cli.row.clone().unwrap_or_else(|| if quick { Row::few() } else { Row::all() });
        rows.retain(|row| cli.filter.as_ref().is_none_or(|filter| row.name().contains(filter.as_str())));
        let arguments = Self {
            models: models.collect(),
            rows,
            rounds: cli.rounds.unwrap_or(if quick { 1 } else { 5 }).max(1),
            steps: cli.steps.unwrap_or(if quick { 1 } else { 3 }).max(1),
            warm_up: cli.warm_up.unwrap_or(if quick { 1 } else { 2 }),
            quick,
        };
        for model in &arguments.models {
            for row in &arguments.rows {
                let refused = |error| Failure::usage(format!("{} at size {}: {error}", row.name(), model.name));
                model.decoder(row).validate().map_err(refused)?;
            }
        }
        Ok((arguments, opened))
    }
}

impl Model {
    fn new(cli: &Cli, size: Size, dtype: FloatDType, hardware: bool, quick: bool) -> Self {
        let (batch, sequence) = match size {
            _ if quick => (1, 32),
            Size::Tiny | Size::TinyMoe => (4, 128),
            Size::Small | Size::SmallMoe => (4, 512),
            Size::Preset(_) if hardware => (2, 4096),
            Size::Preset(_) => (1, 256),
        };
        Self {
            name: size.name().into(),
            dtype,
            batch: cli.batch.unwrap_or(batch),
            sequence: cli.sequence.unwrap_or(sequence),
            block: cli.block.unwrap_or(if let Size::Preset(preset) = size { preset.layers_per_block() } else { 2 }),
            decoder: size.decoder(),
        }
    }

    /// The model of a row.
    pub fn decoder(&self, row: &Row) -> DecoderConfig {
        DecoderConfig { residual: row.residual(self.block), ..self.decoder.clone() }
    }

    /// Width of the model.
    pub fn d_model(&self) -> usize {
        self.decoder.d_model
    }

    /// Number of token ids.
    pub fn vocab_size(&self) -> usize {
        self.decoder.vocab_size
    }

    /// The sizes, for people.
    pub fn describe(&self) -> String {
        let DecoderConfig { layers, d_model, vocab_size, feed_forward, .. } = &self.decoder;
        let kind = match feed_forward {
            FeedForwardConfig::Dense { d_ff } => format!("dense, d_ff {d_ff}"),
            FeedForwardConfig::MixtureOfExperts(MoeConfig { experts, experts_per_token, d_expert }) => {
                format!("{experts_per_token} of {experts} experts of {d_expert}")
            }
        };
        format!(
            "{}: {layers} layers, d_model {d_model}, {kind}, vocabulary {vocab_size}, K = {}, {} × {} tokens a step, {:?}",
            self.name,
            self.block,
            self.batch,
            self.sequence,
            DType::from(self.dtype)
        )
    }

    /// The arguments that make this model again in another process.
    pub fn command_line(&self) -> Vec<String> {
        let dtype = format!("{:?}", self.dtype).to_lowercase();
        let pairs = [
            ("--size", self.name.clone()),
            ("--dtype", dtype),
            ("--block", self.block.to_string()),
            ("--batch", self.batch.to_string()),
            ("--sequence", self.sequence.to_string()),
        ];
        pairs.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect()
    }
}

impl Size {
    /// A dense model and a mixture of experts that suit the device.
    fn of_device(opened: &OpenDevice, hardware: bool, dtype: FloatDType) -> Vec<Self> {
        if !hardware {
            return vec![Self::Tiny, Self::TinyMoe];
        }
        // Parameters, gradients and two moments in a quarter of the memory leave room for activations and logits.
        let memory = match opened.device.as_dispatch() {
            DispatchDevice::Cube(device) => device.client().properties().memory.max_memory(),
            _ => None,
        };
        let bytes_a_parameter = 4 * if dtype == FloatDType::F32 { 4 } else { 2 };
        let fits = |preset: &Preset| {
            let parameters =
                burn::module::Module::num_params(&preset.decoder(ResidualConfig::Standard).init(&opened.device));
            memory.is_some_and(|memory| (parameters * bytes_a_parameter) as u64 <= memory / 4)
        };
        let dense = [Preset::Dense1B, Preset::Dense05B, Preset::Dense03B].into_iter().find(fits);
        vec![dense.map_or(Self::Preset(Preset::Dense01B), Self::Preset), Self::SmallMoe]
    }

    fn decoder(self) -> DecoderConfig {
        let dense = |d_ff| FeedForwardConfig::Dense { d_ff };
        let experts =
            |experts, chosen, d_expert| FeedForwardConfig::MixtureOfExperts(MoeConfig::new(experts, chosen, d_expert));
        let standard = ResidualConfig::Standard;
        match self {
            Self::Tiny => DecoderConfig::new(256, 96, 6, 4, 2, dense(256), standard),
            Self::TinyMoe => DecoderConfig::new(256, 96, 6, 4, 2, experts(4, 2, 96), standard),
            Self::Small => DecoderConfig::new(4096, 320, 10, 8, 4, dense(896), standard),
            Self::SmallMoe => DecoderConfig::new(4096, 320, 10, 8, 4, experts(16, 4, 224), standard),
            Self::Preset(preset) => preset.decoder(standard),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::TinyMoe => "tiny_moe",
            Self::Small => "small",
            Self::SmallMoe => "small_moe",
            Self::Preset(preset) => preset.name(),
        }
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let own = [Self::Tiny, Self::TinyMoe, Self::Small, Self::SmallMoe];
        if let Some(size) = own.into_iter().find(|size| size.name() == name) {
            return Ok(size);
        }
        let names = || own.map(Self::name).into_iter().chain(Preset::ALL.map(Preset::name)).collect::<Vec<_>>();
        let unknown = |_| format!("unknown size `{name}`: expected one of {}", names().join(", "));
        name.parse().map(Self::Preset).map_err(unknown)
    }
}

fn dtype(name: &str) -> Result<FloatDType, String> {
    match name {
        "f32" => Ok(FloatDType::F32),
        "f16" => Ok(FloatDType::F16),
        "bf16" => Ok(FloatDType::BF16),
        _ => Err("expected f32, f16 or bf16".into()),
    }
}
