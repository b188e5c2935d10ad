use std::collections::HashMap;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use cubecl::device::DeviceId;
use cubecl::dry_run::LaunchMode;
use cubecl::ir::{DeviceProperties, TargetProperties};
use cubecl::logging::ServerLogger;
use cubecl::prelude::*;
use cubecl::server::{
    BufferBinding, CopyDescriptor, IoError, KernelArguments, ProfileError, ProfilingToken, Server, ServerCommunication,
    ServerError, ServerStorage, ServerUtilities,
};
use cubecl::{CubeKernel, MemoryAllocationMode};
use cubecl_common::bytes::Bytes;
use cubecl_common::device::{DeviceService, ServerUtilitiesHandle, ServiceId};
use cubecl_common::profile::ProfileDuration;
use cubecl_core::environment::backtrace::BackTrace;
use cubecl_core::environment::future::DynFut;
use cubecl_core::environment::stream::StreamId;
use cubecl_runtime::memory_management::{ManagedMemoryHandle, ManagedMemoryId, StreamMemoryReport, WeakMemoryBinding};
use cubecl_runtime::storage::{ComputeStorage, ManagedResource, StorageHandle, StorageId};
use cubecl_server::allocator::ContiguousMemoryLayoutPolicy;

/// Buffers that are made before dead ones are looked for.
const SWEEP: usize = 64;

/// What becomes of memory and launches.
pub trait Machine: Debug + Send + 'static {
    type Memory: Memory;

    /// The device that it stands for.
    fn device(&self) -> DeviceProperties;

    /// Runs a kernel, or does what it does in place of that.
    ///
    /// # Errors
    /// If the kernel does not compile, or what it did is no more than luck.
    fn launch(&mut self, kernel: &dyn CubeKernel, arguments: Arguments<'_, Self::Memory>) -> Result<(), String>;
}

/// A buffer, of which nothing is written yet.
pub trait Memory: Send + 'static {
    fn new(bytes: u64) -> Self;
    fn read(&self, range: Range<u64>) -> Vec<u8>;
    fn write(&mut self, start: u64, bytes: &[u8]);
}

/// What a kernel is launched with.
pub struct Arguments<'a, M> {
    pub cubes: [u32; 3],
    /// Buffers in the order of the kernel, and the bytes of each that are the kernel's.
    pub buffers: Vec<(&'a M, Range<u64>)>,
    /// Scalars and static metadata, then from `dynamic` on the shapes and strides.
    pub info: &'a [u64],
    pub dynamic: usize,
}

/// A client of a device of its own, and what it is called. `index` tells devices of one kind of machine apart.
pub fn client<M: Machine>(machine: M, name: &'static str, index: u16) -> Client {
    let id = DeviceId::new(0, index);
    let policy = ContiguousMemoryLayoutPolicy::new(machine.device().memory.alignment as usize);
    let (utilities, _captures) = ServerUtilities::init(
        ServiceId::of::<Offline<M>>(id),
        name,
        machine.device(),
        TargetProperties::default(),
        Arc::new(ServerLogger::default()),
        policy,
    );
    Client::init(id, Offline { machine, utilities: Arc::new(utilities), buffers: HashMap::new(), sweep: SWEEP })
}

struct Offline<M: Machine> {
    machine: M,
    utilities: Arc<ServerUtilities>,
    buffers: HashMap<ManagedMemoryId, Buffer<M::Memory>>,
    /// How many buffers make it look for dead ones.
    sweep: usize,
}

struct Buffer<T> {
    memory: T,
    owner: WeakMemoryBinding,
    /// Why it was not written.
    failure: Option<String>,
}

impl<M: Machine> Debug for Offline<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Offline").field("machine", &self.machine).finish_non_exhaustive()
    }
}

impl<M: Machine> Offline<M> {
    fn check_all(&self, handles: &[BufferBinding]) -> Result<(), ServerError> {
        handles.iter().try_for_each(|handle| memory(&self.buffers, handle).map(|_| ())).map_err(|reason| error(&reason))
    }

    fn run(&mut self, kernel: &dyn CubeKernel, count: CubeCount, bindings: &KernelArguments) -> Result<(), String> {
        let CubeCount::Static(x, y, z) = count else {
            return Err("only a known count of cubes".into());
        };
        let mut buffers = Vec::new();
        for binding in bindings.buffers() {
            buffers.push((memory(&self.buffers, binding)?, range(binding)));
        }
        let info = &bindings.info;
        let arguments =
            Arguments { cubes: [x, y, z], buffers, info: &info.data, dynamic: info.dynamic_metadata_offset };
        self.machine.launch(kernel, arguments)
    }
}

/// The memory of a buffer; why it holds nothing.
fn memory<'a, T>(buffers: &'a HashMap<ManagedMemoryId, Buffer<T>>, binding: &BufferBinding) -> Result<&'a T, String> {
    match buffers.get(&binding.memory.id()) {
        Some(Buffer { failure: Some(reason), .. }) => Err(reason.clone()),
        Some(buffer) => Ok(&buffer.memory),
        None => Err("no such buffer".into()),
    }
}

fn error(reason: &str) -> ServerError {
    ServerError::Generic { reason: reason.into(), backtrace: BackTrace::capture() }
}

fn range(binding: &BufferBinding) -> Range<u64> {
    binding.offset_start.unwrap_or(0)..binding.size - binding.offset_end.unwrap_or(0)
}

impl<M: Machine> Server for Offline<M> {
    fn initialize_memory(&mut self, memory: ManagedMemoryHandle, size: u64, _: StreamId) -> Result<(), ServerError> {
        if self.buffers.len() >= self.sweep {
            self.buffers.retain(|_, buffer| buffer.owner.is_alive());
            self.sweep = 2 * self.buffers.len() + SWEEP;
        }
        let binding = memory.binding();
        let buffer = Buffer { memory: M::Memory::new(size), owner: binding.downgrade(), failure: None };
        self.buffers.insert(binding.id(), buffer);
        Ok(())
    }

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities> {
        self.utilities.clone()
    }

    fn read(&mut self, descriptors: Vec<CopyDescriptor>, _: StreamId) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        let read = |descriptor: CopyDescriptor| {
            let memory = memory(&self.buffers, &descriptor.handle).map_err(|reason| error(&reason))?;
            Ok(Bytes::from_bytes_vec(memory.read(range(&descriptor.handle))))
        };
        let read = descriptors.into_iter().map(read).collect();
        Box::pin(std::future::ready(read))
    }

    fn write(&mut self, descriptors: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {
        for (CopyDescriptor { handle, .. }, bytes) in descriptors {
            if let Some(buffer) = self.buffers.get_mut(&handle.memory.id()) {
                buffer.memory.write(range(&handle).start, &bytes);
                buffer.failure = None;
            }
        }
    }

    fn sync(&mut self, handles: Vec<BufferBinding>, _: StreamId) -> DynFut<Result<(), ServerError>> {
        Box::pin(std::future::ready(self.check_all(&handles)))
    }

    fn check(&mut self, handles: Vec<BufferBinding>, _: StreamId) -> Result<(), ServerError> {
        self.check_all(&handles)
    }

    unsafe fn launch(
        &mut self,
        kernel: Box<dyn CubeKernel>,
        count: CubeCount,
        bindings: KernelArguments,
        _: StreamId,
        mode: LaunchMode,
    ) {
        if mode == LaunchMode::Skip {
            return;
        }
        let name = kernel.id().short_name();
        let failure = self.run(&*kernel, count, &bindings).err();
        // A failure shows up where what the kernel should have written is read.
        if let Some(reason) = failure {
            for binding in bindings.buffers_written(None) {
                if let Some(buffer) = self.buffers.get_mut(&binding.memory.id()) {
                    buffer.failure = Some(format!("{name}: {reason}"));
                }
            }
        }
    }

    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_report(&mut self, _: StreamId) -> Option<StreamMemoryReport> {
        None
    }

    fn memory_cleanup(&mut self, _: StreamId) -> Result<(), ServerError> {
        self.buffers.retain(|_, buffer| buffer.owner.is_alive());
        Ok(())
    }

    fn start_profile(&mut self, _: StreamId) -> Result<ProfilingToken, ServerError> {
        Err(error("nothing is timed without a device"))
    }

    fn end_profile(&mut self, _: StreamId, _: ProfilingToken) -> Result<ProfileDuration, ProfileError> {
        Err(ProfileError::NotRegistered { backtrace: BackTrace::capture() })
    }

    fn allocation_mode(&mut self, _: MemoryAllocationMode, _: StreamId) {}
}

impl<M: Machine> ServerCommunication for Offline<M> {}

impl<M: Machine> DeviceService for Offline<M> {
    fn init(_: DeviceId) -> Self {
        unreachable!("`client` brings the machine")
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        Server::utilities(self)
    }
}

impl<M: Machine> ServerStorage for Offline<M> {
    type Storage = NoStorage;

    fn get_resource(&mut self, _: BufferBinding, _: StreamId) -> Result<ManagedResource<()>, ServerError> {
        Err(error("an offline device has no resources"))
    }
}

/// Buffers are the machine's.
struct NoStorage;

impl ComputeStorage for NoStorage {
    type Resource = ();

    fn alignment(&self) -> usize {
        1
    }

    fn get(&mut self, _: &StorageHandle) -> Result<(), IoError> {
        Err(IoError::UnsupportedIoOperation { backtrace: BackTrace::capture() })
    }

    fn alloc(&mut self, _: u64) -> Result<StorageHandle, IoError> {
        Err(IoError::UnsupportedIoOperation { backtrace: BackTrace::capture() })
    }

    fn dealloc(&mut self, _: StorageId) {}

    fn flush(&mut self) {}

    fn bytes_allocated(&self) -> u64 {
        0
    }
}
