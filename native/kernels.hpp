// What one call asks of the kernels, the same for every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
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

  // Rows are made one after another, and then copied to the places of their indices together with the other tables';
  // gradients are summed the same way. So memory is gone through in its order, where a row of a table is a piece of it.
  bool apart = false;

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
  Type type = Type::float32;  // or bfloat16, which is computed with in float32
  void* at = nullptr;
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

// A table whose rows are kept as codes, of one of two kinds. What is not a code is a stored number.
struct Coded {
  Int rows = 0, cols = 0;
  const std::uint8_t* codes = nullptr;
  Int code_row = 0;  // bytes of a row
  int bits = 0;      // 0: each byte names an entry of a codebook

  // Whole numbers of 8 or 4 bits, times the step of a group of columns, times the row's scale.
  const std::int8_t* steps = nullptr;  // (rows, ceil(cols / group)), null: none
  Int group = 0;
  const void* scale = nullptr;  // (rows,)

  // Entries of codebooks, cols / code_row numbers each.
  const void* books = nullptr;  // (code_row, words, cols / code_row)
  Int words = 0;
};

// Which row of which table is asked for.
struct Row {
  Int part, id;
};

// Each instruction set has these, in a namespace of its name. absorb takes the rows of a tile into the maximum of each
// column and the sum of exp(x - maximum) so far. All tables of one call of coded_rows have the same number of columns.
// Scores and sums of all rows of a coded table are (rows, n), of vectors (cols, n) and of tables (code_row * words, n),
// in float32 or float64, as its own numbers are then too.
#define TB_DECLARE(isa)                                                                                \
  namespace isa {                                                                                      \
  void forward(Type type, std::span<Lookup> lookups, int threads);                                     \
  void backward(Type type, std::span<Lookup> lookups, int threads);                                    \
  void absorb(const Tile& tile, float* most, float* total, int threads);                               \
  void probabilities(const Tile& tile, const Softmax& softmax, int threads);                           \
  void coded_rows(Type type, std::span<const Coded> parts, std::span<const Row> rows, void* out,       \
                  int threads);                                                                        \
  void coded_scores(Type type, const Coded& coded, const void* x, Int n, void* out, int threads);      \
  void coded_sums(Type type, const Coded& coded, const void* tables, Int n, void* out, int threads);   \
  }
TB_DECLARE(baseline)
TB_DECLARE(avx2)
TB_DECLARE(avx512)
#undef TB_DECLARE

}  // namespace tb
