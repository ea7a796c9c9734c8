/* SGD by the cupy backend: p:f32 g:f32. Printed by rulec.
 *
 * SGD: Stochastic gradient descent, one step down the gradient.
 * A Stochastic Approximation Method (Robbins, Monro, 1951)
 * https://doi.org/10.1214/aoms/1177729586
 *
 *     direction = g
 *     p = p - lr*direction */

typedef long long int64_t;

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

__device__ inline void element(int64_t i, float *p_at, const float *g_at, float lr, float unscale)
{
    const float p = p_at[i];
    const float g = g_at[i] * unscale;
    const float p_new = p - lr * g;
    p_at[i] = p_new;
}

// A block takes one chunk of one tensor: it stores p.
extern "C" __global__ void __launch_bounds__(256, 2) step(
    const Chunk *chunks, const int64_t *bound, const int64_t *per_call, const double *table,
    const bool *stays, const float *scale)
{
    const Chunk chunk = chunks[blockIdx.x];
    bound += 1 * chunk.tensor;  // addresses of the tensor's arrays
    per_call += 3 * chunk.tensor;  // what comes with each call
    const int64_t place = per_call[0];  // its row of the table
    const bool wide = per_call[1];  // whether all its addresses are multiples of 16
    if (stays && stays[place])
        return;
    float *const p_at = at<float>(bound[0]);
    const float *const g_at = at<const float>(per_call[2]);
    const double *const row = table + 1 * place;
    const float lr = (float)row[0];
    const float unscale = scale ? 1.0f / *scale : 1.0f;
    // Packs where addresses allow them, then single elements.
    const int64_t packed = wide ? chunk.start + (chunk.stop - chunk.start) / 4 * 4 : chunk.start;
#pragma unroll 1
    for (int64_t i = chunk.start + 4 * threadIdx.x; i < packed; i += 4 * blockDim.x) {
        auto p = pack<4>(p_at + i);
        auto g = pack<4>(g_at + i);
#pragma unroll
        for (int e = 0; e < 4; ++e)
            element(e, p.at, g.at, lr, unscale);
        pack<4>(p_at + i) = p;
    }
#pragma unroll 1
    for (int64_t i = packed + threadIdx.x; i < chunk.stop; i += blockDim.x)
        element(i, p_at, g_at, lr, unscale);
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
    const double lr = hyper[0 * group_count + group];
    double *const row = table + 1 * i;
    row[0] = lr;
}
