// What the linear kernels share: the call, where a lane reads its weights, and how the sums of a row block leave a CTA.
#pragma once
#include <cuda_bf16.h>

#include "device.cuh"
#include "layout.cuh"

namespace nvfp4 {
namespace {

struct Params {
    const uint8_t* packed;
    const uint8_t* scales;
    const float* row_scale;
    const __nv_bfloat16* bias;
    const __nv_bfloat16* x;
    __nv_bfloat16* y;
    float* partial;
    unsigned* arrived;
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

// Where a lane reads its weights and scales, one pointer per row; `ahead` counts steps.
template <class S>
struct WeightCursor {
    const uint8_t* row[4];
    const uint8_t* scale;

    __device__ void seek(const Params& p, int block, int step) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        // Warps and rows past the end read the last ones again; nothing of theirs is stored.
        const int w = min(block * S::warps + int(threadIdx.x / 32), p.last_warp);
        const int64_t column = step * S::step_columns + column_of<S::parts>(g, t);
#pragma unroll
        for (int q = 0; q < 4; ++q) row[q] = p.packed + (int64_t(min(row_of<S::parts>(w, g, q), p.n - 1)) * p.k + column) / 2;
        scale = p.scales + scale_offset<S::parts>(w, p.group_tiles, step, g, t);
    }

    __device__ __forceinline__ void load(Fragment& f, int ahead) const {
#pragma unroll
        for (int q = 0; q < 4; ++q) f.weights[q] = load_weights(row[q] + ahead * S::step_bytes);
        f.scales = load_weights(scale + ahead * (S::step_columns / 64 * kTileBytes));
    }

    __device__ __forceinline__ void advance(int by) {
#pragma unroll
        for (int q = 0; q < 4; ++q) row[q] += by * S::step_bytes;
        scale += by * (S::step_columns / 64 * kTileBytes);
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

// CTA that holds flattened step `s`, for CTA c holding [total c / grid, total (c + 1) / grid).
__device__ __forceinline__ int owner_of(int s, int total) { return int((int64_t(s + 1) * gridDim.x - 1) / total); }

// Leaves this CTA's part of a row block in `partial`; true in the CTA that arrives last, with the whole sum in acc.
template <class S>
__device__ __forceinline__ bool combine_block(const Params& p, int block, bool starts_block, float (&acc)[2][S::tiles][4]) {
    const int first = owner_of(block * p.steps, p.total), last = owner_of((block + 1) * p.steps - 1, p.total);
    const auto slot = [&](int cta, bool starts) {
        return reinterpret_cast<float4*>(p.partial + int64_t(cta * 2 + starts) * S::slot_floats) + threadIdx.x;
    };
    float4* mine = slot(blockIdx.x, starts_block);
#pragma unroll
    for (int i = 0; i < 2 * S::tiles; ++i) {
        const float(&v)[4] = acc[i / S::tiles][i % S::tiles];
        __stcg(mine + i * S::threads, make_float4(v[0], v[1], v[2], v[3]));
    }
    __shared__ unsigned arrived_before;
    __syncthreads();  // orders every thread's part before thread 0's release, which publishes them all
    if (threadIdx.x == 0) arrived_before = arrive(p.arrived + block);
    __syncthreads();
    if (arrived_before != unsigned(last - first)) return false;
    if (threadIdx.x == 0) p.arrived[block] = 0;
#pragma unroll
    for (int i = 0; i < 2 * S::tiles; ++i) {
        const float4 v = __ldcg(slot(first, true) + i * S::threads);
        float(&sum)[4] = acc[i / S::tiles][i % S::tiles];
        sum[0] = v.x, sum[1] = v.y, sum[2] = v.z, sum[3] = v.w;
    }
    // Few tiles: several parts are on their way at once; many tiles: one part fills the registers.
#pragma unroll(S::tiles <= 2 ? 4 : 1)
    for (int cta = first + 1; cta <= last; ++cta) {
        float4 part[2 * S::tiles];
#pragma unroll
        for (int i = 0; i < 2 * S::tiles; ++i) part[i] = __ldcg(slot(cta, false) + i * S::threads);
#pragma unroll
        for (int i = 0; i < 2 * S::tiles; ++i) {
            float(&sum)[4] = acc[i / S::tiles][i % S::tiles];
            sum[0] += part[i].x, sum[1] += part[i].y, sum[2] += part[i].z, sum[3] += part[i].w;
        }
    }
    return true;
}

}  // namespace
}  // namespace nvfp4
