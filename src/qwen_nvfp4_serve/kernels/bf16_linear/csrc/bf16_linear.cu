// y[M, N] = x[M, K] W[N, K]^T (+ bias[N]) for small M: bf16 weights, activations and results, float32 sums.
//
// The layers that a checkpoint leaves unquantized are most of a decode step's bytes, so all that counts is to have
// enough of them under way. Rows are dealt out evenly to resident CTAs. The warps of a CTA share the columns of a row
// block, each keeps the next batch of weights in registers while it multiplies this one, across row blocks too; their
// sums meet in shared memory and are added in the order of the warps. Nothing depends on who finishes first.
#include "bf16_linear.h"
#include "device.cuh"

#if !defined(BF16_VARIANTS)
// Tokens, rows of a block, 16-byte loads of a row in a batch, batches under way, warps, CTAs per multiprocessor, what the
// first cache does with weights; then whether it is for few rows, and for rows of how many columns and more. Chosen from
// all that were measured: docs/kernels-linear.md.
#define BF16_VARIANTS                                                                                                      \
    variant<4, 8, 4, 3, 8, 2, kKept>(true, 5120), variant<4, 8, 4, 3, 8, 2, kLeftOut>(true), variant<8, 8, 4, 3, 8, 2, kPassing>(true), \
        variant<16, 16, 2, 2, 16, 1, kLeftOut>(true), variant<4, 16, 2, 2, 8, 3, kKept>(false, 5120),                      \
        variant<4, 16, 2, 2, 8, 3, kLeftOut>(false), variant<8, 16, 2, 2, 8, 3, kPassing>(false), variant<16, 16, 2, 2, 8, 2, kLeftOut>(false)
#endif

#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace nvfp4 {
namespace {

constexpr int kChunk = 8;  // columns of one 16-byte load

struct DenseParams {
    const uint8_t* weight;
    const __nv_bfloat16* bias;
    const uint8_t* x;
    __nv_bfloat16* y;
    int64_t x_stride, y_stride;  // bytes, elements
    int m, n, k;
    int blocks, batches;  // blocks of rows, batches of columns
};

// Weights may stay in the first cache until the other half of their line is asked for; the more tokens, the more of it the
// activations need.
enum FirstCache { kKept, kPassing, kLeftOut };

template <FirstCache Weights>
__device__ __forceinline__ Word4 load_row(const uint8_t* p) {
    return Weights == kKept ? load_weights_kept(p) : Weights == kPassing ? load_weights_passing(p) : load_weights(p);
}

// Rows: 8 or 16, of the MMA's 16. Loads: of each row, in a batch. Depth: batches under way.
template <int Tokens, int Rows, int Loads, int Depth, int Warps, FirstCache Weights>
struct DenseShape {
    static constexpr FirstCache weights = Weights;
    static constexpr int tiles = (Tokens + 7) / 8, rows = Rows, halves = Rows / 8, loads = Loads, depth = Depth, warps = Warps;
    static constexpr int tokens = tiles * 8, warp_columns = Loads * 4 * kChunk, batch_columns = Warps * warp_columns;
    static constexpr int token_floats = Rows + 4;  // apart from each other's banks
    static constexpr int warp_floats = tokens * token_floats, sums_floats = Warps * warp_floats;
};

// A lane's share of a batch: 8 columns in each load.
template <class S>
struct Batch {
    Word4 weights[S::halves][S::loads], x[S::tiles][S::loads];
};

// Where the next batch to be requested lies.
template <class S>
struct Cursor {
    int block, batch = 0;
    int64_t lane_bytes;

    __device__ explicit Cursor(int first) : block(first), lane_bytes((threadIdx.x / 32 * S::warp_columns + threadIdx.x % 4 * kChunk) * 2) {}

    // False for a warp beyond the last column of a last batch, which then adds nothing.
    __device__ __forceinline__ bool within(const DenseParams& p) const {
        return batch * S::batch_columns + int(threadIdx.x / 32) * S::warp_columns < p.k;
    }

    __device__ __forceinline__ void request_weights(const DenseParams& p, Batch<S>& to) const {
        if (!within(p)) return;
#pragma unroll
        for (int half = 0; half < S::halves; ++half) {
            // Rows past the end read the last one again; nothing of theirs is stored.
            const int64_t row = min(block * S::rows + half * 8 + int(threadIdx.x % 32 / 4), p.n - 1);
            const uint8_t* from = p.weight + row * p.k * 2 + batch * S::batch_columns * 2 + lane_bytes;
#pragma unroll
            for (int i = 0; i < S::loads; ++i) to.weights[half][i] = load_row<S::weights>(from + i * 4 * kChunk * 2);
        }
    }

    __device__ __forceinline__ void request_activations(const DenseParams& p, Batch<S>& to) const {
        if (!within(p)) return;
#pragma unroll
        for (int tile = 0; tile < S::tiles; ++tile) {
            // Lanes of absent tokens read the last one: their columns are never stored.
            const int token = min(tile * 8 + int(threadIdx.x % 32 / 4), p.m - 1);
            const uint8_t* from = p.x + token * p.x_stride + batch * S::batch_columns * 2 + lane_bytes;
#pragma unroll
            for (int i = 0; i < S::loads; ++i) to.x[tile][i] = load_activations(from + i * 4 * kChunk * 2);
        }
    }

    // True if that was a row block's last batch.
    __device__ __forceinline__ bool advance(const DenseParams& p) {
        if (++batch < p.batches) return false;
        ++block, batch = 0;
        return true;
    }
};

// Both operands hold a lane's 8 consecutive columns in the same places, so their order within an MMA does not matter.
template <class S>
__device__ __forceinline__ void multiply_batch(float (&acc)[S::tiles][4], const Batch<S>& batch) {
#pragma unroll
    for (int i = 0; i < S::loads; ++i) {
        const Word4 &low = batch.weights[0][i], &high = batch.weights[S::halves - 1][i];
#pragma unroll
        for (int pass = 0; pass < 2; ++pass) {
            const Word4 a{{low.v[2 * pass], S::halves == 2 ? high.v[2 * pass] : 0, low.v[2 * pass + 1], S::halves == 2 ? high.v[2 * pass + 1] : 0}};
#pragma unroll
            for (int tile = 0; tile < S::tiles; ++tile) mma(acc[tile], a, batch.x[tile][i].v[2 * pass], batch.x[tile][i].v[2 * pass + 1]);
        }
    }
}

// Adds the warps' sums of a row block in their order and stores them. Every thread of the CTA comes here.
template <class S>
__device__ __forceinline__ void store_rows(const DenseParams& p, int block, float* sums, const float (&acc)[S::tiles][4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float* mine = sums + threadIdx.x / 32 * S::warp_floats + g;
#pragma unroll
    for (int tile = 0; tile < S::tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 2 * S::halves; ++i) mine[(tile * 8 + t * 2 + i % 2) * S::token_floats + i / 2 * 8] = acc[tile][i];
    }
    __syncthreads();
    for (int at = threadIdx.x; at < p.m * S::rows; at += S::warps * 32) {
        const int token = at / S::rows, row = at % S::rows, n = block * S::rows + row;
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < S::warps; ++warp) sum += sums[warp * S::warp_floats + token * S::token_floats + row];
        if (n < p.n) p.y[token * p.y_stride + n] = __float2bfloat16_rn(p.bias ? sum + __bfloat162float(p.bias[n]) : sum);
    }
}

template <int Tokens, int Rows, int Loads, int Depth, int Warps, int MinBlocks, FirstCache Weights>
__global__ void __launch_bounds__(Warps * 32, MinBlocks) dense_kernel(const __grid_constant__ DenseParams p) {
    using S = DenseShape<Tokens, Rows, Loads, Depth, Warps, Weights>;
    __shared__ float sums[2][S::sums_floats];
    const int begin = int(int64_t(p.blocks) * blockIdx.x / gridDim.x), end = int(int64_t(p.blocks) * (blockIdx.x + 1) / gridDim.x);
    Batch<S> ring[Depth];
    Cursor<S> ahead(begin);
#pragma unroll
    for (int i = 0; i + 1 < Depth; ++i) {
        if (ahead.block < end) ahead.request_weights(p, ring[i]);
        ahead.advance(p);
    }
    wait_for_producer();
    release_dependents();
    Cursor<S> now(begin);
#pragma unroll
    for (int i = 0; i + 1 < Depth; ++i) {
        if (now.block < end) now.request_activations(p, ring[i]);
        now.advance(p);
    }
    now = Cursor<S>(begin);
    float acc[S::tiles][4] = {};
    int parity = 0;
    const auto turn = [&](const Batch<S>& current, Batch<S>& next) {
        if (ahead.block < end) {
            ahead.request_weights(p, next);
            ahead.request_activations(p, next);
        }
        ahead.advance(p);
        if (now.within(p)) multiply_batch<S>(acc, current);
        const int block = now.block;
        if (now.advance(p)) {
            store_rows<S>(p, block, sums[parity], acc);
            parity ^= 1;
#pragma unroll
            for (int j = 0; j < 4 * S::tiles; ++j) acc[j / 4][j % 4] = 0.0f;
        }
    };
    while (now.block < end) {
        turn(ring[0], ring[Depth - 1]);
        if (now.block < end) turn(ring[1], ring[0]);
        if (Depth > 2 && now.block < end) turn(ring[2 % Depth], ring[1]);
        if (Depth > 3 && now.block < end) turn(ring[3 % Depth], ring[2 % Depth]);
    }
}

using DenseKernel = void (*)(DenseParams);

struct DenseVariant {
    int tokens, warps, blocks, rows, loads;
    bool few_rows;
    int least_columns;
    DenseKernel kernel;
};

template <int Tokens, int Rows, int Loads, int Depth, int Warps, int MinBlocks, FirstCache Weights>
constexpr DenseVariant variant(bool few_rows, int least_columns = 0) {
    return {Tokens, Warps, MinBlocks, Rows, Loads, few_rows, least_columns, dense_kernel<Tokens, Rows, Loads, Depth, Warps, MinBlocks, Weights>};
}

const DenseVariant kDenseVariants[] = {BF16_VARIANTS};
constexpr int kDenseVariantCount = sizeof(kDenseVariants) / sizeof(kDenseVariants[0]);

}  // namespace
}  // namespace nvfp4

using namespace nvfp4;

int32_t bf16_linear_variant(int32_t index, Bf16LinearVariant* variant) {
    if (index < 0 || index >= kDenseVariantCount) return -1;
    const DenseVariant& v = kDenseVariants[index];
    *variant = {v.tokens, v.warps, v.blocks, v.rows, v.loads, v.few_rows, v.least_columns};
    return 0;
}

int32_t bf16_linear_call_bytes(void) { return sizeof(Bf16LinearCall); }

const char* bf16_error_name(int32_t error) { return cudaGetErrorName(static_cast<cudaError_t>(error)); }

int32_t bf16_linear(const Bf16LinearCall* call, void* stream) {
    int device = 0, major = 0, multiprocessors = 0;
    if (const auto error = cudaGetDevice(&device)) return error;
    if (const auto error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return error;
    if (const auto error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device)) return error;
    // Few: blocks of 16 rows, one a multiprocessor, hold them all.
    const bool few_rows = call->n <= 16 * multiprocessors;
    int index = call->variant;
    for (int i = 0; index < 0 && i < kDenseVariantCount; ++i) {
        const DenseVariant& v = kDenseVariants[i];
        if (v.tokens >= call->m && v.few_rows == few_rows && v.least_columns <= call->k) index = i;
    }
    if (index < 0 || index >= kDenseVariantCount || call->m < 1 || call->m > kDenseVariants[index].tokens) return cudaErrorInvalidValue;
    const DenseVariant& v = kDenseVariants[index];
    if (call->n < 1 || call->k < 1 || call->k % (v.loads * 4 * kChunk)) return cudaErrorInvalidValue;
    const int columns = v.warps * v.loads * 4 * kChunk;
    const DenseParams params{static_cast<const uint8_t*>(call->weight), static_cast<const __nv_bfloat16*>(call->bias),
                             static_cast<const uint8_t*>(call->x), static_cast<__nv_bfloat16*>(call->y),
                             call->x_stride * 2, call->y_stride, call->m, call->n, call->k,
                             (call->n + v.rows - 1) / v.rows, (call->k + columns - 1) / columns};
    const int resident = multiprocessors * v.blocks;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(params.blocks < resident ? params.blocks : resident));
    config.blockDim = dim3(v.warps * 32);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = call->dependent && major >= 9 ? 1 : 0;
    return cudaLaunchKernelEx(&config, v.kernel, params);
}
