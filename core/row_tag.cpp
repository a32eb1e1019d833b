#include "row_tag.h"

#include <limits>

#include "checksum.h"

namespace holdfast {
namespace {

std::uint32_t mix(std::uint32_t value) {
  value = (value ^ value >> 16) * 0x85ebca6b;
  value = (value ^ value >> 13) * 0xc2b2ae35;
  return value ^ value >> 16;
}

}  // namespace

std::uint32_t row_tag(std::uint64_t table, std::uint64_t row, const void* weights, std::size_t weight_bytes,
                      const void* state, std::size_t state_bytes) {
  const std::uint64_t whose[2] = {table, row};
  const std::uint32_t crc = crc32c(crc32c(crc32c(0, whose, sizeof(whose)), weights, weight_bytes), state, state_bytes);
  return 1 + mix(crc) % std::numeric_limits<std::uint32_t>::max();
}

}  // namespace holdfast
