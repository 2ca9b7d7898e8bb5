// Work shared by however many threads come: phases of pieces, which are claimed by counters.
//
// A phase ends when its pieces are done, not when a number of threads has arrived, so that any number of them finishes
// and one that comes late, or never, costs nothing. The thread that finishes a phase's last piece runs what follows it.
// Each thread begins with a range of its own, so that it reads memory in order, and then helps with the others'.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <thread>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sportsllm {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int kMostPhases = 9;
constexpr int kMostRanges = 16;

// Memory that a phase's pieces read, each as many bytes: fetched by threads that wait for the phase.
struct Prefetch {
  const void* start = nullptr;
  int64_t bytes = 0;
};

template <typename Job>
class Team {
 public:
  // `workers`: how many threads are expected.
  Team(Job* job, int workers) : job_(job), ranges_(std::min(workers, kMostRanges)) {}

  // Adds a phase of one piece or more.
  void add(int64_t pieces, void (Job::*piece)(int64_t), void (Job::*after)() = nullptr, Prefetch ahead = {}) {
    if (count_ == kMostPhases) throw std::length_error("a team has room for 9 phases");
    Phase& phase = phases_[count_++];
    phase.pieces = pieces, phase.piece = piece, phase.after = after, phase.ahead = ahead;
    for (int r = 0; r < ranges_; ++r) phase.next[r].piece.store(begin_of(phase, r), std::memory_order_relaxed);
  }

  // One thread's share; returns when all phases are done.
  void work() {
    if (ready_.load(std::memory_order_acquire) == count_) return;
    const int worker = arrived_.fetch_add(1, std::memory_order_relaxed);
    for (int p = 0; p < count_; ++p) {
      if (ready_.load(std::memory_order_acquire) > p) continue;
      for (int r = 0; r < ranges_; ++r) run_range(p, (worker + r) % ranges_);
      wait(p, worker % ranges_);
    }
  }

  // Number of threads that arrived before the work was done; std::bad_alloc if a piece threw.
  int arrived() const {
    if (failed_.load(std::memory_order_relaxed)) throw std::bad_alloc();
    return arrived_.load(std::memory_order_relaxed);
  }

  static void work_of(void* team, size_t) { static_cast<Team*>(team)->work(); }

 private:
  static constexpr int kSpins = 2000;
  static constexpr std::chrono::microseconds kTaken{200}, kNap{20};
  static constexpr int64_t kMostAhead = 64 << 10;  // bytes; a fraction of a core's second cache

  struct alignas(64) Next {
    std::atomic<int64_t> piece{0};
  };
  struct Phase {
    int64_t pieces = 0;
    void (Job::*piece)(int64_t) = nullptr;
    void (Job::*after)() = nullptr;
    Prefetch ahead;
    alignas(64) std::atomic<int64_t> done{0};
    Next next[kMostRanges];
  };

  int64_t begin_of(const Phase& phase, int range) const { return phase.pieces * range / ranges_; }

  void run_range(int p, int range) {
    Phase& phase = phases_[p];
    const int64_t end = begin_of(phase, range + 1);
    int64_t i;
    while ((i = phase.next[range].piece.fetch_add(1, std::memory_order_relaxed)) < end) {
      guarded(phase.piece, i);
      if (phase.done.fetch_add(1, std::memory_order_acq_rel) + 1 == phase.pieces) {
        if (phase.after != nullptr) guarded(phase.after);
        ready_.store(p + 1, std::memory_order_release);
      }
    }
  }

  // No exception may leave a thread of the runtime, nor the team while others still use it.
  template <typename... Arguments>
  void guarded(void (Job::*function)(Arguments...), Arguments... arguments) {
    if (failed_.load(std::memory_order_relaxed)) return;  // what earlier pieces leave undone is not read
    try {
      (job_->*function)(arguments...);
    } catch (...) {
      failed_.store(true, std::memory_order_relaxed);
    }
  }

  // Until phase p is done; meanwhile fetches what this thread reads in the next.
  void wait(int p, int range) {
    const char *at = nullptr, *end = nullptr;
    if (p + 1 < count_) {
      const Phase& next = phases_[p + 1];
      at = static_cast<const char*>(next.ahead.start) + begin_of(next, range) * next.ahead.bytes;
      const int64_t bytes = (begin_of(next, range + 1) - begin_of(next, range)) * next.ahead.bytes;
      end = at + std::min(kMostAhead, bytes);
      prefetch_tlb(at, std::min(kPageGroup, bytes));
    }
    for (int turns = 0; ready_.load(std::memory_order_acquire) <= p; ++turns) {
      if (at < end) {
        __builtin_prefetch(at, 0, 2), at += 64;
      } else if (turns < kSpins) {
        pause();
      } else {
        // Somebody else's program may hold the thread that has the last piece. If it takes this one too, sleep: who
        // sleeps is woken before who has run all the time.
        const auto before = std::chrono::steady_clock::now();
        std::this_thread::yield();
        if (std::chrono::steady_clock::now() - before > kTaken) std::this_thread::sleep_for(kNap);
      }
    }
  }

  Job* job_;
  int count_ = 0;
  const int ranges_;
  Phase phases_[kMostPhases];
  alignas(64) std::atomic<int> ready_{0};
  std::atomic<int> arrived_{0};
  std::atomic<bool> failed_{false};
};

}  // namespace sportsllm
