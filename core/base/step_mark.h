// Step mark: the end of a step, as every record of it says it.
#pragma once

#include <cstdint>

namespace holdfast {

struct StepMark {
  std::uint64_t step = 0;
  std::uint64_t cursor = 0;       // samples consumed by committed steps
  std::uint64_t row_updates = 0;  // the row optimizer's step

  bool operator==(const StepMark&) const = default;
};

}  // namespace holdfast
