// Table, backward: gradients of the cores, from the last to the first. Included by table.hpp.
#pragma once

#include "table.hpp"

namespace tb::TB_ISA {

template <class T, class S>
const S* Table<T, S>::grad_at(int occurrence) const {
  const int position = plan_.position[occurrence];
  return static_cast<const S*>(q_.grad) + (has_bags() ? q_.bag[position] : position) * q_.grad_row;
}

// What comes back to the first row of a prefix is fetched while the prefix before it is computed: its place is known
// from its occurrence, that from the position, and that from the bag, and all of them lie apart.
template <class T, class S>
void Table<T, S>::expect_gradient(int child) const {
  const int row = slab_->begin + child;
  const void* from = row_grads_ ? static_cast<const void*>(row_grads_.get() + row * cols_) : grad_at(plan_.first[row]);
  const Int bytes = cols_ * Int(row_grads_ ? sizeof(T) : sizeof(S));
  for (Int b = 0; b < bytes; b += 64) __builtin_prefetch(static_cast<const char*>(from) + b);
}

// Repeated rows are summed once, before anything is multiplied.
template <class T, class S>
const T* Table<T, S>::row_gradient(int row, T* room) const {
  if (row_grads_) return row_grads_.get() + row * cols_;
  const int begin = plan_.first[row], end = plan_.first[row + 1];
  if constexpr (sizeof(S) == sizeof(T)) {
    if (end == begin + 1 && !q_.scale) return grad_at(begin);
  }
  std::fill_n(room, cols_, T(0));
  for (int i = begin; i < end; ++i) add_scaled(cols_, scale_at(i), grad_at(i), room);
  return room;
}

template <class T, class S>
void Table<T, S>::collect(Int begin, Int end) {
  if (begin == 0) std::fill_n(row_grads_.get(), plan_.unique() * cols_, T(0));
  const S* from = static_cast<const S*>(q_.grad) + begin * q_.grad_row;
  const int* inverse = plan_.inverse.data();
  const Int ahead = end - begin;
  if (end + ahead < plan_.indices) __builtin_prefetch(inverse + end + ahead);  // memory of the runs to come, as in put
  for (Int i = begin; i < end; ++i, from += q_.grad_row) {
    if (i + ahead < plan_.indices) {
      __builtin_prefetch(from + ahead * q_.grad_row);
      __builtin_prefetch(row_grads_.get() + std::max(inverse[i + ahead], 0) * cols_, 1);
    }
    if (inverse[i] >= 0) add_few(cols_, from, row_grads_.get() + inverse[i] * cols_);
  }
}

template <class T, class S>
void Table<T, S>::scale_gradients(int row, const T* numbers) const {
  for (int i = plan_.first[row]; i < plan_.first[row + 1]; ++i) {
    const S* grad = grad_at(i);
    double sum = 0;
    for (Int j = 0; j < cols_; ++j) sum += double(read<T>(grad[j])) * double(numbers[j]);
    q_.scale_grad[plan_.position[i]] = sum;
  }
}

// The gradient of the left product that a prefix of level k is: the sum over its children.
template <class T, class S>
void Table<T, S>::sum_children(int k, int prefix, T* to, bool add) const {
  const Int size = sizes_[k].left;
  const std::vector<int>& child = level(k).child;
  for (int c = child[prefix]; c < child[prefix + 1]; ++c) {
    const T* from = grads_[k + 1].get() + slot_of(k + 1, c) * size;
    if (add || c > child[prefix]) {
      for (Int i = 0; i < size; ++i) to[i] += from[i];
    } else {
      copy_in(size, from, to);
    }
  }
}

// Through the last core: gradients of its slices and of one left product.
template <class T, class S>
void Table<T, S>::children_back(int prefix, const T* left, T* left_grad, T* last_grad, const Scratch& room) const {
  const Int height = sizes_[last_level_].height, width = sizes_[last_level_].width, depth = closing_depth_;
  const std::vector<int>& child = level(last_level_ - 1).child;
  T* to = joint_ == 1 ? left_grad : room.turned_grad;
  left = turned(left, room.turned);
  const int begin = child[prefix], end = child[prefix + 1];
  if (neighbours_ && !q_.scale_grad) {
    for (int c = begin; c < end; c += neighbours_) {
      neighbours_back(left, c, std::min(c + neighbours_, end), to, c > begin, last_grad, room);
    }
    return turn_back(to, left_grad);
  }
  for (int c = begin; c < end; ++c) {
    const T* grad = row_gradient(slab_->begin + c, room.row);
    const Int at = level(last_level_).digit[c] * sizes_[last_level_].slice;
    if (q_.scale_grad) {
      make_row(left, c, room.row + cols_, room.packed);
      scale_gradients(slab_->begin + c, room.row + cols_);
    }
    const bool more = c > begin;
    if (depth % widest<T> == 0 && (width == 2 || width == 4)) {
      const auto back = width == 2 ? both_sides<T, 2> : both_sides<T, 4>;
      back(height, depth, grad, left, packed_t_.get() + at, to, more, last_grad + at);
      continue;
    }
    multiply<T>(height, depth, width, {grad, width, 1}, packed_t_.get() + at, depth, to, depth, more, room.packed);
    multiply<T>(width, depth, height, {grad, 1, width}, left, depth, last_grad + at, depth, true, room.packed);
  }
  turn_back(to, left_grad);
}

// The same for rows that follow one another at once.
template <class T, class S>
void Table<T, S>::neighbours_back(const T* turned, int begin, int end, T* grad, bool add, T* last_grad,
                                  const Scratch& room) const {
  const Int height = sizes_[last_level_].height, width = sizes_[last_level_].width, columns = (end - begin) * width;
  const Int depth = closing_depth_, at = level(last_level_).digit[begin] * sizes_[last_level_].slice;
  for (int c = begin; c < end; ++c) {
    const T* from = row_gradient(slab_->begin + c, room.row);
    T* to = room.neighbours + (c - begin) * width;
    for (Int i = 0; i < height; ++i) copy_few(width, from + i * width, to + i * columns);
  }
  const T* rows = room.neighbours;
  multiply<T>(height, depth, columns, {rows, columns, 1}, packed_t_.get() + at, depth, grad, depth, add, room.packed);
  multiply<T>(columns, depth, height, {rows, 1, columns}, turned, depth, last_grad + at, depth, true, room.packed);
}

// The gradient of a ring's left product in the order that the product has.
template <class T, class S>
void Table<T, S>::turn_back(const T* grad, T* left_grad) const {
  if (joint_ == 1) return;
  const Int height = sizes_[last_level_].height, depth = sizes_[last_level_].depth;
  for (Int a = 0; a < joint_; ++a) {
    for (Int i = 0; i < height; ++i, left_grad += depth) {
      copy_few(depth, grad + i * closing_depth_ + a * depth, left_grad);
    }
  }
}

// Through core k: the gradient of one slice from a block of its products, and those of the left products.
template <class T, class S>
void Table<T, S>::slice_back(int k, int begin, int end, int share, const Scratch& room, const T* right,
                             const T* grad) {
  const Int height = sizes_[k].height, depth = sizes_[k].depth, width = sizes_[k].width;
  const int mine = cuts_[k][share], digit = level(k).digit[level(k).order[begin]];
  const int group = level(k).group[digit];
  const bool begun = begin > std::max(group, mine);
  T* to = core_grad(k) + digit * sizes_[k].slice;
  if (group < mine) {  // another share writes the gradient itself
    auto& head = heads_[k][share];
    if (!head) head = room_for<T>(sizes_[k].slice);
    to = head.get();
  }
  const Int rows = (end - begin) * height;
  multiply<T>(depth, width, rows, {room.left, 1, depth}, grad, width, to, width, begun || (add_ && group >= mine),
              room.packed);
  multiply_transposed<T>(rows, depth, width, grad, width, right, width, grads_[k].get() + begin * height * depth,
                         depth, false, room.packed);
}

template <class T, class S>
T* Table<T, S>::last_grad(int share) {
  auto& mine = last_grads_[share];
  if (!mine) {
    const Int size = chain_.row_factors[last_level_] * sizes_[last_level_].slice;
    mine.reset(new T[std::size_t(size)]());
  }
  return mine.get();
}

template <class T, class S>
void Table<T, S>::start_back(int share) {
  const int start = cuts_[final_][share], stop = cuts_[final_][share + 1];
  if (start == stop) return;
  const Scratch room = scratch(final_);
  if (final_ == 0) {
    const Int size = sizes_[0].slice;
    for (int prefix = start; prefix < stop; ++prefix) {
      children_back(prefix, first_slice(prefix, room.left), room.made, last_grad(share), room);
      T* to = core_grad(0) + level(0).digit[prefix] * size;
      for (Int i = 0; i < size; ++i) to[i] = add_ ? to[i] + room.made[i] : room.made[i];
    }
    return;
  }
  const Int height = sizes_[final_].height, depth = sizes_[final_].depth, width = sizes_[final_].width;
  const Int size = height * width;
  for_blocks(final_, share, [&](int begin, int end, int digit) {
    gather(final_, begin, end, room.left);
    const T* right = slice(final_, digit, room.slice);
    const T* made = kept_ && fused_ ? left_[final_] : nullptr;
    if (made) {
      made += begin * size;
    } else if (fused_ || q_.scale_grad) {
      multiply<T>((end - begin) * height, width, depth, {room.left, depth, 1}, right, width, room.made, width, false,
                  room.packed);
      made = room.made;
    }
    for (int slot = begin; slot < end; ++slot) {
      const int prefix = level(final_).order[slot], row = slab_->begin + prefix;
      T* grad = room.grad + (slot - begin) * size;
      if (fused_) {
        if (slot + 1 < end) expect_gradient(level(final_).child[level(final_).order[slot + 1]]);
        children_back(prefix, made + (slot - begin) * size, grad, last_grad(share), room);
      } else {
        const T* found = row_gradient(row, grad);
        if (found != grad) copy_in(size, found, grad);
        if (q_.scale_grad) scale_gradients(row, made + (slot - begin) * size);
      }
    }
    slice_back(final_, begin, end, share, room, right, room.grad);
  });
}

template <class T, class S>
void Table<T, S>::go_back(int k, int share) {
  if (k >= final_) return;
  const Scratch room = scratch(k);
  for_blocks(k, share, [&](int begin, int end, int digit) {
    gather(k, begin, end, room.left);
    const T* right = slice(k, digit, room.slice);
    for (int slot = begin; slot < end; ++slot) {
      sum_children(k, level(k).order[slot], room.grad + (slot - begin) * sizes_[k].left, false);
    }
    slice_back(k, begin, end, share, room, right, room.grad);
  });
}

template <class T, class S>
void Table<T, S>::no_gradient() {
  for (int k = 0; k < chain_.order(); ++k) {
    std::fill_n(core_grad(k), chain_.row_factors[k] * sizes_[k].slice, T(0));
  }
}

template <class T, class S>
void Table<T, S>::settle(int share) {
  settle_first(share);
  for (int k = 1; k <= final_; ++k) settle_middle(k, share);
  if (fused_) settle_last(share);
}

// The first core's slices are left products themselves: no two prefixes share one. Those between two that are used are
// filled at once: a core of small slices has millions.
template <class T, class S>
void Table<T, S>::settle_first(int share) {
  const Int size = sizes_[0].slice, digits = chain_.row_factors[0];
  const std::vector<int>& digit = level(0).digit;
  const Int begin = share_of(digits, share), end = share_of(digits, share + 1);
  int prefix = int(std::lower_bound(digit.begin(), digit.end(), int(begin)) - digit.begin());
  for (Int d = begin; d < end; ++d, ++prefix) {
    const Int used = prefix < level(0).count ? std::min(Int(digit[prefix]), end) : end;
    if (!add_) std::fill_n(core_grad(0) + d * size, (used - d) * size, T(0));
    d = used;
    if (d < end && final_ > 0) sum_children(0, prefix, core_grad(0) + d * size, add_);
  }
}

template <class T, class S>
void Table<T, S>::settle_middle(int k, int share) {
  const Int size = sizes_[k].slice, digits = chain_.row_factors[k];
  const std::vector<int>& group = level(k).group;
  if (!add_) {
    for (Int d = share_of(digits, share); d < share_of(digits, share + 1); ++d) {
      if (group[d] == group[d + 1]) std::fill_n(core_grad(k) + d * size, size, T(0));
    }
  }
  const Int begin = share_of(size, share), end = share_of(size, share + 1);
  for (int t = 0; t < shares_; ++t) {
    const T* head = heads_[k][t].get();
    if (!head) continue;
    T* to = core_grad(k) + level(k).digit[level(k).order[cuts_[k][t]]] * size;
    for (Int i = begin; i < end; ++i) to[i] += head[i];
  }
}

template <class T, class S>
void Table<T, S>::settle_last(int share) {
  const Int depth = sizes_[last_level_].depth, width = sizes_[last_level_].width, joint = joint_;
  const Int size = sizes_[last_level_].slice, digits = chain_.row_factors[last_level_];
  T* sum = arena<T>().take(size);
  for (Int d = share_of(digits, share); d < share_of(digits, share + 1); ++d) {
    T* to = core_grad(last_level_) + d * size;
    if (!used_[d]) {
      if (!add_) std::fill_n(to, size, T(0));
      continue;
    }
    std::fill_n(sum, size, T(0));
    for (const auto& one : last_grads_) {
      if (!one) continue;
      const T* from = one.get() + d * size;
      for (Int i = 0; i < size; ++i) sum[i] += from[i];
    }
    if (joint == 1 && !add_) {
      transpose(width, depth, sum, depth, to);
      continue;
    }
    for (Int k = 0; k < depth; ++k) {
      for (Int j = 0; j < width; ++j) {
        for (Int a = 0; a < joint; ++a) {
          const Int i = (k * width + j) * joint + a;
          const T x = sum[j * closing_depth_ + a * depth + k];
          to[i] = add_ ? to[i] + x : x;
        }
      }
    }
  }
}

}  // namespace tb::TB_ISA
