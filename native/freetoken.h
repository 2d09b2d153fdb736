/* FreeToken's native interface: plain C, pointers and sizes only. Knows nothing of Python, torch, models or files.
 *
 * Every function that can fail returns a status and, if `text` is not null, writes why into it (cut to text_bytes).
 * Nothing is global: threads and working memory belong to an ft_pool, made and ended by explicit calls.
 * A pool serves one call at a time; a second caller waits. All matrices are row-major and contiguous.
 * Results do not depend on the number of threads, nor on how many rows, tokens or sequences share a call.
 */
#ifndef FREETOKEN_H
#define FREETOKEN_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define FT_API __declspec(dllexport)
#else
#define FT_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a signature, a struct or a meaning below changes; native.py refuses any other. */
#define FT_ABI 1

enum ft_status { FT_OK = 0, FT_INVALID = 1, FT_NO_MEMORY = 2, FT_NO_THREAD = 3, FT_UNSUPPORTED = 4 };

/* Instruction sets, each one including those before it. FT_ISA_BEST takes the highest this CPU has. */
enum ft_isa { FT_ISA_BEST = -1, FT_ISA_BASELINE = 0, FT_ISA_AVX2 = 1, FT_ISA_AVX512 = 2 };

/* What the CPU can do, as bits. */
enum ft_cpu {
    FT_CPU_AVX2 = 1, FT_CPU_FMA = 2, FT_CPU_F16C = 4, FT_CPU_AVX512 = 8 /* F BW DQ VL */,
    FT_CPU_AVX512_BF16 = 16, FT_CPU_AVX512_VNNI = 32, FT_CPU_AMX_BF16 = 64
};

/* Element types of weights, KV and dequantised values. */
enum ft_type { FT_F32 = 0, FT_BF16 = 1 };

/* Packed formats, numbered as in GGUF. */
enum ft_format {
    FT_Q4_0 = 2, FT_Q4_1 = 3, FT_Q5_0 = 6, FT_Q5_1 = 7, FT_Q8_0 = 8, FT_Q4_K = 12, FT_Q5_K = 13, FT_Q6_K = 14
};

typedef struct ft_pool ft_pool;

FT_API int32_t ft_abi(void);
FT_API uint32_t ft_cpu_features(void);

typedef struct {
    int32_t threads; /* all that compute, the caller of each operation included; >= 1 */
    int32_t isa;     /* enum ft_isa; more than the CPU has is FT_UNSUPPORTED */
    int32_t spin_us; /* how long an idle thread looks for work before it sleeps */
    int32_t pin;     /* 1: bind thread i to the i-th CPU this process may use (not the caller); 0: leave it to the system */
} ft_pool_options;

FT_API int ft_pool_open(const ft_pool_options *options, ft_pool **pool, char *text, size_t text_bytes);
/* Ends and joins the threads. No operation may be running or follow. Null is allowed. */
FT_API void ft_pool_close(ft_pool *pool);
FT_API int32_t ft_pool_isa(const ft_pool *pool);

/* Unpack `elements` values (whole blocks) of `format` from `packed` to `out` of `type`.
 * FT_F32 is bit-equal to gguf-py's numpy code; FT_BF16 rounds that to nearest even. */
typedef struct {
    int32_t format;
    int32_t type;
    int64_t elements;
    const void *packed;
    void *out;
} ft_unpack;
FT_API int ft_run_unpack(ft_pool *pool, const ft_unpack *call, char *text, size_t text_bytes);

/* out[tokens, rows] = x[tokens, columns] * weight[rows, columns]^T; x and out fp32, fp32 accumulation. Made for few tokens. */
typedef struct {
    int32_t type; /* of weight */
    int32_t reserved;
    int64_t tokens, rows, columns;
    const float *x;
    const void *weight;
    float *out;
} ft_linear;
FT_API int ft_run_linear(ft_pool *pool, const ft_linear *call, char *text, size_t text_bytes);

/* out[t] = sum over j of expert_weights[t, j] * down[e] * (silu(gate[e] * x[t]) * (up[e] * x[t])), e = expert_ids[t, j].
 * gate_up [experts, 2 * inter, hidden], gate rows first; down [experts, hidden, inter]; both of `type`. x, out [tokens, hidden] fp32.
 * An expert that several tokens chose is read once. */
typedef struct {
    int32_t type;
    int32_t top_k;
    int64_t tokens, experts, hidden, inter;
    const float *x;
    const int64_t *expert_ids;    /* [tokens, top_k] */
    const float *expert_weights;  /* [tokens, top_k] */
    const void *gate_up;
    const void *down;
    float *out;
} ft_moe;
FT_API int ft_run_moe(ft_pool *pool, const ft_moe *call, char *text, size_t text_bytes);

/* Decode attention of `sequences` single queries over paged KV; fp32 softmax.
 * q, out     [sequences, heads, head_dim] fp32
 * keys, values [slots, kv_heads, head_dim] of `type`; slot = page * page_tokens + offset
 * page_table [sequences, table_columns]; kv_lens [sequences], each >= 1, the query's own token included
 * window     0: sees everything; w: only the last w positions */
typedef struct {
    int32_t type;
    int32_t heads, kv_heads, head_dim;
    int32_t page_tokens;
    int32_t window;
    int64_t sequences, table_columns, slots;
    float scale;
    int32_t reserved;
    const float *q;
    const void *keys;
    const void *values;
    const int32_t *page_table;
    const int64_t *kv_lens;
    float *out;
} ft_attention;
FT_API int ft_run_attention(ft_pool *pool, const ft_attention *call, char *text, size_t text_bytes);

/* A thread that looks at `word` (8 aligned bytes, rising numbers, written by a GPU or a thread) and adds 1 to `eventfd` at each change.
 * It spins only while a number given to ft_watch_arm is still to come, and naps between looks after 50 ms of that.
 * The word must stay readable until ft_watch_close, which joins the thread. Null is allowed there. */
typedef struct ft_watch ft_watch;
FT_API int ft_watch_open(const uint64_t *word, int32_t eventfd, ft_watch **watch);
FT_API void ft_watch_arm(ft_watch *watch, uint64_t number);
/* When the last change was seen: nanoseconds of CLOCK_MONOTONIC. */
FT_API int64_t ft_watch_seen_ns(const ft_watch *watch);
FT_API void ft_watch_close(ft_watch *watch);

#ifdef __cplusplus
}
#endif
#endif
