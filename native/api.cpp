// The C interface: checks, the choice of instruction set, and how each operation is cut into units of work.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <numeric>
#include <system_error>

#include "pool.h"

namespace {

struct Text {
    char *to;
    size_t bytes;
};

__attribute__((format(printf, 3, 4))) int fail(Text text, int status, const char *format, ...) {
    if (text.to && text.bytes) {
        va_list values;
        va_start(values, format);
        vsnprintf(text.to, text.bytes, format, values);
        va_end(values);
    }
    return status;
}

// Run `body`; no exception leaves.
template <class Body>
int guarded(Text text, const Body &body) {
    try {
        return body();
    } catch (const std::bad_alloc &) {
        return fail(text, FT_NO_MEMORY, "no memory for the operation's working space");
    } catch (const std::system_error &error) {
        return fail(text, FT_NO_THREAD, "the system refused a thread: %s", error.what());
    } catch (const std::exception &error) {
        return fail(text, FT_INVALID, "unexpected: %s", error.what());
    }
}

uint32_t cpu_features() {
    uint32_t out = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) out |= FT_CPU_AVX2;
    if (__builtin_cpu_supports("fma")) out |= FT_CPU_FMA | FT_CPU_F16C;  // no CPU has one without the other
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        out |= FT_CPU_AVX512;
    if (__builtin_cpu_supports("avx512bf16")) out |= FT_CPU_AVX512_BF16;
    if (__builtin_cpu_supports("avx512vnni")) out |= FT_CPU_AVX512_VNNI;
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
    if (__builtin_cpu_supports("amx-bf16")) out |= FT_CPU_AMX_BF16;
#endif
#endif
    return out;
}

int best_isa() {
    const uint32_t has = cpu_features();
    if (!(has & FT_CPU_AVX2) || !(has & FT_CPU_FMA)) return FT_ISA_BASELINE;
    return has & FT_CPU_AVX512 ? FT_ISA_AVX512 : FT_ISA_AVX2;
}

void fill(Kernels &table, int isa) {
#if defined(__x86_64__)
    if (isa == FT_ISA_AVX512) {
        fill_dense_avx512(table), fill_attention_avx512(table), fill_unpack_avx512(table);
        return;
    }
    if (isa == FT_ISA_AVX2) {
        fill_dense_avx2(table), fill_attention_avx2(table), fill_unpack_avx2(table);
        return;
    }
#endif
    (void)isa;
    fill_dense_baseline(table), fill_attention_baseline(table), fill_unpack_baseline(table);
}

bool is_type(int type) { return type == FT_F32 || type == FT_BF16; }
int64_t bytes_of(int type) { return type == FT_F32 ? 4 : 2; }
const char *at(const void *start, int64_t bytes) { return static_cast<const char *>(start) + bytes; }
int64_t pieces_of(int64_t count, int64_t each) { return (count + each - 1) / each; }

// Weight rows of one unit: about 64 KiB, so that the last units are short and taking one costs nothing beside its reading.
int64_t rows_a_unit(int64_t columns, int type) {
    const int64_t rows = 65536 / std::max<int64_t>(1, columns * bytes_of(type));
    return std::clamp<int64_t>(rows / 8 * 8, 8, 64);
}
constexpr int64_t kMostRows = 64;

struct Format {
    int values, bytes;
};

Format format_of(int format) {
    switch (format) {
        case FT_Q4_0: return {32, 18};
        case FT_Q4_1: return {32, 20};
        case FT_Q5_0: return {32, 22};
        case FT_Q5_1: return {32, 24};
        case FT_Q8_0: return {32, 34};
        case FT_Q4_K: return {256, 144};
        case FT_Q5_K: return {256, 176};
        case FT_Q6_K: return {256, 210};
        default: return {0, 0};
    }
}

int unpack(ft_pool &pool, const ft_unpack &call, Text text) {
    const Format format = format_of(call.format);
    if (!format.values) return fail(text, FT_UNSUPPORTED, "expected a format of enum ft_format, got %d", call.format);
    if (!is_type(call.type)) return fail(text, FT_INVALID, "expected type 0 (f32) or 1 (bf16), got %d", call.type);
    if (call.elements < 0 || call.elements % format.values)
        return fail(text, FT_INVALID, "expected a multiple of %d elements, got %lld", format.values,
                    static_cast<long long>(call.elements));
    constexpr int64_t kUnit = 16384, kStep = 256;
    const auto *packed = static_cast<const uint8_t *>(call.packed);
    pool.run(pieces_of(call.elements, kUnit), [&](int64_t unit, int) {
        const int64_t start = unit * kUnit, end = std::min(call.elements, start + kUnit);
        const uint8_t *from = packed + start / format.values * format.bytes;
        if (call.type == FT_F32)
            return pool.kernels.unpack(call.format, from, static_cast<float *>(call.out) + start,
                                       (end - start) / format.values);
        for (int64_t i = start; i < end; i += kStep, from += kStep / format.values * format.bytes) {
            float values[kStep];
            const int64_t count = std::min(kStep, end - i);
            pool.kernels.unpack(call.format, from, values, count / format.values);
            pool.kernels.to_bf16(values, static_cast<uint16_t *>(call.out) + i, count);
        }
    });
    return FT_OK;
}

int linear(ft_pool &pool, const ft_linear &call, Text text) {
    if (!is_type(call.type)) return fail(text, FT_INVALID, "expected type 0 (f32) or 1 (bf16), got %d", call.type);
    if (call.tokens < 0 || call.rows < 0 || call.columns < 1)
        return fail(text, FT_INVALID, "expected tokens, rows >= 0 and columns >= 1, got %lld, %lld, %lld",
                    static_cast<long long>(call.tokens), static_cast<long long>(call.rows),
                    static_cast<long long>(call.columns));
    std::vector<const float *> x(static_cast<size_t>(call.tokens));
    for (int64_t t = 0; t < call.tokens; ++t) x[static_cast<size_t>(t)] = call.x + t * call.columns;
    const int64_t each = rows_a_unit(call.columns, call.type);
    pool.run(call.tokens ? pieces_of(call.rows, each) : 0, [&](int64_t unit, int) {
        const int64_t first = unit * each;
        const Dots dots{at(call.weight, first * call.columns * bytes_of(call.type)),
                        std::min(each, call.rows - first), call.columns, x.data(), call.tokens, call.out + first, call.rows};
        pool.kernels.dots[call.type](dots);
    });
    return FT_OK;
}

// Pairs (token, choice) sorted by expert: `runs[r]` pairs from `starts[r]` on share `experts[r]`.
struct Grouped {
    std::vector<int64_t> pairs, starts, experts;
};

Grouped group_by_expert(const ft_moe &call) {
    Grouped out;
    out.pairs.resize(static_cast<size_t>(call.tokens * call.top_k));
    std::iota(out.pairs.begin(), out.pairs.end(), 0);
    std::stable_sort(out.pairs.begin(), out.pairs.end(),
                     [&](int64_t a, int64_t b) { return call.expert_ids[a] < call.expert_ids[b]; });
    for (size_t i = 0; i < out.pairs.size(); ++i) {
        const int64_t expert = call.expert_ids[out.pairs[i]];
        if (out.experts.empty() || out.experts.back() != expert) {
            out.experts.push_back(expert);
            out.starts.push_back(static_cast<int64_t>(i));
        }
    }
    out.starts.push_back(static_cast<int64_t>(out.pairs.size()));
    return out;
}

// Tokens of one expert that go through a tile buffer together; more are taken in turns.
constexpr int64_t kTokens = 8;

// inner[sorted pair, inter] = silu(gate * x) * (up * x)
void moe_up(ft_pool &pool, const ft_moe &call, const Grouped &grouped, float *inner) {
    const int64_t each = rows_a_unit(call.hidden, call.type), blocks = pieces_of(call.inter, each);
    const int64_t row_bytes = call.hidden * bytes_of(call.type);
    pool.run(blocks * static_cast<int64_t>(grouped.experts.size()), [&](int64_t unit, int) {
        const auto run = static_cast<size_t>(unit / blocks);
        const int64_t first = unit % blocks * each, rows = std::min(each, call.inter - first);
        const char *gate_rows = at(call.gate_up, (grouped.experts[run] * 2 * call.inter + first) * row_bytes);
        for (int64_t start = grouped.starts[run]; start < grouped.starts[run + 1]; start += kTokens) {
            const int64_t count = std::min(kTokens, grouped.starts[run + 1] - start);
            const float *x[kTokens];
            float gate[kTokens * kMostRows], up[kTokens * kMostRows];
            for (int64_t m = 0; m < count; ++m)
                x[m] = call.x + grouped.pairs[static_cast<size_t>(start + m)] / call.top_k * call.hidden;
            pool.kernels.dots[call.type]({gate_rows, rows, call.hidden, x, count, gate, kMostRows});
            pool.kernels.dots[call.type](
                {gate_rows + call.inter * row_bytes, rows, call.hidden, x, count, up, kMostRows});
            for (int64_t m = 0; m < count; ++m) {
                pool.kernels.silu_times(gate + m * kMostRows, up + m * kMostRows, rows);
                memcpy(inner + (start + m) * call.inter + first, gate + m * kMostRows, static_cast<size_t>(rows) * 4);
            }
        }
    });
}

// out[token, hidden] = sum over its choices, in the caller's order, of weight * (down * inner)
void moe_down(ft_pool &pool, const ft_moe &call, const Grouped &grouped, const float *inner, float *work) {
    const int64_t each = rows_a_unit(call.inter, call.type), pairs = static_cast<int64_t>(grouped.pairs.size());
    const int64_t row_bytes = call.inter * bytes_of(call.type);
    pool.run(pieces_of(call.hidden, each), [&](int64_t unit, int thread) {
        const int64_t first = unit * each, rows = std::min(each, call.hidden - first);
        float *parts = work + thread * pairs * kMostRows;  // [pair as the caller counts them, kMostRows]
        for (size_t run = 0; run < grouped.experts.size(); ++run) {
            const char *down_rows = at(call.down, (grouped.experts[run] * call.hidden + first) * row_bytes);
            for (int64_t start = grouped.starts[run]; start < grouped.starts[run + 1]; start += kTokens) {
                const int64_t count = std::min(kTokens, grouped.starts[run + 1] - start);
                const float *x[kTokens];
                float tile[kTokens * kMostRows];
                for (int64_t m = 0; m < count; ++m) x[m] = inner + (start + m) * call.inter;
                pool.kernels.dots[call.type]({down_rows, rows, call.inter, x, count, tile, kMostRows});
                for (int64_t m = 0; m < count; ++m)
                    memcpy(parts + grouped.pairs[static_cast<size_t>(start + m)] * kMostRows, tile + m * kMostRows,
                           static_cast<size_t>(rows) * 4);
            }
        }
        for (int64_t t = 0; t < call.tokens; ++t) {
            float *out = call.out + t * call.hidden + first;
            std::fill(out, out + rows, 0.0f);
            for (int64_t pair = t * call.top_k; pair < (t + 1) * call.top_k; ++pair)
                pool.kernels.add_scaled(out, parts + pair * kMostRows, call.expert_weights[pair], rows);
        }
    });
}

int moe(ft_pool &pool, const ft_moe &call, Text text) {
    if (!is_type(call.type)) return fail(text, FT_INVALID, "expected type 0 (f32) or 1 (bf16), got %d", call.type);
    if (call.tokens < 0 || call.top_k < 1 || call.hidden < 1 || call.inter < 1)
        return fail(text, FT_INVALID, "expected tokens >= 0 and top_k, hidden, inter >= 1, got %lld, %d, %lld, %lld",
                    static_cast<long long>(call.tokens), call.top_k, static_cast<long long>(call.hidden),
                    static_cast<long long>(call.inter));
    const int64_t pairs = call.tokens * call.top_k;
    for (int64_t pair = 0; pair < pairs; ++pair)
        if (call.expert_ids[pair] < 0 || call.expert_ids[pair] >= call.experts)
            return fail(text, FT_INVALID, "expected expert ids in [0, %lld), got %lld at token %lld",
                        static_cast<long long>(call.experts), static_cast<long long>(call.expert_ids[pair]),
                        static_cast<long long>(pair / call.top_k));
    if (!pairs) return FT_OK;
    const Grouped grouped = group_by_expert(call);
    float *inner = pool.floats(pairs * call.inter + pool.threads() * pairs * kMostRows);
    moe_up(pool, call, grouped, inner);
    moe_down(pool, call, grouped, inner, inner + pairs * call.inter);
    return FT_OK;
}

int check_attention(const ft_attention &call, Text text) {
    if (!is_type(call.type)) return fail(text, FT_INVALID, "expected type 0 (f32) or 1 (bf16), got %d", call.type);
    if (call.kv_heads < 1 || call.heads < 1 || call.heads % call.kv_heads || call.head_dim < 1)
        return fail(text, FT_INVALID, "expected heads to be a multiple of kv_heads and head_dim >= 1, got %d, %d, %d",
                    call.heads, call.kv_heads, call.head_dim);
    if (call.page_tokens < 1 || call.window < 0)
        return fail(text, FT_INVALID, "expected page_tokens >= 1 and window >= 0, got %d, %d", call.page_tokens, call.window);
    for (int64_t b = 0; b < call.sequences; ++b) {
        const int64_t length = call.kv_lens[b];
        if (length < 1 || length > call.table_columns * call.page_tokens)
            return fail(text, FT_INVALID, "expected kv_lens[%lld] in [1, %lld], got %lld", static_cast<long long>(b),
                        static_cast<long long>(call.table_columns * call.page_tokens), static_cast<long long>(length));
        for (int64_t p = 0; p < pieces_of(length, call.page_tokens); ++p) {
            const int64_t page = call.page_table[b * call.table_columns + p];
            if (page < 0 || (page + 1) * call.page_tokens > call.slots)
                return fail(text, FT_INVALID, "expected pages in [0, %lld), got %lld in sequence %lld",
                            static_cast<long long>(call.slots / call.page_tokens), static_cast<long long>(page),
                            static_cast<long long>(b));
        }
    }
    return FT_OK;
}

// Results of all pieces of all query heads: [pieces, heads] peaks and totals, [pieces, heads, head_dim] mixes.
struct Partials {
    float *peak, *total, *mix;
};

struct Span {
    int64_t sequence, first, last;
};

// Pieces begin at multiples of kPiece, so a sequence is cut alike whatever runs beside it.
std::vector<Span> cut(const ft_attention &call, std::vector<int64_t> &starts) {
    std::vector<Span> out;
    for (int64_t b = 0; b < call.sequences; ++b) {
        starts.push_back(static_cast<int64_t>(out.size()));
        const int64_t length = call.kv_lens[b];
        int64_t first = call.window ? std::max<int64_t>(0, length - call.window) : 0;
        while (first < length) {
            const int64_t last = std::min(length, (first / kPiece + 1) * kPiece);
            out.push_back({b, first, last});
            first = last;
        }
    }
    starts.push_back(static_cast<int64_t>(out.size()));
    return out;
}

void run_piece(const ft_pool &pool, const ft_attention &call, const Span &span, int64_t row, int64_t kv_head, Partials to) {
    const int64_t group = call.heads / call.kv_heads, head = kv_head * group;
    const int64_t skip = kv_head * call.head_dim * bytes_of(call.type);
    Piece piece{};
    piece.q = call.q + (span.sequence * call.heads + head) * call.head_dim;
    piece.keys = at(call.keys, skip);
    piece.values = at(call.values, skip);
    piece.slot_stride = int64_t{call.kv_heads} * call.head_dim;
    piece.pages = call.page_table + span.sequence * call.table_columns;
    piece.page_tokens = call.page_tokens;
    piece.first = span.first;
    piece.last = span.last;
    piece.group = group;
    piece.head_dim = call.head_dim;
    piece.scale = call.scale;
    piece.peak = to.peak + row * call.heads + head;
    piece.total = to.total + row * call.heads + head;
    piece.mix = to.mix + (row * call.heads + head) * call.head_dim;
    pool.kernels.piece[call.type](piece);
}

int attention(ft_pool &pool, const ft_attention &call, Text text) {
    if (const int status = check_attention(call, text)) return status;
    std::vector<int64_t> starts;
    const std::vector<Span> spans = cut(call, starts);
    const int64_t rows = static_cast<int64_t>(spans.size()) * call.heads;
    float *work = pool.floats(rows * (call.head_dim + 2));
    const Partials to{work, work + rows, work + 2 * rows};
    // Neighbouring units are the KV heads of one span: threads read the same slots at the same time.
    pool.run(static_cast<int64_t>(spans.size()) * call.kv_heads, [&](int64_t unit, int) {
        const int64_t row = unit / call.kv_heads;
        run_piece(pool, call, spans[static_cast<size_t>(row)], row, unit % call.kv_heads, to);
    });
    pool.run(call.sequences, [&](int64_t b, int) {
        const int64_t row = starts[static_cast<size_t>(b)], pieces = starts[static_cast<size_t>(b) + 1] - row;
        for (int64_t head = 0; head < call.heads; ++head) {
            const int64_t i = row * call.heads + head;
            pool.kernels.join({to.peak + i, to.total + i, to.mix + i * call.head_dim, pieces, call.heads, call.head_dim,
                               call.out + (b * call.heads + head) * call.head_dim});
        }
    });
    return FT_OK;
}

template <class Call>
int run(ft_pool *pool, const Call *call, Text text, int (*operation)(ft_pool &, const Call &, Text)) {
    if (!pool || !call) return fail(text, FT_INVALID, "expected a pool and a call, got a null pointer");
    return guarded(text, [&] {
        std::lock_guard<std::mutex> lock(pool->busy);
        return operation(*pool, *call, text);
    });
}

}  // namespace

int32_t ft_abi(void) { return FT_ABI; }
uint32_t ft_cpu_features(void) { return cpu_features(); }
int32_t ft_pool_isa(const ft_pool *pool) { return pool ? pool->isa : FT_ISA_BASELINE; }

int ft_pool_open(const ft_pool_options *options, ft_pool **pool, char *to, size_t bytes) {
    const Text text{to, bytes};
    if (!options || !pool) return fail(text, FT_INVALID, "expected options and a place for the pool, got a null pointer");
    if (options->threads < 1 || options->threads > 1024 || options->spin_us < 0)
        return fail(text, FT_INVALID, "expected 1 to 1024 threads and spin_us >= 0, got %d and %d", options->threads,
                    options->spin_us);
    const int isa = options->isa == FT_ISA_BEST ? best_isa() : options->isa;
    if (isa < FT_ISA_BASELINE || isa > best_isa())
        return fail(text, FT_UNSUPPORTED, "expected an instruction set this CPU has (0 to %d), got %d", best_isa(), isa);
    return guarded(text, [&] {
        *pool = new ft_pool(*options, isa);
        fill((*pool)->kernels, isa);
        return static_cast<int>(FT_OK);
    });
}

void ft_pool_close(ft_pool *pool) { delete pool; }

int ft_run_unpack(ft_pool *pool, const ft_unpack *call, char *text, size_t bytes) {
    return run(pool, call, Text{text, bytes}, unpack);
}
int ft_run_linear(ft_pool *pool, const ft_linear *call, char *text, size_t bytes) {
    return run(pool, call, Text{text, bytes}, linear);
}
int ft_run_moe(ft_pool *pool, const ft_moe *call, char *text, size_t bytes) {
    return run(pool, call, Text{text, bytes}, moe);
}
int ft_run_attention(ft_pool *pool, const ft_attention *call, char *text, size_t bytes) {
    return run(pool, call, Text{text, bytes}, attention);
}
