/* ScheduleFreeAdamW by the cupy backend: p:f32 g:f32 z:f32 v:f32. Printed by rulec.
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

typedef long long int64_t;
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
    int64_t i, float *p_at, const float *g_at, float *z_at, float *v_at,
    float beta2, float one_minus_beta2, float sqrt_one_minus_beta2_t, float eps,
    float weight_decay, float gamma, float one_minus_c, float c, float p_new_factor,
    float sqrt_one_minus_beta2_t_inverse, float unscale)
{
    const float p = p_at[i];
    const float g = g_at[i] * unscale;
    const float z = z_at[i];
    const float v = v_at[i];
    const float v_new = beta2 * v + one_minus_beta2 * g * g;  // beta2*v + (1 - beta2)*g*g
    // g/(sqrt(v_new)/sqrt(1 - beta2**t) + eps) + weight_decay*p
    const float d = g / (quotientf(sqrtf(v_new), sqrt_one_minus_beta2_t, sqrt_one_minus_beta2_t_inverse) + eps) + weight_decay * p;
    const float z_new = z - gamma * d;  // z - lr*minimum(1, t/maximum(warmup_steps, 1))*d
    const float p_new = one_minus_c * p + c * z + p_new_factor * d;
    z_at[i] = z_new;
    v_at[i] = v_new;
    p_at[i] = p_new;
}

// A block takes one chunk of one tensor: it stores z, v, p.
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
    float *const z_at = at<float>(bound[1]);
    float *const v_at = at<float>(bound[2]);
    const float *const g_at = at<const float>(per_call[2]);
    const double *const row = table + 9 * place;
    const float beta2 = (float)row[0];
    const float one_minus_beta2 = (float)row[1];
    const float sqrt_one_minus_beta2_t = (float)row[2];
    const float eps = (float)row[3];
    const float weight_decay = (float)row[4];
    const float gamma = (float)row[5];
    const float one_minus_c = (float)row[6];
    const float c = (float)row[7];
    const float p_new_factor = (float)row[8];
    const float sqrt_one_minus_beta2_t_inverse = reciprocalf(sqrt_one_minus_beta2_t);
    const float unscale = scale ? 1.0f / *scale : 1.0f;
    // Packs where addresses allow them, then single elements.
    const int64_t packed = wide ? chunk.start + (chunk.stop - chunk.start) / 4 * 4 : chunk.start;
#pragma unroll 1
    for (int64_t i = chunk.start + 4 * threadIdx.x; i < packed; i += 4 * blockDim.x) {
        auto p = pack<4>(p_at + i);
        auto g = pack<4>(g_at + i);
        auto z = pack<4>(z_at + i);
        auto v = pack<4>(v_at + i);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            element(
                e, p.at, g.at, z.at, v.at,
                beta2, one_minus_beta2, sqrt_one_minus_beta2_t, eps, weight_decay, gamma, one_minus_c, c,
                p_new_factor, sqrt_one_minus_beta2_t_inverse, unscale);
        }
        pack<4>(p_at + i) = p;
        pack<4>(z_at + i) = z;
        pack<4>(v_at + i) = v;
    }
#pragma unroll 1
    for (int64_t i = packed + threadIdx.x; i < chunk.stop; i += blockDim.x) {
        element(
            i, p_at, g_at, z_at, v_at,
            beta2, one_minus_beta2, sqrt_one_minus_beta2_t, eps, weight_decay, gamma, one_minus_c, c,
            p_new_factor, sqrt_one_minus_beta2_t_inverse, unscale);
    }
}

// The scalar table, a row for each tensor; `narrow` where counts are floats.
extern "C" __global__ void __launch_bounds__(256) scalars(
    int64_t tensors, const void *counts, int64_t narrow, const int64_t *groups,
    const double *hyper, int64_t group_count, const double *weight_sum_at, const double *group_at,
    const double *lr_max_at, double *lr_max_new, double *weight_sum_new, double *table)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= tensors)
        return;
    const int64_t group = groups[i];
    const double beta2 = hyper[2 * group_count + group];
    const double t = 1 + (narrow ? ((const float *)counts)[i] : ((const double *)counts)[i]);
    const double eps = hyper[3 * group_count + group];
    const double weight_decay = hyper[4 * group_count + group];
    const double lr = hyper[0 * group_count + group];
    const double warmup_steps = hyper[5 * group_count + group];
    const double weight_sum = weight_sum_at[group];
    const double group_t = group_at[group];
    const double r = hyper[6 * group_count + group];
    const double lr_max = lr_max_at[group];
    const double weight_lr_power = hyper[7 * group_count + group];
    const double beta1 = hyper[1 * group_count + group];
    const double x0 = maximum(warmup_steps, 1.0);
    const double gamma = lr * minimum(1.0, t / x0);
    const double lr_max_new_ = maximum(lr_max, lr * minimum(1.0, group_t / x0));
    const double x3 = pow(lr_max_new_, weight_lr_power);
    const double weight_sum_new_ = weight_sum + pow(group_t, r) * x3;
    const double w = pow(t, r) * x3;
    const double c = weight_sum_new_ > 0.0 ? w / weight_sum_new_ : 0.0;
    const double x7 = 1.0 - c;
    double *const row = table + 9 * i;
    row[0] = beta2;
    row[1] = 1.0 - beta2;  // one_minus_beta2
    row[2] = sqrt(1.0 - pow(beta2, t));  // sqrt_one_minus_beta2_t
    row[3] = eps;
    row[4] = weight_decay;
    row[5] = gamma;
    row[6] = x7;  // one_minus_c
    row[7] = c;
    row[8] = gamma * (beta1 * x7 - 1.0);  // p_new_factor
    lr_max_new[i] = lr_max_new_;
    weight_sum_new[i] = weight_sum_new_;
}
