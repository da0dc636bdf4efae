// A linear layer in 8 bits: rows of activations and channels of weights are whole numbers from -127 to 127 with a unit each.
//
// Products are summed as whole numbers, which no order changes, and a row's unit comes from that row alone: so what a row gives does not
// depend on the rows beside it nor on the number of threads.
//
// The processor multiplies four unsigned by four signed bytes in each lane. So rows are stored with 128 added, and what that adds to a
// channel's sum, 128 times the sum of its weights, is known beforehand (`offsets`).
//
// Weights lie in panels of 32 channels: [panel, features / 4, channel, 4], as one pass over the features reads them.

#include <algorithm>
#include <vector>

#include "vectors.h"

#if defined(__AVX512VNNI__) && LANES == 16
#include <immintrin.h>
#define HAS_DOT 1
typedef __m512i Whole;
typedef __m512 Real;
#define OF_WIDTH(name) _mm512_##name
#define DOT _mm512_dpbusd_epi32
#define LOAD_WHOLE _mm512_loadu_si512
#elif defined(__AVXVNNI__) && LANES == 8
#include <immintrin.h>
#define HAS_DOT 1
typedef __m256i Whole;
typedef __m256 Real;
#define OF_WIDTH(name) _mm256_##name
#define DOT _mm256_dpbusd_avx_epi32
#define LOAD_WHOLE(from) _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))
#else
#define HAS_DOT 0
#endif

struct Weights {
    const int8_t* panels;
    const float* units;      // of each channel
    const int32_t* offsets;  // of each channel
    const float* bias;       // or none
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
constexpr int kRows = LANES == 16 ? 12 : 3;  // as many as have their sums in registers, beside a panel's weights
constexpr int kTaskRows = 96;
constexpr int kAhead = 4096;     // bytes: what is fetched while the sums of a few rows wait for memory
constexpr float kLeast = 1e-30f;  // a row of smaller values has no unit, and counts as zeros

struct Codes {
    int64_t stride;
    std::vector<uint8_t> bytes;  // [num_rows, stride]
    std::vector<float> units;
};

inline int64_t whole_quads(int64_t features) { return (features + 3) / 4 * 4; }

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
uint32_t largest_bits(const Rows& rows, int64_t begin, int64_t features) {
    const Ints magnitude = Ints{} + 0x7fffffff;
    Ints most = {};
    int64_t i = 0;
    for (; i + LANES <= features; i += LANES) {
        const Real value = load_row(rows, begin + i);
        const Ints bits = same_bits<Ints>(value) & magnitude;
        most = bits > most ? bits : most;
    }
    uint32_t largest = 0;
    for (int lane = 0; lane < LANES; ++lane) largest = std::max(largest, uint32_t(most[lane]));
    for (; i < features; ++i) {
        const float value = value_at(rows, begin + i);
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        largest = std::max(largest, bits & 0x7fffffff);
    }
    return largest;
}

// To the nearest whole number, the even one of two.
inline void store_codes(Real values, Real inverse, uint8_t* to) {
    const Whole whole = OF_WIDTH(cvtps_epi32)(OF_WIDTH(mul_ps)(values, inverse));
#if LANES == 16
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_xor_si128(_mm512_cvtepi32_epi8(whole), _mm_set1_epi8(-128)));
#else
    const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_xor_si128(_mm_packs_epi16(shorts, shorts), _mm_set1_epi8(-128)));
#endif
}

// A row with something that is no number gives nothing else.
void quantise(const Rows& rows, int64_t row, int64_t features, Codes& codes) {
    const int64_t begin = row * features;
    const uint32_t bits = largest_bits(rows, begin, features);
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    const bool is_nothing = largest < kLeast;
    codes.units[row] = is_nothing ? 0.0f : bits < 0x7f800000u ? largest / 127.0f : NAN;
    const Real inverse = OF_WIDTH(set1_ps)(is_nothing || bits >= 0x7f800000u ? 0.0f : 127.0f / largest);
    uint8_t* const to = codes.bytes.data() + row * codes.stride;
    int64_t i = 0;
    for (; i + LANES <= features; i += LANES) store_codes(load_row(rows, begin + i), inverse, to + i);
    float rest[LANES] = {};
    uint8_t last[LANES];
    for (int64_t j = i; j < features; ++j) rest[j - i] = value_at(rows, begin + j);
    store_codes(OF_WIDTH(loadu_ps)(rest), inverse, last);
    std::copy(last, last + (codes.stride - i), to + i);
}

inline Whole four_of(const uint8_t* from) {
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

inline void store_sums(const Weights& weights, const Rows& rows, const Codes& codes, int64_t row, int64_t channel, Whole sums) {
    const int64_t count = std::min<int64_t>(LANES, weights.out_features - channel);
    if (count <= 0) return;
    const Whole exact = OF_WIDTH(sub_epi32)(sums, LOAD_WHOLE(weights.offsets + channel));
    const Real unit = OF_WIDTH(mul_ps)(OF_WIDTH(set1_ps)(codes.units[row]), OF_WIDTH(loadu_ps)(weights.units + channel));
    Real value = OF_WIDTH(mul_ps)(OF_WIDTH(cvtepi32_ps)(exact), unit);
    if (weights.bias) value = OF_WIDTH(fmadd_ps)(OF_WIDTH(cvtepi32_ps)(exact), unit, OF_WIDTH(loadu_ps)(weights.bias + channel));
    store_part(rows, row * weights.out_features + channel, value, int(count));
}

// The sums of `Count` rows and a panel over its quads, `Quads` of them at a time: with few rows one sum would wait for the one before.
template <int Count, int Quads>
inline void add_up(const uint8_t* bytes, int64_t stride, const int8_t* from, int64_t num_turns, Whole (&to)[Count][kVectors]) {
    Whole sums[Quads][Count][kVectors];
#pragma GCC unroll 32
    for (int q = 0; q < Quads; ++q)
#pragma GCC unroll 32
        for (int r = 0; r < Count; ++r)
#pragma GCC unroll 32
            for (int v = 0; v < kVectors; ++v) sums[q][r][v] = Whole{};
    for (int64_t turn = 0; turn < num_turns; ++turn, bytes += Quads * 4, from += Quads * kPanel * 4) {
#pragma GCC unroll 32
        for (int q = 0; q < Quads; ++q) {
            const int8_t* const here = from + q * kPanel * 4;
            if (Count <= 4) __builtin_prefetch(here + kAhead), __builtin_prefetch(here + kAhead + 64);
            Whole channels[kVectors];
#pragma GCC unroll 32
            for (int v = 0; v < kVectors; ++v) channels[v] = LOAD_WHOLE(here + v * LANES * 4);
#pragma GCC unroll 32
            for (int r = 0; r < Count; ++r) {
                const Whole four = four_of(bytes + r * stride + q * 4);
#pragma GCC unroll 32
                for (int v = 0; v < kVectors; ++v) sums[q][r][v] = DOT(sums[q][r][v], four, channels[v]);
            }
        }
    }
#pragma GCC unroll 32
    for (int r = 0; r < Count; ++r)
#pragma GCC unroll 32
        for (int v = 0; v < kVectors; ++v) {
            to[r][v] = sums[0][r][v];
            for (int q = 1; q < Quads; ++q) to[r][v] = OF_WIDTH(add_epi32)(to[r][v], sums[q][r][v]);
        }
}

// `Count` rows times one panel.
template <int Count>
void multiply(const Weights& weights, const Rows& rows, const Codes& codes, int64_t row, int64_t panel) {
    constexpr int kQuads = Count == 1 ? 4 : Count <= 3 ? 2 : 1;
    const int64_t num_turns = codes.stride / 4 / kQuads, rest = codes.stride / 4 % kQuads, done = num_turns * kQuads * 4;
    const int8_t* const from = weights.panels + panel * kPanel * codes.stride;
    const uint8_t* const bytes = codes.bytes.data() + row * codes.stride;
    Whole sums[Count][kVectors], more[Count][kVectors];
    add_up<Count, kQuads>(bytes, codes.stride, from, num_turns, sums);
    if (kQuads > 1) add_up<Count, 1>(bytes + done, codes.stride, from + done * kPanel, rest, more);
    for (int r = 0; r < Count; ++r)
        for (int v = 0; v < kVectors; ++v) {
            if (kQuads > 1) sums[r][v] = OF_WIDTH(add_epi32)(sums[r][v], more[r][v]);
            store_sums(weights, rows, codes, row + r, panel * kPanel + v * LANES, sums[r][v]);
        }
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
    codes.stride = whole_quads(weights->in_features);
    codes.bytes.resize(size_t(rows->num_rows) * codes.stride);
    codes.units.resize(rows->num_rows);
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
