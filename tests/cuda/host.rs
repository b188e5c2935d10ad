use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::fmt::Debug;
use std::ops::Range;
use std::sync::OnceLock;

use cubecl::CubeKernel;
use cubecl::ir::DeviceProperties;
use cubecl::prelude::KernelId;
use libloading::Library;

use super::offline::{Arguments, Language, Machine, Memory, Source, hopper};
use super::toolkit::Toolkit;

/// A machine that runs kernels in fibres.
pub struct Host {
    toolkit: Toolkit,
    edit: fn(&str) -> String,
    kernels: HashMap<KernelId, Kernel>,
    /// Of the orders in which blocks and threads run.
    launches: u64,
}

/// A kernel as a shared object, which stays.
struct Kernel {
    call: unsafe extern "C" fn(*mut *mut c_void),
    shared: Option<unsafe extern "C" fn() -> *mut c_char>,
    source: Source,
}

type Allocate = unsafe extern "C" fn(usize) -> *mut u8;
type Free = unsafe extern "C" fn(*mut u8, usize);
type Run = unsafe extern "C" fn(
    unsafe extern "C" fn(*mut *mut c_void),
    *mut *mut c_void,
    *const u32,
    *const u32,
    *mut c_char,
    usize,
    u64,
) -> *const c_char;

/// The functions of the shim.
struct Shim {
    allocate: Allocate,
    free: Free,
    run: Run,
}

static SHIM: OnceLock<Shim> = OnceLock::new();

fn shim() -> &'static Shim {
    SHIM.get().expect("a host loads it first")
}

impl Host {
    /// `edit`: of every source, to see what comes of it.
    pub fn new(toolkit: Toolkit, edit: fn(&str) -> String) -> Self {
        SHIM.get_or_init(|| {
            let library = open(&toolkit.shim()).expect("the shim was just linked");
            // SAFETY: these are the functions and types of `shim.cpp`.
            unsafe {
                Shim {
                    allocate: *library.get::<Allocate>(b"shim_allocate").expect("of the shim"),
                    free: *library.get::<Free>(b"shim_free").expect("of the shim"),
                    run: *library.get::<Run>(b"shim_run").expect("of the shim"),
                }
            }
        });
        Self { toolkit, edit, kernels: HashMap::new(), launches: 0 }
    }

    fn kernel(&mut self, kernel: &dyn CubeKernel) -> Result<&Kernel, String> {
        let id = kernel.id();
        if !self.kernels.contains_key(&id) {
            let source = Source::compile(Language::Cuda, kernel, &self.device())?;
            let mut text = format!("{}\nSHIM_KERNEL({})\n", (self.edit)(&source.text), source.entry);
            let shared = shared_memory(&source.text);
            if let Some(name) = shared {
                text += &format!("SHIM_SHARED({name}, {})\n", source.shared_bytes);
            }
            let library = open(&self.toolkit.build(&text)?)?;
            // SAFETY: `SHIM_KERNEL` and `SHIM_SHARED` define these.
            let kernel = unsafe {
                Kernel {
                    call: *library.get(b"shim_call").map_err(|error| error.to_string())?,
                    shared: shared.map(|_| *library.get(b"shim_shared").expect("just compiled")),
                    source,
                }
            };
            self.kernels.insert(id.clone(), kernel);
        }
        Ok(&self.kernels[&id])
    }
}

/// Opens a library for the rest of the process: threads that run kernels have memory of theirs in it.
fn open(path: &std::path::Path) -> Result<&'static Library, String> {
    // SAFETY: the libraries of the tests run nothing when they are loaded.
    let library = unsafe { Library::new(path) }.map_err(|error| error.to_string())?;
    Ok(Box::leak(Box::new(library)))
}

/// The name of a kernel's shared memory: `extern __shared__ __align__(16) char NAME[];`.
fn shared_memory(source: &str) -> Option<&str> {
    let (_, declared) = source.split_once("extern __shared__ ")?;
    let (declared, _) = declared.split_once("[]")?;
    declared.rsplit(' ').next()
}

impl Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Host")
    }
}

impl Machine for Host {
    type Memory = HostMemory;

    fn device(&self) -> DeviceProperties {
        hopper()
    }

    fn launch(&mut self, kernel: &dyn CubeKernel, arguments: Arguments<'_, HostMemory>) -> Result<(), String> {
        self.launches += 1;
        let seed = self.launches;
        let Kernel { call, shared, source } = self.kernel(kernel)?;
        let Arguments { cubes, buffers, info, dynamic } = arguments;
        // The address of each argument: buffers, shapes and strides if there are any, and by value scalars and sizes.
        // SAFETY: offsets are within the buffers.
        let mut pointers: Vec<*const u8> = buffers
            .iter()
            .map(|(memory, range)| unsafe { memory.start.add(range.start as usize) }.cast_const())
            .collect();
        if dynamic < info.len() {
            pointers.push(info[dynamic..].as_ptr().cast());
        }
        let mut addresses: Vec<*mut c_void> =
            pointers.iter().map(|pointer| std::ptr::from_ref(pointer).cast_mut().cast()).collect();
        addresses.push(info.as_ptr().cast_mut().cast());
        // SAFETY: the arguments are those that the kernel was compiled for; the shim catches what goes past them.
        let message = unsafe {
            let shared = shared.map_or(std::ptr::null_mut(), |shared| shared());
            let (cubes, units) = (cubes.as_ptr(), source.units.as_ptr());
            (shim().run)(*call, addresses.as_mut_ptr(), cubes, units, shared, source.shared_bytes, seed)
        };
        if !message.is_null() {
            // SAFETY: the shim gives a string that stays until its next run on this thread.
            return Err(unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned());
        }
        match buffers.iter().position(|(memory, range)| !memory.is_poison(range.end)) {
            Some(index) => Err(format!("wrote past the end of buffer {index}")),
            None => Ok(()),
        }
    }
}

/// A buffer between two pages of nobody. What is not written is NaN in every type.
pub struct HostMemory {
    start: *mut u8,
    length: usize,
}

// SAFETY: nobody else has the pointer.
unsafe impl Send for HostMemory {}

impl HostMemory {
    fn bytes(&self) -> &[u8] {
        // SAFETY: `start` and `length` are of one allocation.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }

    /// Whether nothing was written from `start` on.
    fn is_poison(&self, start: u64) -> bool {
        self.bytes()[start as usize..].iter().all(|&byte| byte == u8::MAX)
    }
}

impl Memory for HostMemory {
    fn new(bytes: u64) -> Self {
        // Vectors of any width are aligned to their size, 32 bytes at most.
        let length = (bytes as usize).next_multiple_of(64);
        // SAFETY: the shim gives as many bytes.
        let start = unsafe { (shim().allocate)(length) };
        assert!(!start.is_null(), "no memory for {length} bytes");
        // SAFETY: as above.
        unsafe { start.write_bytes(u8::MAX, length) };
        Self { start, length }
    }

    fn read(&self, range: Range<u64>) -> Vec<u8> {
        self.bytes()[range.start as usize..range.end as usize].to_vec()
    }

    fn write(&mut self, start: u64, bytes: &[u8]) {
        let start = start as usize;
        assert!(start + bytes.len() <= self.length);
        // SAFETY: the bytes are within the allocation.
        unsafe { self.start.add(start).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this length.
        unsafe { (shim().free)(self.start, self.length) };
    }
}
