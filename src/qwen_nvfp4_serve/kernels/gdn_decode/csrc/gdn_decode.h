// C interface of the delta net's decode step. Pointers are device memory of the current device; a call only enqueues
// work. Return values are cudaError_t, 0 is success.
#pragma once
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

// Channels are those of q, of k, then of v: (2 key_heads + value_heads) heads of 128. Strides are in elements.
struct GdnDecodeCall {
    const void* x;        // bf16 [tokens, channels], 4-byte aligned rows
    const void* weight;   // bf16 [channels, 4], 16-byte aligned, the oldest token first
    const void* bias;     // bf16 [channels] or null
    const void* a;        // bf16 [tokens, value_heads]
    const void* b;        // bf16 [tokens, value_heads]
    const void* a_log;    // float32 or bf16 [value_heads]
    const void* dt_bias;  // float32 or bf16 [value_heads]
    const void* indices;  // int32 [tokens]: a token's slot; no token's if not positive
    void* conv_state;     // bf16 [slots, 3 or more tokens, channels], 4-byte aligned tokens; the first 3 are used
    void* state;          // float32 or bf16 [slots, value_heads, 128 (v), 128 (k)], 16-byte aligned slots
    void* out;            // bf16 [tokens, value_heads, 128]
    void* counters;       // uint32 [tokens, key_heads], zero; left zero
    int64_t x_stride, a_stride, b_stride, index_stride, conv_slot_stride, conv_token_stride, state_slot_stride;
    float scale;
    int32_t tokens, key_heads, value_heads;
    int32_t state_is_bf16, a_log_is_bf16, dt_bias_is_bf16;
    int32_t rows;       // of the state to a CTA: 16, 32, 64, or 0 for the choice made for this many tokens
    int32_t early;      // nonzero: indices and states are read before the kernel ahead has ended
    int32_t dependent;  // nonzero: start before the kernel ahead ends (sm_90 and later)
};

int32_t gdn_decode_call_bytes(void);  // sizeof(GdnDecodeCall), to check a caller's own declaration
const char* gdn_error_name(int32_t error);
int32_t gdn_decode(const struct GdnDecodeCall* call, void* stream);

#if defined(__cplusplus)
}
#endif
