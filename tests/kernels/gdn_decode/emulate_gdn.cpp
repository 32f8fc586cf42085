// The delta net decode step's own source, compiled for a CPU.
#include <cuda_runtime.h>

#include "gdn_decode.cu"

#include <utility>

// Rules for the launches that follow, counted from 0: memory that is hidden, or not to be written, before they wait.
extern "C" void reset_rules() { emulated::watched.clear(), emulated::launches = emulated::broken_rules = 0; }
extern "C" int broken_rules() { return emulated::broken_rules; }
extern "C" void add_rule(int launch, void* memory, int64_t bytes, int hidden) {
    emulated::watched.push_back({launch, static_cast<unsigned char*>(memory), size_t(bytes), hidden != 0, {}});
}

// Whether a CTA's last thread runs first. Results may not depend on it: else a barrier is missing.
extern "C" void run_last_first(int yes) { emulated::last_first = yes != 0; }

// How many 16-byte pieces were stored so that they leave the L2 first, since it was asked last.
extern "C" int passing_stores() { return std::exchange(emulated::passing_stores, 0); }

// Whether launches run, and how many CTAs a token of the last one has.
extern "C" void run_launches(int yes) { emulated::launches_run = yes != 0; }
extern "C" int last_blocks() { return int(gridDim.x); }
