// Rows kept as codes: made one at a time, into memory or into a cache where they are multiplied at once.
//
// A row, and each of its scores, is of its own codes alone and summed in one order: no result depends on how rows are
// cut between threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "gemm.hpp"
#include "kernels.hpp"
#include "simd.hpp"

namespace tb::TB_ISA {

// Two codes a byte, the first one low, each 8 more than its number.
inline void unpack(Int bytes, const std::uint8_t* from, std::int8_t* to) {
  for (Int i = 0; i < bytes; ++i) {
    to[2 * i] = std::int8_t((from[i] & 15) - 8);
    to[2 * i + 1] = std::int8_t((from[i] >> 4) - 8);
  }
}

// The first product is exact, as all numbers in it have few digits: a row is rounded once, whatever computes it.
template <class T>
TB_INLINE void scaled(Int n, const std::int8_t* codes, T step, T scale, T* to) {
  for (Int i = 0; i < n; ++i) to[i] = T(codes[i]) * step * scale;
}

// The codes of one row after the other; one for each thread. Where a byte can name more entries than a codebook has
// they are copied, and the copy is checked and used.
class Codes {
 public:
  explicit Codes(const Coded& coded)
      : coded_(coded), checked_(coded.bits == 0 && coded.words < 256 ? coded.code_row : 0) {}

  const std::uint8_t* operator()(Int row) {
    const std::uint8_t* codes = coded_.codes + row * coded_.code_row;
    if (checked_.empty()) return codes;
    for (Int m = 0; m < coded_.code_row; ++m) {
      checked_[m] = read_once(codes + m);
      if (checked_[m] >= coded_.words) refuse_code(checked_[m], coded_.words);
    }
    return checked_.data();
  }

 private:
  const Coded& coded_;
  std::vector<std::uint8_t> checked_;
};

template <int N, class T, class S>
TB_INLINE void entries(const Coded& coded, const std::uint8_t* codes, const S* books, T* to) {
  for (Int m = 0; m < coded.code_row; ++m) {
    copy_in(N, books + (m * coded.words + codes[m]) * N, to + m * N);
  }
}

// Makes rows of T from stored numbers S; one for each thread.
template <class T, class S>
class Maker {
 public:
  explicit Maker(const Coded& coded)
      : coded_(coded), codes_(coded), numbers_(coded.bits == 4 ? 2 * coded.code_row : 0) {}

  void operator()(Int row, T* to) {
    const std::uint8_t* codes = codes_(row);
    if (coded_.bits == 0) return entries_of(codes, to);
    const auto* numbers = reinterpret_cast<const std::int8_t*>(codes);
    if (coded_.bits == 4) {
      unpack(coded_.code_row, codes, numbers_.data());
      numbers = numbers_.data();
    }
    const T scale = read<T>(static_cast<const S*>(coded_.scale)[row]);
    const T unit = coded_.bits == 4 ? T(1) / 8 : T(1) / 128;
    if (!coded_.steps) return scaled(coded_.cols, numbers, unit, scale, to);
    const Int group = coded_.group, groups = (coded_.cols + group - 1) / group;
    const std::int8_t* steps = coded_.steps + row * groups;
    for (Int g = 0, at = 0; g < groups; ++g, at += group) {
      const T step = T(steps[g]) / 128 * unit;
      if (group == 32 && at + 32 <= coded_.cols) {
        scaled(32, numbers + at, step, scale, to + at);
      } else {
        scaled(std::min(group, coded_.cols - at), numbers + at, step, scale, to + at);
      }
    }
  }

 private:
  void entries_of(const std::uint8_t* codes, T* to) const {
    const Int width = coded_.cols / coded_.code_row;
    const auto* books = static_cast<const S*>(coded_.books);
    if (width == 1) return entries<1>(coded_, codes, books, to);
    if (width == 2) return entries<2>(coded_, codes, books, to);
    if (width == 4) return entries<4>(coded_, codes, books, to);
    if (width == 8) return entries<8>(coded_, codes, books, to);
    for (Int m = 0; m < coded_.code_row; ++m) {
      copy_in(width, books + (m * coded_.words + codes[m]) * width, to + m * width);
    }
  }

  const Coded& coded_;
  Codes codes_;
  std::vector<std::int8_t> numbers_;
};

// One row after the other, each of one of the parts.
template <class T, class S>
void make_rows(std::span<const Coded> parts, std::span<const Row> rows, S* out) {
  const Int cols = parts.front().cols;
  std::vector<Maker<T, S>> make(parts.begin(), parts.end());
  std::vector<T> made(sizeof(S) == sizeof(T) ? 0 : cols);
  for (const Row& row : rows) {
    if constexpr (sizeof(S) == sizeof(T)) {
      make[row.part](row.id, out);
    } else {
      make[row.part](row.id, made.data());
      copy_out(cols, made.data(), out);
    }
    out += cols;
  }
}

template <class T>
TB_INLINE T dot(Int n, const T* a, const T* b) {
  constexpr int W = widest<T>;
  using V = Vector<T, W>;
  V sums[4] = {};
  Int i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    TB_UNROLL for (int j = 0; j < 4; ++j) sums[j] += load<V>(a + i + j * W) * load<V>(b + i + j * W);
  }
  for (; i + W <= n; i += W) sums[0] += load<V>(a + i) * load<V>(b + i);
  const V all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  T total = 0;
  for (int j = 0; j < W; ++j) total += all[j];
  for (; i < n; ++i) total += a[i] * b[i];
  return total;
}

// Scores of rows first to last for few vectors, which lie one after the other: (n, cols).
template <class T>
void multiply_few(const Coded& coded, Int first, Int last, const T* x, Int n, T* out) {
  Maker<T, T> make(coded);
  std::vector<T> row(coded.cols);
  for (Int i = first; i < last; ++i) {
    make(i, row.data());
    for (Int j = 0; j < n; ++j) *out++ = dot(coded.cols, row.data(), x + j * coded.cols);
  }
}

inline constexpr Int panel_rows = 4 * tall_rows;  // rows made at a time: for so many vectors are packed

// The same for many vectors, which lie side by side: (cols, n).
template <class T>
void multiply_many(const Coded& coded, Int first, Int last, const T* x, Int n, T* out) {
  Maker<T, T> make(coded);
  std::vector<T> panel(panel_rows * coded.cols), packed(packed_size<T>);
  for (Int at = first; at < last; at += panel_rows) {
    const Int rows = std::min(panel_rows, last - at);
    for (Int i = 0; i < rows; ++i) make(at + i, panel.data() + i * coded.cols);
    multiply<T>(rows, n, coded.cols, {panel.data(), coded.cols, 1}, x, n, out + (at - first) * n, n, false,
                packed.data());
  }
}

// W numbers of each row: the sum of those that its codes name in tables (parts * words), `stride` apart. Four sums, so
// that none waits for another.
template <class T, int W>
TB_INLINE void sum_entries(const Coded& coded, Int first, Int last, const T* tables, Int stride, T* out, Int out_row) {
  using V = Vector<T, W>;
  const Int parts = coded.code_row, words = coded.words;
  Codes codes_of(coded);
  for (Int row = first; row < last; ++row, out += out_row) {
    const std::uint8_t* codes = codes_of(row);
    V sums[4] = {};
    Int m = 0;
    for (; m + 4 <= parts; m += 4) {
      TB_UNROLL for (int i = 0; i < 4; ++i) sums[i] += load<V>(tables + ((m + i) * words + codes[m + i]) * stride);
    }
    for (; m < parts; ++m) sums[0] += load<V>(tables + (m * words + codes[m]) * stride);
    store(out, V((sums[0] + sums[1]) + (sums[2] + sums[3])));
  }
}

// Sums for n columns of tables, from column j on, W columns of all rows before the next. Where tables are wide what is
// read of them is copied together: numbers a power of two apart have few places in a cache.
template <class T, int W>
void sum_columns(const Coded& coded, Int first, Int last, const T* tables, Int n, Int j, T* out) {
  const Int entries = coded.code_row * coded.words;
  const bool copies = n > 2 * W && last - first >= coded.words;
  std::vector<T> packed(copies ? entries * W : 0);
  for (; j + W <= n; j += W) {
    if (copies) {
      for (Int e = 0; e < entries; ++e) std::memcpy(packed.data() + e * W, tables + e * n + j, W * sizeof(T));
      sum_entries<T, W>(coded, first, last, packed.data(), W, out + j, n);
    } else {
      sum_entries<T, W>(coded, first, last, tables + j, n, out + j, n);
    }
  }
  if constexpr (W > 1) {
    if (j < n) sum_columns<T, W / 2>(coded, first, last, tables, n, j, out);
  }
}

}  // namespace tb::TB_ISA
