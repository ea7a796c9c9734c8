/* C99 for p:f32 g:f32 m:dynamic8/256-signed v:dynamic4/128-unsigned-floor. Printed by rulec.
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

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

/* A loop can be vectors only where the calls in it disappear. */
#if defined(__GNUC__)
#define RULEC_FUNCTION static inline __attribute__((always_inline))
#else
#define RULEC_FUNCTION static inline
#endif

/* Chunks that lie one after the other. */
typedef struct {
    int64_t first, last;
} Span;

/* A range of elements of a tensor. */
typedef struct {
    int64_t tensor, first, last;
} Chunk;

/* The tensors that one call is for, cut into chunks, and spans of chunks for threads to take. */
typedef struct {
    int64_t threads, tensors, spans;
    const Span *span;
    const Chunk *chunk;
    const int64_t *row_of;  // for each tensor its row of the table
    const double *table;    // 9 numbers in a row
    // For each tensor the address of:
    void *const *p, *const *g, *const *m, *const *v, *const *m_scale, *const *v_scale;
} Bucket;

/* The float that has these bits. */
RULEC_FUNCTION float float_of(uint32_t bits)
{
    const union { uint32_t bits; float value; } both = {bits};
    return both.value;
}

/* The bits of a float. */
RULEC_FUNCTION uint32_t bits_of(float value)
{
    const union { float value; uint32_t bits; } both = {value};
    return both.bits;
}

/* Asks for the memory a kilobyte behind some bytes, so that it comes while these are worked on; there may be none. */
RULEC_FUNCTION void prefetch(const void *address, int64_t bytes)
{
#if defined(__GNUC__)
    for (int64_t i = 1024; i < 1024 + bytes; i += 64)
        __builtin_prefetch((const void *)((uintptr_t)address + (uintptr_t)i));
#endif
}

/* slope*x + start, rounded once or twice, whichever is faster: for results that may be either. */
RULEC_FUNCTION float line_at(float slope, float x, float start)
{
#ifdef FP_FAST_FMAF
    return fmaf(slope, x, start);
#else
    return slope * x + start;
#endif
}

/* The lower one of a line so far and slope*x + start. */
RULEC_FUNCTION float lower_line(float so_far, float slope, float x, float start)
{
    const float other = line_at(slope, x, start);
    return other < so_far ? other : so_far;
}

static const float table_dynamic8_256_signed[256] = {
    -0.99296874f, -0.9789063f, -0.96484375f, -0.9507812f, -0.93671876f, -0.92265624f, -0.9085938f,
    -0.89453125f, -0.8804687f, -0.86640626f, -0.85234374f, -0.8382813f, -0.82421875f, -0.8101562f,
    -0.79609376f, -0.78203124f, -0.7679688f, -0.75390625f, -0.7398437f, -0.72578126f, -0.7117188f,
    -0.6976563f, -0.68359375f, -0.6695312f, -0.65546876f, -0.6414063f, -0.6273438f, -0.61328125f,
    -0.5992187f, -0.58515626f, -0.5710938f, -0.5570313f, -0.54296875f, -0.5289062f, -0.5148437f,
    -0.50078124f, -0.4867187f, -0.47265625f, -0.45859373f, -0.44453126f, -0.43046874f, -0.41640624f,
    -0.40234375f, -0.38828123f, -0.37421876f, -0.36015624f, -0.34609374f, -0.33203125f, -0.31796873f,
    -0.30390626f, -0.28984374f, -0.27578127f, -0.26171875f, -0.24765624f, -0.23359375f, -0.21953125f,
    -0.20546874f, -0.19140625f, -0.17734376f, -0.16328125f, -0.14921875f, -0.13515624f, -0.12109375f,
    -0.107031256f, -0.09859375f, -0.09578126f, -0.092968754f, -0.09015625f, -0.08734375f, -0.08453125f,
    -0.08171876f, -0.07890625f, -0.07609375f, -0.07328125f, -0.070468746f, -0.067656256f, -0.06484375f,
    -0.06203125f, -0.059218753f, -0.05640625f, -0.05359375f, -0.05078125f, -0.04796875f, -0.04515625f,
    -0.042343747f, -0.03953125f, -0.036718752f, -0.03390625f, -0.03109375f, -0.028281251f, -0.02546875f,
    -0.02265625f, -0.019843752f, -0.01703125f, -0.01421875f, -0.01140625f, -0.00971875f, -0.009156249f,
    -0.00859375f, -0.00803125f, -0.00746875f, -0.00690625f, -0.00634375f, -0.00578125f, -0.0052187503f,
    -0.0046562497f, -0.00409375f, -0.0035312497f, -0.00296875f, -0.00240625f, -0.00184375f,
    -0.0012812499f, -0.0009437501f, -0.00083125f, -0.00071875006f, -0.0006062501f, -0.00049375003f,
    -0.00038125002f, -0.00026875004f, -0.00015625001f, -8.875e-05f, -6.625e-05f, -4.375e-05f,
    -2.1249998e-05f, -7.75e-06f, -3.2500002e-06f, -5.5000004e-07f, 0.0f, 5.5000004e-07f, 3.2500002e-06f,
    7.75e-06f, 2.1249998e-05f, 4.375e-05f, 6.625e-05f, 8.875e-05f, 0.00015625001f, 0.00026875004f,
    0.00038125002f, 0.00049375003f, 0.0006062501f, 0.00071875006f, 0.00083125f, 0.0009437501f,
    0.0012812499f, 0.00184375f, 0.00240625f, 0.00296875f, 0.0035312497f, 0.00409375f, 0.0046562497f,
    0.0052187503f, 0.00578125f, 0.00634375f, 0.00690625f, 0.00746875f, 0.00803125f, 0.00859375f,
    0.009156249f, 0.00971875f, 0.01140625f, 0.01421875f, 0.01703125f, 0.019843752f, 0.02265625f,
    0.02546875f, 0.028281251f, 0.03109375f, 0.03390625f, 0.036718752f, 0.03953125f, 0.042343747f,
    0.04515625f, 0.04796875f, 0.05078125f, 0.05359375f, 0.05640625f, 0.059218753f, 0.06203125f,
    0.06484375f, 0.067656256f, 0.070468746f, 0.07328125f, 0.07609375f, 0.07890625f, 0.08171876f,
    0.08453125f, 0.08734375f, 0.09015625f, 0.092968754f, 0.09578126f, 0.09859375f, 0.107031256f,
    0.12109375f, 0.13515624f, 0.14921875f, 0.16328125f, 0.17734376f, 0.19140625f, 0.20546874f,
    0.21953125f, 0.23359375f, 0.24765624f, 0.26171875f, 0.27578127f, 0.28984374f, 0.30390626f,
    0.31796873f, 0.33203125f, 0.34609374f, 0.36015624f, 0.37421876f, 0.38828123f, 0.40234375f,
    0.41640624f, 0.43046874f, 0.44453126f, 0.45859373f, 0.47265625f, 0.4867187f, 0.50078124f, 0.5148437f,
    0.5289062f, 0.54296875f, 0.5570313f, 0.5710938f, 0.58515626f, 0.5992187f, 0.61328125f, 0.6273438f,
    0.6414063f, 0.65546876f, 0.6695312f, 0.68359375f, 0.6976563f, 0.7117188f, 0.72578126f, 0.7398437f,
    0.75390625f, 0.7679688f, 0.78203124f, 0.79609376f, 0.8101562f, 0.82421875f, 0.8382813f, 0.85234374f,
    0.86640626f, 0.8804687f, 0.89453125f, 0.9085938f, 0.92265624f, 0.93671876f, 0.9507812f, 0.96484375f,
    0.9789063f, 0.99296874f, 1.0f
};

static const float below_dynamic8_256_signed[256] = {
    -INFINITY, -0.9859375f, -0.971875f, -0.9578125f, -0.94375f, -0.9296875f, -0.915625f, -0.9015625f,
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

/* The values of count elements of one block, where `unit` is the value of 1. */
RULEC_FUNCTION void values_dynamic8_256_signed(const uint8_t *codes, float unit, int64_t count, float *values)
{
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
        values[i] = table_dynamic8_256_signed[(uint8_t)codes[i]] * unit;
}

/* The values of count elements: of some of a block, or of whole blocks and perhaps a short last one. */
RULEC_FUNCTION void decode_dynamic8_256_signed(const uint8_t *codes, const float *scales, int64_t count, float *values)
{
    for (int64_t first = 0; first < count; first += 256) {
        const int64_t some = count - first < 256 ? count - first : 256;
        values_dynamic8_256_signed(codes + first, scales[first / 256] * 1.0f, some, values + first);
    }
}

RULEC_FUNCTION uint32_t code_dynamic8_256_signed(float x, float inverse)
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

/* The codes and the scale of a block of this many elements. */
RULEC_FUNCTION void codes_dynamic8_256_signed(uint8_t *codes, float *scales, int64_t count, const float *values)
{
    int32_t positive = 0;
    uint32_t bits = 0;
#pragma omp simd reduction(max : positive, bits)
    for (int64_t i = 0; i < count; i++) {
        const uint32_t each = bits_of(values[i]);
        positive = (int32_t)each > positive ? (int32_t)each : positive;
        bits = each > bits ? each : bits;
    }
    const int32_t negative = bits >> 31 ? (int32_t)(bits & 0x7fffffff) : 0;
    const bool finite = positive < 0x7f800000 && negative < 0x7f800000;
    const float most = negative >= positive ? float_of((uint32_t)negative) / 0.99296874f : float_of((uint32_t)positive);
    if (!finite) {
        for (int64_t i = 0; i < count; i++)
            codes[i] = 0;
        scales[0] = NAN;
        return;
    }
    const float scale = most < 1.1754944e-38f ? 1.1754944e-38f : most > 3.4028235e38f ? 3.4028235e38f : most;
    const float inverse = 1.0f / scale;
    scales[0] = scale;
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
        codes[i] = (uint8_t)code_dynamic8_256_signed(values[i], inverse);
}

/* The codes and scales of count elements, of whole blocks and perhaps a short last one. */
RULEC_FUNCTION void encode_dynamic8_256_signed(uint8_t *codes, float *scales, int64_t count, const float *values)
{
    int64_t first = 0;
    for (; first + 256 <= count; first += 256)
        codes_dynamic8_256_signed(codes + first, scales + first / 256, 256, values + first);
    if (first < count)
        codes_dynamic8_256_signed(codes + first, scales + first / 256, count - first, values + first);
}

/* The values of count elements of one block, where `unit` is the value of 1. */
RULEC_FUNCTION void values_dynamic4_128_unsigned_floor(const uint8_t *codes, float unit, int64_t count, float *values)
{
#pragma omp simd
    for (int64_t i = 0; i < count / 2; i++) {
        values[2 * i] = (float)((codes[i] >> 4) + 1) * 0.0625f * unit;
        values[2 * i + 1] = (float)((codes[i] & 15) + 1) * 0.0625f * unit;
    }
    if (count % 2 != 0) {
        const int64_t i = count / 2;
        values[count - 1] = (float)((codes[i] >> 4) + 1) * 0.0625f * unit;
    }
}

/* The values of count elements: of some of a block, or of whole blocks and perhaps a short last one. */
RULEC_FUNCTION void decode_dynamic4_128_unsigned_floor(const uint8_t *codes, const float *scales, int64_t count, float *values)
{
    for (int64_t first = 0; first < count; first += 128) {
        const int64_t some = count - first < 128 ? count - first : 128;
        values_dynamic4_128_unsigned_floor(codes + first / 2, scales[first / 128] * 1.0f, some, values + first);
    }
}

RULEC_FUNCTION uint32_t code_dynamic4_128_unsigned_floor(float x, float inverse)
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

/* The codes and the scale of a block of this many elements. */
RULEC_FUNCTION void codes_dynamic4_128_unsigned_floor(uint8_t *codes, float *scales, int64_t count, const float *values)
{
    int32_t positive = 0;
    uint32_t bits = 0;
#pragma omp simd reduction(max : positive, bits)
    for (int64_t i = 0; i < count; i++) {
        const uint32_t each = bits_of(values[i]);
        positive = (int32_t)each > positive ? (int32_t)each : positive;
        bits = each > bits ? each : bits;
    }
    const int32_t negative = bits >> 31 ? (int32_t)(bits & 0x7fffffff) : 0;
    const bool finite = positive < 0x7f800000 && negative < 0x7f800000;
    const float most = float_of((uint32_t)positive);
    if (!finite) {
        for (int64_t i = 0; i < (count + 1) / 2; i++)
            codes[i] = 0;
        scales[0] = NAN;
        return;
    }
    const float scale = most < 1.1754944e-38f ? 1.1754944e-38f : most > 3.4028235e38f ? 3.4028235e38f : most;
    const float inverse = 1.0f / scale;
    scales[0] = scale;
    uint32_t each[128 + 1];
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
        each[i] = code_dynamic4_128_unsigned_floor(values[i], inverse);
    each[count] = 0;
#pragma omp simd
    for (int64_t i = 0; i < (count + 1) / 2; i++)
        codes[i] = (uint8_t)(each[2 * i] << 4 | each[2 * i + 1]);
}

/* The codes and scales of count elements, of whole blocks and perhaps a short last one. */
RULEC_FUNCTION void encode_dynamic4_128_unsigned_floor(uint8_t *codes, float *scales, int64_t count, const float *values)
{
    int64_t first = 0;
    for (; first + 128 <= count; first += 128)
        codes_dynamic4_128_unsigned_floor(codes + first / 2, scales + first / 128, 128, values + first);
    if (first < count)
        codes_dynamic4_128_unsigned_floor(codes + first / 2, scales + first / 128, count - first, values + first);
}

/* One element: stores m, v, p. */
RULEC_FUNCTION void step_element(
    int64_t i, float *p_at, const float *g_at, float *m_at, float *v_at,
    float beta1, float one_minus_beta1, float beta2, float one_minus_beta2,
    float one_minus_beta1_t, float sqrt_one_minus_beta2_t, float eps, float weight_decay,
    float lr)
{
    const float p = p_at[i];
    const float g = g_at[i];
    const float m = m_at[i];
    const float v = v_at[i];
    const float m_new = beta1 * m + one_minus_beta1 * g;  // beta1*m + (1 - beta1)*g
    const float v_new = beta2 * v + one_minus_beta2 * g * g;  // beta2*v + (1 - beta2)*g*g
    const float m_hat = m_new / one_minus_beta1_t;  // m_new/(1 - beta1**t)
    const float sigma = sqrtf(v_new) / sqrt_one_minus_beta2_t;  // sqrt(v_new)/sqrt(1 - beta2**t)
    const float adam_direction = m_hat / (sigma + eps);
    const float decay_direction = weight_decay * p;
    const float direction = adam_direction + decay_direction;
    const float p_new = p - lr * direction;
    m_at[i] = m_new;
    v_at[i] = v_new;
    p_at[i] = p_new;
}

/* One chunk. The buffers of a tensor do not overlap. */
static void step_chunk(const Bucket *bucket, int64_t chunk)
{
    const Chunk *at = &bucket->chunk[chunk];
    const double *row = bucket->table + 9 * bucket->row_of[at->tensor];
    const float beta1 = (float)row[0];
    const float one_minus_beta1 = (float)row[1];  // 1 - beta1
    const float beta2 = (float)row[2];
    const float one_minus_beta2 = (float)row[3];  // 1 - beta2
    const float one_minus_beta1_t = (float)row[4];  // 1 - beta1**t
    const float sqrt_one_minus_beta2_t = (float)row[5];  // sqrt(1 - beta2**t)
    const float eps = (float)row[6];
    const float weight_decay = (float)row[7];
    const float lr = (float)row[8];

    for (int64_t part = at->first; part < at->last; part += 1024) {
        const int64_t count = at->last - part < 1024 ? at->last - part : 1024;
        float *p_at = (float *)bucket->p[at->tensor] + part;
        const float *g_at = (const float *)bucket->g[at->tensor] + part;
        uint8_t *m_codes = (uint8_t *)bucket->m[at->tensor] + part;
        float *m_scale = (float *)bucket->m_scale[at->tensor] + part / 256;
        float m_at[1024];
        uint8_t *v_codes = (uint8_t *)bucket->v[at->tensor] + part / 2;
        float *v_scale = (float *)bucket->v_scale[at->tensor] + part / 128;
        float v_at[1024];
        for (int64_t first = 0; first < count; first += 64) {
            const int64_t last = count - first < 64 ? count : first + 64;
            decode_dynamic8_256_signed(m_codes + first, m_scale + first / 256, last - first, m_at + first);
            decode_dynamic4_128_unsigned_floor(v_codes + first / 2, v_scale + first / 128, last - first, v_at + first);
            prefetch(p_at + first, (last - first) * (int64_t)sizeof *p_at);
            prefetch(g_at + first, (last - first) * (int64_t)sizeof *g_at);
#pragma omp simd
            for (int64_t i = first; i < last; i++) {
                step_element(
                    i, p_at, g_at, m_at, v_at,
                    beta1, one_minus_beta1, beta2, one_minus_beta2, one_minus_beta1_t, sqrt_one_minus_beta2_t,
                    eps, weight_decay, lr);
            }
        }
        encode_dynamic8_256_signed(m_codes, m_scale, count, m_at);
        encode_dynamic4_128_unsigned_floor(v_codes, v_scale, count, v_at);
    }
}

/* All chunks of a bucket. */
void step(const Bucket *bucket)
{
#pragma omp parallel for schedule(dynamic) num_threads((int)bucket->threads) if (bucket->threads > 1)
    for (int64_t s = 0; s < bucket->spans; s++) {
        for (int64_t chunk = bucket->span[s].first; chunk < bucket->span[s].last; chunk++)
            step_chunk(bucket, chunk);
    }
}
