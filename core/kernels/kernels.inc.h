// The kernels, compiled once for each instruction set: the including file defines HOLDFAST_ISA (a namespace) and
// HOLDFAST_VECTOR_BYTES (the width of its registers).
//
// Same bits everywhere
// - The arithmetic is written in vectors of 16 lanes whatever the registers' width, in an order that the source
//   fixes. Files are compiled with -ffp-contract=off and without -ffast-math, so an operation means what IEEE 754
//   says and nothing else. Each kernel runs in the default floating-point mode (see DefaultFloatMode).
// - Where two different NaNs meet in one operation, the result is a NaN, but which one is not said: the compiler may
//   swap operands.
//
// One definition rule
// - Everything lives in an anonymous namespace inside HOLDFAST_ISA, and nothing external and inline is called, no
//   std:: template either. Otherwise the linker could keep one copy of such a function, the one with AVX-512 code,
//   for all callers.
#include <cstddef>
#include <cstdint>

#include "base/counter_rng.h"
#include "base/float_mode.h"
#include "base/places.h"
#include "kernels/instruction_sets.h"
#include "kernels/kernels.h"

#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own avx512fintrin.h
#pragma GCC diagnostic ignored "-Wuninitialized"        // with sanitizers
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

// In the order in which they build on each other.
// clang-format off: each uses what stands before it
#include "kernels/lanes.inc.h"
#include "kernels/row_formats.inc.h"
#include "kernels/row_shapes.inc.h"
#include "kernels/move_rows.inc.h"
#include "kernels/pool.inc.h"
#include "kernels/optimizers.inc.h"
#include "kernels/update.inc.h"
// clang-format on

namespace holdfast::HOLDFAST_ISA {
namespace {

constexpr Kernels kernel_table(const char* name) {
  return {
      .name = name,
      .initial_row = initial_row,
      .capture = capture,
      .restore = restore,
      .put = put,
      .gather = gather,
      .scatter = scatter,
      .pool_bags = pool_bags,
      .sum_gradients = sum_gradients,
      .sum_of_squares = sum_of_squares,
      .all_finite = all_finite,
      .first_non_finite = first_non_finite,
      .update = update,
      .update_from_sums = update_from_sums,
      .update_compact = update_compact,
      .update_compact_from_sums = update_compact_from_sums,
      .scale_gradients = scale_gradients,
  };
}

}  // namespace
}  // namespace holdfast::HOLDFAST_ISA
