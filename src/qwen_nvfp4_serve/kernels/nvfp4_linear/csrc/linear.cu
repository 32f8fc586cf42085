// y[M, N] = x[M, K] W[N, K]^T * row_scale[N] (+ bias[N]) for small M: NVFP4 weights read in place, bf16 x and y.
//
// The work is row blocks x steps of 128 or 256 columns, dealt out evenly: CTA c takes steps [T c / G, T (c + 1) / G) of
// the flattened list, so it owns whole row blocks, or parts of them. Parts go to the CTA that began a row block, which
// adds them in the order of their columns.
#include "linear.h"

#include <cuda_runtime.h>

#include <mutex>

#include "warp_kernel.cuh"
#include "warpgroup_kernel.cuh"

namespace nvfp4 {
namespace {

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

struct Variant {
    Nvfp4LinearVariant row;
    int slot_floats;  // of a CTA's part of a row block
    void (*kernel)(Params);
};

template <int P, int Tiles, int Warps, int StageSteps, int MinBlocks>
constexpr Variant by_warps(Nvfp4LinearLayers layers = NVFP4_LINEAR_ALL) {
    using S = Shape<P, Tiles, Warps, StageSteps>;
    return {{S::tokens, Warps, MinBlocks, 0, layers, S::step_columns, S::rows, S::shared_bytes}, S::slot_floats, linear_kernel<P, Tiles, Warps, StageSteps, MinBlocks>};
}

template <int Tiles, int Warps, int MinBlocks>
constexpr Variant by_warpgroups(Nvfp4LinearLayers layers = NVFP4_LINEAR_ALL) {
    using S = WarpgroupShape<Tiles, Warps>;
    return {{S::tokens, Warps, MinBlocks, 90, layers, S::step_columns, S::rows, S::shared_bytes}, S::slot_floats, warpgroup_kernel<Tiles, Warps, MinBlocks>};
}

// Of layers with so few rows and weights, smaller blocks of rows share out the work over a card more evenly.
constexpr int kFewRows = 8192, kFewWeights = 1 << 25;
constexpr int kLongRow = 5120;  // columns from which two CTAs a multiprocessor take less time at 5 to 8 tokens

// Chosen from all that were measured: docs/kernels-linear.md.
const Variant kVariants[] = {
    by_warps<2, 1, 8, 4, 2>(NVFP4_LINEAR_FEW), by_warps<2, 1, 16, 8, 1>(),
    by_warps<1, 1, 8, 4, 2>(NVFP4_LINEAR_FEW), by_warps<1, 1, 8, 4, 2>(NVFP4_LINEAR_LONG), by_warps<1, 1, 16, 8, 1>(),
    by_warps<1, 2, 8, 2, 2>(NVFP4_LINEAR_FEW), by_warps<1, 2, 16, 4, 1>(),
    by_warpgroups<4, 8, 1>(NVFP4_LINEAR_FEW), by_warpgroups<3, 12, 1>(), by_warpgroups<4, 12, 1>(), by_warps<1, 4, 12, 2, 1>(),
    by_warpgroups<6, 8, 1>(NVFP4_LINEAR_FEW), by_warpgroups<6, 12, 1>(), by_warpgroups<8, 8, 1>(NVFP4_LINEAR_FEW), by_warpgroups<8, 12, 1>(),
    by_warps<1, 6, 8, 2, 1>(), by_warps<1, 8, 8, 2, 1>()};
constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);
constexpr int kMaxDevices = 64;
constexpr int64_t kCounters = 1 << 14, kCounterBytes = kCounters * sizeof(unsigned);  // one for each warp of a launch
constexpr int kShortShare = 2, kLongShare = 4;  // fewest steps of a CTA

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
            const auto kernel = kVariants[i].kernel;
            const Nvfp4LinearVariant& v = kVariants[i].row;
            r.blocks[i] = 0;
            if (v.shared_bytes > shared_limit || (v.capability && v.capability != r.capability)) continue;
            if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v.shared_bytes)) return error;
            if (const auto error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&r.blocks[i], kernel, v.warps * 32, v.shared_bytes)) return error;
        }
        r.known = true;
    }
    *result = &r;
    return cudaSuccess;
}

bool made_for(int32_t layers, const Nvfp4LinearCall& call) {
    if (layers == NVFP4_LINEAR_FEW) return call.n <= kFewRows && int64_t(call.n) * call.k <= kFewWeights;
    return layers == NVFP4_LINEAR_ALL || call.k >= kLongRow;
}

// The first variant that is made for such a call and that this card holds as often as it was made for.
int variant_for(const Nvfp4LinearCall& call, const Residency& card) {
    for (int i = 0; i < kVariantCount; ++i) {
        const Nvfp4LinearVariant& v = kVariants[i].row;
        if (v.tokens < call.m || call.k % v.step_columns || !made_for(v.layers, call)) continue;
        if (card.blocks[i] >= v.blocks) return i;
    }
    return -1;
}

}  // namespace
}  // namespace nvfp4

using namespace nvfp4;

int32_t nvfp4_linear_variant(int32_t index, Nvfp4LinearVariant* variant) {
    if (index < 0 || index >= kVariantCount) return -1;
    *variant = kVariants[index].row;
    return 0;
}

int32_t nvfp4_linear_call_bytes(void) { return sizeof(Nvfp4LinearCall); }

const char* nvfp4_error_name(int32_t error) { return cudaGetErrorName(static_cast<cudaError_t>(error)); }

int64_t nvfp4_linear_workspace_bytes(void) {
    const Residency* card = nullptr;
    if (residency(&card)) return -1;
    int64_t most = 0;
    for (int i = 0; i < kVariantCount; ++i) {
        const int64_t bytes = int64_t(card->multiprocessors) * card->blocks[i] * kVariants[i].slot_floats * sizeof(float);
        most = bytes > most ? bytes : most;
    }
    return most + kCounterBytes;
}

int32_t nvfp4_linear(const Nvfp4LinearCall* call, void* stream) {
    const Residency* card = nullptr;
    if (const auto error = residency(&card)) return error;
    const int index = call->variant >= 0 ? call->variant : variant_for(*call, *card);
    if (index < 0 || index >= kVariantCount || card->blocks[index] < 1) return cudaErrorInvalidValue;
    const Nvfp4LinearVariant& v = kVariants[index].row;
    if (call->m < 1 || call->m > v.tokens || call->n < 1 || call->k < 1 || call->k % v.step_columns) return cudaErrorInvalidValue;
    const int steps = call->k / v.step_columns, tiles = (call->n + kTileRows - 1) / kTileRows;
    const int64_t row_blocks = (int64_t(tiles) * kTileRows + v.rows - 1) / v.rows, total = row_blocks * steps;
    const int64_t resident = int64_t(card->multiprocessors) * card->blocks[index];
    if (total > INT32_MAX || resident * v.warps > kCounters) return cudaErrorInvalidValue;
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
    return cudaLaunchKernelEx(&config, kVariants[index].kernel, params);
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
