#include "latent.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "activations.h"
#include "team.h"

namespace sportsllm {

namespace {

constexpr int64_t kHeads = 4;  // that read the cache together, where there is enough else to share among threads

class LatentJob {
 public:
  LatentJob(const LatentShape& shape, const LatentInputs& inputs, Scratch* scratch)
      : s_(shape), in_(inputs), v_(chosen_variant()), scratch_(scratch), rows_(inputs.batch * inputs.tokens),
        width_(shape.rank + shape.rotated) {
    int64_t longest = 0;
    for (int64_t b = 0; b < in_.batch; ++b) longest = std::max(longest, start(b) + in_.tokens);
    parts_ = pieces_of(longest, kAttendAtOnce);
    at_once_ = rows_ * parts_ < kHeads ? kHeads / 2 : kHeads;
    scratch_->begin_counting();
    take(scratch_);
    scratch_->begin();
    take(scratch_);
  }

  void run(RunParallel parallel, void* context) {
    Team<LatentJob> team(this, scratch_->workers);
    team.add(rows_ * s_.heads, &LatentJob::absorb);
    team.add(rows_ * parts_ * pieces_of(s_.heads, at_once_), &LatentJob::attend);
    team.add(rows_ * s_.heads, &LatentJob::finish);
    parallel(context, &Team<LatentJob>::work_of, &team);
    scratch_->workers = std::max(1, team.arrived());
  }

 private:
  void take(Scratch* scratch) {
    const int64_t heads = rows_ * s_.heads;
    queries_ = scratch->take<float>(heads * width_);
    found_ = scratch->take<float>(heads * parts_ * width_);
    largest_ = scratch->take<float>(heads * parts_);
    totals_ = scratch->take<float>(heads * parts_);
  }

  // Position of a sequence's first new token, and of a row's. Rows are tokens of sequence after sequence.
  int64_t start(int64_t b) const { return std::max<int64_t>(0, int64_t{in_.last[b]} + 1 - in_.tokens); }
  int64_t place(int64_t row) const { return start(row / in_.tokens) + row % in_.tokens; }

  // Where inputs and output hold a head of a row.
  int64_t by_head(int64_t row, int64_t head) const {
    return (row / in_.tokens * s_.heads + head) * in_.tokens + row % in_.tokens;
  }

  // The query of one head of a row, as the cached vectors are read.
  void absorb(int64_t piece) {
    const int64_t row = piece / s_.heads, head = piece % s_.heads, at = by_head(row, head);
    float* query = queries_ + piece * width_;
    v_.weighted_sum(in_.unrotated + at * s_.unrotated, in_.keys + head * s_.unrotated * s_.rank, s_.unrotated, s_.rank, query);
    const float* rotated = in_.rotated + at * s_.rotated;
    std::copy(rotated, rotated + s_.rotated, query + s_.rank);
    if (s_.type == CacheType::kInt8) v_.scale(query, in_.scale, width_, query);
  }

  // Some heads of a row over a part of the cache; parts of a head lie side by side.
  void attend(int64_t piece) {
    const int64_t part = piece % parts_, groups = pieces_of(s_.heads, at_once_), row = piece / parts_ / groups;
    const int64_t first = piece / parts_ % groups * at_once_, count = std::min(at_once_, s_.heads - first);
    const int64_t begin = part * kAttendAtOnce, seen = place(row) + 1, end = std::min(seen, begin + kAttendAtOnce);
    float* largest = largest_ + (row * s_.heads + first) * parts_ + part;
    if (begin >= end) {
      for (int64_t h = 0; h < count; ++h) largest[h * parts_] = -INFINITY;
      return;
    }
    thread_local std::vector<float> scores, found;
    scores.resize(kHeads * kAttendAtOnce), found.resize(kHeads * width_);
    const float* queries[kHeads];
    int64_t limits[kHeads];
    float most[kHeads], sums[kHeads];
    for (int64_t h = 0; h < count; ++h) queries[h] = queries_ + (row * s_.heads + first + h) * width_, limits[h] = seen;
    const char* state = static_cast<const char*>(in_.state) + row / in_.tokens * in_.room * width_ * cache_bytes(s_.type);
    v_.attend(queries, limits, count, {state, state, s_.type}, begin, end, width_, scores.data(), found.data(), most, sums);
    for (int64_t h = 0; h < count; ++h) {
      const int64_t at = (row * s_.heads + first + h) * parts_ + part;
      std::copy(&found[h * width_], &found[h * width_] + width_, found_ + at * width_);
      largest_[at] = most[h], totals_[at] = sums[h];
    }
  }

  // The values of one head of a row, of the mean latent vector.
  void finish(int64_t piece) {
    const int64_t row = piece / s_.heads, head = piece % s_.heads, at = piece * parts_;
    float* mixed = queries_ + piece * width_;  // the query is not needed any more
    v_.join(found_ + at * width_, largest_ + at, totals_ + at, parts_, width_, mixed);
    if (s_.type == CacheType::kInt8) v_.scale(mixed, in_.scale, width_, mixed);
    v_.dots(mixed, in_.values + head * s_.value * s_.rank, s_.value, s_.rank, in_.out + by_head(row, head) * s_.value);
  }

  const LatentShape& s_;
  const LatentInputs& in_;
  const Variant& v_;
  Scratch* const scratch_;
  const int64_t rows_, width_;  // tokens; C
  int64_t parts_ = 0, at_once_ = kHeads;
  float *queries_ = nullptr, *found_ = nullptr, *largest_ = nullptr, *totals_ = nullptr;
};

class TokensJob {
 public:
  TokensJob(const LatentShape& shape, const LatentTokens& tokens)
      : s_(shape), in_(tokens), v_(chosen_variant()), width_(shape.rank + shape.rotated) {}

  void run(Scratch* scratch, RunParallel parallel, void* context) {
    const int64_t rows = in_.batch * in_.tokens;
    if (in_.past != in_.present) {
      std::memcpy(in_.present, in_.past, in_.batch * in_.room * width_ * cache_bytes(s_.type));
    }
    if (rows <= kGemvRows) {
      for (int64_t row = 0; row < rows; ++row) take(row);
      return;
    }
    Team<TokensJob> team(this, scratch->workers);
    team.add(rows, &TokensJob::take);
    parallel(context, &Team<TokensJob>::work_of, &team);
    scratch->workers = std::max(1, team.arrived());
  }

 private:
  void take(int64_t row) {
    const int64_t b = row / in_.tokens, t = row % in_.tokens, n = s_.unrotated, e = s_.rotated;
    const float *cosine = in_.cosine + row * (e / 2), *sine = in_.sine + row * (e / 2);
    for (int64_t head = 0; head < s_.heads; ++head) {
      const float* query = in_.query + (row * s_.heads + head) * (n + e);
      const int64_t at = (b * s_.heads + head) * in_.tokens + t;
      float *unrotated = in_.unrotated + at * n, *rotated = in_.rotated + at * e;
      for (int64_t i = 0; i < n; ++i) unrotated[i] = query[i] * in_.factor;
      for (int64_t i = 0; i < e; ++i) rotated[i] = query[n + i] * in_.factor;
      v_.rotate(rotated, cosine, sine, e);
    }
    const int64_t place = std::max<int64_t>(0, int64_t{in_.last[b]} + 1 - in_.tokens) + t;
    char* to = static_cast<char*>(in_.present) + (b * in_.room + place) * width_ * cache_bytes(s_.type);
    thread_local std::vector<float> rounded;
    rounded.resize(width_);
    float* vector = s_.type == CacheType::kFloat ? reinterpret_cast<float*>(to) : rounded.data();
    const float* latent = in_.latent + row * width_;
    v_.rms_norm(latent, in_.norm, s_.rank, in_.epsilon, vector);
    std::copy(latent + s_.rank, latent + width_, vector + s_.rank);
    v_.rotate(vector + s_.rank, cosine, sine, e);
    if (s_.type == CacheType::kInt8) v_.to_int8(vector, in_.scale, width_, reinterpret_cast<int8_t*>(to));
  }

  const LatentShape& s_;
  const LatentTokens& in_;
  const Variant& v_;
  const int64_t width_;  // C
};

}  // namespace

void run_latent_tokens(const LatentShape& shape, const LatentTokens& tokens, Scratch* scratch, RunParallel parallel,
                       void* context) {
  TokensJob(shape, tokens).run(scratch, parallel, context);
}

void run_latent(const LatentShape& shape, const LatentInputs& inputs, Scratch* scratch, RunParallel parallel,
                void* context) {
  LatentJob(shape, inputs, scratch).run(parallel, context);
}

}  // namespace sportsllm
