// Decode attention over one piece of a paged sequence, and the joining of pieces.
#include "freetoken.h"
#include "kernels.h"
#include "vec.h"

namespace {

// Query heads handled together, so that each key and value is widened once for all of them.
constexpr int kGroup = 4;

struct Place {  // walks positions through the page table without dividing at each step
    const int32_t *pages;
    int64_t page_tokens, page, offset;
    int64_t slot() const { return pages[page] * page_tokens + offset; }
    void next() {
        if (++offset == page_tokens) offset = 0, ++page;
    }
};

inline Place place(const Piece &call) {
    return {call.pages, call.page_tokens, call.first / call.page_tokens, call.first % call.page_tokens};
}

// Positions asked for in advance. Pages are scattered, so the hardware does not see a stream: without this one core reads
// 7 GB/s of cold fp32 KV, with it 16 (EPYC, 9/3 heads of 64, 2048 positions).
constexpr int64_t kAhead = 16;

template <class T>
inline void ask_for(const T *row, int64_t elements) {
    for (int64_t i = 0; i < elements; i += static_cast<int64_t>(64 / sizeof(T))) __builtin_prefetch(row + i);
}

template <class T, int GROUP>
void score(const Piece &call, const float *q, float (*scores)[kPiece]) {
    const T *keys = static_cast<const T *>(call.keys), *values = static_cast<const T *>(call.values);
    const int64_t count = call.last - call.first;
    Place at = place(call), ahead = at;
    int64_t asked = 0;
    for (int64_t t = 0; t < count; ++t, at.next()) {
        for (; asked < count && asked <= t + kAhead; ++asked, ahead.next()) {
            const int64_t from = ahead.slot() * call.slot_stride;
            ask_for(keys + from, call.head_dim);
            ask_for(values + from, call.head_dim);
        }
        const T *key = keys + at.slot() * call.slot_stride;
        Vec acc[GROUP] = {};
        int64_t d = 0;
        for (; d + kLanes <= call.head_dim; d += kLanes) {
            const Vec k = load(key + d);
            for (int g = 0; g < GROUP; ++g) acc[g] = fused(k, load(q + g * call.head_dim + d), acc[g]);
        }
        if (d < call.head_dim) {
            const Vec k = load_part(key + d, call.head_dim - d);
            for (int g = 0; g < GROUP; ++g)
                acc[g] = fused(k, load_part(q + g * call.head_dim + d, call.head_dim - d), acc[g]);
        }
        for (int g = 0; g < GROUP; ++g) scores[g][t] = sum(acc[g]) * call.scale;
    }
}

// Turn scores into exp(score - peak); return the peak and the sum.
inline void soften(float *scores, int64_t count, float *peak, float *total) {
    float top = scores[0];
    for (int64_t t = 1; t < count; ++t) top = scores[t] > top || scores[t] != scores[t] ? scores[t] : top;
    const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
    for (int64_t t = count; t < padded; ++t) scores[t] = top;
    Vec acc{};
    for (int64_t t = 0; t < padded; t += kLanes) {
        Vec e = exponential(load(scores + t) - top);
        store(scores + t, e);
        if (t + kLanes > count) e = load_part(scores + t, count - t);
        acc += e;
    }
    *peak = top;
    *total = sum(acc);
}

// WIDE vectors of each value at once, from dimension d on; `part` lanes of the last one if it is not whole.
template <class T, int GROUP, int WIDE, bool WHOLE>
inline void mix_columns(const Piece &call, float (*weights)[kPiece], float *mix, int64_t d, int64_t part) {
    const T *values = static_cast<const T *>(call.values) + d;
    Vec acc[GROUP][WIDE] = {};
    Place at = place(call);
    for (int64_t t = 0; t < call.last - call.first; ++t, at.next()) {
        const T *value = values + at.slot() * call.slot_stride;
        Vec v[WIDE];
        for (int i = 0; i < WIDE; ++i) v[i] = WHOLE ? load(value + i * kLanes) : load_part(value, part);
        for (int g = 0; g < GROUP; ++g) {
            const Vec w = splat(weights[g][t]);
            for (int i = 0; i < WIDE; ++i) acc[g][i] = fused(v[i], w, acc[g][i]);
        }
    }
    for (int g = 0; g < GROUP; ++g)
        for (int i = 0; i < WIDE; ++i) {
            float *to = mix + g * call.head_dim + d + i * kLanes;
            WHOLE ? store(to, acc[g][i]) : store_part(to, acc[g][i], part);
        }
}

template <class T, int GROUP>
void piece_group(const Piece &call, int64_t head) {
    constexpr int kWide = kRegisters >= 32 ? 4 : 2;
    float scores[kGroup][kPiece] = {};
    score<T, GROUP>(call, call.q + head * call.head_dim, scores);
    for (int g = 0; g < GROUP; ++g) soften(scores[g], call.last - call.first, call.peak + head + g, call.total + head + g);
    float *mix = call.mix + head * call.head_dim;
    int64_t d = 0;
    for (; d + kWide * kLanes <= call.head_dim; d += kWide * kLanes)
        mix_columns<T, GROUP, kWide, true>(call, scores, mix, d, 0);
    for (; d + kLanes <= call.head_dim; d += kLanes) mix_columns<T, GROUP, 1, true>(call, scores, mix, d, 0);
    if (d < call.head_dim) mix_columns<T, GROUP, 1, false>(call, scores, mix, d, call.head_dim - d);
}

template <class T>
void piece(const Piece &call) {
    for (int64_t head = 0; head < call.group; head += kGroup) {
        switch (call.group - head) {
            case 1: piece_group<T, 1>(call, head); break;
            case 2: piece_group<T, 2>(call, head); break;
            case 3: piece_group<T, 3>(call, head); break;
            default: piece_group<T, kGroup>(call, head);
        }
    }
}

void join(const Join &call) {
    float top = call.peak[0];
    for (int64_t p = 1; p < call.pieces; ++p) {
        const float peak = call.peak[p * call.stride];
        top = peak > top || peak != peak ? peak : top;
    }
    float total = 0;
    for (int64_t d = 0; d < call.head_dim; ++d) call.out[d] = 0;
    for (int64_t p = 0; p < call.pieces; ++p) {
        const Vec factor = exponential(splat(call.peak[p * call.stride] - top));
        total += call.total[p * call.stride] * factor[0];
        const float *mix = call.mix + p * call.stride * call.head_dim;
        for (int64_t d = 0; d < call.head_dim; ++d) call.out[d] += mix[d] * factor[0];
    }
    for (int64_t d = 0; d < call.head_dim; ++d) call.out[d] /= total;
}

}  // namespace

void FT_JOIN1(fill_attention_, VARIANT)(Kernels &table) {
    table.piece[FT_F32] = piece<float>;
    table.piece[FT_BF16] = piece<bf16>;
    table.join = join;
}
