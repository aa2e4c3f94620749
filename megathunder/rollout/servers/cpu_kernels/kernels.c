/* The float32 kernels of a CPU server's decoder layer. Called by compiled.py through ctypes.

   A row is one token of the batch: its query, key and value heads lie side by side, [heads + 2 kv_heads, head].
   The cache of one layer is [slots, kv_heads, head]; table[request, position] is the slot of a position.
   Every request is computed alone and in one fixed order, so its result does not depend on its batch nor on `threads`. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define QUERIES 4 /* rows of a prompt that share one pass over the keys */
#define SERIAL 16384 /* elements below which another thread costs more than it saves */

static inline float dot(const float *a, const float *b, int n)
{
    float sum = 0;
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static inline void add_scaled(float *out, const float *x, float factor, int n)
{
    for (int i = 0; i < n; i++) out[i] += factor * x[i];
}

static void softmax(float *scores, int64_t n)
{
    float top = -INFINITY, sum = 0;
    for (int64_t j = 0; j < n; j++) top = scores[j] > top ? scores[j] : top;
    for (int64_t j = 0; j < n; j++) { scores[j] = expf(scores[j] - top); sum += scores[j]; }
    float inverse = 1.0f / sum;
    for (int64_t j = 0; j < n; j++) scores[j] *= inverse;
}

static float *buffer(int64_t floats) { return aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64); }

/* Written once for any head size; the callers below give the compiler the common ones as constants. */
static inline __attribute__((always_inline)) void decode_one(
    const float *query, float *out, const float *keys, const float *values, const int32_t *slots, int64_t length,
    int queries, int64_t cache_stride, float scale, float *scores, const int head)
{
    for (int64_t j = 0; j < length; j++) {
        const float *key = keys + slots[j] * cache_stride;
        if (j + 8 < length)
            for (int d = 0; d < head; d += 16) __builtin_prefetch(keys + slots[j + 8] * cache_stride + d);
        for (int h = 0; h < queries; h++) scores[h * length + j] = scale * dot(query + h * head, key, head);
    }
    for (int h = 0; h < queries; h++) softmax(scores + h * length, length);
    memset(out, 0, sizeof(float) * queries * head);
    for (int64_t j = 0; j < length; j++) {
        const float *value = values + slots[j] * cache_stride;
        if (j + 8 < length)
            for (int d = 0; d < head; d += 16) __builtin_prefetch(values + slots[j + 8] * cache_stride + d);
        for (int h = 0; h < queries; h++) add_scaled(out + h * head, value, scores[h * length + j], head);
    }
}

/* out[b] = softmax(query[b] K^T scale) V over the first lengths[b] positions of request rows[b]; 0 when out of memory */
int attention_decode(const float *query, int64_t query_stride, float *out, const float *keys, const float *values,
                     const int32_t *table, int64_t table_stride, const int64_t *rows, const int64_t *lengths,
                     int64_t batch, int heads, int kv_heads, int head, float scale, int threads)
{
    int shared = heads / kv_heads;
    int64_t longest = 1, stride = (int64_t)kv_heads * head;
    for (int64_t b = 0; b < batch; b++) longest = lengths[b] > longest ? lengths[b] : longest;
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1 && batch * kv_heads > 1)
    {
        float *scores = buffer(longest * shared);
        if (!scores) failed = 1;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < batch * kv_heads; task++) {
            int64_t b = task / kv_heads, g = task % kv_heads;
            const int32_t *slots = table + rows[b] * table_stride;
            const float *q = query + b * query_stride + g * shared * head;
            float *o = out + (b * heads + g * shared) * head;
            const float *k = keys + g * head, *v = values + g * head;
            if (!scores) continue;
            if (head == 64) decode_one(q, o, k, v, slots, lengths[b], shared, stride, scale, scores, 64);
            else if (head == 128) decode_one(q, o, k, v, slots, lengths[b], shared, stride, scale, scores, 128);
            else if (head == 32) decode_one(q, o, k, v, slots, lengths[b], shared, stride, scale, scores, 32);
            else decode_one(q, o, k, v, slots, lengths[b], shared, stride, scale, scores, head);
        }
        free(scores);
    }
    return !failed;
}

/* `count` consecutive rows of one head, of which the first sees `seen` positions; keys [head, width], values [width, head] */
static void extend_block(const float *query, int64_t query_stride, float *out, int64_t out_stride, const float *keys,
                         const float *values, int64_t width, int64_t seen, int count, int head, float scale,
                         float *scores)
{
    int64_t widest = seen + count - 1;
    for (int i = 0; i < count; i++) memset(scores + i * width, 0, sizeof(float) * widest);
    for (int d = 0; d < head; d++) {
        const float *key = keys + d * width;
        for (int i = 0; i < count; i++) add_scaled(scores + i * width, key, query[i * query_stride + d] * scale, widest);
    }
    for (int i = 0; i < count; i++) {
        softmax(scores + i * width, seen + i);
        for (int64_t j = seen + i; j < widest; j++) scores[i * width + j] = 0;
        memset(out + i * out_stride, 0, sizeof(float) * head);
    }
    for (int64_t j = 0; j < widest; j++)
        for (int i = 0; i < count; i++) add_scaled(out + i * out_stride, values + j * head, scores[i * width + j], head);
}

/* fresh[b] rows of request rows[b], the last of its lengths[b] positions, each seeing those up to its own */
int attention_extend(const float *query, int64_t query_stride, float *out, const float *keys, const float *values,
                     const int32_t *table, int64_t table_stride, const int64_t *rows, const int64_t *lengths,
                     const int64_t *fresh, int64_t batch, int heads, int kv_heads, int head, float scale, int threads)
{
    int shared = heads / kv_heads;
    int64_t width = 1, stride = (int64_t)kv_heads * head, *first = malloc(sizeof(int64_t) * (batch + 1));
    if (!first) return 0;
    first[0] = 0;
    for (int64_t b = 0; b < batch; b++) {
        width = lengths[b] > width ? lengths[b] : width;
        first[b + 1] = first[b] + fresh[b];
    }
    width = (width + 15) / 16 * 16;
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1 && batch * kv_heads > 1)
    {
        float *k = buffer(width * (2 * head + QUERIES)), *v = k + width * head, *scores = v + width * head;
        if (!k) failed = 1;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < batch * kv_heads; task++) {
            int64_t b = task / kv_heads, g = task % kv_heads, length = lengths[b], prefix = length - fresh[b];
            const int32_t *slots = table + rows[b] * table_stride;
            if (!k) continue;
            for (int64_t j = 0; j < length; j++) {
                const float *key = keys + slots[j] * stride + g * head;
                for (int d = 0; d < head; d++) k[d * width + j] = key[d];
                memcpy(v + j * head, values + slots[j] * stride + g * head, sizeof(float) * head);
            }
            for (int64_t h = g * shared; h < (g + 1) * shared; h++)
                for (int64_t i = 0; i < fresh[b]; i += QUERIES) {
                    int count = fresh[b] - i < QUERIES ? fresh[b] - i : QUERIES;
                    extend_block(query + (first[b] + i) * query_stride + h * head, query_stride,
                                 out + ((first[b] + i) * heads + h) * head, (int64_t)heads * head, k, v, width,
                                 prefix + i + 1, count, head, scale, scores);
                }
        }
        free(k);
    }
    free(first);
    return !failed;
}

/* y = x / sqrt(mean(x^2) + eps) * weight; with a residual: residual += x first, and y from it */
void rms_norm(const float *x, int64_t x_stride, float *residual, const float *weight, float *y, int64_t rows, int width,
              float eps, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width > SERIAL)
    for (int64_t i = 0; i < rows; i++) {
        const float *from = x + i * x_stride;
        float *to = y + i * width;
        if (residual) {
            float *sum = residual + i * width;
            for (int d = 0; d < width; d++) sum[d] += from[d];
            from = sum;
        }
        float factor = 1.0f / sqrtf(dot(from, from, width) / width + eps);
        for (int d = 0; d < width; d++) to[d] = from[d] * factor * weight[d];
    }
}

/* In place: the norm of every query and key head (where a weight is given), then the half-rotated rotary embedding of
   its first `rotary` channels (cos_sin [positions, rotary] = cos ++ sin); keys and values go to the cache. */
void prepare_heads(float *x, int64_t x_stride, int64_t rows, int heads, int kv_heads, int head, const float *query_norm,
                   const float *key_norm, float eps, const int64_t *positions, const float *cos_sin, int rotary,
                   float *keys, float *values, const int64_t *slots, int threads)
{
    int half = rotary / 2;
    size_t bytes = sizeof(float) * kv_heads * head;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * x_stride > SERIAL)
    for (int64_t i = 0; i < rows; i++) {
        float *row = x + i * x_stride;
        const float *cosine = cos_sin + positions[i] * rotary, *sine = cosine + half;
        for (int h = 0; h < heads + kv_heads; h++) {
            float *a = row + (int64_t)h * head, *b = a + half;
            const float *weight = h < heads ? query_norm : key_norm;
            if (weight) {
                float factor = 1.0f / sqrtf(dot(a, a, head) / head + eps);
                for (int d = 0; d < head; d++) a[d] = a[d] * factor * weight[d];
            }
            for (int d = 0; d < half; d++) {
                float first = a[d], second = b[d];
                a[d] = first * cosine[d] - second * sine[d];
                b[d] = second * cosine[d] + first * sine[d];
            }
        }
        memcpy(keys + slots[i] * kv_heads * head, row + (int64_t)heads * head, bytes);
        memcpy(values + slots[i] * kv_heads * head, row + (int64_t)(heads + kv_heads) * head, bytes);
    }
}

/* silu(gate) * up of rows [gate ++ up] */
void silu_mul(const float *x, float *y, int64_t rows, int64_t width, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width > SERIAL)
    for (int64_t i = 0; i < rows; i++) {
        const float *gate = x + 2 * i * width, *up = gate + width;
        float *out = y + i * width;
        for (int64_t d = 0; d < width; d++) out[d] = gate[d] / (1.0f + expf(-gate[d])) * up[d];
    }
}
