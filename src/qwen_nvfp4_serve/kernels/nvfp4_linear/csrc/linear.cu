// y[M, N] = x[M, K] W[N, K]^T * row_scale[N] (+ bias[N]) for small M: NVFP4 weights read in place, bf16 x and y.
//
// The work is row blocks x steps of 128 or 256 columns, dealt out evenly: CTA c takes steps [T c / G, T (c + 1) / G) of
// the flattened list, so it owns whole row blocks, or parts of them. Parts go to `partial`; the CTA that completes a row
// block adds them in the order of their columns, so the result does not depend on which one that was.
#include "device.cuh"
#include "layout.cuh"
#include "linear.h"
#include "warpgroup.cuh"

#if !defined(NVFP4_VARIANTS)
// Parts, tiles, warps, steps in a stage, CTAs per multiprocessor. Chosen from all that were measured: docs/kernels.md.
#define NVFP4_VARIANTS                                                                  \
    variant<2, 1, 8, 4, 2>(), variant<1, 1, 8, 4, 2>(), variant<1, 2, 8, 2, 2>(),        \
        variant<1, 4, 12, 2, 1>(), variant<1, 6, 8, 2, 1>(), variant<1, 8, 8, 2, 1>()
#endif

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <mutex>

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

// The kernel for products of four warps: a step of 128 columns at a time, Depth stages of weights and activations in
// shared memory. A word of activations is 4 registers of tokens x 16 bytes; Pad slots behind it keep the stores of two
// words out of each other's banks.
template <int Tiles, int Warps, int Depth, int Pad>
struct WarpgroupShape {
    static constexpr int parts = 1, tiles = Tiles, warps = Warps, threads = Warps * 32, depth = Depth;
    static constexpr int tokens = Tiles * 8, rows = Warps * kWarpRows;
    static constexpr int step_columns = kPartColumns, step_bytes = step_columns / 2;
    static constexpr int word_slots = 4 * tokens + Pad, token_slots = 4 * word_slots;  // of 16 bytes
    static constexpr int weight_slots = 5 * threads, stage_slots = token_slots + weight_slots;
    static constexpr int shared_bytes = Depth * stage_slots * 16;
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
        weights = cursor.row[0], scales = cursor.scale;
#pragma unroll
        for (int q = 1; q < 4; ++q) later[q - 1] = int(cursor.row[q] - weights);
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
    const int begin = int(int64_t(p.total) * blockIdx.x / gridDim.x);
    int left = int(int64_t(p.total) * (blockIdx.x + 1) / gridDim.x) - begin;
    int block = begin / p.steps, step = begin % p.steps;
    Supply<S> supply(p, begin, left);
#pragma unroll 1
    for (int i = 0; i < min(S::depth - 1, left); ++i) {
        supply.request_weights(stages + i * S::stage_slots);
        supply.advance(p);
    }
    wait_for_producer();
    release_dependents();
#pragma unroll 1
    for (int i = 0; i < S::depth - 1; ++i) {
        if (i < left) supply.request_tokens(p, stages + i * S::stage_slots, (step + i) % p.steps);
        commit_copies();
    }
    wait_for_copies<S::depth - 2>();
    supply.turn(p, stages);
    __syncthreads();

    const TokenBlocks x = describe_tokens(stages, S::tokens * 16);
    float acc[2][S::tiles][4] = {};
    pin_sums<S>(acc);
    bool starts = step == 0;
    int now = 0, before = (S::depth - 1) * S::stage_slots;  // stages, as slots from the first
#pragma unroll 1
    while (true) {
        if (supply.left > 0) {
            supply.request_tokens(p, stages + before, supply.step);
            supply.request_weights(stages + before);
            supply.advance(p);
        }
        commit_copies();
        const Word4 scale = staged_scales<S>(stages + now);
        multiply_words<S>(acc, stages + now, scale, 0, x, now);
        const int next = now == (S::depth - 1) * S::stage_slots ? 0 : now + S::stage_slots;
        wait_for_copies<S::depth - 2>();
        if (left > 1) supply.turn(p, stages + next);
        multiply_words<S>(acc, stages + now, scale, 2, x, now);
        wait_for_products<0>();
        pin_sums<S>(acc);
        const bool finishes = ++step == p.steps, last = --left == 0;
        if (finishes || last) {
            if ((starts && finishes) || combine_block<S>(p, block, starts, acc)) store_block<S>(p, block, acc);
            if (last) return;
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
template <int Tiles, int Warps, int Depth, int MinBlocks, int Pad>
__global__ void __launch_bounds__(Warps * 32, MinBlocks) warpgroup_kernel(const __grid_constant__ Params p) {
#if defined(NVFP4_WARPGROUP)
    run_warpgroups<WarpgroupShape<Tiles, Warps, Depth, Pad>>(p, static_cast<uint4*>(dynamic_shared()));
#endif
}

// Rows of E2M1 * E4M3 as bf16. A thread decodes one 8-column word in each quarter of a 128-row tile.
__global__ void dequantize_kernel(const uint8_t* packed, const uint8_t* scales, uint4* out, int64_t first_row, int64_t rows, int64_t n, int64_t k) {
    const int64_t word = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, words = k / 8;
    if (word >= words) return;
    const int r = blockIdx.y % 32;
    const int64_t tile = blockIdx.y / 32, group = word / 2, group_tiles = (k / 16 + 3) / 4;
    const Word4 scale = load_weights(scales + ((first_row / kTileRows + tile) * group_tiles + group / 4) * kTileBytes + r * 16);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const int64_t row = tile * kTileRows + q * 32 + r;
        if (row >= rows || first_row + row >= n) return;
        const uint32_t codes = reinterpret_cast<const uint32_t*>(packed)[(first_row + row) * words + word];
        const uint32_t s = spread(scale_pair(scale.v[q], scale_selector(int(group % 4 / 2))), int(group % 2));
        Word4 w = decode(codes);
#pragma unroll
        for (int i = 0; i < 4; ++i) w.v[i] = multiply_bf16x2(multiply_bf16x2(w.v[i], s), 0x43804380u);  // times 2^8
        w = restore_order(w);
        out[row * words + word] = make_uint4(w.v[0], w.v[1], w.v[2], w.v[3]);
    }
}

using Kernel = void (*)(Params);

struct Variant {
    int tokens, warps, blocks;  // blocks: CTAs per multiprocessor that it is made for
    int capability;             // the only one that runs it, 0 if all do
    int step_columns, rows, shared_bytes, slot_floats;
    Kernel kernel;
};

template <int P, int Tiles, int Warps, int StageSteps, int MinBlocks>
constexpr Variant variant() {
    using S = Shape<P, Tiles, Warps, StageSteps>;
    return {S::tokens, Warps, MinBlocks, 0, S::step_columns, S::rows, S::shared_bytes, S::slot_floats, linear_kernel<P, Tiles, Warps, StageSteps, MinBlocks>};
}

template <int Tiles, int Warps, int Depth, int MinBlocks, int Pad = 4>
constexpr Variant warpgroup_variant() {
    using S = WarpgroupShape<Tiles, Warps, Depth, Pad>;
    return {S::tokens, Warps, MinBlocks, 90, S::step_columns, S::rows, S::shared_bytes, S::slot_floats, warpgroup_kernel<Tiles, Warps, Depth, MinBlocks, Pad>};
}

const Variant kVariants[] = {NVFP4_VARIANTS};
constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);
constexpr int kMaxDevices = 64;
constexpr int kMaxRowBlocks = 1 << 14;
constexpr int kShortShare = 2, kLongShare = 4;  // fewest steps of a CTA
constexpr size_t kCounterBytes = kMaxRowBlocks * sizeof(unsigned);

// What a card holds of each variant; filled once per device.
struct Residency {
    bool known;
    int multiprocessors, capability, blocks[kVariantCount];
};

cudaError_t residency(const Residency** result) {
    static Residency table[kMaxDevices];
    static std::mutex busy;
    const std::lock_guard<std::mutex> held(busy);
    int device = 0;
    if (const auto error = cudaGetDevice(&device)) return error;
    if (device >= kMaxDevices) return cudaErrorInvalidDevice;
    Residency& r = table[device];
    if (!r.known) {
        int minor = 0;
        if (const auto error = cudaDeviceGetAttribute(&r.multiprocessors, cudaDevAttrMultiProcessorCount, device)) return error;
        if (const auto error = cudaDeviceGetAttribute(&r.capability, cudaDevAttrComputeCapabilityMajor, device)) return error;
        if (const auto error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device)) return error;
        r.capability = r.capability * 10 + minor;
        int shared_limit = 0;
        if (const auto error = cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return error;
        for (int i = 0; i < kVariantCount; ++i) {
            const Variant& v = kVariants[i];
            r.blocks[i] = 0;
            if (v.shared_bytes > shared_limit || (v.capability && v.capability != r.capability)) continue;
            if (const auto error = cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v.shared_bytes)) return error;
            if (const auto error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&r.blocks[i], v.kernel, v.warps * 32, v.shared_bytes)) return error;
        }
        r.known = true;
    }
    *result = &r;
    return cudaSuccess;
}

// The first variant that takes m tokens and k columns and that this card holds as often as it was made for.
int variant_for(int m, int k, const Residency& card) {
    for (int i = 0; i < kVariantCount; ++i)
        if (kVariants[i].tokens >= m && k % kVariants[i].step_columns == 0 && card.blocks[i] >= kVariants[i].blocks) return i;
    return -1;
}

}  // namespace
}  // namespace nvfp4

using namespace nvfp4;

int32_t nvfp4_linear_variant(int32_t index, Nvfp4LinearVariant* variant) {
    if (index < 0 || index >= kVariantCount) return -1;
    const Variant& v = kVariants[index];
    *variant = {v.tokens, v.warps, v.blocks, v.step_columns, v.rows, v.shared_bytes};
    return 0;
}

int32_t nvfp4_linear_call_bytes(void) { return sizeof(Nvfp4LinearCall); }

const char* nvfp4_error_name(int32_t error) { return cudaGetErrorName(static_cast<cudaError_t>(error)); }

int64_t nvfp4_linear_workspace_bytes(void) {
    const Residency* card = nullptr;
    if (residency(&card)) return -1;
    int64_t most = 0;
    for (int i = 0; i < kVariantCount; ++i) {
        const int64_t bytes = int64_t(card->multiprocessors) * card->blocks[i] * 2 * kVariants[i].slot_floats * sizeof(float);
        most = bytes > most ? bytes : most;
    }
    return most + kCounterBytes;
}

int32_t nvfp4_linear(const Nvfp4LinearCall* call, void* stream) {
    const Residency* card = nullptr;
    if (const auto error = residency(&card)) return error;
    const int index = call->variant >= 0 ? call->variant : variant_for(call->m, call->k, *card);
    if (index < 0 || index >= kVariantCount || call->m < 1 || call->m > kVariants[index].tokens) return cudaErrorInvalidValue;
    if (call->n < 1 || call->k < 1 || call->k % kVariants[index].step_columns || card->blocks[index] < 1) return cudaErrorInvalidValue;
    const Variant& v = kVariants[index];
    const int steps = call->k / v.step_columns, tiles = (call->n + kTileRows - 1) / kTileRows;
    const int64_t row_blocks = (int64_t(tiles) * kTileRows + v.rows - 1) / v.rows, total = row_blocks * steps;
    if (row_blocks > kMaxRowBlocks || total > INT32_MAX) return cudaErrorInvalidValue;
    const int64_t resident = int64_t(card->multiprocessors) * card->blocks[index];
    // Small matrices: shorter shares rather than idle multiprocessors.
    const int64_t even = total / card->multiprocessors, share = even < kShortShare ? kShortShare : even > kLongShare ? kLongShare : even;
    int64_t grid = call->grid > 0 ? call->grid : total / share;
    grid = grid > resident ? resident : grid < 1 ? 1 : grid;
    grid = grid > total ? total : grid;
    auto* workspace = static_cast<uint8_t*>(call->workspace);
    const Params params{static_cast<const uint8_t*>(call->packed), static_cast<const uint8_t*>(call->scales),
                        static_cast<const float*>(call->row_scale), static_cast<const __nv_bfloat16*>(call->bias),
                        static_cast<const __nv_bfloat16*>(call->x), static_cast<__nv_bfloat16*>(call->y),
                        reinterpret_cast<float*>(workspace + kCounterBytes), reinterpret_cast<unsigned*>(workspace),
                        call->m, call->n, call->k, call->x_stride, call->y_stride, steps, int(total), call->k / 64,
                        tiles * kTileRows * v.warps / v.rows - 1};
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(grid));
    config.blockDim = dim3(v.warps * 32);
    config.dynamicSmemBytes = v.shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = call->dependent && card->capability >= 90 ? 1 : 0;
    return cudaLaunchKernelEx(&config, v.kernel, params);
}

int32_t nvfp4_dequantize(const void* packed, const void* scales, void* out, int64_t first_row, int64_t rows, int64_t n, int64_t k, void* stream) {
    if (rows < 1 || first_row % kTileRows || k % kLaneColumns) return cudaErrorInvalidValue;
    const dim3 grid(unsigned((k / 8 + 127) / 128), unsigned((rows + kTileRows - 1) / kTileRows * 32));
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(128);
    config.stream = static_cast<cudaStream_t>(stream);
    return cudaLaunchKernelEx(&config, dequantize_kernel, static_cast<const uint8_t*>(packed), static_cast<const uint8_t*>(scales),
                              static_cast<uint4*>(out), first_row, rows, n, k);
}
