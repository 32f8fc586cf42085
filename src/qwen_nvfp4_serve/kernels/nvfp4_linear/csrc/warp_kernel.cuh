// The kernel for every card, and up to 16 tokens the best on all of them: each warp multiplies 32 rows, or 16 in two parts,
// with every token. Weights go to registers, activations to shared memory.
#pragma once
#include "row_blocks.cuh"

namespace nvfp4 {
namespace {

// P: parts of K in a warp step. Tiles: MMA tiles of 8 / P tokens. StageSteps: steps of activations staged at once.
template <int P, int Tiles, int Warps, int StageSteps>
struct Shape {
    static constexpr int parts = P, tiles = Tiles, warps = Warps, threads = Warps * 32;
    static constexpr int tokens = Tiles * 8 / P, rows = Warps * kWarpRows / P;
    static constexpr int step_columns = P * kPartColumns, step_bytes = step_columns / 2, step_chunks = step_columns / 8;
    static constexpr int stage_chunks = StageSteps * step_chunks * tokens;  // of 8 activations, 16 bytes
    static constexpr int shared_bytes = 2 * stage_chunks * 16;
    static constexpr int slot_floats = threads * 8 * Tiles;
};

// Stages activations of StageSteps steps in shared memory, 16-byte chunks of 8 columns in decode()'s order:
// slot ((step * 4 + word) * tokens + token) * 4 P + part * 4 + t. A thread keeps to its columns and walks the tokens.
template <class S, int StageSteps>
struct ActivationStage {
    static constexpr int stage_columns = StageSteps * S::step_chunks;
    static constexpr int tokens_per_pass = S::threads / stage_columns > 0 ? S::threads / stage_columns : 1;
    static constexpr int passes = (S::tokens + tokens_per_pass - 1) / tokens_per_pass;
    static_assert(S::threads % stage_columns == 0);
    int token, slot, column;

    __device__ ActivationStage() : token(threadIdx.x / stage_columns) {
        const int chunk = threadIdx.x % S::step_chunks, step = threadIdx.x / S::step_chunks % StageSteps;
        const int word = chunk % 4, lane = chunk / 4;  // lane: part * 4 + t
        slot = ((step * 4 + word) * S::tokens + token) * 4 * S::parts + lane;
        column = step * S::step_columns + chunk * 8;
    }

    __device__ __forceinline__ void request(const Params& p, uint4* stage, int step) const {
        int k = step * S::step_columns + column;
        while (k >= p.k) k -= p.k;  // after a row block's last step comes the next one's first
        const __nv_bfloat16* x = p.x + token * p.x_stride + k;
#pragma unroll
        for (int i = 0; i < passes; ++i) {
            if (token + i * tokens_per_pass < p.m) copy_async(stage + slot + i * tokens_per_pass * 4 * S::parts, x);
            x += tokens_per_pass * p.x_stride;
        }
        commit_copies();
    }

    // Waits for this thread's own chunks and reorders them in place.
    __device__ __forceinline__ void finish(const Params& p, uint4* stage) const {
        wait_for_copies<0>();
#pragma unroll
        for (int i = 0; i < passes; ++i) {
            if (token + i * tokens_per_pass >= p.m) break;
            uint4& chunk = stage[slot + i * tokens_per_pass * 4 * S::parts];
            const Word4 o = permute_activations({{chunk.x, chunk.y, chunk.z, chunk.w}});
            chunk = make_uint4(o.v[0], o.v[1], o.v[2], o.v[3]);
        }
    }
};

// One step: decode 4 rows x 32 columns per lane, multiply with every tile of tokens.
template <class S>
__device__ __forceinline__ void multiply_step(float (&acc)[2][S::tiles][4], const Fragment& f, uint32_t selector, const uint4* x, const uint4* x_last) {
    constexpr int word_stride = S::tokens * 4 * S::parts, tile_stride = 8 * 4;
    uint32_t scale[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) scale[q] = scale_pair(f.scales.v[q], selector);
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        Word4 a[4];
        decode_word(f.weights, scale, word, a);
        // Two tiles at a time and the second pass after the first: products into one accumulator keep their distance.
        constexpr int together = S::tiles > 1 ? 2 : 1;
#pragma unroll
        for (int first = 0; first < S::tiles; first += together) {
            uint4 b[together];
#pragma unroll
            for (int i = 0; i < together; ++i) {
                const int tile = first + i;
                b[i] = tile == S::tiles - 1 ? x_last[word * word_stride] : x[word * word_stride + tile * tile_stride];
            }
#pragma unroll
            for (int i = 0; i < 2 * together; ++i) mma(acc[i % 2][first + i / 2], mma_weights(a, i % 2, 0), b[i / 2].x, b[i / 2].y);
#pragma unroll
            for (int i = 0; i < 2 * together; ++i) mma(acc[i % 2][first + i / 2], mma_weights(a, i % 2, 1), b[i / 2].z, b[i / 2].w);
        }
    }
}

template <int P, int Tiles, int Warps, int StageSteps, int MinBlocks>
__global__ void __launch_bounds__(Warps * 32, MinBlocks) linear_kernel(const __grid_constant__ Params p) {
    using S = Shape<P, Tiles, Warps, StageSteps>;
    uint4* stages = static_cast<uint4*>(dynamic_shared());
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int begin = int(int64_t(p.total) * blockIdx.x / gridDim.x);
    int left = int(int64_t(p.total) * (blockIdx.x + 1) / gridDim.x) - begin;
    int block = begin / p.steps, step = begin % p.steps;
    WeightCursor<S> cursor;
    Fragment current;
    cursor.seek(p, block, step);
    cursor.load(current, 0);
    wait_for_producer();
    release_dependents();

    const ActivationStage<S, StageSteps> activations;
    const uint32_t selector = scale_selector(t);
    // Lanes of absent tokens read the last one: their columns are never stored.
    const uint4* lane_x = stages + g * 4 + t;
    const uint4* lane_x_last = stages + (min((Tiles - 1) * 8 / P + g / P, p.m - 1) * P + g % P) * 4 + t;
    activations.request(p, stages, step);
    activations.finish(p, stages);
    __syncthreads();

    float acc[2][S::tiles][4] = {};
    bool starts = step == 0;
    int buffer = 0;
    // One turn per window of StageSteps steps. What follows, in this row block or the next, is always under way already.
    while (true) {
        int waiting = min(StageSteps, left);  // steps of this window
        uint4* following = stages + (S::stage_chunks - buffer);
        if (left > StageSteps) activations.request(p, following, step + StageSteps);
        for (int offset = buffer; waiting > 0;) {
            const int run = min(waiting, p.steps - step);
            const bool finishes = step + run == p.steps, last = run == left;
            const auto turn = [&](Fragment& f, int steps) {
                if (last) return;
                if (finishes) {
                    cursor.seek(p, block + 1, 0);
                } else {
                    cursor.advance(steps);
                }
                cursor.load(f, 0);
            };
            if (run == StageSteps) {
                Fragment other;
#pragma unroll
                for (int i = 0; i < StageSteps; ++i) {
                    Fragment &now = i % 2 ? other : current, &next = i % 2 ? current : other;
                    if (i + 1 < StageSteps) {
                        cursor.load(next, i + 1);
                    } else {
                        turn(next, StageSteps);
                    }
                    const int at = offset + i * S::step_chunks * S::tokens;
                    multiply_step<S>(acc, now, selector, lane_x + at, lane_x_last + at);
                }
                if (StageSteps % 2) current = other;
            } else {
                for (int i = 0; i < run; ++i) {
                    Fragment next;
                    if (i + 1 < run) {
                        cursor.advance(1);
                        cursor.load(next, 0);
                    } else {
                        turn(next, 1);
                    }
                    const int at = offset + i * S::step_chunks * S::tokens;
                    multiply_step<S>(acc, current, selector, lane_x + at, lane_x_last + at);
                    current = next;
                }
            }
            offset += run * S::step_chunks * S::tokens;
            step += run, left -= run, waiting -= run;
            if (finishes || last) {
                const bool whole = starts && finishes;
                if (whole || combine_block<S>(p, block, starts, acc)) store_block<S>(p, block, acc);
                if (last) return;
                ++block, step = 0, starts = true;
#pragma unroll
                for (int i = 0; i < 8 * S::tiles; ++i) acc[i / (4 * S::tiles)][i / 4 % S::tiles][i % 4] = 0.0f;
            }
        }
        activations.finish(p, following);
        __syncthreads();
        buffer = S::stage_chunks - buffer;
    }
}

}  // namespace
}  // namespace nvfp4
