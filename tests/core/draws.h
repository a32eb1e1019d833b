// What the tests draw at random, all of it from the seed.
#pragma once

#include <cstdint>
#include <random>

namespace holdfast {

using Random = std::mt19937_64;

inline std::uint64_t below(Random& random, std::uint64_t limit) { return random() % limit; }
inline bool one_in(Random& random, std::uint64_t n) { return below(random, n) == 0; }
inline float uniform(Random& random, float low, float high) {
  return low + (high - low) * static_cast<float>(random() >> 40) * 0x1p-24f;
}

}  // namespace holdfast
