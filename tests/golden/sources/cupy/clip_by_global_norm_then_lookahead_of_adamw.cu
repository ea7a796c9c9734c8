/* ClipByGlobalNormThenLookaheadAdamW by the cupy backend: p:f32 g:f32 m:f32 v:f32 slow:f32. Printed by rulec.
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

typedef long long int64_t;
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)

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

/* a - b*floor(a/b) without rounding, with the sign of b. */
__device__ inline double modulo(double a, double b)
{
    const double rest = fmod(a, b);
    if (rest == 0)
        return copysign(rest, b);
    return (rest < 0) != (b < 0) ? rest + b : rest;
}

/* 1/divisor where quotients by it are products; else NaN, and they are divisions. */
__device__ inline float reciprocalf(float divisor)
{
    return divisor >= 2.384185791015625e-07f && divisor <= 4.253529586511731e+37f ? 1.0f / divisor : NAN;
}

/* x/divisor as IEEE rounds it, with the inverse of the divisor from reciprocal. */
__device__ inline float quotientf(float x, float divisor, float inverse)
{
    const float near = x * inverse;
    const float size = fabsf(near);
    if (size >= 8.271806125530277e-25f && size < 281474976710656.0f)
        return fmaf(-fmaf(near, divisor, -x), inverse, near);
    return x / divisor;
}

// Elements start to stop of one tensor, and where its totals go.
struct Chunk {
    int64_t tensor, start, stop, slot;
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

__device__ inline void element_0(
    int64_t i, const float *g_at,
    float unscale,
    double *sum_g_squared_model)
{
    const float g = g_at[i] * unscale;
    *sum_g_squared_model += g * g;
}

// A block takes one chunk of one tensor: it totals sum_g_squared_model per tensor.
extern "C" __global__ void __launch_bounds__(256, 2) stage_0(
    const Chunk *chunks, const int64_t *bound, const int64_t *per_call, const double *table,
    const bool *stays, const float *scale)
{
    const Chunk chunk = chunks[blockIdx.x];
    bound += 5 * chunk.tensor;  // addresses of the tensor's arrays
    per_call += 3 * chunk.tensor;  // what comes with each call
    const int64_t place = per_call[0];  // its row of the table
    const bool wide = per_call[1];  // whether all its addresses are multiples of 16
    const float *const g_at = at<const float>(per_call[2]);
    const float unscale = scale ? 1.0f / *scale : 1.0f;
    double sum_g_squared_model = 0;
    // A thread takes the same elements in packs or one by one, so that its totals have the same bits.
#pragma unroll 1
    for (int64_t i = chunk.start + 4 * threadIdx.x; i < chunk.stop; i += 4 * blockDim.x) {
        if (wide && i + 4 <= chunk.stop) {
            auto g = pack<4>(g_at + i);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                element_0(e, g.at, unscale, &sum_g_squared_model);
        } else {
#pragma unroll 1
            for (int64_t e = i; e < i + 4 && e < chunk.stop; ++e)
                element_0(e, g_at, unscale, &sum_g_squared_model);
        }
    }
    sum_g_squared_model = over_block(SUM, sum_g_squared_model);
    if (threadIdx.x == 0)
        at<double>(bound[4])[chunk.slot] = sum_g_squared_model;
}

__device__ inline void element_1(
    int64_t i, float *p_at, const float *g_at, float *m_at, float *v_at, float *slow_at,
    float beta1, float one_minus_beta1, float beta2, float one_minus_beta2,
    float one_minus_beta1_t, float sqrt_one_minus_beta2_t, float eps, float weight_decay,
    float lr, float alpha, bool t_mod_k_is_zero, float clip_by_global_norm_direction_factor,
    float one_minus_beta1_t_inverse, float sqrt_one_minus_beta2_t_inverse, float unscale)
{
    const float p = p_at[i];
    const float g = g_at[i] * unscale;
    const float m = m_at[i];
    const float v = v_at[i];
    const float slow = slow_at[i];
    const float clip_by_global_norm_direction = g * clip_by_global_norm_direction_factor;
    // beta1*m + (1 - beta1)*clip_by_global_norm_direction
    const float m_new = beta1 * m + one_minus_beta1 * clip_by_global_norm_direction;
    const float v_new = beta2 * v + one_minus_beta2 * clip_by_global_norm_direction * clip_by_global_norm_direction;
    // m_new/(1 - beta1**t)
    const float m_hat = quotientf(m_new, one_minus_beta1_t, one_minus_beta1_t_inverse);
    // sqrt(v_new)/sqrt(1 - beta2**t)
    const float sigma = quotientf(sqrtf(v_new), sqrt_one_minus_beta2_t, sqrt_one_minus_beta2_t_inverse);
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

// A block takes one chunk of one tensor: it stores m, v, slow, p.
extern "C" __global__ void __launch_bounds__(256, 2) stage_1(
    const Chunk *chunks, const int64_t *bound, const int64_t *per_call, const double *table,
    const bool *stays, const float *scale)
{
    const Chunk chunk = chunks[blockIdx.x];
    bound += 5 * chunk.tensor;  // addresses of the tensor's arrays
    per_call += 3 * chunk.tensor;  // what comes with each call
    const int64_t place = per_call[0];  // its row of the table
    const bool wide = per_call[1];  // whether all its addresses are multiples of 16
    if (stays && stays[place])
        return;
    float *const p_at = at<float>(bound[0]);
    float *const m_at = at<float>(bound[1]);
    float *const v_at = at<float>(bound[2]);
    float *const slow_at = at<float>(bound[3]);
    const float *const g_at = at<const float>(per_call[2]);
    const double *const row = table + 13 * place;
    const float beta1 = (float)row[0];
    const float one_minus_beta1 = (float)row[2];
    const float beta2 = (float)row[3];
    const float one_minus_beta2 = (float)row[4];
    const float one_minus_beta1_t = (float)row[5];
    const float sqrt_one_minus_beta2_t = (float)row[6];
    const float eps = (float)row[7];
    const float weight_decay = (float)row[8];
    const float lr = (float)row[9];
    const float alpha = (float)row[10];
    const bool t_mod_k_is_zero = row[11] != 0;
    const float clip_by_global_norm_direction_factor = (float)row[12];
    const float one_minus_beta1_t_inverse = reciprocalf(one_minus_beta1_t);
    const float sqrt_one_minus_beta2_t_inverse = reciprocalf(sqrt_one_minus_beta2_t);
    const float unscale = scale ? 1.0f / *scale : 1.0f;
    // Packs where addresses allow them, then single elements.
    const int64_t packed = wide ? chunk.start + (chunk.stop - chunk.start) / 4 * 4 : chunk.start;
#pragma unroll 1
    for (int64_t i = chunk.start + 4 * threadIdx.x; i < packed; i += 4 * blockDim.x) {
        auto p = pack<4>(p_at + i);
        auto g = pack<4>(g_at + i);
        auto m = pack<4>(m_at + i);
        auto v = pack<4>(v_at + i);
        auto slow = pack<4>(slow_at + i);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            element_1(
                e, p.at, g.at, m.at, v.at, slow.at,
                beta1, one_minus_beta1, beta2, one_minus_beta2, one_minus_beta1_t, sqrt_one_minus_beta2_t,
                eps, weight_decay, lr, alpha, t_mod_k_is_zero, clip_by_global_norm_direction_factor,
                one_minus_beta1_t_inverse, sqrt_one_minus_beta2_t_inverse, unscale);
        }
        pack<4>(p_at + i) = p;
        pack<4>(m_at + i) = m;
        pack<4>(v_at + i) = v;
        pack<4>(slow_at + i) = slow;
    }
#pragma unroll 1
    for (int64_t i = packed + threadIdx.x; i < chunk.stop; i += blockDim.x) {
        element_1(
            i, p_at, g_at, m_at, v_at, slow_at,
            beta1, one_minus_beta1, beta2, one_minus_beta2, one_minus_beta1_t, sqrt_one_minus_beta2_t,
            eps, weight_decay, lr, alpha, t_mod_k_is_zero, clip_by_global_norm_direction_factor,
            one_minus_beta1_t_inverse, sqrt_one_minus_beta2_t_inverse, unscale);
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
    const double *hyper, int64_t group_count, double *table)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= tensors)
        return;
    const int64_t group = groups[i];
    const double beta1 = hyper[2 * group_count + group];
    const double max_norm = hyper[0 * group_count + group];
    const double beta2 = hyper[3 * group_count + group];
    const double t = 1 + (narrow ? ((const float *)counts)[i] : ((const double *)counts)[i]);
    const double eps = hyper[4 * group_count + group];
    const double weight_decay = hyper[5 * group_count + group];
    const double lr = hyper[1 * group_count + group];
    const double alpha = hyper[7 * group_count + group];
    const double k = hyper[6 * group_count + group];
    double *const row = table + 13 * i;
    row[0] = beta1;
    row[1] = max_norm;
    row[2] = 1.0 - beta1;  // one_minus_beta1
    row[3] = beta2;
    row[4] = 1.0 - beta2;  // one_minus_beta2
    row[5] = 1.0 - pow(beta1, t);  // one_minus_beta1_t
    row[6] = sqrt(1.0 - pow(beta2, t));  // sqrt_one_minus_beta2_t
    row[7] = eps;
    row[8] = weight_decay;
    row[9] = lr;
    row[10] = alpha;
    row[11] = modulo(t, k) == 0.0;  // t_mod_k_is_zero
}
