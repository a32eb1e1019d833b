// Every set of kernels that this machine can run.
#pragma once

#include <vector>

#include "kernels/kernels.h"

namespace holdfast {

inline std::vector<const Kernels*> instruction_sets() {
  std::vector<const Kernels*> sets;
  for (const char* name : {"scalar", "avx2", "avx512"}) {
    if (const Kernels* set = kernels_named(name)) sets.push_back(set);
  }
  return sets;
}

}  // namespace holdfast
