#include "feed_forward.h"

#include <algorithm>

#include "activations.h"
#include "team.h"

namespace sportsllm {

namespace {

// A token that a part reads, and what its outcome is multiplied by.
struct Sent {
  int64_t token;
  float weight;
};

// A part that some token is sent to; its rows are `count` of all that are sent, from `first` on.
struct Used {
  const Part* part = nullptr;
  int64_t first = 0, count = 0, first_piece = 0;
  Activations in, inner;
  float* wide = nullptr;  // of each piece gate and up

  int64_t inner_size() const { return part->down.columns; }
};

class FeedForwardJob {
 public:
  FeedForwardJob(const FeedForwardWeights& weights, const FeedForwardInputs& inputs, Scratch* scratch)
      : w_(weights), in_(inputs), v_(chosen_variant()), scratch_(scratch) {
    send();
    direct_ = used_.size() == 1 && w_.experts.empty();
    scratch_->begin_counting();
    take(scratch_);
    scratch_->begin();
    take(scratch_);
  }

  void run(RunParallel parallel, void* context) {
    Team<FeedForwardJob> team(this, scratch_->workers);
    const int64_t rows = static_cast<int64_t>(sent_.size());
    if (rows > kGemvRows) {
      team.add(rows, &FeedForwardJob::round);
    } else {
      for (int64_t row = 0; row < rows; ++row) round(row);
    }
    team.add(pieces_, &FeedForwardJob::widen);
    team.add(pieces_of(w_.hidden, kRowsOfPiece), &FeedForwardJob::narrow);
    parallel(context, &Team<FeedForwardJob>::work_of, &team);
    scratch_->workers = std::max(1, team.arrived());
  }

 private:
  // Rows in the order of parts, those of one part in the order of tokens.
  void send() {
    const int64_t pairs = in_.tokens * w_.active, experts = static_cast<int64_t>(w_.experts.size());
    std::vector<int64_t> next(experts + 1);
    for (int64_t i = 0; i < pairs; ++i) ++next[in_.chosen[i] + 1];
    for (int64_t n = 0; n < experts; ++n) {
      if (next[n + 1] > 0) use(w_.experts[n], next[n], next[n + 1]);
      next[n + 1] += next[n];
    }
    sent_.resize(pairs + in_.tokens * static_cast<int64_t>(w_.shared.size()));
    for (int64_t i = 0; i < pairs; ++i) sent_[next[in_.chosen[i]]++] = {i / w_.active, in_.weights[i]};
    int64_t first = pairs;
    for (const Part& part : w_.shared) {
      use(part, first, in_.tokens);
      for (int64_t t = 0; t < in_.tokens; ++t) sent_[first++] = {t, 1.0f};
    }
  }

  void use(const Part& part, int64_t first, int64_t count) {
    Used used;
    used.part = &part, used.first = first, used.count = count, used.first_piece = pieces_;
    pieces_ += pieces_of(used.inner_size(), kRowsOfPiece);
    used_.push_back(used);
  }

  void take(Scratch* scratch) {
    for (Used& used : used_) {
      used.in.take(scratch, used.count, used.part->up);
      used.inner.take(scratch, used.count, used.part->down);
      used.wide = scratch->take<float>(pieces_of(used.inner_size(), kRowsOfPiece) * used.count * 2 * kRowsOfPiece);
    }
    made_ = direct_ ? in_.out : scratch->take<float>(static_cast<int64_t>(sent_.size()) * w_.hidden);
  }

  void round(int64_t row) {
    const auto after = std::upper_bound(used_.begin(), used_.end(), row, [](int64_t r, const Used& u) { return r < u.first; });
    Used& used = *(after - 1);
    used.in.round(v_, in_.x + sent_[row].token * w_.hidden, row - used.first, 0, w_.hidden);
  }

  void widen(int64_t piece) {
    const auto after =
        std::upper_bound(used_.begin(), used_.end(), piece, [](int64_t p, const Used& u) { return p < u.first_piece; });
    Used& used = *(after - 1);
    const int64_t own = piece - used.first_piece, inner = used.inner_size();
    const int64_t first = own * kRowsOfPiece, last = std::min(inner, first + kRowsOfPiece);
    float* gate = used.wide + own * used.count * 2 * kRowsOfPiece;
    float* up = gate + used.count * kRowsOfPiece;
    used.in.product(v_, first, last, 0, used.count, gate, kRowsOfPiece);
    if (w_.gated) {
      used.in.product(v_, inner + first, inner + last, 0, used.count, up, kRowsOfPiece);
    } else {
      std::fill(up, up + used.count * kRowsOfPiece, 1.0f);
    }
    for (int64_t m = 0; m < used.count; ++m) {
      v_.swiglu(gate + m * kRowsOfPiece, up + m * kRowsOfPiece, last - first);
      used.inner.round(v_, gate + m * kRowsOfPiece - first, m, first, last);
    }
  }

  // Some columns of the output, for which each part's rows of `down` are read.
  void narrow(int64_t piece) {
    const int64_t first = piece * kRowsOfPiece, last = std::min(w_.hidden, first + kRowsOfPiece), d = w_.hidden;
    for (const Used& used : used_) {
      used.inner.product(v_, first, last, 0, used.count, made_ + used.first * d + first, d);
    }
    if (direct_) return;
    for (int64_t t = 0; t < in_.tokens; ++t) std::fill(in_.out + t * d + first, in_.out + t * d + last, 0.0f);
    for (size_t row = 0; row < sent_.size(); ++row) {
      const float* from = made_ + static_cast<int64_t>(row) * d;
      float* to = in_.out + sent_[row].token * d;
      for (int64_t c = first; c < last; ++c) to[c] += from[c] * sent_[row].weight;
    }
  }

  const FeedForwardWeights& w_;
  const FeedForwardInputs& in_;
  const Variant& v_;
  Scratch* const scratch_;
  std::vector<Sent> sent_;
  std::vector<Used> used_;
  int64_t pieces_ = 0;
  bool direct_ = false;
  float* made_ = nullptr;
};

}  // namespace

void run_feed_forward(const FeedForwardWeights& weights, const FeedForwardInputs& inputs, Scratch* scratch,
                      RunParallel parallel, void* context) {
  FeedForwardJob(weights, inputs, scratch).run(parallel, context);
}

}  // namespace sportsllm
