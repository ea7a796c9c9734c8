/* C99 for p:f32 g:f32 m:f32 v:f32. Printed by rulec.
 *
 * AdamW: Adam with decoupled weight decay.
 * Decoupled Weight Decay Regularization (Loshchilov, Hutter, 2019)
 * https://arxiv.org/abs/1711.05101
 *
 *     m = beta1*m + (1 - beta1)*g
 *     v = beta2*v + (1 - beta2)*g*g
 *     m_hat = m/(1 - beta1**t)
 *     sigma = sqrt(v)/sqrt(1 - beta2**t)
 *     adam.direction = m_hat/(sigma + eps)
 *     decay.direction = weight_decay*p
 *     direction = adam.direction + decay.direction
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
    const double *table;    // 9 numbers in a row
    // For each tensor the address of:
    void *const *p, *const *g, *const *m, *const *v;
} Bucket;

/* One element: stores m, v, p. */
RULEC_FUNCTION void step_element(
    int64_t i, float *p_at, const float *g_at, float *m_at, float *v_at,
    float beta1, float one_minus_beta1, float beta2, float one_minus_beta2,
    float one_minus_beta1_t, float sqrt_one_minus_beta2_t, float eps, float weight_decay,
    float lr)
{
    const float p = p_at[i];
    const float g = g_at[i];
    const float m = m_at[i];
    const float v = v_at[i];
    const float m_new = beta1 * m + one_minus_beta1 * g;  // beta1*m + (1 - beta1)*g
    const float v_new = beta2 * v + one_minus_beta2 * g * g;  // beta2*v + (1 - beta2)*g*g
    const float m_hat = m_new / one_minus_beta1_t;  // m_new/(1 - beta1**t)
    const float sigma = sqrtf(v_new) / sqrt_one_minus_beta2_t;  // sqrt(v_new)/sqrt(1 - beta2**t)
    const float adam_direction = m_hat / (sigma + eps);
    const float decay_direction = weight_decay * p;
    const float direction = adam_direction + decay_direction;
    const float p_new = p - lr * direction;
    m_at[i] = m_new;
    v_at[i] = v_new;
    p_at[i] = p_new;
}

/* One chunk. The buffers of a tensor do not overlap. */
static void step_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    float *p_at = bucket->p[at->tensor];
    const float *g_at = bucket->g[at->tensor];
    float *m_at = bucket->m[at->tensor];
    float *v_at = bucket->v[at->tensor];
    const double *row = bucket->table + 9 * bucket->row_of[at->tensor];
    const float beta1 = (float)row[0];
    const float one_minus_beta1 = (float)row[1];  // 1 - beta1
    const float beta2 = (float)row[2];
    const float one_minus_beta2 = (float)row[3];  // 1 - beta2
    const float one_minus_beta1_t = (float)row[4];  // 1 - beta1**t
    const float sqrt_one_minus_beta2_t = (float)row[5];  // sqrt(1 - beta2**t)
    const float eps = (float)row[6];
    const float weight_decay = (float)row[7];
    const float lr = (float)row[8];

#pragma omp simd
    for (int64_t i = at->first; i < at->last; i++) {
        step_element(
            i, p_at, g_at, m_at, v_at,
            beta1, one_minus_beta1, beta2, one_minus_beta2, one_minus_beta1_t, sqrt_one_minus_beta2_t,
            eps, weight_decay, lr);
    }
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
