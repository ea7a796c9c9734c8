/* Prodigy by the cupy backend: p:f32 g:f32 m:f32 v:f32 s:f32 x0:f32. Printed by rulec.
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

typedef long long int64_t;
#define INFINITY __int_as_float(0x7f800000)

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
    int64_t i, const float *p_at, const float *g_at, float *s_at, const float *x0_at,
    float beta3, float s_new_factor, float a, float unscale,
    double *sum_a_g_x0_minus_p_model, double *total)
{
    const float p = p_at[i];
    const float g = g_at[i] * unscale;
    const float s = s_at[i];
    const float x0 = x0_at[i];
    const float s_new = beta3 * s + s_new_factor * g;
    s_at[i] = s_new;
    *sum_a_g_x0_minus_p_model += a * g * (x0 - p);
    *total += fabsf(s_new);
}

// A block takes one chunk of one tensor: it stores s; it totals sum_a_g_x0_minus_p_model, total per tensor.
extern "C" __global__ void __launch_bounds__(256, 2) stage_0(
    const Chunk *chunks, const int64_t *bound, const int64_t *per_call, const double *table,
    const bool *stays, const float *scale)
{
    const Chunk chunk = chunks[blockIdx.x];
    bound += 7 * chunk.tensor;  // addresses of the tensor's arrays
    per_call += 3 * chunk.tensor;  // what comes with each call
    const int64_t place = per_call[0];  // its row of the table
    const bool wide = per_call[1];  // whether all its addresses are multiples of 16
    const bool writes = !(stays && stays[place]);
    const float *const p_at = at<const float>(bound[0]);
    float *const s_at = at<float>(bound[3]);
    const float *const x0_at = at<const float>(bound[4]);
    const float *const g_at = at<const float>(per_call[2]);
    const double *const row = table + 19 * place;
    const float beta3 = (float)row[4];
    const float s_new_factor = (float)row[16];
    const float a = (float)row[17];
    const float unscale = scale ? 1.0f / *scale : 1.0f;
    double sum_a_g_x0_minus_p_model = 0;
    double total = 0;
    // A thread takes the same elements in packs or one by one, so that its totals have the same bits.
#pragma unroll 1
    for (int64_t i = chunk.start + 4 * threadIdx.x; i < chunk.stop; i += 4 * blockDim.x) {
        if (wide && i + 4 <= chunk.stop) {
            auto p = pack<4>(p_at + i);
            auto g = pack<4>(g_at + i);
            auto s = pack<4>(s_at + i);
            auto x0 = pack<4>(x0_at + i);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                element_0(
                    e, p.at, g.at, s.at, x0.at,
                    beta3, s_new_factor, a, unscale,
                    &sum_a_g_x0_minus_p_model, &total);
            }
            if (writes)
                pack<4>(s_at + i) = s;
        } else {
#pragma unroll 1
            for (int64_t e = i; e < i + 4 && e < chunk.stop; ++e) {
                auto s = s_at[e];
                element_0(
                    0, p_at + e, g_at + e, &s, x0_at + e,
                    beta3, s_new_factor, a, unscale,
                    &sum_a_g_x0_minus_p_model, &total);
                if (writes)
                    s_at[e] = s;
            }
        }
    }
    sum_a_g_x0_minus_p_model = over_block(SUM, sum_a_g_x0_minus_p_model);
    if (threadIdx.x == 0)
        at<double>(bound[5])[chunk.slot] = sum_a_g_x0_minus_p_model;
    total = over_block(SUM, total);
    if (threadIdx.x == 0)
        at<double>(bound[6])[chunk.slot] = total;
}

__device__ inline void element_1(
    int64_t i, float *p_at, const float *g_at, float *m_at, float *v_at,
    float beta1, float beta2, float one_minus_beta2, float weight_decay, float one_minus_beta1_d,
    float d_2, float a, float d_new_eps, float unscale)
{
    const float p = p_at[i];
    const float g = g_at[i] * unscale;
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

// A block takes one chunk of one tensor: it stores m, v, p.
extern "C" __global__ void __launch_bounds__(256, 2) stage_1(
    const Chunk *chunks, const int64_t *bound, const int64_t *per_call, const double *table,
    const bool *stays, const float *scale)
{
    const Chunk chunk = chunks[blockIdx.x];
    bound += 7 * chunk.tensor;  // addresses of the tensor's arrays
    per_call += 3 * chunk.tensor;  // what comes with each call
    const int64_t place = per_call[0];  // its row of the table
    const bool wide = per_call[1];  // whether all its addresses are multiples of 16
    if (stays && stays[place])
        return;
    float *const p_at = at<float>(bound[0]);
    float *const m_at = at<float>(bound[1]);
    float *const v_at = at<float>(bound[2]);
    const float *const g_at = at<const float>(per_call[2]);
    const double *const row = table + 19 * place;
    const float beta1 = (float)row[0];
    const float beta2 = (float)row[2];
    const float one_minus_beta2 = (float)row[3];
    const float weight_decay = (float)row[13];
    const float one_minus_beta1_d = (float)row[14];
    const float d_2 = (float)row[15];
    const float a = (float)row[17];
    const float d_new_eps = (float)row[18];
    const float unscale = scale ? 1.0f / *scale : 1.0f;
    // Packs where addresses allow them, then single elements.
    const int64_t packed = wide ? chunk.start + (chunk.stop - chunk.start) / 4 * 4 : chunk.start;
#pragma unroll 1
    for (int64_t i = chunk.start + 4 * threadIdx.x; i < packed; i += 4 * blockDim.x) {
        auto p = pack<4>(p_at + i);
        auto g = pack<4>(g_at + i);
        auto m = pack<4>(m_at + i);
        auto v = pack<4>(v_at + i);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            element_1(
                e, p.at, g.at, m.at, v.at,
                beta1, beta2, one_minus_beta2, weight_decay, one_minus_beta1_d, d_2, a, d_new_eps, unscale);
        }
        pack<4>(p_at + i) = p;
        pack<4>(m_at + i) = m;
        pack<4>(v_at + i) = v;
    }
#pragma unroll 1
    for (int64_t i = packed + threadIdx.x; i < chunk.stop; i += blockDim.x) {
        element_1(
            i, p_at, g_at, m_at, v_at,
            beta1, beta2, one_minus_beta2, weight_decay, one_minus_beta1_d, d_2, a, d_new_eps, unscale);
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
    const double beta1 = hyper[1 * group_count + group];
    const double beta2 = hyper[2 * group_count + group];
    const double beta3 = hyper[3 * group_count + group];
    const double lr = hyper[0 * group_count + group];
    const double bias_correction = hyper[8 * group_count + group];
    const double t = 1 + (narrow ? ((const float *)counts)[i] : ((const double *)counts)[i]);
    const double safeguard_warmup = hyper[9 * group_count + group];
    const double d0 = hyper[6 * group_count + group];
    const double beta3_ = hyper[3 * group_count + group];
    const double d0_ = hyper[6 * group_count + group];
    const double d_coef = hyper[7 * group_count + group];
    const double eps = hyper[4 * group_count + group];
    const double weight_decay = hyper[5 * group_count + group];
    double *const row = table + 19 * i;
    row[0] = beta1;
    row[1] = 1.0 - beta1;  // one_minus_beta1
    row[2] = beta2;
    row[3] = 1.0 - beta2;  // one_minus_beta2
    row[4] = beta3;
    row[5] = lr;
    row[6] = bias_correction > 0.0 ? sqrt(1.0 - pow(beta2, t)) / (1.0 - pow(beta1, t)) : 1.0;  // a_factor
    row[7] = safeguard_warmup > 0.0;  // safeguard_warmup_above_zero
    row[8] = d0;
    row[9] = beta3_;  // beta3_2
    row[10] = d0_;  // d0_2
    row[11] = d_coef;
    row[12] = eps;
    row[13] = weight_decay;
}
