// How weights, scales and activations meet in the MMA registers. Host and device: a CPU test runs these same functions.
//
// One warp step is 4096 weights: 32 / P rows by 128 P columns, P = 1 or 2 parts. With g = lane / 4 and t = lane % 4, a lane
// owns, in each of 4 rows, 32 columns of part g % P: one 16-byte load, two scale blocks. Two parts make a row's share of
// a step 128 bytes, a whole cache line. The MMA then multiplies every part of the weights with every part of the
// activations, in different accumulators: those of unequal parts are dropped, so 8 columns of B hold 8 / P tokens.
// mma.m16n8k16 sums over 16 slots; lane t supplies slots {2t, 2t+1} (first register of a pair) and {2t+8, 2t+9} (second)
// of both operands, so any column may sit in any slot as long as weights and activations agree. Both use the order that
// decoding makes cheap: register i of an 8-column word holds columns (i, i + 4).
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define NVFP4_HD __host__ __device__ __forceinline__
#define NVFP4_UNROLL _Pragma("unroll")
#else
#define NVFP4_HD inline
#define NVFP4_UNROLL
#endif

namespace nvfp4 {

constexpr int kPartColumns = 128;   // columns of one part of a warp step
constexpr int kLaneColumns = 32;    // consecutive columns of one lane
constexpr int kWarpRows = 32;       // rows of one warp if P = 1: 8 in each quarter of a 128-row scale tile
constexpr int kTileRows = 128;      // rows of a scale tile
constexpr int kTileBytes = 512;     // bytes of a scale tile: 128 rows x 4 blocks
constexpr float kUnscale = 256.0f;  // decode() * scale_pair() is the weight times 2^-8

struct Word4 {
    uint32_t v[4];
};

// Row of lane group g's quarter q, for the matrix' w-th warp. Rows 32 apart share 16 scale bytes in the 128x4 order.
template <int P>
NVFP4_HD int row_of(int w, int g, int q) {
    return w / (4 * P) * kTileRows + q * 32 + w % (4 * P) * (8 / P) + g / P;
}

// First of the lane's 32 columns, within the step. The same for its weights and for the activations it loads.
template <int P>
NVFP4_HD int column_of(int g, int t) {
    return g % P * kPartColumns + t * kLaneColumns;
}

// Byte of the scale buffer with 4 words, one per quarter, of 4 blocks each; lane t needs blocks 2 (t % 2) and the next.
template <int P>
NVFP4_HD int64_t scale_offset(int w, int64_t group_tiles, int step, int g, int t) {
    const int64_t tile = w / (4 * P) * group_tiles + step * 2 * P + column_of<P>(g, t) / 64;
    return tile * kTileBytes + (w % (4 * P) * (8 / P) + g / P) * 16;
}

NVFP4_HD uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDA_ARCH__)
    return __byte_perm(a, b, selector);
#else
    const uint64_t both = (uint64_t(b) << 32) | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) result |= uint32_t((both >> (((selector >> (4 * i)) & 7) * 8)) & 0xff) << (8 * i);
    return result;
#endif
}

// Two bf16 products. Exact wherever the kernel uses it: at most 6 significant bits, inside bf16's range.
NVFP4_HD uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    uint32_t result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000u));
    return result;
#else
    uint32_t result = 0;
    for (int half = 0; half < 2; ++half) {
        const uint32_t a_bits = (a >> (16 * half)) << 16, b_bits = (b >> (16 * half)) << 16;
        float x, y;
        std::memcpy(&x, &a_bits, 4), std::memcpy(&y, &b_bits, 4);
        const float product = float(double(x) * double(y));
        uint32_t bits;
        std::memcpy(&bits, &product, 4);
        result |= (bits >> 16) << (16 * half);
    }
    return result;
#endif
}

// Eight E2M1 codes (column 0 in the low nibble) as bf16 pairs times 2^-126: register i holds columns (i, i + 4).
// Sign goes to bit 15, exponent and mantissa to bits 8..6; the subnormal code 0.5 becomes bf16's own subnormal.
NVFP4_HD Word4 decode(uint32_t codes) {
    constexpr uint32_t low = 0x000F000Fu, high = 0x00F000F0u, kept = 0x81C081C0u;
    const uint32_t upper = codes >> 8;
    // One product makes both shifts of a nibble: 12 and 6 for a low one, 8 and 2 for a high one. The copies do not meet.
    return {{((codes & low) * 0x1040u) & kept, ((codes & high) * 0x0104u) & kept, ((upper & low) * 0x1040u) & kept,
             ((upper & high) * 0x0104u) & kept}};
}

// Selector that takes lane t's two scale bytes out of a word of four blocks, each to the low byte of a half.
NVFP4_HD uint32_t scale_selector(int t) { return t % 2 ? 0x4342u : 0x4140u; }

// Two E4M3 scales as bf16 times 2^118. E4M3 bits shifted to bf16's place read as the scale times 2^-120, subnormals
// included; 2^238 is beyond one bf16 factor, hence 2^119 twice.
NVFP4_HD uint32_t scale_pair(uint32_t word, uint32_t selector) {
    const uint32_t raw = byte_permute(word, 0, selector) << 4;
    return multiply_bf16x2(multiply_bf16x2(raw, 0x7B007B00u), 0x7B007B00u);
}

// Scale `block` (0: the lane's columns 0..15, 1: its columns 16..31) in both halves.
NVFP4_HD uint32_t spread(uint32_t pair, int block) {
#if defined(__CUDA_ARCH__)
    uint32_t result;  // as a move of halves, which the compiler turns into an operand selector of the product
    if (block) {
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(result) : "r"(pair));
    } else {
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(result) : "r"(pair));
    }
    return result;
#else
    return byte_permute(pair, 0, block ? 0x3232u : 0x1010u);
#endif
}

// Eight consecutive bf16 activations in decode()'s order: register i holds columns (i, i + 4).
NVFP4_HD Word4 permute_activations(Word4 x) {
    return {{byte_permute(x.v[0], x.v[2], 0x5410u), byte_permute(x.v[0], x.v[2], 0x7632u),
             byte_permute(x.v[1], x.v[3], 0x5410u), byte_permute(x.v[1], x.v[3], 0x7632u)}};
}

// One word (8 columns) of one of the lane's rows: weights times 2^-8.
NVFP4_HD Word4 decode_quarter(uint32_t codes, uint32_t scale, int word) {
    Word4 a = decode(codes);
    const uint32_t s = spread(scale, word / 2);
NVFP4_UNROLL
    for (int i = 0; i < 4; ++i) a.v[i] = multiply_bf16x2(a.v[i], s);
    return a;
}

// The A operand of one word (8 columns) of the lane's 4 rows: weights times 2^-8.
NVFP4_HD void decode_word(const Word4 (&weights)[4], const uint32_t (&scale)[4], int word, Word4 (&a)[4]) {
NVFP4_UNROLL
    for (int q = 0; q < 4; ++q) a[q] = decode_quarter(weights[q].v[word], scale[q], word);
}

// Registers of one m16n8k16: row half h takes quarters 2h (rows g) and 2h + 1 (rows g + 8); pass p the word's columns
// {2p, 2p + 4} (slots 2t, 2t + 1) and {2p + 1, 2p + 5} (slots 2t + 8, 2t + 9). B is registers 2p and 2p + 1 of the chunk.
NVFP4_HD Word4 mma_weights(const Word4 (&a)[4], int h, int p) {
    return {{a[2 * h].v[2 * p], a[2 * h + 1].v[2 * p], a[2 * h].v[2 * p + 1], a[2 * h + 1].v[2 * p + 1]}};
}

// Eight consecutive columns out of decode()'s order.
NVFP4_HD Word4 restore_order(Word4 w) {
    return {{byte_permute(w.v[0], w.v[1], 0x5410u), byte_permute(w.v[2], w.v[3], 0x5410u),
             byte_permute(w.v[0], w.v[1], 0x7632u), byte_permute(w.v[2], w.v[3], 0x7632u)}};
}

}  // namespace nvfp4
