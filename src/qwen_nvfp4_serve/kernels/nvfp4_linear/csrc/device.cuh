// What every kernel over NVFP4 weights does with the machine: loads, the MMA, and the launch ahead and behind.
#pragma once
#include "layout.cuh"

namespace nvfp4 {

__device__ __forceinline__ Word4 load_weights(const uint8_t* p) {
    Word4 w;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.v[0]), "=r"(w.v[1]), "=r"(w.v[2]), "=r"(w.v[3]) : "l"(p));
    return w;
}

// Weights whose lines are read in more than one request: they stay in the first cache, or are the first to leave it.
__device__ __forceinline__ Word4 load_weights_kept(const uint8_t* p) {
    Word4 w;
    asm volatile("ld.global.nc.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.v[0]), "=r"(w.v[1]), "=r"(w.v[2]), "=r"(w.v[3]) : "l"(p));
    return w;
}
__device__ __forceinline__ Word4 load_weights_passing(const uint8_t* p) {
    Word4 w;
    asm volatile("ld.global.nc.L1::evict_first.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.v[0]), "=r"(w.v[1]), "=r"(w.v[2]), "=r"(w.v[3]) : "l"(p));
    return w;
}

// What the kernel ahead may have written: only after waiting for it. Kept in the first cache, as every warp reads it.
__device__ __forceinline__ Word4 load_activations(const uint8_t* p) {
    Word4 w;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.v[0]), "=r"(w.v[1]), "=r"(w.v[2]), "=r"(w.v[3]) : "l"(p) : "memory");
    return w;
}

__device__ __forceinline__ void mma(float (&c)[4], Word4 a, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void copy_async(void* shared, const void* global) {
    const unsigned address = unsigned(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}

// The same for weights: what follows within 128 bytes is fetched too.
__device__ __forceinline__ void copy_weights_async(void* shared, const void* global) {
    const unsigned address = unsigned(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most Pending groups of this thread's copies are under way.
template <int Pending>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Programmatic dependent launch: wait for the kernel before us, or let the one after us start. Nothing before sm_90.
__device__ __forceinline__ void wait_for_producer() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void release_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Words that other CTAs of this launch may be writing. Neighbours may come in any order, so each has to tell by itself whether
// it has been written.
__device__ __forceinline__ Word4 read_words(const uint32_t* p) {
    Word4 w;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.v[0]), "=r"(w.v[1]), "=r"(w.v[2]), "=r"(w.v[3]) : "l"(p) : "memory");
    return w;
}
__device__ __forceinline__ void write_word(uint32_t* p, uint32_t value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// Adds one to a counter; what this thread and those it has met at a barrier wrote before is seen by who reads the sum.
__device__ __forceinline__ unsigned arrive(unsigned* counter) {
    unsigned before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// The same where nobody asks for the sum, and its other side: what was written before is seen once the sum is.
__device__ __forceinline__ void count_release(unsigned* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ unsigned read_acquire(const unsigned* counter) {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

// Keeps what is computed from a value out of loops around this place.
__device__ __forceinline__ void keep_here(uint32_t& value) { asm volatile("" : "+r"(value)); }

// The shared memory that a launch asked for.
__device__ __forceinline__ void* dynamic_shared() {
    extern __shared__ __align__(128) uint4 dynamic[];
    return dynamic;
}

}  // namespace nvfp4
