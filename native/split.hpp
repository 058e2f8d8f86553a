// Indices of a table that is made of parts, split by the part that has their rows.
#pragma once

#include <vector>

#include "chain.hpp"

namespace tb {

// Both write, one part after the other, which row of it each index is and where that stands in the batch, in the order
// of the batch, and return how many are of each part. `index`, `ids` and `at` are (count,).

// Parts that are bands of rows, one after the other, which end at `ends`.
std::vector<Int> split_by_ends(const Int* index, Int count, const std::vector<Int>& ends, Int* ids, Int* at);

// Two parts: the rows in `places` (hot,), which ascend, and of `rows` all others.
std::vector<Int> split_by_places(const Int* index, Int count, Int rows, const Int* places, Int hot, Int* ids, Int* at);

}  // namespace tb
