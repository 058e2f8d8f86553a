// What a batch of indices asks for: unique rows, their unique prefixes, and the order to compute them in.
#pragma once

#include <cstdint>
#include <vector>

#include "chain.hpp"

namespace tb {

// The unique prefixes that end at one core, in ascending order.
struct Level {
  int count = 0;
  std::vector<int> digit;   // which slice of the core
  std::vector<int> parent;  // prefix of the level before; empty at the first
  std::vector<int> child;   // count + 1: where the children of each begin in the next level; empty at the last
  // Prefixes sorted by digit, so that a slice meets all its left products at once: prefix order[s] stands in slot s.
  std::vector<int> order, slot;
  std::vector<int> group;  // I_k + 1: where the slots of each digit begin
};

// A run of unique rows that is computed by itself, so that what is held at once stays small.
struct Slab {
  int begin = 0, end = 0;  // unique rows
  std::vector<Level> levels;
};

struct Plan {
  Int indices = 0;
  std::vector<Int> row;       // unique rows, ascending
  std::vector<int> first;     // row.size() + 1: where the occurrences of each begin
  std::vector<int> position;  // occurrences, by row, then ascending
  std::vector<int> inverse;   // index to unique row, -1 where skipped; made where it is asked for
  std::vector<int> skipped;   // positions that hold the padding row
  std::vector<Slab> slabs;

  int unique() const { return int(row.size()); }
  int occurrences(int r) const { return first[r + 1] - first[r]; }
};

struct Request {
  const Int* index;
  Int count, stride;  // numbers from an index to the next
  Int skip = -1;      // a row that takes no part
  bool for_bags = false;
  bool inverse = false;  // made for bags in any case
  Int number_bytes = 4;  // of the numbers computed with
};

// Throws std::out_of_range, which names the index and the bound.
[[noreturn]] void refuse(Int index, Int rows);

// The same for a code and the entries that its codebook has.
[[noreturn]] void refuse_code(Int code, Int words);

// A number that another thread may write to: read once, so that what is checked is what is used.
template <class T>
T read_once(const T* at) {
  return *static_cast<const volatile T*>(at);
}

// Throws std::out_of_range before anything is read through an index outside the table.
Plan make_plan(const Chain& chain, const Request& request);

// Whether the last core is applied to each left product where that was made, instead of sorted by its digit.
bool by_parent(const Chain& chain, Int number_bytes);

// Bytes of left products: those held for a slab throughout, and those of the last but one level.
Int held_bytes(const Chain& chain, const Slab& slab, Int number_bytes);
Int kept_bytes(const Chain& chain, const Slab& slab, Int number_bytes);

}  // namespace tb
