// Activations rounded for a matrix, and how matrices are divided among threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "scratch.h"
#include "team.h"

namespace sportsllm {

constexpr int64_t kGemvRows = 16;  // up to here the cache is read in parts, so that all threads have work
constexpr int64_t kRowsOfPiece = 32;  // of a matrix

inline Prefetch ahead(const Matrix& matrix, int64_t rows) { return {matrix.packed, rows * matrix.row_bytes()}; }

inline int64_t pieces_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Rounded activations for one matrix. If it is wide, row m is the sum of two rounded
// ones: 2 m, multiples of a step of 8 bits, and 2 m + 1, what that leaves.
class Activations {
 public:
  void take(Scratch* scratch, int64_t rows, const Matrix& matrix) {
    matrix_ = &matrix;
    if (matrix.wide) parts_ = scratch->take<float>(2 * rows * matrix.columns), rows *= 2;
    rounded_ = scratch->take_rounded(rows, matrix);
  }

  void round(const Variant& v, const float* x, int64_t m, int64_t start, int64_t end) {
    if (!matrix_->wide) return v.round(x, m, start, end, &rounded_);
    float *coarse = parts_ + 2 * m * matrix_->columns, *fine = coarse + matrix_->columns;
    split(x, start, end, coarse, fine);
    v.round(coarse, 2 * m, start, end, &rounded_);
    v.round(fine, 2 * m + 1, start, end, &rounded_);
  }

  void product(const Variant& v, int64_t first, int64_t last, int64_t m0, int64_t m1, float* out, int64_t stride) const {
    if (!matrix_->wide) return v.product(*matrix_, first, last, rounded_, m0, m1, out, stride);
    thread_local std::vector<float> both;
    const int64_t width = last - first;
    both.resize(2 * (m1 - m0) * width);
    Matrix unbiased = *matrix_;
    unbiased.bias = nullptr;
    v.product(unbiased, first, last, rounded_, 2 * m0, 2 * m1, both.data() - 2 * m0 * width, width);
    for (int64_t m = m0; m < m1; ++m) {
      const float *coarse = both.data() + 2 * (m - m0) * width, *fine = coarse + width;
      for (int64_t n = 0; n < width; ++n) {
        const float bias = matrix_->bias == nullptr ? 0.0f : matrix_->bias[first + n];
        out[m * stride + n] = coarse[n] + fine[n] + bias;
      }
    }
  }

 private:
  // Columns that share a scale, which `round` keeps for multiples of it.
  void split(const float* x, int64_t start, int64_t end, float* coarse, float* fine) const {
    const int64_t group = part_columns(matrix_->bits);
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a sum with it has no fraction
    for (int64_t i = start; i < end; i += group) {
      const int64_t last = std::min(end, i + group);
      float largest = 0;
      for (int64_t k = i; k < last; ++k) largest = std::max(largest, std::fabs(x[k]));
      const float step = largest * (1.0f / 127), by = largest > 1e-30f ? 127.0f / largest : 0.0f;
      for (int64_t k = i; k < last; ++k) {
        const float steps = x[k] * by + kRound;
        coarse[k] = (steps - kRound) * step;
        fine[k] = x[k] - coarse[k];
      }
    }
  }

  const Matrix* matrix_ = nullptr;
  float* parts_ = nullptr;
  Rounded rounded_;
};

}  // namespace sportsllm
