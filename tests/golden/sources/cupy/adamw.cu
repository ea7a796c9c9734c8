/* AdamW by the cupy backend: p:f32 g:f32 m:f32 v:f32. Printed by rulec.
 *
 * AdamW: Adam with decoupled weight decay.
 * Decoupled Weight Decay Regularization (Loshchilov, Hutter, 2019)
 * https://arxiv.org/abs/1711.05101
 *
 *     m = beta1*m + (1 - beta1)*g
 *     v = beta2*v + (1 - beta2)*g*g
 *     m_hat = m/(1 - beta1**t)
 *     sigma = sqrt(v)/sqrt(1 - beta2**t)
 *     adam.direction = m_hat/(sigma + eps)
 *     decay.direction = weight_decay*p
 *     direction = adam.direction + decay.direction
 *     p = p - lr*direction */

typedef long long int64_t;
#define NAN __int_as_float(0x7fc00000)

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

__device__ inline void element(
    int64_t i, float *p_at, const float *g_at, float *m_at, float *v_at,
    float beta1, float one_minus_beta1, float beta2, float one_minus_beta2,
    float one_minus_beta1_t, float sqrt_one_minus_beta2_t, float eps, float weight_decay,
    float lr, float one_minus_beta1_t_inverse, float sqrt_one_minus_beta2_t_inverse,
    float unscale)
{
    const float p = p_at[i];
    const float g = g_at[i] * unscale;
    const float m = m_at[i];
    const float v = v_at[i];
    const float m_new = beta1 * m + one_minus_beta1 * g;  // beta1*m + (1 - beta1)*g
    const float v_new = beta2 * v + one_minus_beta2 * g * g;  // beta2*v + (1 - beta2)*g*g
    // m_new/(1 - beta1**t)
    const float m_hat = quotientf(m_new, one_minus_beta1_t, one_minus_beta1_t_inverse);
    // sqrt(v_new)/sqrt(1 - beta2**t)
    const float sigma = quotientf(sqrtf(v_new), sqrt_one_minus_beta2_t, sqrt_one_minus_beta2_t_inverse);
    const float adam_direction = m_hat / (sigma + eps);
    const float decay_direction = weight_decay * p;
    const float direction = adam_direction + decay_direction;
    const float p_new = p - lr * direction;
    m_at[i] = m_new;
    v_at[i] = v_new;
    p_at[i] = p_new;
}

// A block takes one chunk of one tensor: it stores m, v, p.
extern "C" __global__ void __launch_bounds__(256, 2) step(
    const Chunk *chunks, const int64_t *bound, const int64_t *per_call, const double *table,
    const bool *stays, const float *scale)
{
    const Chunk chunk = chunks[blockIdx.x];
    bound += 3 * chunk.tensor;  // addresses of the tensor's arrays
    per_call += 3 * chunk.tensor;  // what comes with each call
    const int64_t place = per_call[0];  // its row of the table
    const bool wide = per_call[1];  // whether all its addresses are multiples of 16
    if (stays && stays[place])
        return;
    float *const p_at = at<float>(bound[0]);
    float *const m_at = at<float>(bound[1]);
    float *const v_at = at<float>(bound[2]);
    const float *const g_at = at<const float>(per_call[2]);
    const double *const row = table + 9 * place;
    const float beta1 = (float)row[0];
    const float one_minus_beta1 = (float)row[1];
    const float beta2 = (float)row[2];
    const float one_minus_beta2 = (float)row[3];
    const float one_minus_beta1_t = (float)row[4];
    const float sqrt_one_minus_beta2_t = (float)row[5];
    const float eps = (float)row[6];
    const float weight_decay = (float)row[7];
    const float lr = (float)row[8];
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
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            element(
                e, p.at, g.at, m.at, v.at,
                beta1, one_minus_beta1, beta2, one_minus_beta2, one_minus_beta1_t, sqrt_one_minus_beta2_t,
                eps, weight_decay, lr, one_minus_beta1_t_inverse, sqrt_one_minus_beta2_t_inverse, unscale);
        }
        pack<4>(p_at + i) = p;
        pack<4>(m_at + i) = m;
        pack<4>(v_at + i) = v;
    }
#pragma unroll 1
    for (int64_t i = packed + threadIdx.x; i < chunk.stop; i += blockDim.x) {
        element(
            i, p_at, g_at, m_at, v_at,
            beta1, one_minus_beta1, beta2, one_minus_beta2, one_minus_beta1_t, sqrt_one_minus_beta2_t,
            eps, weight_decay, lr, one_minus_beta1_t_inverse, sqrt_one_minus_beta2_t_inverse, unscale);
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
    const double t = 1 + (narrow ? ((const float *)counts)[i] : ((const double *)counts)[i]);
    const double eps = hyper[3 * group_count + group];
    const double weight_decay = hyper[4 * group_count + group];
    const double lr = hyper[0 * group_count + group];
    double *const row = table + 9 * i;
    row[0] = beta1;
    row[1] = 1.0 - beta1;  // one_minus_beta1
    row[2] = beta2;
    row[3] = 1.0 - beta2;  // one_minus_beta2
    row[4] = 1.0 - pow(beta1, t);  // one_minus_beta1_t
    row[5] = sqrt(1.0 - pow(beta2, t));  // sqrt_one_minus_beta2_t
    row[6] = eps;
    row[7] = weight_decay;
    row[8] = lr;
}
