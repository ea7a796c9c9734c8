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
 *       s = r*c/maximum(mean(r, per="matrix"), eps1)
 *     else:
 *       v = v + rho*(g**2 - v)
 *       s = v
 *     u = g/sqrt(maximum(s, eps1**2))
 *     alpha = maximum(eps2, rms(p, per="tensor"))*minimum(lr, 1/sqrt(t))
 *     p = p - lr*weight_decay*p
 *     p = p - alpha*u/maximum(1, rms(u, per="tensor")/d) */

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
    const double *table;    // 12 numbers in a row
    // For each tensor the address of:
    void *const *p, *const *g, *const *r_new, *const *c_new, *const *maximum_, *const *sum_row, *const
         *sum_col, *const *sum_tensor, *const *sum_tensor_2;
} Bucket;

/* The larger; NaN where either is. */
RULEC_FUNCTION float maximumf(float a, float b)
{
    const float more = a > b ? a : b;
    return a != a ? a : more;
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

/* Stage 0 for one element: reduces to sum_row per row, sum_col per col, sum_tensor per tensor. */
RULEC_FUNCTION void stage_0_element(
    int64_t i, const float *p_at, const float *g_at,
    double *sum_row, double *sum_col, double *sum_tensor)
{
    const float p = p_at[i];
    const float g = g_at[i];
    const float x0 = g * g;
    *sum_row += x0;
    *sum_col += x0;
    *sum_tensor += p * p;
}

/* One chunk. The buffers of a tensor do not overlap. */
static void stage_0_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    const float *p_at = bucket->p[at->tensor];
    const float *g_at = bucket->g[at->tensor];
    double *sum_row_at = (double *)bucket->sum_row[at->tensor] + at->row_slots;
    double *sum_col_at = (double *)bucket->sum_col[at->tensor] + at->col_slots;
    double *sum_tensor_at = bucket->sum_tensor[at->tensor];

    double sum_tensor[LANES] = {0};
    for (int64_t matrix = at->first; matrix < at->last; matrix++) {
        for (int64_t j = matrix * at->width + at->left; j < matrix * at->width + at->right; j++)
            sum_col_at[j] = 0.0;
        for (int64_t line = matrix * at->height + at->top; line < matrix * at->height + at->bottom; line++) {
            const int64_t back = (line - matrix) * at->width;  // from an element to its column
            double sum_row[LANES] = {0};
            const int64_t stop = line * at->width + at->right;
            int64_t i = line * at->width + at->left;
            for (; i + LANES <= stop; i += LANES) {
#pragma omp simd
                for (int lane = 0; lane < LANES; lane++) {
                    stage_0_element(
                        i + lane, p_at, g_at,
                        &sum_row[lane], &sum_col_at[i + lane - back], &sum_tensor[lane]);
                }
            }
            for (int lane = 0; i < stop; i++, lane++)
                stage_0_element(i, p_at, g_at, &sum_row[lane], &sum_col_at[i - back], &sum_tensor[lane]);
            sum_row_at[line] = sum_of(sum_row);
        }
    }
    sum_tensor_at[chunk] = sum_of(sum_tensor);
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

/* Stage 1 for one element: reduces to sum_tensor_2 per tensor.
 *
 * Before it:
 *     r_new = r + t**beta2_decay*(sum_row/cols - r)
 *     c_new = c + t**beta2_decay*(sum_col/rows - c)
 *     maximum = maximum(sum(r_new, per="matrix")/rows, eps1) */
RULEC_FUNCTION void stage_1_element(
    int64_t i, const float *g_at, float r_new, float c_new, float maximum_,
    float scalar_8,
    double *sum_tensor_2)
{
    const float g = g_at[i];
    const float s = r_new * c_new / maximum_;  // r_new*c_new/maximum
    const float u = g / sqrtf(maximumf(s, scalar_8));  // g/sqrt(maximum(s, eps1*eps1))
    *sum_tensor_2 += u * u;
}

/* One chunk. The buffers of a tensor do not overlap. */
static void stage_1_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    const float *g_at = bucket->g[at->tensor];
    const float *r_new_at = bucket->r_new[at->tensor];
    const float *c_new_at = bucket->c_new[at->tensor];
    const float *maximum__at = bucket->maximum_[at->tensor];
    double *sum_tensor_2_at = bucket->sum_tensor_2[at->tensor];
    const double *row = bucket->table + 12 * bucket->row_of[at->tensor];
    const float scalar_8 = (float)row[8];  // eps1*eps1

    double sum_tensor_2[LANES] = {0};
    for (int64_t matrix = at->first; matrix < at->last; matrix++) {
        const float maximum_ = maximum__at[matrix];
        for (int64_t line = matrix * at->height + at->top; line < matrix * at->height + at->bottom; line++) {
            const int64_t back = (line - matrix) * at->width;  // from an element to its column
            const float r_new = r_new_at[line];
            const int64_t stop = line * at->width + at->right;
            int64_t i = line * at->width + at->left;
            for (; i + LANES <= stop; i += LANES) {
#pragma omp simd
                for (int lane = 0; lane < LANES; lane++) {
                    stage_1_element(
                        i + lane, g_at, r_new, c_new_at[i + lane - back], maximum_,
                        scalar_8,
                        &sum_tensor_2[lane]);
                }
            }
            for (int lane = 0; i < stop; i++, lane++)
                stage_1_element(i, g_at, r_new, c_new_at[i - back], maximum_, scalar_8, &sum_tensor_2[lane]);
        }
    }
    sum_tensor_2_at[chunk] = sum_of(sum_tensor_2);
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
 *     alpha = maximum(eps2, sqrt(sum_tensor/numel))*minimum(lr, 1/sqrt(t))
 *     scalar_1 = maximum(1, sqrt(sum_tensor_2/numel)/d) */
RULEC_FUNCTION void stage_2_element(
    int64_t i, float *p_at, const float *g_at, float r_new, float c_new, float maximum_,
    float scalar_3, float scalar_8, float alpha, float scalar_1)
{
    const float p = p_at[i];
    const float g = g_at[i];
    const float p_new = p - scalar_3 * p;  // p - lr*weight_decay*p
    const float s = r_new * c_new / maximum_;  // r_new*c_new/maximum
    const float u = g / sqrtf(maximumf(s, scalar_8));  // g/sqrt(maximum(s, eps1*eps1))
    const float p_new_ = p_new - alpha * u / scalar_1;
    p_at[i] = p_new_;
}

/* One chunk. The buffers of a tensor do not overlap. */
static void stage_2_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    float *p_at = bucket->p[at->tensor];
    const float *g_at = bucket->g[at->tensor];
    const float *r_new_at = bucket->r_new[at->tensor];
    const float *c_new_at = bucket->c_new[at->tensor];
    const float *maximum__at = bucket->maximum_[at->tensor];
    const double *row = bucket->table + 12 * bucket->row_of[at->tensor];
    const float scalar_3 = (float)row[3];  // lr*weight_decay
    const float scalar_8 = (float)row[8];  // eps1*eps1
    const float alpha = (float)row[10];
    const float scalar_1 = (float)row[11];

    for (int64_t matrix = at->first; matrix < at->last; matrix++) {
        const float maximum_ = maximum__at[matrix];
        for (int64_t line = matrix * at->height + at->top; line < matrix * at->height + at->bottom; line++) {
            const int64_t back = (line - matrix) * at->width;  // from an element to its column
            const float r_new = r_new_at[line];
#pragma omp simd
            for (int64_t i = line * at->width + at->left; i < line * at->width + at->right; i++) {
                stage_2_element(
                    i, p_at, g_at, r_new, c_new_at[i - back], maximum_,
                    scalar_3, scalar_8, alpha, scalar_1);
            }
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
