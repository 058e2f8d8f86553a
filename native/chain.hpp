// Sizes of a chain of cores, open (joint 1) or closed, as in tensorbed/backends/chain.py.
#pragma once

#include <cstdint>
#include <vector>

namespace tb {

using Int = std::int64_t;

// Core k is stored as (I_k, R_k, J_k, R_{k+1}), ranks counted from 0: a digit picks one contiguous slice.
struct Chain {
  Int rows;
  std::vector<Int> row_factors, col_factors, ranks;

  int order() const { return int(row_factors.size()); }
  int last() const { return order() - 1; }
  Int joint() const { return ranks.front(); }

  Int made(int k) const {  // J_0 ... J_{k-1}: columns that the cores before k have made
    Int n = 1;
    for (int i = 0; i < k; ++i) n *= col_factors[i];
    return n;
  }
  Int cols() const { return made(order()); }

  // Level k takes left products (height x depth) to (height x width); the last one closes the joint.
  Int height(int k) const { return made(k) * (k == last() ? 1 : joint()); }
  Int depth(int k) const { return ranks[k]; }
  Int width(int k) const { return col_factors[k] * (k == last() ? 1 : ranks[k + 1]); }

  // Numbers in a left product after core k < last, and in a slice of core k.
  Int left_size(int k) const { return joint() * made(k + 1) * ranks[k + 1]; }
  Int slice_size(int k) const { return ranks[k] * col_factors[k] * ranks[k + 1]; }
};

}  // namespace tb
