// Products of bfloat16 summed as floats, two at a time, where the processor has the instruction for it (AVX512-BF16).
//
// Numbers that are multiplied lie in pairs: of a key the dimensions 2d and 2d + 1, of values those of two tokens. What a row gets of a
// token is the same sum in the same order, whatever rows and tokens are computed beside it.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

#if defined(__AVX512BF16__) && LANES == 16
#define MULTIPLIES_HALVES 1
#include <immintrin.h>
#else
#define MULTIPLIES_HALVES 0
#endif

namespace {

constexpr int kPair = 2;
constexpr int kHalves = 2 * LANES;  // of a vector

// Whether vectors of this many numbers are whole.
inline bool multiplies_halves(int64_t dim) { return MULTIPLIES_HALVES && dim % kHalves == 0; }

#if MULTIPLIES_HALVES

inline __m512i words(const void* from) { return _mm512_loadu_si512(from); }
inline __m512bh halves(__m512i words) { return (__m512bh)words; }
inline __m512 multiplied(__m512 sum, __m512i first, __m512i second) { return _mm512_dpbf16_ps(sum, halves(first), halves(second)); }

// 16 rows of 16 words each become 16 columns.
inline void transpose(__m512i (&row)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            row[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            row[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    // Now row[i + j] has, of rows i to i + 3, the words j, j + 4, j + 8 and j + 12.
    for (int j = 0; j < 4; ++j) {
        t[j] = _mm512_shuffle_i32x4(row[j], row[j + 4], 0x88);
        t[j + 4] = _mm512_shuffle_i32x4(row[j], row[j + 4], 0xdd);
        t[j + 8] = _mm512_shuffle_i32x4(row[j + 8], row[j + 12], 0x88);
        t[j + 12] = _mm512_shuffle_i32x4(row[j + 8], row[j + 12], 0xdd);
    }
    for (int j = 0; j < 4; ++j) {
        row[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
        row[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
        row[j + 4] = _mm512_shuffle_i32x4(t[j + 4], t[j + 12], 0x88);
        row[j + 12] = _mm512_shuffle_i32x4(t[j + 4], t[j + 12], 0xdd);
    }
}

// The keys of whole vectors of tokens as [dim / 2][kSplit] pairs.
void pair_keys(const uint16_t* const* keys, int num_tokens, int dim, uint32_t* pairs) {
    for (int t = 0; t < num_tokens; t += LANES)
        for (int d = 0; d < dim; d += kHalves) {
            __m512i row[LANES];
            for (int i = 0; i < LANES; ++i) row[i] = words(keys[t + i] + d);
            transpose(row);
            for (int i = 0; i < LANES; ++i) _mm512_storeu_si512(pairs + size_t(d / kPair + i) * kSplit + t, row[i]);
        }
}

// The values of two tokens after each other as [num_tokens / 2][dim] pairs; each four numbers change places with four others, see `in_order`.
void pair_values(const uint16_t* const* values, int num_tokens, int dim, uint32_t* pairs) {
    for (int t = 0; t < num_tokens; t += kPair)
        for (int d = 0; d < dim; d += kHalves) {
            const __m512i first = words(values[t] + d), second = words(values[t + 1] + d);
            uint32_t* to = pairs + size_t(t / kPair) * dim + d;
            _mm512_storeu_si512(to, _mm512_unpacklo_epi16(first, second));
            _mm512_storeu_si512(to + LANES, _mm512_unpackhi_epi16(first, second));
        }
}

// R rows of queries against T vectors of tokens.
template <int R, int T>
inline void score_block(const uint16_t* queries, const uint32_t* pairs, int dim, float scaling, float* scores) {
    __m512 sums[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) sums[r][t] = _mm512_setzero_ps();
    for (int d = 0; d < dim / kPair; ++d) {
        __m512i keys[T];
        for (int t = 0; t < T; ++t) keys[t] = words(pairs + size_t(d) * kSplit + t * LANES);
        for (int r = 0; r < R; ++r) {
            int32_t query;
            std::memcpy(&query, queries + size_t(r) * dim + kPair * d, sizeof query);
            for (int t = 0; t < T; ++t) sums[r][t] = multiplied(sums[r][t], _mm512_set1_epi32(query), keys[t]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) _mm512_storeu_ps(scores + size_t(r) * kSplit + t * LANES, sums[r][t] * scaling);
}

template <int R>
void score_rows(const uint16_t* queries, const uint32_t* pairs, int num_tokens, int dim, float scaling, float* scores) {
    int t = 0;
    for (; t + 4 * LANES <= num_tokens; t += 4 * LANES) score_block<R, 4>(queries, pairs + t, dim, scaling, scores + t);
    for (; t < num_tokens; t += LANES) score_block<R, 1>(queries, pairs + t, dim, scaling, scores + t);
}

// Two vectors of sums as `pair_values` has them, in the order of their dimensions.
inline void in_order(__m512 low, __m512 high, float* to) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    _mm512_storeu_ps(to, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(to + LANES, _mm512_permutex2var_ps(low, second, high));
}

// R rows of weights over N times 32 dimensions of the values.
template <int R, int N>
inline void weigh_block(const uint16_t* weights, const uint32_t* pairs, int num_tokens, int dim, float* out) {
    __m512 sums[R][2 * N];
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < 2 * N; ++n) sums[r][n] = _mm512_setzero_ps();
    for (int t = 0; t < num_tokens; t += kPair) {
        __m512i values[2 * N];
        for (int n = 0; n < 2 * N; ++n) values[n] = words(pairs + size_t(t / kPair) * dim + n * LANES);
        for (int r = 0; r < R; ++r) {
            int32_t weight;
            std::memcpy(&weight, weights + size_t(r) * kSplit + t, sizeof weight);
            for (int n = 0; n < 2 * N; ++n) sums[r][n] = multiplied(sums[r][n], _mm512_set1_epi32(weight), values[n]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) in_order(sums[r][2 * n], sums[r][2 * n + 1], out + size_t(r) * dim + n * kHalves);
}

template <int R>
void weigh_rows(const uint16_t* weights, const uint32_t* pairs, int num_tokens, int dim, float* out) {
    int d = 0;
    for (; d + 2 * kHalves <= dim; d += 2 * kHalves) weigh_block<R, 2>(weights, pairs + d, num_tokens, dim, out + d);
    for (; d < dim; d += kHalves) weigh_block<R, 1>(weights, pairs + d, num_tokens, dim, out + d);
}

void narrow(const float* from, uint16_t* to, int count) {
    for (int i = 0; i < count; i += LANES)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
}

#else

// Nobody calls these: see `multiplies_halves`.
void pair_keys(const uint16_t* const*, int, int, uint32_t*) {}
void pair_values(const uint16_t* const*, int, int, uint32_t*) {}
template <int R>
void score_rows(const uint16_t*, const uint32_t*, int, int, float, float*) {}
template <int R>
void weigh_rows(const uint16_t*, const uint32_t*, int, int, float*) {}
void narrow(const float*, uint16_t*, int) {}

#endif

// A tile's rows, and the split whose keys and values they are multiplied by.
class HalfProducts {
   public:
    HalfProducts(size_t num_rows, int key_dim, int value_dim)
        : key_dim_(key_dim), value_dim_(value_dim), queries_(num_rows * key_dim), weights_(num_rows * kSplit),
          key_pairs_(size_t(key_dim / kPair) * kSplit), value_pairs_(size_t(kSplit / kPair) * value_dim) {}

    uint16_t* query(int row) { return queries_.data() + size_t(row) * key_dim_; }

    // Scores of all rows, [num_rows][kSplit]; of the tokens behind the last one, to a whole vector, there are keys too.
    void score(int num_rows, int num_tokens, float scaling, float* scores) {
        const int whole = whole_vectors(num_tokens);
        pair_keys(key_of, whole, key_dim_, key_pairs_.data());
        for (int row = 0; row < num_rows; row += kBlock) {
            const uint16_t* from = query(row);
            float* to = scores + size_t(row) * kSplit;
            switch (std::min(kBlock, num_rows - row)) {
                case 1: score_rows<1>(from, key_pairs_.data(), whole, key_dim_, scaling, to); break;
                case 2: score_rows<2>(from, key_pairs_.data(), whole, key_dim_, scaling, to); break;
                case 3: score_rows<3>(from, key_pairs_.data(), whole, key_dim_, scaling, to); break;
                default: score_rows<kBlock>(from, key_pairs_.data(), whole, key_dim_, scaling, to);
            }
        }
    }

    // Weighted values of all rows, [num_rows][value_dim]; weights behind the last token, to a whole vector, are 0.
    void weigh(const float* weights, int num_rows, int num_tokens, float* out) {
        const int even = (num_tokens + 1) / kPair * kPair;
        pair_values(value_of, even, value_dim_, value_pairs_.data());
        for (int row = 0; row < num_rows; ++row)
            narrow(weights + size_t(row) * kSplit, weights_.data() + size_t(row) * kSplit, whole_vectors(num_tokens));
        for (int row = 0; row < num_rows; row += kBlock) {
            const uint16_t* from = weights_.data() + size_t(row) * kSplit;
            float* to = out + size_t(row) * value_dim_;
            switch (std::min(kBlock, num_rows - row)) {
                case 1: weigh_rows<1>(from, value_pairs_.data(), even, value_dim_, to); break;
                case 2: weigh_rows<2>(from, value_pairs_.data(), even, value_dim_, to); break;
                case 3: weigh_rows<3>(from, value_pairs_.data(), even, value_dim_, to); break;
                default: weigh_rows<kBlock>(from, value_pairs_.data(), even, value_dim_, to);
            }
        }
    }

    const uint16_t *key_of[kSplit], *value_of[kSplit];

   private:
    static constexpr int kBlock = 4;  // rows that stay in registers

    const int key_dim_, value_dim_;
    std::vector<uint16_t> queries_, weights_;
    std::vector<uint32_t> key_pairs_, value_pairs_;
};

}  // namespace
