// BF16 for the emulation: storage and rounding.
#pragma once
#include <bit>
#include <cstdint>

struct __nv_bfloat16 {
    uint16_t bits;
};
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    const uint32_t wide = std::bit_cast<uint32_t>(value);
    if (value != value) return {0x7fff};
    return {uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};
}
inline float __bfloat162float(__nv_bfloat16 value) { return std::bit_cast<float>(uint32_t(value.bits) << 16); }
