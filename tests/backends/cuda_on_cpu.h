// What CUDA C has beyond C++, on one thread of a CPU: enough to run the printed kernels as they are.
//
// Included before a kernel's own text, and before nothing else: no header of the system is used, for kernels define
// the fixed-width integers themselves. cuda_on_cpu.cpp runs the threads of a block.
#pragma once

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct cuda_index {
    unsigned x, y, z;
};

extern "C" {
extern cuda_index threadIdx, blockIdx, blockDim, gridDim;

// Waits for all threads of the block.
void cuda_sync_threads();
// Waits for all lanes of the warp; what each of them gave, `bytes` apart, until the call after the next.
const void *cuda_sync_warp(const void *value, unsigned long bytes);

float cbrtf(float), expf(float), logf(float), powf(float, float), tanhf(float), erff(float), floorf(float);
float log1pf(float), expm1f(float), hypotf(float, float);
float fmodf(float, float), copysignf(float, float), sqrtf(float), fabsf(float);
double cbrt(double), exp(double), log(double), pow(double, double), tanh(double), erf(double), floor(double);
double log1p(double), expm1(double), hypot(double, double);
double sin(double), cos(double);
double fmod(double, double), copysign(double, double), sqrt(double), fabs(double);
float fmaf(float, float, float);
double fma(double, double, double);
}

#define __syncthreads cuda_sync_threads
inline void *__cvta_global_to_generic(unsigned long address) { return (void *)address; }

inline void __syncwarp()
{
    const char nothing = 0;
    cuda_sync_warp(&nothing, 1);
}

template <typename T> inline T cuda_lane(T value, unsigned from)
{
    const T *lanes = static_cast<const T *>(cuda_sync_warp(&value, sizeof(T)));
    return from < 32 ? lanes[from] : value;
}

template <typename T> inline T __shfl_xor_sync(unsigned, T value, int mask)
{
    return cuda_lane(value, threadIdx.x % 32 ^ mask);
}

template <typename T> inline T __shfl_down_sync(unsigned, T value, unsigned delta)
{
    return cuda_lane(value, threadIdx.x % 32 + delta);
}

inline int __popcll(unsigned long long word) { return __builtin_popcountll(word); }

template <typename T> inline bool isfinite(T x) { return __builtin_isfinite(x); }

template <typename To, typename From> inline To cuda_bits(From value)
{
    static_assert(sizeof(To) == sizeof(From));
    To found;
    __builtin_memcpy(&found, &value, sizeof(To));
    return found;
}

inline float __int_as_float(int bits) { return cuda_bits<float>(bits); }
inline float __uint_as_float(unsigned bits) { return cuda_bits<float>(bits); }
inline unsigned __float_as_uint(float value) { return cuda_bits<unsigned>(value); }

inline float cuda_from_half(unsigned half)
{
    const unsigned sign = (half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31)
        return cuda_bits<float>(sign | 0x7f800000 | fraction << 13);
    const float size = exponent ? cuda_bits<float>((exponent + 112) << 23 | fraction << 13) : fraction * 0x1p-24f;
    return cuda_bits<float>(cuda_bits<unsigned>(size) | sign);
}

// A float rounded to a format of `fraction` bits behind the point, whose least exponent is `least`.
inline double cuda_rounded(float value, int fraction, int least)
{
    const int exponent = (int)(cuda_bits<unsigned>(value) >> 23 & 255) - 127;
    const double unit = __builtin_ldexp(1.0, (exponent < least ? least : exponent) - fraction);
    return __builtin_rint(value / unit) * unit;
}

inline unsigned short cuda_to_half(float value)
{
    if (value != value)
        return 0x7fff;
    const unsigned sign = cuda_bits<unsigned>(value) >> 16 & 0x8000;
    const double size = __builtin_fabs(cuda_rounded(value, 10, -14));
    if (size >= 65536)
        return sign | 0x7c00;
    if (size < 0x1p-14)
        return sign | (unsigned)(size * 0x1p24);
    const unsigned bits = cuda_bits<unsigned>((float)size);
    return sign | ((bits >> 13) - (112 << 10));
}

inline unsigned short cuda_to_brain(float value)
{
    if (value != value)
        return 0x7fff;
    if (cuda_bits<unsigned>(value) << 1 == 0xff000000)
        return cuda_bits<unsigned>(value) >> 16;
    const double size = __builtin_fabs(cuda_rounded(value, 7, -126));
    return (cuda_bits<unsigned>(value) >> 16 & 0x8000) | cuda_bits<unsigned>((float)size) >> 16;
}

// The instructions that printed kernels spell in PTX: each gives `to` from `from`.
constexpr bool cuda_same(const char *a, const char *b)
{
    while (*b)
        if (*a++ != *b++)
            return false;
    return true;
}

template <typename From> inline double cuda_instruction(const char *text, From from)
{
    if (cuda_same(text, "\"cvt.f32.f16 "))
        return cuda_from_half((unsigned)from);
    if (cuda_same(text, "\"cvt.rn.f16.f32 "))
        return cuda_to_half((float)from);
    if (cuda_same(text, "\"cvt.rn.bf16.f32 "))
        return cuda_to_brain((float)from);
    __builtin_trap();
}

#define asm(...) to = (decltype(to))cuda_instruction(#__VA_ARGS__, from)

// A function that calls a kernel with arguments given by their addresses.
template <int... i> struct cuda_list {};

template <typename... A, int... i> inline void cuda_call(void (*kernel)(A...), void **arguments, cuda_list<i...>)
{
    kernel(*static_cast<A *>(arguments[i])...);
}

template <typename... A> inline void cuda_call(void (*kernel)(A...), void **arguments)
{
    cuda_call(kernel, arguments, cuda_list<__integer_pack(sizeof...(A))...>());
}

#define CUDA_KERNEL(name)                           \
    extern "C" void cuda_run_##name(void **arguments) \
    {                                               \
        cuda_call(name, arguments);                 \
    }
