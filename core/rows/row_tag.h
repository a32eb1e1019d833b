// Row tag: 32 bits that say whose a row is and whether it is whole. A log store keeps one in every image, an in-place
// store with row checksums in a file beside the rows.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/checksum.h"

namespace holdfast {

// 1 + mix(crc32c(table, row, weights, state)) % (2^32 - 1): never 0, which says that nothing was ever written. The
// checksum goes on from `seed`, which says whose rows these are: another pool's are never taken for them. What is
// followed by its own CRC leaves any CRC over both the same, whatever it is: unmixed, the checksum of a record's images
// could not tell one version of a row from another. mix is the finalizer of MurmurHash3, which is not linear.
std::uint32_t row_tag(std::uint32_t seed, std::uint64_t table, std::uint64_t row, const void* weights,
                      std::size_t weight_bytes, const void* state, std::size_t state_bytes);

// The same of several rows of one table at once; their weights, and the state behind them, have so many bytes.
using RowNumbers = std::array<std::uint64_t, checksums_at_once>;
using RowTags = std::array<std::uint32_t, checksums_at_once>;
RowTags row_tags(std::uint32_t seed, std::uint64_t table, const RowNumbers& rows, const Messages& values,
                 std::size_t bytes);

}  // namespace holdfast
