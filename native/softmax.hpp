// A softmax over the rows of a tile of scores: the sum of a column's exponentials, and the probabilities in its place.
//
// A column's sum goes down all rows in one order and a probability is of its place alone: no result depends on how a
// tile is cut between threads, by columns for the sums and by rows for the probabilities.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels.hpp"
#include "simd.hpp"

namespace tb::TB_ISA {

inline constexpr float infinity = std::numeric_limits<float>::infinity();

// A tile by the type of its numbers, float or bf16.
template <class S>
struct Scores {
  S* at;
  Int rows, cols, stride;
};

template <class Compute>
void with_scores(const Tile& tile, Compute compute) {
  if (tile.type == Type::bfloat16) {
    compute(Scores<bf16>{static_cast<bf16*>(tile.at), tile.rows, tile.cols, tile.stride});
  } else {
    compute(Scores<float>{static_cast<float*>(tile.at), tile.rows, tile.cols, tile.stride});
  }
}

template <int W>
using Floats = Vector<float, W>;
template <int W>
using Bits = Vector<std::int32_t, W>;

// No comparison with a NaN holds: most_of passes over an x that is one, the bounds leave it as it is.
template <class V>
TB_INLINE V most_of(V x, V most) {
  return x > most ? x : most;
}

template <class V>
TB_INLINE V bounded_below(V x, V least) {
  return least > x ? least : x;
}

template <class V>
TB_INLINE V bounded_above(V x, V most) {
  return most < x ? most : x;
}

// exp(x) = rest * 2^n with |log(rest)| <= log(2) / 2, for x from -88 to 89; a NaN gives a NaN in `rest`.
template <int W>
struct Power {
  Floats<W> rest;
  Bits<W> scale;  // the float 2^n: zero for n = -127, which is subnormal, infinite for n = 128
};

template <int W>
TB_INLINE Power<W> power(Floats<W> x) {
  using V = Floats<W>;
  // Adding 1.5 * 2^23 leaves no place for a fraction: the sum is rounded to the nearest whole number, which then stands
  // in its lowest bits. With 127 in it that is the exponent as floats store it, with no conversion that could overflow.
  constexpr float shift = 12582912.0f + 127.0f;
  const V shifted = x * 1.44269504f + shift;
  const V n = shifted - shift;
  // log(2) in two parts: n times the first is exact, so the difference is as well.
  const V r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  // 1 + r + r^2 q(r), q of degree 4 with the least relative error, which is 0.03 units in the last place.
  V p = r * 1.38145406e-3f + 8.36874545e-3f;
  p = p * r + 4.16683890e-2f;
  p = p * r + 0.166665211f;
  p = p * r + 0.499999940f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  using Unsigned = Vector<std::uint32_t, W>;
  return {p, reread<Bits<W>>(reread<Unsigned>(shifted) << 23)};
}

// exp(x) for x <= 0 or NaN; zero below -87.7.
template <int W>
TB_INLINE Floats<W> exp_below(Floats<W> x) {
  const Power<W> e = power<W>(bounded_below(x, same<Floats<W>>(-88.0f)));
  return e.rest * reread<Floats<W>>(e.scale);
}

// exp(x) for any x: from 88.38 on 2^n is no float but exp(x) is one, so half of it is doubled.
template <int W>
TB_INLINE Floats<W> exp_any(Floats<W> x) {
  using V = Floats<W>;
  const Power<W> e = power<W>(bounded_above(bounded_below(x, same<V>(-88.0f)), same<V>(89.0f)));
  const auto top = e.scale == 0x7f800000;
  const V y = e.rest * (top ? same<V>(0x1p127f) : reread<V>(e.scale));
  return top ? y + y : y;
}

// Rows between two looks at the maximum: few enough that a vector of each is still in the first cache when it is read
// again, though rows a power of two apart compete for few places in it; enough that rescaling the total costs little.
inline constexpr Int sum_rows = 32;
inline constexpr Int sum_cols = 512;  // columns whose lost parts are kept at a time

// Takes up to sum_rows rows of W columns into (most, total): total + lost is the sum of exp(x - most) so far.
//
// A column of -inf alone has no maximum to subtract: 0 is as good, its terms are 0. A NaN does not become the maximum
// but its term is NaN, and total with it, for good. So is that of +inf, which is inf - inf.
template <int W, class S>
TB_INLINE void absorb_rows(Int rows, const S* x, Int stride, float* most, float* total, float* lost) {
  using V = Floats<W>;
  const V before = load<V>(most);
  V tops[2] = {before, before};
  Int v = 0;
  for (; v + 2 <= rows; v += 2) {
    TB_UNROLL for (int i = 0; i < 2; ++i) tops[i] = most_of(read_floats<W>(x + (v + i) * stride), tops[i]);
  }
  if (v < rows) tops[0] = most_of(read_floats<W>(x + v * stride), tops[0]);
  const V top = most_of(tops[1], tops[0]);
  const V base = top == -infinity ? same<V>(0.0f) : top;

  V sums[2] = {};
  for (v = 0; v + 2 <= rows; v += 2) {
    TB_UNROLL for (int i = 0; i < 2; ++i) sums[i] += exp_below<W>(read_floats<W>(x + (v + i) * stride) - base);
  }
  if (v < rows) sums[0] += exp_below<W>(read_floats<W>(x + v * stride) - base);

  // What each addition rounds away is carried along (Knuth's two-sum), or thousands of them would be seen in the total.
  const V factor = exp_below<W>(before - base);
  const V old = load<V>(total) * factor, more = sums[0] + sums[1];
  const V sum = old + more, added = sum - old;
  store(most, top);
  store(total, sum);
  store(lost, V(load<V>(lost) * factor + ((old - (sum - added)) + (more - added))));
}

// Widths from the widest down to one number: no column is left over.
template <int W, class S>
TB_INLINE void absorb_block(Int rows, Int cols, const S* x, Int stride, float* most, float* total, float* lost) {
  Int t = 0;
  for (; t + W <= cols; t += W) absorb_rows<W>(rows, x + t, stride, most + t, total + t, lost + t);
  if constexpr (W > 1) {
    if (t < cols) absorb_block<W / 2>(rows, cols - t, x + t, stride, most + t, total + t, lost + t);
  }
}

template <class S>
inline void absorb_columns(const Scores<S>& tile, Int first, Int last, float* most, float* total) {
  alignas(64) float lost[sum_cols];
  for (Int t = first; t < last; t += sum_cols) {
    const Int cols = std::min(sum_cols, last - t);
    std::fill(lost, lost + cols, 0.0f);
    for (Int v = 0; v < tile.rows; v += sum_rows) {
      absorb_block<widest<float>>(std::min(sum_rows, tile.rows - v), cols, tile.at + v * tile.stride + t, tile.stride,
                                  most + t, total + t, lost);
    }
    for (Int i = 0; i < cols; ++i) total[t + i] += lost[i];
  }
}

// One column without gaps is read as a tile of `lanes` columns, whose sums are then one.
template <class S>
inline void absorb_one_column(const Scores<S>& tile, float* most, float* total) {
  constexpr Int lanes = 64;
  alignas(64) float mosts[lanes], totals[lanes];
  std::fill(mosts, mosts + lanes, -infinity);
  std::fill(totals, totals + lanes, 0.0f);
  const Int rows = tile.rows / lanes, rest = tile.rows % lanes;
  absorb_columns<S>({tile.at, rows, lanes, lanes}, 0, lanes, mosts, totals);
  absorb_columns<S>({tile.at + rows * lanes, rest, 1, 1}, 0, 1, most, total);

  float top = *most;
  for (const float other : mosts) top = most_of(other, top);
  const float base = top == -infinity ? 0.0f : top;
  double sum = double(*total) * exp_below<1>(*most - base);
  for (Int i = 0; i < lanes; ++i) sum += double(totals[i]) * exp_below<1>(mosts[i] - base);
  *most = top;
  *total = float(sum);
}

// One row, from column t on. A scale of 0 is a token that does not count, whatever its scores are.
template <int W, bool shifted, class S>
TB_INLINE void probable_row(Int t, Int cols, S* x, const Softmax& softmax, float weight) {
  using V = Floats<W>;
  for (; t + W <= cols; t += W) {
    const V scale = load<V>(softmax.scale + t);
    V y = scale * exp_any<W>(read_floats<W>(x + t) - load<V>(softmax.lse + t));
    y = scale == 0.0f ? same<V>(0.0f) : y;
    if constexpr (shifted) y -= load<V>(softmax.shift + t) * weight;
    write_floats<W>(x + t, y);
  }
  if constexpr (W > 1) {
    if (t < cols) probable_row<W / 2, shifted>(t, cols, x, softmax, weight);
  }
}

template <class S>
inline void probable_rows(const Scores<S>& tile, Int first, Int last, const Softmax& softmax) {
  for (Int v = first; v < last; ++v) {
    S* row = tile.at + v * tile.stride;
    if (softmax.shift) {
      probable_row<widest<float>, true>(0, tile.cols, row, softmax, softmax.weight ? softmax.weight[v] : 1.0f);
    } else {
      probable_row<widest<float>, false>(0, tile.cols, row, softmax, 0.0f);
    }
  }
}

}  // namespace tb::TB_ISA
