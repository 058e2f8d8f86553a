// The Python module tensorbed._native. Placeholder: it says what was built and computes nothing.
#include <nanobind/nanobind.h>

#include <cstring>

#include "facts.hpp"
#include "kernels.hpp"

NB_MODULE(_native, m) {
    m.doc() = "Kernels of tensorbed, compiled.";
    tb::bind_facts(m);
    m.def("threads", [] {
#ifdef TB_HAVE_AVX512
        if (std::strcmp(tb::best(), "avx512") == 0) return tb::avx512::threads();
#endif
#ifdef TB_HAVE_AVX2
        if (std::strcmp(tb::best(), "avx2") == 0) return tb::avx2::threads();
#endif
        return tb::baseline::threads();
    });
}
