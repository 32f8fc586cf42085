// One token's step of the gated delta net: convolution, SiLU, norms of q and k, gates, state, output.
//
// At few tokens all that counts is how many memory latencies follow each other. A CTA holds some rows (of v) of one
// head's state in registers and computes the 256 channels of q and k that it needs itself; both products with the state
// are taken before its update, as q (g S + d k) = g (q S) + d (q k). Only the last three tokens of q's and k's channels
// are shared between CTAs: who arrives last after all have read them may shift them. Nobody waits for another CTA.
// What other kernels write is read past the first cache: some of it before the kernel ahead has ended.
#include "gdn_decode.h"
#include "device.cuh"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace nvfp4 {
namespace {

constexpr int kHead = 128;                    // dimension of every head
constexpr int kWorkers = kHead;               // threads that compute: two channels of q or k each
constexpr int kThreads = kWorkers + 32;       // and a warp for the counter, whose fence stalls it, and the gates
constexpr int kRowLanes = 8;                  // lanes that share a row of the state
constexpr int kPassRows = kWorkers / kRowLanes;
// Both measured: docs/kernels-linear.md, "In a step".
constexpr int kManyHeads = 144;               // of all tokens, from which 64 rows to a CTA take less time than 32
constexpr int kPassingPart = 6;               // states of this part of the L2 and more leave it first
constexpr float kNormEpsilon = 1e-6f;         // vLLM's kernels
constexpr float kSoftplusThreshold = 20.0f;   // the same

struct DecodeParams {
    const __nv_bfloat16 *x, *weight, *bias, *a, *b;
    const void *a_log, *dt_bias;
    const int32_t* indices;
    __nv_bfloat16* conv_state;
    void* state;
    __nv_bfloat16* out;
    unsigned* counters;
    int64_t x_stride, a_stride, b_stride, index_stride, conv_slot_stride, conv_token_stride, state_slot_stride;
    float scale;
    int key_heads, value_heads, group, group_inverse;  // value heads to a key head, and how to divide by it
    bool a_log_is_bf16, dt_bias_is_bf16, early, leave_first;  // the L2, what is written to it
};

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

__device__ __forceinline__ uint32_t packed(float low, float high) {
    return __float_as_uint(rounded(low)) >> 16 | __float_as_uint(rounded(high));
}

__device__ __forceinline__ float silu(float value) { return __fdividef(value, 1.0f + __expf(-value)); }

__device__ __forceinline__ float parameter(const void* values, bool is_bf16, int i) {
    return is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(values)[i]) : static_cast<const float*>(values)[i];
}

// 16 bytes of a row of the state.
template <class T>
struct Piece;

template <>
struct Piece<float> {
    static constexpr int columns = 4;
    static __device__ __forceinline__ void unpack(const uint4& from, float (&to)[4]) {
        to[0] = __uint_as_float(from.x), to[1] = __uint_as_float(from.y);
        to[2] = __uint_as_float(from.z), to[3] = __uint_as_float(from.w);
    }
    static __device__ __forceinline__ uint4 pack(const float (&from)[4]) {
        return make_uint4(__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]), __float_as_uint(from[3]));
    }
};

template <>
struct Piece<__nv_bfloat16> {
    static constexpr int columns = 8;
    static __device__ __forceinline__ void unpack(const uint4& from, float (&to)[8]) {
        to[0] = low_half(from.x), to[1] = high_half(from.x), to[2] = low_half(from.y), to[3] = high_half(from.y);
        to[4] = low_half(from.z), to[5] = high_half(from.z), to[6] = low_half(from.w), to[7] = high_half(from.w);
    }
    static __device__ __forceinline__ uint4 pack(const float (&from)[8]) {
        return make_uint4(packed(from[0], from[1]), packed(from[2], from[3]), packed(from[4], from[5]), packed(from[6], from[7]));
    }
};

// Two neighbouring channels of the convolution, from their weights to their state.
struct ChannelPair {
    int64_t channel;
    uint4 weights;
    uint32_t past[3], now;
    float sums[2];

    __device__ __forceinline__ void request_weights(const DecodeParams& p, int64_t first) {
        channel = first;
        weights = *reinterpret_cast<const uint4*>(p.weight + channel * 4);
        sums[0] = p.bias ? __bfloat162float(p.bias[channel]) : 0.0f;
        sums[1] = p.bias ? __bfloat162float(p.bias[channel + 1]) : 0.0f;
    }

    __device__ __forceinline__ uint32_t* place(const DecodeParams& p, int64_t slot, int i) const {
        return reinterpret_cast<uint32_t*>(p.conv_state + slot * p.conv_slot_stride + i * p.conv_token_stride + channel);
    }

    __device__ __forceinline__ void request_past(const DecodeParams& p, int64_t slot) {
#pragma unroll
        for (int i = 0; i < 3; ++i) past[i] = __ldcg(place(p, slot, i));
    }

    __device__ __forceinline__ void add_past() {
        sums[0] += low_half(weights.x) * low_half(past[0]), sums[1] += low_half(weights.z) * high_half(past[0]);
        sums[0] += high_half(weights.x) * low_half(past[1]), sums[1] += high_half(weights.z) * high_half(past[1]);
        sums[0] += low_half(weights.y) * low_half(past[2]), sums[1] += low_half(weights.w) * high_half(past[2]);
    }

    __device__ __forceinline__ void request_now(const DecodeParams& p, int token) {
        now = __ldcg(reinterpret_cast<const uint32_t*>(p.x + token * p.x_stride + channel));
    }

    // Rounded as vLLM rounds between its two kernels.
    __device__ __forceinline__ void finish(float* to) const {
        to[0] = rounded(silu(sums[0] + high_half(weights.y) * low_half(now)));
        to[1] = rounded(silu(sums[1] + high_half(weights.w) * high_half(now)));
    }

    __device__ __forceinline__ void shift(const DecodeParams& p, int64_t slot) const {
        *place(p, slot, 0) = past[1], *place(p, slot, 1) = past[2], *place(p, slot, 2) = now;
    }
};

struct Gates {
    float decay, beta;
};

// Accurate functions: an error in the decay comes back with every step.
__device__ __forceinline__ Gates gates_of(const DecodeParams& p, int token, int head, float a_log, float dt_bias) {
    const float a = __bfloat162float(p.a[token * p.a_stride + head]), b = __bfloat162float(p.b[token * p.b_stride + head]);
    const float x = a + dt_bias, softplus = x <= kSoftplusThreshold ? log1pf(expf(x)) : x;
    return {expf(-expf(a_log) * softplus), 1.0f / (1.0f + expf(-b))};
}

// What the threads of a CTA tell each other.
template <int Rows>
struct Exchange {
    alignas(16) float q[kHead], k[kHead];
    float v[Rows];
    Gates gates;
    bool last;
};

// A worker's share of the state: a lane's pieces of every Passes-th row.
template <class T, int Passes>
struct Tile {
    static constexpr int columns = Piece<T>::columns, pieces = kHead / kRowLanes / columns;
    uint4 held[Passes][pieces];
    T* first;  // of this lane, in its first row

    __device__ __forceinline__ explicit Tile(T* rows) : first(rows + threadIdx.x / kRowLanes * kHead + threadIdx.x % kRowLanes * columns) {}

    __device__ __forceinline__ uint4* place(int pass, int piece) const {
        return reinterpret_cast<uint4*>(first + pass * kPassRows * kHead + piece * kRowLanes * columns);
    }

    __device__ __forceinline__ void request() {
#pragma unroll
        for (int pass = 0; pass < Passes; ++pass) {
#pragma unroll
            for (int piece = 0; piece < pieces; ++piece) held[pass][piece] = __ldcg(place(pass, piece));
        }
    }

    // Not a plain store, which may be taken apart.
    static __device__ __forceinline__ void store(uint4* to, uint4 piece, bool leave_first) {
        if (leave_first) {
            __stcs(to, piece);
        } else {
            __stcg(to, piece);
        }
    }

    static __device__ __forceinline__ void read(const float* from, float (&to)[pieces][columns]) {
#pragma unroll
        for (int i = 0; i < pieces * columns; i += 4) {
            const int column = i / columns * kRowLanes * columns + threadIdx.x % kRowLanes * columns + i % columns;
            Piece<float>::unpack(*reinterpret_cast<const uint4*>(from + column), *reinterpret_cast<float(*)[4]>(&to[i / columns][i % columns]));
        }
    }

    // Multiplies the state with k and q, updates it in memory, and stores the rows' outputs.
    template <int Rows>
    __device__ __forceinline__ void step(const DecodeParams& p, const Exchange<Rows>& from, __nv_bfloat16* out) const {
        const Gates gates = from.gates;
        float k[pieces][columns], q[pieces][columns];
        read(from.k, k), read(from.q, q);
        float products[2 * Passes + 3] = {};  // k S, q S of each row, then k k, q q, q k
#pragma unroll
        for (int piece = 0; piece < pieces; ++piece) {
#pragma unroll
            for (int i = 0; i < columns; ++i) {
                products[2 * Passes] += k[piece][i] * k[piece][i];
                products[2 * Passes + 1] += q[piece][i] * q[piece][i];
                products[2 * Passes + 2] += q[piece][i] * k[piece][i];
            }
#pragma unroll
            for (int pass = 0; pass < Passes; ++pass) {
                float s[columns];
                Piece<T>::unpack(held[pass][piece], s);
#pragma unroll
                for (int i = 0; i < columns; ++i) products[2 * pass] += s[i] * k[piece][i], products[2 * pass + 1] += s[i] * q[piece][i];
            }
        }
#pragma unroll
        for (int lanes = 1; lanes < kRowLanes; lanes *= 2) {
#pragma unroll
            for (float& product : products) product += __shfl_xor_sync(~0u, product, lanes);
        }
        const float k_norm = rsqrtf(products[2 * Passes] + kNormEpsilon), q_norm = p.scale * rsqrtf(products[2 * Passes + 1] + kNormEpsilon);
#pragma unroll
        for (int pass = 0; pass < Passes; ++pass) {
            const int row = pass * kPassRows + threadIdx.x / kRowLanes;
            const float delta = gates.beta * (from.v[row] - gates.decay * k_norm * products[2 * pass]) * k_norm;
#pragma unroll
            for (int piece = 0; piece < pieces; ++piece) {
                float s[columns];
                Piece<T>::unpack(held[pass][piece], s);
#pragma unroll
                for (int i = 0; i < columns; ++i) s[i] = gates.decay * s[i] + delta * k[piece][i];
                store(place(pass, piece), Piece<T>::pack(s), p.leave_first);
            }
            const float o = q_norm * (gates.decay * products[2 * pass + 1] + delta * products[2 * Passes + 2]);
            if (threadIdx.x % kRowLanes == 0) out[row] = __float2bfloat16_rn(o);
        }
    }
};

// The last warp's part: tells whether this CTA is the last of its token and key head, and the gates.
template <int Rows>
__device__ __forceinline__ void keep_count(const DecodeParams& p, Exchange<Rows>& exchange, int key, int head, int token, float a_log, float dt_bias) {
    bool last = false;
    if (threadIdx.x == kWorkers) {
        unsigned* counter = p.counters + token * p.key_heads + key;
        last = arrive(counter) + 1 == unsigned(p.group * (kHead / Rows));
        if (last) *counter = 0;
    }
    wait_for_producer();
    release_dependents();
    if (threadIdx.x == kWorkers) {
        exchange.last = last;
        exchange.gates = gates_of(p, token, head, a_log, dt_bias);
    }
}

template <class T, int Rows>
__global__ void __launch_bounds__(kThreads) decode_kernel(const __grid_constant__ DecodeParams p) {
    constexpr int slices = kHead / Rows;
    __shared__ Exchange<Rows> exchange;
    const int slice = blockIdx.x % slices, head = blockIdx.x / slices, token = blockIdx.y;
    const int key = head * p.group_inverse >> 16, t = threadIdx.x;
    const bool worker = t < kWorkers, has_v = t < Rows / 2;
    ChannelPair qk, v;
    if (worker) qk.request_weights(p, (t / (kHead / 2) * p.key_heads + key) * kHead + t % (kHead / 2) * 2);
    if (has_v) v.request_weights(p, (2 * p.key_heads + head) * kHead + slice * Rows + t * 2);
    const float a_log = worker ? 0.0f : parameter(p.a_log, p.a_log_is_bf16, head);
    const float dt_bias = worker ? 0.0f : parameter(p.dt_bias, p.dt_bias_is_bf16, head);
    __nv_bfloat16* out = p.out + (int64_t(token) * p.value_heads + head) * kHead + slice * Rows;

    if (!p.early) wait_for_producer();
    const int64_t slot = __ldcg(p.indices + token * p.index_stride);
    if (slot <= 0) {  // no request's token: as vLLM does, its states stay and its output is zero
        wait_for_producer();
        release_dependents();
        if (t < Rows) out[t] = __float2bfloat16_rn(0.0f);
        return;
    }
    Tile<T, Rows / kPassRows> tile(static_cast<T*>(p.state) + slot * p.state_slot_stride + (int64_t(head) * kHead + slice * Rows) * kHead);
    if (worker) {
        qk.request_past(p, slot);
        if (has_v) v.request_past(p, slot);
        tile.request();
        qk.add_past();
        if (has_v) v.add_past();
    }
    __syncthreads();  // all have read the past of q and k
    if (worker) {
        wait_for_producer();
        release_dependents();
        qk.request_now(p, token);
        if (has_v) v.request_now(p, token);
        qk.finish((t < kHead / 2 ? exchange.q : exchange.k) + t % (kHead / 2) * 2);
        if (has_v) v.finish(exchange.v + t * 2);
    } else {
        keep_count(p, exchange, key, head, token, a_log, dt_bias);
    }
    __syncthreads();
    if (!worker) return;
    tile.step(p, exchange, out);
    if (exchange.last) qk.shift(p, slot);
    if (has_v) v.shift(p, slot);
}

using DecodeKernel = void (*)(DecodeParams);

DecodeKernel kernel_of(bool state_is_bf16, int rows) {
    switch (rows) {
        case 16: return state_is_bf16 ? decode_kernel<__nv_bfloat16, 16> : decode_kernel<float, 16>;
        case 32: return state_is_bf16 ? decode_kernel<__nv_bfloat16, 32> : decode_kernel<float, 32>;
        case 64: return state_is_bf16 ? decode_kernel<__nv_bfloat16, 64> : decode_kernel<float, 64>;
        default: return nullptr;
    }
}

DecodeParams params_of(const GdnDecodeCall& c, bool leave_first) {
    const int group = c.value_heads / c.key_heads;
    const auto bf16 = [](const void* p) { return static_cast<const __nv_bfloat16*>(p); };
    return {bf16(c.x), bf16(c.weight), bf16(c.bias), bf16(c.a), bf16(c.b), c.a_log, c.dt_bias,
            static_cast<const int32_t*>(c.indices), static_cast<__nv_bfloat16*>(c.conv_state), c.state,
            static_cast<__nv_bfloat16*>(c.out), static_cast<unsigned*>(c.counters),
            c.x_stride, c.a_stride, c.b_stride, c.index_stride, c.conv_slot_stride, c.conv_token_stride, c.state_slot_stride,
            c.scale, c.key_heads, c.value_heads, group, 65536 / group + 1, c.a_log_is_bf16 != 0, c.dt_bias_is_bf16 != 0, c.early != 0, leave_first};
}

}  // namespace
}  // namespace nvfp4

using namespace nvfp4;

int32_t gdn_decode_call_bytes(void) { return sizeof(GdnDecodeCall); }

const char* gdn_error_name(int32_t error) { return cudaGetErrorName(static_cast<cudaError_t>(error)); }

int32_t gdn_decode(const GdnDecodeCall* call, void* stream) {
    const int64_t heads = int64_t(call->tokens) * call->value_heads;
    const int rows = call->rows ? call->rows : heads < kManyHeads ? 32 : 64;
    const DecodeKernel kernel = kernel_of(call->state_is_bf16, rows);
    if (!kernel || call->tokens < 1 || call->tokens > 65535 || call->key_heads < 1) return cudaErrorInvalidValue;
    // Up to 1024 heads a multiplication and a shift divide exactly.
    if (call->value_heads < 1 || call->value_heads > 1024 || call->value_heads % call->key_heads || call->value_heads / call->key_heads > 4) return cudaErrorInvalidValue;
    int device = 0, major = 0, cache_bytes = 0;
    if (const auto error = cudaGetDevice(&device)) return error;
    if (const auto error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return error;
    if (const auto error = cudaDeviceGetAttribute(&cache_bytes, cudaDevAttrL2CacheSize, device)) return error;
    // What is written waits in the L2 until something takes its place: of many states, that would be the next layers' weights.
    const bool leave_first = heads * kHead * kHead * (call->state_is_bf16 ? 2 : 4) >= cache_bytes / kPassingPart;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(call->value_heads * (kHead / rows)), unsigned(call->tokens));
    config.blockDim = dim3(kThreads);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = call->dependent && major >= 9 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, params_of(*call, leave_first));
}
