/* C99 for p:f32 g:f32. Printed by rulec.
 *
 * SGD: Stochastic gradient descent, one step down the gradient.
 * A Stochastic Approximation Method (Robbins, Monro, 1951)
 * https://doi.org/10.1214/aoms/1177729586
 *
 *     direction = g
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
    const double *table;    // 1 numbers in a row
    // For each tensor the address of:
    void *const *p, *const *g;
} Bucket;

/* One element: stores p. */
RULEC_FUNCTION void step_element(int64_t i, float *p_at, const float *g_at, float lr)
{
    const float p = p_at[i];
    const float g = g_at[i];
    const float p_new = p - lr * g;
    p_at[i] = p_new;
}

/* One chunk. The buffers of a tensor do not overlap. */
static void step_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    float *p_at = bucket->p[at->tensor];
    const float *g_at = bucket->g[at->tensor];
    const double *row = bucket->table + 1 * bucket->row_of[at->tensor];
    const float lr = (float)row[0];

#pragma omp simd
    for (int64_t i = at->first; i < at->last; i++)
        step_element(i, p_at, g_at, lr);
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
