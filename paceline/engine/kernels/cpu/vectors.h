// Floats in vectors of the processor's width, as sums, exponents, and read out of bfloat16.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// The floats of a vector; -DLANES tries those of another processor.
#if defined(LANES)
#elif defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

namespace {

constexpr int kSplit = 128;  // tokens of a split of a context, which are whole vectors

typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

inline Vec load(const float* from) { return *reinterpret_cast<const Vec*>(from); }
inline void store(float* to, Vec value) { *reinterpret_cast<Vec*>(to) = value; }
inline Vec broadcast(float value) { return value - Vec{}; }

// The sums of one vector's lanes, or of four vectors' at once: each lane is added in the same order by both.
#if LANES >= 8
typedef float Eight __attribute__((vector_size(32)));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLED(first, second, ...) __builtin_shufflevector(first, second, __VA_ARGS__)
#else
typedef int32_t EightInts __attribute__((vector_size(32)));
#define SHUFFLED(first, second, ...) __builtin_shuffle(first, second, EightInts{__VA_ARGS__})
#endif

inline Eight fold(Vec value) {
    float parts[LANES];
    std::memcpy(parts, &value, sizeof parts);
    Eight low, high = {};
    std::memcpy(&low, parts, sizeof low);
    if (LANES > 8) std::memcpy(&high, parts + LANES - 8, sizeof high);
    return LANES > 8 ? low + high : low;
}

inline float sum(Vec value) {
    const Eight v = fold(value);
    return ((v[0] + v[2]) + (v[1] + v[3])) + ((v[4] + v[6]) + (v[5] + v[7]));
}

inline void sum4(Vec first, Vec second, Vec third, Vec fourth, float* to) {
    const Eight a = fold(first), b = fold(second), c = fold(third), d = fold(fourth);
    const Eight ab = SHUFFLED(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLED(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    const Eight cd = SHUFFLED(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLED(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    const Eight all = SHUFFLED(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLED(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    for (int i = 0; i < 4; ++i) to[i] = all[i] + all[i + 4];
}
#else
inline float sum(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }

inline void sum4(Vec first, Vec second, Vec third, Vec fourth, float* to) {
    to[0] = sum(first), to[1] = sum(second), to[2] = sum(third), to[3] = sum(fourth);
}
#endif

inline float from_bf16(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

inline uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 64);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline int whole_vectors(int64_t dim) { return int((dim + LANES - 1) / LANES * LANES); }

void widen(const uint16_t* from, float* to, int count) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Halves halves = *reinterpret_cast<const Halves*>(from + i);
        const Ints wide = __builtin_convertvector(halves, Ints) << 16;
        store(to + i, reinterpret_cast<const Vec&>(wide));
    }
    for (; i < count; ++i) to[i] = from_bf16(from[i]);
}

// e to the power of x, for x <= 0, within 2 units in the last place; 0 far below. (Cephes' expf, S. Moshier.)
inline Vec exp_of(Vec x) {
    const Vec least = broadcast(-87.0f);
    const Ints is_nothing = x < least;
    x = is_nothing ? least : x;
    // To the nearest whole number: adding this leaves no bits for a fraction.
    const Vec round = broadcast(12582912.0f);
    const Vec n = (x * 1.44269504f + round) - round;
    const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Vec p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
    const Vec power = p * reinterpret_cast<const Vec&>(bits);
    return is_nothing ? Vec{} : power;
}

inline float exp_of(float x) { return exp_of(broadcast(x))[0]; }

}  // namespace
