/* C99 for p:bf16 g:bf16 m:f32. Printed by rulec.
 *
 * Lion: The sign of an interpolated momentum, with decoupled weight decay.
 * Symbolic Discovery of Optimization Algorithms (Chen and others, 2023)
 * https://arxiv.org/abs/2302.06675
 *
 *     c = beta1*m + (1 - beta1)*g
 *     direction = sign(c) + weight_decay*p
 *     m = beta2*m + (1 - beta2)*g
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
    void *const *p, *const *g, *const *m;
} Bucket;

/* 1, -1 or 0 by the sign of x; NaN of NaN. */
RULEC_FUNCTION float signf(float x)
{
    return x > 0 ? 1.0f : x < 0 ? -1.0f : fabsf(x);
}

/* The float that has these bits. */
RULEC_FUNCTION float float_of(uint32_t bits)
{
    const union { uint32_t bits; float value; } both = {bits};
    return both.value;
}

/* The bits of a float. */
RULEC_FUNCTION uint32_t bits_of(float value)
{
    const union { float value; uint32_t bits; } both = {value};
    return both.bits;
}

/* The number that a bfloat16 is. */
RULEC_FUNCTION float from_bfloat16(uint16_t bits)
{
    return float_of((uint32_t)bits << 16);
}

/* The nearest bfloat16, halves to even. */
RULEC_FUNCTION uint16_t to_bfloat16(float x)
{
    const uint32_t bits = bits_of(x);
    const uint32_t near = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(x != x ? 0x7fc0 : near);
}

/* One element: stores m, p. */
RULEC_FUNCTION void step_element(
    int64_t i, uint16_t *p_at, const uint16_t *g_at, float *m_at,
    float beta2, float one_minus_beta2, float beta1, float one_minus_beta1, float weight_decay,
    float lr)
{
    const float p = from_bfloat16(p_at[i]);
    const float g = from_bfloat16(g_at[i]);
    const float m = m_at[i];
    const float m_new = beta2 * m + one_minus_beta2 * g;  // beta2*m + (1 - beta2)*g
    const float c = beta1 * m + one_minus_beta1 * g;  // beta1*m + (1 - beta1)*g
    const float direction = signf(c) + weight_decay * p;
    const float p_new = p - lr * direction;
    m_at[i] = m_new;
    p_at[i] = to_bfloat16(p_new);
}

/* One chunk. The buffers of a tensor do not overlap. */
static void step_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    uint16_t *p_at = bucket->p[at->tensor];
    const uint16_t *g_at = bucket->g[at->tensor];
    float *m_at = bucket->m[at->tensor];
    const double *row = bucket->table + 6 * bucket->row_of[at->tensor];
    const float beta2 = (float)row[0];
    const float one_minus_beta2 = (float)row[1];  // 1 - beta2
    const float beta1 = (float)row[2];
    const float one_minus_beta1 = (float)row[3];  // 1 - beta1
    const float weight_decay = (float)row[4];
    const float lr = (float)row[5];

#pragma omp simd
    for (int64_t i = at->first; i < at->last; i++)
        step_element(i, p_at, g_at, m_at, beta2, one_minus_beta2, beta1, one_minus_beta1, weight_decay, lr);
}

/* All chunks of a bucket. */
void step(const Bucket *bucket)
{
#pragma omp parallel for schedule(dynamic) num_threads((int)bucket->threads) if (bucket->threads > 1)
    for (int64_t s = 0; s < bucket->spans; s++) {
        for (int64_t chunk = bucket->span[s].first; chunk < bucket->span[s].last; chunk++)
            step_chunk(bucket, chunk);
    }
}
