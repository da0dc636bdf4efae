// What a decoder layer does to each row of a batch between its matrix products: norms, residual sums, rotary embedding, gates.
//
// A row's result depends on that row alone. Numbers are read as bfloat16 or float, worked on as floats, and rounded once, where they are
// stored: transformers' own modules round after each step, so that ours lie nearer to what they stand for, and differ from theirs in a last bit.

#include <cstddef>

#include "vectors.h"

namespace {

constexpr int kRowsOfThread = 8;  // fewer are done sooner by one thread than others wake up

struct Floats {
    using Element = float;
    static Vec read(const float* from) { return load(from); }
    static float read_one(const float* from) { return *from; }
    static void write(float* to, Vec value) { store(to, value); }
    static void write_one(float* to, float value) { *to = value; }
};

struct Bf16s {
    using Element = uint16_t;
    static Vec read(const uint16_t* from) {
        const Ints wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Ints) << 16;
        return reinterpret_cast<const Vec&>(wide);
    }
    static float read_one(const uint16_t* from) { return from_bf16(*from); }
    // To the nearest, ties to even. What is not a number stays none.
    static void write(uint16_t* to, Vec value) {
        const Ints bits = reinterpret_cast<const Ints&>(value);
        const Ints odd = (bits >> 16) & 1;
        const Ints rounded = (bits + 0x7fff + odd) >> 16;
        const Ints nan = (bits >> 16) | 64;
        const Ints is_nan = value != value;
        const Ints chosen = is_nan ? nan : rounded;
        *reinterpret_cast<Halves*>(to) = __builtin_convertvector(chosen, Halves);
    }
    static void write_one(uint16_t* to, float value) { *to = to_bf16(value); }
};

template <class T>
void norm_row(const typename T::Element* row, const typename T::Element* more, const typename T::Element* weight, float eps, int width,
              typename T::Element* sum_out, typename T::Element* out) {
    Vec squares = {};
    float rest = 0.0f;
    int i = 0;
    for (; i + LANES <= width; i += LANES) {
        Vec x = T::read(row + i);
        if (more) {
            T::write(sum_out + i, x + T::read(more + i));
            x = T::read(sum_out + i);
        }
        squares += x * x;
    }
    for (; i < width; ++i) {
        float x = T::read_one(row + i);
        if (more) {
            T::write_one(sum_out + i, x + T::read_one(more + i));
            x = T::read_one(sum_out + i);
        }
        rest += x * x;
    }
    const float scale = 1.0f / std::sqrt((sum(squares) + rest) / float(width) + eps);
    const typename T::Element* from = more ? sum_out : row;
    for (i = 0; i + LANES <= width; i += LANES) T::write(out + i, T::read(from + i) * scale * T::read(weight + i));
    for (; i < width; ++i) T::write_one(out + i, T::read_one(from + i) * scale * T::read_one(weight + i));
}

// e to the power of -|x| is at most 1, which is what `exp_of` is for.
inline Vec silu(Vec x) {
    const Ints is_negative = x < Vec{};
    const Vec small = exp_of(is_negative ? x : -x);
    return x * (is_negative ? small : broadcast(1.0f)) / (1.0f + small);
}

template <class T>
void gate_row(const typename T::Element* gate, const typename T::Element* up, int width, typename T::Element* out) {
    int i = 0;
    for (; i + LANES <= width; i += LANES) T::write(out + i, silu(T::read(gate + i)) * T::read(up + i));
    for (; i < width; ++i) T::write_one(out + i, silu(broadcast(T::read_one(gate + i)))[0] * T::read_one(up + i));
}

// Both halves of one head: (a, b) -> (a cos - b sin, b cos + a sin), each with the cosine and sine of its own place.
template <class T>
void rotate_head(const typename T::Element* head, const typename T::Element* cos, const typename T::Element* sin, int dim,
                 typename T::Element* out) {
    const int half = dim / 2;
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        const Vec a = T::read(head + i), b = T::read(head + half + i);
        T::write(out + i, a * T::read(cos + i) - b * T::read(sin + i));
        T::write(out + half + i, b * T::read(cos + half + i) + a * T::read(sin + half + i));
    }
    for (; i < half; ++i) {
        const float a = T::read_one(head + i), b = T::read_one(head + half + i);
        T::write_one(out + i, a * T::read_one(cos + i) - b * T::read_one(sin + i));
        T::write_one(out + half + i, b * T::read_one(cos + half + i) + a * T::read_one(sin + half + i));
    }
}

template <class Row>
void each_row(int64_t num_rows, int num_threads, Row&& row) {
#pragma omp parallel for num_threads(num_threads) if (num_rows > kRowsOfThread) schedule(static)
    for (int64_t number = 0; number < num_rows; ++number) row(number);
}

}  // namespace

// Rows lie end to end, `width` numbers each. With `more` the norm is that of the sum of both, which is stored in `sum`.
struct Norm {
    int64_t num_rows, width;
    float eps;
    int32_t is_bf16, num_threads;
    const void *rows, *more, *weight;
    void *sum, *out;
};

template <class T>
static void norm(const Norm& job) {
    using E = typename T::Element;
    each_row(job.num_rows, job.num_threads, [&](int64_t number) {
        const int64_t at = number * job.width;
        norm_row<T>(static_cast<const E*>(job.rows) + at, job.more ? static_cast<const E*>(job.more) + at : nullptr,
                    static_cast<const E*>(job.weight), job.eps, int(job.width), job.sum ? static_cast<E*>(job.sum) + at : nullptr,
                    static_cast<E*>(job.out) + at);
    });
}

extern "C" void paceline_norm(const Norm* job) { job->is_bf16 ? norm<Bf16s>(*job) : norm<Floats>(*job); }

// Each row of `rows` is a gate and what goes through it, `width` numbers each.
struct Gate {
    int64_t num_rows, width;
    int32_t is_bf16, num_threads;
    const void* rows;
    void* out;
};

template <class T>
static void gate(const Gate& job) {
    using E = typename T::Element;
    each_row(job.num_rows, job.num_threads, [&](int64_t number) {
        const E* row = static_cast<const E*>(job.rows) + number * 2 * job.width;
        gate_row<T>(row, row + job.width, int(job.width), static_cast<E*>(job.out) + number * job.width);
    });
}

extern "C" void paceline_gate(const Gate* job) { job->is_bf16 ? gate<Bf16s>(*job) : gate<Floats>(*job); }

// Each row of `rows`, `row_stride` numbers from the next, has the heads of the queries, of the keys and of the values, of `dim` numbers each.
// Queries and keys are rotated in place; then, where there are `slots`, keys and values are stored in the pool's blocks, a row's at its slot.
struct Rotation {
    int64_t num_rows, num_heads, num_kv_heads, dim, row_stride;
    int64_t block_size, key_block_stride, key_token_stride, value_block_stride, value_token_stride;
    int32_t is_bf16, num_threads;
    void* rows;
    const void *cos, *sin;
    const int64_t* slots;
    void *keys, *values;
};

template <class T>
static void rotate(const Rotation& job) {
    using E = typename T::Element;
    const int64_t dim = job.dim;
    each_row(job.num_rows, job.num_threads, [&](int64_t number) {
        E* row = static_cast<E*>(job.rows) + number * job.row_stride;
        const E *cos = static_cast<const E*>(job.cos) + number * dim, *sin = static_cast<const E*>(job.sin) + number * dim;
        for (int64_t head = 0; head < job.num_heads + job.num_kv_heads; ++head)
            rotate_head<T>(row + head * dim, cos, sin, int(dim), row + head * dim);
        if (!job.slots) return;
        const int64_t block = job.slots[number] / job.block_size, offset = job.slots[number] % job.block_size;
        const size_t num_bytes = size_t(job.num_kv_heads * dim) * sizeof(E);
        const E* keys = row + job.num_heads * dim;
        std::memcpy(static_cast<E*>(job.keys) + block * job.key_block_stride + offset * job.key_token_stride, keys, num_bytes);
        std::memcpy(static_cast<E*>(job.values) + block * job.value_block_stride + offset * job.value_token_stride,
                    keys + job.num_kv_heads * dim, num_bytes);
    });
}

extern "C" void paceline_rotate(const Rotation* job) { job->is_bf16 ? rotate<Bf16s>(*job) : rotate<Floats>(*job); }
