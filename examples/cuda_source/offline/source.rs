use std::panic::{AssertUnwindSafe, catch_unwind};

use cubecl::ir::DeviceProperties;
use cubecl::{CubeKernel, WgpuCompilationOptions, define_kernel};
use cubecl_core::Compiler;
use cubecl_cpp::shared::{CompilationOptions, CppCompiler, CppSupportedFeatures};
use cubecl_cpp::target::Cuda;
use cubecl_server::validation::{validate_cube_dim, validate_units};
use cubecl_wgpu::{AutoCompiler, WgslCompiler};

/// The driver that takes the PTX: CUDA 12.8, the first with all of [`Architecture`].
#[cfg(feature = "cuda")]
const CUDA_DRIVER: i32 = 12_080;

/// What a kernel is compiled to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    /// CUDA C++, which CubeCL's feature `cuda-cpp` hands to NVRTC.
    Cuda,
    /// What CubeCL hands to the driver otherwise, by LLVM.
    #[cfg(feature = "cuda")]
    Ptx(Architecture),
    /// WebGPU's shading language.
    Wgsl,
}

/// Compute capability: 8.0, 9.0 or 10.0.
#[cfg(feature = "cuda")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    Ampere = 80,
    Hopper = 90,
    Blackwell = 100,
}

/// A kernel in a language of devices.
#[derive(Debug, Clone)]
pub struct Source {
    /// The name of its entry point.
    pub entry: String,
    /// What is compiled.
    pub text: String,
    /// Units of a cube.
    pub units: [u32; 3],
    /// Bytes of shared memory of a cube; of CUDA only.
    pub shared_bytes: usize,
}

impl Source {
    /// Compiles a kernel for a device.
    ///
    /// # Errors
    /// If the device has not so many units or so much shared memory, or the compiler refuses the kernel.
    pub fn compile(language: Language, kernel: &dyn CubeKernel, device: &DeviceProperties) -> Result<Self, String> {
        let id = kernel.id();
        validate_cube_dim(device, &id).map_err(|error| error.to_string())?;
        validate_units(device, &id).map_err(|error| error.to_string())?;
        let definition = define_kernel(kernel).map_err(|error| error.to_string())?;
        let entry = definition.settings.kernel_name.clone();
        let units = [id.cube_dim.x, id.cube_dim.y, id.cube_dim.z];
        // Compilers panic at what they lack.
        let compile = || match language {
            Language::Cuda => {
                let compiled = CppCompiler::<Cuda>::default().compile(definition, &cuda_options())?;
                Ok((compiled.to_string(), compiled.shared_memory_size))
            }
            #[cfg(feature = "cuda")]
            Language::Ptx(architecture) => ptx(definition, architecture),
            Language::Wgsl => {
                let mut compiler = AutoCompiler::Wgsl(WgslCompiler);
                Ok((compiler.compile(definition, &WgpuCompilationOptions::default())?.to_string(), 0))
            }
        };
        let (text, shared_bytes) = match catch_unwind(AssertUnwindSafe(compile)) {
            Ok(compiled) => compiled.map_err(|error: cubecl::CompilationError| error.to_string())?,
            Err(_) => return Err(format!("the compiler panicked at {entry}")),
        };
        let most = device.hardware.max_shared_memory_size;
        if shared_bytes > most {
            return Err(format!("{shared_bytes} bytes of shared memory, at most {most}"));
        }
        Ok(Self { entry, text, units, shared_bytes })
    }
}

fn cuda_options() -> CompilationOptions {
    CompilationOptions {
        warp_size: 32,
        supports_features: CppSupportedFeatures {
            grid_constants: true,
            clusters: true,
            fast_math: true,
            fast_tanh: true,
            elect_sync: true,
            dp4a: true,
        },
        amd_wmma: None,
    }
}

/// The PTX of a kernel and its bytes of shared memory.
#[cfg(feature = "cuda")]
fn ptx(
    definition: cubecl::prelude::KernelDefinition,
    architecture: Architecture,
) -> Result<(String, usize), cubecl::CompilationError> {
    use cubecl_core::ir::nvidia::SmArch;
    use cubecl_llvm::nvptx::ptx_version::PtxVersion;
    use cubecl_llvm::{LlvmTarget, PlironArtifact, PlironCompiler, PlironOptions};

    let options = PlironOptions {
        sm_arch: Some(SmArch::new(architecture as u32, true)),
        ptx_version: PtxVersion::for_driver(CUDA_DRIVER),
        grid_constants: true,
        ..Default::default()
    };
    match (PlironCompiler { target: LlvmTarget::Nvptx }).compile(definition, &options)? {
        PlironArtifact::NvptxCode(module) => {
            let text = module.ptx.iter().map(|&byte| char::from(byte as u8)).take_while(|&c| c != '\0').collect();
            Ok((text, module.shared_memory_size))
        }
        _ => unreachable!("the target is NVPTX"),
    }
}

impl Language {
    /// As folders are named.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            #[cfg(feature = "cuda")]
            Self::Ptx(Architecture::Ampere) => "ptx-sm_80",
            #[cfg(feature = "cuda")]
            Self::Ptx(Architecture::Hopper) => "ptx-sm_90a",
            #[cfg(feature = "cuda")]
            Self::Ptx(Architecture::Blackwell) => "ptx-sm_100a",
            Self::Wgsl => "wgsl",
        }
    }

    /// Of files.
    pub fn extension(self) -> &'static str {
        match self {
            Self::Cuda => "cu",
            #[cfg(feature = "cuda")]
            Self::Ptx(_) => "ptx",
            Self::Wgsl => "wgsl",
        }
    }
}
