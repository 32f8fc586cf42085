// The kernel of sm_90 for more than 16 tokens, by its products of four warps. They read the tokens once for 64 rows, where
// warps of their own read them for every 32, and run while the next weights are decoded.
#pragma once
#include "row_blocks.cuh"
#include "warpgroup.cuh"

namespace nvfp4 {
namespace {

constexpr int kDepth = 4;    // steps of 128 columns whose weights and activations are in shared memory at once
constexpr int kWordPad = 4;  // slots behind a word of activations: stores of two words meet in no bank

// A word of activations is 4 registers of tokens x 16 bytes.
template <int Tiles, int Warps>
struct WarpgroupShape {
    static constexpr int parts = 1, tiles = Tiles, warps = Warps, threads = Warps * 32;
    static constexpr int tokens = Tiles * 8, rows = Warps * kWarpRows;
    static constexpr int step_columns = kPartColumns, step_bytes = step_columns / 2;
    static constexpr int word_slots = 4 * tokens + kWordPad, token_slots = 4 * word_slots;  // of 16 bytes
    static constexpr int weight_slots = 5 * threads, stage_slots = token_slots + weight_slots;
    static constexpr int shared_bytes = kDepth * stage_slots * 16;
    static constexpr int slot_floats = threads * 8 * Tiles;
    static_assert(Warps % 4 == 0);
};

#if defined(NVFP4_WARPGROUP)

// What a thread brings to shared memory, step by step: its own weights and scales, and activations for everyone.
template <class S>
struct Supply {
    static constexpr int passes = (4 * S::tokens + S::threads - 1) / S::threads;
    const uint8_t *weights, *scales;
    int later[3];           // bytes from the first quarter's row to the others'
    int block, step, left;  // what is requested next
    int token, word;        // the first chunks of activations, 8 columns for each lane of an MMA

    __device__ Supply(const Params& p, int begin, int count) : block(begin / p.steps), step(begin % p.steps), left(count) {
        seek(p);
        // Neighbouring threads: two words (32 bytes to read), four tokens (64 bytes to store), two more words, more tokens.
        word = threadIdx.x % 2 + threadIdx.x / 8 % 2 * 2;
        token = threadIdx.x / 16 * 4 + threadIdx.x / 2 % 4;
    }

    __device__ __forceinline__ void seek(const Params& p) {
        WeightCursor<S> cursor;
        cursor.seek(p, block, step);
        weights = cursor.weights + cursor.row[0], scales = cursor.scales + cursor.scale;
#pragma unroll
        for (int q = 1; q < 4; ++q) later[q - 1] = int(cursor.row[q] - cursor.row[0]);
    }

    __device__ __forceinline__ void request_weights(uint4* stage) const {
        uint4* slot = stage + S::token_slots + threadIdx.x;
#pragma unroll
        for (int q = 0; q < 4; ++q) copy_weights_async(slot + q * S::threads, q ? weights + later[q - 1] : weights);
        copy_weights_async(slot + 4 * S::threads, scales);
    }

    __device__ __forceinline__ void request_tokens(const Params& p, uint4* stage, int of_step) const {
#pragma unroll
        for (int pass = 0; pass < passes; ++pass) {
            if (token + pass * (S::threads / 4) >= p.m) break;
            const __nv_bfloat16* from = p.x + (token + pass * (S::threads / 4)) * p.x_stride + of_step * S::step_columns + word * 8;
            uint4* slot = stage + word * S::word_slots + token + pass * (S::threads / 4);
#pragma unroll
            for (int t = 0; t < 4; ++t) copy_async(slot + t * S::tokens, from + t * kLaneColumns);
        }
    }

    __device__ __forceinline__ void advance(const Params& p) {
        if (--left == 0) return;
        if (++step == p.steps) {
            ++block, step = 0;
            seek(p);
        } else {
            weights += S::step_bytes, scales += S::step_columns / 64 * kTileBytes;
        }
    }

    // Reorders what this thread has brought of a stage, so that slot register * tokens + token of a word holds, for t = 0..3,
    // that register of the 8 columns that lane t decodes.
    __device__ __forceinline__ void turn(const Params& p, uint4* stage) const {
#pragma unroll
        for (int pass = 0; pass < passes; ++pass) {
            if (token + pass * (S::threads / 4) >= p.m) break;
            uint4* slot = stage + word * S::word_slots + token + pass * (S::threads / 4);
            Word4 turned[4];
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const uint4 chunk = slot[t * S::tokens];
                const Word4 o = permute_activations({{chunk.x, chunk.y, chunk.z, chunk.w}});
#pragma unroll
                for (int i = 0; i < 4; ++i) turned[i].v[t] = o.v[i];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                slot[i * S::tokens] = make_uint4(turned[i].v[0], turned[i].v[1], turned[i].v[2], turned[i].v[3]);
        }
        publish_to_products();
    }
};

// This thread's scales out of a stage, as pairs.
template <class S>
__device__ __forceinline__ Word4 staged_scales(const uint4* stage) {
    const uint4 v = stage[S::token_slots + 4 * S::threads + threadIdx.x];
    const uint32_t selector = scale_selector(threadIdx.x % 4);
    return {{scale_pair(v.x, selector), scale_pair(v.y, selector), scale_pair(v.z, selector), scale_pair(v.w, selector)}};
}

// Two words of a step: two rows of a lane are multiplied while its next two are decoded.
template <class S>
__device__ __forceinline__ void multiply_words(float (&acc)[2][S::tiles][4], const uint4* stage, const Word4& scale, int first, TokenBlocks x, int at) {
    uint2 codes[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) codes[q] = reinterpret_cast<const uint2*>(stage + S::token_slots + q * S::threads + threadIdx.x)[first / 2];
#pragma unroll
    for (int word = first; word < first + 2; ++word) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            Word4 a[4];
#pragma unroll
            for (int q = 2 * h; q < 2 * h + 2; ++q) {
                a[q] = decode_quarter(word % 2 ? codes[q].y : codes[q].x, scale.v[q], word);
#pragma unroll
                for (int i = 0; i < 4; ++i) pin(a[q].v[i]);
            }
            fence_registers();
#pragma unroll
            for (int pass = 0; pass < 2; ++pass)
                multiply_rows(acc[h], mma_weights(a, h, pass), x, at + word * S::word_slots + pass * 2 * S::tokens);
            commit_products();
            wait_for_products<1>();  // those before: their registers take the next weights
        }
    }
}

template <class S>
__device__ __forceinline__ void pin_sums(float (&acc)[2][S::tiles][4]) {
#pragma unroll
    for (int i = 0; i < 8 * S::tiles; ++i) pin(acc[i / (4 * S::tiles)][i / 4 % S::tiles][i % 4]);
}

template <class S>
__device__ __forceinline__ void run_warpgroups(const Params& p, uint4* stages) {
    const int begin = first_step_of(place_of_this(), p.total);
    int left = first_step_of(place_of_this() + 1, p.total) - begin;
    int block = begin / p.steps, step = begin % p.steps;
    Supply<S> supply(p, begin, left);
#pragma unroll 1
    for (int i = 0; i < min(kDepth - 1, left); ++i) {
        supply.request_weights(stages + i * S::stage_slots);
        supply.advance(p);
    }
    wait_for_producer();
    release_dependents();
#pragma unroll 1
    for (int i = 0; i < kDepth - 1; ++i) {
        if (i < left) supply.request_tokens(p, stages + i * S::stage_slots, (step + i) % p.steps);
        commit_copies();
    }
    wait_for_copies<kDepth - 2>();
    supply.turn(p, stages);
    __syncthreads();

    const TokenBlocks x = describe_tokens(stages, S::tokens * 16);
    float acc[2][S::tiles][4] = {};
    pin_sums<S>(acc);
    bool starts = step == 0;
    int now = 0, before = (kDepth - 1) * S::stage_slots;  // stages, as slots from the first
#pragma unroll 1
    while (true) {
        const Word4 scale = staged_scales<S>(stages + now);
        multiply_words<S>(acc, stages + now, scale, 0, x, now);
        const int next = now == (kDepth - 1) * S::stage_slots ? 0 : now + S::stage_slots;
        wait_for_copies<kDepth - 3>();
        if (left > 1) supply.turn(p, stages + next);
        if (supply.left > 0) {  // after the turn, whose fence would wait for copies that have just been requested
            supply.request_tokens(p, stages + before, supply.step);
            supply.request_weights(stages + before);
            supply.advance(p);
        }
        commit_copies();
        multiply_words<S>(acc, stages + now, scale, 2, x, now);
        wait_for_products<0>();
        pin_sums<S>(acc);
        const bool finishes = ++step == p.steps, last = --left == 0;
        if (last) {
            finish_last_block<S>(p, block, starts, finishes, acc);
            return;
        }
        if (finishes) {
            finish_block<S>(p, block, starts, acc);
            ++block, step = 0, starts = true;
#pragma unroll
            for (int j = 0; j < 8 * S::tiles; ++j) acc[j / (4 * S::tiles)][j / 4 % S::tiles][j % 4] = 0.0f;
            pin_sums<S>(acc);
        }
        before = now, now = next;
        __syncthreads();
    }
}

#endif

// Empty on cards without such products.
template <int Tiles, int Warps, int MinBlocks>
__global__ void __launch_bounds__(Warps * 32, MinBlocks) warpgroup_kernel(const __grid_constant__ Params p) {
#if defined(NVFP4_WARPGROUP)
    run_warpgroups<WarpgroupShape<Tiles, Warps>>(p, static_cast<uint4*>(dynamic_shared()));
#endif
}

}  // namespace
}  // namespace nvfp4
