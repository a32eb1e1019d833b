// CRC-32C (Castagnoli): SSE4.2 where the CPU has it, tables otherwise; the same value either way.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format.h"

namespace holdfast {

// The checksum of the bytes that gave `crc` followed by `bytes` more; start with 0.
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes);

// Seals a persistent struct: its last field is the checksum of everything before it.
template <format::Persistent T>
std::uint32_t crc_of(const T& value) {
  return crc32c(0, &value, offsetof(T, crc));
}

}  // namespace holdfast
