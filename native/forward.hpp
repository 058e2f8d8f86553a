// Table, forward: left products level by level, rows, bags. Included by table.hpp.
#pragma once

#include "table.hpp"

namespace tb::TB_ISA {

template <class T, class S>
void Table<T, S>::extend(int k, int share) {
  if (k >= final_) return;
  const Scratch room = scratch(k);
  const Int height = sizes_[k].height, depth = sizes_[k].depth, width = sizes_[k].width;
  for_blocks(k, share, [&](int begin, int end, int digit) {
    gather(k, begin, end, room.left);
    const T* right = slice(k, digit, room.slice);
    T* to = left_[k] + begin * sizes_[k].left;
    multiply<T>((end - begin) * height, width, depth, {room.left, depth, 1}, right, width, to, width, false,
                room.packed);
  });
}

template <class T, class S>
void Table<T, S>::finish(int share) {
  const Scratch room = scratch(final_);
  if (final_ == 0) {
    for (int prefix = cuts_[0][share]; prefix < cuts_[0][share + 1]; ++prefix) {
      make_children(prefix, first_slice(prefix, room.left), room);
    }
    return;
  }
  const Int height = sizes_[final_].height, depth = sizes_[final_].depth, width = sizes_[final_].width;
  for_blocks(final_, share, [&](int begin, int end, int digit) {
    gather(final_, begin, end, room.left);
    const T* right = slice(final_, digit, room.slice);
    const Int size = height * width;
    T* made = fused_ && left_[final_] ? left_[final_] + begin * size : room.made;
    multiply<T>((end - begin) * height, width, depth, {room.left, depth, 1}, right, width, made, width, false,
                room.packed);
    for (int slot = begin; slot < end; ++slot, made += size) {
      const int prefix = level(final_).order[slot];
      if (fused_) {
        if (slot + 1 < end) expect(level(final_).child[level(final_).order[slot + 1]]);
        make_children(prefix, made, room);
      } else {
        hand_on(slab_->begin + prefix, made);
      }
    }
  });
}

template <class T, class S>
void Table<T, S>::make_children(int prefix, const T* left, const Scratch& room) const {
  const std::vector<int>& child = level(last_level_ - 1).child;
  const int begin = child[prefix], end = child[prefix + 1];
  left = turned(left, room.turned);
  if (neighbours_) {
    for (int c = begin; c < end; c += neighbours_) make_neighbours(left, c, std::min(c + neighbours_, end), room);
    return;
  }
  const Int height = sizes_[last_level_].height, depth = closing_depth_;
  if (few_columns_) transpose(height, depth, left, depth, room.turned);
  for (int c = begin; c < end; ++c) {
    if (c + 1 < end) expect(c + 1);
    T* to = place(slab_->begin + c, room.row);
    if (few_columns_) {
      const T* right = last_ + level(last_level_).digit[c] * sizes_[last_level_].slice;
      few_columns_(height, depth, room.turned, height, right, to);
    } else {
      make_row(left, c, to, room.packed);
    }
    hand_on(slab_->begin + c, to);
  }
}

// A ring's left product (joint, height, depth) as (height, joint * depth), so that a row is one product, as a train's.
template <class T, class S>
const T* Table<T, S>::turned(const T* left, T* room) const {
  if (joint_ == 1) return left;
  const Int height = sizes_[last_level_].height, depth = sizes_[last_level_].depth;
  for (Int a = 0; a < joint_; ++a) {
    for (Int i = 0; i < height; ++i, left += depth) copy_few(depth, left, room + i * closing_depth_ + a * depth);
  }
  return room;
}

// Memory that a row will be written to is fetched while the one before it is computed.
template <class T, class S>
void Table<T, S>::expect(int child) const {
  if (rows_) return;
  const int row = slab_->begin + child;
  const S* to = static_cast<S*>(q_.out) + plan_.position[plan_.first[row]] * q_.out_row;
  const char* at = reinterpret_cast<const char*>(to);
  for (Int b = 0; b < cols_ * Int(sizeof(S)); b += 64) __builtin_prefetch(at + b, 1);
}

template <class T, class S>
void Table<T, S>::make_row(const T* turned, int child, T* to, T* packed) const {
  const Int height = sizes_[last_level_].height, width = sizes_[last_level_].width;
  const T* right = last_ + level(last_level_).digit[child] * sizes_[last_level_].slice;
  multiply<T>(height, width, closing_depth_, {turned, closing_depth_, 1}, right, width, to, width, false, packed);
}

// Rows of a prefix that follow one another, as one product: one alone is a few columns wide, and leaves most of a
// register empty.
template <class T, class S>
void Table<T, S>::make_neighbours(const T* turned, int begin, int end, const Scratch& room) const {
  const Int height = sizes_[last_level_].height, width = sizes_[last_level_].width, columns = (end - begin) * width;
  const T* right = matrix_.get() + level(last_level_).digit[begin] * width;
  multiply<T>(height, columns, closing_depth_, {turned, closing_depth_, 1}, right, closing_width_, room.neighbours,
              columns, false, room.packed);
  for (int c = begin; c < end; ++c) {
    T* to = place(slab_->begin + c, room.row);
    const T* from = room.neighbours + (c - begin) * width;
    for (Int i = 0; i < height; ++i) copy_few(width, from + i * columns, to + i * width);
    hand_on(slab_->begin + c, to);
  }
}

// Where a row is computed: in its first place in the output, where that can be.
template <class T, class S>
T* Table<T, S>::place(int row, T* room) const {
  if (rows_) return rows_.get() + (row - slab_->begin) * cols_;
  if constexpr (sizeof(S) == sizeof(T)) {
    return static_cast<S*>(q_.out) + plan_.position[plan_.first[row]] * q_.out_row;
  } else {
    return room;
  }
}

template <class T, class S>
void Table<T, S>::hand_on(int row, const T* numbers) const {
  if (rows_) {
    T* to = rows_.get() + (row - slab_->begin) * cols_;
    if (to != numbers) copy_in(cols_, numbers, to);
    return;
  }
  for (int i = plan_.first[row]; i < plan_.first[row + 1]; ++i) {
    S* to = static_cast<S*>(q_.out) + plan_.position[i] * q_.out_row;
    if (static_cast<const void*>(to) != numbers) copy_out(cols_, numbers, to);
  }
}

// Each bag adds its rows in the order of its indices, slab after slab: the same whatever the threads.
template <class T, class S>
void Table<T, S>::pool(int share) {
  if (!has_bags()) return;
  T* sum = arena<T>().take(cols_);
  for (Int bag = share_of(q_.bags, share); bag < share_of(q_.bags, share + 1); ++bag) {
    S* out = static_cast<S*>(q_.out) + bag * q_.out_row;
    T* before = pooled_ ? pooled_.get() + bag * cols_ : nullptr;
    if (!add_) {
      std::fill_n(sum, cols_, T(0));
    } else if (before) {
      copy_in(cols_, before, sum);
    } else {
      copy_in(cols_, out, sum);
    }
    for (Int i = q_.bounds[bag]; i < q_.bounds[bag + 1]; ++i) {
      const int row = plan_.inverse[i];
      if (row < slab_->begin || row >= slab_->end) continue;
      add_scaled(cols_, q_.scale ? T(q_.scale[i]) : T(1), rows_.get() + (row - slab_->begin) * cols_, sum);
    }
    if (before) copy_in(cols_, sum, before);
    copy_out(cols_, sum, out);
  }
}

template <class T, class S>
void Table<T, S>::put(Int begin, Int end) {
  S* to = static_cast<S*>(q_.out) + begin * q_.out_row;
  const int* inverse = plan_.inverse.data();
  const Int ahead = end - begin;
  if (end + ahead < plan_.indices) __builtin_prefetch(inverse + end + ahead);  // where the rows of a later run are
  for (Int i = begin; i < end; ++i, to += q_.out_row) {
    if (i + ahead < plan_.indices) {  // the memory of the next run is fetched in the meantime
      __builtin_prefetch(to + ahead * q_.out_row, 1);
      __builtin_prefetch(rows_.get() + std::max(inverse[i + ahead], 0) * cols_);
    }
    if (inverse[i] >= 0) copy_few(cols_, rows_.get() + inverse[i] * cols_, to);
  }
}

template <class T, class S>
void Table<T, S>::fill(int share) {
  S* out = static_cast<S*>(q_.out);
  if (has_bags()) {
    if (slabs() > 0) return;
    for (Int bag = share_of(q_.bags, share); bag < share_of(q_.bags, share + 1); ++bag) {
      std::fill_n(out + bag * q_.out_row, cols_, S{});
    }
    return;
  }
  const Int count = Int(plan_.skipped.size());
  for (Int i = share_of(count, share); i < share_of(count, share + 1); ++i) {
    S* to = out + plan_.skipped[i] * q_.out_row;
    if (q_.padding_row) {
      std::memcpy(to, q_.padding_row, cols_ * sizeof(S));
    } else {
      std::fill_n(to, cols_, S{});
    }
  }
}

}  // namespace tb::TB_ISA
