/* AdamW with a sum of popcount noise as its gradient, by the cupy backend: p:f32 g:f32 m:f32 v:f32. Printed by
 * rulec.
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
typedef unsigned long long uint64_t;
typedef unsigned int uint32_t;
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

// The float that has these bits.
__device__ inline float float_of(uint32_t bits)
{
    return __uint_as_float(bits);
}

/* Four words of 32 bits. */
typedef struct {
    uint32_t at[4];
} Words;

/* The words of a block: Philox4x32-10 of a counter and a key of such words. */
__device__ inline Words philox(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t seed, uint32_t layer)
{
    for (int round = 0; round < 10; round++) {
        const uint64_t one = (uint64_t)a * 0xd2511f53, other = (uint64_t)c * 0xcd9e8d57;
        a = (uint32_t)(other >> 32) ^ b ^ seed;
        b = (uint32_t)other;
        c = (uint32_t)(one >> 32) ^ d ^ layer;
        d = (uint32_t)one;
        seed += 0x9e3779b9;
        layer += 0xbb67ae85;
    }
    const Words words = {{a, b, c, d}};
    return words;
}

/* How many bits are set in each byte of a word, in the same byte. */
__device__ inline uint32_t set_bits(uint32_t word)
{
    word -= word >> 1 & 0x55555555;
    word = (word & 0x33333333) + (word >> 2 & 0x33333333);
    return (word + (word >> 4)) & 0x0f0f0f0f;
}

/* A byte less 4: its bits behind those of 2**23 are a float. */
__device__ inline float less_four(uint32_t byte)
{
    return float_of(0x4b000000 | byte) - 8388612.0f;
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

// A direction and its weight.
struct Direction {
    uint32_t number;
    float weight;
};

// Noise in the place of a gradient: its key, what is added to the upper half of a block's number, the step, and the
// element that the tensor's first one is.
struct Noise {
    int64_t directions, count, seed, layer, high, step, offset, unused;
};

// The words of a block, whose number may be beyond 32 bits.
__device__ inline Words words_of(const Noise &noise, int64_t block, uint32_t direction)
{
    return philox((uint32_t)block, (uint32_t)(block >> 32) + (uint32_t)noise.high, (uint32_t)direction,
        (uint32_t)noise.step, (uint32_t)noise.seed, (uint32_t)noise.layer);
}

// 4 neighbouring elements of each lane, those of the first from `start` on: sums of noise, direction by direction
// in order. All lanes of a warp call it together.
__device__ inline Pack<float, 4> sum_of_noise(const Noise &noise, int64_t start)
{
    const unsigned lane = threadIdx.x % 32;
    const Direction *const directions = at<const Direction>(noise.directions);
    float sums[4] = {};
    const int64_t first = noise.offset + start;  // blocks have 16 elements, and a warp 8 of them
    const unsigned first_of_lane = 4 * lane;
    __shared__ Pack<Words, 1> quads[256];
    Pack<Words, 1> *const mine = quads + threadIdx.x / 32 * 32;
#pragma unroll 1
    for (int64_t d = 0; d < noise.count; d += 4) {
        mine[lane].at[0] = words_of(noise, first / 16 + lane % 8, directions[d + lane / 8].number);
        __syncwarp();
        const int some = noise.count - d < 4 ? (int)(noise.count - d) : 4;
#pragma unroll 4
        for (int k = 0; k < some; ++k) {
            const float weight = directions[d + k].weight;
            const Words &words = mine[8 * k + first_of_lane / 16].at[0];
#pragma unroll
            for (int e = 0; e < 4; e += 4) {
                const uint32_t bits = set_bits(words.at[(first_of_lane + e) % 16 / 4]);
                sums[e + 0] = fmaf(weight, less_four(bits & 255), sums[e + 0]);
                sums[e + 1] = fmaf(weight, less_four(bits >> 8 & 255), sums[e + 1]);
                sums[e + 2] = fmaf(weight, less_four(bits >> 16 & 255), sums[e + 2]);
                sums[e + 3] = fmaf(weight, less_four(bits >> 24 & 255), sums[e + 3]);
            }
        }
        __syncwarp();
    }
    Pack<float, 4> values;
#pragma unroll
    for (int e = 0; e < 4; ++e)
        values.at[e] = sums[e];
    return values;
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
    Noise noise = *at<const Noise>(per_call[2]);
    noise.directions += per_call[2];  // they lie behind it
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
    // A warp takes packs side by side, for its lanes share words: whole ones where addresses allow them.
#pragma unroll 1
    for (int64_t start = chunk.start + 4 * (threadIdx.x & ~31u); start < chunk.stop; start += 4 * blockDim.x) {
        const auto g = sum_of_noise(noise, start);
        const int64_t i = start + 4 * (threadIdx.x % 32);
        if (wide && i + 4 <= chunk.stop) {
            auto p = pack<4>(p_at + i);
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
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (i + e < chunk.stop) {
                    element(
                        e, p_at + i, g.at, m_at + i, v_at + i,
                        beta1, one_minus_beta1, beta2, one_minus_beta2, one_minus_beta1_t, sqrt_one_minus_beta2_t,
                        eps, weight_decay, lr, one_minus_beta1_t_inverse, sqrt_one_minus_beta2_t_inverse, unscale);
                }
            }
        }
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
