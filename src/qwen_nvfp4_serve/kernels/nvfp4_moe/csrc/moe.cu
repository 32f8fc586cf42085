// The mixture-of-experts block for a few tokens, NVFP4 experts read in place. Three kernels:
//   route     logits of every expert, one warp each; one CTA elects the experts of every token as logits arrive
//   gate_up   h = bf16(silu(gate) * up) for every elected expert; a CTA has an octet of gate rows and their up rows, its
//             warps share the columns
//   down      y = sum of weight * (W2 h); a CTA has an octet of output rows, its warps share the elected experts
// An expert elected by several tokens is read once. Sums have a fixed order that no other token changes.
// Weights are requested before the kernel ahead has ended wherever that kernel does not decide which ones are needed.
// Every kernel waits for the one ahead before it lets the next start: so what a kernel reads from two launches ago is
// there from its first instruction on.
#include "moe.h"

#include "experts.cuh"
#include "route.cuh"

namespace nvfp4 {
namespace {

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
int32_t nvfp4_moe_slots(void) { return kMaxTokens * kMaxExperts; }
const char* nvfp4_moe_error_name(int32_t error) { return cudaGetErrorName(static_cast<cudaError_t>(error)); }

int32_t nvfp4_moe_route(const Nvfp4RouteCall* call, void* stream) {
    if (call->m < 1 || call->m > kMaxTokens || call->top_k < 1 || call->top_k > kMaxTopK || call->top_k > call->experts) return cudaErrorInvalidValue;
    if (call->experts < 1 || call->experts > kMaxExperts || call->experts % kLaneExperts) return cudaErrorInvalidValue;
    const auto halfs = [](const void* p) { return static_cast<const __nv_bfloat16*>(p); };
    const RouteParams params{halfs(call->x), halfs(call->router), halfs(call->shared_gate), static_cast<__nv_bfloat16*>(call->logits),
                             static_cast<int*>(call->ids), static_cast<float*>(call->weights), static_cast<float*>(call->shared_share),
                             static_cast<uint32_t*>(call->slots), call->x_stride, call->m, call->hidden, call->experts, call->top_k,
                             call->renormalize, route_groups(call->m)};
    if (!call->x) return launch(elect_kernel, params, dim3(1), kRouteWarps * 32, 0, call->dependent, stream);
    if (call->hidden < 1 || call->hidden % kTileRows) return cudaErrorInvalidValue;
    const int rows = kRouteWarps / params.groups;
    const auto route = call->m == 1 ? route_kernel<true> : route_kernel<false>;
    return launch(route, params, dim3((call->experts + rows - 1) / rows + 1), kRouteWarps * 32, 0, call->dependent, stream);
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
    const bool single = call->m == 1, each = single && slots <= kSingleWarps;  // experts have a warp each
    const bool wide = steps_of(call->hidden) > kNarrowWarps;
    if (call->octets < 0 || call->octets > kTileOctets || call->octets & (call->octets - 1)) return cudaErrorInvalidValue;
    params.octets = single ? 1 : call->octets ? call->octets : octets_of_cta(pairs);
    const dim3 grid(most / params.octets, pairs + call->shared.count * params.octets);
    const auto gate_up = wide ? (single ? gate_up_single_kernel<kWideWarps> : gate_up_several_kernel<kWideWarps>)
                              : (single ? gate_up_single_kernel<kNarrowWarps> : gate_up_several_kernel<kNarrowWarps>);
    if (const auto error = launch(gate_up, params, grid, (wide ? kWideWarps : kNarrowWarps) * 32, 0, dependent, stream)) return error;
    const int octets = each ? 1 : kSeveralOctets;
    return launch(each ? down_kernel<true> : down_kernel<false>, params, dim3(call->hidden / (octets * kOctetRows)),
                  (each ? slots : kSeveralWarps) * 32, DownMemory::bytes(pairs, call->m, octets * kOctetRows), dependent, stream);
}
