/* C99 for p:f16 g:f16 prev:f32 delta:f32. Printed by rulec.
 *
 * Rprop: Steps of a size of their own for every element, grown while its gradient keeps its sign.
 * A direct adaptive method for faster backpropagation learning: the RPROP algorithm (Riedmiller, Braun, 1993)
 * https://doi.org/10.1109/ICNN.1993.298623
 *
 *     s = g*prev
 *     eta = where(s > 0, eta_plus, where(s < 0, eta_minus, 1))
 *     delta = minimum(maximum(delta*eta, step_min), step_max)
 *     prev = where(s < 0, 0, g)
 *     p = p - sign(prev)*delta */

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
    const double *table;    // 4 numbers in a row
    // For each tensor the address of:
    void *const *p, *const *g, *const *prev, *const *delta;
} Bucket;

/* 1, -1 or 0 by the sign of x; NaN of NaN. */
RULEC_FUNCTION float signf(float x)
{
    return x > 0 ? 1.0f : x < 0 ? -1.0f : fabsf(x);
}

/* The smaller; NaN where either is. */
RULEC_FUNCTION float minimumf(float a, float b)
{
    const float less = a < b ? a : b;
    return a != a ? a : less;
}

/* The larger; NaN where either is. */
RULEC_FUNCTION float maximumf(float a, float b)
{
    const float more = a > b ? a : b;
    return a != a ? a : more;
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

/* The number that a float16 is: its exponent lies 112 lower than a float's; that of infinities and NaN is the highest
 * of either. */
RULEC_FUNCTION float from_float16(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t size = (uint32_t)(half & 0x7fff) << 13;
    const float finite = float_of(size) * 5192296858534827628530496329220096.0f;
    return float_of(sign | (size < 0x0f800000 ? bits_of(finite) : size | 0x7f800000));
}

/* The nearest float16, halves to even. Below the normal numbers, adding 0.5 rounds to what their last bit counts. */
RULEC_FUNCTION uint16_t to_float16(float x)
{
    const uint32_t sign = bits_of(x) >> 16 & 0x8000;
    const uint32_t size = bits_of(x) & 0x7fffffff;
    const uint32_t tiny = bits_of(float_of(size) + 0.5f) - 0x3f000000;
    const uint32_t near = (size - 0x38000000 + 0x0fff + (size >> 13 & 1)) >> 13;
    const uint32_t beyond = size > 0x7f800000 ? 0x7e00 : 0x7c00;
    return (uint16_t)(sign | (size < 0x38800000 ? tiny : size < 0x47800000 ? near : beyond));
}

/* One element: stores prev, delta, p. */
RULEC_FUNCTION void step_element(
    int64_t i, uint16_t *p_at, const uint16_t *g_at, float *prev_at, float *delta_at,
    float eta_minus, float eta_plus, float step_min, float step_max)
{
    const float p = from_float16(p_at[i]);
    const float g = from_float16(g_at[i]);
    const float prev = prev_at[i];
    const float delta = delta_at[i];
    const float s = g * prev;
    const bool x1 = s < 0.0f;
    const float prev_new = x1 ? 0.0f : g;  // where(x1, 0, g)
    // where(s > 0, eta_plus, where(x1, eta_minus, 1))
    const float eta = s > 0.0f ? eta_plus : (x1 ? eta_minus : 1.0f);
    const float delta_new = minimumf(maximumf(delta * eta, step_min), step_max);
    const float p_new = p - signf(prev_new) * delta_new;
    prev_at[i] = prev_new;
    delta_at[i] = delta_new;
    p_at[i] = to_float16(p_new);
}

/* One chunk. The buffers of a tensor do not overlap. */
static void step_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    uint16_t *p_at = bucket->p[at->tensor];
    const uint16_t *g_at = bucket->g[at->tensor];
    float *prev_at = bucket->prev[at->tensor];
    float *delta_at = bucket->delta[at->tensor];
    const double *row = bucket->table + 4 * bucket->row_of[at->tensor];
    const float eta_minus = (float)row[0];
    const float eta_plus = (float)row[1];
    const float step_min = (float)row[2];
    const float step_max = (float)row[3];

#pragma omp simd
    for (int64_t i = at->first; i < at->last; i++)
        step_element(i, p_at, g_at, prev_at, delta_at, eta_minus, eta_plus, step_min, step_max);
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
