/* C99 for p:f64 g:f64 m:f64 v:f64. Printed by rulec.
 *
 * NAdam: Adam with Nesterov momentum and a schedule of momentum.
 * Incorporating Nesterov Momentum into Adam (Dozat, 2016)
 * https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ
 *
 *     mu = beta1*(1 - 0.5*0.96**(t*momentum_decay))
 *     mu_next = beta1*(1 - 0.5*0.96**((t + 1)*momentum_decay))
 *     mu_product = mu_product*mu
 *     m = beta1*m + (1 - beta1)*g
 *     v = beta2*v + (1 - beta2)*g*g
 *     m_bar = (1 - mu)/(1 - mu_product)*g + mu_next/(1 - mu_product*mu_next)*m
 *     sigma = sqrt(v)/sqrt(1 - beta2**t)
 *     direction = m_bar/(sigma + eps)
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
    int64_t i, double *p_at, const double *g_at, double *m_at, double *v_at,
    double beta1, double one_minus_beta1, double beta2, double one_minus_beta2,
    double m_bar_factor, double m_bar_factor_2, double sqrt_one_minus_beta2_t, double eps,
    double lr)
{
    const double p = p_at[i];
    const double g = g_at[i];
    const double m = m_at[i];
    const double v = v_at[i];
    const double m_new = beta1 * m + one_minus_beta1 * g;  // beta1*m + (1 - beta1)*g
    const double v_new = beta2 * v + one_minus_beta2 * g * g;  // beta2*v + (1 - beta2)*g*g
    const double m_bar = m_bar_factor * g + m_bar_factor_2 * m_new;
    const double sigma = sqrt(v_new) / sqrt_one_minus_beta2_t;  // sqrt(v_new)/sqrt(1 - beta2**t)
    const double direction = m_bar / (sigma + eps);
    const double p_new = p - lr * direction;
    m_at[i] = m_new;
    v_at[i] = v_new;
    p_at[i] = p_new;
}

/* One chunk. The buffers of a tensor do not overlap. */
static void step_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    double *p_at = bucket->p[at->tensor];
    const double *g_at = bucket->g[at->tensor];
    double *m_at = bucket->m[at->tensor];
    double *v_at = bucket->v[at->tensor];
    const double *row = bucket->table + 9 * bucket->row_of[at->tensor];
    const double beta1 = row[0];
    const double one_minus_beta1 = row[1];  // 1 - beta1
    const double beta2 = row[2];
    const double one_minus_beta2 = row[3];  // 1 - beta2
    const double m_bar_factor = row[4];
    const double m_bar_factor_2 = row[5];
    const double sqrt_one_minus_beta2_t = row[6];  // sqrt(1 - beta2**t)
    const double eps = row[7];
    const double lr = row[8];

#pragma omp simd
    for (int64_t i = at->first; i < at->last; i++) {
        step_element(
            i, p_at, g_at, m_at, v_at,
            beta1, one_minus_beta1, beta2, one_minus_beta2, m_bar_factor, m_bar_factor_2,
            sqrt_one_minus_beta2_t, eps, lr);
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
