// A linear layer in 8 bits: activations and weights are whole numbers from -127 to 127. Each channel of the weights has a unit, and each 64
// features of a row of activations have one of their own.
//
// Products of a group are summed as whole numbers, which no order changes; groups are joined in order; and a row's units come from that row
// alone. So what a row gives does not depend on the rows beside it nor on the number of threads.
//
// The processor multiplies four unsigned by four signed bytes in each lane. So weights are stored with 128 added, and the sum of a group begins
// with what takes that away again: -128 times the sum of the row's own whole numbers (`shifts`).
//
// Weights lie in panels of 32 channels: [panel, features / 4, channel, 4], as one pass over the features reads them. Features are filled up to
// sixteens with zeros.

#include <algorithm>
#include <vector>

#include "vectors.h"

#if defined(__AVX512VNNI__) && LANES == 16
#include <immintrin.h>
#define HAS_DOT 1
typedef __m512i Whole;
typedef __m512 Real;
#define OF_WIDTH(name) _mm512_##name
#define DOT "vpdpbusd"
#define LOAD_WHOLE _mm512_loadu_si512
#elif defined(__AVXVNNI__) && LANES == 8
#include <immintrin.h>
#define HAS_DOT 1
typedef __m256i Whole;
typedef __m256 Real;
#define OF_WIDTH(name) _mm256_##name
#define DOT "%{vex%} vpdpbusd"
#define LOAD_WHOLE(from) _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))
#else
#define HAS_DOT 0
#endif

struct Weights {
    const uint8_t* panels;
    const float* units;  // of each channel
    const float* bias;   // or none
    int64_t in_features, out_features;
};

struct Rows {
    const void* rows;  // [num_rows, in_features]
    void* out;         // [num_rows, out_features]
    int64_t num_rows;
    int32_t is_bf16, num_threads;
};

// Whether this processor has the instruction.
extern "C" int32_t paceline_multiplies_bytes() { return HAS_DOT; }

#if HAS_DOT
namespace {

typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));

constexpr int kPanel = 32;                 // channels
constexpr int kVectors = kPanel / LANES;   // of a panel
constexpr int kRows = LANES == 16 ? 6 : 2;  // as many as have their sums in registers, beside a panel's weights
constexpr int kGroup = 64;                 // features
constexpr int kFill = 16;                  // features that are computed at once with few rows
constexpr int kTaskRows = 96;
constexpr int kAhead = 4096;     // bytes: what is fetched beforehand
constexpr float kLeast = 1e-30f;  // a group of smaller values has no unit, and counts as zeros

struct Codes {
    int64_t stride, num_groups;
    std::vector<int8_t> bytes;    // [num_rows, stride]
    std::vector<float> units;     // [num_rows, num_groups]
    std::vector<int32_t> shifts;  // the same
};

// `sums` and the products of four unsigned and four signed bytes in each lane. Of the function that stands for the instruction the compiler makes
// copies of all sums in each turn, which takes a fifth of the time.
inline Whole with_products(Whole sums, Whole unsigned_bytes, Whole signed_bytes) {
    asm(DOT " %2, %1, %0" : "+v"(sums) : "v"(unsigned_bytes), "v"(signed_bytes));
    return sums;
}

template <class To, class From>
inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline Real load_row(const Rows& rows, int64_t at) {
    if (!rows.is_bf16) return OF_WIDTH(loadu_ps)(static_cast<const float*>(rows.rows) + at);
    const Halves halves = *reinterpret_cast<const Halves*>(static_cast<const uint16_t*>(rows.rows) + at);
    return same_bits<Real>(__builtin_convertvector(halves, Ints) << 16);
}

// As `to_bf16` does each.
inline Halves to_halves(Real values) {
    const Bits bits = same_bits<Bits>(values);
    const Bits near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 64 : near, Halves);
}

inline float value_at(const Rows& rows, int64_t at) {
    return rows.is_bf16 ? from_bf16(static_cast<const uint16_t*>(rows.rows)[at]) : static_cast<const float*>(rows.rows)[at];
}

// The bits of the largest magnitude: those of infinities and NaN are larger than those of any number.
uint32_t largest_bits(const float* values) {
    const Ints magnitude = Ints{} + 0x7fffffff;
    Ints most = {};
    for (int i = 0; i < kGroup; i += LANES) {
        const Ints bits = same_bits<Ints>(OF_WIDTH(loadu_ps)(values + i)) & magnitude;
        most = bits > most ? bits : most;
    }
    uint32_t largest = 0;
    for (int lane = 0; lane < LANES; ++lane) largest = std::max(largest, uint32_t(most[lane]));
    return largest;
}

// To the nearest whole number, the even one of two.
inline void store_codes(Real values, Real inverse, int8_t* to) {
    const Whole whole = OF_WIDTH(cvtps_epi32)(OF_WIDTH(mul_ps)(values, inverse));
#if LANES == 16
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(whole));
#else
    const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(shorts, shorts));
#endif
}

// Gives the unit of a group. One with something that is no number has none that is: nothing else comes of its row.
float quantise_group(const float* values, int8_t* to) {
    const uint32_t bits = largest_bits(values);
    const float largest = same_bits<float>(bits);
    const bool is_nothing = largest < kLeast, is_number = bits < 0x7f800000u;
    const Real inverse = OF_WIDTH(set1_ps)(is_nothing || !is_number ? 0.0f : 127.0f / largest);
    for (int i = 0; i < kGroup; i += LANES) store_codes(OF_WIDTH(loadu_ps)(values + i), inverse, to + i);
    return is_nothing ? 0.0f : is_number ? largest / 127.0f : NAN;
}

void quantise(const Rows& rows, int64_t row, int64_t features, Codes& codes) {
    for (int64_t group = 0; group < codes.num_groups; ++group) {
        const int64_t begin = group * kGroup;
        const int count = int(std::min<int64_t>(kGroup, features - begin));
        float values[kGroup];
        int8_t whole[kGroup];
        if (count == kGroup)
            for (int i = 0; i < kGroup; i += LANES) OF_WIDTH(storeu_ps)(values + i, load_row(rows, row * features + begin + i));
        else
            for (int i = 0; i < kGroup; ++i) values[i] = i < count ? value_at(rows, row * features + begin + i) : 0.0f;
        codes.units[row * codes.num_groups + group] = quantise_group(values, whole);
        int32_t sum = 0;
        for (int i = 0; i < kGroup; ++i) sum += whole[i];
        codes.shifts[row * codes.num_groups + group] = -128 * sum;
        std::copy(whole, whole + std::min<int64_t>(kGroup, codes.stride - begin), codes.bytes.data() + row * codes.stride + begin);
    }
}

inline Whole four_of(const int8_t* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    return OF_WIDTH(set1_epi32)(four);
}

void store_part(const Rows& rows, int64_t at, Real values, int count) {
    if (count == LANES && rows.is_bf16) {
        *reinterpret_cast<Halves*>(static_cast<uint16_t*>(rows.out) + at) = to_halves(values);
        return;
    }
    if (count == LANES) return OF_WIDTH(storeu_ps)(static_cast<float*>(rows.out) + at, values);
    float each[LANES];
    OF_WIDTH(storeu_ps)(each, values);
    for (int i = 0; i < count; ++i) {
        if (rows.is_bf16)
            static_cast<uint16_t*>(rows.out)[at + i] = to_bf16(each[i]);
        else
            static_cast<float*>(rows.out)[at + i] = each[i];
    }
}

inline void store_total(const Weights& weights, const Rows& rows, int64_t row, int64_t channel, Real total) {
    const int64_t count = std::min<int64_t>(LANES, weights.out_features - channel);
    if (count <= 0) return;
    const Real unit = OF_WIDTH(loadu_ps)(weights.units + channel);
    const Real value = weights.bias ? OF_WIDTH(fmadd_ps)(total, unit, OF_WIDTH(loadu_ps)(weights.bias + channel))
                                    : OF_WIDTH(mul_ps)(total, unit);
    store_part(rows, row * weights.out_features + channel, value, int(count));
}

// Adds a group's products of `Count` rows and a panel to `totals`. With few rows it takes several quads at a time: one sum would wait for the one
// before.
template <int Count>
inline void add_group(const int8_t* bytes, int64_t stride, const int32_t* shifts, const float* units, int64_t num_groups, const uint8_t* from,
                      int num_quads, Real (&totals)[Count][kVectors]) {
    constexpr int kQuads = Count == 1 ? 4 : Count <= 3 ? 2 : 1;
    Whole sums[kQuads][Count][kVectors];
#pragma GCC unroll 32
    for (int q = 0; q < kQuads; ++q)
#pragma GCC unroll 32
        for (int r = 0; r < Count; ++r)
#pragma GCC unroll 32
            for (int v = 0; v < kVectors; ++v) sums[q][r][v] = OF_WIDTH(set1_epi32)(q ? 0 : shifts[r * num_groups]);
    for (int quad = 0; quad < num_quads; quad += kQuads, bytes += kQuads * 4, from += kQuads * kPanel * 4) {
#pragma GCC unroll 32
        for (int q = 0; q < kQuads; ++q) {
            const uint8_t* const here = from + q * kPanel * 4;
            __builtin_prefetch(here + kAhead), __builtin_prefetch(here + kAhead + 64);
            Whole channels[kVectors];
#pragma GCC unroll 32
            for (int v = 0; v < kVectors; ++v) channels[v] = LOAD_WHOLE(here + v * LANES * 4);
#pragma GCC unroll 32
            for (int r = 0; r < Count; ++r) {
                const Whole four = four_of(bytes + r * stride + q * 4);
#pragma GCC unroll 32
                for (int v = 0; v < kVectors; ++v) sums[q][r][v] = with_products(sums[q][r][v], channels[v], four);
            }
        }
    }
#pragma GCC unroll 32
    for (int r = 0; r < Count; ++r)
#pragma GCC unroll 32
        for (int v = 0; v < kVectors; ++v) {
            for (int q = 1; q < kQuads; ++q) sums[0][r][v] = OF_WIDTH(add_epi32)(sums[0][r][v], sums[q][r][v]);
            totals[r][v] = OF_WIDTH(fmadd_ps)(OF_WIDTH(cvtepi32_ps)(sums[0][r][v]), OF_WIDTH(set1_ps)(units[r * num_groups]), totals[r][v]);
        }
}

// `Count` rows times one panel.
template <int Count>
void multiply(const Weights& weights, const Rows& rows, const Codes& codes, int64_t row, int64_t panel) {
    const uint8_t* const from = weights.panels + panel * kPanel * codes.stride;
    const int8_t* const bytes = codes.bytes.data() + row * codes.stride;
    Real totals[Count][kVectors];
#pragma GCC unroll 32
    for (int r = 0; r < Count; ++r)
#pragma GCC unroll 32
        for (int v = 0; v < kVectors; ++v) totals[r][v] = OF_WIDTH(setzero_ps)();
    for (int64_t group = 0; group < codes.num_groups; ++group) {
        const int64_t at = row * codes.num_groups + group, begin = group * kGroup;
        add_group<Count>(bytes + begin, codes.stride, codes.shifts.data() + at, codes.units.data() + at, codes.num_groups, from + begin * kPanel,
                         int(std::min<int64_t>(kGroup, codes.stride - begin)) / 4, totals);
    }
#pragma GCC unroll 32
    for (int r = 0; r < Count; ++r)
#pragma GCC unroll 32
        for (int v = 0; v < kVectors; ++v) store_total(weights, rows, row + r, panel * kPanel + v * LANES, totals[r][v]);
}

template <int Count>
void multiply_of(int count, const Weights& weights, const Rows& rows, const Codes& codes, int64_t row, int64_t panel) {
    if (count == Count) return multiply<Count>(weights, rows, codes, row, panel);
    if constexpr (Count > 1) multiply_of<Count - 1>(count, weights, rows, codes, row, panel);
}

// Rows [begin, end) in even parts.
void multiply_rows(const Weights& weights, const Rows& rows, const Codes& codes, int64_t begin, int64_t end, int64_t panel) {
    const int64_t num_parts = (end - begin + kRows - 1) / kRows;
    for (int64_t part = 0; part < num_parts; ++part) {
        const int64_t from = begin + (end - begin) * part / num_parts, to = begin + (end - begin) * (part + 1) / num_parts;
        multiply_of<kRows>(int(to - from), weights, rows, codes, from, panel);
    }
}

}  // namespace

extern "C" void paceline_int8_linear(const Weights* weights, const Rows* rows) {
    // Kept by the thread that calls: large memory is new pages each time.
    thread_local Codes kept;
    Codes& codes = kept;
    codes.stride = (weights->in_features + kFill - 1) / kFill * kFill;
    codes.num_groups = (weights->in_features + kGroup - 1) / kGroup;
    codes.bytes.resize(size_t(rows->num_rows) * codes.stride);
    codes.units.resize(size_t(rows->num_rows) * codes.num_groups);
    codes.shifts.resize(codes.units.size());
    const int64_t num_panels = (weights->out_features + kPanel - 1) / kPanel;
    const int64_t num_parts = (rows->num_rows + kTaskRows - 1) / kTaskRows;

#pragma omp parallel for num_threads(rows->num_threads) schedule(static) if (rows->num_threads > 1 && rows->num_rows > 8)
    for (int64_t row = 0; row < rows->num_rows; ++row) quantise(*rows, row, weights->in_features, codes);
#pragma omp parallel for num_threads(rows->num_threads) schedule(static) if (rows->num_threads > 1)
    for (int64_t task = 0; task < num_panels * num_parts; ++task) {
        const int64_t panel = task / num_parts, begin = task % num_parts * kTaskRows;
        multiply_rows(*weights, *rows, codes, begin, std::min(begin + kTaskRows, rows->num_rows), panel);
    }
}
#endif
