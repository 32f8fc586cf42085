// The linear kernel's layout on a CPU: the same decode and index functions, lane by lane, and m16n8k16 as PTX defines it.
#include "layout.cuh"

#include <vector>

using namespace nvfp4;

namespace {

float bf16(uint32_t bits) {
    const uint32_t wide = bits << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

float half_of(uint32_t pair, int half) { return bf16((pair >> (16 * half)) & 0xffff); }

struct Lane {
    Word4 a[4];
    Word4 b;
    double c[2][4];
};

// PTX ISA, "Matrix fragments for mma.m16n8k16": A rows g and g + 8, B column g, slots 2t + {0, 1} and 2t + 8 + {0, 1}.
void mma(std::vector<Lane>& lanes, int h, int p) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        const Word4 registers = mma_weights(lanes[lane].a, h, p);
        for (int half = 0; half < 2; ++half) {
            for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][2 * t + i / 2 * 8 + half] = half_of(registers.v[i], half);
            for (int i = 0; i < 2; ++i) b[2 * t + i * 8 + half][g] = half_of(lanes[lane].b.v[2 * p + i], half);
        }
    }
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i)
            for (int slot = 0; slot < 16; ++slot)
                lanes[lane].c[h][i] += double(a[lane / 4 + i / 2 * 8][slot]) * b[slot][lane % 4 * 2 + i % 2];
}

}  // namespace

// y[m, n] without row scale for m <= 8 / P, n a multiple of 128, k a multiple of 128 P.
template <int P>
void emulate(const uint8_t* packed, const uint8_t* scales, const uint16_t* x, double* y, int m, int n, int k) {
    for (int w = 0; w < n / kWarpRows * P; ++w) {
        std::vector<Lane> lanes(32, Lane{});
        for (int step = 0; step < k / (P * kPartColumns); ++step) {
            for (int word = 0; word < 4; ++word) {
                for (int lane = 0; lane < 32; ++lane) {
                    const int g = lane / 4, t = lane % 4, column = step * P * kPartColumns + column_of<P>(g, t);
                    Word4 weights[4], words, chunk;
                    uint32_t scale[4];
                    std::memcpy(&words, scales + scale_offset<P>(w, k / 64, step, g, t), 16);
                    for (int q = 0; q < 4; ++q) {
                        std::memcpy(&weights[q], packed + (int64_t(row_of<P>(w, g, q)) * k + column) / 2, 16);
                        scale[q] = scale_pair(words.v[q], scale_selector(t));
                    }
                    decode_word(weights, scale, word, lanes[lane].a);
                    const int token = g / P < m ? g / P : m - 1;
                    std::memcpy(&chunk, x + int64_t(token) * k + column + word * 8, 16);
                    lanes[lane].b = permute_activations(chunk);
                }
                for (int h = 0; h < 2; ++h)
                    for (int p = 0; p < 2; ++p) mma(lanes, h, p);
            }
        }
        for (int lane = 0; lane < 32; ++lane) {
            for (int q = 0; q < 4; ++q) {
                for (int i = 0; i < 2; ++i) {
                    const int g = lane / 4, column = lane % 4 * 2 + i, token = column / P;
                    // Accumulators of unequal parts are dropped, those of equal parts belong together.
                    if (token >= m || column % P != g % P) continue;
                    y[int64_t(token) * n + row_of<P>(w, g, q)] += lanes[lane].c[q / 2][q % 2 * 2 + i] * kUnscale;
                }
            }
        }
    }
}

// y must be zero.
extern "C" void emulate(int parts, const uint8_t* packed, const uint8_t* scales, const uint16_t* x, double* y, int m, int n, int k) {
    (parts == 1 ? emulate<1> : emulate<2>)(packed, scales, x, y, m, n, k);
}

// The weight that code and E4M3 byte decode to: column `column` of an 8-column word, scale in byte `place` of its word.
extern "C" float decode_one(uint32_t code, uint32_t scale_byte, int column, int place) {
    const uint32_t pair = scale_pair(scale_byte << (8 * place), scale_selector(place / 2));
    const Word4 word = decode(code << (4 * column));
    return half_of(multiply_bf16x2(word.v[column % 4], spread(pair, place % 2)), column / 4) * kUnscale;
}

// Columns that decode()'s registers hold, as permute_activations and restore_order see them: 1 if they agree.
extern "C" int orders_agree() {
    Word4 x;
    for (int i = 0; i < 4; ++i) x.v[i] = uint32_t(2 * i) | uint32_t(2 * i + 1) << 16;
    const Word4 y = restore_order(permute_activations(x));
    return std::memcmp(&x, &y, sizeof x) == 0;
}
