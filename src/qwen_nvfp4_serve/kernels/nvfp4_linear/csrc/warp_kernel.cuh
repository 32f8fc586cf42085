// The kernel for every card, and up to 16 tokens the best on all of them: each warp multiplies 32 rows, or 16 in two parts,
// with every token. Weights go to registers, activations to shared memory.
#pragma once
#include "row_blocks.cuh"

namespace nvfp4 {
namespace {

constexpr int kFirstWindow = 4;  // steps whose activations the first product waits for

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

// Stages activations of up to StageSteps steps in shared memory, 16-byte chunks of 8 columns in decode()'s order:
// slot ((step * 4 + word) * tokens + token) * 4 P + part * 4 + t. A thread keeps to its columns and walks steps and tokens.
template <class S>
struct ActivationStage {
    static constexpr int pairs_per_pass = S::threads / S::step_chunks;  // of step and token
    static_assert(S::threads % S::step_chunks == 0);
    int pair, column, slot;

    __device__ ActivationStage() : pair(threadIdx.x / S::step_chunks) {
        const int chunk = threadIdx.x % S::step_chunks, word = chunk % 4, lane = chunk / 4;  // lane: part * 4 + t
        slot = word * S::tokens * 4 * S::parts + lane;
        column = chunk * 8;
    }

    template <class Do>
    __device__ __forceinline__ void for_chunks(const Params& p, uint4* stage, int steps, Do act) const {
        for (int i = pair; i < steps * S::tokens; i += pairs_per_pass) {
            const int step = i / S::tokens, token = i % S::tokens;
            if (token < p.m) act(stage + slot + (step * 4 * S::tokens + token) * 4 * S::parts, step, token);
        }
    }

    __device__ __forceinline__ void request(const Params& p, uint4* stage, int first, int steps) const {
        for_chunks(p, stage, steps, [&](uint4* chunk, int step, int token) {
            step += first;
            while (step >= p.steps) step -= p.steps;  // after a row block's last step comes the next one's first
            copy_async(chunk, p.x + token * p.x_stride + step * S::step_columns + column);
        });
    }

    // Reorders this thread's own chunks in place, once they are there.
    __device__ __forceinline__ void finish(const Params& p, uint4* stage, int steps) const {
        for_chunks(p, stage, steps, [](uint4* chunk, int, int) {
            const Word4 o = permute_activations({{chunk->x, chunk->y, chunk->z, chunk->w}});
            *chunk = make_uint4(o.v[0], o.v[1], o.v[2], o.v[3]);
        });
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
    const int begin = first_step_of(place_of_this(), p.total);
    int left = first_step_of(place_of_this() + 1, p.total) - begin;
    int block = begin / p.steps, step = begin % p.steps;
    WeightCursor<S> cursor;
    Fragment current;
    cursor.seek(p, block, step);
    cursor.load(current, 0);
    wait_for_producer();
    release_dependents();

    const ActivationStage<S> activations;
    const uint32_t selector = scale_selector(t);
    // Lanes of absent tokens read the last one: their columns are never stored.
    const uint4* lane_x = stages + g * 4 + t;
    const uint4* lane_x_last = stages + (min((Tiles - 1) * 8 / P + g / P, p.m - 1) * P + g % P) * 4 + t;
    int window = min(min(kFirstWindow, StageSteps), left);  // steps whose activations are there
    activations.request(p, stages, step, window);
    commit_copies();
    wait_for_copies<0>();
    activations.finish(p, stages, window);
    __syncthreads();

    float acc[2][S::tiles][4] = {};
    bool starts = step == 0, finishes, last;
    int at = 0, following = S::stage_chunks, ahead = 0, run = 0, until = 0;
    // What follows a window is on its way while it is multiplied, and so is what follows a step.
    const auto begin_window = [&] {
        ahead = min(StageSteps, left - window);
        if (ahead > 0) activations.request(p, stages + following, step + window, ahead);
        commit_copies();
    };
    const auto begin_run = [&] {  // of steps that are in one row block and in one window
        until = run = min(window, p.steps - step);
        finishes = step + run == p.steps, last = run == left;
    };
    const auto turn = [&](const Fragment& now, Fragment& next) {  // false once there is no more
        const bool ends = --until == 0;
        if (ends && finishes) {
            cursor.seek(p, last ? block : block + 1, 0);
        } else {
            cursor.advance(1);
        }
        if (!ends || !last) cursor.load(next, 0);
        multiply_step<S>(acc, now, selector, lane_x + at, lane_x_last + at);
        at += S::step_chunks * S::tokens;
        if (!ends) return true;
        if (last) {
            finish_last_block<S>(p, block, starts, finishes, acc);
            return false;
        }
        if (finishes) {
            finish_block<S>(p, block, starts, acc);
            ++block, step = -run, starts = true;
#pragma unroll
            for (int i = 0; i < 8 * S::tiles; ++i) acc[i / (4 * S::tiles)][i / 4 % S::tiles][i % 4] = 0.0f;
        }
        step += run, left -= run, window -= run;
        if (window == 0) {
            wait_for_copies<0>();
            activations.finish(p, stages + following, ahead);
            __syncthreads();
            at = following, following = S::stage_chunks - following, window = ahead;
            begin_window();
        }
        begin_run();
        return true;
    };
    begin_window();
    begin_run();
    Fragment other;
#pragma unroll 1
    while (turn(current, other) && turn(other, current)) {
    }
}

}  // namespace
}  // namespace nvfp4
