// Checksum of a piece of a file that is one of many alike: of what it says and of which it is.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/checksum.h"

namespace holdfast {

inline std::uint32_t numbered_checksum(const std::byte* data, std::size_t bytes, std::uint64_t number,
                                       std::uint32_t seed) {
  return crc32c(crc32c(seed, reinterpret_cast<const std::byte*>(&number), sizeof(number)), data, bytes);
}

}  // namespace holdfast
