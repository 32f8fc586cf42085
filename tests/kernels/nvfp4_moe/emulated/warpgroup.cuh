// Products of four warps, on a CPU. Found instead of the kernels' own header of this name.
#pragma once
#include "device.cuh"

#define NVFP4_WARPGROUP

namespace nvfp4 {

struct TokenBlocks {
    const unsigned char* start;
    int k_stride;
};
inline TokenBlocks describe_tokens(const void* shared, int k_stride) {
    return {static_cast<const unsigned char*>(shared), k_stride};
}

inline void fence_registers() {}
inline void publish_to_products() {}
inline void pin(float&) {}
inline void pin(uint32_t&) {}
inline void commit_products() { emulated::self().products.commit(); }
template <int Pending>
void wait_for_products() {
    emulated::self().products.wait(Pending);
}

// PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16": each warp has 16 rows, as in mma.m16n8k16. B, no swizzling: blocks
// of 8 tokens by 16 bytes, those of the second 8 slots k_stride further, those of the next 8 tokens 128 bytes.
template <int Tiles>
void multiply_rows(float (&c)[Tiles][4], Word4 a, TokenBlocks b, int at) {
    const auto product = [&c, a, b, at] {
        for (int tile = 0; tile < Tiles; ++tile) {
            const unsigned char* row = b.start + at * 16 + tile * 128 + threadIdx.x % 32 * 4;
            uint32_t first, second;
            std::memcpy(&first, row, 4), std::memcpy(&second, row + b.k_stride, 4);
            mma(c[tile], a, first, second);
        }
    };
    emulated::self().products.open.push_back(product);
}

}  // namespace nvfp4
