// What this build is and what this processor can run: for dispatch, and for `tensorbed info`.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>

namespace tb {

// The instruction sets the kernels were compiled for, least first.
inline constexpr const char* compiled[] = {
  "baseline",
#ifdef TB_HAVE_AVX2
  "avx2",
#endif
#ifdef TB_HAVE_AVX512
  "avx512",
#endif
};

// Whether this processor, under this operating system, runs what was compiled with the flags in CMakeLists.txt.
inline bool runs(const char* isa) {
#if defined(__x86_64__)
  if (std::strcmp(isa, "avx2") == 0)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  if (std::strcmp(isa, "avx512") == 0)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && runs("avx2");
#endif
  return std::strcmp(isa, "baseline") == 0;
}

// The greatest of the compiled instruction sets that this processor runs.
inline const char* best() {
  const char* found = compiled[0];
  for (const char* isa : compiled)
    if (runs(isa)) found = isa;
  return found;
}

// isas, isa, openmp and nanobind, as src/tensorbed/_native.pyi has them.
inline void bind_facts(nanobind::module_& m) {
  nanobind::list isas;
  for (const char* isa : compiled) isas.append(nanobind::str(isa));
  m.attr("isas") = nanobind::tuple(isas);
  m.attr("isa") = best();
#ifdef _OPENMP
  m.attr("openmp") = true;
#else
  m.attr("openmp") = false;
#endif
  m.attr("nanobind") = nanobind::str("{}.{}.{}").attr("format")(NB_VERSION_MAJOR, NB_VERSION_MINOR, NB_VERSION_PATCH);
}

}  // namespace tb
