// sm_90's MMA of four warps: 64 rows of A from registers, laid out as four m16n8k16 side by side, and B from shared memory.
#pragma once
#include "layout.cuh"

namespace nvfp4 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define NVFP4_WARPGROUP

// B as blocks of 8 tokens x 8 slots, 128 consecutive bytes each, a token's 8 slots together.
struct TokenBlocks {
    uint32_t low, high;
};

// k_stride: bytes from the blocks of a k16's first 8 slots to those of its second 8. Blocks of further tokens are adjacent.
__device__ __forceinline__ TokenBlocks describe_tokens(const void* shared, int k_stride) {
    const uint32_t address = uint32_t(__cvta_generic_to_shared(shared));
    return {(address & 0x3ffff) >> 4 | uint32_t(k_stride / 16) << 16, 128 / 16};
}

// Registers that were written before may be used after.
__device__ __forceinline__ void fence_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most Pending groups of products are under way: the older ones' registers are free again.
template <int Pending>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// What this thread stored to shared memory becomes visible to products that start after a barrier.
__device__ __forceinline__ void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Pins registers here: what writes them stays before, what reads them stays behind.
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)::"memory"); }
__device__ __forceinline__ void pin(uint32_t& value) { asm volatile("" : "+r"(value)::"memory"); }

#define NVFP4_C(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define NVFP4_C2(i) NVFP4_C(i), NVFP4_C(i + 1)
#define NVFP4_C4(i) NVFP4_C2(i), NVFP4_C2(i + 2)
#define NVFP4_C8(i) NVFP4_C4(i), NVFP4_C4(i + 4)
#define NVFP4_WGMMA(tokens, sums, a0, a1, a2, a3, b0, ...)                                                        \
    asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" tokens                   \
                 "k16.f32.bf16.bf16 {" sums "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b0 ", p, 1, 1, 0;}"        \
                 : __VA_ARGS__ : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "l"(tokens_at))
#define NVFP4_SUMS8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NVFP4_SUMS12 NVFP4_SUMS8 ", %8, %9, %10, %11"
#define NVFP4_SUMS16 NVFP4_SUMS12 ", %12, %13, %14, %15"
#define NVFP4_SUMS24 NVFP4_SUMS16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NVFP4_SUMS32 NVFP4_SUMS24 ", %24, %25, %26, %27, %28, %29, %30, %31"

// c += a b for this thread's share of 64 rows and Tiles times 8 tokens. Runs on until it is waited for. at: where the k16
// begins, in 16 bytes from the start of `b`.
template <int Tiles>
__device__ __forceinline__ void multiply_rows(float (&c)[Tiles][4], Word4 a, TokenBlocks b, int at) {
    const uint64_t tokens_at = uint64_t(b.high) << 32 | (b.low + at);
    static_assert(Tiles == 3 || Tiles == 4 || Tiles == 6 || Tiles == 8);
    if constexpr (Tiles == 3) NVFP4_WGMMA("24", NVFP4_SUMS12, "12", "13", "14", "15", "16", NVFP4_C2(0), NVFP4_C(2));
    if constexpr (Tiles == 4) NVFP4_WGMMA("32", NVFP4_SUMS16, "16", "17", "18", "19", "20", NVFP4_C4(0));
    if constexpr (Tiles == 6) NVFP4_WGMMA("48", NVFP4_SUMS24, "24", "25", "26", "27", "28", NVFP4_C4(0), NVFP4_C2(4));
    if constexpr (Tiles == 8) NVFP4_WGMMA("64", NVFP4_SUMS32, "32", "33", "34", "35", "36", NVFP4_C8(0));
}

#undef NVFP4_C
#undef NVFP4_C2
#undef NVFP4_C4
#undef NVFP4_C8
#undef NVFP4_WGMMA
#undef NVFP4_SUMS8
#undef NVFP4_SUMS12
#undef NVFP4_SUMS16
#undef NVFP4_SUMS24
#undef NVFP4_SUMS32

#endif

}  // namespace nvfp4
