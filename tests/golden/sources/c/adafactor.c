/* C99 for p:f32 g:f32 r:f32 c:f32. Printed by rulec.
 *
 * Adafactor: Second moments as the product of a row and a column, and steps relative to the size of the
 * parameter.
 * Adafactor: Adaptive Learning Rates with Sublinear Memory Cost (Shazeer, Stern, 2018)
 * https://arxiv.org/abs/1804.04235
 *
 *     rho = t**beta2_decay
 *     if ndim >= 2:
 *       r = r + rho*(mean(g**2, per="row") - r)
 *       c = c + rho*(mean(g**2, per="col") - c)
 *       a = rsqrt(r/maximum(mean(r, per="matrix"), eps1))
 *       b = rsqrt(c)
 *       u = g*minimum(a*b, 1/eps1)
 *     else:
 *       v = v + rho*(g**2 - v)
 *       u = g/sqrt(maximum(v, eps1**2))
 *     alpha = maximum(eps2, rms(p, per="tensor"))*minimum(lr, 1/sqrt(t))
 *     p = p - lr*weight_decay*p
 *     p = p - alpha/maximum(1, rms(u, per="tensor")/d)*u */

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

/* A range of elements of a tensor; or, where a stage sees matrices, a range of these, of which only some rows
 * and columns belong to the chunk, and where the results for its rows and columns begin. Rows and columns are
 * those in memory. */
typedef struct {
    int64_t tensor, first, last;
    int64_t height, width;
    int64_t top, bottom, left, right;
    int64_t row_slots, col_slots;
} Chunk;

/* The tensors that one call is for, cut into chunks, and spans of chunks for threads to take. */
typedef struct {
    int64_t threads, tensors, spans;
    const Span *span;
    const Chunk *chunk;
    const int64_t *row_of;  // for each tensor its row of the table
    const double *table;    // 11 numbers in a row
    // For each tensor the address of:
    void *const *p, *const *g, *const *a, *const *b, *const *sum_g_squared_row, *const *sum_g_squared_col,
         *const *sum_p_squared, *const *sum_u_squared;
} Bucket;

/* The smaller; NaN where either is. */
RULEC_FUNCTION float minimumf(float a, float b)
{
    const float less = a < b ? a : b;
    return a != a ? a : less;
}

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

/* Stage 0 for one element: reduces to sum_g_squared_row, sum_g_squared_col, sum_p_squared per tensor. */
RULEC_FUNCTION void stage_0_element(
    int64_t i, const float *p_at, const float *g_at,
    double *sum_g_squared_row, double *sum_g_squared_col, double *sum_p_squared)
{
    const float p = p_at[i];
    const float g = g_at[i];
    const float x0 = g * g;
    *sum_g_squared_row += x0;
    *sum_g_squared_col += x0;
    *sum_p_squared += p * p;
}

/* One chunk. The buffers of a tensor do not overlap. */
static void stage_0_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    const float *p_at = bucket->p[at->tensor];
    const float *g_at = bucket->g[at->tensor];
    double *sum_g_squared_row_at = (double *)bucket->sum_g_squared_row[at->tensor] + at->row_slots;
    double *sum_g_squared_col_at = (double *)bucket->sum_g_squared_col[at->tensor] + at->col_slots;
    double *sum_p_squared_at = bucket->sum_p_squared[at->tensor];

    double sum_p_squared[LANES] = {0};
    for (int64_t matrix = at->first; matrix < at->last; matrix++) {
        for (int64_t j = matrix * at->width + at->left; j < matrix * at->width + at->right; j++)
            sum_g_squared_col_at[j] = 0.0;
        for (int64_t line = matrix * at->height + at->top; line < matrix * at->height + at->bottom; line++) {
            const int64_t back = (line - matrix) * at->width;  // from an element to its column
            double sum_g_squared_row[LANES] = {0};
            const int64_t stop = line * at->width + at->right;
            int64_t i = line * at->width + at->left;
            for (; i + LANES <= stop; i += LANES) {
#pragma omp simd
                for (int lane = 0; lane < LANES; lane++) {
                    stage_0_element(
                        i + lane, p_at, g_at,
                        &sum_g_squared_row[lane], &sum_g_squared_col_at[i + lane - back], &sum_p_squared[lane]);
                }
            }
            for (int lane = 0; i < stop; i++, lane++) {
                stage_0_element(
                    i, p_at, g_at,
                    &sum_g_squared_row[lane], &sum_g_squared_col_at[i - back], &sum_p_squared[lane]);
            }
            sum_g_squared_row_at[line] = sum_of(sum_g_squared_row);
        }
    }
    sum_p_squared_at[chunk] = sum_of(sum_p_squared);
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

/* Stage 1 for one element: reduces to sum_u_squared per tensor.
 *
 * Before it:
 *     a = rsqrt((r + t**beta2_decay*(sum_g_squared_row/cols - r))/maximum(sum(r +
 *         t**beta2_decay*(sum_g_squared_row/cols - r), per="matrix")/rows, eps1))
 *     b = rsqrt(c + t**beta2_decay*(sum_g_squared_col/rows - c)) */
RULEC_FUNCTION void stage_1_element(
    int64_t i, const float *g_at, float a, float b,
    float one_over_eps1,
    double *sum_u_squared)
{
    const float g = g_at[i];
    const float u = g * minimumf(a * b, one_over_eps1);  // g*minimum(a*b, 1/eps1)
    *sum_u_squared += u * u;
}

/* One chunk. The buffers of a tensor do not overlap. */
static void stage_1_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    const float *g_at = bucket->g[at->tensor];
    const float *a_at = bucket->a[at->tensor];
    const float *b_at = bucket->b[at->tensor];
    double *sum_u_squared_at = bucket->sum_u_squared[at->tensor];
    const double *row = bucket->table + 11 * bucket->row_of[at->tensor];
    const float one_over_eps1 = (float)row[8];  // 1/eps1

    double sum_u_squared[LANES] = {0};
    for (int64_t matrix = at->first; matrix < at->last; matrix++) {
        for (int64_t line = matrix * at->height + at->top; line < matrix * at->height + at->bottom; line++) {
            const int64_t back = (line - matrix) * at->width;  // from an element to its column
            const float a = a_at[line];
            const int64_t stop = line * at->width + at->right;
            int64_t i = line * at->width + at->left;
            for (; i + LANES <= stop; i += LANES) {
#pragma omp simd
                for (int lane = 0; lane < LANES; lane++)
                    stage_1_element(i + lane, g_at, a, b_at[i + lane - back], one_over_eps1, &sum_u_squared[lane]);
            }
            for (int lane = 0; i < stop; i++, lane++)
                stage_1_element(i, g_at, a, b_at[i - back], one_over_eps1, &sum_u_squared[lane]);
        }
    }
    sum_u_squared_at[chunk] = sum_of(sum_u_squared);
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

/* Stage 2 for one element: stores p.
 *
 * Before it:
 *     p_new_factor = maximum(eps2, sqrt(sum_p_squared/numel))*minimum(lr, 1/sqrt(t))/maximum(1,
 *         sqrt(sum_u_squared/numel)/d) */
RULEC_FUNCTION void stage_2_element(
    int64_t i, float *p_at, const float *g_at, float a, float b,
    float lr_weight_decay, float one_over_eps1, float p_new_factor)
{
    const float p = p_at[i];
    const float g = g_at[i];
    const float p_new = p - lr_weight_decay * p;  // p - lr*weight_decay*p
    const float u = g * minimumf(a * b, one_over_eps1);  // g*minimum(a*b, 1/eps1)
    const float p_new_ = p_new - p_new_factor * u;
    p_at[i] = p_new_;
}

/* One chunk. The buffers of a tensor do not overlap. */
static void stage_2_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    float *p_at = bucket->p[at->tensor];
    const float *g_at = bucket->g[at->tensor];
    const float *a_at = bucket->a[at->tensor];
    const float *b_at = bucket->b[at->tensor];
    const double *row = bucket->table + 11 * bucket->row_of[at->tensor];
    const float lr_weight_decay = (float)row[3];  // lr*weight_decay
    const float one_over_eps1 = (float)row[8];  // 1/eps1
    const float p_new_factor = (float)row[10];

    for (int64_t matrix = at->first; matrix < at->last; matrix++) {
        for (int64_t line = matrix * at->height + at->top; line < matrix * at->height + at->bottom; line++) {
            const int64_t back = (line - matrix) * at->width;  // from an element to its column
            const float a = a_at[line];
#pragma omp simd
            for (int64_t i = line * at->width + at->left; i < line * at->width + at->right; i++)
                stage_2_element(i, p_at, g_at, a, b_at[i - back], lr_weight_decay, one_over_eps1, p_new_factor);
        }
    }
}

/* All chunks of a bucket. */
void stage_2(const Bucket *bucket)
{
#pragma omp parallel for schedule(dynamic) num_threads((int)bucket->threads) if (bucket->threads > 1)
    for (int64_t s = 0; s < bucket->spans; s++) {
        for (int64_t chunk = bucket->span[s].first; chunk < bucket->span[s].last; chunk++)
            stage_2_chunk(bucket, chunk);
    }
}
