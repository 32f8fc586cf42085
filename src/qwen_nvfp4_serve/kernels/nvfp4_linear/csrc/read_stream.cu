// A plain read of memory, the ceiling that the linear kernel is measured against.
#include <cstdint>
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 256, kLoads = 8;

__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* data, int64_t count, unsigned* sink) {
    unsigned sum = 0;
    const int64_t stride = int64_t(gridDim.x) * kThreads * kLoads;
    for (int64_t base = int64_t(blockIdx.x) * kThreads * kLoads + threadIdx.x; base < count; base += stride) {
        uint4 v[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int64_t at = base + i * kThreads;
            v[i] = at < count ? __ldcs(data + at) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) sum += v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    }
    if (sum == 0x12345678u) *sink = sum;  // keeps the loads
}

}  // namespace

extern "C" int32_t read_stream(const void* data, int64_t bytes, void* sink, int32_t grid, void* stream) {
    read_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const uint4*>(data), bytes / 16, static_cast<unsigned*>(sink));
    return cudaGetLastError();
}
