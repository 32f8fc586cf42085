// The mixture-of-experts block for a few tokens, NVFP4 experts read in place. Three kernels:
//   route     logits of every expert, one warp each; the CTA that finishes last elects the experts of every token
//   gate_up   h = bf16(silu(gate) * up) for every elected expert; a CTA has an octet of gate rows and their up rows, its
//             warps share the columns
//   down      y = sum of weight * (W2 h); a CTA has an octet of output rows, its warps share the elected experts
// An expert elected by several tokens is read once. Sums have a fixed order that no other token changes.
// Weights are requested before the kernel ahead has ended wherever that kernel does not decide which ones are needed.
// Every kernel waits for the one ahead before it lets the next start: so what a kernel reads from two launches ago is
// there from its first instruction on.
#include "moe.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "device.cuh"
#include "layout.cuh"
#include "plan.cuh"

namespace nvfp4 {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;

struct Experts {
    const uint8_t *w13, *w13_scales, *w2, *w2_scales;
    const float *gate_scale, *up_scale, *down_scale;
    int count, intermediate;
};

struct MoeParams {
    Experts routed, shared;
    const __nv_bfloat16* x;
    __nv_bfloat16* y;
    const int* ids;
    const float* weights;
    const float* shared_share;
    __nv_bfloat16* h;
    int64_t x_stride, y_stride;
    int m, hidden, top_k, pairs;
    int octets;  // of a CTA of gate_up
};

// Weights and scales of one step of an octet, as one lane holds them.
struct Octet {
    Word4 weights[4];
    Word4 scales;
};

// Where a lane finds its part of a step, in bytes from the start of an expert's matrix of k columns and of its scales.
// Known before the expert is, so that little is left to do between its election and the first request.
struct Place {
    int weights, scales, column;

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

// The pairs of a call that elected one expert, as a bit each.
struct Matches {
    unsigned mask[kMaxPairs / 32];
};

// Finds the pairs that elected the expert of `pair`; false unless it is the first of them. Needs a barrier before `matches`
// is written again.
__device__ __forceinline__ bool match_pairs(const MoeParams& p, int pair, int expert, Matches& matches) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, chunks = (p.pairs + 31) / 32;
    for (int chunk = warp; chunk < chunks; chunk += warps) {
        const int at = chunk * 32 + lane;
        const unsigned found = __ballot_sync(kAllLanes, at < p.pairs && __ldcg(p.ids + at) == expert);
        if (lane == 0) matches.mask[chunk] = found;
    }
    __syncthreads();
    for (int chunk = 0; chunk < pair / 32; ++chunk)
        if (matches.mask[chunk]) return false;
    return !(matches.mask[pair / 32] & ((1u << pair % 32) - 1));
}

// Lists those pairs in order and returns how many they are.
__device__ __forceinline__ int list_pairs(const MoeParams& p, const Matches& matches, uint16_t* entries) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, chunks = (p.pairs + 31) / 32;
    int before = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const unsigned found = matches.mask[chunk];
        if (chunk % warps == warp && found >> lane & 1) entries[before + __popc(found & ((1u << lane) - 1))] = uint16_t(chunk * 32 + lane);
        before += __popc(found);
    }
    __syncthreads();
    return before;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kGateUpWarps = 16;  // that a multiprocessor is meant to hold; more would spill here
#else
constexpr int kGateUpWarps = 20;
#endif
constexpr int kNarrowWarps = 4, kWideWarps = 8;  // of gate_up: a step of the columns each, up to 2048 or 4096

// Single: one token, so no lists. Otherwise a CTA has p.octets neighbouring octets of a routed expert's gate rows, or one of
// the shared expert's. Weights leave their registers as they are used, and what the warp needs next of the gate's or the
// up's rows is requested at once: the next step, the next tile of tokens (the same again, near by then) or the next octet.
template <int Warps, bool Single>
__global__ void __launch_bounds__(Warps * 32, (Single ? 20 : kGateUpWarps) / Warps) gate_up_kernel(const __grid_constant__ MoeParams p) {
    constexpr int threads = Warps * 32, round = Single ? kTileTokens : kMaxTokens;  // entries of a round
    constexpr int slots = Single ? 1 : 2 * kMaxTokens / kTileTokens;  // tiles of octets whose sums wait to be added up
    __shared__ float sums[slots][Warps][2][kTileValues];
    __shared__ Matches matches;
    __shared__ uint16_t entries[Single ? 1 : kMaxPairs];
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int shared_ctas = p.shared.count * p.octets;  // the shared expert has the most tokens and comes first
    const bool shared = int(blockIdx.y) < shared_ctas;
    const Experts& experts = shared ? p.shared : p.routed;
    const int size = experts.intermediate, pair = blockIdx.y - shared_ctas, steps = steps_of(p.hidden);
    const int octets = Single || shared ? 1 : p.octets, first_octet = blockIdx.x * p.octets + (shared ? blockIdx.y : 0);
    const bool exists = first_octet < gate_octets(size);
    const Place place(first_octet, warp, p.hidden);

    int expert = 0, count = Single ? 1 : p.m;
    if (!shared || !exists) {
        wait_for_producer();
        release_dependents();
        if (!exists) return;
        expert = __ldcg(p.ids + pair);
        if (expert < 0 || expert >= experts.count) return;
        if (!Single && !match_pairs(p, pair, expert, matches)) return;
    }
    const uint8_t* packed = experts.w13 + int64_t(expert) * size * p.hidden;
    const uint8_t* scales = experts.w13_scales + int64_t(expert) * (size / 8) * p.hidden;
    // Up rows lie whole scale tiles further, or are other quarters of the same octet.
    const uint8_t* up_packed = packed + int64_t(up_octet(0, size)) * kOctetRows * (p.hidden / 2);
    const uint8_t* up_scales = scales + int64_t(up_octet(0, size)) * kOctetRows * ((p.hidden + 63) / 64 * 4);
    Octet gate, up;
    load_octet(gate, packed, scales, place, p.hidden);
    load_octet(up, up_packed, up_scales, place, p.hidden);
    if (shared) {
        wait_for_producer();
        release_dependents();
    } else if (!Single) {
        count = list_pairs(p, matches, entries);
    }
    const float gate_scale = experts.gate_scale[expert], up_scale = experts.up_scale[expert];  // not used before the end
    // Row of the intermediate buffer that an entry fills, and the token it belongs to.
    const auto row_at = [&](int entry) { return shared ? entry : Single ? pair : int(entries[entry]); };
    const auto token_at = [&](int entry) { return Single ? 0 : shared ? entry : int(entries[entry]) / p.top_k; };

    for (int first = 0; first < count; first += round) {
        const int here = min(round, count - first), tiles = (here + kTileTokens - 1) / kTileTokens, batch = max(slots / tiles, 1);
        const bool same_activations = tiles == 1 && steps <= Warps;  // for all octets
        Word4 x[4];
        if (first > 0) {
            load_octet(gate, packed, scales, place, p.hidden);
            load_octet(up, up_packed, up_scales, place, p.hidden);
        }
#pragma unroll 1
        for (int done = 0; done < octets; done += batch) {
            const int stop = min(done + batch, octets);
#pragma unroll 1
            for (int octet = done, tile = 0; octet < stop;) {
                float(&slot_sums)[Warps][2][kTileValues] = sums[(octet - done) * tiles + tile];
                const bool last_tile = tile + 1 == tiles;
#pragma unroll 1
                for (int step = warp; step < steps; step += Warps) {
                    const bool again = step > warp, ends_row = step + Warps >= steps;
                    const int next_octet = ends_row && last_tile ? octet + 1 : octet;
                    const Place next = place.moved(next_octet, ends_row ? 0 : step + Warps - warp, p.hidden);
                    const int entry = tile * kTileTokens + g / kParts;
                    if (octet == 0 || !same_activations)
                        load_activations(x, entry < here ? p.x + token_at(first + entry) * p.x_stride : nullptr, step, p.hidden);
                    const float gate_sum = multiply(gate, x);
                    if (next_octet < octets) load_octet(gate, packed, scales, next, p.hidden);
                    const float up_sum = multiply(up, x);
                    if (next_octet < octets) load_octet(up, up_packed, up_scales, next, p.hidden);
                    if (parts_meet(g, t)) {
                        float &of_gate = slot_sums[warp][0][lane_value(g, t)], &of_up = slot_sums[warp][1][lane_value(g, t)];
                        of_gate = again ? of_gate + gate_sum : gate_sum;
                        of_up = again ? of_up + up_sum : up_sum;
                    }
                }
                octet += last_tile, tile = last_tile ? 0 : tile + 1;
            }
            __syncthreads();
            const int up_shift = up_quarters(size) * 2, working = min(steps, Warps), values = here * kOctetRows;
            for (int i = threadIdx.x; i < values * (stop - done); i += threads) {
                const int octet = i / values, entry = i % values / kOctetRows, value = i % values % kTileValues;
                const int row = value_row(first_octet + done + octet, value);
                if (row >= size) continue;
                const float(&slot_sums)[Warps][2][kTileValues] = sums[octet * tiles + entry / kTileTokens];
                float gate_sum = 0.0f, up_sum = 0.0f;
                for (int w = 0; w < working; ++w) {
                    gate_sum += slot_sums[w][0][value];
                    up_sum += slot_sums[w][1][value + up_shift];
                }
                gate_sum = gate_sum * kUnscale * gate_scale, up_sum = up_sum * kUnscale * up_scale;
                const int64_t at = intermediate_offset(shared, row_at(first + entry), p.pairs, p.routed.intermediate, size);
                p.h[at + row] = __float2bfloat16_rn(gate_sum * sigmoid(gate_sum) * up_sum);
            }
            if (stop < octets || first + round < count) __syncthreads();
        }
    }
}

// Shared memory of down_kernel: ids and weights of every pair, its expert's scale, the pairs whose expert is new, for each
// pair the next one of its expert, every token's share of the shared expert, sums of pairs and tokens.
struct DownMemory {
    int* ids;
    float* weights;
    float* scales;
    int* firsts;
    int* nexts;
    float* shares;
    float* values;

    __host__ __device__ static int padded(int pairs) { return (pairs + 31) / 32 * 32; }
    __host__ static size_t bytes(int pairs, int m, int rows) { return (padded(pairs) * 5 + kMaxTokens + (pairs + m) * rows) * sizeof(float); }
    __device__ DownMemory(void* memory, int pairs)
        : ids(static_cast<int*>(memory)), weights(reinterpret_cast<float*>(ids + padded(pairs))), scales(weights + padded(pairs)),
          firsts(ids + 3 * padded(pairs)), nexts(ids + 4 * padded(pairs)), shares(weights + 4 * padded(pairs)), values(shares + kMaxTokens) {}

    // Ids of no expert become negative.
    __device__ __forceinline__ void fill(const MoeParams& p) const {
        for (int i = threadIdx.x; i < padded(p.pairs); i += blockDim.x) {
            const int given = i < p.pairs ? __ldcg(p.ids + i) : -1, id = given < p.routed.count ? given : -1;
            ids[i] = id;
            scales[i] = id < 0 ? 0.0f : p.routed.down_scale[id];
            weights[i] = i < p.pairs ? __ldcg(p.weights + i) : 0.0f;
        }
        if (threadIdx.x < p.m) shares[threadIdx.x] = p.shared_share ? __ldcg(p.shared_share + threadIdx.x) : 1.0f;
    }
};

// Lists the pairs whose expert no earlier pair elected, and after each pair the next one of its expert, -1 after the last.
// Returns how many experts were elected. After fill().
__device__ __forceinline__ int elected_experts(const MoeParams& p, const DownMemory& memory) {
    __shared__ unsigned first_masks[kMaxPairs / 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, chunks = (p.pairs + 31) / 32;
    __syncthreads();
    for (int chunk = warp; chunk < chunks; chunk += warps) {
        const int at = chunk * 32 + lane, id = memory.ids[at];
        bool first = id >= 0;
        int next = -1;
#pragma unroll 4
        for (int i = chunks * 32 - 1; i >= 0; --i) {
            const bool same = memory.ids[i] == id;
            if (same && i > at) next = i;
            if (same && i < at) first = false;
        }
        memory.nexts[at] = next;
        const unsigned mask = __ballot_sync(kAllLanes, first);
        if (lane == 0) first_masks[chunk] = mask;
    }
    __syncthreads();
    int before = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const unsigned mask = first_masks[chunk];
        if (chunk % warps == warp && mask >> lane & 1) memory.firsts[before + __popc(mask & ((1u << lane) - 1))] = chunk * 32 + lane;
        before += __popc(mask);
    }
    __syncthreads();
    return before;
}

__device__ __forceinline__ void load_down(Octet& o, const MoeParams& p, const Experts& experts, int64_t expert, Place place) {
    const int size = experts.intermediate;
    load_octet(o, experts.w2 + expert * p.hidden * (size / 2), experts.w2_scales + expert * p.hidden * (size / 16), place, size);
}

// One token's experts, a warp each: slot 0 is the shared one where there is one.
__device__ __forceinline__ void down_single(const MoeParams& p, const DownMemory& memory) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, with_shared = p.shared.count;
    const bool shared = warp < with_shared;
    const Experts& experts = shared ? p.shared : p.routed;
    const int row = shared ? 0 : warp - with_shared, expert = shared ? 0 : __ldcg(p.ids + row), size = experts.intermediate;
    const Place place(blockIdx.x, 0, size);
    const bool works = expert >= 0 && expert < experts.count;
    Octet octet;
    float scale = 0.0f;
    if (works) load_down(octet, p, experts, expert, place), scale = experts.down_scale[expert];
    memory.fill(p);
    wait_for_producer();
    release_dependents();
    if (!works) return;
    const __nv_bfloat16* h = g / kParts == 0 ? p.h + intermediate_offset(shared, row, p.pairs, p.routed.intermediate, size) : nullptr;
    float sum = 0.0f;
    for (int step = 0; step < steps_of(size); ++step) {
        if (step > 0) load_down(octet, p, experts, expert, Place(blockIdx.x, step, size));
        Word4 x[4];
        load_activations(x, h, step, size);
        sum = fmaf(multiply(octet, x) * kUnscale, scale, sum);
    }
    if (t / 2 == 0 && parts_meet(g, t)) memory.values[((shared ? p.pairs : 0) + row) * kOctetRows + lane_value(g, t)] = sum;
}

constexpr int kSeveralOctets = 2;  // of output rows, neighbours, of a CTA that serves several tokens
constexpr int kSeveralRows = kSeveralOctets * kOctetRows;

// Several tokens' experts, dealt out to the warps; the shared expert comes first, each two of its tokens as an expert of
// their own. Weights leave their registers as they are used, and what the warp needs next is requested at once: the same
// again for an expert's next two tokens, the next step of its columns or the next expert.
__device__ __forceinline__ void down_several(const MoeParams& p, const DownMemory& memory) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    const int of_shared = p.shared.count ? (p.m + kTileTokens - 1) / kTileTokens : 0;
    const int routed_size = p.routed.intermediate, shared_size = p.shared.intermediate;
    const float shared_scale = p.shared.count ? *p.shared.down_scale : 0.0f;
    memory.fill(p);
    const int slots = elected_experts(p, memory) + of_shared;
    const auto first_of = [&](int slot) { return slot >= slots ? -1 : slot < of_shared ? slot * kTileTokens : memory.firsts[slot - of_shared]; };
    const auto load = [&](Octet& o, int slot, int first, int step, int octet) {
        const bool shared = slot < of_shared;
        const int size = shared ? shared_size : routed_size;
        const Place place = Place(blockIdx.x * kSeveralOctets, 0, size).moved(octet, step, size);
        load_down(o, p, shared ? p.shared : p.routed, shared ? 0 : memory.ids[first], place);
    };
    const auto second_of = [&](int slot, int row) { return slot >= of_shared ? memory.nexts[row] : row + 1 < p.m ? row + 1 : -1; };
    const auto activations = [&](Word4(&x)[4], int slot, int row, int second, int step) {
        const bool shared = slot < of_shared;
        const int size = shared ? shared_size : routed_size, mine = g / kParts ? second : row;
        load_activations(x, mine < 0 ? nullptr : p.h + intermediate_offset(shared, mine, p.pairs, routed_size, size), step, size);
    };
    int slot = warp, step = 0, row = first_of(slot);  // row: the first of the two pairs, or tokens, to be served
    Octet octets[kSeveralOctets];
    if (slot < slots) {
#pragma unroll
        for (int o = 0; o < kSeveralOctets; ++o) load(octets[o], slot, row, 0, o);
    }
    wait_for_producer();
    release_dependents();

    int second = slot < slots ? second_of(slot, row) : -1;
    Word4 x[4];
    if (slot < slots) activations(x, slot, row, second, 0);
#pragma unroll 1
    while (slot < slots) {
        const bool shared = slot < of_shared;
        const int stored = t / 2 ? second : row;
        const float scale = (shared ? shared_scale : memory.scales[row]) * kUnscale;
        int next_row = shared || second < 0 ? -1 : memory.nexts[second], next_step = step, next_slot = slot;
        if (next_row < 0) {
            const bool ends = step + 1 >= steps_of(shared ? shared_size : routed_size);
            next_step = ends ? 0 : step + 1, next_slot = ends ? slot + warps : slot, next_row = first_of(next_slot);
        }
        const int next_second = next_slot < slots ? second_of(next_slot, next_row) : -1;
        Word4 next_x[4];
        if (next_slot < slots) activations(next_x, next_slot, next_row, next_second, next_step);
#pragma unroll
        for (int o = 0; o < kSeveralOctets; ++o) {
            const float sum = multiply(octets[o], x);
            if (next_slot < slots) load(octets[o], next_slot, next_row, next_step, o);
            if (stored >= 0 && parts_meet(g, t)) {
                float& value = memory.values[((shared ? p.pairs : 0) + stored) * kSeveralRows + o * kOctetRows + lane_value(g, t) % kOctetRows];
                value = fmaf(sum, scale, step > 0 ? value : 0.0f);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = next_x[i];
        row = next_row, second = next_second, step = next_step, slot = next_slot;
    }
}

// Single: one token, whose experts have a warp each.
constexpr int kSingleWarps = 9, kSeveralWarps = 16;

template <bool Single>
__global__ void __launch_bounds__((Single ? kSingleWarps : kSeveralWarps) * 32, Single ? 2 : 1) down_kernel(const __grid_constant__ MoeParams p) {
    constexpr int octets = Single ? 1 : kSeveralOctets, rows = octets * kOctetRows;
    const DownMemory memory(dynamic_shared(), p.pairs);
    if (Single) {
        down_single(p, memory);
    } else {
        down_several(p, memory);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.m * rows; i += blockDim.x) {
        const int token = i / rows, value = i % rows;
        float sum = 0.0f;
        for (int rank = 0; rank < p.top_k; ++rank) {
            const int pair = token * p.top_k + rank;
            if (memory.ids[pair] >= 0) sum = fmaf(memory.weights[pair], memory.values[pair * rows + value], sum);
        }
        if (p.shared.count) sum = fmaf(memory.shares[token], memory.values[(p.pairs + token) * rows + value], sum);
        const int octet = blockIdx.x * octets + value / kOctetRows;
        p.y[token * p.y_stride + value_row(octet, value % kOctetRows)] = __float2bfloat16_rn(sum);
    }
}

struct RouteParams {
    const __nv_bfloat16 *x, *router, *shared_gate;
    __nv_bfloat16* logits;
    int* ids;
    float *weights, *shared_share;
    unsigned* arrived;
    int64_t x_stride;
    int m, hidden, experts, top_k, renormalize;
    int groups;  // of warps that share a CTA's rows, each with tokens of its own
};

constexpr int kRouteWarps = 8;
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

// Products of a router row with `Tokens` tokens from the first on, in every lane. held: the row's first chunks.
template <int Tokens>
__device__ __forceinline__ void row_products(const RouteParams& p, const uint4 (&held)[kHeldChunks], const __nv_bfloat16* row, int first, float (&product)[Tokens]) {
    float sums[Tokens][2] = {};
    const __nv_bfloat16* x = p.x + first * p.x_stride;
    const int chunks = (p.hidden + kChunkColumns - 1) / kChunkColumns;
#pragma unroll
    for (int i = 0; i < kHeldChunks; ++i)
        if (i < chunks)
#pragma unroll
            for (int token = 0; token < Tokens; ++token) add_products(sums[token], held[i], chunk_of(x + token * p.x_stride, i, p.hidden));
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
            p.logits[int64_t(first + token) * p.experts + row] = __float2bfloat16_rn(product[token]);
        }
    }
}

// Elects a token's experts from its logits, one warp. Softmax, its order of sums, what is not finite and ties as in the
// stock kernel: the probabilities decide, not the logits, and of equal ones the lower expert.
template <int Loads>
__device__ __forceinline__ void elect(const RouteParams& p, int token) {
    const int lane = threadIdx.x % 32;
    float probability[Loads * kLaneExperts];
    float top = -INFINITY;
#pragma unroll
    for (int load = 0; load < Loads; ++load) {
        const int expert = (load * 32 + lane) * kLaneExperts;
        uint4 raw = make_uint4(0xff80ff80u, 0xff80ff80u, 0xff80ff80u, 0xff80ff80u);  // minus infinity: no probability
        if (expert < p.experts) raw = __ldcg(reinterpret_cast<const uint4*>(p.logits + int64_t(token) * p.experts + expert));
        const unsigned pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            probability[load * kLaneExperts + 2 * i] = __uint_as_float(pairs[i] << 16);
            probability[load * kLaneExperts + 2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
        }
    }
#pragma unroll
    for (int i = 0; i < Loads * kLaneExperts; ++i) top = fmaxf(top, probability[i]);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, mask));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Loads * kLaneExperts; ++i) {
        const bool exists = (i / kLaneExperts * 32 + lane) * kLaneExperts < p.experts;
        probability[i] = exists ? expf(probability[i] - top) : 0.0f;
        sum += probability[i];
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(kAllLanes, sum, mask);
    const float inverse = 1.0f / sum;
    // As integers: probabilities are not negative, so their bits have their order, and 0 is left for what is taken.
    unsigned key[Loads * kLaneExperts];
#pragma unroll
    for (int i = 0; i < Loads * kLaneExperts; ++i) {
        const float value = probability[i] * inverse;
        const bool exists = (i / kLaneExperts * 32 + lane) * kLaneExperts < p.experts;
        key[i] = exists ? (isfinite(value) ? __float_as_uint(value) : 0u) + 1u : 0u;
    }
    float total = 0.0f, mine = 0.0f;
    for (int rank = 0; rank < p.top_k; ++rank) {
        unsigned best = 0;
        int place = 0;
#pragma unroll
        for (int i = 0; i < Loads * kLaneExperts; ++i)
            if (key[i] > best) best = key[i], place = i;
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

__device__ __forceinline__ void elect_all(const RouteParams& p) {
    for (int token = threadIdx.x / 32; token < p.m; token += kRouteWarps) {
        if (p.experts <= 32 * kLaneExperts) {
            elect<1>(p, token);
        } else {
            elect<2>(p, token);
        }
    }
}

__global__ void __launch_bounds__(kRouteWarps * 32) route_kernel(const __grid_constant__ RouteParams p) {
    const int warp = threadIdx.x / 32, rows = kRouteWarps / p.groups, each = (p.m + p.groups - 1) / p.groups;
    const int row = blockIdx.x * rows + warp % rows;  // the row after the experts' is the shared expert's gate
    const bool works = row < p.experts + (p.shared_gate ? 1 : 0);
    const __nv_bfloat16* weights = row == p.experts ? p.shared_gate : p.router + int64_t(row) * p.hidden;
    uint4 held[kHeldChunks] = {};
    if (works) {
#pragma unroll
        for (int i = 0; i < kHeldChunks; ++i) held[i] = chunk_of(weights, i, p.hidden);
    }
    wait_for_producer();
    release_dependents();
    if (works) {
        int token = warp / rows * each;
        const int stop = min(token + each, p.m);
        for (; token + 4 <= stop; token += 4) store_products<4>(p, held, weights, row, token);
        if (token + 2 <= stop) store_products<2>(p, held, weights, row, token), token += 2;
        if (token < stop) store_products<1>(p, held, weights, row, token);
    }
    __shared__ unsigned arrived_before;
    __syncthreads();  // orders every warp's logits before thread 0's release, which publishes them all
    if (threadIdx.x == 0) arrived_before = arrive(p.arrived);
    __syncthreads();
    if (arrived_before != gridDim.x - 1) return;
    if (threadIdx.x == 0) *p.arrived = 0;
    elect_all(p);
}

// The election alone, from logits that are given.
__global__ void __launch_bounds__(kRouteWarps * 32) elect_kernel(const __grid_constant__ RouteParams p) {
    wait_for_producer();
    release_dependents();
    elect_all(p);
}

template <class Kernel, class Params>
cudaError_t launch(Kernel kernel, const Params& params, dim3 grid, int threads, size_t shared_bytes, bool dependent, void* stream) {
    int device = 0, major = 0;
    if (const auto error = cudaGetDevice(&device)) return error;
    if (const auto error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return error;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = dependent && major >= 9 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, params);
}

Experts experts_of(const Nvfp4Experts& e) {
    const auto bytes = [](const void* p) { return static_cast<const uint8_t*>(p); };
    const auto floats = [](const void* p) { return static_cast<const float*>(p); };
    return {bytes(e.w13),         bytes(e.w13_scales),  bytes(e.w2), bytes(e.w2_scales), floats(e.gate_scale),
            floats(e.up_scale), floats(e.down_scale), e.count,     e.intermediate};
}

// Of a gate_up CTA, a power of two: more where there are CTAs enough for every multiprocessor.
int octets_of_cta(int pairs) { return pairs > 32 ? 4 : pairs > 8 ? 2 : 1; }

bool takes(int intermediate) { return intermediate == 64 || (intermediate > 0 && intermediate % kTileRows == 0); }

}  // namespace
}  // namespace nvfp4

using namespace nvfp4;

int32_t nvfp4_moe_call_bytes(void) { return sizeof(Nvfp4MoeCall); }
int32_t nvfp4_route_call_bytes(void) { return sizeof(Nvfp4RouteCall); }
int32_t nvfp4_moe_tokens(void) { return kMaxTokens; }
const char* nvfp4_moe_error_name(int32_t error) { return cudaGetErrorName(static_cast<cudaError_t>(error)); }

int32_t nvfp4_moe_route(const Nvfp4RouteCall* call, void* stream) {
    if (call->m < 1 || call->m > kMaxTokens || call->top_k < 1 || call->top_k > kMaxTopK || call->top_k > call->experts) return cudaErrorInvalidValue;
    if (call->experts < 1 || call->experts > kMaxExperts || call->experts % kLaneExperts) return cudaErrorInvalidValue;
    const auto halfs = [](const void* p) { return static_cast<const __nv_bfloat16*>(p); };
    const RouteParams params{halfs(call->x), halfs(call->router), halfs(call->shared_gate), static_cast<__nv_bfloat16*>(call->logits),
                             static_cast<int*>(call->ids), static_cast<float*>(call->weights), static_cast<float*>(call->shared_share),
                             static_cast<unsigned*>(call->arrived), call->x_stride, call->m, call->hidden, call->experts, call->top_k, call->renormalize,
                             route_groups(call->m)};
    if (!call->x) return launch(elect_kernel, params, dim3(1), kRouteWarps * 32, 0, call->dependent, stream);
    if (call->hidden < 1 || call->hidden % kTileRows) return cudaErrorInvalidValue;
    const int rows = call->experts + (call->shared_gate ? 1 : 0), each = kRouteWarps / params.groups;
    return launch(route_kernel, params, dim3((rows + each - 1) / each), kRouteWarps * 32, 0, call->dependent, stream);
}

int32_t nvfp4_moe_experts(const Nvfp4MoeCall* call, void* stream) {
    if (call->m < 1 || call->m > kMaxTokens || call->top_k < 1 || call->top_k > kMaxTopK) return cudaErrorInvalidValue;
    if (call->hidden < 1 || call->hidden % kTileRows || !takes(call->routed.intermediate) || call->routed.count < 1) return cudaErrorInvalidValue;
    if (call->shared.count < 0 || call->shared.count > 1 || (call->shared.count && !takes(call->shared.intermediate))) return cudaErrorInvalidValue;
    const int pairs = call->m * call->top_k, slots = call->top_k + (call->shared.count ? 1 : 0);
    MoeParams params{experts_of(call->routed), experts_of(call->shared), static_cast<const __nv_bfloat16*>(call->x),
                           static_cast<__nv_bfloat16*>(call->y), static_cast<const int*>(call->ids), static_cast<const float*>(call->weights),
                           static_cast<const float*>(call->shared_share), static_cast<__nv_bfloat16*>(call->intermediate), call->x_stride,
                           call->y_stride, call->m, call->hidden, call->top_k, pairs, 1};
    const int of_routed = gate_octets(call->routed.intermediate), of_shared = call->shared.count ? gate_octets(call->shared.intermediate) : 0;
    const int most = of_routed > of_shared ? of_routed : of_shared;
    const bool dependent = call->dependent;
    const bool wide = steps_of(call->hidden) > kNarrowWarps, single = call->m == 1;
    if (call->octets < 0 || call->octets > kTileOctets || call->octets & (call->octets - 1)) return cudaErrorInvalidValue;
    params.octets = single ? 1 : call->octets ? call->octets : octets_of_cta(pairs);
    const dim3 grid(most / params.octets, pairs + call->shared.count * params.octets);
    const auto gate_up = wide ? (single ? gate_up_kernel<kWideWarps, true> : gate_up_kernel<kWideWarps, false>)
                              : (single ? gate_up_kernel<kNarrowWarps, true> : gate_up_kernel<kNarrowWarps, false>);
    if (const auto error = launch(gate_up, params, grid, (wide ? kWideWarps : kNarrowWarps) * 32, 0, dependent, stream)) return error;
    const bool each = single && slots <= kSingleWarps;
    const int octets = each ? 1 : kSeveralOctets;
    return launch(each ? down_kernel<true> : down_kernel<false>, params, dim3(call->hidden / (octets * kOctetRows)),
                  (each ? slots : kSeveralWarps) * 32, DownMemory::bytes(pairs, call->m, octets * kOctetRows), dependent, stream);
}
