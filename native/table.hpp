// Rows of one table and their gradients, for one share of each step.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <memory>
#include <vector>

#include "gemm.hpp"
#include "kernels.hpp"

namespace tb::TB_ISA {

// Left products made at once: forward they stay in the second-level cache until their rows are made; backward it pays
// more that the slice, and its gradient, are gone through less often.
inline constexpr Int forward_bytes = 256 * 1024;
inline constexpr Int backward_bytes = 1024 * 1024;
inline constexpr int several = 4;               // rows of a prefix from which one product of all of them pays
inline constexpr Int copy_cost = 12;            // what handing on a number costs, in multiply-adds

// Memory of a thread that stays between calls.
template <class T>
class Arena {
 public:
  T* take(Int count) {
    if (count > size_) {
      numbers_.reset(new T[std::size_t(count)]);
      size_ = count;
    }
    return numbers_.get();
  }
  void trim() {
    if (size_ * Int(sizeof(T)) > 8 << 20) numbers_.reset(), size_ = 0;
  }

 private:
  std::unique_ptr<T[]> numbers_;
  Int size_ = 0;
};

template <class T>
Arena<T>& arena() {
  static thread_local Arena<T> mine;
  return mine;
}

// A table's part in a call, one slab of its rows after the other. Steps are called for every share, by any thread, a
// step after all shares of the one before; what is computed depends on the number of shares and on nobody's pace.
template <class T, class S>
class Table {
 public:
  Table(Lookup& lookup, int shares)
      : q_(lookup), chain_(*lookup.chain), plan_(*lookup.plan), shares_(shares), last_level_(chain_.last()),
        fused_(by_parent(chain_, sizeof(T))), final_(fused_ ? last_level_ - 1 : last_level_), cols_(chain_.cols()),
        lefts_(chain_.order()), left_(chain_.order()), grads_(chain_.order()), heads_(chain_.order()),
        cuts_(chain_.order(), std::vector<int>(shares + 1)), joint_(chain_.joint()),
        closing_depth_(joint_ * chain_.depth(last_level_)),
        closing_width_(chain_.row_factors[last_level_] * chain_.width(last_level_)) {
    for (int k = 0; k < chain_.order(); ++k) {
      sizes_.push_back({chain_.height(k), chain_.depth(k), chain_.width(k), chain_.slice_size(k), chain_.left_size(k)});
    }
    if (fused_ && joint_ == 1) few_columns_ = product_of_few(sizes_[last_level_]);
  }

  int slabs() const { return int(plan_.slabs.size()); }
  int final_level() const { return final_; }  // the levels from 1 to here, exclusive, are computed by themselves
  bool has_bags() const { return q_.bags >= 0; }
  bool apart() const { return q_.apart; }
  bool has_lefts() const { return kept_; }

  void open(int slab, bool backward);
  double cost() const;                         // of the final level, in multiply-adds
  void cut_final(double before, double step);  // where the shares of the whole call meet

  void extend(int k, int share);    // forward: left products of level k
  void finish(int share);           // forward: the final level, rows handed on
  void pool(int share);             // forward: the slab's rows into their bags
  void put(Int begin, Int end);     // forward: rows made apart, to where these indices are
  void fill(int share);             // forward: what no row is handed to

  void collect(Int begin, Int end);  // backward: what comes back to these indices, to the rows it belongs to
  void start_back(int share);       // backward: the final level
  void go_back(int k, int share);   // backward: level k
  void settle(int share);           // backward: what the shares have found, put together
  void no_gradient();               // backward: of an empty batch

 private:
  const Level& level(int k) const { return slab_->levels[k]; }
  int prefix_at(int k, int slot) const { return k == 0 ? slot : level(k).order[slot]; }
  int slot_of(int k, int prefix) const { return k == 0 ? prefix : level(k).slot[prefix]; }
  const S* core(int k) const { return static_cast<const S*>(q_.cores[k]); }
  T* core_grad(int k) const { return static_cast<T*>(q_.core_grads[k]); }
  bool keeps() const;
  int block_height(int k) const;

  struct Scratch {
    T *left, *slice, *made, *grad, *row, *packed, *turned, *turned_grad, *neighbours;
  };
  Scratch scratch(int k) const;

  void pack_last();
  const T* slice(int k, int digit, T* room) const;
  const T* first_slice(int prefix, T* room) const;
  void gather(int k, int begin, int end, T* to) const;
  template <class Visit>
  void for_blocks(int k, int share, Visit visit) const;

  T* place(int row, T* room) const;
  void hand_on(int row, const T* numbers) const;
  const T* turned(const T* left, T* room) const;
  void turn_back(const T* grad, T* left_grad) const;
  void make_row(const T* turned, int child, T* to, T* packed) const;
  void make_neighbours(const T* turned, int begin, int end, const Scratch& room) const;
  void expect(int child) const;
  void make_children(int prefix, const T* left, const Scratch& room) const;

  const S* grad_at(int occurrence) const;
  T scale_at(int occurrence) const { return q_.scale ? T(q_.scale[plan_.position[occurrence]]) : T(1); }
  void expect_gradient(int child) const;
  const T* row_gradient(int row, T* room) const;
  void scale_gradients(int row, const T* numbers) const;
  void sum_children(int k, int prefix, T* to, bool add) const;
  void children_back(int prefix, const T* left, T* left_grad, T* last_grad, const Scratch& room) const;
  void neighbours_back(const T* turned, int begin, int end, T* grad, bool add, T* last_grad,
                       const Scratch& room) const;
  void slice_back(int k, int begin, int end, int share, const Scratch& room, const T* right, const T* grad);
  T* last_grad(int share);
  void settle_first(int share);
  void settle_middle(int k, int share);
  void settle_last(int share);

  Int share_of(Int count, int share) const { return count * share / shares_; }

  struct Sizes {
    Int height, depth, width, slice, left;
  };

  using FewColumns = void (*)(Int m, Int depth, const T* a_t, Int a_row, const T* b, T* c);
  static FewColumns product_of_few(const Sizes& last) {  // of four columns, transposing takes as long as it saves
    if (last.depth > depth_block || last.height % 2) return nullptr;  // other sums, of which bits would differ
    return last.width == 1 ? few_columns<T, 1> : last.width == 2 ? few_columns<T, 2> : nullptr;
  }

  Lookup& q_;
  const Chain& chain_;
  const Plan& plan_;
  const Slab* slab_ = nullptr;
  int shares_, last_level_;
  bool fused_;  // the last core is applied where its left products were made
  int final_;
  Int cols_;
  bool add_ = false;   // gradients are added to those of the slabs before
  bool kept_ = false;  // left products are those of the tape
  std::vector<std::unique_ptr<T[]>> lefts_;  // by level, in slots
  std::vector<T*> left_;                     // the same, or the tape's
  std::vector<std::unique_ptr<T[]>> grads_;  // by level, in slots: of the left products that the level extends
  std::vector<std::vector<std::unique_ptr<T[]>>> heads_;  // by level and share: of a slice that another one began
  std::vector<std::unique_ptr<T[]>> last_grads_;          // by share: of the last core, in the layout of packed_t_
  std::vector<std::vector<int>> cuts_;                    // by level: where the shares of the slots begin
  Int joint_;
  Int closing_depth_, closing_width_;  // of the last core as one matrix: (joint, depth) x (digits, width)
  int neighbours_ = 0;                 // rows of a prefix made at once where the slab's follow one another, else 0
  std::vector<Sizes> sizes_;  // by level, as the chain has them: asked for at every row
  FewColumns few_columns_ = nullptr;  // what the last core is applied by if it has too few columns to fill a vector
  std::unique_ptr<T[]> rows_, row_grads_, pooled_, packed_, packed_t_, matrix_;
  std::vector<char> used_;  // by digit of the last core, whether a row of the slab has it; only where it is packed
  // The last core to compute with, matrix_ where neighbours are made: (digits, joint, depth, width) in last_,
  // (digits, width, joint, depth) in packed_t_, (joint, depth, digits, width) in matrix_.
  const T* last_ = nullptr;
};

template <class T>
std::unique_ptr<T[]> room_for(Int count) {
  return std::unique_ptr<T[]>(new T[std::size_t(count)]);
}

template <class T, class S>
bool Table<T, S>::keeps() const {
  // The rows, the cores and a little is what a training step holds several times over anyway.
  Int numbers = plan_.indices * cols_;
  for (int k = 0; k < chain_.order(); ++k) numbers += chain_.row_factors[k] * sizes_[k].slice;
  return kept_bytes(chain_, plan_.slabs[0], sizeof(T)) <= numbers * Int(sizeof(S)) + (4 << 20);
}

template <class T, class S>
void Table<T, S>::open(int slab, bool backward) {
  slab_ = &plan_.slabs[slab];
  for (auto* held : {&lefts_, &grads_, &last_grads_}) {  // of the slab before
    for (auto& one : *held) one.reset();
  }
  rows_.reset();
  add_ = slab > 0;
  const bool tape = q_.tape && slabs() == 1;
  kept_ = backward && tape && !q_.tape->lefts.empty();
  if (tape && !backward) q_.tape->lefts.resize(chain_.order());
  for (int k = 1; k < last_level_; ++k) {
    if (kept_) {
      left_[k] = reinterpret_cast<T*>(q_.tape->lefts[k].get());
    } else if (k < final_ || (fused_ && tape && !backward && keeps())) {
      const Int size = level(k).count * sizes_[k].left;
      if (tape && !backward) {
        q_.tape->lefts[k].reset(new std::byte[std::size_t(size) * sizeof(T)]);
        left_[k] = reinterpret_cast<T*>(q_.tape->lefts[k].get());
      } else {
        lefts_[k] = room_for<T>(size);
        left_[k] = lefts_[k].get();
      }
    } else {
      left_[k] = nullptr;
    }
  }
  for (int k = 1; k < final_; ++k) {
    for (int t = 0; t <= shares_; ++t) cuts_[k][t] = int(share_of(level(k).count, t));
  }
  if ((has_bags() || apart()) && !backward) {
    rows_ = room_for<T>((slab_->end - slab_->begin) * cols_);
    if (slabs() > 1 && sizeof(S) != sizeof(T) && slab == 0) pooled_ = room_for<T>(q_.bags * cols_);
  }
  const int count = slab_->end - slab_->begin;
  const bool follow = plan_.row[slab_->end - 1] - plan_.row[slab_->begin] == count - 1;
  const bool together = fused_ && follow && count >= several * Int(level(last_level_ - 1).count);
  neighbours_ = together ? int(std::max<Int>(several, forward_bytes / (cols_ * Int(sizeof(T))))) : 0;
  pack_last();
  if (backward && apart()) row_grads_ = room_for<T>(plan_.unique() * cols_);
  if (backward) {
    for (int k = 1; k <= final_; ++k) {
      grads_[k] = room_for<T>(level(k).count * sizes_[k - 1].left);
      heads_[k].clear();
      heads_[k].resize(shares_);
    }
    last_grads_.clear();
    last_grads_.resize(shares_);
  }
}

template <class T, class S>
double Table<T, S>::cost() const {
  const Level& final = level(final_);
  double total = double(plan_.first[slab_->end] - plan_.first[slab_->begin]) * cols_ * copy_cost;
  if (final_ > 0) total += double(final.count) * sizes_[final_].height * sizes_[final_].depth * sizes_[final_].width;
  if (fused_) total += double(slab_->end - slab_->begin) * cols_ * sizes_[last_level_].depth * joint_;
  return total;
}

template <class T, class S>
void Table<T, S>::cut_final(double before, double step) {
  const Level& final = level(final_);
  std::vector<int>& cut = cuts_[final_];
  int t = 0;
  while (t <= shares_ && before >= t * step) cut[t++] = 0;
  const bool meet = t <= shares_ && before + cost() >= t * step;  // here, which they do in few of many tables
  const double each = final_ > 0 ? double(sizes_[final_].height) * sizes_[final_].depth * sizes_[final_].width : 0;
  const double row = fused_ ? double(cols_) * sizes_[last_level_].depth * joint_ : 0;
  double reached = before;
  for (int slot = 0; meet && slot < final.count; ++slot) {
    while (t <= shares_ && reached >= t * step) cut[t++] = slot;
    const int prefix = prefix_at(final_, slot);
    const int begin = slab_->begin + (fused_ ? final.child[prefix] : prefix);
    const int end = slab_->begin + (fused_ ? final.child[prefix + 1] : prefix + 1);
    reached += each + row * (end - begin) + double(plan_.first[end] - plan_.first[begin]) * cols_ * copy_cost;
  }
  while (t <= shares_) cut[t++] = final.count;
  cut[shares_] = final.count;
}

template <class T, class S>
int Table<T, S>::block_height(int k) const {
  const Int each = sizes_[k].height * std::max(sizes_[k].depth, sizes_[k].width) * Int(sizeof(T));
  return int(std::max<Int>(1, (q_.core_grads.empty() ? forward_bytes : backward_bytes) / each));
}

template <class T, class S>
typename Table<T, S>::Scratch Table<T, S>::scratch(int k) const {
  const Int rows = k > 0 ? std::min(block_height(k), level(k).count) * sizes_[k].height : 0;
  const Int left = k > 0 ? rows * sizes_[k].depth : sizes_[0].slice;
  const Int slice = sizeof(S) == sizeof(T) || k == 0 ? 0 : sizes_[k].slice;
  const Int made = k > 0 ? rows * sizes_[k].width : sizes_[0].slice;
  const Int turned = few_columns_ || (fused_ && joint_ > 1) ? sizes_[last_level_ - 1].left : 0;
  const Int neighbours = neighbours_ * cols_;
  T* at = arena<T>().take(left + slice + 2 * made + 2 * cols_ + packed_size<T> + 2 * turned + neighbours);
  Scratch room;
  room.left = at;
  room.slice = room.left + left;
  room.made = room.slice + slice;
  room.grad = room.made + made;
  room.row = room.grad + made;
  room.packed = room.row + 2 * cols_;
  room.turned = room.packed + packed_size<T>;
  room.turned_grad = room.turned + turned;
  room.neighbours = room.turned_grad + turned;
  return room;
}

// The last core as numbers to compute with, only where a row of the slab uses them.
template <class T, class S>
void Table<T, S>::pack_last() {
  if (!fused_) return;
  const Int depth = sizes_[last_level_].depth, width = sizes_[last_level_].width, joint = joint_;
  const Int size = sizes_[last_level_].slice, digits = chain_.row_factors[last_level_];
  const bool as_stored = joint == 1 && sizeof(S) == sizeof(T);
  const bool transposed = !q_.core_grads.empty();
  const bool joined = neighbours_ && !transposed;  // forward makes neighbours by the matrix, and backward by packed_t_
  if (!as_stored) packed_ = room_for<T>(digits * size);
  if (transposed) packed_t_ = room_for<T>(digits * size);
  if (joined) matrix_ = room_for<T>(digits * size);
  last_ = as_stored ? reinterpret_cast<const T*>(core(last_level_)) : packed_.get();
  if (as_stored && !transposed && !joined) return;
  used_.assign(digits, 0);
  for (int digit : level(last_level_).digit) {
    if (std::exchange(used_[digit], 1)) continue;
    const S* from = core(last_level_) + digit * size;
    if constexpr (sizeof(S) == sizeof(T)) {
      if (as_stored) {
        if (transposed) transpose(depth, width, from, width, packed_t_.get() + digit * size);
        if (joined) {
          T* to = matrix_.get() + digit * width;
          for (Int k = 0; k < depth; ++k) copy_few(width, from + k * width, to + k * closing_width_);
        }
        continue;
      }
    }
    for (Int k = 0; k < depth; ++k) {
      for (Int j = 0; j < width; ++j) {
        for (Int a = 0; a < joint; ++a) {
          const T x = read<T>(from[(k * width + j) * joint + a]);
          const Int row = a * depth + k;
          packed_[digit * size + row * width + j] = x;
          if (transposed) packed_t_[digit * size + j * closing_depth_ + row] = x;
          if (joined) matrix_[row * closing_width_ + digit * width + j] = x;
        }
      }
    }
  }
}

template <class T, class S>
const T* Table<T, S>::slice(int k, int digit, T* room) const {
  const S* from = core(k) + digit * sizes_[k].slice;
  if constexpr (sizeof(S) == sizeof(T)) {
    return from;
  } else {
    copy_in(sizes_[k].slice, from, room);
    return room;
  }
}

template <class T, class S>
const T* Table<T, S>::first_slice(int prefix, T* room) const {
  return slice(0, level(0).digit[prefix], room);
}

// The left products that a block of level k extends, one below the other.
template <class T, class S>
void Table<T, S>::gather(int k, int begin, int end, T* to) const {
  const Int size = sizes_[k - 1].left;
  for (int slot = begin; slot < end; ++slot, to += size) {
    const int parent = level(k).parent[level(k).order[slot]];
    if (k == 1) {
      copy_in(size, core(0) + level(0).digit[parent] * size, to);
    } else {
      copy_in(size, left_[k - 1] + slot_of(k - 1, parent) * size, to);
    }
  }
}

// Runs of a share's slots that have a slice in common, no longer than a block.
template <class T, class S>
template <class Visit>
void Table<T, S>::for_blocks(int k, int share, Visit visit) const {
  const int stop = cuts_[k][share + 1], height = block_height(k);
  for (int begin = cuts_[k][share]; begin < stop;) {
    const int digit = level(k).digit[level(k).order[begin]];
    const int end = std::min({stop, level(k).group[digit + 1], begin + height});
    visit(begin, end, digit);
    begin = end;
  }
}

}  // namespace tb::TB_ISA

#include "forward.hpp"
#include "backward.hpp"
