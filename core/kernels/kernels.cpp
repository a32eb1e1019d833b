#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <string_view>

#include "kernels/instruction_sets.h"

namespace holdfast {
namespace {

#if defined(__x86_64__)
// Not every compiler's __builtin_cpu_supports knows it.
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

bool runs_here(std::string_view name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && has_f16c() && __builtin_cpu_supports("bmi2");
  if (name == "avx2") return avx2;
  if (name == "avx512") {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return name == "scalar";
}

}  // namespace

const Kernels* kernels_named(const char* name) {
  static constexpr const Kernels* sets[] = {
      &scalar_kernels,
#if defined(__x86_64__)
      &avx2_kernels,
      &avx512_kernels,
#endif
  };
  for (const Kernels* set : sets) {
    if (std::string_view(name) == set->name) return runs_here(set->name) ? set : nullptr;
  }
  return nullptr;
}

const Kernels& best_kernels() {
  static const Kernels& best = []() -> const Kernels& {
    for (const char* name : {"avx512", "avx2"}) {
      if (const Kernels* set = kernels_named(name)) return *set;
    }
    return scalar_kernels;
  }();
  return best;
}

}  // namespace holdfast
