#include "keys/key_admission.h"

#include <algorithm>
#include <limits>

namespace holdfast {
namespace {

__extension__ using Wide = unsigned __int128;

// log2 of x > 0 in units of 2^-fraction_bits, the rest of a unit left out: digit by digit, by squaring.
std::uint64_t log2_of(std::uint64_t x, std::uint32_t fraction_bits) {
  const int leading = std::countl_zero(x);
  std::uint64_t log = static_cast<std::uint64_t>(63 - leading);
  std::uint64_t mantissa = x << leading;  // in units of 2^-63: from 1 to 2
  for (std::uint32_t i = 0; i < fraction_bits; ++i) {
    const Wide square = Wide{mantissa} * mantissa;
    const auto high = static_cast<std::uint64_t>(square >> 64);
    const bool is_two = (high >> 63) != 0;
    log = log << 1 | (is_two ? 1 : 0);
    mantissa = is_two ? high : static_cast<std::uint64_t>(square >> 63);
  }
  return log;
}

}  // namespace

KeyAdmission::KeyAdmission(std::uint64_t pool_seed, std::uint64_t table, std::uint32_t after,
                           const Chances& turned_away)
    : after_(after), seed_(counter_rng::absorb(counter_rng::absorb(counter_rng::admission, pool_seed), table)) {
  draws_ = std::ranges::any_of(turned_away, [](std::uint32_t chance) { return chance != 0; });
  for (std::size_t i = 1; i <= num_chances; ++i) {
    sums_[i] = sums_[i - 1] + (i < after ? 0 : hazard_of(turned_away[i - 1]));
  }
  later_than_ = std::max<std::uint64_t>(num_chances, after == 0 ? 0 : after - 1);
  later_hazard_ = hazard_of(turned_away.back());
  certain_after_ = certain / std::max<std::uint64_t>(later_hazard_, 1) + 1;
}

// More than nothing, even of the largest draw.
std::uint64_t KeyAdmission::clock(std::uint64_t draw) {
  return draw == 0 ? 64 * one : 64 * one - log2_of(draw, fraction_bits);
}

std::uint64_t KeyAdmission::hazard_of(std::uint32_t turned_away) {
  if (turned_away == never) return 0;
  return turned_away == 0 ? certain : 32 * one - log2_of(turned_away, fraction_bits);
}

std::uint32_t KeyAdmission::first_occurrence(std::uint64_t key) const {
  if (!draws_) return std::max<std::uint32_t>(after_, 1);
  const std::uint64_t shown = clock(counter_rng::absorb(seed_, key));
  for (std::uint32_t occurrence = 1; occurrence <= num_chances; ++occurrence) {
    if (sums_[occurrence] > shown) return occurrence;
  }
  if (later_hazard_ == 0) return std::numeric_limits<std::uint32_t>::max();
  const std::uint64_t later = (shown - sums_[num_chances]) / later_hazard_ + 1;
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(later_than_ + later, std::numeric_limits<std::uint32_t>::max()));
}

}  // namespace holdfast
