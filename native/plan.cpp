#include "plan.hpp"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>
#include <utility>

namespace tb {

void refuse(Int index, Int rows) {
  throw std::out_of_range("index " + std::to_string(index) + " is out of range for a table of " + std::to_string(rows) +
                          " rows (valid: 0 to " + std::to_string(rows - 1) + ")" +
                          (index < 0 ? "; negative indices do not wrap around." : "."));
}

void refuse_code(Int code, Int words) {
  throw std::out_of_range("a code names entry " + std::to_string(code) + " of codebooks of " + std::to_string(words) +
                          " (valid: 0 to " + std::to_string(words - 1) + "): the codes are damaged, load them again.");
}

namespace {

template <class Key>
struct Item {
  Key key;
  int position;
};

// Stable least-significant-digit radix sort; short inputs by comparison.
template <class Key>
void sort_items(std::vector<Item<Key>>& items, Int rows) {
  if (items.size() <= 64) {
    std::stable_sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.key < b.key; });
    return;
  }
  const int bits = std::max(1, int(std::bit_width(std::uint64_t(rows - 1))));
  const int passes = (bits + 11) / 12;  // counts of 12 bits fit into half of a first cache
  const int step = (bits + passes - 1) / passes;
  const Key mask = (Key(1) << step) - 1;
  std::vector<Item<Key>> other(items.size());
  std::vector<int> begin(std::size_t(1) << step);
  for (int shift = 0; shift < bits; shift += step) {
    std::fill(begin.begin(), begin.end(), 0);
    for (const auto& item : items) ++begin[(item.key >> shift) & mask];
    int sum = 0;
    for (int& b : begin) sum += std::exchange(b, sum);
    for (const auto& item : items) other[begin[(item.key >> shift) & mask]++] = item;
    items.swap(other);
  }
}

template <class Key>
void find_rows(const Chain& chain, const Request& request, Plan& plan) {
  std::vector<Item<Key>> items(request.count);
  Int kept = 0;
  for (Int i = 0; i < request.count; ++i) {
    const Int row = read_once(request.index + i * request.stride);
    if (row < 0 || row >= chain.rows) refuse(row, chain.rows);
    if (row == request.skip) {
      plan.skipped.push_back(int(i));
    } else {
      items[kept++] = {Key(row), int(i)};
    }
  }
  items.resize(kept);
  sort_items(items, chain.rows);
  plan.position.resize(kept);
  plan.row.resize(kept);
  plan.first.resize(kept + 1);
  if (request.for_bags || request.inverse) plan.inverse.assign(request.count, -1);
  int* inverse = plan.inverse.empty() ? nullptr : plan.inverse.data();
  int rows = 0;
  // Whether a row is new is anyone's guess, also the processor's: all is written each time, and nothing branched on.
  for (Int i = 0; i < kept; ++i) {
    const auto [key, position] = items[i];
    rows += i == 0 || key != items[i - 1].key;
    plan.position[i] = position;
    plan.row[rows - 1] = Int(key);
    plan.first[rows] = int(i) + 1;
    if (inverse) inverse[position] = rows - 1;
  }
  plan.row.resize(rows);
  plan.first.resize(rows + 1);
}

void sort_by_digit(Level& level, Int digits) {
  level.group.assign(digits + 1, 0);
  for (int d : level.digit) ++level.group[d + 1];
  for (Int d = 0; d < digits; ++d) level.group[d + 1] += level.group[d];
  level.order.resize(level.count);
  level.slot.resize(level.count);
  std::vector<int> next(level.group.begin(), level.group.end() - 1);
  for (int p = 0; p < level.count; ++p) {
    level.slot[p] = next[level.digit[p]]++;
    level.order[level.slot[p]] = p;
  }
}

// Sorted rows have sorted prefixes: equal ones stand side by side.
template <class Key>
std::vector<Level> find_levels(const Chain& chain, const Int* rows, int count, bool last_by_digit) {
  std::vector<Level> levels(chain.order());
  std::vector<Key> values(rows, rows + count);
  for (int k = chain.last(); k >= 0; --k) {
    Level& level = levels[k];
    level.count = int(values.size());
    level.digit.resize(level.count);
    if (k == 0) {
      std::copy(values.begin(), values.end(), level.digit.begin());
    } else {
      const Key factor = Key(chain.row_factors[k]);
      Level& above = levels[k - 1];
      level.parent.resize(level.count);
      above.child.resize(level.count + 1);
      int parents = 0;
      Key before = 0;
      for (int p = 0; p < level.count; ++p) {  // without branches, as above
        const Key prefix = values[p] / factor;
        level.digit[p] = int(values[p] - prefix * factor);
        parents += p == 0 || prefix != before;
        before = prefix;
        values[parents - 1] = prefix;  // never beyond p: what is overwritten was read
        above.child[parents] = p + 1;
        level.parent[p] = parents - 1;
      }
      above.child.resize(parents + 1);
      values.resize(parents);
      if (k < chain.last() || last_by_digit) sort_by_digit(level, chain.row_factors[k]);
    }
  }
  return levels;
}

Slab make_slab(const Chain& chain, const Plan& plan, int begin, int end, Int number_bytes) {
  const bool last_by_digit = !by_parent(chain, number_bytes);
  const Int* rows = plan.row.data() + begin;
  const bool small = chain.rows <= Int(UINT32_MAX);
  return Slab{begin, end,
              small ? find_levels<std::uint32_t>(chain, rows, end - begin, last_by_digit)
                    : find_levels<std::uint64_t>(chain, rows, end - begin, last_by_digit)};
}

Int cores_size(const Chain& chain) {
  Int n = 0;
  for (int k = 0; k < chain.order(); ++k) n += chain.row_factors[k] * chain.slice_size(k);
  return n;
}

}  // namespace

bool by_parent(const Chain& chain, Int number_bytes) {
  if (chain.joint() > 1) return true;
  const int last = chain.last();
  if (chain.row_factors[last] == 1) return false;  // all rows share its slice: they are one product
  // Every thread keeps a gradient of the last core; and a product of very few rows would waste the registers.
  const Int bytes = chain.row_factors[last] * chain.slice_size(last) * number_bytes;
  return bytes <= 2 << 20 && (chain.height(last) >= 4 || chain.width(last) <= 16);
}

Int held_bytes(const Chain& chain, const Slab& slab, Int number_bytes) {
  const bool fused = by_parent(chain, number_bytes);
  Int numbers = 0;
  for (int k = 1; k < chain.order(); ++k) {
    const Int count = slab.levels[k].count;
    if (k < chain.last() - (fused ? 1 : 0)) numbers += count * chain.left_size(k);
    if (k < chain.last() || !fused) numbers += count * chain.left_size(k - 1);  // gradients of left products
  }
  return numbers * number_bytes;
}

Int kept_bytes(const Chain& chain, const Slab& slab, Int number_bytes) {
  const int k = chain.last() - 1;
  return k > 0 ? Int(slab.levels[k].count) * chain.left_size(k) * number_bytes : 0;
}

Plan make_plan(const Chain& chain, const Request& request) {
  if (request.count > Int(INT32_MAX)) throw std::length_error("a batch holds at most 2^31 - 1 indices; cut it.");
  Plan plan;
  plan.indices = request.count;
  if (chain.rows <= Int(UINT32_MAX)) {
    find_rows<std::uint32_t>(chain, request, plan);
  } else {
    find_rows<std::uint64_t>(chain, request, plan);
  }
  if (plan.unique() == 0) return plan;
  const Int row_bytes = chain.cols() * request.number_bytes;
  // What is held for a slab may be a quarter of the rows and the cores; in bags the rows themselves are held too.
  const Int held = plan.unique() * row_bytes + cores_size(chain) * request.number_bytes;
  const Int budget = std::max<Int>(6 << 20, held / 4);
  plan.slabs.push_back(make_slab(chain, plan, 0, plan.unique(), request.number_bytes));
  Int parts = (held_bytes(chain, plan.slabs[0], request.number_bytes) + budget - 1) / budget;
  if (request.for_bags) parts = std::max<Int>(parts, plan.unique() * row_bytes / (4 << 20));
  parts = std::min<Int>(parts, plan.unique());
  if (parts <= 1) return plan;
  plan.slabs.clear();
  for (Int s = 0; s < parts; ++s) {
    const int begin = int(plan.unique() * s / parts), end = int(plan.unique() * (s + 1) / parts);
    plan.slabs.push_back(make_slab(chain, plan, begin, end, request.number_bytes));
  }
  return plan;
}

}  // namespace tb
