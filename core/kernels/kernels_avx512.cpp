// The kernels for AVX-512: compile with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mf16c -mbmi2.
#if defined(__x86_64__)
#define HOLDFAST_ISA avx512
#define HOLDFAST_VECTOR_BYTES 64
#include "kernels/kernels.inc.h"

namespace holdfast {
constinit const Kernels avx512_kernels = avx512::kernel_table("avx512");
}  // namespace holdfast
#endif
