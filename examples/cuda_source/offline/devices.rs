use cubecl::features::{Plane, TypeUsage};
use cubecl::ir::{
    AddressType, DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties, MemoryDeviceProperties,
    VectorSize,
};
use cubecl_common::profile::TimingMethod;

/// What CubeCL's CUDA runtime says of an H100 (SXM), as far as kernels ask.
pub fn hopper() -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: 227 << 10,
        max_cube_count: (i32::MAX as u32, 65_535, 65_535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(132),
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let mut properties = device("NVIDIA H100, offline", hardware);
    cubecl_cpp::register_supported_types(&mut properties);
    properties.features.memory_reinterpret = true;
    properties.features.alignment = true;
    properties.features.device_memory_scope = true;
    for feature in [Plane::Ops, Plane::Sync, Plane::NonUniformControlFlow] {
        properties.features.plane.insert(feature);
    }
    properties
}

/// A GPU that browsers reach: the limits that WebGPU promises, half precision, and planes of no fixed size.
pub fn webgpu() -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 4,
        plane_size_max: 128,
        max_bindings: 31,
        max_shared_memory_size: 16 << 10,
        max_cube_count: (65_535, 65_535, 65_535),
        max_units_per_cube: 256,
        max_cube_dim: (256, 256, 64),
        num_streaming_multiprocessors: None,
        num_tensor_cores: None,
        min_tensor_cores_dim: None,
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: 4,
        cube_mma_reserved_shared_memory: 0,
    };
    let mut properties = device("WebGPU, offline", hardware);
    properties.register_address_type(AddressType::U32);
    let numbers = [
        ElemType::Index,
        ElemType::UInt(cubecl::ir::UIntKind::U32),
        ElemType::Int(cubecl::ir::IntKind::I32),
        ElemType::Float(FloatKind::F32),
        ElemType::Float(FloatKind::F16),
        ElemType::Bool,
    ];
    for number in numbers {
        properties.register_type_usage(number, TypeUsage::all());
    }
    properties
}

fn device(name: &str, hardware: HardwareProperties) -> DeviceProperties {
    let identity = DeviceIdentity { name: name.into(), fingerprint: name.into(), physical: None };
    // Larger than any buffer that is asked for. Devices align to more bytes, in which nobody would see a stray access.
    let memory = MemoryDeviceProperties::new(u64::MAX / 2, 16);
    DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::System, identity)
}
