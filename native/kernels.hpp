// What one call asks of the kernels, the same for every instruction set.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "plan.hpp"

namespace tb {

enum class Type { float32, float64, bfloat16 };

inline Int number_bytes(Type type) { return type == Type::float64 ? 8 : 4; }  // of the numbers computed with

// Left products that forward made and backward goes on from, and who owns them.
struct Tape {
  std::vector<std::unique_ptr<std::byte[]>> lefts;  // by level, in slots; empty where not kept
};

// One table of a call. Pointers are to stored numbers unless said otherwise; rows of out and grad may lie apart.
struct Lookup {
  const Chain* chain = nullptr;
  const Plan* plan = nullptr;
  std::vector<const void*> cores;

  // Bags: where each begins, which one each index is in, and by what its row is multiplied (null: by one).
  Int bags = -1;                  // none: a row for each index
  const Int* bounds = nullptr;    // (bags + 1,)
  const int* bag = nullptr;       // (indices,)
  const double* scale = nullptr;  // (indices,)

  void* out = nullptr;
  Int out_row = 0;
  const void* padding_row = nullptr;  // shown at skipped indices; null: zeros
  Tape* tape = nullptr;               // filled by forward, read by backward

  const void* grad = nullptr;
  Int grad_row = 0;
  std::vector<void*> core_grads;      // in numbers computed with, every one is written
  double* scale_grad = nullptr;       // (indices,), asked for when not null
};

// Scores of some words of a vocabulary, its rows, for some tokens, its columns. Columns lie side by side, rows apart.
struct Tile {
  float* at = nullptr;
  Int rows = 0, cols = 0;
  Int stride = 0;  // in numbers
};

// What becomes of the scores x: scale[t] * exp(x - lse[t]) - shift[t] * weight[v] at row v and column t.
struct Softmax {
  const float* lse = nullptr;     // (cols,)
  const float* scale = nullptr;   // (cols,), 0: no first term, even if it were not finite
  const float* shift = nullptr;   // (cols,), null: no second term
  const float* weight = nullptr;  // (rows,), null: ones
};

// Each instruction set has these, in a namespace of its name. absorb takes the rows of a tile into the maximum of each
// column and the sum of exp(x - maximum) so far.
#define TB_DECLARE(isa)                                                           \
  namespace isa {                                                                 \
  void forward(Type type, std::span<Lookup> lookups, int threads);                \
  void backward(Type type, std::span<Lookup> lookups, int threads);               \
  void absorb(const Tile& tile, float* most, float* total, int threads);          \
  void probabilities(const Tile& tile, const Softmax& softmax, int threads);      \
  }
TB_DECLARE(baseline)
TB_DECLARE(avx2)
TB_DECLARE(avx512)
#undef TB_DECLARE

}  // namespace tb
