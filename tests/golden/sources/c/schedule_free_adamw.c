/* C99 for p:f32 g:f32 z:f32 v:f32. Printed by rulec.
 *
 * ScheduleFreeAdamW: AdamW with an average of its steps in place of momentum and of a learning rate schedule.
 * The Road Less Scheduled (Defazio and others, 2024)
 * https://arxiv.org/abs/2405.15682
 *
 *     gamma = lr*minimum(1, t/maximum(warmup_steps, 1))
 *     lr_max = maximum(lr_max, gamma)
 *     w = t**r*lr_max**weight_lr_power
 *     weight_sum = weight_sum + w
 *     c = where(weight_sum > 0, w/weight_sum, 0)
 *     v = beta2*v + (1 - beta2)*g*g
 *     d = g/(sqrt(v)/sqrt(1 - beta2**t) + eps) + weight_decay*p
 *     p = (1 - c)*p + c*z + gamma*(beta1*(1 - c) - 1)*d
 *     z = z - gamma*d */

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
    void *const *p, *const *g, *const *z, *const *v;
} Bucket;

/* One element: stores z, v, p. */
RULEC_FUNCTION void step_element(
    int64_t i, float *p_at, const float *g_at, float *z_at, float *v_at,
    float beta2, float one_minus_beta2, float sqrt_one_minus_beta2_t, float eps,
    float weight_decay, float gamma, float one_minus_c, float c, float p_new_factor)
{
    const float p = p_at[i];
    const float g = g_at[i];
    const float z = z_at[i];
    const float v = v_at[i];
    const float v_new = beta2 * v + one_minus_beta2 * g * g;  // beta2*v + (1 - beta2)*g*g
    // g/(sqrt(v_new)/sqrt(1 - beta2**t) + eps) + weight_decay*p
    const float d = g / (sqrtf(v_new) / sqrt_one_minus_beta2_t + eps) + weight_decay * p;
    const float z_new = z - gamma * d;  // z - lr*minimum(1, t/maximum(warmup_steps, 1))*d
    const float p_new = one_minus_c * p + c * z + p_new_factor * d;
    z_at[i] = z_new;
    v_at[i] = v_new;
    p_at[i] = p_new;
}

/* One chunk. The buffers of a tensor do not overlap. */
static void step_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    float *p_at = bucket->p[at->tensor];
    const float *g_at = bucket->g[at->tensor];
    float *z_at = bucket->z[at->tensor];
    float *v_at = bucket->v[at->tensor];
    const double *row = bucket->table + 9 * bucket->row_of[at->tensor];
    const float beta2 = (float)row[0];
    const float one_minus_beta2 = (float)row[1];  // 1 - beta2
    const float sqrt_one_minus_beta2_t = (float)row[2];  // sqrt(1 - beta2**t)
    const float eps = (float)row[3];
    const float weight_decay = (float)row[4];
    const float gamma = (float)row[5];  // lr*minimum(1, t/maximum(warmup_steps, 1))
    const float one_minus_c = (float)row[6];
    const float c = (float)row[7];
    const float p_new_factor = (float)row[8];

#pragma omp simd
    for (int64_t i = at->first; i < at->last; i++) {
        step_element(
            i, p_at, g_at, z_at, v_at,
            beta2, one_minus_beta2, sqrt_one_minus_beta2_t, eps, weight_decay, gamma, one_minus_c, c,
            p_new_factor);
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
