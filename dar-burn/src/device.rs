//! Choosing a device at run time, by name.
//!
//! ```text
//! auto = the first of cuda, metal, rocm, vulkan, wgpu, webgpu that starts on real hardware;
//!        else flex; else a software adapter
//! ```
//!
//! Creating a client on a device that is not there panics inside CubeCL. [`open`] asks first, catches what is left,
//! and says in one line what is missing and what to do.

use std::fmt;
use std::str::FromStr;

use burn::tensor::Device;
use thiserror::Error;

/// A device by name; the ones other than `auto` carry the name of the Cargo feature that builds them in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DeviceChoice {
    /// The best of the others that starts here.
    #[default]
    Auto,
    /// Burn's CPU backend.
    Flex,
    /// The graphics API that the machine offers.
    Wgpu,
    /// NVIDIA.
    Cuda,
    /// AMD.
    Rocm,
    /// Apple, with kernels in Metal's own language.
    Metal,
    /// Vulkan, with kernels in SPIR-V.
    Vulkan,
    /// The browser's.
    WebGpu,
}

impl DeviceChoice {
    /// All of them, as messages list them.
    pub const ALL: [Self; 8] =
        [Self::Auto, Self::Flex, Self::Wgpu, Self::Cuda, Self::Rocm, Self::Metal, Self::Vulkan, Self::WebGpu];

    /// What `auto` tries, best first.
    const BEST_FIRST: [Self; 7] =
        [Self::Cuda, Self::Metal, Self::Rocm, Self::Vulkan, Self::Wgpu, Self::WebGpu, Self::Flex];

    /// The name that [`FromStr`] reads.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Flex => "flex",
            Self::Wgpu => "wgpu",
            Self::Cuda => "cuda",
            Self::Rocm => "rocm",
            Self::Metal => "metal",
            Self::Vulkan => "vulkan",
            Self::WebGpu => "webgpu",
        }
    }

    /// Whether this build has it.
    pub const fn is_built(self) -> bool {
        match self {
            Self::Auto => true,
            Self::Flex => cfg!(feature = "flex"),
            Self::Wgpu => cfg!(feature = "wgpu"),
            Self::Cuda => cfg!(feature = "cuda"),
            Self::Rocm => cfg!(feature = "rocm"),
            Self::Metal => cfg!(feature = "metal"),
            Self::Vulkan => cfg!(feature = "vulkan"),
            Self::WebGpu => cfg!(feature = "webgpu"),
        }
    }

    /// What to do where it does not start.
    const fn advice(self) -> &'static str {
        match self {
            Self::Auto | Self::Flex => "build with `--features flex` for the CPU",
            Self::Wgpu | Self::Vulkan => {
                "install a Vulkan driver (without a GPU, Mesa's software one: package `mesa-vulkan-drivers`), or \
                 choose `flex` for the CPU"
            }
            Self::Cuda => "check the NVIDIA driver with `nvidia-smi`, or choose `flex` for the CPU",
            Self::Rocm => "check the AMD driver with `rocminfo`, or choose `flex` for the CPU",
            Self::Metal => "it exists on macOS only; choose `wgpu`, or `flex` for the CPU",
            Self::WebGpu => "it exists in browsers only; choose `wgpu`, or `flex` for the CPU",
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DeviceChoice {
    type Err = DeviceError;

    fn from_str(name: &str) -> Result<Self, DeviceError> {
        let found = Self::ALL.into_iter().find(|choice| choice.name() == name);
        found.ok_or_else(|| DeviceError::Unknown { got: name.into() })
    }
}

/// Why there is no such device.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DeviceError {
    /// No device has this name.
    #[error("unknown device `{got}`: expected one of {}", names(DeviceChoice::ALL))]
    Unknown {
        /// The name.
        got: String,
    },
    /// The device's feature is off.
    #[error(
        "device `{choice}` is not in this build, which has {}: choose one of these or build with `--features {choice}`",
        names(built())
    )]
    NotBuilt {
        /// The device.
        choice: DeviceChoice,
    },
    /// The device does not start on this machine.
    #[error("device `{choice}` does not start here ({reason}): {}", choice.advice())]
    NotThere {
        /// The device.
        choice: DeviceChoice,
        /// What its runtime said.
        reason: String,
    },
}

fn names(choices: impl IntoIterator<Item = DeviceChoice>) -> String {
    choices.into_iter().map(DeviceChoice::name).collect::<Vec<_>>().join(", ")
}

fn built() -> impl Iterator<Item = DeviceChoice> {
    DeviceChoice::ALL.into_iter().filter(|choice| choice.is_built())
}

/// A device that runs, and what it is.
#[derive(Debug, Clone)]
pub struct OpenDevice {
    /// The device, without autodiff.
    pub device: Device,
    /// Which of the choices it is; never [`DeviceChoice::Auto`].
    pub choice: DeviceChoice,
    /// For people: the choice, the adapter, how it is reached.
    pub name: String,
    /// A GPU that a CPU imitates: it runs every kernel, but slower than [`DeviceChoice::Flex`].
    pub software: bool,
}

/// Opens the device, or says in one line why it cannot.
pub fn open(choice: DeviceChoice) -> Result<OpenDevice, DeviceError> {
    match choice {
        DeviceChoice::Auto => open_best(),
        _ if !choice.is_built() => Err(DeviceError::NotBuilt { choice }),
        _ => start(choice),
    }
}

/// Every device of this build that starts here, best first.
pub fn available() -> Vec<OpenDevice> {
    DeviceChoice::BEST_FIRST.into_iter().filter_map(|choice| open(choice).ok()).collect()
}

fn open_best() -> Result<OpenDevice, DeviceError> {
    let candidates = || DeviceChoice::BEST_FIRST.into_iter().filter(|choice| choice.is_built());
    let real = candidates().filter(|&choice| has_hardware(choice)).find_map(|choice| {
        let opened = start(choice).ok()?;
        (!opened.software).then_some(opened)
    });
    real.or_else(|| candidates().find_map(|choice| start(choice).ok())).ok_or_else(|| DeviceError::NotThere {
        choice: DeviceChoice::Auto,
        reason: format!("tried {}", names(candidates())),
    })
}

/// Whether trying `choice` can give more than a software adapter.
fn has_hardware(choice: DeviceChoice) -> bool {
    match choice {
        DeviceChoice::Auto => false,
        DeviceChoice::Flex => true,
        #[cfg(feature = "cube")]
        _ => cube::has_hardware(choice),
        #[cfg(not(feature = "cube"))]
        _ => false,
    }
}

fn start(choice: DeviceChoice) -> Result<OpenDevice, DeviceError> {
    match choice {
        #[cfg(feature = "flex")]
        DeviceChoice::Flex => {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            let name = format!("flex: CPU, {threads} threads");
            Ok(OpenDevice { device: Device::flex(), choice, name, software: false })
        }
        #[cfg(feature = "cube")]
        _ => cube::start(choice),
        #[cfg(not(feature = "cube"))]
        _ => Err(DeviceError::NotBuilt { choice }),
    }
}

#[cfg(feature = "cube")]
mod cube {
    use std::panic::{self, AssertUnwindSafe};
    use std::sync::{Arc, Mutex, PoisonError};

    use burn::tensor::Device;
    use cubecl::device::{DeviceUnavailable, WgpuBackend, WgpuDevice, WgpuDeviceKind};

    use super::{DeviceChoice, DeviceError, OpenDevice};

    /// The graphics APIs of wgpu in the order that it tries them; it takes the first with a GPU, else the first with
    /// any adapter.
    const GRAPHICS_APIS: [(WgpuBackend, &str); 5] = [
        (WgpuBackend::Metal, "Metal"),
        (WgpuBackend::Vulkan, "Vulkan"),
        (WgpuBackend::Dx12, "DirectX 12"),
        (WgpuBackend::Gl, "OpenGL"),
        (WgpuBackend::WebGpu, "WebGPU"),
    ];

    pub(super) fn start(choice: DeviceChoice) -> Result<OpenDevice, DeviceError> {
        let not_there = |reason: String| DeviceError::NotThere { choice, reason };
        quietly(|| {
            let device = find(choice).map_err(|missing| missing.to_string())?;
            let identity = device.client().properties().identity.clone();
            Ok((device, identity))
        })
        .and_then(|found| found)
        .map(|(device, identity)| {
            let software = api_of(choice).is_some() && identity.physical.is_none();
            let api = graphics_api(choice, software);
            let how = [api.unwrap_or(""), if software { "software" } else { "" }];
            let parts = [identity.name.as_str()].into_iter().chain(how).filter(|part| !part.is_empty());
            let name = format!("{choice}: {}", parts.collect::<Vec<_>>().join(", "));
            OpenDevice { device: Device::new(device), choice, name, software }
        })
        .map_err(not_there)
    }

    pub(super) fn has_hardware(choice: DeviceChoice) -> bool {
        let real = || match api_of(choice) {
            None => find(choice).is_ok(),
            // Asks the machine once, as drivers may write to the screen each time.
            Some(WgpuBackend::Auto) => cubecl::Device::enumerate_all().iter().any(is_gpu_of_wgpu),
            Some(api) => has_gpu(api),
        };
        quietly(real).unwrap_or(false)
    }

    fn find(choice: DeviceChoice) -> Result<cubecl::Device, DeviceUnavailable> {
        match (choice, api_of(choice)) {
            (_, Some(api)) => reach(WgpuDeviceKind::DefaultDevice, api),
            (DeviceChoice::Rocm, _) => cubecl::Device::rocm(0),
            _ => cubecl::Device::cuda(0),
        }
    }

    /// The graphics API that a choice pins, for the choices that are devices of wgpu.
    fn api_of(choice: DeviceChoice) -> Option<WgpuBackend> {
        match choice {
            DeviceChoice::Wgpu => Some(WgpuBackend::Auto),
            DeviceChoice::Metal => Some(WgpuBackend::Metal),
            DeviceChoice::Vulkan => Some(WgpuBackend::Vulkan),
            DeviceChoice::WebGpu => Some(WgpuBackend::WebGpu),
            _ => None,
        }
    }

    fn reach(kind: WgpuDeviceKind, api: WgpuBackend) -> Result<cubecl::Device, DeviceUnavailable> {
        cubecl::Device::Wgpu(WgpuDevice::new(kind)).on(api)
    }

    fn is_gpu_of_wgpu(device: &cubecl::Device) -> bool {
        matches!(device, cubecl::Device::Wgpu(device) if device.kind != WgpuDeviceKind::Cpu)
    }

    fn has_gpu(api: WgpuBackend) -> bool {
        use WgpuDeviceKind::{DiscreteGpu, IntegratedGpu, Other, VirtualGpu};
        [DiscreteGpu(0), IntegratedGpu(0), VirtualGpu(0), Other(0)].into_iter().any(|kind| reach(kind, api).is_ok())
    }

    /// The name of the graphics API that a device of wgpu came up on: a fallback from Vulkan to OpenGL is not silent.
    fn graphics_api(choice: DeviceChoice, software: bool) -> Option<&'static str> {
        let pinned = api_of(choice)?;
        let fits = |api: WgpuBackend| match pinned {
            WgpuBackend::Auto if software => reach(WgpuDeviceKind::DefaultDevice, api).is_ok(),
            WgpuBackend::Auto => has_gpu(api),
            _ => api == pinned,
        };
        GRAPHICS_APIS.into_iter().find(|(api, _)| fits(*api)).map(|(_, name)| name)
    }

    /// Runs `task`; a panic becomes the first line of the first panic's message, and nothing reaches the screen.
    fn quietly<R>(task: impl FnOnce() -> R) -> Result<R, String> {
        // The hook belongs to the whole process, and devices start on threads of their own: one at a time.
        static HOOK: Mutex<()> = Mutex::new(());
        let _one_at_a_time = HOOK.lock().unwrap_or_else(PoisonError::into_inner);

        let first = Arc::new(Mutex::new(None));
        let message = first.clone();
        let hook = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let text = info.payload_as_str().and_then(|text| text.lines().next()).unwrap_or("panic");
            message.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| text.to_owned());
        }));
        let result = panic::catch_unwind(AssertUnwindSafe(task));
        panic::set_hook(hook);
        result.map_err(|_| first.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for choice in DeviceChoice::ALL {
            assert_eq!(choice.name().parse(), Ok(choice));
        }
        let error = "tpu".parse::<DeviceChoice>().unwrap_err().to_string();
        assert!(error.contains("`tpu`") && error.contains("flex") && error.contains("webgpu"), "{error}");
    }

    #[test]
    fn auto_opens_something_that_is_built() {
        let opened = open(DeviceChoice::Auto).unwrap();
        assert_ne!(opened.choice, DeviceChoice::Auto);
        assert!(opened.choice.is_built());
        // A software adapter is the last resort.
        assert!(!opened.software || !DeviceChoice::Flex.is_built(), "{}", opened.name);
    }

    #[test]
    fn what_is_not_built_says_how_to_build_it() {
        for choice in DeviceChoice::ALL.into_iter().filter(|choice| !choice.is_built()) {
            let error = open(choice).unwrap_err().to_string();
            assert!(error.contains(&format!("--features {choice}")) && !error.contains('\n'), "{error}");
        }
    }
}
