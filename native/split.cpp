#include "split.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <stdexcept>

#include "plan.hpp"

namespace tb {
namespace {

// Which of many rows are in a list, a bit each, and how many of them there are before every 64.
class Bitmap {
 public:
  Bitmap(Int rows, const Int* places, Int hot) : bits_(rows / 64 + 1), before_(rows / 64 + 1) {
    for (Int k = 0; k < hot; ++k) {
      const Int place = read_once(places + k);
      if (place < 0 || place >= rows) throw std::invalid_argument("places must be rows of the table.");
      bits_[place / 64] |= std::uint64_t(1) << place % 64;
    }
    for (std::size_t w = 1; w < bits_.size(); ++w) before_[w] = before_[w - 1] + std::popcount(bits_[w - 1]);
  }

  bool has(Int row) const { return bits_[row / 64] >> row % 64 & 1; }
  Int before(Int row) const {
    const std::uint64_t lower = (std::uint64_t(1) << row % 64) - 1;
    return before_[row / 64] + std::popcount(bits_[row / 64] & lower);
  }

 private:
  std::vector<std::uint64_t> bits_;
  std::vector<Int> before_;
};

}  // namespace

// `locate` says of a row which one of which part it is.
template <class Locate>
Located::Located(const Int* index, Int count, Int rows, std::size_t parts, Locate locate)
    : rows_(count), parts_(parts) {
  for (Int i = 0; i < count; ++i) {
    const Int row = read_once(index + i);
    if (row < 0 || row >= rows) refuse(row, rows);
    rows_[i] = locate(row);
  }
}

Located Located::by_ends(const Int* index, Int count, const std::vector<Int>& ends) {
  if (ends.empty() || !std::is_sorted(ends.begin(), ends.end())) throw std::invalid_argument("ends must ascend.");
  return {index, count, ends.back(), ends.size(), [&](Int row) {
            Int part = 0;
            for (const Int end : ends) part += row >= end;  // bands are few, and this has no branch to mistake
            return Row{part, part == 0 ? row : row - ends[part - 1]};
          }};
}

Located Located::by_places(const Int* index, Int count, Int rows, const Int* places, Int hot) {
  constexpr Int search = 16;  // a search takes as long as marking about so many rows
  if (count * search < hot + rows / 64) {
    return {index, count, rows, 2, [&](Int row) {
              const Int before = std::lower_bound(places, places + hot, row) - places;
              return before < hot && read_once(places + before) == row ? Row{0, before} : Row{1, row - before};
            }};
  }
  const Bitmap marked(rows, places, hot);
  return {index, count, rows, 2, [&](Int row) {
            const Int before = marked.before(row);
            return marked.has(row) ? Row{0, before} : Row{1, row - before};
          }};
}

std::vector<Int> Located::split(Int* ids, Int* at) const {
  std::vector<Int> sizes(parts_), next(parts_);
  for (const Row& row : rows_) ++sizes[row.part];
  for (std::size_t k = 1; k < parts_; ++k) next[k] = next[k - 1] + sizes[k - 1];
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const Int slot = next[rows_[i].part]++;
    ids[slot] = rows_[i].id;
    at[slot] = Int(i);
  }
  return sizes;
}

void Located::check(std::span<const Coded> parts) const {
  if (parts.size() != parts_) throw std::invalid_argument("one table of codes is needed for each part.");
  for (const Coded& part : parts) {
    if (part.cols != parts.front().cols) throw std::invalid_argument("all parts must have the same number of columns.");
  }
  for (const Row& row : rows_) {
    if (row.id < 0 || row.id >= parts[row.part].rows) refuse(row.id, parts[row.part].rows);
  }
}

}  // namespace tb
