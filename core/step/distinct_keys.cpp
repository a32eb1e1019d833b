#include "step/distinct_keys.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "base/counter_rng.h"

namespace holdfast {
namespace {

constexpr std::size_t fewest_slots = 256;
constexpr std::size_t ids_ahead = 16;  // a power of two
constexpr std::uint64_t number_mask = 0xffffffff;

}  // namespace

// As if each key came four times. It grows where they come less often.
void DistinctKeys::begin(std::uint64_t seed, std::size_t num_ids) {
  seed_ = seed;
  const std::size_t num_slots = std::bit_ceil(std::max(fewest_slots, num_ids / 2));
  shift_ = 64 - static_cast<unsigned>(std::bit_width(num_slots - 1));
  slots_.assign(num_slots, 0);
  num_ids_ = num_keys_ = 0;
  if (number_of_.size() < num_ids) {
    keys_.resize(num_ids);
    counts_.resize(num_ids);
    number_of_.resize(num_ids);
  }
}

// Slots are asked for some ids ahead of their turn: whether a key is new cannot be predicted, and what is guessed wrong
// would wait for its slot each time.
void DistinctKeys::add(std::span<const std::int64_t> ids) {
  const std::size_t first = num_ids_;
  num_ids_ += ids.size();
  std::uint32_t* const number_of = number_of_.data() + first;
  std::array<std::uint64_t, ids_ahead> hashes;
  const auto ask_for = [&](std::size_t i) {
    const std::uint64_t hash = hashes[i % ids_ahead] = counter_rng::absorb(seed_, static_cast<std::uint64_t>(ids[i]));
    __builtin_prefetch(slots_.data() + (hash >> shift_));
  };
  for (std::size_t i = 0; i < std::min(ids_ahead, ids.size()); ++i) ask_for(i);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int64_t key = ids[i];
    const std::uint64_t hash = hashes[i % ids_ahead];
    if (i + ids_ahead < ids.size()) ask_for(i + ids_ahead);
    const std::size_t last_slot = slots_.size() - 1;
    for (std::size_t at = hash >> shift_;; at = (at + 1) & last_slot) {
      const Slot slot = slots_[at];
      const std::uint32_t number = static_cast<std::uint32_t>(slot) - 1;
      if (slot == 0) {
        keys_[num_keys_] = key;
        counts_[num_keys_] = 1;
        number_of[i] = static_cast<std::uint32_t>(num_keys_++);
        slots_[at] = (hash & ~number_mask) | num_keys_;
        if (num_keys_ * 2 > slots_.size()) grow();
        break;
      }
      if (((slot ^ hash) & ~number_mask) == 0 && keys_[number] == key) [[likely]] {
        number_of[i] = number;
        ++counts_[number];
        break;
      }
    }
  }
}

void DistinctKeys::grow() {
  outgrown_.swap(slots_);
  slots_.assign(2 * outgrown_.size(), 0);
  --shift_;
  const std::size_t last_slot = slots_.size() - 1;
  for (const Slot slot : outgrown_) {
    if (slot == 0) continue;
    std::size_t at = slot >> shift_;
    while (slots_[at] != 0) at = (at + 1) & last_slot;
    slots_[at] = slot;
  }
}

}  // namespace holdfast
