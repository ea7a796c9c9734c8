/* C99 for p:f32 g:f32 m:f32 v:f32 slow:f32. Printed by rulec.
 *
 * ClipByGlobalNormThenLookaheadAdamW
 *
 *     clip_by_global_norm.direction = g*minimum(1, max_norm/(norm(g, per="model") + 1e-06))
 *     m = beta1*m + (1 - beta1)*clip_by_global_norm.direction
 *     v = beta2*v + (1 - beta2)*clip_by_global_norm.direction*clip_by_global_norm.direction
 *     m_hat = m/(1 - beta1**t)
 *     sigma = sqrt(v)/sqrt(1 - beta2**t)
 *     adam.direction = m_hat/(sigma + eps)
 *     decay.direction = weight_decay*p
 *     adamw.direction = adam.direction + decay.direction
 *     adamw.p = p - lr*adamw.direction
 *     if t%k == 0:
 *       slow = slow + alpha*(adamw.p - slow)
 *       p = slow
 *     else:
 *       p = adamw.p */

#include <math.h>
#include <stdbool.h>
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
    const double *table;    // 13 numbers in a row
    // For each tensor the address of:
    void *const *p, *const *g, *const *m, *const *v, *const *slow, *const *sum_g_squared_model;
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

/* Stage 0 for one element: reduces to sum_g_squared_model per tensor. */
RULEC_FUNCTION void stage_0_element(int64_t i, const float *g_at, double *sum_g_squared_model)
{
    const float g = g_at[i];
    *sum_g_squared_model += g * g;
}

/* One chunk. The buffers of a tensor do not overlap. */
static void stage_0_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    const float *g_at = bucket->g[at->tensor];
    double *sum_g_squared_model_at = bucket->sum_g_squared_model[at->tensor];

    double sum_g_squared_model[LANES] = {0};
    const int64_t stop = at->last;
    int64_t i = at->first;
    for (; i + LANES <= stop; i += LANES) {
#pragma omp simd
        for (int lane = 0; lane < LANES; lane++)
            stage_0_element(i + lane, g_at, &sum_g_squared_model[lane]);
    }
    for (int lane = 0; i < stop; i++, lane++)
        stage_0_element(i, g_at, &sum_g_squared_model[lane]);
    sum_g_squared_model_at[chunk] = sum_of(sum_g_squared_model);
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

/* Stage 1 for one element: stores m, v, slow, p.
 *
 * Before it:
 *     clip_by_global_norm_direction_factor = minimum(1, max_norm/(sqrt(sum(sum_g_squared_model, per="model")) +
 *         1e-06)) */
RULEC_FUNCTION void stage_1_element(
    int64_t i, float *p_at, const float *g_at, float *m_at, float *v_at, float *slow_at,
    float beta1, float one_minus_beta1, float beta2, float one_minus_beta2,
    float one_minus_beta1_t, float sqrt_one_minus_beta2_t, float eps, float weight_decay,
    float lr, float alpha, bool t_mod_k_is_zero, float clip_by_global_norm_direction_factor)
{
    const float p = p_at[i];
    const float g = g_at[i];
    const float m = m_at[i];
    const float v = v_at[i];
    const float slow = slow_at[i];
    const float clip_by_global_norm_direction = g * clip_by_global_norm_direction_factor;
    // beta1*m + (1 - beta1)*clip_by_global_norm_direction
    const float m_new = beta1 * m + one_minus_beta1 * clip_by_global_norm_direction;
    const float v_new = beta2 * v + one_minus_beta2 * clip_by_global_norm_direction * clip_by_global_norm_direction;
    const float m_hat = m_new / one_minus_beta1_t;  // m_new/(1 - beta1**t)
    const float sigma = sqrtf(v_new) / sqrt_one_minus_beta2_t;  // sqrt(v_new)/sqrt(1 - beta2**t)
    const float adam_direction = m_hat / (sigma + eps);
    const float decay_direction = weight_decay * p;
    const float adamw_direction = adam_direction + decay_direction;
    const float adamw_p = p - lr * adamw_direction;
    const float slow_new = slow + alpha * (adamw_p - slow);
    m_at[i] = m_new;
    v_at[i] = v_new;
    slow_at[i] = t_mod_k_is_zero ? slow_new : slow;
    p_at[i] = t_mod_k_is_zero ? slow_new : adamw_p;
}

/* One chunk. The buffers of a tensor do not overlap. */
static void stage_1_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    float *p_at = bucket->p[at->tensor];
    const float *g_at = bucket->g[at->tensor];
    float *m_at = bucket->m[at->tensor];
    float *v_at = bucket->v[at->tensor];
    float *slow_at = bucket->slow[at->tensor];
    const double *row = bucket->table + 13 * bucket->row_of[at->tensor];
    const float beta1 = (float)row[0];
    const float one_minus_beta1 = (float)row[2];  // 1 - beta1
    const float beta2 = (float)row[3];
    const float one_minus_beta2 = (float)row[4];  // 1 - beta2
    const float one_minus_beta1_t = (float)row[5];  // 1 - beta1**t
    const float sqrt_one_minus_beta2_t = (float)row[6];  // sqrt(1 - beta2**t)
    const float eps = (float)row[7];
    const float weight_decay = (float)row[8];
    const float lr = (float)row[9];
    const float alpha = (float)row[10];
    const bool t_mod_k_is_zero = row[11] != 0;  // t%k == 0
    const float clip_by_global_norm_direction_factor = (float)row[12];

#pragma omp simd
    for (int64_t i = at->first; i < at->last; i++) {
        stage_1_element(
            i, p_at, g_at, m_at, v_at, slow_at,
            beta1, one_minus_beta1, beta2, one_minus_beta2, one_minus_beta1_t, sqrt_one_minus_beta2_t,
            eps, weight_decay, lr, alpha, t_mod_k_is_zero, clip_by_global_norm_direction_factor);
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
