// The router's logits, the shared expert's gate, and the election.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "device.cuh"
#include "octet.cuh"
#include "plan.cuh"

namespace nvfp4 {
namespace {

struct RouteParams {
    const __nv_bfloat16 *x, *router, *shared_gate;
    __nv_bfloat16* logits;
    int* ids;
    float *weights, *shared_share;
    uint32_t* slots;  // of logits on their way to the election, kMaxExperts a token
    int64_t x_stride;
    int m, hidden, experts, top_k, renormalize;
    int groups;  // of warps that share a CTA's rows, each with tokens of its own
};

constexpr uint32_t kEmptySlot = 0xffffffffu;  // no logit: the lower half of theirs is zero
constexpr int kRouteWarps = 8;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kRowTokens = 2;  // multiplied by a row at once; more would spill here
#else
constexpr int kRowTokens = 4;
#endif
constexpr int kHeldChunks = 8;        // of a router row that a lane holds at once
constexpr int kLaneExperts = 8;       // neighbouring experts of a lane in the election
constexpr int kChunkColumns = 32 * 8;  // a chunk is 16 bytes a lane

// Neighbouring columns go to two sums, which halves the chain of dependent additions.
__device__ __forceinline__ void add_products(float (&sums)[2], const uint4& a, const uint4& b) {
    const unsigned left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sums[0] = fmaf(__uint_as_float(left[i] << 16), __uint_as_float(right[i] << 16), sums[0]);
        sums[1] = fmaf(__uint_as_float(left[i] & 0xffff0000u), __uint_as_float(right[i] & 0xffff0000u), sums[1]);
    }
}

// A lane's 16 bytes of a chunk of a row; zeros past its end.
__device__ __forceinline__ uint4 chunk_of(const __nv_bfloat16* row, int chunk, int columns) {
    const int column = chunk * kChunkColumns + threadIdx.x % 32 * 8;
    return column < columns ? *reinterpret_cast<const uint4*>(row + column) : make_uint4(0, 0, 0, 0);
}

// Products of a router row with `Tokens` tokens from the first on, in every lane. held: the row's first chunks. Activations
// are requested as many at once as a row has chunks held.
template <int Tokens>
__device__ __forceinline__ void row_products(const RouteParams& p, const uint4 (&held)[kHeldChunks], const __nv_bfloat16* row, int first, float (&product)[Tokens]) {
    float sums[Tokens][2] = {};
    const __nv_bfloat16* x = p.x + first * p.x_stride;
    const int chunks = (p.hidden + kChunkColumns - 1) / kChunkColumns;
    constexpr int batch = kHeldChunks / Tokens;  // of chunks that are requested at once
#pragma unroll
    for (int i = 0; i < kHeldChunks; i += batch) {
        uint4 taken[batch][Tokens];
#pragma unroll
        for (int j = 0; j < batch * Tokens; ++j) taken[j / Tokens][j % Tokens] = chunk_of(x + j % Tokens * p.x_stride, i + j / Tokens, p.hidden);
#pragma unroll
        for (int j = 0; j < batch * Tokens; ++j) add_products(sums[j % Tokens], held[i + j / Tokens], taken[j / Tokens][j % Tokens]);
    }
    for (int i = kHeldChunks; i < chunks; ++i) {
        const uint4 weights = chunk_of(row, i, p.hidden);
#pragma unroll
        for (int token = 0; token < Tokens; ++token) add_products(sums[token], weights, chunk_of(x + token * p.x_stride, i, p.hidden));
    }
#pragma unroll
    for (int token = 0; token < Tokens; ++token) {
        product[token] = sums[token][0] + sums[token][1];
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) product[token] += __shfl_xor_sync(kAllLanes, product[token], mask);
    }
}

template <int Tokens>
__device__ __forceinline__ void store_products(const RouteParams& p, const uint4 (&held)[kHeldChunks], const __nv_bfloat16* weights, int row, int first) {
    float product[Tokens];
    row_products<Tokens>(p, held, weights, first, product);
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int token = 0; token < Tokens; ++token) {
        if (row == p.experts) {
            p.shared_share[first + token] = sigmoid(product[token]);
        } else {
            const uint32_t logit = __bfloat16_as_ushort(__float2bfloat16_rn(product[token]));
            write_word(p.slots + (first + token) * kMaxExperts + row, logit << 16);
        }
    }
}

// Neighbouring logits of a lane, as words whose upper half is BF16.
__device__ __forceinline__ void given_logits(const __nv_bfloat16* logits, uint32_t (&words)[kLaneExperts]) {
    const uint4 raw = __ldcg(reinterpret_cast<const uint4*>(logits));
    const uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) words[2 * i] = pairs[i] << 16, words[2 * i + 1] = pairs[i] & 0xffff0000u;
}

// The same of logits that other CTAs of this launch are making: waits for each and leaves its slot empty for the next launch.
__device__ __forceinline__ void await_logits(uint32_t* slots, uint32_t (&words)[kLaneExperts]) {
    uint32_t most;
    do {
        most = 0;
#pragma unroll
        for (int i = 0; i < kLaneExperts; ++i) {
            if (i % 4 == 0) {
                const Word4 four = read_words(slots + i);
#pragma unroll
                for (int j = 0; j < 4; ++j) words[i + j] = four.v[j];
            }
            most = max(most, words[i]);
        }
    } while (most == kEmptySlot);
#pragma unroll
    for (int i = 0; i < kLaneExperts; i += 4) *reinterpret_cast<uint4*>(slots + i) = make_uint4(kEmptySlot, kEmptySlot, kEmptySlot, kEmptySlot);
}

__device__ __forceinline__ void keep_logits(__nv_bfloat16* logits, const uint32_t (&words)[kLaneExperts]) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = words[2 * i] >> 16 | words[2 * i + 1];
    *reinterpret_cast<uint4*>(logits) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// A lane's logits; minus infinity past the last expert, which has no probability.
template <int Loads, bool Given>
__device__ __forceinline__ void take_logits(const RouteParams& p, int token, float (&logits)[Loads * kLaneExperts]) {
#pragma unroll
    for (int load = 0; load < Loads; ++load) {
        const int expert = (load * 32 + threadIdx.x % 32) * kLaneExperts;
        uint32_t words[kLaneExperts];
#pragma unroll
        for (int i = 0; i < kLaneExperts; ++i) words[i] = 0xff800000u;
        if (expert < p.experts) {
            __nv_bfloat16* row = p.logits + int64_t(token) * p.experts + expert;
            if (Given) {
                given_logits(row, words);
            } else {
                await_logits(p.slots + token * kMaxExperts + expert, words);
                if (p.logits) keep_logits(row, words);
            }
        }
#pragma unroll
        for (int i = 0; i < kLaneExperts; ++i) logits[load * kLaneExperts + i] = __uint_as_float(words[i]);
    }
}

// The largest over the warp, of what is a number; as integers in the order of the numbers, which one instruction compares.
__device__ __forceinline__ float largest(float mine) {
    const unsigned bits = __float_as_uint(mine), key = mine != mine ? 0u : bits >> 31 ? ~bits : bits | 0x80000000u;
    const unsigned top = __reduce_max_sync(kAllLanes, key);
    return __uint_as_float(top >> 31 ? top & 0x7fffffffu : ~top);
}

// The largest of a lane's keys, and the first place that has it.
template <int Count>
__device__ __forceinline__ void best_of(const unsigned (&key)[Count], unsigned& best, int& place) {
    unsigned value[Count];
    int at[Count];
#pragma unroll
    for (int i = 0; i < Count; ++i) value[i] = key[i], at[i] = i;
#pragma unroll
    for (int width = 1; width < Count; width *= 2)
#pragma unroll
        for (int i = 0; i < Count; i += 2 * width)
            if (value[i + width] > value[i]) value[i] = value[i + width], at[i] = at[i + width];
    best = value[0], place = at[0];
}

// Elects a token's experts from its logits, one warp. Softmax, its order of sums, what is not finite and ties as in the
// stock kernel: the probabilities decide, not the logits, and of equal ones the lower expert.
template <int Loads, bool Given>
__device__ __forceinline__ void elect(const RouteParams& p, int token) {
    const int lane = threadIdx.x % 32;
    float probability[Loads * kLaneExperts];
    take_logits<Loads, Given>(p, token, probability);
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < Loads * kLaneExperts; ++i) top = fmaxf(top, probability[i]);
    top = largest(top);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Loads * kLaneExperts; ++i) {
        probability[i] = expf(probability[i] - top);
        sum += probability[i];
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(kAllLanes, sum, mask);
    const float inverse = 1.0f / sum;
    // As integers: probabilities are not negative, so their bits have their order, and 0 is left for what is taken or, past
    // the last expert, has no probability.
    unsigned key[Loads * kLaneExperts];
#pragma unroll
    for (int i = 0; i < Loads * kLaneExperts; ++i) {
        const unsigned bits = __float_as_uint(probability[i] * inverse), exists = (i / kLaneExperts * 32 + lane) * kLaneExperts < p.experts;
        key[i] = (bits < 0x7f800000u ? bits : 0u) + exists;
    }
    float total = 0.0f, mine = 0.0f;
    for (int rank = 0; rank < p.top_k; ++rank) {
        unsigned best;
        int place;
        best_of(key, best, place);
        const unsigned winning = __reduce_max_sync(kAllLanes, best);
        const unsigned expert = (place / kLaneExperts * 32 + lane) * kLaneExperts + place % kLaneExperts;
        const unsigned elected = __reduce_min_sync(kAllLanes, best == winning ? expert : 0xffffffffu);
        if (expert == elected) {
#pragma unroll
            for (int i = 0; i < Loads * kLaneExperts; ++i)
                if (i == place) key[i] = 0;
        }
        const float value = __uint_as_float(winning - 1);
        total += value;
        if (lane == rank) mine = value, p.ids[token * p.top_k + rank] = int(elected);
    }
    const float scale = p.renormalize ? 1.0f / (total > 0.0f ? total : 1.0f) : 1.0f;
    if (lane < p.top_k) p.weights[token * p.top_k + lane] = mine * scale;
}

// A group has about four tokens, which share the loads of a row.
__host__ __device__ constexpr int route_groups(int m) { return m >= 32 ? 8 : m >= 16 ? 4 : m >= 8 ? 2 : 1; }

template <bool Given>
__device__ __forceinline__ void elect_one(const RouteParams& p, int token) {
    if (p.experts <= 32 * kLaneExperts) {
        elect<1, Given>(p, token);
    } else {
        elect<2, Given>(p, token);
    }
}

// The last CTA has the shared expert's gate and elects, a warp a token, from logits as they come into their slots.
//
// It cannot wait for ever. No other CTA waits for anything but the launch ahead, and there is one that elects; a
// multiprocessor holds at least two CTAs. So whatever order CTAs start in, the others find a place beside it. The next launch
// takes none before all of these have begun, for each lets it start. Other streams' launches hold no more than one place each
// in this way: a card would need as many streams as it has places to stand still.
//
// Slots are empty between launches: every one that is written is awaited and emptied by the same launch, and its plain
// stores come before whatever waits for the launch's end, as each of our kernels does before it writes. A launch either is
// not enqueued, then it writes nothing, or runs to its end; what ends it half way ends the CUDA context with all its memory.
template <bool Single>
__global__ void __launch_bounds__(kRouteWarps * 32, Single ? 3 : 2) route_kernel(const __grid_constant__ RouteParams p) {
    const int warp = threadIdx.x / 32;
    const bool elects = blockIdx.x + 1 == gridDim.x;
    const int rows = elects ? 1 : Single ? kRouteWarps : kRouteWarps / p.groups, sharers = kRouteWarps / rows;
    const int each = Single ? 1 : (p.m + sharers - 1) / sharers;  // tokens of a warp
    const int row = elects ? p.experts : blockIdx.x * rows + warp % rows;
    const bool works = elects ? p.shared_gate != nullptr && warp * each < p.m : row < p.experts;
    const __nv_bfloat16* weights = elects ? p.shared_gate : p.router + int64_t(row) * p.hidden;
    uint4 held[kHeldChunks] = {};
    if (works) {
#pragma unroll
        for (int i = 0; i < kHeldChunks; ++i) held[i] = chunk_of(weights, i, p.hidden);
    }
    wait_for_producer();
    release_dependents();
    if (Single && works) store_products<1>(p, held, weights, row, 0);
    if (!Single && works) {
        int token = warp / rows * each;
        const int stop = min(token + each, p.m);
        for (; token + kRowTokens <= stop; token += kRowTokens) store_products<kRowTokens>(p, held, weights, row, token);
        if (kRowTokens > 2 && token + 2 <= stop) store_products<2>(p, held, weights, row, token), token += 2;
        if (token < stop) store_products<1>(p, held, weights, row, token);
    }
    if (elects) {  // from the last warp on: the first ones have the gate's products
        for (int token = kRouteWarps - 1 - warp; token < p.m; token += kRouteWarps) elect_one<false>(p, token);
    }
}

// The election alone, from logits that are given.
__global__ void __launch_bounds__(kRouteWarps * 32) elect_kernel(const __grid_constant__ RouteParams p) {
    wait_for_producer();
    release_dependents();
    for (int token = threadIdx.x / 32; token < p.m; token += kRouteWarps) elect_one<true>(p, token);
}

}  // namespace
}  // namespace nvfp4
