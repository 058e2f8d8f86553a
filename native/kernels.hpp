// What kernels.cpp defines, once in the namespace of each instruction set.
#pragma once

#define TB_DECLARE(isa) \
    namespace tb::isa { \
    int threads();      \
    }

TB_DECLARE(baseline)
#ifdef TB_HAVE_AVX2
TB_DECLARE(avx2)
#endif
#ifdef TB_HAVE_AVX512
TB_DECLARE(avx512)
#endif
