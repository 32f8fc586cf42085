// Enough of CUDA to run a grid of our kernels on a CPU: one CTA after another, every thread a coroutine of its own, and
// warp instructions and barriers where the coroutines meet. Found instead of the toolkit's header of this name.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // CTAs run one after another

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3() = default;
    explicit dim3(unsigned x, unsigned y = 1) : x(x), y(y) {}
};
struct uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct uint2 {
    unsigned x, y;
};
struct float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

struct Meeting {
    int expected, arrived = 0;
    unsigned generation = 0;
};

struct Warp {
    Meeting meeting{32};
    unsigned char slots[2][32][64];
};

// What a thread has set going and waits for in groups. It is done as late as it may be: when waited for.
struct Queue {
    std::vector<std::function<void()>> open;
    std::deque<std::vector<std::function<void()>>> groups;

    void commit() { groups.push_back(std::move(open)), open.clear(); }
    void wait(size_t pending) {
        for (; groups.size() > pending; groups.pop_front())
            for (const auto& act : groups.front()) act();
    }
};

struct Thread {
    Queue copies, products, stores;
    ucontext_t context;  // for its start; afterwards jumps, which ask nothing of the kernel
    jmp_buf place;
    std::unique_ptr<char[]> stack;
    bool started = false;
    const Meeting* waits_for = nullptr;
    unsigned generation = 0;
    int met = 0;  // meetings of its warp so far
    bool ended = false;
};

inline std::vector<Thread> threads;
inline std::vector<Warp> warps;
inline Meeting all{0};
inline jmp_buf scheduler;
inline std::function<void()> body;
inline std::vector<uint4> dynamic;

// What a launch may not see, or may not write, before it has waited for the launch ahead of it.
struct Watched {
    int launch;  // counted from the last reset
    unsigned char* memory;
    size_t bytes;
    bool hidden;  // else: not to be written
    std::vector<unsigned char> kept;
};

inline std::vector<Watched> watched;
inline Meeting waiting{0};
inline int launches = 0, broken_rules = 0;
inline bool last_first = false;  // the order in which threads run up to where they meet
inline bool warp_by_warp = false;  // a warp runs on until it waits for others; else all run from meeting to meeting
inline bool waited, released;
inline int questions;  // that threads of a CTA have asked of counters

inline Thread& self() { return threads[threadIdx.x]; }

inline void meet(Meeting& meeting) {
    if (++meeting.arrived == meeting.expected) {
        meeting.arrived = 0;
        ++meeting.generation;
        return;
    }
    Thread& me = self();
    me.waits_for = &meeting;
    me.generation = meeting.generation;
    if (!_setjmp(me.place)) _longjmp(scheduler, 1);
}

// What every lane of this warp brought, in lane order.
template <class T>
std::array<T, 32> gather(const T& mine) {
    static_assert(sizeof(T) <= 64);
    Warp& warp = warps[threadIdx.x / 32];
    auto& slots = warp.slots[self().met++ % 2];
    std::memcpy(slots[threadIdx.x % 32], &mine, sizeof(T));
    meet(warp.meeting);
    std::array<T, 32> everyone;
    for (int lane = 0; lane < 32; ++lane) std::memcpy(&everyone[lane], slots[lane], sizeof(T));
    return everyone;
}

template <class Do>
void for_watched(Do act) {
    for (Watched& w : watched)
        if (w.launch == launches) act(w);
}

inline void begin_watching() {
    waited = released = false, questions = 0;
    for_watched([](Watched& w) {
        w.kept.assign(w.memory, w.memory + w.bytes);
        if (w.hidden) std::memset(w.memory, 0xff, w.bytes);  // NaN, or an id of no expert
    });
}

// All threads of a CTA wait together, so that none sees what another's wait has uncovered.
inline void wait() {
    meet(waiting);
    if (waited) return;
    waited = true;
    for_watched([](Watched& w) {
        if (w.hidden) {
            std::memcpy(w.memory, w.kept.data(), w.bytes);
        } else {
            broken_rules += std::memcmp(w.memory, w.kept.data(), w.bytes) != 0;
        }
    });
}

inline void release() {
    broken_rules += !waited;
    released = true;
}

// What a warp has stored past the caches of its own is there for other CTAs once a thread says so that has met the others since,
// else only when the launch ends.
inline Queue unpublished;
inline void publish_stores() {
    Thread* const first = &threads[threadIdx.x / 32 * 32];
    for (int lane = 0; lane < 32; ++lane) first[lane].stores.wait(0);
}
inline void keep_stores() {
    for (Thread& thread : threads) {
        thread.stores.commit();
        for (auto& group : thread.stores.groups) unpublished.groups.push_back(std::move(group));
    }
}

inline void start() {
    body();
    self().ended = true;
    _longjmp(scheduler, 1);
}

inline void resume(Thread& thread) {
    if (_setjmp(scheduler)) return;
    if (thread.started) _longjmp(thread.place, 1);
    thread.started = true;
    setcontext(&thread.context);
}

// Lets threads run up to where they meet. One more than have ended, or 0 if none could run.
inline int run_threads(int first, int count) {
    int ended = 0;
    bool moved = false;
    for (int turn = 0; turn < count; ++turn) {
        const int i = first + (last_first ? count - 1 - turn : turn);
        Thread& thread = threads[i];
        if (thread.ended || (thread.waits_for && thread.waits_for->generation == thread.generation)) continue;
        thread.waits_for = nullptr;
        threadIdx.x = i;
        moved = true;
        resume(thread);
        ended += thread.ended;
    }
    return moved ? ended + 1 : 0;
}

inline void run_cta() {
    constexpr size_t stack_bytes = 64 * 1024;
    const int count = blockDim.x;
    if (count % 32) std::abort();
    threads = std::vector<Thread>(count);
    warps = std::vector<Warp>(count / 32);
    all = waiting = Meeting{count};
    begin_watching();
    for (Thread& thread : threads) {
        thread.stack.reset(new char[stack_bytes]);
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = stack_bytes;
        makecontext(&thread.context, start, 0);
    }
    const int together = warp_by_warp ? 32 : count;
    for (int left = count; left > 0;) {
        bool moved = false;
        for (int turn = 0; turn < count; turn += together)
            while (const int ended = run_threads(last_first ? count - together - turn : turn, together)) {
                moved = true;
                left -= ended - 1;
                if (!warp_by_warp) break;
            }
        if (!moved) {
            std::fprintf(stderr, "CTA %u: threads wait for each other\n", blockIdx.x);
            std::abort();
        }
    }
    keep_stores();
    broken_rules += !waited + !released;
}

}  // namespace emulated

inline void __syncwarp() {
    emulated::self().stores.commit();
    emulated::meet(emulated::warps[threadIdx.x / 32].meeting);
}
inline void __syncthreads() { emulated::meet(emulated::all); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulated::gather(value)[threadIdx.x % 32 ^ mask];
}
inline unsigned __ballot_sync(unsigned, bool value) {
    unsigned result = 0;
    const auto everyone = emulated::gather(value);
    for (int lane = 0; lane < 32; ++lane) result |= unsigned(everyone[lane]) << lane;
    return result;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    const auto everyone = emulated::gather(value);
    return *std::max_element(everyone.begin(), everyone.end());
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
    const auto everyone = emulated::gather(value);
    return *std::min_element(everyone.begin(), everyone.end());
}
inline int __popc(unsigned value) { return std::popcount(value); }
inline int __ffs(unsigned value) { return value ? std::countr_zero(value) + 1 : 0; }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
template <class T>
T __ldcg(const T* p) {
    if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) std::abort();
    return *p;
}
inline float __expf(float value) { return std::exp(value); }
inline float __fdividef(float value, float by) { return value / by; }
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
template <class T>
void __stcg(T* p, const T& value) {
    if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) std::abort();
    emulated::self().stores.open.push_back([=] { *p = value; });
}
// A store that lets the line go first; how many came is counted.
namespace emulated {
inline int passing_stores = 0;
}
template <class T>
void __stcs(T* p, const T& value) {
    ++emulated::passing_stores;
    __stcg(p, value);
}
using std::isfinite;
using std::max;
using std::min;

// The runtime's calls that a launch makes.
using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidDevice = 101;
constexpr int cudaDevAttrMultiProcessorCount = 16, cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76;
constexpr int cudaDevAttrL2CacheSize = 38, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97, cudaFuncAttributeMaxDynamicSharedMemorySize = 8;
constexpr int cudaLaunchAttributeProgrammaticStreamSerialization = 6;
struct cudaLaunchAttribute {
    int id;
    struct {
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    int numAttrs;
};
namespace emulated {
// Cards of nine multiprocessors.
struct Card {
    int major, block_shared_bytes, processor_shared_bytes;
};
constexpr Card cards[] = {{9, 227 * 1024, 228 * 1024}, {12, 99 * 1024, 100 * 1024}};
inline int card = 0;
constexpr int l2_bytes = 1 << 20;
inline size_t last_shared_bytes = 0;
inline bool launches_run = true;  // or are only noted
}  // namespace emulated
inline int cudaGetDevice(int* device) { return *device = emulated::card, 0; }
inline int cudaDeviceGetAttribute(int* value, int attribute, int device) {
    *value = attribute == cudaDevAttrMultiProcessorCount            ? 9
             : attribute == cudaDevAttrComputeCapabilityMajor       ? emulated::cards[device].major
             : attribute == cudaDevAttrL2CacheSize                  ? emulated::l2_bytes
             : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? emulated::cards[device].block_shared_bytes
                                                                    : 0;
    return 0;
}
template <class Kernel>
int cudaFuncSetAttribute(Kernel, int, int) {
    return 0;
}
// As shared memory allows, of which a CTA takes another KB; registers are held to allow two.
template <class Kernel>
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, int shared_bytes) {
    return *blocks = std::min(2, emulated::cards[emulated::card].processor_shared_bytes / (shared_bytes + 1024)), 0;
}
inline const char* cudaGetErrorName(int) { return "cudaErrorInvalidValue"; }
template <class Kernel, class... Params>
int cudaLaunchKernelEx(const cudaLaunchConfig_t* config, Kernel kernel, const Params&... params) {
    gridDim = config->gridDim, blockDim = config->blockDim;
    emulated::last_shared_bytes = config->dynamicSmemBytes;
    if (!emulated::launches_run) return cudaSuccess;
    for (unsigned block = 0; block < gridDim.x * gridDim.y; ++block) {
        blockIdx.x = block % gridDim.x, blockIdx.y = block / gridDim.x;
        emulated::dynamic.assign(config->dynamicSmemBytes / sizeof(uint4) + 1, make_uint4(~0u, ~0u, ~0u, ~0u));  // NaN
        emulated::body = [&] { kernel(params...); };
        emulated::run_cta();
    }
    emulated::unpublished.wait(0);
    ++emulated::launches;
    return cudaSuccess;
}
