// The opener under a coverage-guided fuzzer. `make fuzz`.
#include "open_target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  holdfast::fuzz::open_damaged({data, size});
  return 0;
}
