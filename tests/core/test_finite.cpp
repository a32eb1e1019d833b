// Infinities and NaNs among floats of every format, wherever they lie.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "check.h"
#include "commit/finite.h"

using namespace holdfast;

namespace {

template <class Bits>
void finds_every_one(FloatFormat format, Bits infinity, Bits largest, Bits sign) {
  for (const std::size_t count : {std::size_t{1}, std::size_t{7}, std::size_t{1000}, std::size_t{300'000}}) {
    std::vector<Bits> values(count, largest);
    for (std::size_t i = 0; i < count; i += 3) values[i] = static_cast<Bits>(largest | sign);
    const std::vector<Bits> others(5, Bits{1});  // the smallest there is
    const auto found = [&] {
      const FloatTensor tensors[] = {
          {reinterpret_cast<const std::byte*>(others.data()), others.size() * sizeof(Bits), format},
          {nullptr, 0, format},
          {reinterpret_cast<const std::byte*>(values.data()), count * sizeof(Bits), format},
          {reinterpret_cast<const std::byte*>(values.data()), count * sizeof(Bits), format},
      };
      return first_non_finite(tensors);
    };
    CHECK(!found());
    for (const std::size_t at : {std::size_t{0}, count / 2, count - 1}) {
      const Bits before = values[at];
      for (const Bits none : {infinity, static_cast<Bits>(infinity | sign), static_cast<Bits>(infinity | 1),
                              static_cast<Bits>(largest | infinity)}) {
        values[at] = none;
        CHECK(found() == std::size_t{2});
      }
      values[at] = before;
    }
    CHECK(!found());
  }
}

}  // namespace

int main() {
  finds_every_one<std::uint16_t>(FloatFormat::float16, 0x7c00, 0x7bff, 0x8000);
  finds_every_one<std::uint16_t>(FloatFormat::bfloat16, 0x7f80, 0x7f7f, 0x8000);
  finds_every_one<std::uint32_t>(FloatFormat::float32, 0x7f800000, 0x7f7fffff, 0x80000000);
  finds_every_one<std::uint64_t>(FloatFormat::float64, 0x7ff0000000000000, 0x7fefffffffffffff, 0x8000000000000000);
  CHECK(!first_non_finite({}));
}
