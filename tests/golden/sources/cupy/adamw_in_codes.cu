/* AdamW by the cupy backend: p:f32 g:f32 m:dynamic8/256-signed v:dynamic4/128-unsigned-floor. Printed by rulec.
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

typedef unsigned char uint8_t;
typedef int int32_t;
typedef long long int64_t;
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

// The bits of a float.
__device__ inline uint32_t bits_of(float value)
{
    return __float_as_uint(value);
}

// slope*x + start, rounded once.
__device__ inline float line_at(float slope, float x, float start)
{
    return fmaf(slope, x, start);
}

/* The lower one of a line so far and slope*x + start. */
__device__ inline float lower_line(float so_far, float slope, float x, float start)
{
    const float other = line_at(slope, x, start);
    return other < so_far ? other : so_far;
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

// Neighbouring codes, moved at once.
template <typename T, int count> struct alignas(count) Codes {
    T at[count];
};

// The largest number of this many neighbouring threads, for each of them.
template <int threads> __device__ inline uint32_t over_format(uint32_t most)
{
#pragma unroll
    for (int step = 1; step < (threads < 32 ? threads : 32); step *= 2) {
        const uint32_t other = __shfl_xor_sync(0xffffffff, most, step);
        most = other > most ? other : most;
    }
    if (threads <= 32)
        return most;
    __shared__ uint32_t warps[8];
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = most;
    __syncthreads();
    const unsigned first = threadIdx.x / threads * (threads / 32);
#pragma unroll
    for (int warp = 0; warp < threads / 32; ++warp)
        most = warps[first + warp] > most ? warps[first + warp] : most;
    __syncthreads();
    return most;
}

__device__ const uint32_t table_dynamic8_256_signed[256] = {
    0xbf7e3333, 0xbf7a999a, 0xbf770000, 0xbf736666, 0xbf6fcccd, 0xbf6c3333, 0xbf68999a, 0xbf650000,
    0xbf616666, 0xbf5dcccd, 0xbf5a3333, 0xbf56999a, 0xbf530000, 0xbf4f6666, 0xbf4bcccd, 0xbf483333,
    0xbf44999a, 0xbf410000, 0xbf3d6666, 0xbf39cccd, 0xbf363334, 0xbf32999a, 0xbf2f0000, 0xbf2b6666,
    0xbf27cccd, 0xbf243334, 0xbf20999a, 0xbf1d0000, 0xbf196666, 0xbf15cccd, 0xbf123334, 0xbf0e999a,
    0xbf0b0000, 0xbf076666, 0xbf03cccc, 0xbf003333, 0xbef93332, 0xbef20000, 0xbeeacccc, 0xbee3999a,
    0xbedc6666, 0xbed53333, 0xbece0000, 0xbec6cccc, 0xbebf999a, 0xbeb86666, 0xbeb13333, 0xbeaa0000,
    0xbea2cccc, 0xbe9b999a, 0xbe946666, 0xbe8d3334, 0xbe860000, 0xbe7d9999, 0xbe6f3333, 0xbe60cccd,
    0xbe526666, 0xbe440000, 0xbe35999a, 0xbe273333, 0xbe18cccd, 0xbe0a6666, 0xbdf80000, 0xbddb3334,
    0xbdc9eb85, 0xbdc428f7, 0xbdbe6667, 0xbdb8a3d7, 0xbdb2e148, 0xbdad1eb8, 0xbda75c2a, 0xbda1999a,
    0xbd9bd70a, 0xbd96147b, 0xbd9051eb, 0xbd8a8f5d, 0xbd84cccd, 0xbd7e147b, 0xbd728f5d, 0xbd670a3d,
    0xbd5b851f, 0xbd500000, 0xbd447ae1, 0xbd38f5c3, 0xbd2d70a3, 0xbd21eb85, 0xbd166667, 0xbd0ae148,
    0xbcfeb852, 0xbce7ae15, 0xbcd0a3d7, 0xbcb9999a, 0xbca28f5d, 0xbc8b851f, 0xbc68f5c3, 0xbc3ae148,
    0xbc1f3b64, 0xbc160418, 0xbc0ccccd, 0xbc039581, 0xbbf4bc6a, 0xbbe24dd3, 0xbbcfdf3b, 0xbbbd70a4,
    0xbbab020d, 0xbb989374, 0xbb8624dd, 0xbb676c8a, 0xbb428f5c, 0xbb1db22d, 0xbaf1a9fc, 0xbaa7ef9d,
    0xba7765ff, 0xba59e83e, 0xba3c6a80, 0xba1eecc1, 0xba016f01, 0xb9c7e283, 0xb98ce705, 0xb923d70b,
    0xb8ba1f4b, 0xb88aefb3, 0xb8378034, 0xb7b24206, 0xb70205ff, 0xb65a1a94, 0xb513a3b7, 0x00000000,
    0x3513a3b7, 0x365a1a94, 0x370205ff, 0x37b24206, 0x38378034, 0x388aefb3, 0x38ba1f4b, 0x3923d70b,
    0x398ce705, 0x39c7e283, 0x3a016f01, 0x3a1eecc1, 0x3a3c6a80, 0x3a59e83e, 0x3a7765ff, 0x3aa7ef9d,
    0x3af1a9fc, 0x3b1db22d, 0x3b428f5c, 0x3b676c8a, 0x3b8624dd, 0x3b989374, 0x3bab020d, 0x3bbd70a4,
    0x3bcfdf3b, 0x3be24dd3, 0x3bf4bc6a, 0x3c039581, 0x3c0ccccd, 0x3c160418, 0x3c1f3b64, 0x3c3ae148,
    0x3c68f5c3, 0x3c8b851f, 0x3ca28f5d, 0x3cb9999a, 0x3cd0a3d7, 0x3ce7ae15, 0x3cfeb852, 0x3d0ae148,
    0x3d166667, 0x3d21eb85, 0x3d2d70a3, 0x3d38f5c3, 0x3d447ae1, 0x3d500000, 0x3d5b851f, 0x3d670a3d,
    0x3d728f5d, 0x3d7e147b, 0x3d84cccd, 0x3d8a8f5d, 0x3d9051eb, 0x3d96147b, 0x3d9bd70a, 0x3da1999a,
    0x3da75c2a, 0x3dad1eb8, 0x3db2e148, 0x3db8a3d7, 0x3dbe6667, 0x3dc428f7, 0x3dc9eb85, 0x3ddb3334,
    0x3df80000, 0x3e0a6666, 0x3e18cccd, 0x3e273333, 0x3e35999a, 0x3e440000, 0x3e526666, 0x3e60cccd,
    0x3e6f3333, 0x3e7d9999, 0x3e860000, 0x3e8d3334, 0x3e946666, 0x3e9b999a, 0x3ea2cccc, 0x3eaa0000,
    0x3eb13333, 0x3eb86666, 0x3ebf999a, 0x3ec6cccc, 0x3ece0000, 0x3ed53333, 0x3edc6666, 0x3ee3999a,
    0x3eeacccc, 0x3ef20000, 0x3ef93332, 0x3f003333, 0x3f03cccc, 0x3f076666, 0x3f0b0000, 0x3f0e999a,
    0x3f123334, 0x3f15cccd, 0x3f196666, 0x3f1d0000, 0x3f20999a, 0x3f243334, 0x3f27cccd, 0x3f2b6666,
    0x3f2f0000, 0x3f32999a, 0x3f363334, 0x3f39cccd, 0x3f3d6666, 0x3f410000, 0x3f44999a, 0x3f483333,
    0x3f4bcccd, 0x3f4f6666, 0x3f530000, 0x3f56999a, 0x3f5a3333, 0x3f5dcccd, 0x3f616666, 0x3f650000,
    0x3f68999a, 0x3f6c3333, 0x3f6fcccd, 0x3f736666, 0x3f770000, 0x3f7a999a, 0x3f7e3333, 0x3f800000
};

// The values of the thread's count elements from element i on. Whole says that the codes are moved at once.
template <int wide> __device__ inline void decode_dynamic8_256_signed(
    const uint8_t *codes, const float *scales, int64_t i, int count, bool whole, float (&values)[wide])
{
    const float unit = count > 0 ? scales[i / 256] * 1.0f : 0.0f;
    Codes<uint8_t, wide> code;
    if (whole) {
        code = *reinterpret_cast<const Codes<uint8_t, wide> *>(codes + i);
    } else {
#pragma unroll
        for (int e = 0; e < wide; ++e)
            code.at[e] = e < count ? codes[i + e] : 0;
    }
#pragma unroll
    for (int e = 0; e < wide; ++e)
        values[e] = float_of(table_dynamic8_256_signed[(uint8_t)code.at[e]]) * unit;
}

__device__ const float below_dynamic8_256_signed[256] = {
    -3.4028235e38f, -0.9859375f, -0.971875f, -0.9578125f, -0.94375f, -0.9296875f, -0.915625f, -0.9015625f,
    -0.8875f, -0.8734375f, -0.859375f, -0.8453125f, -0.83125f, -0.8171875f, -0.803125f, -0.7890625f,
    -0.775f, -0.7609375f, -0.746875f, -0.7328125f, -0.71875f, -0.70468754f, -0.690625f, -0.6765625f,
    -0.6625f, -0.6484375f, -0.63437504f, -0.6203125f, -0.60625f, -0.5921875f, -0.578125f, -0.56406254f,
    -0.55f, -0.5359375f, -0.52187496f, -0.5078125f, -0.49374998f, -0.47968748f, -0.465625f, -0.4515625f,
    -0.4375f, -0.42343748f, -0.409375f, -0.3953125f, -0.38125f, -0.3671875f, -0.35312498f, -0.3390625f,
    -0.325f, -0.3109375f, -0.296875f, -0.2828125f, -0.26875f, -0.2546875f, -0.240625f, -0.2265625f,
    -0.2125f, -0.1984375f, -0.184375f, -0.1703125f, -0.15625f, -0.1421875f, -0.128125f, -0.1140625f,
    -0.1028125f, -0.097187504f, -0.09437501f, -0.0915625f, -0.088750005f, -0.0859375f, -0.083125f,
    -0.080312505f, -0.0775f, -0.074687496f, -0.071875f, -0.0690625f, -0.066250004f, -0.0634375f,
    -0.060625f, -0.0578125f, -0.055f, -0.052187502f, -0.049374998f, -0.0465625f, -0.04375f, -0.0409375f,
    -0.038125f, -0.035312504f, -0.0325f, -0.029687501f, -0.026875f, -0.0240625f, -0.021250002f,
    -0.018437501f, -0.015625f, -0.012812501f, -0.0105625f, -0.0094375f, -0.008874999f, -0.0083125f,
    -0.00775f, -0.0071874997f, -0.006625f, -0.0060625f, -0.0055f, -0.0049374998f, -0.0043749996f,
    -0.0038124998f, -0.0032499998f, -0.0026874999f, -0.002125f, -0.0015624999f, -0.0011125f, -0.0008875f,
    -0.000775f, -0.00066250004f, -0.00055000006f, -0.0004375f, -0.00032500003f, -0.00021250002f,
    -0.0001225f, -7.75e-05f, -5.5e-05f, -3.25e-05f, -1.4499999e-05f, -5.5e-06f, -1.9000001e-06f,
    -2.7500002e-07f, 2.7500002e-07f, 1.9000001e-06f, 5.5e-06f, 1.4499999e-05f, 3.25e-05f, 5.5e-05f,
    7.75e-05f, 0.0001225f, 0.00021250002f, 0.00032500003f, 0.0004375f, 0.00055000006f, 0.00066250004f,
    0.000775f, 0.0008875f, 0.0011125f, 0.0015624999f, 0.002125f, 0.0026874999f, 0.0032499998f,
    0.0038124998f, 0.0043749996f, 0.0049374998f, 0.0055f, 0.0060625f, 0.006625f, 0.0071874997f, 0.00775f,
    0.0083125f, 0.008874999f, 0.0094375f, 0.0105625f, 0.012812501f, 0.015625f, 0.018437501f, 0.021250002f,
    0.0240625f, 0.026875f, 0.029687501f, 0.0325f, 0.035312504f, 0.038125f, 0.0409375f, 0.04375f,
    0.0465625f, 0.049374998f, 0.052187502f, 0.055f, 0.0578125f, 0.060625f, 0.0634375f, 0.066250004f,
    0.0690625f, 0.071875f, 0.074687496f, 0.0775f, 0.080312505f, 0.083125f, 0.0859375f, 0.088750005f,
    0.0915625f, 0.09437501f, 0.097187504f, 0.1028125f, 0.1140625f, 0.128125f, 0.1421875f, 0.15625f,
    0.1703125f, 0.184375f, 0.1984375f, 0.2125f, 0.2265625f, 0.240625f, 0.2546875f, 0.26875f, 0.2828125f,
    0.296875f, 0.3109375f, 0.325f, 0.3390625f, 0.35312498f, 0.3671875f, 0.38125f, 0.3953125f, 0.409375f,
    0.42343748f, 0.4375f, 0.4515625f, 0.465625f, 0.47968748f, 0.49374998f, 0.5078125f, 0.52187496f,
    0.5359375f, 0.55f, 0.56406254f, 0.578125f, 0.5921875f, 0.60625f, 0.6203125f, 0.63437504f, 0.6484375f,
    0.6625f, 0.6765625f, 0.690625f, 0.70468754f, 0.71875f, 0.7328125f, 0.746875f, 0.7609375f, 0.775f,
    0.7890625f, 0.803125f, 0.8171875f, 0.83125f, 0.8453125f, 0.859375f, 0.8734375f, 0.8875f, 0.9015625f,
    0.915625f, 0.9296875f, 0.94375f, 0.9578125f, 0.971875f, 0.9859375f, 0.9964844f
};

__device__ inline uint32_t code_dynamic8_256_signed(float x, float inverse)
{
    const float y = x * inverse;
    const float size = fabsf(y);
    float place = line_at(1.1111111e+06f, size, -0.11111111f);
    place = lower_line(place, 222222.22f, size, 0.7777778f);
    place = lower_line(place, 44444.445f, size, 2.5555556f);
    place = lower_line(place, 8888.889f, size, 6.111111f);
    place = lower_line(place, 1777.7778f, size, 13.222222f);
    place = lower_line(place, 355.55554f, size, 27.444445f);
    place = lower_line(place, 71.111115f, size, 55.88889f);
    const int32_t step = (int32_t)bits_of(place + 12582912.0f) - 0x4b400000;
    const int32_t index = (step ^ (int32_t)bits_of(y) >> 31) + 128;
    const uint32_t code = (uint32_t)(index - (y > below_dynamic8_256_signed[index] ? 0 : 1));
    return code;
}

// Stores the thread's count elements from element i on. All threads of the block call it, for they share scales.
template <int wide> __device__ inline void encode_dynamic8_256_signed(
    uint8_t *codes, float *scales, int64_t i, int count, bool whole, const float (&values)[wide])
{
    uint32_t positive = 0, negative = 0;
#pragma unroll
    for (int e = 0; e < wide; ++e) {
        const uint32_t bits = e < count ? bits_of(values[e]) : 0, size = bits & 0x7fffffff;
        positive = bits >> 31 || size < positive ? positive : size;
        negative = bits >> 31 && size > negative ? size : negative;
    }
    positive = over_format<256 / wide>(positive);
    negative = over_format<256 / wide>(negative);
    const bool finite = positive < 0x7f800000 && negative < 0x7f800000;
    float scale = negative >= positive ? float_of(negative) / 0.99296874f : float_of(positive);
    scale = scale < 1.1754944e-38f ? 1.1754944e-38f : scale > 3.4028235e38f ? 3.4028235e38f : scale;
    const float inverse = finite ? 1.0f / scale : 0.0f;
    if (count > 0 && i % 256 == 0)
        scales[i / 256] = finite ? scale : NAN;
    Codes<uint8_t, wide> code;
#pragma unroll
    for (int e = 0; e < wide; ++e)
        code.at[e] = (uint8_t)(finite && e < count ? code_dynamic8_256_signed(values[e], inverse) : 0);
    if (whole) {
        *reinterpret_cast<Codes<uint8_t, wide> *>(codes + i) = code;
    } else {
#pragma unroll
        for (int e = 0; e < wide; ++e)
            if (e < count)
                codes[i + e] = code.at[e];
    }
}

// The values of the thread's count elements from element i on. Whole says that the codes are moved at once.
template <int wide> __device__ inline void decode_dynamic4_128_unsigned_floor(
    const uint8_t *codes, const float *scales, int64_t i, int count, bool whole, float (&values)[wide])
{
    const float unit = count > 0 ? scales[i / 128] * 1.0f : 0.0f;
    Codes<uint8_t, wide / 2> code;
    if (whole) {
        code = *reinterpret_cast<const Codes<uint8_t, wide / 2> *>(codes + i / 2);
    } else {
#pragma unroll
        for (int e = 0; e < wide / 2; ++e)
            code.at[e] = e * 2 < count ? codes[i / 2 + e] : 0;
    }
#pragma unroll
    for (int e = 0; e < wide; ++e)
        values[e] = (float)((code.at[e / 2] >> (e % 2 ? 0 : 4) & 15) + 1) * 0.0625f * unit;
}

__device__ inline uint32_t code_dynamic4_128_unsigned_floor(float x, float inverse)
{
    const float y = (x > 0 ? x : 0) * inverse;
    const float size = y;
    float place = line_at(16.0f, size, -1.6f);
    place = place > 0 ? place : 0;
    const int32_t step = (int32_t)bits_of(place + 12582912.0f) - 0x4b400000;
    const int32_t index = step + 1;
    const uint32_t code = (uint32_t)(index - (y > (float)index * 0.0625f + 0.03125f ? 0 : 1));
    return code;
}

// Stores the thread's count elements from element i on. All threads of the block call it, for they share scales.
template <int wide> __device__ inline void encode_dynamic4_128_unsigned_floor(
    uint8_t *codes, float *scales, int64_t i, int count, bool whole, const float (&values)[wide])
{
    uint32_t most = 0;
#pragma unroll
    for (int e = 0; e < wide; ++e) {
        const uint32_t bits = e < count ? bits_of(values[e]) : 0, size = bits >> 31 && bits < 0xff800000 ? 0 : bits & 0x7fffffff;
        most = size > most ? size : most;
    }
    most = over_format<128 / wide>(most);
    const bool finite = most < 0x7f800000;
    float scale = float_of(most);
    scale = scale < 1.1754944e-38f ? 1.1754944e-38f : scale > 3.4028235e38f ? 3.4028235e38f : scale;
    const float inverse = finite ? 1.0f / scale : 0.0f;
    if (count > 0 && i % 128 == 0)
        scales[i / 128] = finite ? scale : NAN;
    Codes<uint8_t, wide / 2> code;
#pragma unroll
    for (int e = 0; e < wide; e += 2) {
        const uint32_t upper = code_dynamic4_128_unsigned_floor(finite && e < count ? values[e] : 0.0f, inverse);
        const uint32_t lower = finite && e + 1 < count ? code_dynamic4_128_unsigned_floor(values[e + 1], inverse) : 0;
        code.at[e / 2] = (uint8_t)(finite ? upper << 4 | lower : 0);
    }
    if (whole) {
        *reinterpret_cast<Codes<uint8_t, wide / 2> *>(codes + i / 2) = code;
    } else {
#pragma unroll
        for (int e = 0; e < wide / 2; ++e)
            if (e * 2 < count)
                codes[i / 2 + e] = code.at[e];
    }
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
    bound += 5 * chunk.tensor;  // addresses of the tensor's arrays
    per_call += 3 * chunk.tensor;  // what comes with each call
    const int64_t place = per_call[0];  // its row of the table
    const bool wide = per_call[1];  // whether all its addresses are multiples of 16
    if (stays && stays[place])
        return;
    float *const p_at = at<float>(bound[0]);
    const float *const g_at = at<const float>(per_call[2]);
    uint8_t *const m_codes = at<uint8_t>(bound[1]);
    float *const m_scale = at<float>(bound[3]);
    uint8_t *const v_codes = at<uint8_t>(bound[2]);
    float *const v_scale = at<float>(bound[4]);
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
    // The threads of a format's block find its scale together, so all threads take every part of the chunk.
#pragma unroll 1
    for (int64_t part = chunk.start; part < chunk.stop; part += 4 * blockDim.x) {
        const int64_t i = part + 4 * threadIdx.x;
        const int count = i + 4 <= chunk.stop ? 4 : i < chunk.stop ? (int)(chunk.stop - i) : 0;
        const bool whole = wide && count == 4;
        Pack<float, 4> p;
        Pack<float, 4> g;
        Pack<float, 4> m;
        Pack<float, 4> v;
        if (whole) {
            p = pack<4>(p_at + i);
            g = pack<4>(g_at + i);
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (e < count) {
                    p.at[e] = p_at[i + e];
                    g.at[e] = g_at[i + e];
                }
            }
        }
        decode_dynamic8_256_signed(m_codes, m_scale, i, count, whole, m.at);
        decode_dynamic4_128_unsigned_floor(v_codes, v_scale, i, count, whole, v.at);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (e < count) {
                element(
                    e, p.at, g.at, m.at, v.at,
                    beta1, one_minus_beta1, beta2, one_minus_beta2, one_minus_beta1_t, sqrt_one_minus_beta2_t,
                    eps, weight_decay, lr, one_minus_beta1_t_inverse, sqrt_one_minus_beta2_t_inverse, unscale);
            }
        }
        if (whole) {
            pack<4>(p_at + i) = p;
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (e < count)
                    p_at[i + e] = p.at[e];
            }
        }
        encode_dynamic8_256_signed(m_codes, m_scale, i, count, whole, m.at);
        encode_dynamic4_128_unsigned_floor(v_codes, v_scale, i, count, whole, v.at);
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
