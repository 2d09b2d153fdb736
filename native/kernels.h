// The table of kernels that each instruction set fills in. Single-threaded pieces; api.cpp cuts the work and runs them.
#pragma once

#include <cstdint>

// Positions one attention piece covers. Half as many doubles the joining work, twice as many leaves threads idle at short contexts.
constexpr int64_t kPiece = 128;

// out[m * out_stride + n] = dot(weight row n, x[m]) for n < rows, m < count; any count, same result for each m alone.
struct Dots {
    const void *weight;
    int64_t rows, columns;
    const float *const *x;
    int64_t count;
    float *out;
    int64_t out_stride;
};

// One piece of one sequence for one KV head: `group` query heads over positions [first, last), last - first <= kPiece.
struct Piece {
    const float *q;             // [group, head_dim]
    const void *keys, *values;  // first element of this KV head at slot 0
    int64_t slot_stride;        // elements from one slot to the next
    const int32_t *pages;
    int64_t page_tokens, first, last, group, head_dim;
    float scale;
    float *peak, *total;  // [group]: largest score, sum of exp(score - peak)
    float *mix;           // [group, head_dim]: sum of exp(score - peak) * value
};

// Join the pieces of one query head: out = sum mix * exp(peak - top) / sum total * exp(peak - top), pieces in order.
struct Join {
    const float *peak, *total, *mix;  // piece p at p * stride (mix: p * stride * head_dim)
    int64_t pieces, stride, head_dim;
    float *out;
};

struct Kernels {
    void (*dots[2])(const Dots &);              // by ft_type
    void (*silu_times)(float *gate, const float *up, int64_t count);
    void (*add_scaled)(float *out, const float *x, float scale, int64_t count);
    void (*piece[2])(const Piece &);            // by ft_type
    void (*join)(const Join &);
    void (*unpack)(int format, const uint8_t *packed, float *out, int64_t blocks);
    void (*to_bf16)(const float *x, uint16_t *out, int64_t count);
};

// Each kernel file is compiled once a variant and defines its own part of that variant's table.
#define FT_DECLARE_VARIANT(name) \
    void fill_dense_##name(Kernels &table); \
    void fill_attention_##name(Kernels &table); \
    void fill_unpack_##name(Kernels &table);
FT_DECLARE_VARIANT(baseline)
FT_DECLARE_VARIANT(avx2)
FT_DECLARE_VARIANT(avx512)

#define FT_JOIN2(a, b) a##b
#define FT_JOIN1(a, b) FT_JOIN2(a, b)
