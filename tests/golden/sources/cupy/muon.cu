/* Muon by the cupy backend: p:f32 g:f32 m:f32 o_part:f32. Printed by rulec.
 *
 * Muon: Orthogonalized Nesterov momentum for matrices, and AdamW for all else.
 * Muon: An optimizer for hidden layers in neural networks (Jordan and others, 2024)
 * https://kellerjordan.github.io/posts/muon/
 *
 *     m = momentum*m + (1 - momentum)*g
 *     o = newton_schulz((1 - momentum)*g + momentum*m, steps=ns_steps, dtype="bfloat16")
 *     direction = sqrt(maximum(1, rows/cols))*o + weight_decay*p
 *     p = p - lr*direction */

typedef long long int64_t;

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

__device__ inline void element_0(
    int64_t i, const float *g_at, float *m_at, float *o_part_at,
    float momentum, float one_minus_momentum, float unscale)
{
    const float g = g_at[i] * unscale;
    const float m = m_at[i];
    const float x0 = one_minus_momentum * g;  // (1 - momentum)*g
    const float m_new = momentum * m + x0;
    o_part_at[i] = x0 + momentum * m_new;
    m_at[i] = m_new;
}

// A block takes one chunk of one tensor: it stores o_part, m.
extern "C" __global__ void __launch_bounds__(256, 2) stage_0(
    const Chunk *chunks, const int64_t *bound, const int64_t *per_call, const double *table,
    const bool *stays, const float *scale)
{
    const Chunk chunk = chunks[blockIdx.x];
    bound += 2 * chunk.tensor;  // addresses of the tensor's arrays
    per_call += 5 * chunk.tensor;  // what comes with each call
    const int64_t place = per_call[0];  // its row of the table
    const bool wide = per_call[1];  // whether all its addresses are multiples of 16
    if (stays && stays[place])
        return;
    float *const m_at = at<float>(bound[1]);
    const float *const g_at = at<const float>(per_call[2]);
    float *const o_part_at = at<float>(per_call[3]);
    const double *const row = table + 6 * place;
    const float momentum = (float)row[0];
    const float one_minus_momentum = (float)row[1];
    const float unscale = scale ? 1.0f / *scale : 1.0f;
    // Packs where addresses allow them, then single elements.
    const int64_t packed = wide ? chunk.start + (chunk.stop - chunk.start) / 4 * 4 : chunk.start;
#pragma unroll 1
    for (int64_t i = chunk.start + 4 * threadIdx.x; i < packed; i += 4 * blockDim.x) {
        auto g = pack<4>(g_at + i);
        auto m = pack<4>(m_at + i);
        Pack<float, 4> o_part;
#pragma unroll
        for (int e = 0; e < 4; ++e)
            element_0(e, g.at, m.at, o_part.at, momentum, one_minus_momentum, unscale);
        pack<4>(m_at + i) = m;
        pack<4>(o_part_at + i) = o_part;
    }
#pragma unroll 1
    for (int64_t i = packed + threadIdx.x; i < chunk.stop; i += blockDim.x)
        element_0(i, g_at, m_at, o_part_at, momentum, one_minus_momentum, unscale);
}

__device__ inline void element_1(
    int64_t i, float *p_at, const float *o_at,
    float sqrt_max_one_rows_over_cols, float weight_decay, float lr)
{
    const float p = p_at[i];
    const float o = o_at[i];
    // sqrt(maximum(1, rows/cols))*o + weight_decay*p
    const float direction = sqrt_max_one_rows_over_cols * o + weight_decay * p;
    const float p_new = p - lr * direction;
    p_at[i] = p_new;
}

// A block takes one chunk of one tensor: it stores p.
extern "C" __global__ void __launch_bounds__(256, 2) stage_1(
    const Chunk *chunks, const int64_t *bound, const int64_t *per_call, const double *table,
    const bool *stays, const float *scale)
{
    const Chunk chunk = chunks[blockIdx.x];
    bound += 2 * chunk.tensor;  // addresses of the tensor's arrays
    per_call += 5 * chunk.tensor;  // what comes with each call
    const int64_t place = per_call[0];  // its row of the table
    const bool wide = per_call[1];  // whether all its addresses are multiples of 16
    if (stays && stays[place])
        return;
    float *const p_at = at<float>(bound[0]);
    const float *const o_at = at<const float>(per_call[4]);
    const double *const row = table + 6 * place;
    const float sqrt_max_one_rows_over_cols = (float)row[3];
    const float weight_decay = (float)row[4];
    const float lr = (float)row[5];
    // Packs where addresses allow them, then single elements.
    const int64_t packed = wide ? chunk.start + (chunk.stop - chunk.start) / 4 * 4 : chunk.start;
#pragma unroll 1
    for (int64_t i = chunk.start + 4 * threadIdx.x; i < packed; i += 4 * blockDim.x) {
        auto p = pack<4>(p_at + i);
        auto o = pack<4>(o_at + i);
#pragma unroll
        for (int e = 0; e < 4; ++e)
            element_1(e, p.at, o.at, sqrt_max_one_rows_over_cols, weight_decay, lr);
        pack<4>(p_at + i) = p;
    }
#pragma unroll 1
    for (int64_t i = packed + threadIdx.x; i < chunk.stop; i += blockDim.x)
        element_1(i, p_at, o_at, sqrt_max_one_rows_over_cols, weight_decay, lr);
}

// The scalar table, a row for each tensor; `narrow` where counts are floats.
extern "C" __global__ void __launch_bounds__(256) scalars(
    int64_t tensors, const void *counts, int64_t narrow, const int64_t *groups,
    const double *hyper, int64_t group_count, const double *rows_at, const double *cols_at,
    double *table)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= tensors)
        return;
    const int64_t group = groups[i];
    const double momentum = hyper[1 * group_count + group];
    const double ns_steps = hyper[3 * group_count + group];
    const double rows = rows_at[i];
    const double cols = cols_at[i];
    const double weight_decay = hyper[2 * group_count + group];
    const double lr = hyper[0 * group_count + group];
    double *const row = table + 6 * i;
    row[0] = momentum;
    row[1] = 1.0 - momentum;  // one_minus_momentum
    row[2] = ns_steps;
    row[3] = sqrt(maximum(1.0, rows / cols));  // sqrt_max_one_rows_over_cols
    row[4] = weight_decay;
    row[5] = lr;
}
