// The elected experts' two products.
#pragma once
#include "octet.cuh"

namespace nvfp4 {
namespace {

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

// Several tokens. A CTA has p.octets neighbouring octets of a routed expert's gate rows, or one of the shared expert's.
// Weights leave their registers as they are used, and what the warp needs next of the gate's or the up's rows is requested at
// once: the next step, the next tile of tokens (the same again, near by then) or the next octet.
template <int Warps>
__global__ void __launch_bounds__(Warps * 32, kGateUpWarps / Warps) gate_up_several_kernel(const __grid_constant__ MoeParams p) {
    constexpr int threads = Warps * 32, round = kMaxTokens;  // entries of a round
    constexpr int slots = 2 * kMaxTokens / kTileTokens;  // tiles of octets whose sums wait to be added up
    __shared__ float sums[slots][Warps][2][kTileValues];
    __shared__ Matches matches;
    __shared__ uint16_t entries[kMaxPairs];
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int shared_ctas = p.shared.count * p.octets;  // the shared expert has the most tokens and comes first
    const bool shared = int(blockIdx.y) < shared_ctas;
    const Experts& experts = shared ? p.shared : p.routed;
    const int size = experts.intermediate, pair = blockIdx.y - shared_ctas, steps = steps_of(p.hidden);
    const int octets = shared ? 1 : p.octets, first_octet = blockIdx.x * p.octets + (shared ? blockIdx.y : 0);
    const bool exists = first_octet < gate_octets(size);
    const Place place(first_octet, warp, p.hidden);

    int expert = 0, count = p.m;
    if (!shared || !exists) {
        wait_for_producer();
        release_dependents();
        if (!exists) return;
        expert = __ldcg(p.ids + pair);
        if (expert < 0 || expert >= experts.count) return;
        if (!match_pairs(p, pair, expert, matches)) return;
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
    } else {
        count = list_pairs(p, matches, entries);
    }
    const float gate_scale = experts.gate_scale[expert], up_scale = experts.up_scale[expert];  // not used before the end
    // Row of the intermediate buffer that an entry fills, and the token it belongs to.
    const auto row_at = [&](int entry) { return shared ? entry : int(entries[entry]); };
    const auto token_at = [&](int entry) { return shared ? entry : int(entries[entry]) / p.top_k; };

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

// One token: a CTA has one octet and requests all its weights at once.
template <int Warps>
__global__ void __launch_bounds__(Warps * 32, 20 / Warps) gate_up_single_kernel(const __grid_constant__ MoeParams p) {
    __shared__ float sums[Warps][2][kTileValues];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, pair = blockIdx.y - p.shared.count;
    const bool shared = pair < 0;
    const Experts& experts = shared ? p.shared : p.routed;
    const int size = experts.intermediate, steps = steps_of(p.hidden);
    const bool exists = int(blockIdx.x) < gate_octets(size);
    const __nv_bfloat16* x_row = g / kParts == 0 ? p.x : nullptr;
    Place place(blockIdx.x, warp, p.hidden);
    place.keep();
    int expert = 0;
    if (!shared) {
        wait_for_producer();
        release_dependents();
        expert = __ldcg(p.ids + pair);
    }
    const bool works = exists && expert >= 0 && expert < experts.count;
    Octet gate, up;
    const auto load = [&] {
        const uint8_t* packed = experts.w13 + int64_t(expert) * size * p.hidden;
        const uint8_t* scales = experts.w13_scales + int64_t(expert) * (size / 8) * p.hidden;
        // Up rows lie whole scale tiles further, or are other quarters of the same octet.
        const int64_t up_rows = up_octet(0, size) * kOctetRows;
        load_octet(gate, packed, scales, place, p.hidden);
        load_octet(up, packed + up_rows * (p.hidden / 2), scales + up_rows * ((p.hidden + 63) / 64 * 4), place, p.hidden);
    };
    float gate_scale = 0.0f, up_scale = 0.0f;
    if (works) {
        load();
        gate_scale = experts.gate_scale[expert], up_scale = experts.up_scale[expert];
    }
    if (shared) {
        wait_for_producer();
        release_dependents();
    }
    if (!works) return;
    Word4 x[4];
    load_activations(x, x_row, warp, p.hidden);
    float gate_sum = multiply(gate, x), up_sum = multiply(up, x);
#pragma unroll 1
    for (int step = warp + Warps; Warps == kWideWarps && step < steps; step += Warps) {
        place = place.moved(0, Warps, p.hidden);
        load();
        load_activations(x, x_row, step, p.hidden);
        gate_sum += multiply(gate, x), up_sum += multiply(up, x);
    }
    if (t / 2 == 0 && parts_meet(g, t)) sums[warp][0][lane_value(g, t)] = gate_sum, sums[warp][1][lane_value(g, t)] = up_sum;
    __syncthreads();
    const int row = value_row(blockIdx.x, threadIdx.x % kOctetRows), working = min(steps, Warps);
    if (threadIdx.x >= kOctetRows || row >= size) return;
    gate_sum = up_sum = 0.0f;
    for (int w = 0; w < working; ++w) gate_sum += sums[w][0][threadIdx.x], up_sum += sums[w][1][threadIdx.x + up_quarters(size) * 2];
    gate_sum = gate_sum * kUnscale * gate_scale, up_sum = up_sum * kUnscale * up_scale;
    const int64_t at = intermediate_offset(shared, shared ? 0 : pair, p.pairs, p.routed.intermediate, size);
    p.h[at + row] = __float2bfloat16_rn(gate_sum * sigmoid(gate_sum) * up_sum);
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
    const int row = shared ? 0 : warp - with_shared, size = experts.intermediate;
    Place place(blockIdx.x, 0, size);
    place.keep();
    int expert = 0;
    float weight = 1.0f;
    if (!shared) {
        expert = __ldcg(p.ids + row), weight = __ldcg(p.weights + row);
    } else if (p.shared_share) {
        weight = __ldcg(p.shared_share);
    }
    const bool works = expert >= 0 && expert < experts.count;
    Octet octet;
    float scale = 0.0f;
    if (works) load_down(octet, p, experts, expert, place), scale = experts.down_scale[expert];
    if (threadIdx.x % 32 == 0 && shared) memory.shares[0] = weight;
    if (threadIdx.x % 32 == 0 && !shared) memory.ids[row] = works ? expert : -1, memory.weights[row] = weight;
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

}  // namespace
}  // namespace nvfp4
