// The BF16 linear kernel's own source, compiled for a CPU.
#include <cuda_runtime.h>

#include "bf16_linear.cu"

// Rules for the launches that follow, counted from 0: memory that is hidden, or not to be written, before they wait.
extern "C" void reset_rules() { emulated::watched.clear(), emulated::launches = emulated::broken_rules = 0; }
extern "C" int broken_rules() { return emulated::broken_rules; }
extern "C" void add_rule(int launch, void* memory, int64_t bytes, int hidden) {
    emulated::watched.push_back({launch, static_cast<unsigned char*>(memory), size_t(bytes), hidden != 0, {}});
}

// Whether a CTA's last thread runs first. Results may not depend on it: else a barrier is missing.
extern "C" void run_last_first(int yes) { emulated::last_first = yes != 0; }

// What the first cache was to do with weights, since it was asked last: 0 nothing, 1 keep them, 2 let them go first.
extern "C" int cache_of_weights() {
    const int found = nvfp4::kept_loads ? 1 : nvfp4::passing_loads ? 2 : 0;
    nvfp4::kept_loads = nvfp4::passing_loads = 0;
    return found;
}
