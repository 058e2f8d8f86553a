// The kernels for one instruction set: compiled once for each, with TB_ISA naming it.
#include "kernels.hpp"

#include "coded.hpp"
#include "softmax.hpp"
#include "table.hpp"
#include "threads.hpp"

namespace tb::TB_ISA {
namespace {

constexpr double parallel_from = 5e5;  // multiply-adds below which waking other threads takes longer than the work
constexpr Int exps_from = 50'000;      // the same in exponentials
constexpr Int codes_from = 100'000;    // the same in codes
constexpr Int rows_at_once = 16;       // of all tables, whose pieces fit into the first cache
constexpr Int line = 16;               // floats of a cache line, that two threads should not share; whole vectors
static_assert(line % widest<float> == 0);

using Steps = std::vector<Step>;

int shares(std::span<Lookup> lookups, int threads) {
#ifdef _OPENMP
  double work = 0;
  for (const Lookup& q : lookups) {
    for (const Slab& slab : q.plan->slabs) {
      for (int k = 1; k < q.chain->order(); ++k) {
        work += double(slab.levels[k].count) * double(q.chain->height(k) * q.chain->depth(k) * q.chain->width(k));
      }
    }
    work += double(q.plan->indices) * double(q.chain->cols() * copy_cost);
  }
  return work < parallel_from ? 1 : std::max(1, threads);
#else
  (void)lookups, (void)threads;
  return 1;
#endif
}

// Equal runs of rows or columns, which come in whole `unit`s but for the last.
template <class Act>
void cut(bool worth, Int size, Int unit, int threads, Act act) {
  const Int units = (size + unit - 1) / unit;
#ifdef _OPENMP
  const Int most = worth ? std::max(1, threads) : 1;
#else
  (void)worth, (void)threads;
  const Int most = 1;
#endif
  const int count = int(std::min(most, units));
  const auto bound = [=](int share) { return std::min(size, units * share / count * unit); };
  if (count == 1) return act(0, size);
  run({[&](int share) { act(bound(share), bound(share + 1)); }}, count, threads);
}

bool worth(const Tile& tile) { return tile.rows * tile.cols >= exps_from; }

// act(number computed with, number stored)
template <class Act>
void with_numbers(Type type, Act act) {
  if (type == Type::float32) return act(float{}, float{});
  if (type == Type::float64) return act(double{}, double{});
  act(float{}, bf16{});
}

template <class T>
void score(const Coded& coded, const T* x, Int n, T* out, int threads) {
  const bool worth = coded.rows * coded.cols >= codes_from;
  if (n >= widest<T>) {
    return cut(worth, coded.rows, panel_rows, threads, [&](Int first, Int last) {
      multiply_many(coded, first, last, x, n, out + first * n);
    });
  }
  std::vector<T> turned(n * coded.cols);
  transpose(coded.cols, n, x, n, turned.data());
  cut(worth, coded.rows, line, threads, [&](Int first, Int last) {
    multiply_few(coded, first, last, turned.data(), n, out + first * n);
  });
}

// All tables of a call, slab by slab.
template <class T, class S>
class Call {
 public:
  Call(std::span<Lookup> lookups, int threads) : shares_(shares(lookups, threads)) {
    tables_.reserve(lookups.size());
    for (Lookup& q : lookups) {
      slabs_ = std::max(slabs_, tables_.emplace_back(q, shares_).slabs());
      if (q.apart) apart_ = q.plan->indices;
    }
  }

  void forward() {
    for (int slab = 0; slab < slabs_; ++slab) {
      const int levels = open(slab, false);
      Steps steps;
      extend_to(levels, slab, steps);
      steps.push_back(each(slab, [](auto& table, int share) { table.finish(share); }));
      if (any([](auto& table) { return table.has_bags(); })) {
        steps.push_back(each(slab, [](auto& table, int share) { table.pool(share); }));
      }
      if (slab == 0 && apart_ > 0) {
        steps.push_back([this](int share) {
          for_rows(apart_ * share / shares_, apart_ * (share + 1) / shares_, 0, tables_.size(),
                   [](auto& table, Int begin, Int end) { table.put(begin, end); });
        });
      }
      if (slab == slabs_ - 1) fill_after(steps);
      run(std::move(steps), shares_, shares_);
    }
    if (slabs_ == 0) {
      Steps steps;
      fill_after(steps);
      run(std::move(steps), shares_, shares_);
    }
  }

  void backward() {
    for (int slab = 0; slab < slabs_; ++slab) {
      const int levels = open(slab, true);
      Steps steps;
      if (any([](auto& table) { return !table.has_lefts(); })) extend_to(levels, slab, steps);
      if (slab == 0 && apart_ > 0) {
        steps.push_back([this](int share) {  // a share of the tables: no two add to one row
          for_rows(0, apart_, tables_.size() * share / shares_, tables_.size() * (share + 1) / shares_,
                   [](auto& table, Int begin, Int end) { table.collect(begin, end); });
        });
      }
      steps.push_back(each(slab, [](auto& table, int share) { table.start_back(share); }));
      for (int k = levels - 1; k >= 1; --k) {
        steps.push_back(each(slab, [k](auto& table, int share) { table.go_back(k, share); }));
      }
      steps.push_back(each(slab, [](auto& table, int share) { table.settle(share); }));
      run(std::move(steps), shares_, shares_);
    }
    for (auto& table : tables_) {
      if (table.slabs() == 0) table.no_gradient();
    }
  }

 private:
  // Opens a slab of every table that has one, and cuts the work of all into equal shares.
  int open(int slab, bool backward) {
    double total = 0, before = 0;
    int levels = 0;
    for (auto& table : tables_) {
      if (slab >= table.slabs()) continue;
      table.open(slab, backward);
      total += table.cost();
      levels = std::max(levels, table.final_level());
    }
    for (auto& table : tables_) {
      if (slab >= table.slabs()) continue;
      table.cut_final(before, total / shares_);
      before += table.cost();
    }
    return levels;
  }

  template <class Act>
  std::function<void(int)> each(int slab, Act act) {
    return [this, slab, act](int share) {
      for (auto& table : tables_) {
        if (slab < table.slabs()) act(table, share);
      }
      arena<T>().trim();  // after each step: who takes a share of one may come too late for the next
    };
  }

  // A few rows of the batch at a time, of each of some tables that keep theirs apart.
  template <class Act>
  void for_rows(Int begin, Int end, std::size_t first, std::size_t last, Act act) {
    for (Int at = begin; at < end; at += rows_at_once) {
      for (std::size_t t = first; t < last; ++t) {
        if (tables_[t].apart()) act(tables_[t], at, std::min(at + rows_at_once, end));
      }
    }
  }

  void extend_to(int levels, int slab, Steps& steps) {
    for (int k = 1; k < levels; ++k) {
      steps.push_back(each(slab, [k](auto& table, int share) {
        if (!table.has_lefts()) table.extend(k, share);
      }));
    }
  }

  // What no row was handed to.
  void fill_after(Steps& steps) {
    steps.push_back([this](int share) {
      for (auto& table : tables_) table.fill(share);
    });
  }

  template <class Ask>
  bool any(Ask ask) const {
    return std::any_of(tables_.begin(), tables_.end(), ask);
  }

  int shares_, slabs_ = 0;
  Int apart_ = 0;  // indices of the tables that keep their rows apart, all alike
  std::vector<Table<T, S>> tables_;
};

template <class Act>
void with_types(Type type, std::span<Lookup> lookups, int threads, Act act) {
  if (type == Type::float32) {
    Call<float, float> call(lookups, threads);
    act(call);
  } else if (type == Type::float64) {
    Call<double, double> call(lookups, threads);
    act(call);
  } else {
    Call<float, bf16> call(lookups, threads);
    act(call);
  }
}

}  // namespace

void forward(Type type, std::span<Lookup> lookups, int threads) {
  with_types(type, lookups, threads, [](auto& call) { call.forward(); });
}

void backward(Type type, std::span<Lookup> lookups, int threads) {
  with_types(type, lookups, threads, [](auto& call) { call.backward(); });
}

void absorb(const Tile& tile, float* most, float* total, int threads) {
  if (tile.rows <= 0 || tile.cols <= 0) return;
  with_scores(tile, [&](const auto& scores) {
    if (tile.cols == 1 && tile.stride == 1) return absorb_one_column(scores, most, total);
    // Sums go down the columns: cut by rows they would depend on the number of threads.
    cut(worth(tile), tile.cols, line, threads,
        [&](Int first, Int last) { absorb_columns(scores, first, last, most, total); });
  });
}

void probabilities(const Tile& tile, const Softmax& softmax, int threads) {
  if (tile.rows <= 0 || tile.cols <= 0) return;
  with_scores(tile, [&](const auto& scores) {
    cut(worth(tile), tile.rows, 1, threads, [&](Int first, Int last) { probable_rows(scores, first, last, softmax); });
  });
}

void coded_rows(Type type, std::span<const Coded> parts, std::span<const Row> rows, void* out, int threads) {
  const Int count = Int(rows.size()), cols = parts.front().cols;
  with_numbers(type, [&]<class T, class S>(T, S) {
    cut(count * cols >= codes_from, count, 1, threads, [&](Int first, Int last) {
      make_rows<T, S>(parts, rows.subspan(first, last - first), static_cast<S*>(out) + first * cols);
    });
  });
}

void coded_scores(Type type, const Coded& coded, const void* x, Int n, void* out, int threads) {
  if (coded.rows <= 0 || n <= 0) return;
  with_numbers(type, [&]<class T, class S>(T, S) {
    score(coded, static_cast<const T*>(x), n, static_cast<T*>(out), threads);
  });
}

void coded_sums(Type type, const Coded& coded, const void* tables, Int n, void* out, int threads) {
  if (coded.rows <= 0 || n <= 0) return;
  with_numbers(type, [&]<class T, class S>(T, S) {
    cut(coded.rows * coded.code_row * n >= codes_from, coded.rows, line, threads, [&](Int first, Int last) {
      sum_columns<T, widest<T>>(coded, first, last, static_cast<const T*>(tables), n, 0,
                                static_cast<T*>(out) + first * n);
    });
  });
}

}  // namespace tb::TB_ISA
