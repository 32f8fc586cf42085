// What the linear kernels share: the call, where a lane reads its weights, and how the sums of a row block leave a CTA.
#pragma once
#include <cuda_bf16.h>

#include "device.cuh"
#include "layout.cuh"

namespace nvfp4 {
namespace {

constexpr int kPartWords = 16;  // of 16 bytes, that a thread asks for together when it adds parts

struct Params {
    const uint8_t* packed;
    const uint8_t* scales;
    const float* row_scale;
    const __nv_bfloat16* bias;
    const __nv_bfloat16* x;
    __nv_bfloat16* y;
    float* parts;        // a slot for each CTA
    unsigned* counters;  // one for each of its warps, all 0
    int m, n, k;
    int64_t x_stride, y_stride;
    int steps;        // per row block
    int total;        // row blocks * steps
    int group_tiles;  // scale tiles along K
    int last_warp;    // of those that share the rows
};

// A warp's weights and scales of one step.
struct Fragment {
    Word4 weights[4];
    Word4 scales;
};

// Where a lane reads its weights and scales: two addresses that all lanes share, and how far from them its own bytes are.
template <class S>
struct WeightCursor {
    const uint8_t *weights, *scales;
    uint32_t row[4], scale;
    static_assert(S::warps % (4 * S::parts) == 0, "a row block begins with a tile of scales");

    __device__ void seek(const Params& p, int block, int step) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        weights = p.packed + (int64_t(block) * S::rows * p.k + step * S::step_columns) / 2;
        scales = p.scales + (int64_t(block) * (S::rows / kTileRows) * p.group_tiles + step * (S::step_columns / 64)) * kTileBytes;
        // Warps and rows past the end read the last ones again; nothing of theirs is stored.
        const int w = min(int(threadIdx.x / 32), p.last_warp - block * S::warps), last_row = p.n - 1 - block * S::rows;
#pragma unroll
        for (int q = 0; q < 4; ++q) row[q] = (uint32_t(min(row_of<S::parts>(w, g, q), last_row)) * p.k + column_of<S::parts>(g, t)) / 2;
        scale = uint32_t(scale_offset<S::parts>(w, p.group_tiles, 0, g, t));
    }

    __device__ __forceinline__ void load(Fragment& f, int ahead) const {
#pragma unroll
        for (int q = 0; q < 4; ++q) f.weights[q] = load_weights(weights + ahead * S::step_bytes + row[q]);
        f.scales = load_weights(scales + ahead * (S::step_columns / 64 * kTileBytes) + scale);
    }

    __device__ __forceinline__ void advance(int by) {
        weights += by * S::step_bytes, scales += by * (S::step_columns / 64 * kTileBytes);
    }
};

// Scales the sums of a row block, adds the bias, rounds and stores.
template <class S>
__device__ __forceinline__ void store_block(const Params& p, int block, const float (&acc)[2][S::tiles][4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, w = block * S::warps + threadIdx.x / 32;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const int row = row_of<S::parts>(w, g, q);
        const bool stored = w <= p.last_warp && row < p.n;
        const float scale = stored ? p.row_scale[row] * kUnscale : 0.0f;
        const float bias = stored && p.bias ? __bfloat162float(p.bias[row]) : 0.0f;
#pragma unroll
        for (int tile = 0; tile < S::tiles; ++tile) {
            float value[2] = {acc[q / 2][tile][q % 2 * 2], acc[q / 2][tile][q % 2 * 2 + 1]};
            if (S::parts == 2) {
                // Column 2 t + h is token t with part h; lane group g has part g % 2, its neighbour the other.
                const float mine = g % 2 ? value[1] : value[0];
                value[0] = mine + __shfl_xor_sync(0xffffffffu, mine, 4);
            }
#pragma unroll
            for (int i = 0; i < 2 / S::parts; ++i) {
                const int token = tile * (8 / S::parts) + t * (2 / S::parts) + i;
                const bool first = S::parts == 1 || g % 2 == 0;
                if (stored && first && token < p.m) p.y[token * p.y_stride + row] = __float2bfloat16_rn(fmaf(value[i], scale, bias));
            }
        }
    }
}

// A CTA's place in the list of all steps: place c holds [total c / grid, total (c + 1) / grid). The first CTAs take the last
// places, so that a CTA waits for parts of CTAs that began before it: it never keeps them from a place on the card.
__device__ __forceinline__ int place_of_this() { return int(gridDim.x - 1 - blockIdx.x); }
__device__ __forceinline__ int first_step_of(int place, int total) { return int(int64_t(total) * place / gridDim.x); }
__device__ __forceinline__ int place_of_step(int s, int total) { return int((int64_t(s + 1) * gridDim.x - 1) / total); }

// A place leaves at most one part: of the row block that another place began. Who began it adds the others' parts to its own, in
// the order of their columns. Every warp for itself, as its rows are the same everywhere: its parts are counted as they come,
// in a counter of the place that waits for them, and nobody meets at a barrier.
template <class S>
__device__ __forceinline__ float4* part_slot(const Params& p, int place) {
    return reinterpret_cast<float4*>(p.parts + int64_t(place) * S::slot_floats) + threadIdx.x;
}

template <class S>
__device__ __forceinline__ unsigned* part_counter(const Params& p, int place) {
    return p.counters + place * S::warps + threadIdx.x / 32;
}

template <class S>
__device__ __forceinline__ void send_part(const Params& p, int block, const float (&acc)[2][S::tiles][4]) {
    float4* slot = part_slot<S>(p, place_of_this());
#pragma unroll
    for (int i = 0; i < 2 * S::tiles; ++i) {
        const float(&v)[4] = acc[i / S::tiles][i % S::tiles];
        __stcg(slot + i * S::threads, make_float4(v[0], v[1], v[2], v[3]));
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) count_release(part_counter<S>(p, place_of_step(block * p.steps, p.total)));
}

template <class S>
__device__ __forceinline__ void add_parts(const Params& p, int block, float (&acc)[2][S::tiles][4]) {
    constexpr int words = 2 * S::tiles, places = words < kPartWords ? kPartWords / words : 1;  // asked for together
    const int first = place_of_this() + 1, last = place_of_step((block + 1) * p.steps - 1, p.total);
    if (threadIdx.x % 32 == 0) {
        unsigned* counter = part_counter<S>(p, first - 1);
        while (read_acquire(counter) != unsigned(last - first + 1)) {
        }
        *counter = 0;
    }
    __syncwarp();
#pragma unroll 1
    for (int place = first; place <= last; place += places) {
        float4 part[places * words];
#pragma unroll
        for (int i = 0; i < places * words; ++i)
            if (place + i / words <= last) part[i] = __ldcg(part_slot<S>(p, place + i / words) + i % words * S::threads);
#pragma unroll
        for (int i = 0; i < places * words; ++i) {
            if (place + i / words > last) break;
            float(&sum)[4] = acc[i % words / S::tiles][i % words % S::tiles];
            sum[0] += part[i].x, sum[1] += part[i].y, sum[2] += part[i].z, sum[3] += part[i].w;
        }
    }
}

// What a CTA does with its sums of a row block. Only its last one may lack steps at its end.
template <class S>
__device__ __forceinline__ void finish_block(const Params& p, int block, bool starts, const float (&acc)[2][S::tiles][4]) {
    if (starts) {
        store_block<S>(p, block, acc);
    } else {
        send_part<S>(p, block, acc);
    }
}

template <class S>
__device__ __forceinline__ void finish_last_block(const Params& p, int block, bool starts, bool finishes, float (&acc)[2][S::tiles][4]) {
    if (starts && !finishes) add_parts<S>(p, block, acc);
    finish_block<S>(p, block, starts, acc);
}

}  // namespace
}  // namespace nvfp4
