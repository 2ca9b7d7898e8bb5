#include "selected.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "activations.h"
#include "team.h"

namespace sportsllm {

namespace {

// Of one thread, for the piece that it works on.
struct Buffers {
  std::vector<float> scores, shares, block_sums, queries, parts, largest, totals, found, most, sums;
  std::vector<int64_t> limits, order;
  std::vector<const float*> pointers;
};

Buffers& buffers_of_thread() {
  thread_local Buffers buffers;
  return buffers;
}

// Tokens side by side, all of which are attended to.
struct Run {
  int64_t begin, end;
};

class SelectedJob {
 public:
  SelectedJob(const SelectedShape& shape, const SelectedInputs& inputs, Scratch* scratch)
      : s_(shape), in_(inputs), v_(chosen_variant()), scratch_(scratch), rows_(inputs.batch * inputs.tokens),
        lanes_(pieces_of(shape.index_heads, 16)), step_(std::max<int64_t>(1, kAttendAtOnce / shape.block)) {
    for (int64_t b = 0; b < in_.batch; ++b) most_blocks_ = std::max(most_blocks_, pieces_of(start(b) + in_.tokens, s_.block));
    parts_ = pieces_of(most_blocks_, step_);
    scratch_->begin_counting();
    take(scratch_);
    scratch_->begin();
    take(scratch_);
  }

  void run(RunParallel parallel, void* context) {
    Team<SelectedJob> team(this, scratch_->workers);
    if (rows_ <= kGemvRows) {
      for (int64_t row = 0; row < rows_; ++row) pack(row, queries_ + row * packed_size());
      team.add(rows_ * lanes_ * parts_, &SelectedJob::score, &SelectedJob::choose_all);
      team.add(rows_ * s_.kv_heads, &SelectedJob::attend_head);
    } else {
      team.add(rows_, &SelectedJob::attend_row);
    }
    parallel(context, &Team<SelectedJob>::work_of, &team);
    scratch_->workers = std::max(1, team.arrived());
  }

 private:
  void take(Scratch* scratch) {
    const int64_t gemv_rows = rows_ <= kGemvRows ? rows_ : 0;
    queries_ = scratch->take<float>(gemv_rows * packed_size());
    sums_ = scratch->take<float>(gemv_rows * lanes_ * most_blocks_ * 16);
    largest_ = scratch->take<float>(gemv_rows * lanes_ * parts_ * 16);
    totals_ = scratch->take<float>(gemv_rows * lanes_ * parts_ * 16);
    shares_ = scratch->take<float>(most_blocks_);
    runs_ = scratch->take<Run>(gemv_rows * s_.blocks);
    counts_ = scratch->take<int64_t>(gemv_rows);
  }

  // Position of a sequence's first new token, and of a row's.
  int64_t start(int64_t b) const { return std::max<int64_t>(0, int64_t{in_.last[b]} + 1 - in_.tokens); }
  int64_t place(int64_t row) const { return start(row / in_.tokens) + row % in_.tokens; }
  bool sees_all(int64_t row) const { return place(row) / s_.block < s_.blocks; }

  int64_t packed_size() const { return lanes_ * s_.index_size * 16; }

  // A row's index queries, scaled, as (I, 16) of sixteen heads each; missing heads are zeros.
  void pack(int64_t row, float* to) {
    std::fill(to, to + packed_size(), 0.0f);
    for (int64_t j = 0; j < s_.index_heads; ++j) {
      const float* from = in_.index_query + (row * s_.index_heads + j) * s_.index_size;
      float* lane = to + j / 16 * s_.index_size * 16 + j % 16;
      for (int64_t i = 0; i < s_.index_size; ++i) lane[i * 16] = from[i] * s_.scale;
    }
  }

  // Sums over the blocks of a part, of sixteen heads; nothing of a part that a row does not see.
  void score_part(int64_t row, int64_t part, const float* queries, float* sums, float* largest, float* total) {
    const int64_t begin = part * step_ * s_.block, end = std::min(place(row) + 1, begin + step_ * s_.block);
    if (begin >= end) return;
    std::vector<float>& scores = buffers_of_thread().scores;
    scores.resize((end - begin) * 16);
    const float* keys = in_.index_key + row / in_.tokens * in_.room * s_.index_size;
    v_.index_part(queries, keys, begin, end, s_.index_size, s_.block, scores.data(), sums, largest, total);
  }

  void score(int64_t piece) {
    const int64_t part = piece % parts_, group = piece / parts_, row = group / lanes_, lanes = group % lanes_;
    if (sees_all(row)) return;
    score_part(row, part, queries_ + row * packed_size() + lanes * s_.index_size * 16,
               sums_ + (group * most_blocks_ + part * step_) * 16, largest_ + piece * 16, totals_ + piece * 16);
  }

  // Shares of attention of the blocks that a row sees, the sum over heads.
  void share(int64_t row, const float* sums, const float* largest, const float* totals, float* shares) {
    const int64_t blocks = place(row) / s_.block + 1;
    std::fill(shares, shares + blocks, 0.0f);
    for (int64_t n = 0; n < lanes_; ++n) {
      v_.add_shares(sums + n * most_blocks_ * 16, largest + n * parts_ * 16, totals + n * parts_ * 16,
                    pieces_of(blocks, step_), step_, blocks, std::min<int64_t>(16, s_.index_heads - n * 16), shares);
    }
  }

  // The runs of tokens that a row attends to, by the shares of its blocks; the number of them.
  int64_t choose(int64_t row, const float* shares, Run* runs) {
    const int64_t seen = place(row) + 1, own_block = place(row) / s_.block;
    if (sees_all(row)) {
      runs[0] = {0, seen};
      return 1;
    }
    std::vector<int64_t>& order = buffers_of_thread().order;
    order.clear();
    const int64_t newest = own_block - s_.newest + 1, wanted = s_.blocks - s_.newest - 1;
    for (int64_t b = 1; b < newest; ++b) order.push_back(b);
    const auto share_of = [&](int64_t b) { return shares[b] >= 0 ? shares[b] : -1.0f; };  // not a number comes last
    std::nth_element(order.begin(), order.begin() + (wanted - 1), order.end(), [&](int64_t a, int64_t b) {
      return share_of(a) != share_of(b) ? share_of(a) > share_of(b) : a < b;
    });
    order.resize(wanted);
    std::sort(order.begin(), order.end());
    runs[0] = {0, s_.block};
    int64_t count = 1;
    const auto add = [&](int64_t begin, int64_t end) {
      if (runs[count - 1].end == begin) {
        runs[count - 1].end = end;
      } else {
        runs[count++] = {begin, end};
      }
    };
    for (int64_t b : order) add(b * s_.block, (b + 1) * s_.block);
    add(newest * s_.block, seen);
    return count;
  }

  void choose_all() {
    for (int64_t row = 0; row < rows_; ++row) {
      if (!sees_all(row)) {
        const int64_t first = row * lanes_;
        share(row, sums_ + first * most_blocks_ * 16, largest_ + first * parts_ * 16, totals_ + first * parts_ * 16, shares_);
      }
      counts_[row] = choose(row, shares_, runs_ + row * s_.blocks);
    }
  }

  // One key/value head's query heads over the runs.
  void attend(int64_t row, int64_t kv, const Run* runs, int64_t count) {
    Buffers& own = buffers_of_thread();
    const int64_t e = s_.head_size, group = s_.heads / s_.kv_heads, b = row / in_.tokens, seen = place(row) + 1;
    int64_t parts = 0;
    for (int64_t r = 0; r < count; ++r) parts += pieces_of(runs[r].end - runs[r].begin, kAttendAtOnce);
    own.queries.resize(group * e), own.found.resize(group * e), own.most.resize(group), own.sums.resize(group);
    own.scores.resize(group * kAttendAtOnce), own.parts.resize(group * parts * e);
    own.largest.resize(group * parts), own.totals.resize(group * parts);
    own.pointers.resize(group), own.limits.assign(group, seen);
    const float* from = in_.query + (row * s_.heads + kv * group) * e;
    for (int64_t i = 0; i < group * e; ++i) own.queries[i] = from[i] * s_.scale;
    for (int64_t g = 0; g < group; ++g) own.pointers[g] = own.queries.data() + g * e;
    const int64_t at = (b * s_.kv_heads + kv) * in_.room * e;
    const Cached cached = {in_.key + at, in_.value + at, CacheType::kFloat};
    int64_t part = 0;
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t begin = runs[r].begin; begin < runs[r].end; begin += kAttendAtOnce, ++part) {
        const int64_t end = std::min(runs[r].end, begin + kAttendAtOnce);
        v_.attend(own.pointers.data(), own.limits.data(), group, cached, begin, end, e, own.scores.data(), own.found.data(),
                  own.most.data(), own.sums.data());
        for (int64_t g = 0; g < group; ++g) {
          std::memcpy(&own.parts[(g * parts + part) * e], &own.found[g * e], e * sizeof(float));
          own.largest[g * parts + part] = own.most[g], own.totals[g * parts + part] = own.sums[g];
        }
      }
    }
    float* out = in_.out + (row * s_.heads + kv * group) * e;
    for (int64_t g = 0; g < group; ++g) {
      v_.join(&own.parts[g * parts * e], &own.largest[g * parts], &own.totals[g * parts], parts, e, out + g * e);
    }
  }

  void attend_head(int64_t piece) {
    const int64_t row = piece / s_.kv_heads;
    attend(row, piece % s_.kv_heads, runs_ + row * s_.blocks, counts_[row]);
  }

  void attend_row(int64_t row) {
    Buffers& own = buffers_of_thread();
    std::vector<Run> runs(s_.blocks);
    if (!sees_all(row)) {
      own.queries.resize(packed_size()), own.shares.resize(most_blocks_);
      own.block_sums.resize(lanes_ * most_blocks_ * 16);
      own.largest.resize(lanes_ * parts_ * 16), own.totals.resize(lanes_ * parts_ * 16);
      pack(row, own.queries.data());
      for (int64_t n = 0; n < lanes_; ++n) {
        for (int64_t p = 0; p < parts_; ++p) {
          score_part(row, p, own.queries.data() + n * s_.index_size * 16, &own.block_sums[(n * most_blocks_ + p * step_) * 16],
                     &own.largest[(n * parts_ + p) * 16], &own.totals[(n * parts_ + p) * 16]);
        }
      }
      share(row, own.block_sums.data(), own.largest.data(), own.totals.data(), own.shares.data());
    }
    const int64_t count = choose(row, own.shares.data(), runs.data());
    for (int64_t kv = 0; kv < s_.kv_heads; ++kv) attend(row, kv, runs.data(), count);
  }

  const SelectedShape& s_;
  const SelectedInputs& in_;
  const Variant& v_;
  Scratch* const scratch_;
  const int64_t rows_, lanes_, step_;  // tokens; sixteens of index heads; blocks of a part
  int64_t most_blocks_ = 0, parts_ = 0;
  float *queries_ = nullptr, *sums_ = nullptr, *largest_ = nullptr, *totals_ = nullptr, *shares_ = nullptr;
  Run* runs_ = nullptr;
  int64_t* counts_ = nullptr;
};

}  // namespace

void run_selected(const SelectedShape& shape, const SelectedInputs& inputs, Scratch* scratch, RunParallel parallel,
                  void* context) {
  SelectedJob(shape, inputs, scratch).run(parallel, context);
}

}  // namespace sportsllm
