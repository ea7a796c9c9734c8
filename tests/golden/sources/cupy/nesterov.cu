/* Nesterov by the cupy backend: p:bf16 g:bf16 m:bf16. Printed by rulec.
 *
 * Nesterov: Gradient descent with Nesterov momentum.
 * On the importance of initialization and momentum in deep learning (Sutskever, Martens, Dahl, Hinton, 2013)
 * https://proceedings.mlr.press/v28/sutskever13.html
 *
 *     sgd.direction = g
 *     m = momentum*m + sgd.direction
 *     nesterov_momentum.direction = sgd.direction + momentum*m
 *     direction = nesterov_momentum.direction
 *     p = p - lr*direction */

typedef long long int64_t;
typedef unsigned int uint32_t;
typedef unsigned short uint16_t;

// The float that has these bits.
__device__ inline float float_of(uint32_t bits)
{
    return __uint_as_float(bits);
}

/* The number that a bfloat16 is. */
__device__ inline float from_bfloat16(uint16_t bits)
{
    return float_of((uint32_t)bits << 16);
}

// The nearest bfloat16, halves to even.
__device__ inline uint16_t to_bfloat16(float from)
{
    uint16_t to;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to) : "f"(from));
    return to;
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
    int64_t i, uint16_t *p_at, const uint16_t *g_at, uint16_t *m_at,
    float momentum, float lr, float unscale)
{
    const float p = from_bfloat16(p_at[i]);
    const float g = from_bfloat16(g_at[i]) * unscale;
    const float m = from_bfloat16(m_at[i]);
    const float m_new = momentum * m + g;
    const float nesterov_momentum_direction = g + momentum * m_new;
    const float p_new = p - lr * nesterov_momentum_direction;
    m_at[i] = to_bfloat16(m_new);
    p_at[i] = to_bfloat16(p_new);
}

// A block takes one chunk of one tensor: it stores m, p.
extern "C" __global__ void __launch_bounds__(256, 2) step(
    const Chunk *chunks, const int64_t *bound, const int64_t *per_call, const double *table,
    const bool *stays, const float *scale)
{
    const Chunk chunk = chunks[blockIdx.x];
    bound += 2 * chunk.tensor;  // addresses of the tensor's arrays
    per_call += 3 * chunk.tensor;  // what comes with each call
    const int64_t place = per_call[0];  // its row of the table
    const bool wide = per_call[1];  // whether all its addresses are multiples of 16
    if (stays && stays[place])
        return;
    uint16_t *const p_at = at<uint16_t>(bound[0]);
    uint16_t *const m_at = at<uint16_t>(bound[1]);
    const uint16_t *const g_at = at<const uint16_t>(per_call[2]);
    const double *const row = table + 2 * place;
    const float momentum = (float)row[0];
    const float lr = (float)row[1];
    const float unscale = scale ? 1.0f / *scale : 1.0f;
    // Packs where addresses allow them, then single elements.
    const int64_t packed = wide ? chunk.start + (chunk.stop - chunk.start) / 8 * 8 : chunk.start;
#pragma unroll 1
    for (int64_t i = chunk.start + 8 * threadIdx.x; i < packed; i += 8 * blockDim.x) {
        auto p = pack<8>(p_at + i);
        auto g = pack<8>(g_at + i);
        auto m = pack<8>(m_at + i);
#pragma unroll
        for (int e = 0; e < 8; ++e)
            element(e, p.at, g.at, m.at, momentum, lr, unscale);
        pack<8>(p_at + i) = p;
        pack<8>(m_at + i) = m;
    }
#pragma unroll 1
    for (int64_t i = packed + threadIdx.x; i < chunk.stop; i += blockDim.x)
        element(i, p_at, g_at, m_at, momentum, lr, unscale);
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
    const double momentum = hyper[1 * group_count + group];
    const double lr = hyper[0 * group_count + group];
    double *const row = table + 2 * i;
    row[0] = momentum;
    row[1] = lr;
}
