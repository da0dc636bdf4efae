// Paged attention over a ragged batch: sequences that decode, and chunks of prompts. It equals `attend` in paceline/engine/attention.py.
//
// A sequence's context is cut into splits of 128 tokens, counted from its beginning. Of each split a row (a query token and a head)
// has its largest score, the sum of its weights and its weighted values; splits are joined in order (online softmax: Milakov and
// Gimelshein, 2018, https://arxiv.org/abs/1805.02867). So what a row gives depends on its own sequence alone, not on who else is in the
// batch nor on the number of threads: threads take tiles of rows, and the splits of a long context where it has a single row to give.
//
// Heads that share keys (grouped-query attention) are rows of one tile, which read each key once.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

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

constexpr int kSplit = 128;     // tokens
constexpr int kMaxRows = 48;    // of a tile
constexpr int kRows = 3;        // rows, tokens and vectors that stay in registers
constexpr int kTokens = 4;
constexpr int kVectors = 4;
constexpr float kNone = -std::numeric_limits<float>::infinity();

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

// Rows of a tile: [query tokens][heads of one KV head], and what they have come to.
struct Partial {
    std::vector<float> largest, total, values;

    Partial(int rows, int value_dim) : largest(rows, kNone), total(rows, 0.0f), values(size_t(rows) * value_dim, 0.0f) {}

    void clear() {
        std::fill(largest.begin(), largest.end(), kNone);
        std::fill(total.begin(), total.end(), 0.0f);
        std::fill(values.begin(), values.end(), 0.0f);
    }
};

// Joins the next split to what came before it.
void join(float& largest, float& total, float* values, float next_largest, float next_total, const float* next_values, int dim) {
    if (next_largest == kNone) return;
    // Not std::max: what is no number must not look like nothing.
    const float most = largest > next_largest ? largest : next_largest;
    const float before = largest == kNone ? 0.0f : exp_of(largest - most), after = exp_of(next_largest - most);
    largest = most;
    total = total * before + next_total * after;
    for (int i = 0; i < dim; ++i) values[i] = values[i] * before + (next_values ? next_values[i] * after : 0.0f);
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
    Tile(const Shape& shape, const Batch& batch) : shape_(shape), batch_(batch) {
        group_ = int(shape.num_heads / shape.num_kv_heads);
        most_ = std::max(1, kMaxRows / group_);
        key_dim_ = whole_vectors(shape.key_dim), value_dim_ = whole_vectors(shape.value_dim);
        queries_.resize(size_t(most_) * group_ * key_dim_);
        scores_.resize(size_t(most_) * group_ * kSplit);
        nothing_.resize(std::max(key_dim_, value_dim_));
        // Zeros behind a head that does not fill its last vector.
        if (shape.is_bf16 || shape.key_dim < key_dim_) keys_.resize(size_t(kSplit) * key_dim_);
        if (shape.is_bf16 || shape.value_dim < value_dim_) values_.resize(size_t(kSplit) * value_dim_);
    }


    int max_queries() const { return most_; }
    int max_rows() const { return most_ * group_; }
    int group() const { return group_; }

    // The query tokens [first, last) of the batch, the first of which is at `position` in its sequence.
    void begin(int64_t kv_head, int64_t first, int64_t last, int64_t position, const int64_t* table) {
        kv_head_ = kv_head, num_queries_ = int(last - first), position_ = position, table_ = table;
        for (int64_t token = first; token < last; ++token)
            for (int head = 0; head < group_; ++head) {
                const int64_t from = token * shape_.query_token_stride + (kv_head * group_ + head) * shape_.query_head_stride;
                float* to = queries_.data() + ((token - first) * group_ + head) * key_dim_;
                for (int64_t i = 0; i < shape_.key_dim; ++i) to[i] = shape_.scaling * read(batch_.query, from + i);
            }
    }

    // Tokens [begin, end) of the context, of one split, into `out`.
    void attend(int64_t begin, int64_t end, Partial& out) {
        const int rows = num_queries_ * group_, dim = value_dim_;
        const int num_tokens = gather(begin, end);
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

    bool is_seen(int64_t position, int64_t token) const {
        if (token > position) return false;
        return !shape_.window || token > position - shape_.window || token < shape_.num_sink_tokens;
    }

    // Where the keys and values of a split are that any row sees, as floats; gives how many places there are, holes included. Places are
    // counted from the split's beginning, in whole vectors, so that a token is in the same lane whatever else the tile sees.
    int gather(int64_t begin, int64_t end) {
        const int64_t stop = std::min(end, position_ + num_queries_);
        const int64_t first = shape_.window ? std::max<int64_t>(0, position_ - shape_.window + 1) : 0;
        const int64_t skipped = begin < shape_.num_sink_tokens ? 0 : std::max<int64_t>(0, first - begin) / LANES * LANES;
        base_ = begin + skipped, has_holes_ = false;
        int count = 0;
        for (int64_t token = base_; token < stop; ++token, ++count) {
            if (token < first && token >= shape_.num_sink_tokens) {
                key_of_[count] = value_of_[count] = nothing_.data(), has_holes_ = true;
                continue;
            }
            const int64_t block = table_[token / shape_.block_size], slot = token % shape_.block_size;
            const int64_t key = block * shape_.key_block_stride + (slot * shape_.num_kv_heads + kv_head_) * shape_.key_dim;
            const int64_t value = block * shape_.value_block_stride + (slot * shape_.num_kv_heads + kv_head_) * shape_.value_dim;
            key_of_[count] = point(batch_.keys, key, keys_, count, int(shape_.key_dim), key_dim_);
            value_of_[count] = point(batch_.values, value, values_, count, int(shape_.value_dim), value_dim_);
        }
        return count;
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
        const int64_t position = position_ + row / group_;
        if (shape_.softcap > 0)
            for (int t = 0; t < num_tokens; ++t) scores[t] = shape_.softcap * std::tanh(scores[t] / shape_.softcap);
        // A tile has what one of its rows sees; a single row sees it all, but for holes.
        if (num_queries_ > 1 || has_holes_)
            for (int t = 0; t < num_tokens; ++t) scores[t] = is_seen(position, base_ + t) ? scores[t] : kNone;
        const int whole = whole_vectors(num_tokens);
        std::fill(scores + num_tokens, scores + whole, kNone);
        const float largest = out.largest[row] = largest_of(scores, whole);
        Vec total = {};
        for (int t = 0; t < whole; t += LANES) {
            const Vec weight = largest == kNone ? Vec{} : exp_of(load(scores + t) - largest);
            store(scores + t, weight);
            total += weight;
        }
        out.total[row] = sum(total);
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
    int group_, most_, key_dim_, value_dim_, num_queries_ = 0;
    int64_t kv_head_ = 0, position_ = 0, base_ = 0;
    bool has_holes_ = false;
    const int64_t* table_ = nullptr;
    std::vector<float> queries_, scores_, keys_, values_, nothing_;
    const float *key_of_[kSplit], *value_of_[kSplit];
};

// A tile of query tokens of one sequence, and the splits of its context [begin, end) that one thread looks at.
struct Task {
    int64_t sequence, first, last, begin, end;
    int64_t partial;  // where its result waits for the others of the same row; -1: it is all there is
};

void finish(const Shape& shape, const Batch& batch, int64_t token, int64_t head, float largest, float total, float* values) {
    const int dim = int(shape.value_dim);
    if (batch.sinks) join(largest, total, values, batch.sinks[head], 1.0f, nullptr, dim);
    const int64_t at = (token * shape.num_heads + head) * dim;
    for (int i = 0; i < dim; ++i) {
        const float value = values[i] / total;
        if (shape.is_bf16)
            static_cast<uint16_t*>(batch.out)[at + i] = to_bf16(value);
        else
            static_cast<float*>(batch.out)[at + i] = value;
    }
}

int64_t first_split(const Shape& shape, int64_t position) {
    const int64_t first = shape.window ? std::max<int64_t>(0, position - shape.window + 1) : 0;
    return shape.num_sink_tokens ? 0 : first / kSplit * kSplit;
}

std::vector<Task> plan(const Shape& shape, const Batch& batch, int most_queries, int64_t& num_partials) {
    std::vector<Task> tasks;
    num_partials = 0;
    for (int64_t s = 0; s < shape.num_sequences; ++s) {
        const auto [first, last, context, table] = batch.sequences[s];
        for (int64_t begin = first; begin < last; begin += most_queries) {
            const int64_t end = std::min<int64_t>(begin + most_queries, last);
            const int64_t from = first_split(shape, context - (last - begin)), to = context - (last - end);
            if (last - first > 1 || to - from <= kSplit) {
                tasks.push_back({s, begin, end, from, to, -1});
                continue;
            }
            for (int64_t split = from; split < to; split += kSplit)
                tasks.push_back({s, begin, end, split, std::min(split + kSplit, to), num_partials++});
        }
    }
    return tasks;
}

}  // namespace

extern "C" void paceline_paged_attention(const Shape* shape_, const Batch* batch_) {
    const Shape& shape = *shape_;
    const Batch& batch = *batch_;
    const int dim = whole_vectors(shape.value_dim), group = int(shape.num_heads / shape.num_kv_heads);
    int64_t num_partials;
    const std::vector<Task> tasks = plan(shape, batch, std::max(1, kMaxRows / group), num_partials);
    // Of each split that waits for others: a row is a head.
    std::vector<float> largest(size_t(num_partials) * shape.num_heads), total(largest.size()), values(largest.size() * dim);

#pragma omp parallel num_threads(shape.num_threads) if (tasks.size() > 1)
    {
        Tile tile(shape, batch);
        Partial split(tile.max_rows(), dim), sum(tile.max_rows(), dim);
#pragma omp for schedule(dynamic, 1)
        for (size_t number = 0; number < tasks.size(); ++number) {
            const Task& task = tasks[number];
            const auto [first, last, context, table] = batch.sequences[task.sequence];
            const int64_t position = context - (last - task.first);
            const int rows = int(task.last - task.first) * group;
            for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
                tile.begin(kv_head, task.first, task.last, position, batch.tables + table);
                sum.clear();
                for (int64_t begin = task.begin; begin < task.end; begin += kSplit) {
                    tile.attend(begin, std::min(begin + kSplit, task.end), split);
                    for (int row = 0; row < rows; ++row)
                        join(sum.largest[row], sum.total[row], sum.values.data() + size_t(row) * dim, split.largest[row],
                             split.total[row], split.values.data() + size_t(row) * dim, dim);
                }
                for (int row = 0; row < rows; ++row) {
                    const int64_t head = kv_head * group + row % group;
                    float* from = sum.values.data() + size_t(row) * dim;
                    if (task.partial < 0) {
                        finish(shape, batch, task.first + row / group, head, sum.largest[row], sum.total[row], from);
                        continue;
                    }
                    const size_t at = size_t(task.partial) * shape.num_heads + head;
                    largest[at] = sum.largest[row], total[at] = sum.total[row];
                    std::copy(from, from + dim, values.data() + at * dim);
                }
            }
        }
    }
    std::vector<float> joined(dim);
    for (size_t number = 0; number < tasks.size();) {
        const Task& task = tasks[number];
        if (task.partial < 0) {
            ++number;
            continue;
        }
        size_t next = number;
        while (next < tasks.size() && tasks[next].partial >= 0 && tasks[next].sequence == task.sequence) ++next;
        for (int64_t head = 0; head < shape.num_heads; ++head) {
            float most = kNone, all = 0.0f;
            std::fill(joined.begin(), joined.end(), 0.0f);
            for (size_t part = number; part < next; ++part) {
                const size_t at = size_t(tasks[part].partial) * shape.num_heads + head;
                join(most, all, joined.data(), largest[at], total[at], values.data() + at * dim, dim);
            }
            finish(shape, batch, task.first, head, most, all, joined.data());
        }
        number = next;
    }
}
