// C interface of the NVFP4 mixture-of-experts kernels. Pointers are device memory of the current device; calls only
// enqueue work. Return values are cudaError_t, 0 is success.
#pragma once
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

// Experts of one size, `count` of them; 0 for none. Weights contiguous, expert after expert, gate rows before up rows.
struct Nvfp4Experts {
    const void* w13;         // uint8 [count, 2 intermediate, hidden / 2], low nibble first
    const void* w13_scales;  // E4M3 in 128x4 order
    const void* w2;          // uint8 [count, hidden, intermediate / 2]
    const void* w2_scales;   // E4M3 in 128x4 order
    const void* gate_scale;  // float32 [count]
    const void* up_scale;    // float32 [count]
    const void* down_scale;  // float32 [count]
    int32_t count, intermediate;
};

struct Nvfp4MoeCall {
    struct Nvfp4Experts routed, shared;
    const void* x;             // bf16 [m, hidden], row stride x_stride elements
    void* y;                   // bf16 [m, hidden], row stride y_stride elements
    const void* ids;           // int32 [m, top_k]
    const void* weights;       // float32 [m, top_k]
    const void* shared_share;  // float32 [m] or null for 1
    void* intermediate;        // bf16, nvfp4_moe_intermediate_elements() of them
    int64_t x_stride, y_stride;
    int32_t m, hidden, top_k;
    int32_t dependent;  // nonzero: start before the kernel ahead ends (sm_90 and later)
    int32_t octets;     // of rows that a CTA of the first product takes; 0: chosen
};

struct Nvfp4RouteCall {
    const void* x;            // bf16 [m, hidden], row stride x_stride elements; null: logits are given
    const void* router;       // bf16 [experts, hidden]
    const void* shared_gate;  // bf16 [hidden] or null
    void* logits;             // bf16 [m, experts]; written if x is given, may be null then
    void* ids;                // int32 [m, top_k]
    void* weights;            // float32 [m, top_k]
    void* shared_share;       // float32 [m], written if shared_gate
    void* slots;              // uint32, nvfp4_moe_slots() of them, all bits set before first use, one call at a time
    int64_t x_stride;
    int32_t m, hidden, experts, top_k, renormalize;
    int32_t dependent;
};

int32_t nvfp4_moe_call_bytes(void);    // sizeof(Nvfp4MoeCall) and of
int32_t nvfp4_route_call_bytes(void);  // Nvfp4RouteCall, to check a caller's own declarations
int32_t nvfp4_moe_tokens(void);        // the most that a call takes
int32_t nvfp4_moe_slots(void);
const char* nvfp4_moe_error_name(int32_t error);
int32_t nvfp4_moe_route(const struct Nvfp4RouteCall* call, void* stream);
int32_t nvfp4_moe_experts(const struct Nvfp4MoeCall* call, void* stream);

#if defined(__cplusplus)
}
#endif
