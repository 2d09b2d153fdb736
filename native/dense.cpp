// Dot products of many weight rows with a few vectors, and the small element-wise steps of the experts.
#include "freetoken.h"
#include "kernels.h"
#include "vec.h"

namespace {

// The next rows are asked for while these are multiplied: rows are short, and the hardware's own look-ahead starts anew at
// each. One core, cold weights, 576 to 2048 columns (EPYC): fp32 31 -> 33 GB/s, bf16 15 -> 25, bf16 for 8 tokens 7 -> 14.
//
// ROWS weight rows times COUNT vectors, one accumulator each: a result's order of additions depends on `columns` alone.
template <class T, int ROWS, int COUNT>
inline void tile(const T *weight, int64_t columns, const float *const *x, float *out, int64_t out_stride) {
    Vec acc[ROWS][COUNT] = {};
    int64_t i = 0;
    for (; i + kLanes <= columns; i += kLanes) {
        Vec w[ROWS];
        for (int n = 0; n < ROWS; ++n) {
            w[n] = load(weight + n * columns + i);
            __builtin_prefetch(weight + (n + ROWS) * columns + i);
        }
        for (int m = 0; m < COUNT; ++m) {
            const Vec v = load(x[m] + i);
            for (int n = 0; n < ROWS; ++n) acc[n][m] = fused(w[n], v, acc[n][m]);
        }
    }
    if (i < columns) {
        for (int n = 0; n < ROWS; ++n) {
            const Vec w = load_part(weight + n * columns + i, columns - i);
            for (int m = 0; m < COUNT; ++m) acc[n][m] = fused(w, load_part(x[m] + i, columns - i), acc[n][m]);
        }
    }
    for (int m = 0; m < COUNT; ++m)
        for (int n = 0; n < ROWS; ++n) out[m * out_stride + n] = sum(acc[n][m]);
}

template <class T, int ROWS>
inline void tile_of(const T *weight, int64_t columns, const float *const *x, int64_t count, float *out, int64_t out_stride) {
    switch (count) {
        case 1: return tile<T, ROWS, 1>(weight, columns, x, out, out_stride);
        case 2: return tile<T, ROWS, 2>(weight, columns, x, out, out_stride);
        case 3: return tile<T, ROWS, 3>(weight, columns, x, out, out_stride);
        default: return tile<T, ROWS, 4>(weight, columns, x, out, out_stride);
    }
}

// Vectors go four at a time; their rows of weights are still in the first-level cache for the next four.
template <class T>
void dots(const Dots &call) {
    constexpr int kRows = kRegisters >= 32 ? 4 : 2;
    const T *weight = static_cast<const T *>(call.weight);
    int64_t n = 0;
    for (; n + kRows <= call.rows; n += kRows)
        for (int64_t m = 0; m < call.count; m += 4)
            tile_of<T, kRows>(weight + n * call.columns, call.columns, call.x + m, call.count - m,
                              call.out + m * call.out_stride + n, call.out_stride);
    for (; n < call.rows; ++n)
        for (int64_t m = 0; m < call.count; m += 4)
            tile_of<T, 1>(weight + n * call.columns, call.columns, call.x + m, call.count - m,
                          call.out + m * call.out_stride + n, call.out_stride);
}

inline Vec silu_times_lanes(Vec gate, Vec up) { return gate / (1.0f + exponential(-gate)) * up; }

void silu_times(float *gate, const float *up, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(gate + i, silu_times_lanes(load(gate + i), load(up + i)));
    if (i < count)
        store_part(gate + i, silu_times_lanes(load_part(gate + i, count - i), load_part(up + i, count - i)), count - i);
}

void add_scaled(float *out, const float *x, float scale, int64_t count) {
    const Vec s = splat(scale);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(out + i, fused(load(x + i), s, load(out + i)));
    if (i < count)
        store_part(out + i, fused(load_part(x + i, count - i), s, load_part(out + i, count - i)), count - i);
}

}  // namespace

void FT_JOIN1(fill_dense_, VARIANT)(Kernels &table) {
    table.dots[FT_F32] = dots<float>;
    table.dots[FT_BF16] = dots<bf16>;
    table.silu_times = silu_times;
    table.add_scaled = add_scaled;
}
