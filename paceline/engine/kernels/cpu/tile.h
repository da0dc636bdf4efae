// Some query tokens of one sequence, with one KV head, against one split of its context at a time.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "halves.h"

// What the batch and the layer are; the same names as in paceline/engine/kernels/cpu/paged_attention.py. Strides count elements.
struct Shape {
    int64_t num_sequences, num_heads, num_kv_heads, key_dim, value_dim, block_size;
    int64_t query_token_stride, query_head_stride, key_block_stride, value_block_stride;
    int64_t window, num_sink_tokens;  // a window of 0 sees everything
    float scaling, softcap;           // a softcap of 0 is none
    int32_t is_bf16, num_threads;
};

struct Batch {
    const void *query, *keys, *values;
    void* out;                         // [num_tokens, num_heads, value_dim]
    const int64_t (*sequences)[4];     // rows [first, last), tokens of context, where in `tables` its own begins
    const int64_t* tables;
    const float* sinks;                // [num_heads], or nothing
};

namespace {

constexpr int kMaxRows = 48;    // of a tile
constexpr int kRows = 3;        // rows, tokens and vectors that stay in registers
constexpr int kTokens = 4;
constexpr int kVectors = 4;
constexpr float kNone = -std::numeric_limits<float>::infinity();

inline int heads_of_group(const Shape& shape) { return int(shape.num_heads / shape.num_kv_heads); }
inline int max_queries(const Shape& shape) { return std::max(1, kMaxRows / heads_of_group(shape)); }

// Rows of a tile: [query tokens][heads of one KV head], and what they have come to. Or, of splits that wait for others: [splits][heads].
struct Partial {
    std::vector<float> largest, total, values;

    Partial(size_t rows, int value_dim) : largest(rows, kNone), total(rows, 0.0f), values(rows * value_dim, 0.0f) {}

    void clear() {
        std::fill(largest.begin(), largest.end(), kNone);
        std::fill(total.begin(), total.end(), 0.0f);
        std::fill(values.begin(), values.end(), 0.0f);
    }
};

// One piece of code for all callers: each product and sum below is rounded alike, whoever calls, and in every lane.
#if defined(__clang__)
#define ALONE __attribute__((noinline))
#else
#define ALONE __attribute__((noipa))
#endif

// Joins the next split, whose values may be none, to what came before it. `dim` is of whole vectors.
ALONE void join(float& largest, float& total, float* values, float next_largest, float next_total, const float* next_values, int dim) {
    if (next_largest == kNone) return;
    // Not std::max: what is no number must not look like nothing.
    const float most = largest > next_largest ? largest : next_largest;
    const float before = largest == kNone ? 0.0f : exp_of(largest - most), after = exp_of(next_largest - most);
    largest = most;
    total = total * before + next_total * after;
    for (int i = 0; i < dim; i += LANES) {
        const Vec next = next_values ? load(next_values + i) : Vec{};
        store(values + i, load(values + i) * before + next * after);
    }
}

template <int R, int T>
inline void dot(const float* const* rows, const float* const* tokens, int dim, float* scores) {
    Vec sums[R][T] = {};
    for (int i = 0; i < dim; i += LANES) {
        Vec row[R];
        for (int r = 0; r < R; ++r) row[r] = load(rows[r] + i);
        for (int t = 0; t < T; ++t) {
            const Vec token = load(tokens[t] + i);
            for (int r = 0; r < R; ++r) sums[r][t] += row[r] * token;
        }
    }
    for (int r = 0; r < R; ++r) {
        if (T == 4) sum4(sums[r][0], sums[r][1 % T], sums[r][2 % T], sums[r][3 % T], scores + r * kSplit);
        for (int t = 0; T != 4 && t < T; ++t) scores[r * kSplit + t] = sum(sums[r][t]);
    }
}

template <int R>
void dots(const float* const* rows, const float* const* tokens, int num_tokens, int dim, float* scores) {
    int t = 0;
    for (; t + kTokens <= num_tokens; t += kTokens) dot<R, kTokens>(rows, tokens + t, dim, scores + t);
    for (; t < num_tokens; ++t) dot<R, 1>(rows, tokens + t, dim, scores + t);
}

template <int R, int N>
inline void weigh(const float* weights, const float* const* tokens, int num_tokens, int at, int dim, float* out) {
    Vec sums[R][N] = {};
    for (int t = 0; t < num_tokens; ++t) {
        Vec value[N];
        for (int n = 0; n < N; ++n) value[n] = load(tokens[t] + at + n * LANES);
        for (int r = 0; r < R; ++r) {
            const Vec weight = broadcast(weights[r * kSplit + t]);
            for (int n = 0; n < N; ++n) sums[r][n] += weight * value[n];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) store(out + r * dim + at + n * LANES, sums[r][n]);
}

template <int R>
void weigh_all(const float* weights, const float* const* tokens, int num_tokens, int dim, float* out) {
    int at = 0;
    for (; at + kVectors * LANES <= dim; at += kVectors * LANES) weigh<R, kVectors>(weights, tokens, num_tokens, at, dim, out);
    for (; at < dim; at += LANES) weigh<R, 1>(weights, tokens, num_tokens, at, dim, out);
}

// One KV head of one tile of query tokens: reads splits one after the other.
class Tile {
   public:
    Tile(const Shape& shape, const Batch& batch)
        : shape_(shape), batch_(batch), group_(heads_of_group(shape)), key_dim_(whole_vectors(shape.key_dim)),
          value_dim_(whole_vectors(shape.value_dim)),
          as_halves_(shape.is_bf16 && multiplies_halves(shape.key_dim) && multiplies_halves(shape.value_dim)),
          halves_(as_halves_ ? size_t(max_queries(shape)) * group_ : 0, key_dim_, value_dim_) {
        const size_t num_rows = size_t(max_queries(shape)) * group_;
        scores_.resize(num_rows * kSplit);
        nothing_.resize(std::max(key_dim_, value_dim_));
        if (as_halves_) return;
        queries_.resize(num_rows * key_dim_);
        // Zeros behind a head that does not fill its last vector.
        if (shape.is_bf16 || shape.key_dim < key_dim_) keys_.resize(size_t(kSplit) * key_dim_);
        if (shape.is_bf16 || shape.value_dim < value_dim_) values_.resize(size_t(kSplit) * value_dim_);
    }

    // The query tokens [first, last) of the batch, the first of which is at `position` in its sequence.
    void begin(int64_t kv_head, int64_t first, int64_t last, int64_t position, const int64_t* table) {
        kv_head_ = kv_head, num_queries_ = int(last - first), position_ = position, table_ = table;
        for (int64_t token = first; token < last; ++token)
            for (int head = 0; head < group_; ++head) {
                const int64_t from = token * shape_.query_token_stride + (kv_head * group_ + head) * shape_.query_head_stride;
                const int row = int(token - first) * group_ + head;
                if (as_halves_) {
                    std::copy_n(static_cast<const uint16_t*>(batch_.query) + from, shape_.key_dim, halves_.query(row));
                    continue;
                }
                float* to = queries_.data() + size_t(row) * key_dim_;
                for (int64_t i = 0; i < shape_.key_dim; ++i) to[i] = shape_.scaling * read(batch_.query, from + i);
            }
    }

    // Tokens [begin, end) of the context, of one split, into `out`.
    void attend(int64_t begin, int64_t end, Partial& out) {
        const int rows = num_queries_ * group_, dim = value_dim_;
        const int num_tokens = gather(begin, end);
        if (as_halves_) {
            halves_.score(rows, num_tokens, shape_.scaling, scores_.data());
            for (int row = 0; row < rows; ++row) soften(row, num_tokens, out);
            halves_.weigh(scores_.data(), rows, num_tokens, out.values.data());
            return;
        }
        for (int row = 0; row < rows; row += kRows) score(row, std::min(kRows, rows - row), num_tokens);
        for (int row = 0; row < rows; ++row) soften(row, num_tokens, out);
        for (int row = 0; row < rows; row += kRows) {
            const float* weights = scores_.data() + size_t(row) * kSplit;
            float* to = out.values.data() + size_t(row) * dim;
            switch (std::min(kRows, rows - row)) {
                case 1: weigh_all<1>(weights, value_of_, num_tokens, dim, to); break;
                case 2: weigh_all<2>(weights, value_of_, num_tokens, dim, to); break;
                default: weigh_all<kRows>(weights, value_of_, num_tokens, dim, to);
            }
        }
    }

   private:
    float read(const void* from, int64_t at) const {
        return shape_.is_bf16 ? from_bf16(static_cast<const uint16_t*>(from)[at]) : static_cast<const float*>(from)[at];
    }

    // Where the keys and values of a split are that any row sees, as floats; gives how many places there are, holes included. Places are
    // counted from the split's beginning, in whole vectors, so that a token is in the same lane whatever else the tile sees.
    int gather(int64_t begin, int64_t end) {
        const int64_t stop = std::min(end, position_ + num_queries_);
        const int64_t first = shape_.window ? std::max<int64_t>(0, position_ - shape_.window + 1) : 0;
        const int64_t skipped = begin < shape_.num_sink_tokens ? 0 : std::max<int64_t>(0, first - begin) / LANES * LANES;
        base_ = begin + skipped;
        int count = 0;
        for (int64_t token = base_; token < stop; ++token, ++count) {
            if (token < first && token >= shape_.num_sink_tokens) {
                place_nothing(count);
                continue;
            }
            const int64_t block = table_[token / shape_.block_size], slot = token % shape_.block_size;
            const int64_t key = block * shape_.key_block_stride + (slot * shape_.num_kv_heads + kv_head_) * shape_.key_dim;
            const int64_t value = block * shape_.value_block_stride + (slot * shape_.num_kv_heads + kv_head_) * shape_.value_dim;
            if (as_halves_) {
                halves_.key_of[count] = static_cast<const uint16_t*>(batch_.keys) + key;
                halves_.value_of[count] = static_cast<const uint16_t*>(batch_.values) + value;
                fetch(halves_.key_of[count], int(shape_.key_dim)), fetch(halves_.value_of[count], int(shape_.value_dim));
                continue;
            }
            key_of_[count] = point(batch_.keys, key, keys_, count, int(shape_.key_dim), key_dim_);
            value_of_[count] = point(batch_.values, value, values_, count, int(shape_.value_dim), value_dim_);
        }
        for (int place = count; place < whole_vectors(count); ++place) place_nothing(place);
        return count;
    }

    // From memory, while others are being looked up.
    static void fetch(const uint16_t* from, int dim) {
        for (int i = 0; i < dim; i += 32) __builtin_prefetch(from + i);
    }

    void place_nothing(int place) {
        key_of_[place] = value_of_[place] = nothing_.data();
        halves_.key_of[place] = halves_.value_of[place] = reinterpret_cast<const uint16_t*>(nothing_.data());
    }

    // Where a vector is as whole float vectors: in the pool itself, or copied.
    const float* point(const void* from, int64_t at, std::vector<float>& copies, int number, int dim, int whole) const {
        if (!shape_.is_bf16 && dim == whole) return static_cast<const float*>(from) + at;
        float* copy = copies.data() + size_t(number) * whole;
        if (shape_.is_bf16)
            widen(static_cast<const uint16_t*>(from) + at, copy, dim);
        else
            std::copy_n(static_cast<const float*>(from) + at, dim, copy);
        return copy;
    }

    void score(int row, int num_rows, int num_tokens) {
        const float* rows[kRows];
        for (int r = 0; r < num_rows; ++r) rows[r] = queries_.data() + size_t(row + r) * key_dim_;
        float* scores = scores_.data() + size_t(row) * kSplit;
        switch (num_rows) {
            case 1: dots<1>(rows, key_of_, num_tokens, key_dim_, scores); break;
            case 2: dots<2>(rows, key_of_, num_tokens, key_dim_, scores); break;
            default: dots<kRows>(rows, key_of_, num_tokens, key_dim_, scores);
        }
    }

    // Scores become weights.
    void soften(int row, int num_tokens, Partial& out) {
        float* scores = scores_.data() + size_t(row) * kSplit;
        if (shape_.softcap > 0)
            for (int t = 0; t < num_tokens; ++t) scores[t] = shape_.softcap * std::tanh(scores[t] / shape_.softcap);
        hide(position_ + row / group_, num_tokens, scores);
        const int whole = whole_vectors(num_tokens);
        const float largest = out.largest[row] = largest_of(scores, whole);
        Vec total = {};
        for (int t = 0; t < whole; t += LANES) {
            const Vec weight = largest == kNone ? Vec{} : exp_of(load(scores + t) - largest);
            store(scores + t, weight);
            total += weight;
        }
        out.total[row] = sum(total);
    }

    // A tile has what one of its rows sees. Of that the token at `position` does not see what comes after it, nor what lies between the sinks
    // and its window.
    void hide(int64_t position, int num_tokens, float* scores) const {
        const int64_t end = std::clamp<int64_t>(position + 1 - base_, 0, num_tokens);
        std::fill(scores + end, scores + whole_vectors(num_tokens), kNone);
        if (!shape_.window) return;
        const int64_t sinks = std::max<int64_t>(shape_.num_sink_tokens - base_, 0);
        const int64_t first = std::min(position - shape_.window + 1 - base_, end);
        if (first > sinks) std::fill(scores + sinks, scores + first, kNone);
    }

    // Of whole vectors; what is no number stays one.
    static float largest_of(const float* scores, int count) {
        Vec most = broadcast(kNone);
        Ints is_no_number = {};
        for (int t = 0; t < count; t += LANES) {
            const Vec score = load(scores + t);
            most = score > most ? score : most;
            is_no_number |= score != score;
        }
        float largest = kNone;
        for (int lane = 0; lane < LANES; ++lane) {
            if (is_no_number[lane]) return std::numeric_limits<float>::quiet_NaN();
            largest = std::max(largest, most[lane]);
        }
        return largest;
    }

    const Shape& shape_;
    const Batch& batch_;
    const int group_, key_dim_, value_dim_;
    const bool as_halves_;  // bfloat16 is multiplied as it is, not as floats
    int num_queries_ = 0;
    int64_t kv_head_ = 0, position_ = 0, base_ = 0;
    const int64_t* table_ = nullptr;
    std::vector<float> queries_, scores_, keys_, values_, nothing_;
    HalfProducts halves_;
    const float *key_of_[kSplit], *value_of_[kSplit];
};

}  // namespace
