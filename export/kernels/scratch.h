// Memory of one call, kept by the calling thread for the next.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#ifdef _WIN32
#include <malloc.h>
#endif

#include "kernels.h"

namespace sportsllm {

// Aligned memory, or null. std::aligned_alloc is missing on Windows and on Android before API 28.
inline void* allocate_aligned(size_t alignment, size_t size) {
#ifdef _WIN32
  return _aligned_malloc(size, alignment);
#else
  void* memory = nullptr;
  return posix_memalign(&memory, alignment, size) == 0 ? memory : nullptr;
#endif
}

inline void free_aligned(void* memory) {
#ifdef _WIN32
  _aligned_free(memory);
#else
  std::free(memory);
#endif
}

class Scratch {
 public:
  ~Scratch() { free_aligned(memory_); }

  // Sizes are counted first and given out in a second round, so that nothing moves.
  void begin_counting() { counting_ = true, used_ = 0; }
  void begin() {
    if (used_ > size_) {
      free_aligned(memory_);
      size_ = (used_ + kPage - 1) / kPage * kPage;
      memory_ = static_cast<char*>(allocate_aligned(kPage, size_));
      if (memory_ == nullptr) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    counting_ = false, used_ = 0;
  }

  int workers = 1;  // how many threads the last call had

  template <typename T>
  T* take(int64_t count) {
    const int64_t at = used_;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return counting_ ? nullptr : reinterpret_cast<T*>(memory_ + at);
  }

  Rounded take_rounded(int64_t rows, const Matrix& matrix) {
    Rounded out;
    const int64_t size = 4 * part_columns(matrix.bits), padded = matrix.blocks() * matrix.block;
    out.bits = matrix.bits, out.columns = matrix.columns, out.chunks = (padded + size - 1) / size;
    out.numbers = take<int8_t>(rows * out.chunks * size);
    out.scales = take<float>(rows * out.chunks * 16);
    out.zero_correction = take<int32_t>(rows * out.chunks * 16);
    out.sums = take<float>(rows * out.chunks * 16);
    return out;
  }

 private:
  static constexpr int64_t kPage = 4096, kAlignment = 64;
  char* memory_ = nullptr;
  int64_t size_ = 0, used_ = 0;
  bool counting_ = false;
};

}  // namespace sportsllm
