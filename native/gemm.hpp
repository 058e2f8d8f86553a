// Small matrix products in registers: C (+)= A B, A by any strides, B and C by rows.
//
// Each number of C is one sum over ascending depth in blocks of `depth_block`, whatever the block of registers it falls
// into: results do not depend on how work is cut. For that every product must be fused with its sum, or none: loops are
// written so that the compiler does not turn them into something else.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "simd.hpp"

namespace tb::TB_ISA {

template <class T>
struct Strided {  // a matrix that is only read, number (i, k) at at[i * row + k * col]
  const T* at;
  std::int64_t row, col;
};

// MR x (NV * W) numbers of C in registers.
template <class T, int W, int MR, int NV>
TB_INLINE void block(std::int64_t depth, Strided<T> a, const T* b, std::int64_t b_row, T* c, std::int64_t c_row,
                     bool add) {
  using V = Vector<T, W>;
  V sums[MR][NV] = {};
  // A pointer for every three rows: their addresses are then within what one instruction can form.
  const T* rows[(MR + 2) / 3];
  TB_UNROLL for (int g = 0; g < (MR + 2) / 3; ++g) rows[g] = a.at + 3 * g * a.row;
  for (std::int64_t k = 0; k < depth; ++k) {
    V right[NV];
    TB_UNROLL for (int j = 0; j < NV; ++j) right[j] = load<V>(b + j * W);
    TB_UNROLL for (int i = 0; i < MR; ++i) {
      const T left = rows[i / 3][(i % 3) * a.row];
      TB_UNROLL for (int j = 0; j < NV; ++j) sums[i][j] += left * right[j];
    }
    TB_UNROLL for (int g = 0; g < (MR + 2) / 3; ++g) rows[g] += a.col;
    b += b_row;
  }
  TB_UNROLL for (int i = 0; i < MR; ++i) {
    TB_UNROLL for (int j = 0; j < NV; ++j) {
      T* to = c + i * c_row + j * W;
      store(to, add ? load<V>(to) + sums[i][j] : sums[i][j]);
    }
  }
}

// All rows of C for a panel of NV * W columns.
template <class T, int W, int NV, int MR>
void panel(std::int64_t m, std::int64_t depth, Strided<T> a, const T* b, std::int64_t b_row, T* c, std::int64_t c_row,
           bool add) {
  for (; m >= MR; m -= MR) {
    block<T, W, MR, NV>(depth, a, b, b_row, c, c_row, add);
    a.at += MR * a.row;
    c += MR * c_row;
  }
  if constexpr (MR > 1) {
    constexpr int fewer = MR > 8 ? 8 : MR > 4 ? 4 : MR / 2;
    if (m > 0) panel<T, W, NV, fewer>(m, depth, a, b, b_row, c, c_row, add);
  }
}

inline constexpr std::int64_t depth_block = 256;
inline constexpr std::int64_t cached_bytes = 16 * 1024;  // of B, beyond which its panels are copied together

// Widths from the widest down to one number: no column is left over.
template <class T, int W>
void narrow(std::int64_t m, std::int64_t n, std::int64_t depth, Strided<T> a, const T* b, std::int64_t b_row, T* c,
            std::int64_t c_row, bool add) {
  // The rows that are left over wait for their own sums: 16 are better cut into 8 and 8 than into 12 and 4.
  const auto rows = m % 8 < m % 12 % 8 ? panel<T, W, 1, 8> : panel<T, W, 1, 12>;
  for (; n >= W; n -= W) {
    rows(m, depth, a, b, b_row, c, c_row, add);
    b += W;
    c += W;
  }
  if constexpr (W > 1) {
    if (n > 0) narrow<T, W / 2>(m, n, depth, a, b, b_row, c, c_row, add);
  }
}

// C (m x n) (+)= A (m x depth) B (depth x n); `packed` holds depth_block * 2 * widest numbers.
template <class T>
void multiply(std::int64_t m, std::int64_t n, std::int64_t depth, Strided<T> a, const T* b, std::int64_t b_row, T* c,
              std::int64_t c_row, bool add, T* packed) {
  constexpr int W = widest<T>;
  constexpr std::int64_t wide = 2 * W;
  const bool pack = m >= 4 * tall_rows && depth * n * std::int64_t(sizeof(T)) > cached_bytes;
  for (std::int64_t at = 0; at < depth; at += depth_block) {
    const std::int64_t part = std::min(depth_block, depth - at);
    const Strided<T> left{a.at + at * a.col, a.row, a.col};
    const T* right = b + at * b_row;
    std::int64_t j = 0;
    for (; j + wide <= n; j += wide) {
      if (pack) {
        for (std::int64_t k = 0; k < part; ++k) std::memcpy(packed + k * wide, right + k * b_row + j, wide * sizeof(T));
        panel<T, W, 2, tall_rows>(m, part, left, packed, wide, c + j, c_row, add);
      } else {
        panel<T, W, 2, tall_rows>(m, part, left, right + j, b_row, c + j, c_row, add);
      }
    }
    if (j < n) narrow<T, W>(m, n - j, part, left, right + j, b_row, c + j, c_row, add);
    add = true;
  }
}

// A square of 16 bytes a side, transposed in registers.
TB_INLINE void transpose_square(const float* from, std::int64_t row, float* to, std::int64_t to_row) {
  using V = Vector<float, 4>;
  const V a = load<V>(from), b = load<V>(from + row), c = load<V>(from + 2 * row), d = load<V>(from + 3 * row);
  const V ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const V ef = __builtin_shufflevector(a, b, 2, 6, 3, 7), gh = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  store(to, V(__builtin_shufflevector(ab, cd, 0, 1, 4, 5)));
  store(to + to_row, V(__builtin_shufflevector(ab, cd, 2, 3, 6, 7)));
  store(to + 2 * to_row, V(__builtin_shufflevector(ef, gh, 0, 1, 4, 5)));
  store(to + 3 * to_row, V(__builtin_shufflevector(ef, gh, 2, 3, 6, 7)));
}

TB_INLINE void transpose_square(const double* from, std::int64_t row, double* to, std::int64_t to_row) {
  for (int i = 0; i < 2; ++i) {
    for (int k = 0; k < 2; ++k) to[k * to_row + i] = from[i * row + k];
  }
}

// (rows x cols) by rows into (cols x rows).
template <class T>
void transpose(std::int64_t rows, std::int64_t cols, const T* from, std::int64_t row, T* to) {
  constexpr std::int64_t side = 16 / sizeof(T);
  std::int64_t i = 0;
  for (; i + side <= rows; i += side) {
    std::int64_t k = 0;
    for (; k + side <= cols; k += side) transpose_square(from + i * row + k, row, to + k * rows + i, rows);
    for (; k < cols; ++k) {
      for (std::int64_t s = i; s < i + side; ++s) to[k * rows + s] = from[s * row + k];
    }
  }
  for (; i < rows; ++i) {
    for (std::int64_t k = 0; k < cols; ++k) to[k * rows + i] = from[i * row + k];
  }
}

// C (m x n) (+)= A (m x depth) B^T, B (n x depth) by rows: panels of B are copied transposed.
template <class T>
void multiply_transposed(std::int64_t m, std::int64_t n, std::int64_t depth, const T* a, std::int64_t a_row, const T* b,
                         std::int64_t b_row, T* c, std::int64_t c_row, bool add, T* packed) {
  constexpr int W = widest<T>;
  constexpr std::int64_t wide = 2 * W;
  for (std::int64_t at = 0; at < depth; at += depth_block) {
    const std::int64_t part = std::min(depth_block, depth - at);
    const Strided<T> left{a + at, a_row, 1};
    for (std::int64_t j = 0; j < n; j += wide) {
      const std::int64_t width = std::min(wide, n - j);
      transpose(width, part, b + j * b_row + at, b_row, packed);
      if (width == wide) {
        panel<T, W, 2, tall_rows>(m, part, left, packed, width, c + j, c_row, add);
      } else {
        narrow<T, W>(m, width, part, left, packed, width, c + j, c_row, add);
      }
    }
    add = true;
  }
}

// a[0], b[0], a[1], b[1] and so on.
template <class T, class V, int... I>
TB_INLINE void store_in_turns(T* to, V a, V b, std::integer_sequence<int, I...>) {
  constexpr int W = sizeof...(I) / 2;
  const auto both = __builtin_shufflevector(a, b, (I / 2 + I % 2 * W)...);
  std::memcpy(to, &both, sizeof both);
}

// C (m x N) = A (m x depth) B for N of one or two columns and an even m, A transposed, (depth x m): vectors go along
// the rows of C, whose columns would not fill one. A row left over would be a loop over numbers, whose products
// compilers do not fuse with their sums.
template <class T, int N, int W = widest<T>>
void few_columns(std::int64_t m, std::int64_t depth, const T* a_t, std::int64_t a_row, const T* b, T* c) {
  static_assert(N <= 2);
  using V = Vector<T, W>;
  for (; m >= W; m -= W, a_t += W, c += N * W) {
    V sums[N] = {};
    for (std::int64_t k = 0; k < depth; ++k) {
      const V left = load<V>(a_t + k * a_row);
      TB_UNROLL for (int j = 0; j < N; ++j) sums[j] += b[k * N + j] * left;
    }
    if constexpr (N == 1) {
      store(c, sums[0]);
    } else {
      store_in_turns(c, sums[0], sums[1], std::make_integer_sequence<int, 2 * W>());
    }
  }
  if constexpr (W > 2) {
    if (m > 0) few_columns<T, N, W / 2>(m, depth, a_t, a_row, b, c);
  }
}

// The gradients of both sides of C (m x N) = A (m x depth) B, for N of a few columns and whole vectors of depth, in one
// pass over A: dA (+)= dC B^T and dB^T += dC^T A, with B and its gradient transposed, (N x depth).
template <class T, int N>
void both_sides(std::int64_t m, std::int64_t depth, const T* c_grad, const T* a, const T* b_t, T* a_grad,
                bool add, T* b_t_grad) {
  constexpr int W = widest<T>;
  using V = Vector<T, W>;
  for (std::int64_t at = 0; at < depth; at += W) {
    V right[N], sums[N] = {};
    TB_UNROLL for (int j = 0; j < N; ++j) right[j] = load<V>(b_t + j * depth + at);
    for (std::int64_t i = 0; i < m; ++i) {
      const V left = load<V>(a + i * depth + at);
      V made = {};
      TB_UNROLL for (int j = 0; j < N; ++j) {
        made += c_grad[i * N + j] * right[j];
        sums[j] += c_grad[i * N + j] * left;
      }
      T* to = a_grad + i * depth + at;
      store(to, add ? load<V>(to) + made : made);
    }
    TB_UNROLL for (int j = 0; j < N; ++j) {
      T* to = b_t_grad + j * depth + at;
      store(to, load<V>(to) + sums[j]);
    }
  }
}

template <class T>
inline constexpr std::int64_t packed_size = depth_block * 2 * widest<T>;

}  // namespace tb::TB_ISA
