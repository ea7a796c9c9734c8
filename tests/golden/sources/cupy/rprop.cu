/* Rprop by the cupy backend: p:f16 g:f16 prev:f32 delta:f32. Printed by rulec.
 *
 * Rprop: Steps of a size of their own for every element, grown while its gradient keeps its sign.
 * A direct adaptive method for faster backpropagation learning: the RPROP algorithm (Riedmiller, Braun, 1993)
 * https://doi.org/10.1109/ICNN.1993.298623
 *
 *     s = g*prev
 *     eta = where(s > 0, eta_plus, where(s < 0, eta_minus, 1))
 *     delta = minimum(maximum(delta*eta, step_min), step_max)
 *     prev = where(s < 0, 0, g)
 *     p = p - sign(prev)*delta */

typedef long long int64_t;
typedef unsigned short uint16_t;

/* 1, -1 or 0 by the sign of x; NaN of NaN. */
__device__ inline float signf(float x)
{
    return x > 0 ? 1.0f : x < 0 ? -1.0f : fabsf(x);
}

/* The smaller; NaN where either is. */
__device__ inline float minimumf(float a, float b)
{
    const float less = a < b ? a : b;
    return a != a ? a : less;
}

/* The larger; NaN where either is. */
__device__ inline float maximumf(float a, float b)
{
    const float more = a > b ? a : b;
    return a != a ? a : more;
}

// The number that a float16 is.
__device__ inline float from_float16(uint16_t from)
{
    float to;
    asm("cvt.f32.f16 %0, %1;" : "=f"(to) : "h"(from));
    return to;
}

// The nearest float16, halves to even.
__device__ inline uint16_t to_float16(float from)
{
    uint16_t to;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to) : "f"(from));
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
    int64_t i, uint16_t *p_at, const uint16_t *g_at, float *prev_at, float *delta_at,
    float eta_minus, float eta_plus, float step_min, float step_max, float unscale)
{
    const float p = from_float16(p_at[i]);
    const float g = from_float16(g_at[i]) * unscale;
    const float prev = prev_at[i];
    const float delta = delta_at[i];
    const float s = g * prev;
    const bool x1 = s < 0.0f;
    const float prev_new = x1 ? 0.0f : g;  // where(x1, 0, g)
    // where(s > 0, eta_plus, where(x1, eta_minus, 1))
    const float eta = s > 0.0f ? eta_plus : (x1 ? eta_minus : 1.0f);
    const float delta_new = minimumf(maximumf(delta * eta, step_min), step_max);
    const float p_new = p - signf(prev_new) * delta_new;
    prev_at[i] = prev_new;
    delta_at[i] = delta_new;
    p_at[i] = to_float16(p_new);
}

// A block takes one chunk of one tensor: it stores prev, delta, p.
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
    uint16_t *const p_at = at<uint16_t>(bound[0]);
    float *const prev_at = at<float>(bound[1]);
    float *const delta_at = at<float>(bound[2]);
    const uint16_t *const g_at = at<const uint16_t>(per_call[2]);
    const double *const row = table + 4 * place;
    const float eta_minus = (float)row[0];
    const float eta_plus = (float)row[1];
    const float step_min = (float)row[2];
    const float step_max = (float)row[3];
    const float unscale = scale ? 1.0f / *scale : 1.0f;
    // Packs where addresses allow them, then single elements.
    const int64_t packed = wide ? chunk.start + (chunk.stop - chunk.start) / 8 * 8 : chunk.start;
#pragma unroll 1
    for (int64_t i = chunk.start + 8 * threadIdx.x; i < packed; i += 8 * blockDim.x) {
        auto p = pack<8>(p_at + i);
        auto g = pack<8>(g_at + i);
        auto prev = pack<8>(prev_at + i);
        auto delta = pack<8>(delta_at + i);
#pragma unroll
        for (int e = 0; e < 8; ++e)
            element(e, p.at, g.at, prev.at, delta.at, eta_minus, eta_plus, step_min, step_max, unscale);
        pack<8>(p_at + i) = p;
        pack<8>(prev_at + i) = prev;
        pack<8>(delta_at + i) = delta;
    }
#pragma unroll 1
    for (int64_t i = packed + threadIdx.x; i < chunk.stop; i += blockDim.x)
        element(i, p_at, g_at, prev_at, delta_at, eta_minus, eta_plus, step_min, step_max, unscale);
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
    const double eta_minus = hyper[1 * group_count + group];
    const double eta_plus = hyper[2 * group_count + group];
    const double step_min = hyper[3 * group_count + group];
    const double step_max = hyper[4 * group_count + group];
    double *const row = table + 4 * i;
    row[0] = eta_minus;
    row[1] = eta_plus;
    row[2] = step_min;
    row[3] = step_max;
}
