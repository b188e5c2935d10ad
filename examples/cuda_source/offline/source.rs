use std::panic::{AssertUnwindSafe, catch_unwind};

use cubecl::ir::DeviceProperties;
use cubecl::{CubeKernel, WgpuCompilationOptions, define_kernel};
use cubecl_core::Compiler;
use cubecl_cpp::shared::{CompilationOptions, CppCompiler, CppSupportedFeatures};
use cubecl_cpp::target::Cuda;
use cubecl_server::validation::{validate_cube_dim, validate_units};
use cubecl_wgpu::{AutoCompiler, WgslCompiler};

/// What a kernel is compiled to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    /// CUDA C++, as CubeCL compiles for compute capability 9.0.
    Cuda,
    /// WebGPU's shading language.
    Wgsl,
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

impl Language {
    /// As folders are named.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Wgsl => "wgsl",
        }
    }

    /// Of files.
    pub fn extension(self) -> &'static str {
        match self {
            Self::Cuda => "cu",
            Self::Wgsl => "wgsl",
        }
    }
}
