// C interface of the NVFP4 linear kernels. Pointers are device memory of the current device; calls only enqueue work.
// Return values are cudaError_t, 0 is success.
#pragma once
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

struct Nvfp4LinearCall {
    const void* packed;     // uint8 [n, k / 2], low nibble first
    const void* scales;     // E4M3 in 128x4 order, padded rows and groups
    const void* row_scale;  // float32 [n]
    const void* bias;       // bf16 [n] or null
    const void* x;          // bf16 [m, k], row stride x_stride elements
    void* y;                // bf16 [m, n], row stride y_stride elements
    void* workspace;        // nvfp4_linear_workspace_bytes() bytes, zero before first use, one call at a time
    int64_t x_stride, y_stride;
    int32_t m, n, k;
    int32_t variant;         // row of the variant table, or -1 for the one made for m
    int32_t grid;            // CTAs, or 0 for the heuristic
    int32_t dependent;       // nonzero: start before the kernel ahead ends (sm_90 and later)
};

// What a form is chosen for, though it may be asked for otherwise: all layers, small ones, or those of long rows.
enum Nvfp4LinearLayers { NVFP4_LINEAR_ALL, NVFP4_LINEAR_FEW, NVFP4_LINEAR_LONG };

// One compiled form of the kernel. The first that this card runs, whose tokens suffice, that is for such layers, whose
// step_columns divide k and of which a multiprocessor holds `blocks` serves a call.
struct Nvfp4LinearVariant {
    int32_t tokens, warps, blocks;
    int32_t capability;  // the only one that runs it, as 10 major + minor; 0 if all do
    int32_t layers;      // Nvfp4LinearLayers
    int32_t step_columns, rows, shared_bytes;
};

int32_t nvfp4_linear_variant(int32_t index, struct Nvfp4LinearVariant* variant);  // 0, or -1 past the last; needs no card
int32_t nvfp4_linear_call_bytes(void);  // sizeof(Nvfp4LinearCall), to check a caller's own declaration
int64_t nvfp4_linear_workspace_bytes(void);  // for the current device, any shape; negative on error
const char* nvfp4_error_name(int32_t error);
int32_t nvfp4_linear(const struct Nvfp4LinearCall* call, void* stream);
// out: bf16 [rows, k], E2M1 * E4M3 of weight rows [first_row, first_row + rows), exact, without row scale. 128 | first_row.
int32_t nvfp4_dequantize(const void* packed, const void* scales, void* out, int64_t first_row, int64_t rows, int64_t n, int64_t k, void* stream);

#if defined(__cplusplus)
}
#endif
