// Places: the number of a row in a split table, as kernels want it. shards.h has the rest.
//
// `static`, as in counter_rng.h: translation units compiled for different instruction sets include this header.
#pragma once

#include <cstdint>

#include "base/counter_rng.h"

namespace holdfast {

// The number of the row at `place`; stride_bits 0: the place itself.
static inline std::uint64_t own_row(std::uint32_t shard_bits, std::uint32_t stride_bits, std::uint32_t first_shard,
                                    std::uint64_t place) {
  if (stride_bits == 0) return place;
  const std::uint64_t local = place & ((std::uint64_t{1} << stride_bits) - 1);
  const std::uint64_t lane = (place >> stride_bits) - first_shard - counter_rng::mix64(local);
  return local << shard_bits | (lane & ((std::uint64_t{1} << shard_bits) - 1));
}

}  // namespace holdfast
