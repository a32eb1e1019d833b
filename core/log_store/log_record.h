// Log record: what lies where in a record of the row log that is in memory, from its first byte on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/format.h"

namespace holdfast::log_record {

inline format::RowLogHeader header_of(const std::byte* record) {
  format::RowLogHeader header;
  std::memcpy(&header, record, sizeof(header));
  return header;
}
inline std::span<const format::RowLogSection> sections_of(const std::byte* record) {
  return {reinterpret_cast<const format::RowLogSection*>(record + sizeof(format::RowLogHeader)),
          header_of(record).num_sections};
}
inline const std::uint64_t* rows_of(const std::byte* record, const format::RowLogSection& section) {
  return reinterpret_cast<const std::uint64_t*>(record + section.rows_offset);
}

}  // namespace holdfast::log_record
