/* C99 for p:f32 g:f32 m:f32 v:f32. Printed by rulec.
 *
 * LAMB: AdamW with every tensor's step scaled to the norm of its parameter.
 * Large Batch Optimization for Deep Learning: Training BERT in 76 minutes (You and others, 2020)
 * https://arxiv.org/abs/1904.00962
 *
 *     m = beta1*m + (1 - beta1)*g
 *     v = beta2*v + (1 - beta2)*g*g
 *     m_hat = m/(1 - beta1**t)
 *     sigma = sqrt(v)/sqrt(1 - beta2**t)
 *     adam.direction = m_hat/(sigma + eps)
 *     decay.direction = weight_decay*p
 *     adamw.direction = adam.direction + decay.direction
 *     a = norm(p, per="tensor")
 *     b = norm(adamw.direction, per="tensor")
 *     trust_ratio.direction = adamw.direction*where(a > 0 and b > 0, a/b, 1)
 *     direction = trust_ratio.direction
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
    const double *table;    // 10 numbers in a row
    // For each tensor the address of:
    void *const *p, *const *g, *const *m, *const *v, *const *sum_p_squared,
         *const *sum_adamw_direction_squared;
} Bucket;

/* A sum is taken in lanes that do not wait for one another, and lanes are added in one order: so its bits
 * depend neither on the compiler nor on the width of the processor's vectors. */
enum { LANES = 16 };

static double sum_of(const double *lanes)
{
    double all = lanes[0];
    for (int lane = 1; lane < LANES; lane++)
        all = all + lanes[lane];
    return all;
}

/* Stage 0 for one element: stores m, v; reduces to sum_p_squared per tensor, sum_adamw_direction_squared per
 * tensor. */
RULEC_FUNCTION void stage_0_element(
    int64_t i, const float *p_at, const float *g_at, float *m_at, float *v_at,
    float beta1, float one_minus_beta1, float beta2, float one_minus_beta2,
    float one_minus_beta1_t, float sqrt_one_minus_beta2_t, float eps, float weight_decay,
    double *sum_p_squared, double *sum_adamw_direction_squared)
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
    const float adamw_direction = adam_direction + decay_direction;
    m_at[i] = m_new;
    v_at[i] = v_new;
    *sum_p_squared += p * p;
    *sum_adamw_direction_squared += adamw_direction * adamw_direction;
}

/* One chunk. The buffers of a tensor do not overlap. */
static void stage_0_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    const float *p_at = bucket->p[at->tensor];
    const float *g_at = bucket->g[at->tensor];
    float *m_at = bucket->m[at->tensor];
    float *v_at = bucket->v[at->tensor];
    double *sum_p_squared_at = bucket->sum_p_squared[at->tensor];
    double *sum_adamw_direction_squared_at = bucket->sum_adamw_direction_squared[at->tensor];
    const double *row = bucket->table + 10 * bucket->row_of[at->tensor];
    const float beta1 = (float)row[0];
    const float one_minus_beta1 = (float)row[1];  // 1 - beta1
    const float beta2 = (float)row[2];
    const float one_minus_beta2 = (float)row[3];  // 1 - beta2
    const float one_minus_beta1_t = (float)row[4];  // 1 - beta1**t
    const float sqrt_one_minus_beta2_t = (float)row[5];  // sqrt(1 - beta2**t)
    const float eps = (float)row[6];
    const float weight_decay = (float)row[7];

    double sum_p_squared[LANES] = {0};
    double sum_adamw_direction_squared[LANES] = {0};
    const int64_t stop = at->last;
    int64_t i = at->first;
    for (; i + LANES <= stop; i += LANES) {
#pragma omp simd
        for (int lane = 0; lane < LANES; lane++) {
            stage_0_element(
                i + lane, p_at, g_at, m_at, v_at,
                beta1, one_minus_beta1, beta2, one_minus_beta2, one_minus_beta1_t, sqrt_one_minus_beta2_t,
                eps, weight_decay,
                &sum_p_squared[lane], &sum_adamw_direction_squared[lane]);
        }
    }
    for (int lane = 0; i < stop; i++, lane++) {
        stage_0_element(
            i, p_at, g_at, m_at, v_at,
            beta1, one_minus_beta1, beta2, one_minus_beta2, one_minus_beta1_t, sqrt_one_minus_beta2_t,
            eps, weight_decay,
            &sum_p_squared[lane], &sum_adamw_direction_squared[lane]);
    }
    sum_p_squared_at[chunk] = sum_of(sum_p_squared);
    sum_adamw_direction_squared_at[chunk] = sum_of(sum_adamw_direction_squared);
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
 *     trust_ratio_direction_factor = where(sqrt(sum_p_squared) > 0 and sqrt(sum_adamw_direction_squared) > 0,
 *         sqrt(sum_p_squared)/sqrt(sum_adamw_direction_squared), 1) */
RULEC_FUNCTION void stage_1_element(
    int64_t i, float *p_at, const float *m_at, const float *v_at,
    float one_minus_beta1_t, float sqrt_one_minus_beta2_t, float eps, float weight_decay,
    float lr, float trust_ratio_direction_factor)
{
    const float p = p_at[i];
    const float m = m_at[i];
    const float v = v_at[i];
    const float m_hat = m / one_minus_beta1_t;  // m/(1 - beta1**t)
    const float sigma = sqrtf(v) / sqrt_one_minus_beta2_t;  // sqrt(v)/sqrt(1 - beta2**t)
    const float adam_direction = m_hat / (sigma + eps);
    const float decay_direction = weight_decay * p;
    const float adamw_direction = adam_direction + decay_direction;
    const float trust_ratio_direction = adamw_direction * trust_ratio_direction_factor;
    const float p_new = p - lr * trust_ratio_direction;
    p_at[i] = p_new;
}

/* One chunk. The buffers of a tensor do not overlap. */
static void stage_1_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    float *p_at = bucket->p[at->tensor];
    const float *m_at = bucket->m[at->tensor];
    const float *v_at = bucket->v[at->tensor];
    const double *row = bucket->table + 10 * bucket->row_of[at->tensor];
    const float one_minus_beta1_t = (float)row[4];  // 1 - beta1**t
    const float sqrt_one_minus_beta2_t = (float)row[5];  // sqrt(1 - beta2**t)
    const float eps = (float)row[6];
    const float weight_decay = (float)row[7];
    const float lr = (float)row[8];
    const float trust_ratio_direction_factor = (float)row[9];

#pragma omp simd
    for (int64_t i = at->first; i < at->last; i++) {
        stage_1_element(
            i, p_at, m_at, v_at,
            one_minus_beta1_t, sqrt_one_minus_beta2_t, eps, weight_decay, lr,
            trust_ratio_direction_factor);
    }
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
