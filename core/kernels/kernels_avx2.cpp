// The kernels for AVX2 and F16C: compile with -mavx2 -mf16c -mbmi2.
#if defined(__x86_64__)
#define HOLDFAST_ISA avx2
#define HOLDFAST_VECTOR_BYTES 32
#include "kernels/kernels.inc.h"

namespace holdfast {
constinit const Kernels avx2_kernels = avx2::kernel_table("avx2");
}  // namespace holdfast
#endif
