/* NAdam by the cupy backend: p:f64 g:f64 m:f64 v:f64. Printed by rulec.
 *
 * NAdam: Adam with Nesterov momentum and a schedule of momentum.
 * Incorporating Nesterov Momentum into Adam (Dozat, 2016)
 * https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ
 *
 *     mu = beta1*(1 - 0.5*0.96**(t*momentum_decay))
 *     mu_next = beta1*(1 - 0.5*0.96**((t + 1)*momentum_decay))
 *     mu_product = mu_product*mu
 *     m = beta1*m + (1 - beta1)*g
 *     v = beta2*v + (1 - beta2)*g*g
 *     m_bar = (1 - mu)/(1 - mu_product)*g + mu_next/(1 - mu_product*mu_next)*m
 *     sigma = sqrt(v)/sqrt(1 - beta2**t)
 *     direction = m_bar/(sigma + eps)
 *     p = p - lr*direction */

typedef long long int64_t;
#define NAN __int_as_float(0x7fc00000)

/* 1/divisor where quotients by it are products; else NaN, and they are divisions. */
__device__ inline double reciprocal(double divisor)
{
    return divisor >= 3.8725919148493183e-121 && divisor <= 1.0715086071862673e+301 ? 1.0 / divisor : NAN;
}

/* x/divisor as IEEE rounds it, with the inverse of the divisor from reciprocal. */
__device__ inline double quotient(double x, double divisor, double inverse)
{
    const double near = x * inverse;
    const double size = fabs(near);
    if (size >= 7.458340731200207e-155 && size < 1.3407807929942597e+154)
        return fma(-fma(near, divisor, -x), inverse, near);
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
    int64_t i, double *p_at, const double *g_at, double *m_at, double *v_at,
    double beta1, double one_minus_beta1, double beta2, double one_minus_beta2,
    double m_bar_factor, double m_bar_factor_2, double sqrt_one_minus_beta2_t, double eps,
    double lr, double sqrt_one_minus_beta2_t_inverse, double unscale)
{
    const double p = p_at[i];
    const double g = g_at[i] * unscale;
    const double m = m_at[i];
    const double v = v_at[i];
    const double m_new = beta1 * m + one_minus_beta1 * g;  // beta1*m + (1 - beta1)*g
    const double v_new = beta2 * v + one_minus_beta2 * g * g;  // beta2*v + (1 - beta2)*g*g
    const double m_bar = m_bar_factor * g + m_bar_factor_2 * m_new;
    // sqrt(v_new)/sqrt(1 - beta2**t)
    const double sigma = quotient(sqrt(v_new), sqrt_one_minus_beta2_t, sqrt_one_minus_beta2_t_inverse);
    const double direction = m_bar / (sigma + eps);
    const double p_new = p - lr * direction;
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
    double *const p_at = at<double>(bound[0]);
    double *const m_at = at<double>(bound[1]);
    double *const v_at = at<double>(bound[2]);
    const double *const g_at = at<const double>(per_call[2]);
    const double *const row = table + 9 * place;
    const double beta1 = row[0];
    const double one_minus_beta1 = row[1];
    const double beta2 = row[2];
    const double one_minus_beta2 = row[3];
    const double m_bar_factor = row[4];
    const double m_bar_factor_2 = row[5];
    const double sqrt_one_minus_beta2_t = row[6];
    const double eps = row[7];
    const double lr = row[8];
    const double sqrt_one_minus_beta2_t_inverse = reciprocal(sqrt_one_minus_beta2_t);
    const double unscale = scale ? 1.0f / *scale : 1.0f;
    // Packs where addresses allow them, then single elements.
    const int64_t packed = wide ? chunk.start + (chunk.stop - chunk.start) / 2 * 2 : chunk.start;
#pragma unroll 1
    for (int64_t i = chunk.start + 2 * threadIdx.x; i < packed; i += 2 * blockDim.x) {
        auto p = pack<2>(p_at + i);
        auto g = pack<2>(g_at + i);
        auto m = pack<2>(m_at + i);
        auto v = pack<2>(v_at + i);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            element(
                e, p.at, g.at, m.at, v.at,
                beta1, one_minus_beta1, beta2, one_minus_beta2, m_bar_factor, m_bar_factor_2,
                sqrt_one_minus_beta2_t, eps, lr, sqrt_one_minus_beta2_t_inverse, unscale);
        }
        pack<2>(p_at + i) = p;
        pack<2>(m_at + i) = m;
        pack<2>(v_at + i) = v;
    }
#pragma unroll 1
    for (int64_t i = packed + threadIdx.x; i < chunk.stop; i += blockDim.x) {
        element(
            i, p_at, g_at, m_at, v_at,
            beta1, one_minus_beta1, beta2, one_minus_beta2, m_bar_factor, m_bar_factor_2,
            sqrt_one_minus_beta2_t, eps, lr, sqrt_one_minus_beta2_t_inverse, unscale);
    }
}

// The scalar table, a row for each tensor; `narrow` where counts are floats.
extern "C" __global__ void __launch_bounds__(256) scalars(
    int64_t tensors, const void *counts, int64_t narrow, const int64_t *groups,
    const double *hyper, int64_t group_count, const double *mu_product_at, double *mu_product_new,
    double *table)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= tensors)
        return;
    const int64_t group = groups[i];
    const double beta1 = hyper[1 * group_count + group];
    const double beta2 = hyper[2 * group_count + group];
    const double t = 1 + (narrow ? ((const float *)counts)[i] : ((const double *)counts)[i]);
    const double momentum_decay = hyper[4 * group_count + group];
    const double mu_product = mu_product_at[i];
    const double eps = hyper[3 * group_count + group];
    const double lr = hyper[0 * group_count + group];
    const double mu = beta1 * (1.0 - 0.5 * pow(0.96, t * momentum_decay));
    const double mu_product_new_ = mu_product * mu;
    const double mu_next = beta1 * (1.0 - 0.5 * pow(0.96, (t + 1.0) * momentum_decay));
    double *const row = table + 9 * i;
    row[0] = beta1;
    row[1] = 1.0 - beta1;  // one_minus_beta1
    row[2] = beta2;
    row[3] = 1.0 - beta2;  // one_minus_beta2
    row[4] = (1.0 - mu) / (1.0 - mu_product_new_);  // m_bar_factor
    row[5] = mu_next / (1.0 - mu_product_new_ * mu_next);  // m_bar_factor_2
    row[6] = sqrt(1.0 - pow(beta2, t));  // sqrt_one_minus_beta2_t
    row[7] = eps;
    row[8] = lr;
    mu_product_new[i] = mu_product_new_;
}
