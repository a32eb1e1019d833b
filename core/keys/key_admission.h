// Key admission: which of a key's occurrences is the first that trains it. Until then the key counts, and no more.
//
// Occurrence n is the n-th step that brought the key since it last began. Those before `after` turn it away; of each
// later one a chance is given that it does, up to occurrence num_chances, whose chance is that of all that follow.
//
// Invariants
// - A function of (pool seed, table, key, n), so the same on every rank and in every life, and of whole numbers, so the
//   same on every machine. A key that was admitted at n is at every later one.
// - One draw says it of a key, whatever n is: draws for each of n occurrences would be n draws, of a key of which nothing
//   is kept but n. The key's clock shows an exponential variate, -log2 of a uniform one. Each occurrence adds its hazard,
//   -log2 of the chance that it turns the key away; the key is admitted once the sum is beyond its clock. That has the
//   distribution of a draw an occurrence, exactly.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/counter_rng.h"
#include "base/format.h"

namespace holdfast {

class KeyAdmission {
 public:
  static constexpr std::size_t num_chances = format::num_admission_chances;
  static constexpr std::uint32_t never = 0xffffffff;  // a chance of 1 to be turned away
  // Of chances to be turned away, in units of 2^-32, those of occurrences 1 to num_chances. The last one is not `never`.
  using Chances = std::array<std::uint32_t, num_chances>;

  // Of every key, at once.
  KeyAdmission() = default;
  KeyAdmission(std::uint64_t pool_seed, std::uint64_t table, std::uint32_t after, const Chances& turned_away);

  bool admits_all() const { return after_ < 2 && !draws_; }
  bool admits(std::uint64_t key, std::uint64_t occurrence) const {
    if (occurrence < after_) return false;
    if (!draws_) return true;
    const std::uint64_t draw = counter_rng::absorb(seed_, key);
    const std::uint64_t hazard = hazard_up_to(occurrence);
    // The clock is between two whole numbers, which says it of most.
    const auto whole = static_cast<std::uint64_t>(std::countl_zero(draw));
    if (hazard > (whole + 1) * one) return true;
    return hazard > whole * one && hazard > clock(draw);
  }
  // The first occurrence that is admitted, or the largest number of occurrences that a record counts.
  std::uint32_t first_occurrence(std::uint64_t key) const;

 private:
  static constexpr std::uint32_t fraction_bits = 40;
  static constexpr std::uint64_t one = std::uint64_t{1} << fraction_bits;
  static constexpr std::uint64_t certain = 128 * one;  // beyond every clock

  static std::uint64_t clock(std::uint64_t draw);
  static std::uint64_t hazard_of(std::uint32_t turned_away);

  // Of all occurrences up to this one.
  std::uint64_t hazard_up_to(std::uint64_t occurrence) const {
    if (occurrence <= num_chances) return sums_[occurrence];
    const std::uint64_t later = occurrence - later_than_;
    return later >= certain_after_ ? certain : sums_[num_chances] + later * later_hazard_;
  }

  std::uint32_t after_ = 0;
  bool draws_ = false;
  std::uint64_t seed_ = 0;
  std::array<std::uint64_t, num_chances + 1> sums_{};  // of the hazards of occurrences 1 to i
  std::uint64_t later_than_ = 0;  // of this one and those before nothing is left out of sums_
  std::uint64_t later_hazard_ = 0;
  std::uint64_t certain_after_ = 0;  // so many later ones
};

}  // namespace holdfast
