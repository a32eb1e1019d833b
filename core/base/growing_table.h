// Growing table: open addressing with linear probing, in steps so small that no call takes long. What a slot holds, and
// what it is found by, is the policy's.
//
// A search begins where a group of slots does, and looks at the whole group before it branches: which slot of it is the
// one cannot be predicted, whether it is one of it can. With slots of 16 bytes, groups of four are lines.
//
// A policy has: Slot (trivially copyable; all zeros: empty), Key, full_percent and grown_percent, group_slots;
// run_slots, that a search which may end in another line than it began looks at, as a rule, or 0; key_of(slot),
// is_empty(slot), and hash(key), whose upper 32 bits count.
//
// Invariants
// - The table is kept between grown_percent and full_percent full while it grows. It never shrinks.
// - It grows a few slots at each key that is new. Slots go by their hashes' order in either table, so those that have
//   moved are a stretch of the old one, whose memory is given back, and a stretch of the new one has been touched: both
//   take no more than the larger one would. A hash says which of the two a key is in.
// - No tombstones: erasing moves later entries of the run back.
// - What it answers, and the memory it takes, is a function of the calls made and of the policy.
// - Not thread-safe.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/huge_array.h"

namespace holdfast {

template <class Policy>
class GrowingTable {
 public:
  using Slot = typename Policy::Slot;
  using Key = typename Policy::Key;

  explicit GrowingTable(Policy policy = {}) : policy_(policy), slots_(fewest_slots) {}

  // What a search goes by; for who wants to take it once.
  std::uint64_t hash(const Key& key) const { return policy_.hash(key); }
  // The key's slot, which may be changed in all but its key; null where it is not there. Until the next insert or erase.
  Slot* find(const Key& key) const { return find(key, hash(key)); }
  Slot* find(const Key& key, std::uint64_t hash) const {
    const HugeArray<Slot>& slots = slots_of(hash);
    Slot* const slot = slots.data() + slot_of(slots, key, hash);
    return policy_.is_empty(*slot) ? nullptr : slot;
  }
  // The same where the group that the search begins with has the slot: it, or the empty one where the key would go. Null
  // where the search would go on.
  [[gnu::always_inline]] Slot* find_near(const Key& key, std::uint64_t hash) const {
    const HugeArray<Slot>& slots = slots_of(hash);
    Slot* const first = slots.data() + first_slot(slots, hash);
    const unsigned ends = ends_of(first, key);
    return ends == 0 ? nullptr : first + std::countr_zero(ends);
  }
  // Replaces what was there of its key.
  void insert(const Slot& slot) {
    const Key key = policy_.key_of(slot);
    const std::uint64_t hash = policy_.hash(key);
    const HugeArray<Slot>* slots = &slots_of(hash);
    std::size_t at = slot_of(*slots, key, hash);
    const bool is_new = policy_.is_empty((*slots)[at]);
    if (is_new) {
      if ((size_ + 1) * 100 > slots_.size() * Policy::full_percent) {
        begin_to_grow();
        slots = &slots_of(hash);
        at = slot_of(*slots, key, hash);
      }
      ++size_;
    }
    (*slots)[at] = slot;
    if (is_new) grow_on(slots_moved_at_once);
  }
  // Of a key that is there, and of whose slot that holds.
  template <class IsMeant>
  void erase(const Key& key, const IsMeant& is_meant) {
    const std::uint64_t hash = policy_.hash(key);
    const HugeArray<Slot>& slots = slots_of(hash);
    const std::size_t slot = slot_of(slots, key, hash);
    if (policy_.is_empty(slots[slot]) || !is_meant(slots[slot])) return;
    --size_;
    close_gap(slots, slot);
  }
  void erase(const Key& key) {
    erase(key, [](const Slot&) { return true; });
  }
  // Erases entries of which that holds, some slots at a time, as `visit` goes through them; it does not grow.
  template <class IsMeant>
  std::size_t erase_if(std::size_t slot, std::size_t count, const IsMeant& is_meant) {
    const std::size_t end = std::min(slots_.size(), slot + count);
    while (slot < end) slot += erase_in_run(slot, is_meant);
    return std::min(slot, slots_.size());
  }
  void clear() {
    slots_ = HugeArray<Slot>(fewest_slots);
    old_ = {};
    size_ = 0;
  }
  // Asks for the memory that a call for a key of that hash is going to read, so that misses of the processor's caches
  // overlap. Inlined by order: GCC 12 leaves out calls of a function that does nothing but this.
  [[gnu::always_inline]] void prefetch(std::uint64_t hash) const {
    const HugeArray<Slot>& slots = slots_of(hash);
    const Slot* const slot = slots.data() + first_slot(slots, hash);
    __builtin_prefetch(slot);
    if constexpr (Policy::run_slots != 0) __builtin_prefetch(slot + Policy::run_slots);
  }
  // Of the group behind that one.
  [[gnu::always_inline]] void prefetch_behind(std::uint64_t hash) const {
    const HugeArray<Slot>& slots = slots_of(hash);
    __builtin_prefetch(slots.data() + first_slot(slots, hash) + group_slots);
  }
  // All entries, some slots at a time: those of `count` slots from `slot` on, or of as many as there are. Returns the
  // slot after them, num_slots() at the end. visit_entry must not change the table. Where keys were inserted meanwhile, and
  // num_slots is what it was, none of the others is left out; none is seen twice, unless it grows.
  template <class Visit>
  std::size_t visit(std::size_t slot, std::size_t count, const Visit& visit_entry) const {
    const std::size_t end = std::min(num_slots(), slot + count);
    for (; slot < end; ++slot) {
      const Slot& entry = slot < old_.size() ? old_[slot] : slots_[slot - old_.size()];
      if (!policy_.is_empty(entry)) visit_entry(entry);
    }
    return end;
  }
  std::size_t num_slots() const { return old_.size() + slots_.size(); }
  bool is_growing() const { return old_.size() != 0; }
  // Moves the entries of so many slots, and of some more. It stops before an empty slot. What was inserted meanwhile may
  // lie behind the last one, where everything has moved.
  void grow_on(std::size_t count) {
    if (!is_growing()) return;
    const std::size_t moved_before = num_moved_;
    for (std::size_t slot = (old_start_ + num_moved_) % old_.size();; slot = after(old_, slot)) {
      const Slot moved = old_[slot];
      if (!policy_.is_empty(moved)) {
        const Key key = policy_.key_of(moved);
        slots_[slot_of(slots_, key, policy_.hash(key))] = moved;
        old_[slot] = Slot{};
      } else if (num_moved_ - moved_before >= count || num_moved_ >= old_.size()) {
        break;
      }
      ++num_moved_;
    }
    if (num_moved_ >= old_.size()) {
      old_ = {};
    } else {
      kept_back_ = old_.give_back(kept_back_, std::min(old_.size(), old_start_ + num_moved_));
    }
  }
  std::size_t size() const { return size_; }
  std::size_t memory_bytes() const {
    if (!is_growing()) return slots_.size() * sizeof(Slot);
    const double share = static_cast<double>(num_moved_) / static_cast<double>(old_.size());
    const double slots = share * static_cast<double>(slots_.size()) + (1 - share) * static_cast<double>(old_.size());
    return static_cast<std::size_t>(slots) * sizeof(Slot);
  }

 private:
  static constexpr std::size_t fewest_slots = 64;
  static constexpr std::size_t slots_moved_at_once = 8;  // so that all have moved long before the new ones are full
  static constexpr std::size_t group_slots = Policy::group_slots;

  // Any number of groups will do: the hash is scaled, not cut.
  static std::size_t first_slot(const HugeArray<Slot>& slots, std::uint64_t hash) {
    return static_cast<std::size_t>((hash >> 32) * (slots.size() / group_slots) >> 32) * group_slots;
  }
  std::size_t first_slot_of(const HugeArray<Slot>& slots, const Slot& slot) const {
    return first_slot(slots, policy_.hash(policy_.key_of(slot)));
  }
  static std::size_t after(const HugeArray<Slot>& slots, std::size_t slot) {
    return slot + 1 == slots.size() ? 0 : slot + 1;
  }
  static std::size_t distance(const HugeArray<Slot>& slots, std::size_t from, std::size_t to) {
    return to >= from ? to - from : to + slots.size() - from;
  }
  // Those that have keys of that hash, if any do.
  const HugeArray<Slot>& slots_of(std::uint64_t hash) const { return !is_growing() || has_moved(hash) ? slots_ : old_; }
  // What has moved is whole runs, so a key's first slot says whether it has.
  bool has_moved(std::uint64_t hash) const { return distance(old_, old_start_, first_slot(old_, hash)) < num_moved_; }
  // Which slots of a group would end a search for the key, a bit each.
  [[gnu::always_inline]] unsigned ends_of(const Slot* first, const Key& key) const {
    unsigned ends = 0;
    for (unsigned i = 0; i < group_slots; ++i) {
      const unsigned is_end = unsigned{policy_.is_empty(first[i])} | unsigned{policy_.key_of(first[i]) == key};
      ends |= is_end << i;
    }
    return ends;
  }
  // The slot of `key`, or the empty one where it would go.
  std::size_t slot_of(const HugeArray<Slot>& slots, const Key& key, std::uint64_t hash) const {
    for (std::size_t group = first_slot(slots, hash);;) {
      const unsigned ends = ends_of(slots.data() + group, key);
      if (ends != 0) [[likely]]
        return group + static_cast<std::size_t>(std::countr_zero(ends));
      group += group_slots;
      if (group == slots.size()) group = 0;
    }
  }
  // An entry further on moves into the gap unless its run begins behind the gap.
  void close_gap(const HugeArray<Slot>& slots, std::size_t gap) {
    for (std::size_t slot = after(slots, gap);; slot = after(slots, slot)) {
      if (policy_.is_empty(slots[slot])) break;
      if (distance(slots, first_slot_of(slots, slots[slot]), slot) < distance(slots, gap, slot)) continue;
      slots[gap] = slots[slot];
      gap = slot;
    }
    slots[gap] = Slot{};
  }
  // Of the slots from there up to an empty one, all of which that is asked for: what stays finds its place again. Returns
  // how many slots that were, at least one.
  template <class IsMeant>
  std::size_t erase_in_run(std::size_t slot, const IsMeant& is_meant) {
    kept_.clear();
    std::size_t num_erased = 0;
    std::size_t num_slots = 0;
    for (std::size_t at = slot; !policy_.is_empty(slots_[at]); at = after(slots_, at), ++num_slots) {
      if (is_meant(slots_[at])) {
        ++num_erased;
      } else {
        kept_.push_back(slots_[at]);
      }
    }
    if (num_erased != 0) {
      for (std::size_t i = 0, at = slot; i < num_slots; ++i, at = after(slots_, at)) slots_[at] = Slot{};
      for (const Slot& kept : kept_) {
        const Key key = policy_.key_of(kept);
        slots_[slot_of(slots_, key, policy_.hash(key))] = kept;
      }
      size_ -= num_erased;
    }
    return num_slots + 1;
  }
  // Where there is no memory for more slots, those that there are stay as they are. What is inserted into the last run
  // may reach into the first slots: they move before, and more of them at each insert, so that it meets none that has
  // not.
  void begin_to_grow() {
    while (is_growing()) grow_on(old_.size());
    const std::size_t wanted = (size_ + 1) * 100 / Policy::grown_percent;
    HugeArray<Slot> larger(std::max(slots_.size() + group_slots, wanted / group_slots * group_slots));
    old_ = std::exchange(slots_, std::move(larger));
    num_moved_ = 0;
    for (old_start_ = 0; !policy_.is_empty(old_[old_start_]);) ++old_start_;
    kept_back_ = old_start_;
    grow_on(slots_moved_at_once);
  }

  Policy policy_;
  HugeArray<Slot> slots_;
  HugeArray<Slot> old_;  // while it grows: where the keys are that have not moved yet
  std::size_t old_start_ = 0;  // the first slot that has moved; it was empty
  std::size_t num_moved_ = 0;  // slots from there on
  std::size_t kept_back_ = 0;  // of these, the first whose memory was not given back
  std::size_t size_ = 0;
  std::vector<Slot> kept_;  // of the run that entries are erased in
};

}  // namespace holdfast
