#include "rows/row_tag.h"

#include <limits>

namespace holdfast {
namespace {

std::uint32_t mix(std::uint32_t value) {
  value = (value ^ value >> 16) * 0x85ebca6b;
  value = (value ^ value >> 13) * 0xc2b2ae35;
  return value ^ value >> 16;
}

std::uint32_t tag_of_crc(std::uint32_t crc) { return 1 + mix(crc) % std::numeric_limits<std::uint32_t>::max(); }

}  // namespace

std::uint32_t row_tag(std::uint32_t seed, std::uint64_t table, std::uint64_t row, const void* weights,
                      std::size_t weight_bytes, const void* state, std::size_t state_bytes) {
  const std::uint64_t whose[2] = {table, row};
  return tag_of_crc(crc32c(crc32c(crc32c(seed, whose, sizeof(whose)), weights, weight_bytes), state, state_bytes));
}

RowTags row_tags(std::uint32_t seed, std::uint64_t table, const RowNumbers& rows, const Messages& values,
                 std::size_t bytes) {
  std::array<std::uint64_t[2], checksums_at_once> whose;
  Messages whose_bytes;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    whose[i][0] = table;
    whose[i][1] = rows[i];
    whose_bytes[i] = reinterpret_cast<const std::byte*>(whose[i]);
  }
  RowTags tags = crc32c_of_each(crc32c_of_each({seed, seed, seed, seed}, whose_bytes, sizeof(whose[0])), values, bytes);
  for (std::uint32_t& tag : tags) tag = tag_of_crc(tag);
  return tags;
}

}  // namespace holdfast
