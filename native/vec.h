// Vectors as wide as the instruction set being compiled for. Everything is in an unnamed namespace and nothing from the C++ library
// is used: a shared inline function compiled for AVX-512 could otherwise be the one that the baseline calls.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kBytes = 32, kRegisters = 16;
#else
constexpr int kBytes = 16, kRegisters = 16;
#endif
constexpr int kLanes = kBytes / 4;

typedef float Vec __attribute__((vector_size(kBytes)));
typedef int32_t IntVec __attribute__((vector_size(kBytes)));
typedef uint32_t BitVec __attribute__((vector_size(kBytes)));
typedef uint16_t HalfVec __attribute__((vector_size(kBytes / 2)));
struct bf16 { uint16_t bits; };

inline Vec load(const float *from) {
    Vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

inline Vec load(const bf16 *from) {
    HalfVec h;
    memcpy(&h, from, sizeof h);
    return (Vec)(__builtin_convertvector(h, BitVec) << 16);
}

// The first `count` lanes; the rest are 0.
template <class T>
inline Vec load_part(const T *from, int64_t count) {
    T lanes[kLanes];
    memset(lanes, 0, sizeof lanes);
    memcpy(lanes, from, static_cast<size_t>(count) * sizeof(T));
    return load(lanes);
}

inline void store(float *to, Vec v) { memcpy(to, &v, sizeof v); }
inline void store_part(float *to, Vec v, int64_t count) { memcpy(to, &v, static_cast<size_t>(count) * 4); }
inline Vec splat(float x) { return x - Vec{}; }

// x * y + z, fused where the hardware has it: written out, so that every tile shape rounds alike.
inline Vec fused(Vec x, Vec y, Vec z) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif defined(__aarch64__)
    return (Vec)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#else
    return x * y + z;
#endif
}

inline float sum(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float lanes[kLanes];
    store(lanes, v);
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
#endif
}

// exp to about 1 unit in the last place between -87 and 88, held at those ends; NaN stays NaN.
inline Vec exponential(Vec x) {
    const Vec low = splat(-87.0f), high = splat(88.0f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec turns = fused(x, splat(1.44269504f), magic);
    const Vec whole = turns - magic;
    Vec r = fused(whole, splat(-0.693359375f), x);
    r = fused(whole, splat(2.12194440e-4f), r);
    Vec p = splat(1.9875691500e-4f);
    p = fused(p, r, splat(1.3981999507e-3f));
    p = fused(p, r, splat(8.3334519073e-3f));
    p = fused(p, r, splat(4.1665795894e-2f));
    p = fused(p, r, splat(1.6666665459e-1f));
    p = fused(p, r, splat(5.0000001201e-1f));
    p = fused(p * r, r, r) + 1.0f;
    const BitVec power = ((BitVec)turns << 23) + (127u << 23);
    return p * (Vec)power;
}

}  // namespace
