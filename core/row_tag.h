// Row tag: 32 bits that say whose a row is and whether it is whole. A log store keeps one in every image, an in-place
// store with row checksums in a file beside the rows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace holdfast {

// 1 + mix(crc32c(table, row, weights, state)) % (2^32 - 1): never 0, which says that nothing was ever written. What is
// followed by its own CRC leaves any CRC over both the same, whatever it is: unmixed, the checksum of a record's images
// could not tell one version of a row from another. mix is the finalizer of MurmurHash3, which is not linear.
std::uint32_t row_tag(std::uint64_t table, std::uint64_t row, const void* weights, std::size_t weight_bytes,
                      const void* state, std::size_t state_bytes);

}  // namespace holdfast
