// The kernels for any CPU: 16-byte vectors, which every x86-64 and every aarch64 has.
#define HOLDFAST_ISA scalar
#define HOLDFAST_VECTOR_BYTES 16
#include "kernels/kernels.inc.h"

namespace holdfast {
constinit const Kernels scalar_kernels = scalar::kernel_table("scalar");
}  // namespace holdfast
