// The Python module: plans batches and runs the kernels of the best instruction set on memory handed over as addresses.
//
// Sizes, dtypes and contiguity are the caller's promise (tensorbed/backends/native/chains.py). Values of indices and
// offsets are not: another thread may write to them at any time. They are copied once; the copy is checked and used.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "facts.hpp"
#include "kernels.hpp"
#include "split.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace tb {
namespace {

using Address = std::uintptr_t;

constexpr Int small_row = 256;     // bytes up to which a row is made apart, where several tables share the output
constexpr Int plans_from = 5'000;  // indices below which waking other threads takes longer than planning

struct Isa {
  const char* name;
  void (*forward)(Type, std::span<Lookup>, int);
  void (*backward)(Type, std::span<Lookup>, int);
  void (*absorb)(const Tile&, float*, float*, int);
  void (*probabilities)(const Tile&, const Softmax&, int);
  void (*coded_rows)(Type, std::span<const Coded>, std::span<const Row>, void*, int);
  void (*coded_scores)(Type, const Coded&, const void*, Int, void*, int);
  void (*coded_sums)(Type, const Coded&, const void*, Int, void*, int);
};

#define TB_KERNELS(isa)                                                                                    \
  {#isa, isa::forward, isa::backward, isa::absorb, isa::probabilities, isa::coded_rows, isa::coded_scores, \
   isa::coded_sums}

// From the least to the best that this processor runs.
std::vector<Isa> usable() {
  std::vector<Isa> found;
  const auto offer = [&found](const Isa& isa) {
    if (runs(isa.name)) found.push_back(isa);
  };
  offer(TB_KERNELS(baseline));
#ifdef TB_HAVE_AVX2
  offer(TB_KERNELS(avx2));
#endif
#ifdef TB_HAVE_AVX512
  offer(TB_KERNELS(avx512));
#endif
  return found;
}

std::vector<Isa>& all() {
  static std::vector<Isa> found = usable();
  return found;
}

Isa& chosen() {
  static Isa isa = all().back();
  return isa;
}

std::string use(const std::string& name) {
  for (const Isa& isa : all()) {
    if (isa.name == name) return std::exchange(chosen(), isa).name;
  }
  throw std::invalid_argument("no kernels for " + name + " here");
}

double weight_at(Type type, Address weights, Int i) {
  if (type == Type::float64) return reinterpret_cast<const double*>(weights)[i];
  if (type == Type::float32) return reinterpret_cast<const float*>(weights)[i];
  const std::uint32_t bits = std::uint32_t(reinterpret_cast<const std::uint16_t*>(weights)[i]) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Indices of one table as they are handed over; bounds 0: no bags.
struct Asked {
  const Chain* chain;
  Address index;
  Int count, stride, skip;
  Address bounds;
  Int bags;
  Address weights;
  bool mean;
};

// One table of a batch, planned.
struct Entry {
  Chain chain;
  Plan plan;
  Tape tape;
  Int bags = -1;
  std::vector<Int> bounds;
  std::vector<int> bag;
  std::vector<double> scale;

  bool apart = false;

  Entry(Type type, const Asked& asked, bool alone) : chain(*asked.chain) {
    const auto* index = reinterpret_cast<const Int*>(asked.index);
    const bool small = !alone && !asked.bounds && chain.cols() * number_bytes(type) <= small_row;
    plan = make_plan(chain,
                     {index, asked.count, asked.stride, asked.skip, asked.bounds != 0, small, number_bytes(type)});
    apart = small && plan.slabs.size() == 1;
    if (!asked.bounds) return;
    bags = asked.bags;
    const auto* given = reinterpret_cast<const Int*>(asked.bounds);
    for (Int b = 0; b <= bags; ++b) bounds.push_back(read_once(given + b));
    if (bounds[0] != 0 || bounds[bags] != asked.count || !std::is_sorted(bounds.begin(), bounds.end())) {
      throw std::invalid_argument("offsets must begin at 0, must not fall and must end with the indices.");
    }
    bag.resize(asked.count, -1);
    if (asked.weights || asked.mean) scale.resize(asked.count, 1.0);
    for (Int b = 0; b < bags; ++b) {
      Int members = 0;
      for (Int i = bounds[b]; i < bounds[b + 1]; ++i) {
        bag[i] = int(b);
        members += plan.inverse[i] >= 0;
        if (asked.weights) scale[i] = weight_at(type, asked.weights, i);
      }
      if (!asked.mean) continue;
      for (Int i = bounds[b]; i < bounds[b + 1]; ++i) scale[i] /= double(std::max<Int>(1, members));
    }
  }

  Lookup lookup() {
    Lookup q;
    q.chain = &chain;
    q.plan = &plan;
    q.bags = bags;
    q.bounds = bounds.data();
    q.bag = bag.data();
    q.scale = scale.empty() ? nullptr : scale.data();
    q.apart = apart;
    return q;
  }
};

void take_cores(Lookup& q, const std::vector<Address>& cores, std::size_t& at) {
  for (int k = 0; k < q.chain->order(); ++k) q.cores.push_back(reinterpret_cast<const void*>(cores.at(at++)));
}

// The tables of one call, from their plans to their gradients.
class Batch {
 public:
  Batch(int type, const std::vector<Asked>& asked, int threads) : type_(Type(type)) {
    const nb::gil_scoped_release release;
    entries_.reserve(asked.size());
    if (asked.size() == 1) {
      entries_.push_back(std::make_unique<Entry>(type_, asked[0], true));
      return;
    }
    plan_all(asked, threads);
  }

  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  // Writes every table's rows or bags; with `keep`, left products that backward will want stay here.
  void forward(const std::vector<Address>& cores, const std::vector<Address>& out, const std::vector<Int>& out_row,
               const std::vector<Address>& padding, bool keep, int threads) {
    const nb::gil_scoped_release release;
    std::vector<Lookup> lookups;
    std::size_t at = 0;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      Lookup& q = lookups.emplace_back(entries_[i]->lookup());
      take_cores(q, cores, at);
      q.out = reinterpret_cast<void*>(out.at(i));
      q.out_row = out_row.at(i);
      q.padding_row = reinterpret_cast<const void*>(padding.at(i));
      q.tape = keep ? &entries_[i]->tape : nullptr;
    }
    chosen().forward(type_, lookups, threads);
  }

  // Writes every core's gradient, in float64 for float64 and in float32 else, and those of the weights where asked.
  void backward(const std::vector<Address>& cores, const std::vector<Address>& grad, const std::vector<Int>& grad_row,
                const std::vector<Address>& core_grads, const std::vector<Address>& scale_grads, int threads) {
    const nb::gil_scoped_release release;
    std::vector<Lookup> lookups;
    std::size_t at = 0;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      Lookup& q = lookups.emplace_back(entries_[i]->lookup());
      const std::size_t first = at;
      take_cores(q, cores, at);
      for (std::size_t k = first; k < at; ++k) q.core_grads.push_back(reinterpret_cast<void*>(core_grads.at(k)));
      q.grad = reinterpret_cast<const void*>(grad.at(i));
      q.grad_row = grad_row.at(i);
      q.scale_grad = reinterpret_cast<double*>(scale_grads.at(i));
      q.tape = &entries_[i]->tape;
    }
    chosen().backward(type_, lookups, threads);
  }

 private:
  void plan_all(const std::vector<Asked>& asked, int threads) {
    entries_.resize(asked.size());
    std::vector<std::exception_ptr> failures(asked.size());  // of all, the first one is told
    const auto plan = [&](int i) {
      try {
        entries_[i] = std::make_unique<Entry>(type_, asked[i], false);
      } catch (...) {
        failures[i] = std::current_exception();
      }
    };
    Int indices = 0;
    for (const Asked& one : asked) indices += one.count;
    run({plan}, int(asked.size()), indices < plans_from ? 1 : threads);
    for (const std::exception_ptr& failure : failures) {
      if (failure) std::rethrow_exception(failure);
    }
  }

  Type type_;
  std::vector<std::unique_ptr<Entry>> entries_;
};

Tile scores(int type, Address at, Int rows, Int cols, Int stride) {
  if (Type(type) == Type::float64) throw std::invalid_argument("tiles of scores are of float32 or bfloat16.");
  return {Type(type), reinterpret_cast<void*>(at), rows, cols, stride};
}

void absorb(int type, Address tile, Int rows, Int cols, Int stride, Address most, Address total, int threads) {
  const Tile given = scores(type, tile, rows, cols, stride);
  const nb::gil_scoped_release release;
  chosen().absorb(given, reinterpret_cast<float*>(most), reinterpret_cast<float*>(total), threads);
}

void probabilities(int type, Address tile, Int rows, Int cols, Int stride, Address lse, Address scale, Address shift,
                   Address weight, int threads) {
  const Tile given = scores(type, tile, rows, cols, stride);
  const nb::gil_scoped_release release;
  chosen().probabilities(given,
                         {reinterpret_cast<const float*>(lse), reinterpret_cast<const float*>(scale),
                          reinterpret_cast<const float*>(shift), reinterpret_cast<const float*>(weight)},
                         threads);
}

Coded quantized(Int rows, Int cols, Address codes, int bits, Address steps, Int group, Address scale) {
  if (bits != 8 && bits != 4) throw std::invalid_argument("codes have 8 or 4 bits.");
  Coded coded{rows, cols, reinterpret_cast<const std::uint8_t*>(codes)};
  coded.code_row = bits == 8 ? cols : (cols + 1) / 2;
  coded.bits = bits;
  coded.steps = reinterpret_cast<const std::int8_t*>(steps);
  coded.group = group;
  coded.scale = reinterpret_cast<const void*>(scale);
  return coded;
}

Coded product(Int rows, Int cols, Address codes, Int parts, Address books, Int words) {
  if (parts < 1 || cols % parts != 0) throw std::invalid_argument("parts must divide the columns.");
  Coded coded{rows, cols, reinterpret_cast<const std::uint8_t*>(codes)};
  coded.code_row = parts;
  coded.books = reinterpret_cast<const void*>(books);
  coded.words = words;
  return coded;
}

Located located_by_ends(Address index, Int count, const std::vector<Int>& ends) {
  const nb::gil_scoped_release release;
  return Located::by_ends(reinterpret_cast<const Int*>(index), count, ends);
}

Located located_by_places(Address index, Int count, Int rows, Address places, Int hot) {
  const nb::gil_scoped_release release;
  return Located::by_places(reinterpret_cast<const Int*>(index), count, rows, reinterpret_cast<const Int*>(places),
                            hot);
}

std::vector<Int> split(const Located& located, Address ids, Address at) {
  const nb::gil_scoped_release release;
  return located.split(reinterpret_cast<Int*>(ids), reinterpret_cast<Int*>(at));
}

void rows_of_parts(const Located& located, int type, const std::vector<Coded>& parts, Address out, int threads) {
  const nb::gil_scoped_release release;
  located.check(parts);
  chosen().coded_rows(Type(type), parts, located.rows(), reinterpret_cast<void*>(out), threads);
}

void coded_rows(const Coded& coded, int type, Address index, Int count, Address out, int threads) {
  const nb::gil_scoped_release release;
  const Located located = Located::by_ends(reinterpret_cast<const Int*>(index), count, {coded.rows});
  chosen().coded_rows(Type(type), {&coded, 1}, located.rows(), reinterpret_cast<void*>(out), threads);
}

Type type_of_scores(int type) {
  if (Type(type) == Type::bfloat16) throw std::invalid_argument("scores are of float32 or float64.");
  return Type(type);
}

void coded_scores(const Coded& coded, int type, Address x, Int n, Address out, int threads) {
  const nb::gil_scoped_release release;
  chosen().coded_scores(type_of_scores(type), coded, reinterpret_cast<const void*>(x), n,
                        reinterpret_cast<void*>(out), threads);
}

void coded_sums(const Coded& coded, int type, Address tables, Int n, Address out, int threads) {
  const nb::gil_scoped_release release;
  chosen().coded_sums(type_of_scores(type), coded, reinterpret_cast<const void*>(tables), n,
                      reinterpret_cast<void*>(out), threads);
}

}  // namespace
}  // namespace tb

NB_MODULE(_native, m) {
  using namespace tb;
  m.doc() = "Kernels of tensorbed, compiled.";
  bind_facts(m);
  nb::set_leak_warnings(false);  // chains and plans are cached until the interpreter ends
  nb::class_<Chain>(m, "Chain")
      .def("__init__", [](Chain* chain, Int rows, std::vector<Int> row_factors, std::vector<Int> col_factors,
                          std::vector<Int> ranks) {
        new (chain) Chain{rows, std::move(row_factors), std::move(col_factors), std::move(ranks)};
      });
  nb::class_<Asked>(m, "Asked")
      .def(nb::init<const Chain*, Address, Int, Int, Int, Address, Int, Address, bool>(), nb::keep_alive<1, 2>());
  nb::class_<Batch>(m, "Batch")
      .def(nb::init<int, const std::vector<Asked>&, int>())
      .def("forward", &Batch::forward)
      .def("backward", &Batch::backward);
  m.def("absorb", &absorb, nb::arg("type"), nb::arg("tile"), nb::arg("rows"), nb::arg("cols"), nb::arg("stride"),
        nb::arg("most"), nb::arg("total"), nb::arg("threads"));
  m.def("probabilities", &probabilities, nb::arg("type"), nb::arg("tile"), nb::arg("rows"), nb::arg("cols"),
        nb::arg("stride"), nb::arg("lse"), nb::arg("scale"), nb::arg("shift"), nb::arg("weight"), nb::arg("threads"));
  nb::class_<Coded>(m, "Coded")
      .def_static("quantized", &quantized)
      .def_static("product", &product)
      .def("rows", &coded_rows)
      .def("scores", &coded_scores)
      .def("sums", &coded_sums);
  nb::class_<Located>(m, "Located")
      .def_static("by_ends", &located_by_ends)
      .def_static("by_places", &located_by_places)
      .def("split", &split)
      .def("rows", &rows_of_parts);
  m.def("expect_busy_cores", &expect_busy_cores, nb::arg("seconds"),
        "Be helped as where other processes keep the cores busy, for so long from now. For tests.");
  m.def("use", &use, nb::arg("isa"), "Take the kernels of another instruction set; returns the one before. For tests.");
}
