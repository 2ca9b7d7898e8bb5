// Cosine and sine of a model's positions, computed when a position is first read.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace sportsllm {

// Layers of the same frequencies share one, in all sessions; any number of threads may read it.
class RotaryTable {
 public:
  // Of angles position * frequency, one for each of E / 2 pairs; both functions are multiplied by `factor`.
  static std::shared_ptr<const RotaryTable> shared(const float* frequencies, int64_t pairs, float factor) {
    static std::mutex mutex;
    static std::vector<std::weak_ptr<const RotaryTable>> all;
    const std::vector<float> wanted(frequencies, frequencies + pairs);
    const std::lock_guard<std::mutex> lock(mutex);
    size_t kept = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      const std::shared_ptr<const RotaryTable> each = all[i].lock();
      if (each == nullptr) continue;
      if (each->frequencies_ == wanted && each->factor_ == factor) return each;
      all[kept++] = each;
    }
    all.resize(kept);
    const std::shared_ptr<const RotaryTable> made(new RotaryTable(wanted, factor));
    all.push_back(made);
    return made;
  }

  ~RotaryTable() {
    for (const auto& part : parts_) delete[] part.load();
  }

  // E / 2 cosines, and E / 2 sines behind them, of a position below kPositions.
  const float* row(int64_t position) const {
    const std::atomic<float*>& part = parts_[position / kRows];
    const float* found = part.load(std::memory_order_acquire);
    if (found == nullptr) found = compute(position / kRows);
    return found + position % kRows * 2 * pairs();
  }

  static constexpr int64_t kPositions = 1 << 20;

 private:
  static constexpr int64_t kRows = 128;  // that are computed at once

  RotaryTable(const std::vector<float>& frequencies, float factor)
      : frequencies_(frequencies), factor_(factor), parts_(kPositions / kRows) {}

  int64_t pairs() const { return static_cast<int64_t>(frequencies_.size()); }

  const float* compute(int64_t part) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const float* found = parts_[part].load(std::memory_order_acquire)) return found;  // by another thread meanwhile
    float* made = new float[kRows * 2 * pairs()];
    float* to = made;
    for (int64_t position = part * kRows; position < (part + 1) * kRows; ++position, to += 2 * pairs()) {
      for (int64_t i = 0; i < pairs(); ++i) {
        const double angle = static_cast<float>(position) * frequencies_[i];  // rounded to float32, as models are trained
        to[i] = static_cast<float>(std::cos(angle)) * factor_, to[pairs() + i] = static_cast<float>(std::sin(angle)) * factor_;
      }
    }
    parts_[part].store(made, std::memory_order_release);
    return made;
  }

  const std::vector<float> frequencies_;
  const float factor_;
  mutable std::vector<std::atomic<float*>> parts_;
  mutable std::mutex mutex_;
};

}  // namespace sportsllm
