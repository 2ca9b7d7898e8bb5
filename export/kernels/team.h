// Work shared by however many threads come: phases of pieces, which are claimed by a counter.
//
// A phase ends when its pieces are done, not when a number of threads has arrived, so that any number of them finishes
// and one that comes late, or never, costs nothing. The thread that finishes a phase's last piece runs what follows it.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace sportsllm {

inline void pause() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int kMostPhases = 8;

template <typename Job>
class Team {
 public:
  explicit Team(Job* job) : job_(job) {}

  // Adds a phase of one piece or more.
  void add(int64_t pieces, void (Job::*piece)(int64_t), void (Job::*after)() = nullptr) {
    Phase& phase = phases_[count_++];
    phase.pieces = pieces, phase.piece = piece, phase.after = after;
  }

  // One thread's share; returns when all phases are done.
  void work() {
    for (int p = 0; p < count_; ++p) {
      Phase& phase = phases_[p];
      if (ready_.load(std::memory_order_acquire) > p) continue;
      int64_t i;
      while ((i = phase.claimed.fetch_add(1, std::memory_order_relaxed)) < phase.pieces) {
        (job_->*phase.piece)(i);
        if (phase.done.fetch_add(1, std::memory_order_acq_rel) + 1 == phase.pieces) {
          if (phase.after != nullptr) (job_->*phase.after)();
          ready_.store(p + 1, std::memory_order_release);
        }
      }
      for (int turns = 0; ready_.load(std::memory_order_acquire) <= p; ++turns) {
        if (turns < kSpins) {
          pause();
        } else {
          std::this_thread::yield();  // somebody else's program may hold the thread that has the last piece
        }
      }
    }
  }

  static void work_of(void* team, size_t) { static_cast<Team*>(team)->work(); }

 private:
  static constexpr int kSpins = 2000;

  struct alignas(128) Phase {
    int64_t pieces = 0;
    void (Job::*piece)(int64_t) = nullptr;
    void (Job::*after)() = nullptr;
    alignas(64) std::atomic<int64_t> claimed{0};
    alignas(64) std::atomic<int64_t> done{0};
  };

  Job* job_;
  int count_ = 0;
  Phase phases_[kMostPhases];
  alignas(64) std::atomic<int> ready_{0};
};

}  // namespace sportsllm
