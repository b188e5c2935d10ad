// What the source of a CUDA kernel sees on a host. NVIDIA's own headers give the half types; the rest is here.
//
// One fibre is one thread. `shim.cpp` runs the fibres of a block one at a time, in a random order, each up to where it
// waits for others.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace shim {

// The thread whose fibre runs.
struct Thread {
    uint3 index;
    uint3 block;
};

extern __thread Thread *current;
extern __thread dim3 block_size;
extern __thread dim3 grid_size;

// All threads of the block, at the same place of the source.
void barrier(int place);
// All threads of the warp that have not returned, at the same place: what the thread in `lane` brings, NaN of one that
// has returned.
uint64_t exchange(int place, uint64_t value, unsigned lane);
unsigned active();

inline unsigned lane() {
    return (current->index.x + block_size.x * (current->index.y + block_size.y * current->index.z)) % 32;
}

template <typename T> T shuffle(int place, T value, unsigned lane) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = exchange(place, bits, lane);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

// Arguments come as `cuLaunchKernel` takes them: the address of each.
template <typename... P, size_t... I>
void call(void (*kernel)(P...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<P> *>(arguments[I])...);
}

template <typename... P> void call(void (*kernel)(P...), void **arguments) {
    call(kernel, arguments, std::index_sequence_for<P...>());
}

} // namespace shim

#define threadIdx (shim::current->index)
#define blockIdx (shim::current->block)
#define blockDim (shim::block_size)
#define gridDim (shim::grid_size)
#define warpSize 32

#define __syncthreads() shim::barrier(__COUNTER__)
#define __syncwarp() shim::exchange(__COUNTER__, 0, 0)
#define __activemask() shim::active()
#define __shfl_sync(mask, value, from) shim::shuffle(__COUNTER__, value, from)
#define __shfl_xor_sync(mask, value, bits) shim::shuffle(__COUNTER__, value, shim::lane() ^ (bits))
#define __shfl_up_sync(mask, value, delta) shim::shuffle(__COUNTER__, value, shim::lane() - (delta))
#define __shfl_down_sync(mask, value, delta) shim::shuffle(__COUNTER__, value, shim::lane() + (delta))

#undef __shared__
#define __shared__ __thread
#undef __launch_bounds__
#define __launch_bounds__(...)
#define __grid_constant__

// CUDA's are overloaded for its numbers.
template <typename T> T max(T a, T b) {
    return a > b ? a : b;
}
template <typename T> T min(T a, T b) {
    return a < b ? a : b;
}
inline float max(float a, float b) {
    return fmaxf(a, b);
}
inline float min(float a, float b) {
    return fminf(a, b);
}
inline float rsqrt(float x) {
    return 1.0f / sqrtf(x);
}

// The source defines these itself, for a device on which they are other types.
#define int64_t kernel_int64_t
#define uint64_t kernel_uint64_t

// What goes behind the source of a kernel. Past its shared memory lie bytes that nobody writes.
#define SHIM_KERNEL(NAME)                                                                                              \
    extern "C" void shim_call(void **arguments) {                                                                     \
        shim::call(NAME, arguments);                                                                                  \
    }
#define SHIM_SHARED(NAME, BYTES)                                                                                       \
    __thread __align__(128) char NAME[(BYTES) + 64];                                                                  \
    extern "C" char *shim_shared() {                                                                                  \
        return NAME;                                                                                                  \
    }
