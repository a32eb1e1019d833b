// Key policy: which keys of a table are trained, and which keep their rows. Zeros: all of them, from the first step that
// brings them on, for good.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/format.h"
#include "keys/key_admission.h"

namespace holdfast {

// How many steps a key is taken to be younger than it is for having been updated often: of 2^level updates and more, up to
// the next level. It never falls from one level to the next, so an update never makes a key older.
class KeyStay {
 public:
  static constexpr std::size_t num_levels = format::num_stay_levels;
  static constexpr std::uint32_t max_steps = format::max_stay_steps;
  using Steps = std::array<std::uint32_t, num_levels>;

  KeyStay() = default;
  explicit KeyStay(const Steps& steps)
      : steps_(steps),
        counts_updates_(std::ranges::any_of(steps, [](std::uint32_t of_level) { return of_level != 0; })) {}

  // Else all levels are alike.
  bool counts_updates() const { return counts_updates_; }
  // Of a key that was updated at all.
  static std::uint8_t level_of(std::uint32_t updates) {
    return static_cast<std::uint8_t>(std::min(static_cast<std::size_t>(std::bit_width(updates)) - 1, num_levels - 1));
  }
  std::uint32_t of_level(std::uint8_t level) const { return steps_[level]; }
  std::uint32_t of_updates(std::uint32_t updates) const { return counts_updates_ ? steps_[level_of(updates)] : 0; }

 private:
  Steps steps_{};
  bool counts_updates_ = false;
};

struct KeyPolicy {
  std::uint64_t ttl_steps = 0;  // a key that no step updated for more than so many steps is left behind; 0: never
  std::uint64_t max_keys = 0;  // with more than so many, those go that were updated longest ago; 0: no limit
  KeyAdmission admission{};
  KeyStay stay{};  // both limits count from so much later than the newest update

  bool leaves_keys() const { return ttl_steps != 0 || max_keys != 0; }
};

}  // namespace holdfast
