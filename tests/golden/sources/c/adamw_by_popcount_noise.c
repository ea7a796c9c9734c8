/* C99 for p:f32 g:f32 m:f32 v:f32, its gradient a sum of popcount noise. Printed by rulec.
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
    void *const *p, *const *g, *const *m, *const *v;
} Bucket;

/* The float that has these bits. */
RULEC_FUNCTION float float_of(uint32_t bits)
{
    const union { uint32_t bits; float value; } both = {bits};
    return both.value;
}

/* Four words of 32 bits. */
typedef struct {
    uint32_t at[4];
} Words;

/* The words of a block: Philox4x32-10 of a counter and a key of such words. */
RULEC_FUNCTION Words philox(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t seed, uint32_t layer)
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
RULEC_FUNCTION uint32_t set_bits(uint32_t word)
{
    word -= word >> 1 & 0x55555555;
    word = (word & 0x33333333) + (word >> 2 & 0x33333333);
    return (word + (word >> 4)) & 0x0f0f0f0f;
}

/* A byte less 4: its bits behind those of 2**23 are a float. */
RULEC_FUNCTION float less_four(uint32_t byte)
{
    return float_of(0x4b000000 | byte) - 8388612.0f;
}

/* A direction and its weight. */
typedef struct {
    int64_t number;
    double weight;
} Direction;

/* Noise in the place of a gradient: how many bytes behind it its directions begin and how many there are, its
 * key, what is added to the upper half of a block's number, the step, and the element that the tensor's first
 * one is. */
typedef struct {
    int64_t directions, count, seed, layer, high, step, offset, unused;
} Noise;

/* Elements of a tile, what there is of a gradient at once; blocks of words that they are made of. */
enum { TILE = 1024, BLOCKS = TILE / 16 };

/* The words of some blocks, from number `first` on. */
static void make_words(const Noise *noise, int64_t number, int64_t first, int blocks, uint32_t *words)
{
    const uint32_t seed = (uint32_t)noise->seed, layer = (uint32_t)noise->layer, step = (uint32_t)noise->step;
    const uint32_t low = (uint32_t)first, high = (uint32_t)(first >> 32) + (uint32_t)noise->high;
    const uint32_t direction = (uint32_t)number;
#pragma omp simd
    for (int b = 0; b < blocks; b++) {
        const uint32_t block = low + (uint32_t)b;
        const Words quad = philox(block, high + (block < low), direction, step, seed, layer);
        words[4 * b] = quad.at[0];
        words[4 * b + 1] = quad.at[1];
        words[4 * b + 2] = quad.at[2];
        words[4 * b + 3] = quad.at[3];
    }
}

/* The sum of noise for `count` elements from `first` on, a multiple of 16: direction by direction, in order. */
static void sum_noise(const Noise *noise, int64_t first, int count, float *sums)
{
    const int blocks = (count + 15) / 16;
    const Direction *directions = (const Direction *)((const char *)noise + noise->directions);
    uint32_t words[4 * BLOCKS];
    float planes[4][4 * BLOCKS] = {{0}};  // the sums of each word's first bytes, second bytes and so on
    for (int64_t d = 0; d < noise->count; d++) {
        const float weight = (float)directions[d].weight;
        make_words(noise, directions[d].number, (noise->offset + first) / 16, blocks, words);
#pragma omp simd
        for (int w = 0; w < 4 * blocks; w++) {
            const uint32_t bits = set_bits(words[w]);
            planes[0][w] += weight * less_four(bits & 255);
            planes[1][w] += weight * less_four(bits >> 8 & 255);
            planes[2][w] += weight * less_four(bits >> 16 & 255);
            planes[3][w] += weight * less_four(bits >> 24);
        }
    }
    for (int w = 0; w < 4 * blocks; w++)
        for (int byte = 0; byte < 4; byte++)
            sums[4 * w + byte] = planes[byte][w];
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
    float *p_at = bucket->p[at->tensor];
    const Noise *noise = bucket->g[at->tensor];
    float *m_at = bucket->m[at->tensor];
    float *v_at = bucket->v[at->tensor];
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

    for (int64_t i = at->first; i < at->last; i += TILE) {
        const int count = (int)(at->last - i < TILE ? at->last - i : TILE);
        float sums[TILE];
        sum_noise(noise, i, count, sums);
#pragma omp simd
        for (int e = 0; e < count; e++) {
            step_element(
                e, p_at + i, sums, m_at + i, v_at + i,
                beta1, one_minus_beta1, beta2, one_minus_beta2, one_minus_beta1_t, sqrt_one_minus_beta2_t,
                eps, weight_decay, lr);
        }
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
