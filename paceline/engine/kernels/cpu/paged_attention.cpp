// Paged attention over a ragged batch: sequences that decode, and chunks of prompts. It equals `attend` in paceline/engine/attention.py.
//
// A sequence's context is cut into splits of 128 tokens, counted from its beginning. Of each split a row (a query token and a head)
// has its largest score, the sum of its weights and its weighted values; splits are joined in order (online softmax: Milakov and
// Gimelshein, 2018, https://arxiv.org/abs/1805.02867). So what a row gives depends on its own sequence alone, not on who else is in the
// batch nor on the number of threads: threads take tiles of rows, and the splits of a long context where it has a single row to give.
//
// Heads that share keys (grouped-query attention) are rows of one tile, which read each key once.

#include "tile.h"

namespace {

// A tile of query tokens of one sequence, and the splits of its context [begin, end) that one thread looks at.
struct Task {
    int64_t sequence, first, last, begin, end;
    int64_t partial;  // where its result waits for the others of the same row; -1: it is all there is
};

void finish(const Shape& shape, const Batch& batch, int64_t token, int64_t head, float largest, float total, float* values) {
    const int dim = int(shape.value_dim);
    if (batch.sinks) join(largest, total, values, batch.sinks[head], 1.0f, nullptr, whole_vectors(dim));
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

std::vector<Task> plan(const Shape& shape, const Batch& batch, int64_t& num_partials) {
    std::vector<Task> tasks;
    const int most_queries = max_queries(shape);
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

// One thread's room, and how it does tasks.
class Worker {
   public:
    Worker(const Shape& shape, const Batch& batch, Partial& waiting)
        : shape_(shape), batch_(batch), waiting_(waiting), dim_(whole_vectors(shape.value_dim)), group_(heads_of_group(shape)),
          tile_(shape, batch), split_(size_t(max_queries(shape)) * group_, dim_), sum_(size_t(max_queries(shape)) * group_, dim_) {}

    void run(const Task& task) {
        const auto [first, last, context, table] = batch_.sequences[task.sequence];
        const int64_t position = context - (last - task.first);
        for (int64_t kv_head = 0; kv_head < shape_.num_kv_heads; ++kv_head) {
            tile_.begin(kv_head, task.first, task.last, position, batch_.tables + table);
            add_up(task);
            hand_on(task, kv_head);
        }
    }

   private:
    int num_rows(const Task& task) const { return int(task.last - task.first) * group_; }

    void add_up(const Task& task) {
        sum_.clear();
        for (int64_t begin = task.begin; begin < task.end; begin += kSplit) {
            tile_.attend(begin, std::min(begin + kSplit, task.end), split_);
            for (int row = 0; row < num_rows(task); ++row)
                join(sum_.largest[row], sum_.total[row], sum_.values.data() + size_t(row) * dim_, split_.largest[row],
                     split_.total[row], split_.values.data() + size_t(row) * dim_, dim_);
        }
    }

    // To the output, or to where the other splits of the same row are.
    void hand_on(const Task& task, int64_t kv_head) {
        for (int row = 0; row < num_rows(task); ++row) {
            const int64_t head = kv_head * group_ + row % group_;
            float* from = sum_.values.data() + size_t(row) * dim_;
            if (task.partial < 0) {
                finish(shape_, batch_, task.first + row / group_, head, sum_.largest[row], sum_.total[row], from);
                continue;
            }
            const size_t at = size_t(task.partial) * shape_.num_heads + head;
            waiting_.largest[at] = sum_.largest[row], waiting_.total[at] = sum_.total[row];
            std::copy(from, from + dim_, waiting_.values.data() + at * dim_);
        }
    }

    const Shape& shape_;
    const Batch& batch_;
    Partial& waiting_;
    const int dim_, group_;
    Tile tile_;
    Partial split_, sum_;
};

// Joins the splits of one row, which are those of the tasks [begin, end).
void join_row(const Shape& shape, const Batch& batch, const Task* begin, const Task* end, const Partial& waiting) {
    const int dim = whole_vectors(shape.value_dim);
    std::vector<float> joined(dim);
    for (int64_t head = 0; head < shape.num_heads; ++head) {
        float most = kNone, all = 0.0f;
        std::fill(joined.begin(), joined.end(), 0.0f);
        for (const Task* task = begin; task < end; ++task) {
            const size_t at = size_t(task->partial) * shape.num_heads + head;
            join(most, all, joined.data(), waiting.largest[at], waiting.total[at], waiting.values.data() + at * dim, dim);
        }
        finish(shape, batch, begin->first, head, most, all, joined.data());
    }
}

}  // namespace

extern "C" void paceline_paged_attention(const Shape* shape, const Batch* batch) {
    int64_t num_partials;
    const std::vector<Task> tasks = plan(*shape, *batch, num_partials);
    Partial waiting(size_t(num_partials) * shape->num_heads, whole_vectors(shape->value_dim));

#pragma omp parallel num_threads(shape->num_threads) if (tasks.size() > 1)
    {
        Worker worker(*shape, *batch, waiting);
#pragma omp for schedule(dynamic, 1)
        for (size_t number = 0; number < tasks.size(); ++number) worker.run(tasks[number]);
    }
    const Task* const end = tasks.data() + tasks.size();
    for (const Task* task = tasks.data(); task < end;) {
        const Task* next = task + 1;
        if (task->partial >= 0) {
            while (next < end && next->partial >= 0 && next->sequence == task->sequence) ++next;
            join_row(*shape, *batch, task, next, waiting);
        }
        task = next;
    }
}

// Whether heads of these sizes in bfloat16 are multiplied as they are.
extern "C" int32_t paceline_multiplies_halves(int64_t key_dim, int64_t value_dim) {
    return multiplies_halves(key_dim) && multiplies_halves(value_dim);
}
