// Row tag: 32 bits that say whose a row is and whether it is whole. A log store keeps one in every image, an in-place store
// with row checksums in a file beside the rows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace holdfast {

// 1 + crc32c(table, row, weights, state) % (2^32 - 1): never 0, which says that nothing was ever written.
std::uint32_t row_tag(std::uint64_t table, std::uint64_t row, const void* weights, std::size_t weight_bytes,
                      const void* state, std::size_t state_bytes);

}  // namespace holdfast
