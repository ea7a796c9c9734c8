/* C99 for p:f32 g:f32 m:f32 o_part:f32. Printed by rulec.
 *
 * Muon: Orthogonalized Nesterov momentum for matrices, and AdamW for all else.
 * Muon: An optimizer for hidden layers in neural networks (Jordan and others, 2024)
 * https://kellerjordan.github.io/posts/muon/
 *
 *     m = momentum*m + (1 - momentum)*g
 *     o = newton_schulz((1 - momentum)*g + momentum*m, steps=ns_steps, dtype="bfloat16")
 *     direction = sqrt(maximum(1, rows/cols))*o + weight_decay*p
 *     p = p - lr*direction */

#include <math.h>
#include <stdint.h>

/* A loop can be vectors only where the calls in it disappear. */
#if defined(__GNUC__)
#define RULEC_FUNCTION static inline __attribute__((always_inline))
#else
#define RULEC_FUNCTION static inline
#endif

/* Chunks that lie one after the other. */
typedef struct {
    int64_t first, last;
} Span;

/* A range of elements of a tensor. */
typedef struct {
    int64_t tensor, first, last;
} Chunk;

/* The tensors that one call is for, cut into chunks, and spans of chunks for threads to take. */
typedef struct {
    int64_t threads, tensors, spans;
    const Span *span;
    const Chunk *chunk;
    const int64_t *row_of;  // for each tensor its row of the table
    const double *table;    // 6 numbers in a row
    // For each tensor the address of:
    void *const *p, *const *g, *const *m, *const *o_part, *const *o;
} Bucket;

/* Stage 0 for one element: stores o_part, m. */
RULEC_FUNCTION void stage_0_element(
    int64_t i, const float *g_at, float *m_at, float *o_part_at,
    float momentum, float one_minus_momentum)
{
    const float g = g_at[i];
    const float m = m_at[i];
    const float x0 = one_minus_momentum * g;  // (1 - momentum)*g
    const float m_new = momentum * m + x0;
    o_part_at[i] = x0 + momentum * m_new;
    m_at[i] = m_new;
}

/* One chunk. The buffers of a tensor do not overlap. */
static void stage_0_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    const float *g_at = bucket->g[at->tensor];
    float *m_at = bucket->m[at->tensor];
    float *o_part_at = bucket->o_part[at->tensor];
    const double *row = bucket->table + 6 * bucket->row_of[at->tensor];
    const float momentum = (float)row[0];
    const float one_minus_momentum = (float)row[1];  // 1 - momentum

#pragma omp simd
    for (int64_t i = at->first; i < at->last; i++)
        stage_0_element(i, g_at, m_at, o_part_at, momentum, one_minus_momentum);
}

/* All chunks of a bucket. */
void stage_0(const Bucket *bucket)
{
#pragma omp parallel for schedule(dynamic) num_threads((int)bucket->threads) if (bucket->threads > 1)
    for (int64_t s = 0; s < bucket->spans; s++) {
        for (int64_t chunk = bucket->span[s].first; chunk < bucket->span[s].last; chunk++)
            stage_0_chunk(bucket, chunk);
    }
}

/* Stage 1 for one element: stores p.
 *
 * Before it:
 *     o = newton_schulz(o_part, steps=ns_steps, dtype="bfloat16") */
RULEC_FUNCTION void stage_1_element(
    int64_t i, float *p_at, const float *o_at,
    float sqrt_max_one_rows_over_cols, float weight_decay, float lr)
{
    const float p = p_at[i];
    const float o = o_at[i];
    // sqrt(maximum(1, rows/cols))*o + weight_decay*p
    const float direction = sqrt_max_one_rows_over_cols * o + weight_decay * p;
    const float p_new = p - lr * direction;
    p_at[i] = p_new;
}

/* One chunk. The buffers of a tensor do not overlap. */
static void stage_1_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    float *p_at = bucket->p[at->tensor];
    const float *o_at = bucket->o[at->tensor];
    const double *row = bucket->table + 6 * bucket->row_of[at->tensor];
    const float sqrt_max_one_rows_over_cols = (float)row[3];  // sqrt(maximum(1, rows/cols))
    const float weight_decay = (float)row[4];
    const float lr = (float)row[5];

#pragma omp simd
    for (int64_t i = at->first; i < at->last; i++)
        stage_1_element(i, p_at, o_at, sqrt_max_one_rows_over_cols, weight_decay, lr);
}

/* All chunks of a bucket. */
void stage_1(const Bucket *bucket)
{
#pragma omp parallel for schedule(dynamic) num_threads((int)bucket->threads) if (bucket->threads > 1)
    for (int64_t s = 0; s < bucket->spans; s++) {
        for (int64_t chunk = bucket->span[s].first; chunk < bucket->span[s].last; chunk++)
            stage_1_chunk(bucket, chunk);
    }
}
