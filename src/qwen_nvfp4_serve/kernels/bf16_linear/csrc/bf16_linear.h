// C interface of the BF16 linear kernel. Pointers are device memory of the current device; a call only enqueues work.
// Return values are cudaError_t, 0 is success.
#pragma once
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

struct Bf16LinearCall {
    const void* weight;  // bf16 [n, k], 16-byte aligned
    const void* bias;    // bf16 [n] or null
    const void* x;       // bf16 [m, k], row stride x_stride elements, 16-byte aligned rows
    void* y;             // bf16 [m, n], row stride y_stride elements
    int64_t x_stride, y_stride;
    int32_t m, n, k;
    int32_t variant;    // row of the variant table, or -1 for the one made for m
    int32_t dependent;  // nonzero: start before the kernel ahead ends (sm_90 and later)
};

// One compiled form of the kernel: the first whose tokens suffice serves a call, of those for few rows or for many and for
// rows that are so long.
struct Bf16LinearVariant {
    int32_t tokens, warps, blocks, rows, loads, few_rows, least_columns;
};

int32_t bf16_linear_variant(int32_t index, struct Bf16LinearVariant* variant);  // 0, or -1 past the last; needs no card
int32_t bf16_linear_call_bytes(void);  // sizeof(Bf16LinearCall), to check a caller's own declaration
const char* bf16_error_name(int32_t error);
int32_t bf16_linear(const struct Bf16LinearCall* call, void* stream);

#if defined(__cplusplus)
}
#endif
