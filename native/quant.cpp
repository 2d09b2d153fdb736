// Unpacking of GGUF blocks, each operation rounded as numpy rounds it (compiled with -ffp-contract=off: no fused multiply-add).
#include "freetoken.h"
#include "kernels.h"
#include "vec.h"

namespace {

inline float half_at(const uint8_t *from) {
    uint16_t h;
    memcpy(&h, from, 2);
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 31u, fraction = h & 0x3ffu, bits;
    if (exponent == 31) {
        // A signalling NaN becomes quiet, as every conversion instruction does.
        bits = sign | 0x7f800000u | (fraction << 13) | (fraction ? 0x400000u : 0u);
    } else if (exponent) {
        bits = sign | ((exponent + 112) << 23) | (fraction << 13);
    } else {
        const float small = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24, exact
        memcpy(&bits, &small, 4);
        bits |= sign;
    }
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

inline uint32_t word_at(const uint8_t *from) {
    return from[0] | uint32_t{from[1]} << 8 | uint32_t{from[2]} << 16 | uint32_t{from[3]} << 24;
}

// 32 values: scale, [offset], [fifth bits], nibbles (low ones are the first half).
template <bool FIFTH, bool OFFSET>
inline void unpack_small(const uint8_t *block, float *out) {
    const float scale = half_at(block);
    const float offset = OFFSET ? half_at(block + 2) : 0.0f;
    const uint8_t *rest = block + (OFFSET ? 4 : 2);
    const uint32_t high = FIFTH ? word_at(rest) : 0;
    const uint8_t *nibbles = rest + (FIFTH ? 4 : 0);
    const int centre = OFFSET ? 0 : FIFTH ? 16 : 8;
    for (int i = 0; i < 16; ++i) {
        const int low_value = (nibbles[i] & 15) | (FIFTH ? ((high >> i) & 1) << 4 : 0);
        const int high_value = (nibbles[i] >> 4) | (FIFTH ? ((high >> (i + 16)) & 1) << 4 : 0);
        const float first = scale * static_cast<float>(low_value - centre);
        const float second = scale * static_cast<float>(high_value - centre);
        out[i] = OFFSET ? first + offset : first;
        out[i + 16] = OFFSET ? second + offset : second;
    }
}

inline void unpack_q8_0(const uint8_t *block, float *out) {
    const float scale = half_at(block);
    for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * scale;
}

// Six-bit scale and minimum of sub-block s out of the 12 packed bytes.
inline void scale_and_minimum(const uint8_t *packed, int s, float *scale, float *minimum) {
    const int first = s < 4 ? packed[s] & 63 : (packed[s + 4] & 15) | ((packed[s - 4] >> 6) << 4);
    const int second = s < 4 ? packed[s + 4] & 63 : (packed[s + 4] >> 4) | ((packed[s] >> 6) << 4);
    *scale = static_cast<float>(first);
    *minimum = static_cast<float>(second);
}

// 256 values in 8 sub-blocks of 32, with a fifth bit for Q5_K.
template <bool FIFTH>
inline void unpack_k(const uint8_t *block, float *out) {
    const float super_scale = half_at(block), super_minimum = half_at(block + 2);
    const uint8_t *high = block + 16;
    const uint8_t *nibbles = high + (FIFTH ? 32 : 0);
    for (int s = 0; s < 8; ++s) {
        float scale, minimum;
        scale_and_minimum(block + 4, s, &scale, &minimum);
        scale = super_scale * scale;
        minimum = super_minimum * minimum;
        const uint8_t *from = nibbles + s / 2 * 32;
        const int shift = s % 2 * 4;
        for (int i = 0; i < 32; ++i) {
            const int value = ((from[i] >> shift) & 15) | (FIFTH ? ((high[i] >> s) & 1) << 4 : 0);
            out[s * 32 + i] = scale * static_cast<float>(value) - minimum;
        }
    }
}

// 256 values, two halves of 4 runs of 32; a signed scale for every 16.
inline void unpack_q6_k(const uint8_t *block, float *out) {
    const float super_scale = half_at(block + 208);
    for (int run = 0; run < 8; ++run) {
        const int half = run / 4, within = run % 4;
        const uint8_t *low = block + half * 64 + within % 2 * 32;
        const uint8_t *high = block + 128 + half * 32;
        const int low_shift = within / 2 * 4, high_shift = within * 2;
        for (int part = 0; part < 2; ++part) {
            const float scale = super_scale * static_cast<float>(static_cast<int8_t>(block[192 + run * 2 + part]));
            for (int i = part * 16; i < part * 16 + 16; ++i) {
                const int value = ((low[i] >> low_shift) & 15) | (((high[i] >> high_shift) & 3) << 4);
                out[run * 32 + i] = scale * static_cast<float>(value - 32);
            }
        }
    }
}

template <void (*ONE)(const uint8_t *, float *), int BYTES, int VALUES>
void each(const uint8_t *packed, float *out, int64_t blocks) {
    for (int64_t b = 0; b < blocks; ++b) ONE(packed + b * BYTES, out + b * VALUES);
}

void unpack(int format, const uint8_t *packed, float *out, int64_t blocks) {
    switch (format) {
        case FT_Q4_0: return each<unpack_small<false, false>, 18, 32>(packed, out, blocks);
        case FT_Q4_1: return each<unpack_small<false, true>, 20, 32>(packed, out, blocks);
        case FT_Q5_0: return each<unpack_small<true, false>, 22, 32>(packed, out, blocks);
        case FT_Q5_1: return each<unpack_small<true, true>, 24, 32>(packed, out, blocks);
        case FT_Q8_0: return each<unpack_q8_0, 34, 32>(packed, out, blocks);
        case FT_Q4_K: return each<unpack_k<false>, 144, 256>(packed, out, blocks);
        case FT_Q5_K: return each<unpack_k<true>, 176, 256>(packed, out, blocks);
        case FT_Q6_K: return each<unpack_q6_k, 210, 256>(packed, out, blocks);
        default: return;  // api.cpp refuses every other format before it comes here
    }
}

// Round to nearest even; a NaN stays one and becomes quiet.
void to_bf16(const float *x, uint16_t *out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        out[i] = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded);
    }
}

}  // namespace

void FT_JOIN1(fill_unpack_, VARIANT)(Kernels &table) {
    table.unpack = unpack;
    table.to_bf16 = to_bf16;
}
