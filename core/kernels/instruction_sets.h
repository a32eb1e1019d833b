// The sets of kernels that this build has, one for each instruction set. Each is defined in a file of its own, which
// is compiled for that instruction set; only kernels.cpp decides which of them may run.
#pragma once

#include "kernels/kernels.h"

namespace holdfast {

extern const Kernels scalar_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

}  // namespace holdfast
