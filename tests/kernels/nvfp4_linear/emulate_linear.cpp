// The linear kernels' own source, compiled for a CPU.
#include <cuda_runtime.h>

#include "linear.cu"

// Whether a CTA's last thread runs first. Results may not depend on it: else a barrier is missing.
extern "C" void run_last_first(int yes) { emulated::last_first = yes != 0; }
// Whether each warp runs as far ahead of the others as it may.
extern "C" void run_warp_by_warp(int yes) { emulated::warp_by_warp = yes != 0; }
// The card of the following calls, whether their launches run, and what the last one asked for.
extern "C" void choose_card(int card) { emulated::card = card; }
extern "C" void run_launches(int yes) { emulated::launches_run = yes != 0; }
extern "C" int last_threads() { return int(blockDim.x); }
extern "C" int last_shared_bytes() { return int(emulated::last_shared_bytes); }
