// Vectors of W numbers through the compilers' own vector types: one source for every instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__GNUC__) && !defined(__clang__)
#define TB_UNROLL _Pragma("GCC unroll 16")
#elif defined(__clang__)
#define TB_UNROLL _Pragma("unroll")
#else
#error "The kernels need the vector types of GCC or Clang."
#endif
#define TB_INLINE inline __attribute__((always_inline))

namespace tb::TB_ISA {

#if defined(__AVX512F__)
inline constexpr int vector_bytes = 64;
inline constexpr int tall_rows = 12;  // rows of a register block two vectors wide: 24 of 32 registers
#elif defined(__AVX2__)
inline constexpr int vector_bytes = 32;
inline constexpr int tall_rows = 6;  // 12 of 16 registers
#else
inline constexpr int vector_bytes = 16;
inline constexpr int tall_rows = 6;
#endif

template <class T>
inline constexpr int widest = vector_bytes / int(sizeof(T));

template <class T, int W>
struct VectorOf {
  typedef T type __attribute__((vector_size(W * sizeof(T))));
};
template <class T>
struct VectorOf<T, 1> {
  using type = T;
};
template <class T, int W>
using Vector = typename VectorOf<T, W>::type;

template <class V, class T>
TB_INLINE V load(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

template <class V, class T>
TB_INLINE void store(T* to, V v) {
  std::memcpy(to, &v, sizeof(V));
}

// The same bytes as another type.
template <class To, class From>
TB_INLINE To reread(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// The same number in every place.
template <class V>
TB_INLINE V same(float x) {
  return V{} + x;
}

// bfloat16 is the upper half of a float32; rounding is to nearest, ties to even.
struct bf16 {
  std::uint16_t bits;
};

TB_INLINE float widened(bf16 x) {
  std::uint32_t bits = std::uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

TB_INLINE bf16 rounded(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const std::uint32_t up = bits + 0x7fffu + ((bits >> 16) & 1u);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return bf16{std::uint16_t(is_nan ? (bits >> 16) | 0x40u : up >> 16)};
}

// W stored numbers as floats, and back.
template <int W, class S>
TB_INLINE Vector<float, W> read_floats(const S* from) {
  if constexpr (sizeof(S) == 4) {
    return load<Vector<float, W>>(from);
  } else if constexpr (W == 1) {
    return widened(*from);
  } else {
    const auto bits = __builtin_convertvector(load<Vector<std::uint16_t, W>>(from), Vector<std::uint32_t, W>);
    return reread<Vector<float, W>>(bits << 16);
  }
}

template <int W, class S>
TB_INLINE void write_floats(S* to, Vector<float, W> x) {
  if constexpr (sizeof(S) == 4) {
    store(to, x);
  } else if constexpr (W == 1) {
    *to = rounded(x);
  } else {
    using Bits = Vector<std::uint32_t, W>;
    const Bits bits = reread<Bits>(x), up = bits + 0x7fffu + ((bits >> 16) & 1u);
    const auto is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    store(to, __builtin_convertvector((is_nan ? bits | 0x400000u : up) >> 16, Vector<std::uint16_t, W>));
  }
}

// Between stored numbers S and the numbers T that are computed with.
template <class T, class S>
TB_INLINE T read(S x) {
  if constexpr (sizeof(S) == 2) {
    return widened(x);
  } else {
    return x;
  }
}

template <class S, class T>
TB_INLINE S written(T x) {
  if constexpr (sizeof(S) == 2) {
    return rounded(x);
  } else {
    return x;
  }
}

template <class T, class S>
inline void copy_in(std::int64_t n, const S* from, T* to) {
  if constexpr (sizeof(S) == sizeof(T)) {
    std::memcpy(to, from, std::size_t(n) * sizeof(T));
  } else {
    for (std::int64_t i = 0; i < n; ++i) to[i] = read<T>(from[i]);
  }
}

template <class T, class S>
inline void copy_out(std::int64_t n, const T* from, S* to) {
  if constexpr (sizeof(S) == sizeof(T)) {
    std::memcpy(to, from, std::size_t(n) * sizeof(T));
  } else {
    for (std::int64_t i = 0; i < n; ++i) to[i] = written<S>(from[i]);
  }
}

// The same of so few that a call would take longer than the copy.
template <class T, class S>
TB_INLINE void copy_few(std::int64_t n, const T* from, S* to) {
  if constexpr (sizeof(S) == sizeof(T)) {
    constexpr int W = widest<T>;
    for (; n >= W; n -= W, from += W, to += W) store(to, load<Vector<T, W>>(from));
    for (; n >= 4; n -= 4, from += 4, to += 4) store(to, load<Vector<T, 4>>(from));
  }
  for (std::int64_t i = 0; i < n; ++i) to[i] = written<S>(from[i]);
}

// to += from, the same way.
template <class T, class S>
TB_INLINE void add_few(std::int64_t n, const S* from, T* to) {
  if constexpr (sizeof(S) == sizeof(T)) {
    constexpr int W = widest<T>;
    using V = Vector<T, W>;
    for (; n >= W; n -= W, from += W, to += W) store(to, V(load<V>(to) + load<V>(from)));
  }
  for (std::int64_t i = 0; i < n; ++i) to[i] += read<T>(from[i]);
}

// to += scale * from
template <class T, class S>
inline void add_scaled(std::int64_t n, T scale, const S* from, T* to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] += scale * read<T>(from[i]);
}

}  // namespace tb::TB_ISA
