// Products of a few rows with a bfloat16 weight in the layout that oneDNN packs it in for AVX512-BF16.
//
// Columns lie in blocks of 64, in each of them two neighbours of the inner dimension together: at ((n / 64) * (k_size / 2) + k / 2) * 128 +
// (n % 64) * 2 + k % 2. With few rows a product takes as long as its weight takes to be read, once; oneDNN has more to set up than that.
// Each column of a row is one sum in one order, whatever the number of rows and threads.

#include <cstdint>
#include <cstring>

#include "vectors.h"

struct Product {
    int64_t num_rows, inner, outer;  // outer: a multiple of 64; inner: of 2
    int32_t num_threads;
    const uint16_t *rows, *weight, *bias;
    uint16_t* out;
};

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#include <immintrin.h>

namespace {

constexpr int kGroup = 16;   // columns of a vector
constexpr int kGroups = 4;   // vectors of a block
constexpr int kMostRows = 6;  // with four vectors of each in registers

template <int ROWS, int GROUPS>
void multiply(const Product& job, int64_t row, int64_t group) {
    const int64_t pairs = job.inner / 2;
    const uint16_t* weight = job.weight + group / kGroups * pairs * 128 + group % kGroups * 32;
    const uint16_t* from[ROWS];
    for (int r = 0; r < ROWS; ++r) from[r] = job.rows + (row + r) * job.inner;
    __m512 sums[ROWS][GROUPS];
    for (int r = 0; r < ROWS; ++r)
        for (int g = 0; g < GROUPS; ++g) sums[r][g] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; ++pair) {
        __m512bh columns[GROUPS];
        for (int g = 0; g < GROUPS; ++g) columns[g] = (__m512bh)_mm512_loadu_si512(weight + pair * 128 + g * 32);
        for (int r = 0; r < ROWS; ++r) {
            int32_t both;
            std::memcpy(&both, from[r] + 2 * pair, sizeof both);
            const __m512bh numbers = (__m512bh)_mm512_set1_epi32(both);
            for (int g = 0; g < GROUPS; ++g) sums[r][g] = _mm512_dpbf16_ps(sums[r][g], numbers, columns[g]);
        }
    }
    for (int g = 0; g < GROUPS; ++g) {
        const int64_t column = (group + g) * kGroup;
        __m512 more = _mm512_setzero_ps();
        if (job.bias) {
            const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(job.bias + column));
            more = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
        }
        for (int r = 0; r < ROWS; ++r) {
            const __m256i out = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(sums[r][g], more));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(job.out + (row + r) * job.outer + column), out);
        }
    }
}

template <int GROUPS>
void all_rows(const Product& job, int64_t group) {
    int64_t row = 0;
    while (row < job.num_rows) {
        const int64_t left = job.num_rows - row;
        // Two tiles of four rather than one of six and one of two.
        const int64_t now = left == kMostRows + 1 || left == kMostRows + 2 ? 4 : left < kMostRows ? left : kMostRows;
        switch (now) {
            case 1: multiply<1, GROUPS>(job, row, group); break;
            case 2: multiply<2, GROUPS>(job, row, group); break;
            case 3: multiply<3, GROUPS>(job, row, group); break;
            case 4: multiply<4, GROUPS>(job, row, group); break;
            case 5: multiply<5, GROUPS>(job, row, group); break;
            default: multiply<6, GROUPS>(job, row, group);
        }
        row += now;
    }
}

// Vectors [first, last) of columns; those of one block together, since they lie side by side.
void some_groups(const Product& job, int64_t first, int64_t last) {
    while (first < last) {
        const int64_t end = first / kGroups * kGroups + kGroups < last ? first / kGroups * kGroups + kGroups : last;
        switch (end - first) {
            case 1: all_rows<1>(job, first); break;
            case 2: all_rows<2>(job, first); break;
            case 3: all_rows<3>(job, first); break;
            default: all_rows<4>(job, first);
        }
        first = end;
    }
}

}  // namespace

extern "C" void paceline_few_rows(const Product* job) {
    const int64_t num_groups = job->outer / kGroup;
#pragma omp parallel for num_threads(job->num_threads) schedule(static)
    for (int thread = 0; thread < job->num_threads; ++thread)
        some_groups(*job, num_groups * thread / job->num_threads, num_groups * (thread + 1) / job->num_threads);
}

extern "C" int32_t paceline_has_few_rows() { return 1; }
#else
extern "C" void paceline_few_rows(const Product*) {}
extern "C" int32_t paceline_has_few_rows() { return 0; }
#endif
