// Indices of a table that is made of parts: which row of which part each of them is.
#pragma once

#include <vector>

#include "kernels.hpp"

namespace tb {

// A batch of indices, and for each of them which row of which part it is.
class Located {
 public:
  // Parts that are bands of rows, one after the other, which end at `ends`.
  static Located by_ends(const Int* index, Int count, const std::vector<Int>& ends);

  // Two parts: the rows in `places` (hot,), which ascend, and of `rows` all others.
  static Located by_places(const Int* index, Int count, Int rows, const Int* places, Int hot);

  std::span<const Row> rows() const { return rows_; }

  // Writes, one part after the other, which of its rows are asked for and where they stand in the batch, in the order
  // of the batch, and returns how many are of each part. `ids` and `at` are (count,).
  std::vector<Int> split(Int* ids, Int* at) const;

  // Throws std::out_of_range where a row is asked of one of these tables that it does not have.
  void check(std::span<const Coded> parts) const;

 private:
  template <class Locate>
  Located(const Int* index, Int count, Int rows, std::size_t parts, Locate locate);

  std::vector<Row> rows_;
  std::size_t parts_;
};

}  // namespace tb
