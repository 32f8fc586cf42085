// y[M, N] = x[M, K] W[N, K]^T * row_scale[N] (+ bias[N]) for small M: NVFP4 weights read in place, bf16 x and y.
//
// The work is row blocks x steps of 128 columns, dealt out evenly: CTA c takes steps [T c / G, T (c + 1) / G) of the
// flattened list, so it owns whole row blocks, or parts of them. Parts go to `partial`; the CTA that completes a row
// block adds them in the order of their columns, so the result does not depend on which one that was.
#include "layout.cuh"
#include "linear.h"

#if !defined(NVFP4_VARIANTS)
// Tiles of 8 tokens, warps, staged steps, CTAs per multiprocessor the registers are kept for.
#define NVFP4_VARIANTS variant<1, 4, 4, 5>(), variant<2, 4, 2, 4>(), variant<4, 4, 2, 4>(), variant<8, 4, 1, 3>()
#endif

#include <cuda_bf16.h>
#include <cuda_runtime.h>

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
};

__device__ __forceinline__ Word4 load_weights(const uint8_t* p) {
    Word4 w;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.v[0]), "=r"(w.v[1]), "=r"(w.v[2]), "=r"(w.v[3]) : "l"(p));
    return w;
}

__device__ __forceinline__ void mma(float (&c)[4], Word4 a, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
    const unsigned address = unsigned(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(valid ? 16 : 0) : "memory");
}

// Programmatic dependent launch: wait for the kernel before us, or let the one after us start. Nothing before sm_90.
__device__ __forceinline__ void wait_for_producer() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void release_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Tiles: tiles of 8 tokens. Warps: 32 rows each. StageSteps: steps of activations staged at once, two stages deep.
template <int Tiles, int Warps, int StageSteps>
struct Shape {
    static constexpr int tokens = Tiles * 8;
    static constexpr int rows = Warps * kWarpRows;
    static constexpr int threads = Warps * 32;
    static constexpr int stage_chunks = StageSteps * 16 * tokens;  // of 8 activations, 16 bytes
    static constexpr int shared_bytes = 2 * stage_chunks * 16;
    static constexpr int slot_floats = rows * tokens;
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
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int r = min(block * S::rows + row_in_block(warp, g, q), p.n - 1);
            row[q] = p.packed + weight_offset(r, p.k, step, t);
        }
        const int tile = min(block * (S::rows / kTileRows) + warp / 4, (p.n - 1) / kTileRows);
        scale = p.scales + scale_offset(tile, p.group_tiles, step, warp, g, t);
    }

    __device__ __forceinline__ void load(Fragment& f, int ahead) const {
#pragma unroll
        for (int q = 0; q < 4; ++q) f.weights[q] = load_weights(row[q] + ahead * (kStepColumns / 2));
        f.scales = load_weights(scale + ahead * (2 * kTileBytes));
    }

    __device__ __forceinline__ void advance(int by) {
#pragma unroll
        for (int q = 0; q < 4; ++q) row[q] += by * (kStepColumns / 2);
        scale += by * (2 * kTileBytes);
    }
};

// Stages activations of StageSteps steps in shared memory, 16-byte chunks of 8 columns in decode()'s order:
// slot ((step * 4 + word) * tokens + token) * 4 + t. A thread keeps to one column of the stage and walks the tokens.
template <class S, int StageSteps>
struct ActivationStage {
    static constexpr int tokens_per_pass = S::threads / (16 * StageSteps);
    static constexpr int passes = S::tokens / tokens_per_pass;
    static_assert(S::threads % (16 * StageSteps) == 0 && S::tokens % tokens_per_pass == 0);
    int token, slot, column;

    __device__ ActivationStage() : token(threadIdx.x / 16 / StageSteps) {
        const int t = threadIdx.x % 4, word = threadIdx.x / 4 % 4, step = threadIdx.x / 16 % StageSteps;
        slot = ((step * 4 + word) * S::tokens + token) * 4 + t;
        column = step * kStepColumns + t * kLaneColumns + word * 8;
    }

    __device__ __forceinline__ void request(const Params& p, uint4* stage, int step) const {
        const int k = step * kStepColumns + column;
        const bool valid = k < p.k;
        const __nv_bfloat16* x = p.x + token * p.x_stride + (valid ? k : 0);
#pragma unroll
        for (int i = 0; i < passes; ++i) {
            if (token + i * tokens_per_pass < p.m) copy_async(stage + slot + i * tokens_per_pass * 4, x, valid);
            x += tokens_per_pass * p.x_stride;
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    // Waits for this thread's own chunks and reorders them in place.
    __device__ __forceinline__ void finish(const Params& p, uint4* stage) const {
        asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
        for (int i = 0; i < passes; ++i) {
            if (token + i * tokens_per_pass >= p.m) break;
            uint4& chunk = stage[slot + i * tokens_per_pass * 4];
            const Word4 o = permute_activations({{chunk.x, chunk.y, chunk.z, chunk.w}});
            chunk = make_uint4(o.v[0], o.v[1], o.v[2], o.v[3]);
        }
    }
};

// One step: decode 4 rows x 32 columns per lane, multiply with every tile of tokens.
template <int Tiles>
__device__ __forceinline__ void multiply_step(float (&acc)[2][Tiles][4], const Fragment& f, uint32_t selector, const uint4* x, const uint4* x_last) {
    constexpr int word_stride = Tiles * 8 * 4, tile_stride = 8 * 4;
    uint32_t scale[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) scale[q] = scale_pair(f.scales.v[q], selector);
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        Word4 a[4];
        decode_word(f.weights, scale, word, a);
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
            const uint4 b = tile == Tiles - 1 ? x_last[word * word_stride] : x[word * word_stride + tile * tile_stride];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                mma(acc[half][tile], mma_weights(a, half, 0), b.x, b.y);
                mma(acc[half][tile], mma_weights(a, half, 1), b.z, b.w);
            }
        }
    }
}

template <class S, int Tiles>
__device__ __forceinline__ void store_block(const Params& p, int block, const float (&acc)[2][Tiles][4]) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const int row = block * S::rows + row_in_block(warp, g, q);
        if (row >= p.n) continue;
        const float scale = p.row_scale[row] * kUnscale;
        const float bias = p.bias ? __bfloat162float(p.bias[row]) : 0.0f;
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = tile * 8 + 2 * t + i;
                if (token < p.m) p.y[token * p.y_stride + row] = __float2bfloat16_rn(fmaf(acc[q / 2][tile][q % 2 * 2 + i], scale, bias));
            }
        }
    }
}

// CTA that holds flattened step `s`, for CTA c holding [total c / grid, total (c + 1) / grid).
__device__ __forceinline__ int owner_of(int s, int total) { return int((int64_t(s + 1) * gridDim.x - 1) / total); }

// Leaves this CTA's part of a row block in `partial`; true in the CTA that arrives last, with the whole sum in acc.
template <class S, int Tiles>
__device__ __forceinline__ bool combine_block(const Params& p, int block, bool starts_block, float (&acc)[2][Tiles][4]) {
    const int first = owner_of(block * p.steps, p.total), last = owner_of((block + 1) * p.steps - 1, p.total);
    const auto slot = [&](int cta, bool starts) {
        return reinterpret_cast<float4*>(p.partial + int64_t(cta * 2 + starts) * S::slot_floats) + threadIdx.x;
    };
    float4* mine = slot(blockIdx.x, starts_block);
#pragma unroll
    for (int i = 0; i < 2 * Tiles; ++i) {
        const float(&v)[4] = acc[i / Tiles][i % Tiles];
        __stcg(mine + i * S::threads, make_float4(v[0], v[1], v[2], v[3]));
    }
    __threadfence();
    __shared__ unsigned arrived_before;
    __syncthreads();
    if (threadIdx.x == 0) arrived_before = atomicAdd(p.arrived + block, 1u);
    __syncthreads();
    if (arrived_before != unsigned(last - first)) return false;
    __threadfence();
    if (threadIdx.x == 0) p.arrived[block] = 0;
#pragma unroll
    for (int i = 0; i < 2 * Tiles; ++i) {
        float4 sum = __ldcg(slot(first, true) + i * S::threads);
        for (int cta = first + 1; cta <= last; ++cta) {
            const float4 v = __ldcg(slot(cta, false) + i * S::threads);
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        float(&v)[4] = acc[i / Tiles][i % Tiles];
        v[0] = sum.x, v[1] = sum.y, v[2] = sum.z, v[3] = sum.w;
    }
    return true;
}

template <int Tiles, int Warps, int StageSteps, int MinBlocks>
__global__ void __launch_bounds__(Warps * 32, MinBlocks) linear_kernel(const __grid_constant__ Params p) {
    using S = Shape<Tiles, Warps, StageSteps>;
    extern __shared__ uint4 stages[];
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int position = int(int64_t(p.total) * blockIdx.x / gridDim.x);
    const int end = int(int64_t(p.total) * (blockIdx.x + 1) / gridDim.x);
    int block = position / p.steps, first = position % p.steps;
    WeightCursor<S> cursor;
    Fragment current;
    cursor.seek(p, block, first);
    cursor.load(current, 0);
    wait_for_producer();
    release_dependents();

    const ActivationStage<S, StageSteps> activations;
    const uint32_t selector = scale_selector(t);
    // Lanes of absent tokens read the last one: their columns are never stored.
    const uint4* lane_x = stages + g * 4 + t;
    const uint4* lane_x_last = stages + min((Tiles - 1) * 8 + g, p.m - 1) * 4 + t;

    while (true) {
        const int stop = min(p.steps, first + end - position);
        float acc[2][Tiles][4] = {};
        activations.request(p, stages, first);
        activations.finish(p, stages);
        __syncthreads();
        int buffer = 0, step = first;
        // Whole stages, unrolled so that two sets of registers take turns; then what is left, one step at a time.
        for (; step + StageSteps <= stop; step += StageSteps) {
            const bool more = step + StageSteps < stop;
            uint4* following = stages + (S::stage_chunks - buffer);
            if (more) activations.request(p, following, step + StageSteps);
            Fragment fragments[2];
            fragments[0] = current;
#pragma unroll
            for (int i = 0; i < StageSteps; ++i) {
                if (i + 1 < StageSteps || more) cursor.load(fragments[(i + 1) % 2], i + 1);
                const int offset = buffer + i * 16 * S::tokens;
                multiply_step<Tiles>(acc, fragments[i % 2], selector, lane_x + offset, lane_x_last + offset);
            }
            current = fragments[StageSteps % 2];
            cursor.advance(StageSteps);
            if (more) activations.finish(p, following);
            __syncthreads();
            buffer = S::stage_chunks - buffer;
        }
        for (int offset = buffer; StageSteps > 1 && step < stop; ++step, offset += 16 * S::tokens) {
            Fragment upcoming;
            if (step + 1 < stop) cursor.load(upcoming, 1);
            multiply_step<Tiles>(acc, current, selector, lane_x + offset, lane_x_last + offset);
            current = upcoming;
            cursor.advance(1);
        }
        __syncthreads();
        const bool whole = first == 0 && stop == p.steps, starts = first == 0;
        const int done = block;
        position += stop - first;
        if (position < end) {
            block += 1, first = 0;
            cursor.seek(p, block, 0);
            cursor.load(current, 0);
        }
        if (whole || combine_block<S, Tiles>(p, done, starts, acc)) store_block<S, Tiles>(p, done, acc);
        if (position >= end) return;
    }
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

// max_tokens: the tokens this variant is made for. The first row that fits m serves it.
struct Variant {
    int tiles, warps, stage_steps, min_blocks;
    int rows, shared_bytes, slot_floats;
    Kernel kernel;
};

template <int Tiles, int Warps, int StageSteps, int MinBlocks>
constexpr Variant variant() {
    using S = Shape<Tiles, Warps, StageSteps>;
    return {Tiles, Warps, StageSteps, MinBlocks, S::rows, S::shared_bytes, S::slot_floats, linear_kernel<Tiles, Warps, StageSteps, MinBlocks>};
}

const Variant kVariants[] = {NVFP4_VARIANTS};
constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);
constexpr int kMaxDevices = 64;
constexpr int kMaxRowBlocks = 1 << 14;
constexpr int kMinStepsPerCta = 4;
constexpr size_t kCounterBytes = kMaxRowBlocks * sizeof(unsigned);

// What a card holds of each variant; filled once per device.
struct Residency {
    bool known;
    int multiprocessors, capability, blocks[kVariantCount];
};

cudaError_t residency(const Residency** result) {
    static Residency table[kMaxDevices];
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
        for (int i = 0; i < kVariantCount; ++i) {
            const Variant& v = kVariants[i];
            if (const auto error = cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v.shared_bytes)) return error;
            if (const auto error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&r.blocks[i], v.kernel, v.warps * 32, v.shared_bytes)) return error;
        }
        r.known = true;
    }
    *result = &r;
    return cudaSuccess;
}

int variant_for(int m) {
    for (int i = 0; i < kVariantCount; ++i)
        if (kVariants[i].tiles * 8 >= m) return i;
    return -1;
}

}  // namespace
}  // namespace nvfp4

using namespace nvfp4;

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
    const int index = call->variant >= 0 ? call->variant : variant_for(call->m);
    if (index < 0 || index >= kVariantCount || call->m < 1 || call->m > kVariants[index].tiles * 8) return cudaErrorInvalidValue;
    if (call->n < 1 || call->k < kStepColumns || call->k % kStepColumns || card->blocks[index] < 1) return cudaErrorInvalidValue;
    const Variant& v = kVariants[index];
    const int steps = call->k / kStepColumns;
    const int64_t row_blocks = (int64_t(call->n) + v.rows - 1) / v.rows, total = row_blocks * steps;
    if (row_blocks > kMaxRowBlocks || total > INT32_MAX) return cudaErrorInvalidValue;
    const int64_t resident = int64_t(card->multiprocessors) * card->blocks[index];
    int64_t grid = call->grid > 0 ? call->grid : total / kMinStepsPerCta;
    grid = grid > resident ? resident : grid < 1 ? 1 : grid;
    grid = grid > total ? total : grid;
    auto* workspace = static_cast<uint8_t*>(call->workspace);
    const Params params{static_cast<const uint8_t*>(call->packed), static_cast<const uint8_t*>(call->scales),
                        static_cast<const float*>(call->row_scale), static_cast<const __nv_bfloat16*>(call->bias),
                        static_cast<const __nv_bfloat16*>(call->x), static_cast<__nv_bfloat16*>(call->y),
                        reinterpret_cast<float*>(workspace + kCounterBytes), reinterpret_cast<unsigned*>(workspace),
                        call->m, call->n, call->k, call->x_stride, call->y_stride, steps, int(total), call->k / 64};
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
    dequantize_kernel<<<grid, 128, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const uint8_t*>(packed), static_cast<const uint8_t*>(scales), static_cast<uint4*>(out), first_row, rows, n, k);
    return cudaGetLastError();
}
