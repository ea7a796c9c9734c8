/* C99 for p:f32 g:f32 m:f32 v:f32 s:f32 x0:f32. Printed by rulec.
 *
 * Prodigy: AdamW that finds its learning rate from how far it has come, and weighs late gradients more.
 * Prodigy: An Expeditiously Adaptive Parameter-Free Learner (Mishchenko, Defazio, 2024)
 * https://arxiv.org/abs/2306.06101
 *
 *     a = d*lr*where(bias_correction > 0, sqrt(1 - beta2**t)/(1 - beta1**t), 1)
 *     num = beta3*num + d/d0*sum(a*g*(x0 - p), per="model")
 *     m = beta1*m + (1 - beta1)*d*g
 *     v = beta2*v + (1 - beta2)*(d*g)*(d*g)
 *     s = beta3*s + where(safeguard_warmup > 0, d, a)*d/d0*g
 *     total = sum(abs(s), per="model")
 *     d = maximum(d, where(total > 0, d_coef*num/total, 0))
 *     p = p - a*(m/(sqrt(v) + d*eps) + weight_decay*p) */

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
    const double *table;    // 19 numbers in a row
    // For each tensor the address of:
    void *const *p, *const *g, *const *m, *const *v, *const *s, *const *x0, *const *sum_a_g_x0_minus_p_model,
         *const *total;
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

/* Stage 0 for one element: stores s; reduces to sum_a_g_x0_minus_p_model per tensor, total per tensor.
 *
 * Before it:
 *     s_new_factor = where(safeguard_warmup > 0, d, a)*d/d0
 *     a = d*lr*a_factor */
RULEC_FUNCTION void stage_0_element(
    int64_t i, const float *p_at, const float *g_at, float *s_at, const float *x0_at,
    float beta3, float s_new_factor, float a,
    double *sum_a_g_x0_minus_p_model, double *total)
{
    const float p = p_at[i];
    const float g = g_at[i];
    const float s = s_at[i];
    const float x0 = x0_at[i];
    const float s_new = beta3 * s + s_new_factor * g;
    s_at[i] = s_new;
    *sum_a_g_x0_minus_p_model += a * g * (x0 - p);
    *total += fabsf(s_new);
}

/* One chunk. The buffers of a tensor do not overlap. */
static void stage_0_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    const float *p_at = bucket->p[at->tensor];
    const float *g_at = bucket->g[at->tensor];
    float *s_at = bucket->s[at->tensor];
    const float *x0_at = bucket->x0[at->tensor];
    double *sum_a_g_x0_minus_p_model_at = bucket->sum_a_g_x0_minus_p_model[at->tensor];
    double *total_at = bucket->total[at->tensor];
    const double *row = bucket->table + 19 * bucket->row_of[at->tensor];
    const float beta3 = (float)row[4];
    const float s_new_factor = (float)row[16];
    const float a = (float)row[17];

    double sum_a_g_x0_minus_p_model[LANES] = {0};
    double total[LANES] = {0};
    const int64_t stop = at->last;
    int64_t i = at->first;
    for (; i + LANES <= stop; i += LANES) {
#pragma omp simd
        for (int lane = 0; lane < LANES; lane++) {
            stage_0_element(
                i + lane, p_at, g_at, s_at, x0_at,
                beta3, s_new_factor, a,
                &sum_a_g_x0_minus_p_model[lane], &total[lane]);
        }
    }
    for (int lane = 0; i < stop; i++, lane++) {
        stage_0_element(
            i, p_at, g_at, s_at, x0_at,
            beta3, s_new_factor, a,
            &sum_a_g_x0_minus_p_model[lane], &total[lane]);
    }
    sum_a_g_x0_minus_p_model_at[chunk] = sum_of(sum_a_g_x0_minus_p_model);
    total_at[chunk] = sum_of(total);
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

/* Stage 1 for one element: stores m, v, p.
 *
 * Before it:
 *     one_minus_beta1_d = (1 - beta1)*d
 *     d_2 = d
 *     d_new_eps = maximum(d, where(sum(total, per="model") > 0, d_coef*(beta3*num +
 *         d/d0*sum(sum_a_g_x0_minus_p_model, per="model"))/sum(total, per="model"), 0))*eps */
RULEC_FUNCTION void stage_1_element(
    int64_t i, float *p_at, const float *g_at, float *m_at, float *v_at,
    float beta1, float beta2, float one_minus_beta2, float weight_decay, float one_minus_beta1_d,
    float d_2, float a, float d_new_eps)
{
    const float p = p_at[i];
    const float g = g_at[i];
    const float m = m_at[i];
    const float v = v_at[i];
    const float m_new = beta1 * m + one_minus_beta1_d * g;
    const float x1 = d_2 * g;
    const float v_new = beta2 * v + one_minus_beta2 * x1 * x1;  // beta2*v + (1 - beta2)*x1*x1
    const float p_new = p - a * (m_new / (sqrtf(v_new) + d_new_eps) + weight_decay * p);
    m_at[i] = m_new;
    v_at[i] = v_new;
    p_at[i] = p_new;
}

/* One chunk. The buffers of a tensor do not overlap. */
static void stage_1_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    float *p_at = bucket->p[at->tensor];
    const float *g_at = bucket->g[at->tensor];
    float *m_at = bucket->m[at->tensor];
    float *v_at = bucket->v[at->tensor];
    const double *row = bucket->table + 19 * bucket->row_of[at->tensor];
    const float beta1 = (float)row[0];
    const float beta2 = (float)row[2];
    const float one_minus_beta2 = (float)row[3];  // 1 - beta2
    const float weight_decay = (float)row[13];
    const float one_minus_beta1_d = (float)row[14];
    const float d_2 = (float)row[15];
    const float a = (float)row[17];
    const float d_new_eps = (float)row[18];

#pragma omp simd
    for (int64_t i = at->first; i < at->last; i++) {
        stage_1_element(
            i, p_at, g_at, m_at, v_at,
            beta1, beta2, one_minus_beta2, weight_decay, one_minus_beta1_d, d_2, a, d_new_eps);
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
