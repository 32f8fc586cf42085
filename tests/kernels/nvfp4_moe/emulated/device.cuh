// The machine's part of the kernels, on a CPU. Found instead of the kernels' own header of this name.
#pragma once
#include "layout.cuh"

namespace nvfp4 {

inline Word4 load_weights(const uint8_t* p) {
    if (reinterpret_cast<uintptr_t>(p) % 16) std::abort();
    Word4 w;
    std::memcpy(&w, p, sizeof w);
    return w;
}

inline int kept_loads = 0, passing_loads = 0;  // that came
inline Word4 load_weights_kept(const uint8_t* p) { return ++kept_loads, load_weights(p); }
inline Word4 load_weights_passing(const uint8_t* p) { return ++passing_loads, load_weights(p); }
inline Word4 load_activations(const uint8_t* p) { return load_weights(p); }

// PTX ISA, "Matrix fragments for mma.m16n8k16": A rows g and g + 8, B column g, slots 2t + {0, 1} and 2t + 8 + {0, 1}.
inline void mma(float (&c)[4], Word4 a, uint32_t b0, uint32_t b1) {
    struct Operands {
        uint32_t a[4], b[2];
    };
    Operands mine;
    std::memcpy(mine.a, a.v, sizeof mine.a);
    mine.b[0] = b0, mine.b[1] = b1;
    const auto everyone = emulated::gather(mine);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const auto half = [](uint32_t pair, int upper) { return std::bit_cast<float>((pair >> (16 * upper)) << 16); };
    for (int i = 0; i < 4; ++i) {
        double sum = c[i];
        for (int slot = 0; slot < 16; ++slot) {
            const int from = slot % 8 / 2, later = slot / 8;
            const Operands &row = everyone[g * 4 + from], &column = everyone[(2 * t + i % 2) * 4 + from];
            sum += double(half(row.a[i / 2 + later * 2], slot % 2)) * half(column.b[later], slot % 2);
        }
        c[i] = float(sum);
    }
}

inline void copy_async(void* shared, const void* global) {
    if (reinterpret_cast<uintptr_t>(shared) % 16 || reinterpret_cast<uintptr_t>(global) % 16) std::abort();
    emulated::self().copies.open.push_back([=] { std::memcpy(shared, global, 16); });
}
inline void copy_weights_async(void* shared, const void* global) { copy_async(shared, global); }
inline void commit_copies() { emulated::self().copies.commit(); }
template <int Pending>
void wait_for_copies() {
    emulated::self().copies.wait(Pending);
}

inline void wait_for_producer() { emulated::wait(); }
inline void release_dependents() { emulated::release(); }
// CTAs run one after another here: a word that has not been written by now never will be.
inline Word4 read_words(const uint32_t* p) {
    const Word4 w = load_weights(reinterpret_cast<const uint8_t*>(p));
    for (uint32_t word : w.v) {
        if (word != 0xffffffffu) continue;
        std::fprintf(stderr, "CTA %u waits for a word that nobody has written\n", blockIdx.x);
        std::abort();
    }
    return w;
}
inline void write_word(uint32_t* p, uint32_t value) { *p = value; }
inline unsigned arrive(unsigned* counter) { return (*counter)++; }
inline void count_release(unsigned* counter) {
    emulated::publish_stores();
    ++*counter;
}
// As above: a count that is not there by now never will be.
inline unsigned read_acquire(const unsigned* counter) {
    if (++emulated::questions > 1'000'000) {
        std::fprintf(stderr, "CTA %u waits for a count that nobody completes\n", blockIdx.x);
        std::abort();
    }
    return *counter;
}
inline void keep_here(uint32_t&) {}
inline void* dynamic_shared() { return emulated::dynamic.data(); }

}  // namespace nvfp4
