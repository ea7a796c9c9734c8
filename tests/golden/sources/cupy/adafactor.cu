/* Adafactor by the cupy backend: p:f32 g:f32 r:f32 c:f32. Printed by rulec.
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

typedef long long int64_t;
#define INFINITY __int_as_float(0x7f800000)

/* The smaller; NaN where either is. */
__device__ inline float minimumf(float a, float b)
{
    const float less = a < b ? a : b;
    return a != a ? a : less;
}

/* The smaller; NaN where either is. */
__device__ inline double minimum(double a, double b)
{
    const double less = a < b ? a : b;
    return a != a ? a : less;
}

/* The larger; NaN where either is. */
__device__ inline double maximum(double a, double b)
{
    const double more = a > b ? a : b;
    return a != a ? a : more;
}

// Lines top to bottom of a tensor, their columns left to right, and where totals go.
struct Tile {
    int64_t tensor, matrix, width, top, bottom, left, right, lanes, row_slots, col_slots, slot;
};

// Neighbouring totals to be joined with those of other lines, a stride apart, and where they go.
struct Finish {
    int64_t source, target, count, stride, terms, kind;
};

// An address in global memory as a pointer.
template <typename T> __device__ inline T *at(int64_t address)
{
    return static_cast<T *>(__cvta_global_to_generic(address));
}

// Neighbouring elements, moved 16 bytes at a time.
template <typename T, int count> struct alignas(16) Pack {
    T at[count];
};

template <int count, typename T> __device__ inline Pack<T, count> &pack(T *first)
{
    return *reinterpret_cast<Pack<T, count> *>(first);
}

template <int count, typename T> __device__ inline const Pack<T, count> &pack(const T *first)
{
    return *reinterpret_cast<const Pack<T, count> *>(first);
}

// Joins two totals: sums, or the lower, or the higher of them.
enum Kind { SUM, LOWEST, HIGHEST };

__device__ inline double joined(int kind, double a, double b)
{
    return kind == SUM ? a + b : kind == LOWEST ? minimum(a, b) : maximum(a, b);
}

// What this many neighbouring threads have, joined in an order that never changes; the first of them has it.
__device__ inline double over_lanes(int kind, double total, int lanes)
{
    for (int step = lanes / 2; step > 0; step /= 2)
        total = joined(kind, total, __shfl_down_sync(0xffffffff, total, step));
    return total;
}

// What the threads of a block have, joined in an order that never changes; the first of them has it.
__device__ inline double over_block(int kind, double total)
{
    __shared__ double warps[8];
    total = over_lanes(kind, total, 32);
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = total;
    __syncthreads();
    for (unsigned warp = 1; threadIdx.x == 0 && warp < blockDim.x / 32; ++warp)
        total = joined(kind, total, warps[warp]);
    __syncthreads();
    return total;
}

// Leaves the totals of columns: the threads of the first line join what those below them have of the same columns.
template <int width> __device__ inline void leave_columns(
    int kind, const double (&totals)[width], unsigned lanes, double *to, int64_t count)
{
    __shared__ double all[width][256];
#pragma unroll
    for (int e = 0; e < width; ++e)
        all[e][threadIdx.x] = totals[e];
    __syncthreads();
    for (int e = 0; threadIdx.x < lanes && e < width && e < count; ++e) {
        double total = all[e][threadIdx.x];
        for (unsigned below = threadIdx.x + lanes; below < blockDim.x; below += lanes)
            total = joined(kind, total, all[e][below]);
        to[e] = total;
    }
    __syncthreads();
}

__device__ inline void element_0(
    int64_t i, const float *p_at, const float *g_at,
    float unscale,
    double *sum_g_squared_row, double *sum_g_squared_col, double *sum_p_squared)
{
    const float p = p_at[i];
    const float g = g_at[i] * unscale;
    const float x0 = g * g;
    *sum_g_squared_row += x0;
    *sum_g_squared_col += x0;
    *sum_p_squared += p * p;
}

// A block takes one tile of one tensor: it totals sum_g_squared_row per row; it totals sum_g_squared_col per
// col; it totals sum_p_squared per tensor.
extern "C" __global__ void __launch_bounds__(256, 2) stage_0(
    const Tile *tiles, const int64_t *bound, const int64_t *per_call, const double *table,
    const bool *stays, const float *scale)
{
    const Tile tile = tiles[blockIdx.x];
    bound += 5 * tile.tensor;  // addresses of the tensor's arrays
    per_call += 5 * tile.tensor;  // what comes with each call
    const int64_t place = per_call[0];  // its row of the table
    const bool wide = per_call[1];  // whether all its addresses are multiples of 16
    const float *const p_at = at<const float>(bound[0]);
    const float *const g_at = at<const float>(per_call[2]);
    const float unscale = scale ? 1.0f / *scale : 1.0f;
    const unsigned lanes = tile.lanes, lane = threadIdx.x % lanes;
    double sum_p_squared = 0;
    double sum_g_squared_col[4];
#pragma unroll
    for (int e = 0; e < 4; ++e)
        sum_g_squared_col[e] = 0;
    // Each group of lanes takes a line; those without one go along, for lanes wait for each other.
#pragma unroll 1
    for (int64_t top = tile.top; top < tile.bottom; top += blockDim.x / lanes) {
        const int64_t line = top + threadIdx.x / lanes;
        double sum_g_squared_row = 0;
#pragma unroll 1
        for (int64_t j = tile.left + 4 * lane; line < tile.bottom && j < tile.right; j += 4 * lanes) {
            const int64_t i = line * tile.width + j;
            if (wide && j + 4 <= tile.right) {
                auto p = pack<4>(p_at + i);
                auto g = pack<4>(g_at + i);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    element_0(e, p.at, g.at, unscale, &sum_g_squared_row, &sum_g_squared_col[e], &sum_p_squared);
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (j + e < tile.right)
                        element_0(i + e, p_at, g_at, unscale, &sum_g_squared_row, &sum_g_squared_col[e], &sum_p_squared);
                }
            }
        }
        sum_g_squared_row = over_lanes(SUM, sum_g_squared_row, lanes);
        if (lane == 0 && line < tile.bottom)
            at<double>(bound[1])[tile.row_slots + line] = sum_g_squared_row;
    }
    leave_columns(
        SUM, sum_g_squared_col, lanes,
        at<double>(bound[2]) + tile.col_slots + tile.matrix * tile.width + tile.left + 4 * lane,
        tile.right - (tile.left + 4 * lane));
    sum_p_squared = over_block(SUM, sum_p_squared);
    if (threadIdx.x == 0)
        at<double>(bound[3])[tile.slot] = sum_p_squared;
}

__device__ inline void element_1(
    int64_t i, const float *g_at, float a, float b,
    float one_over_eps1, float unscale,
    double *sum_u_squared)
{
    const float g = g_at[i] * unscale;
    const float u = g * minimumf(a * b, one_over_eps1);  // g*minimum(a*b, 1/eps1)
    *sum_u_squared += u * u;
}

// A block takes one tile of one tensor: it totals sum_u_squared per tensor.
extern "C" __global__ void __launch_bounds__(256, 2) stage_1(
    const Tile *tiles, const int64_t *bound, const int64_t *per_call, const double *table,
    const bool *stays, const float *scale)
{
    const Tile tile = tiles[blockIdx.x];
    bound += 5 * tile.tensor;  // addresses of the tensor's arrays
    per_call += 5 * tile.tensor;  // what comes with each call
    const int64_t place = per_call[0];  // its row of the table
    const bool wide = per_call[1];  // whether all its addresses are multiples of 16
    const float *const g_at = at<const float>(per_call[2]);
    const float *const a_at = at<const float>(per_call[3]);
    const float *const b_at = at<const float>(per_call[4]);
    const double *const row = table + 11 * place;
    const float one_over_eps1 = (float)row[8];
    const float unscale = scale ? 1.0f / *scale : 1.0f;
    const unsigned lanes = tile.lanes, lane = threadIdx.x % lanes;
    double sum_u_squared = 0;
    // Each group of lanes takes a line; those without one go along, for lanes wait for each other.
#pragma unroll 1
    for (int64_t top = tile.top; top < tile.bottom; top += blockDim.x / lanes) {
        const int64_t line = top + threadIdx.x / lanes;
#pragma unroll 1
        for (int64_t j = tile.left + 4 * lane; line < tile.bottom && j < tile.right; j += 4 * lanes) {
            const int64_t i = line * tile.width + j;
            const int64_t column = tile.matrix * tile.width + j;
            if (wide && j + 4 <= tile.right) {
                auto g = pack<4>(g_at + i);
                auto b = pack<4>(b_at + column);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    element_1(e, g.at, a_at[line], b.at[e], one_over_eps1, unscale, &sum_u_squared);
            } else {
#pragma unroll 1
                for (int e = 0; e < 4 && j + e < tile.right; ++e)
                    element_1(i + e, g_at, a_at[line], b_at[column + e], one_over_eps1, unscale, &sum_u_squared);
            }
        }
    }
    sum_u_squared = over_block(SUM, sum_u_squared);
    if (threadIdx.x == 0)
        at<double>(bound[4])[tile.slot] = sum_u_squared;
}

__device__ inline void element_2(
    int64_t i, float *p_at, const float *g_at, float a, float b,
    float lr_weight_decay, float one_over_eps1, float p_new_factor, float unscale)
{
    const float p = p_at[i];
    const float g = g_at[i] * unscale;
    const float p_new = p - lr_weight_decay * p;  // p - lr*weight_decay*p
    const float u = g * minimumf(a * b, one_over_eps1);  // g*minimum(a*b, 1/eps1)
    const float p_new_ = p_new - p_new_factor * u;
    p_at[i] = p_new_;
}

// A block takes one tile of one tensor: it stores p.
extern "C" __global__ void __launch_bounds__(256, 2) stage_2(
    const Tile *tiles, const int64_t *bound, const int64_t *per_call, const double *table,
    const bool *stays, const float *scale)
{
    const Tile tile = tiles[blockIdx.x];
    bound += 5 * tile.tensor;  // addresses of the tensor's arrays
    per_call += 5 * tile.tensor;  // what comes with each call
    const int64_t place = per_call[0];  // its row of the table
    const bool wide = per_call[1];  // whether all its addresses are multiples of 16
    if (stays && stays[place])
        return;
    float *const p_at = at<float>(bound[0]);
    const float *const g_at = at<const float>(per_call[2]);
    const float *const a_at = at<const float>(per_call[3]);
    const float *const b_at = at<const float>(per_call[4]);
    const double *const row = table + 11 * place;
    const float lr_weight_decay = (float)row[3];
    const float one_over_eps1 = (float)row[8];
    const float p_new_factor = (float)row[10];
    const float unscale = scale ? 1.0f / *scale : 1.0f;
    const unsigned lanes = tile.lanes, lane = threadIdx.x % lanes;
    // Each group of lanes takes a line; those without one go along, for lanes wait for each other.
#pragma unroll 1
    for (int64_t top = tile.top; top < tile.bottom; top += blockDim.x / lanes) {
        const int64_t line = top + threadIdx.x / lanes;
#pragma unroll 1
        for (int64_t j = tile.left + 4 * lane; line < tile.bottom && j < tile.right; j += 4 * lanes) {
            const int64_t i = line * tile.width + j;
            const int64_t column = tile.matrix * tile.width + j;
            if (wide && j + 4 <= tile.right) {
                auto p = pack<4>(p_at + i);
                auto g = pack<4>(g_at + i);
                auto b = pack<4>(b_at + column);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    element_2(e, p.at, g.at, a_at[line], b.at[e], lr_weight_decay, one_over_eps1, p_new_factor, unscale);
                pack<4>(p_at + i) = p;
            } else {
#pragma unroll 1
                for (int e = 0; e < 4 && j + e < tile.right; ++e) {
                    element_2(
                        i + e, p_at, g_at, a_at[line], b_at[column + e],
                        lr_weight_decay, one_over_eps1, p_new_factor, unscale);
                }
            }
        }
    }
}

// Joins what the blocks of a stage have left, always in the same order.
extern "C" __global__ void __launch_bounds__(256) finish(const Finish *results)
{
    const Finish result = results[blockIdx.x];
    const double nothing = result.kind == SUM ? 0 : result.kind == LOWEST ? INFINITY : -INFINITY;
    const double *const source = at<const double>(result.source);
    double *const target = at<double>(result.target);
    if (result.count == 1) {
        double total = nothing;
        for (int64_t term = threadIdx.x; term < result.terms; term += blockDim.x)
            total = joined(result.kind, total, source[term]);
        total = over_block(result.kind, total);
        if (threadIdx.x == 0)
            *target = total;
        return;
    }
    for (int64_t i = threadIdx.x; i < result.count; i += blockDim.x) {
        double total = nothing;
        for (int64_t term = 0; term < result.terms; ++term)
            total = joined(result.kind, total, source[term * result.stride + i]);
        target[i] = total;
    }
}

// The scalar table, a row for each tensor; `narrow` where counts are floats.
extern "C" __global__ void __launch_bounds__(256) scalars(
    int64_t tensors, const void *counts, int64_t narrow, const int64_t *groups,
    const double *hyper, int64_t group_count, const double *cols_at, const double *rows_at,
    const double *numel_at, double *table)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= tensors)
        return;
    const int64_t group = groups[i];
    const double cols = cols_at[i];
    const double t = 1 + (narrow ? ((const float *)counts)[i] : ((const double *)counts)[i]);
    const double beta2_decay = hyper[1 * group_count + group];
    const double rows = rows_at[i];
    const double lr = hyper[0 * group_count + group];
    const double weight_decay = hyper[5 * group_count + group];
    const double numel = numel_at[i];
    const double eps2 = hyper[3 * group_count + group];
    const double eps1 = hyper[2 * group_count + group];
    const double d = hyper[4 * group_count + group];
    const double rho = pow(t, beta2_decay);
    double *const row = table + 11 * i;
    row[0] = cols;
    row[1] = rho;
    row[2] = rows;
    row[3] = lr * weight_decay;  // lr_weight_decay
    row[4] = numel;
    row[5] = eps2;
    row[6] = minimum(lr, 1.0 / sqrt(t));  // min_lr_one_over_sqrt_t
    row[7] = eps1;
    row[8] = 1.0 / eps1;  // one_over_eps1
    row[9] = d;
}
