// An octet of an expert's rows, as one warp loads and multiplies it a step at a time.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "device.cuh"
#include "layout.cuh"
#include "plan.cuh"

namespace nvfp4 {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;

// Weights and scales of one step of an octet, as one lane holds them.
struct Octet {
    Word4 weights[4];
    Word4 scales;
};

// Where a lane finds its part of a step, in bytes from the start of an expert's matrix of k columns and of its scales.
// Known before the expert is, so that little is left to do between its election and the first request.
struct Place {
    int weights, scales, column;

    // Has this worked out here, not where it is used.
    __device__ __forceinline__ void keep() {
        uint32_t kept[3] = {uint32_t(weights), uint32_t(scales), uint32_t(column)};
#pragma unroll
        for (int i = 0; i < 3; ++i) keep_here(kept[i]);
        weights = int(kept[0]), scales = int(kept[1]), column = int(kept[2]);
    }

    __device__ __forceinline__ Place(int octet, int step, int k) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        column = lane_column(step, g, t);
        weights = (row_of<kParts>(octet, g, 0) * k + column) / 2;
        scales = int(scale_offset<kParts>(octet, (k + 63) / 64, step, g, t));
    }

    // Octets further on in the same scale tile, two rows of each quarter apart; and steps further on in the rows.
    __device__ __forceinline__ Place moved(int octets, int steps, int k) const {
        Place place = *this;
        place.weights += octets * k + steps * (kStepColumns / 2);
        place.scales += octets * (2 * 16) + steps * (2 * kParts * kTileBytes);
        place.column += steps * kStepColumns;
        return place;
    }
};

__device__ __forceinline__ void load_octet(Octet& o, const uint8_t* packed, const uint8_t* scales, Place place, int k) {
    if (place.column < k) {  // past k there is nothing to load
#pragma unroll
        for (int q = 0; q < 4; ++q) o.weights[q] = load_weights(packed + (place.weights + q * (32 * k / 2)));
        o.scales = load_weights(scales + place.scales);
    } else {
#pragma unroll
        for (int q = 0; q < 4; ++q) o.weights[q] = {};
        o.scales = {};
    }
}

// A lane's 32 activations of a step in decode()'s order; zeros if `row` is null or past k. Read where every
// multiprocessor sees what another has just written.
__device__ __forceinline__ void load_activations(Word4 (&x)[4], const __nv_bfloat16* row, int step, int k) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, column = lane_column(step, g, t);
    if (row && column < k) {
        const uint4* from = reinterpret_cast<const uint4*>(row + column);
        uint4 raw[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) raw[i] = __ldcg(from + i);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = permute_activations({{raw[i].x, raw[i].y, raw[i].z, raw[i].w}});
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = {};
    }
}

// The sums of a tile over this step: each lane where parts meet gets the one of lane_value().
__device__ __forceinline__ float multiply(Octet o, const Word4 (&x)[4]) {
    // Else the compiler decodes once for all tiles and holds four times the registers; most experts have one tile.
#pragma unroll
    for (int i = 0; i < 16; ++i) keep_here(o.weights[i / 4].v[i % 4]);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint32_t selector = scale_selector(t);
    uint32_t scale[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) scale[q] = scale_pair(o.scales.v[q], selector);
    float acc[2][4] = {};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        Word4 a[4];
        decode_word(o.weights, scale, word, a);
#pragma unroll
        for (int pass = 0; pass < 2; ++pass) {
            mma(acc[0], mma_weights(a, 0, pass), x[word].v[2 * pass], x[word].v[2 * pass + 1]);
            mma(acc[1], mma_weights(a, 1, pass), x[word].v[2 * pass], x[word].v[2 * pass + 1]);
        }
    }
    Halves low = halves(g % 2, met_value(acc, g, 0), met_value(acc, g, 1));
    Halves high = halves(g % 2, met_value(acc, g, 2), met_value(acc, g, 3));
    low.keep += __shfl_xor_sync(kAllLanes, low.send, kFirstExchange);
    high.keep += __shfl_xor_sync(kAllLanes, high.send, kFirstExchange);
    const Halves last = halves(g / 2 % 2, low.keep, high.keep);
    return last.keep + __shfl_xor_sync(kAllLanes, last.send, kSecondExchange);
}

}  // namespace
}  // namespace nvfp4
