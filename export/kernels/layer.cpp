#include "layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "activations.h"
#include "team.h"

namespace sportsllm {

namespace {

constexpr int64_t kQueryTokens = 16;  // of a prompt, attended together

int64_t padded(int64_t count) { return (count + 15) / 16 * 16; }  // to whole lines of the cache

// Memory of one thread for the piece of attention that it works on, on a line of the cache.
float* attended_of_thread(int64_t count) {
  thread_local std::vector<float> memory;
  memory.resize(count + 16);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

void norm_of(const Variant& v, const float* x, const float* weight, const float* bias, int64_t size, float epsilon, float* out) {
  bias != nullptr ? v.layer_norm(x, weight, bias, size, epsilon, out) : v.rms_norm(x, weight, size, epsilon, out);
}

class LayerJob {
 public:
  LayerJob(const LayerWeights& weights, const LayerInputs& inputs, Scratch* scratch)
      : w_(weights), in_(inputs), v_(chosen_variant()), scratch_(scratch), rows_(inputs.batch * inputs.tokens),
        whole_(weights.inner > 0) {
    group_ = w_.heads / w_.kv_heads, kept_rows_ = in_.batch * in_.kept();
    int64_t longest = 0;
    for (int64_t b = 0; b < in_.batch; ++b) longest = std::max(longest, start(b) + in_.tokens);
    // A prompt's queries go through the whole cache in turn; parts of it are joined in order, whoever computed them.
    tile_ = rows_ <= kGemvRows ? in_.tokens : std::min(kQueryTokens, in_.tokens);
    tiles_ = pieces_of(in_.tokens, tile_), parts_ = rows_ <= kGemvRows ? pieces_of(longest, kAttendAtOnce) : 1;
    scratch_->begin_counting();
    take(scratch_);
    scratch_->begin();
    take(scratch_);
  }

  void run(RunParallel parallel, void* context) {
    Team<LayerJob> team(this, scratch_->workers);
    const bool gemv = rows_ <= kGemvRows;
    if (gemv) {
      for (int64_t m = 0; m < rows_; ++m) first_norm(m);
    } else {
      team.add(rows_, &LayerJob::first_norm);
    }
    team.add(w_.heads + 2 * w_.kv_heads, &LayerJob::project, nullptr, ahead(w_.qkv, w_.head_size));
    team.add(in_.batch * w_.kv_heads * tiles_ * parts_, &LayerJob::attend, gemv ? &LayerJob::join_all : nullptr);
    if (!gemv) team.add(rows_, &LayerJob::join);
    team.add(pieces_of(w_.hidden, kRowsOfPiece), &LayerJob::project_out, gemv ? &LayerJob::second_norms : nullptr,
             ahead(w_.output, kRowsOfPiece));
    if (!gemv) team.add(kept_rows_, &LayerJob::second_norm);
    if (whole_) add_feed_forward(&team);
    parallel(context, &Team<LayerJob>::work_of, &team);
    scratch_->workers = std::max(1, team.arrived());
  }

 private:
  void add_feed_forward(Team<LayerJob>* team) {
    team->add(pieces_of(w_.inner, kRowsOfPiece), &LayerJob::widen, nullptr, ahead(w_.gate_up, kRowsOfPiece));
    const bool gemv = rows_ <= kGemvRows, norms = w_.feed_forward_output_norm != nullptr;
    team->add(pieces_of(w_.hidden, kRowsOfPiece), &LayerJob::narrow, gemv && norms ? &LayerJob::last_norms : nullptr,
              ahead(w_.down, kRowsOfPiece));
    if (!gemv && norms) team->add(kept_rows_, &LayerJob::last_norm);
  }

  int64_t start(int64_t b) const { return in_.start(b); }
  // Row among all new tokens of a row that is kept.
  int64_t all_row(int64_t kept) const {
    const int64_t b = kept / in_.kept(), t = kept % in_.kept();
    return b * in_.tokens + in_.tokens - in_.kept() + t;
  }

  void take(Scratch* scratch) {
    total_ = scratch->take<float>(rows_ * w_.hidden);
    normed_ = scratch->take<float>(rows_ * w_.hidden);
    rounded_.take(scratch, rows_, w_.qkv);
    const int64_t width = w_.heads * w_.head_size;
    queries_ = scratch->take<float>(rows_ * width);
    attended_ = scratch->take<float>(rows_ * width);
    one_head_ = scratch->take<float>((w_.heads + 2 * w_.kv_heads) * rows_ * w_.head_size);
    rounded_attended_.take(scratch, rows_, w_.output);
    if (whole_) {
      rounded_second_.take(scratch, kept_rows_, w_.gate_up);
      rounded_inner_.take(scratch, kept_rows_, w_.down);
      inner_ = scratch->take<float>(pieces_of(w_.inner, kRowsOfPiece) * kept_rows_ * 2 * kRowsOfPiece);
    }
    // Of each piece of attention; where steps read the cache in parts, the outcome of each.
    pieces_ = in_.batch * w_.kv_heads * tiles_ * parts_;
    queries_of_piece_ = group_ * tile_;
    parts_out_ = scratch->take<float>(rows_ * w_.heads * parts_ * w_.head_size);
    largest_ = scratch->take<float>(rows_ * w_.heads * parts_);
    totals_ = scratch->take<float>(rows_ * w_.heads * parts_);
    pointers_ = scratch->take<const float*>(pieces_ * queries_of_piece_);
    limits_ = scratch->take<int64_t>(pieces_ * queries_of_piece_);
  }

  void first_norm(int64_t m) {
    const float* x = in_.x + m * w_.hidden;
    float* total = total_ + m * w_.hidden;
    if (in_.residual != nullptr) {
      v_.add(x, in_.residual + m * w_.hidden, w_.hidden, total);
    } else {
      std::memcpy(total, x, w_.hidden * sizeof(float));
    }
    norm_and_round(total, w_.norm, w_.norm_bias, m, &rounded_);
  }

  void norm_and_round(const float* x, const float* weight, const float* bias, int64_t m, Activations* out) {
    float* normed = normed_ + m * w_.hidden;
    norm_of(v_, x, weight, bias, w_.hidden, w_.epsilon, normed);
    out->round(v_, normed, m, 0, w_.hidden);
  }

  // One head's queries, keys or values of all rows: product, norm, rotation, and to the cache.
  void project(int64_t head) {
    const int64_t e = w_.head_size, first = head * e;
    float* found = one_head_ + head * rows_ * e;
    rounded_.product(v_, first, first + e, 0, rows_, found, e);
    const bool query = head < w_.heads, key = !query && head < w_.heads + w_.kv_heads;
    const int64_t kv = query ? 0 : key ? head - w_.heads : head - w_.heads - w_.kv_heads;
    for (int64_t b = 0; b < in_.batch; ++b) {
      if (!query) copy_past(w_, in_, b, kv, key);
      for (int64_t t = 0; t < in_.tokens; ++t) {
        const int64_t m = b * in_.tokens + t, position = start(b) + t;
        float* x = found + m * e;
        if (query || key) {
          const float* weight = query ? w_.query_norm : w_.key_norm;
          if (weight != nullptr) v_.rms_norm(x, weight, e, w_.epsilon, x);
          if (const RotaryTable* rotary = w_.rotary.get()) v_.rotate(x, rotary->row(position), rotary->row(position) + e / 2, e);
        }
        if (query) {
          float* to = queries_ + (m * w_.heads + head) * e;
          if (w_.key_scale != nullptr) {
            v_.scale(x, w_.key_scale + head / group_ * e, e, to);
          } else {
            std::memcpy(to, x, e * sizeof(float));
          }
          for (int64_t i = 0; i < e; ++i) to[i] *= w_.scale;  // where one product serves all scores
        } else {
          write(key ? in_.key : in_.value, key ? w_.key_scale : w_.value_scale, b, kv, position, x);
        }
      }
    }
  }

  void write(void* cache, const float* scales, int64_t b, int64_t kv, int64_t position, const float* x) {
    const int64_t e = w_.head_size, at = ((b * w_.kv_heads + kv) * in_.room + position) * e;
    if (w_.cache == CacheType::kInt8) {
      v_.to_int8(x, scales + kv * e, e, static_cast<int8_t*>(cache) + at);
    } else if (w_.cache == CacheType::kHalf) {
      v_.to_half(x, e, static_cast<uint16_t*>(cache) + at);
    } else {
      std::memcpy(static_cast<float*>(cache) + at, x, e * sizeof(float));
    }
  }

  void attend(int64_t piece) {
    const bool gemv = rows_ <= kGemvRows;
    const int64_t part = piece % parts_, rest = piece / parts_;
    const int64_t tile = rest % tiles_, kv = rest / tiles_ % w_.kv_heads, b = rest / tiles_ / w_.kv_heads;
    const int64_t first = tile * tile_, last = std::min(in_.tokens, first + tile_), e = w_.head_size;
    const float** queries = pointers_ + piece * queries_of_piece_;
    int64_t* limits = limits_ + piece * queries_of_piece_;
    int64_t n = 0;
    for (int64_t t = first; t < last; ++t) {
      for (int64_t g = 0; g < group_; ++g, ++n) {
        queries[n] = queries_ + ((b * in_.tokens + t) * w_.heads + kv * group_ + g) * e;
        limits[n] = start(b) + t + 1;
      }
    }
    const int64_t head = (b * w_.kv_heads + kv) * in_.room * e, seen = start(b) + last;
    Cached cached;
    cached.type = w_.cache, cached.window = w_.window;
    const int64_t size = cache_bytes(w_.cache);
    cached.keys = static_cast<const char*>(in_.key) + head * size;
    cached.values = static_cast<const char*>(in_.value) + head * size;
    // A step's piece is one part, a prompt's takes all of them in turn, so that memory grows with its tokens alone.
    const int64_t scores_size = padded(n * kAttendAtOnce), rows_size = padded(n * e);
    float* scores = attended_of_thread(scores_size + 2 * rows_size + 4 * padded(n));
    float *found = scores + scores_size, *found_most = found + rows_size, *found_sum = found_most + padded(n);
    float *rows = found_sum + padded(n), *most = rows + rows_size, *sum = most + padded(n);
    std::fill(most, most + n, -INFINITY), std::fill(sum, sum + n, 0.0f);
    const int64_t lowest = w_.window > 0 ? std::max<int64_t>(0, start(b) + first + 1 - w_.window) : 0;
    const int64_t from = (gemv ? part : lowest / kAttendAtOnce) * kAttendAtOnce;
    const int64_t to = gemv ? std::min(seen, from + kAttendAtOnce) : seen;
    for (int64_t begin = from; begin < to && to > lowest; begin += kAttendAtOnce) {
      const int64_t end = std::min(to, begin + kAttendAtOnce);
      if (begin == from) {
        v_.attend(queries, limits, n, cached, begin, end, e, scores, rows, most, sum);
      } else {
        v_.attend(queries, limits, n, cached, begin, end, e, scores, found, found_most, found_sum);
        v_.merge_softmax(found, found_most, found_sum, n, e, rows, most, sum);
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = b * in_.tokens + first + i / group_, at = (row * w_.heads + kv * group_ + i % group_) * parts_ + part;
      largest_[at] = most[i], totals_[at] = sum[i];
      std::memcpy(parts_out_ + at * e, rows + i * e, e * sizeof(float));
    }
  }

  void join(int64_t m) {
    const int64_t e = w_.head_size, width = w_.heads * e;
    float* row = attended_ + m * width;
    for (int64_t h = 0; h < w_.heads; ++h) {
      const int64_t at = (m * w_.heads + h) * parts_;
      v_.join(parts_out_ + at * e, largest_ + at, totals_ + at, parts_, e, row + h * e);
      if (w_.value_scale != nullptr) v_.scale(row + h * e, w_.value_scale + h / group_ * e, e, row + h * e);
    }
    rounded_attended_.round(v_, row, m, 0, width);
  }

  void join_all() {
    for (int64_t m = 0; m < rows_; ++m) join(m);
  }

  // Rows of the output matrix; its sum with the layer's input, normed before if it is, is what the second half is added to.
  void project_out(int64_t piece) {
    const int64_t first = piece * kRowsOfPiece, last = std::min(w_.hidden, first + kRowsOfPiece), d = w_.hidden;
    const int64_t together = in_.kept() == in_.tokens ? kept_rows_ : in_.kept();
    for (int64_t kept = 0; kept < kept_rows_; kept += together) {
      const int64_t m = all_row(kept);
      float* to = in_.residual_out + kept * d + first;
      rounded_attended_.product(v_, first, last, m, m + together, to - m * d, d);
      if (w_.attention_output_norm != nullptr) continue;
      for (int64_t t = 0; t < together; ++t) v_.add(to + t * d, total_ + (m + t) * d + first, last - first, to + t * d);
    }
  }

  void second_norm(int64_t kept) {
    float* total = in_.residual_out + kept * w_.hidden;
    if (w_.attention_output_norm != nullptr) {
      v_.rms_norm(total, w_.attention_output_norm, w_.hidden, w_.epsilon, total);
      v_.add(total, total_ + all_row(kept) * w_.hidden, w_.hidden, total);
    }
    if (whole_) {
      norm_and_round(total, w_.second_norm, w_.second_norm_bias, kept, &rounded_second_);
    } else {
      norm_of(v_, total, w_.second_norm, w_.second_norm_bias, w_.hidden, w_.epsilon, in_.out + kept * w_.hidden);
    }
  }

  void second_norms() {
    for (int64_t m = 0; m < kept_rows_; ++m) second_norm(m);
  }

  void widen(int64_t piece) {
    const int64_t first = piece * kRowsOfPiece, last = std::min(w_.inner, first + kRowsOfPiece), n = last - first;
    float* gate = inner_ + piece * kept_rows_ * 2 * kRowsOfPiece;
    float* up = gate + kept_rows_ * kRowsOfPiece;
    rounded_second_.product(v_, first, last, 0, kept_rows_, gate, kRowsOfPiece);
    if (w_.gated) {
      rounded_second_.product(v_, w_.inner + first, w_.inner + last, 0, kept_rows_, up, kRowsOfPiece);
    } else {
      std::fill(up, up + kept_rows_ * kRowsOfPiece, 1.0f);
    }
    for (int64_t m = 0; m < kept_rows_; ++m) {
      (w_.gelu ? v_.geglu : v_.swiglu)(gate + m * kRowsOfPiece, up + m * kRowsOfPiece, n);
      rounded_inner_.round(v_, gate + m * kRowsOfPiece - first, m, first, last);
    }
  }

  void narrow(int64_t piece) {
    const int64_t first = piece * kRowsOfPiece, last = std::min(w_.hidden, first + kRowsOfPiece);
    rounded_inner_.product(v_, first, last, 0, kept_rows_, in_.out + first, w_.hidden);
  }

  void last_norm(int64_t kept) {
    float* made = in_.out + kept * w_.hidden;
    v_.rms_norm(made, w_.feed_forward_output_norm, w_.hidden, w_.epsilon, made);
  }

  void last_norms() {
    for (int64_t m = 0; m < kept_rows_; ++m) last_norm(m);
  }

  const LayerWeights& w_;
  const LayerInputs& in_;
  const Variant& v_;
  Scratch* const scratch_;
  const int64_t rows_;
  const bool whole_;
  int64_t group_ = 0, kept_rows_ = 0, tile_ = 0, tiles_ = 0, parts_ = 0, pieces_ = 0;
  int64_t queries_of_piece_ = 0;
  float *total_ = nullptr, *normed_ = nullptr, *queries_ = nullptr, *attended_ = nullptr, *one_head_ = nullptr;
  float *inner_ = nullptr, *parts_out_ = nullptr, *largest_ = nullptr, *totals_ = nullptr;
  const float** pointers_ = nullptr;
  int64_t* limits_ = nullptr;
  Activations rounded_, rounded_attended_, rounded_second_, rounded_inner_;
};

class HeadJob {
 public:
  HeadJob(const HeadWeights& weights, const float* x, const float* residual, int64_t rows, float* logits, Scratch* scratch)
      : w_(weights), v_(chosen_variant()), x_(x), residual_(residual), rows_(rows), logits_(logits), scratch_(scratch) {
    scratch_->begin_counting();
    take(scratch_);
    scratch_->begin();
    take(scratch_);
  }

  void run(RunParallel parallel, void* context) {
    Team<HeadJob> team(this, scratch_->workers);
    if (rows_ > kGemvRows) {
      team.add(rows_, &HeadJob::norm);
    } else {
      for (int64_t m = 0; m < rows_; ++m) norm(m);
    }
    team.add(pieces_of(w_.table.rows, kRowsOfPiece), &HeadJob::multiply);
    parallel(context, &Team<HeadJob>::work_of, &team);
    scratch_->workers = std::max(1, team.arrived());
  }

 private:
  void take(Scratch* scratch) {
    rounded_.take(scratch, rows_, w_.table);
    total_ = scratch->take<float>(rows_ * w_.hidden);
  }

  void norm(int64_t m) {
    const int64_t d = w_.hidden;
    const float* x = x_ + m * d;
    float* total = total_ + m * d;
    if (residual_ != nullptr) {
      v_.add(x, residual_ + m * d, d, total);
      x = total;
    }
    norm_of(v_, x, w_.norm, w_.norm_bias, d, w_.epsilon, total);
    rounded_.round(v_, total, m, 0, d);
  }

  void multiply(int64_t piece) {
    const int64_t first = piece * kRowsOfPiece, last = std::min(w_.table.rows, first + kRowsOfPiece);
    rounded_.product(v_, first, last, 0, rows_, logits_ + first, w_.table.rows);
  }

  const HeadWeights& w_;
  const Variant& v_;
  const float *x_, *residual_;
  const int64_t rows_;
  float* logits_;
  Scratch* const scratch_;
  float* total_ = nullptr;
  Activations rounded_;
};

}  // namespace

void copy_past(const LayerWeights& w, const LayerInputs& in, int64_t b, int64_t kv, bool key) {
  const char* past = static_cast<const char*>(key ? in.past_key : in.past_value);
  char* present = static_cast<char*>(key ? in.key : in.value);
  if (past == present) return;
  const int64_t row = w.head_size * cache_bytes(w.cache), head = b * w.kv_heads + kv;
  const int64_t known = std::min(in.past_room, in.start(b)), end = in.start(b) + in.tokens;
  char* to = present + head * in.room * row;
  if (known > 0) std::memcpy(to, past + head * in.past_room * row, known * row);
  if (in.room > end) std::memset(to + end * row, 0, (in.room - end) * row);
}

void run_layer(const LayerWeights& weights, const LayerInputs& inputs, Scratch* scratch, RunParallel parallel,
               void* context) {
  LayerJob(weights, inputs, scratch).run(parallel, context);
}

void run_head(const HeadWeights& weights, const float* x, const float* residual, int64_t rows, float* logits,
              Scratch* scratch, RunParallel parallel, void* context) {
  HeadJob(weights, x, residual, rows, logits, scratch).run(parallel, context);
}

}  // namespace sportsllm
