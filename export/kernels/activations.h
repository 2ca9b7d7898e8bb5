// Activations rounded for a matrix, in one of two forms, and how matrices are divided among threads.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "scratch.h"
#include "team.h"

namespace sportsllm {

constexpr int64_t kGemvRows = 8;  // up to here the cache is read in parts, so that all threads have work
constexpr int64_t kRowsOfPiece = 32;  // of a matrix

inline Prefetch ahead(const Matrix& matrix, int64_t rows) { return {matrix.packed, rows * matrix.row_bytes()}; }

inline int64_t pieces_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Rounded activations of a few rows or of a prompt's many, for one matrix.
class Activations {
 public:
  void take(Scratch* scratch, int64_t rows, const Matrix& matrix) {
    matrix_ = &matrix, prompt_ = rows > kGemvRows;
    if (prompt_) {
      many_ = scratch->take_prompt(rows, matrix);
    } else {
      few_ = scratch->take_rounded(rows, matrix);
    }
  }

  void round(const Variant& v, const float* x, int64_t m, int64_t start, int64_t end) {
    prompt_ ? v.round_prompt(x, m, start, end, &many_) : v.round(x, m, start, end, &few_);
  }

  // After all of a row is rounded.
  void finish(const Variant& v, int64_t m) {
    if (!prompt_ && matrix_->zeros != nullptr) v.sum_blocks(m, &few_);
  }

  void product(const Variant& v, int64_t first, int64_t last, int64_t m0, int64_t m1, float* out, int64_t stride) const {
    prompt_ ? v.product_prompt(*matrix_, first, last, many_, m0, m1, out, stride)
            : v.product(*matrix_, first, last, few_, m0, m1, out, stride);
  }

 private:
  const Matrix* matrix_ = nullptr;
  bool prompt_ = false;
  Rounded few_;
  RoundedPrompt many_;
};

}  // namespace sportsllm
