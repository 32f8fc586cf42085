// The linear kernels' own source, compiled for a CPU, in small variants.
#include <cuda_runtime.h>

#define NVFP4_VARIANTS                                                                                              \
    variant<2, 1, 4, 2, 1>(), variant<1, 2, 4, 2, 1>(), variant<1, 8, 4, 1, 1>(), warpgroup_variant<2, 4, 4, 1>(),    \
        warpgroup_variant<3, 4, 3, 1>(), warpgroup_variant<6, 12, 3, 1>(), warpgroup_variant<8, 8, 4, 1>(),           \
        warpgroup_variant<16, 4, 3, 1>()
#include "linear.cu"

// Whether a CTA's last thread runs first. Results may not depend on it: else a barrier is missing.
extern "C" void run_last_first(int yes) { emulated::last_first = yes != 0; }
