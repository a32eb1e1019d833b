// Living keys: which records of a table count, at the end of a step, and the ages that say so.
//
// Invariants
// - Of a table that is split over a pool's shards, each shard has its part of max_keys, and counts for itself: shards are
//   fixed for a pool, so which keys are left behind does not depend on who owns them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "keys/key_ages.h"
#include "keys/key_policy.h"
#include "keys/key_shards.h"

namespace holdfast {

class LivingKeys {
 public:
  LivingKeys() : of_shard_(1) {}
  // shard_shift: a row's shard is row >> shard_shift.
  LivingKeys(std::vector<KeyBounds> of_shard, std::uint32_t shard_shift, const KeyStay& stay)
      : of_shard_(std::move(of_shard)), shard_shift_(shard_shift), stay_(stay) {}

  // Of a record in that row, whose key was updated at all.
  bool count(std::uint64_t row, const KeyRecord& record) const {
    return of(row).count(record.step, stay_.of_updates(record.updates));
  }
  bool count(std::uint64_t row, std::uint64_t step, std::uint8_t level) const {
    return of(row).count(step, stay_.of_level(level));
  }
  // Of a table in which updates are worth nothing: of each shard that counts for itself, or of all together, the step
  // before which records do not count.
  std::vector<std::uint64_t> oldest_steps() const {
    std::vector<std::uint64_t> oldest;
    for (const KeyBounds& of : of_shard_) oldest.push_back(std::max(of.by_age, std::min(of.by_room, of.newest)));
    return oldest;
  }

 private:
  const KeyBounds& of(std::uint64_t row) const { return of_shard_[(row & ~fresh_bit) >> shard_shift_]; }

  std::vector<KeyBounds> of_shard_;
  std::uint32_t shard_shift_ = 63;
  KeyStay stay_;
};

class TableAges {
 public:
  TableAges() : TableAges(KeyPolicy{}) {}
  explicit TableAges(const KeyPolicy& policy) : stay_(policy.stay), of_shard_(1, KeyAges(policy)) {}
  // Of a table that is split.
  TableAges(KeyPolicy policy, std::size_t num_shards, std::uint32_t shard_shift) : stay_(policy.stay) {
    if (policy.max_keys != 0) {
      policy.max_keys /= num_shards;
      shard_shift_ = shard_shift;
    }
    of_shard_.assign(policy.max_keys != 0 ? num_shards : 1, KeyAges(policy));
  }

  std::size_t shard_of(std::uint64_t row) const { return static_cast<std::size_t>((row & ~fresh_bit) >> shard_shift_); }
  KeyAges& of_shard(std::size_t shard) { return of_shard_[shard]; }
  // Where levels are not told apart, all are the first.
  std::uint8_t level_of(std::uint32_t updates) const {
    return stay_.counts_updates() ? KeyStay::level_of(updates) : std::uint8_t{0};
  }

  LivingKeys leave_behind(std::uint64_t step) {
    for (KeyAges& ages : of_shard_) ages.leave_behind(step);
    return living();
  }
  std::int64_t num_left() const {
    std::int64_t left = 0;
    for (const KeyAges& ages : of_shard_) left += ages.num_left();
    return left;
  }
  LivingKeys living() const {
    std::vector<KeyBounds> bounds;
    for (const KeyAges& ages : of_shard_) bounds.push_back(ages.bounds());
    return {std::move(bounds), shard_shift_, stay_};
  }

 private:
  KeyStay stay_;
  std::vector<KeyAges> of_shard_;
  std::uint32_t shard_shift_ = 63;
};

// Of all the records that a table's rows have, whatever rows: which count at the end of `step`. num_shards: that the
// table is split over, by key_shard with this seed.
inline void find_living(const KeyPolicy& policy, std::size_t num_shards, std::uint64_t key_seed, std::uint64_t step,
                        std::span<const KeyRecord> records, bool* counts) {
  constexpr std::uint32_t shard_shift = 48;
  TableAges ages(policy, num_shards, shard_shift);
  const auto place_of = [&](const KeyRecord& record) {
    return key_shard(key_seed, record.key, num_shards) << shard_shift;
  };
  for (const KeyRecord& record : records) {
    if (record.updates == 0) continue;
    ages.of_shard(ages.shard_of(place_of(record))).add(record.step, ages.level_of(record.updates), 1);
  }
  const LivingKeys living = ages.leave_behind(step);
  for (std::size_t i = 0; i < records.size(); ++i) {
    counts[i] = records[i].updates != 0 && living.count(place_of(records[i]), records[i]);
  }
}

}  // namespace holdfast
