#include "scratchpad/shelf.h"

#include <numeric>
#include <utility>

namespace holdfast {
namespace {

// What a slot takes beside its row: its key, its newest use, a flag, its entry of a queue, and that of the map.
constexpr std::size_t slot_overhead_bytes = 8 + 8 + 1 + 4 + 18;

// Of the slots, those whose row was not asked for again since it came in: one in so many.
constexpr std::size_t trial_share = 10;

constexpr std::size_t prefetch_distance = 8;  // turns

std::uint64_t slot_bytes(const Shelving::Size& size) { return size.row_bytes() + slot_overhead_bytes; }

void share_out_slots(std::uint64_t bytes, std::span<Shelving::Size> sizes) {
  constexpr std::uint64_t most_slots = std::uint64_t{1} << 31;
  std::vector<Want> wants;
  for (const Shelving::Size& size : sizes) wants.push_back({std::min(size.num_rows, most_slots), slot_bytes(size)});
  const std::vector<std::uint64_t> num_slots = share_out(bytes, wants);
  for (std::size_t i = 0; i < sizes.size(); ++i) sizes[i].num_slots = num_slots[i];
}

}  // namespace

std::vector<std::uint64_t> share_out(std::uint64_t bytes, std::span<const Want> wants) {
  std::vector<std::size_t> by_need(wants.size());
  std::iota(by_need.begin(), by_need.end(), std::size_t{0});
  std::ranges::sort(by_need, {}, [&](std::size_t i) { return wants[i].most * wants[i].unit_bytes; });
  std::vector<std::uint64_t> granted(wants.size());
  std::uint64_t left = wants.size();
  for (const std::size_t i : by_need) {
    granted[i] = std::min(wants[i].most, bytes / left-- / wants[i].unit_bytes);
    bytes -= granted[i] * wants[i].unit_bytes;
  }
  return granted;
}

Shelf::Shelf(const RowTable& table, std::size_t num_slots_, std::uint64_t num_rows)
    : spec(table.spec),
      weight_bytes(table.weight_bytes()),
      state_bytes(table.state_bytes()),
      num_slots(num_slots_),
      holds_all(num_slots_ == num_rows),
      weights(num_slots * weight_bytes),
      state(num_slots * state_bytes),
      key(num_slots),
      use(num_slots),
      filling(num_slots) {}

std::optional<std::uint32_t> Shelf::evict(std::uint64_t oldest_live, std::span<SlotMap> slot_of_table) {
  bool other_queue = false;  // where the one whose turn it is begins with slots that are needed
  for (std::size_t turns = 2 * (most_lives + 1) * (trial.size() + main.size()); turns != 0; --turns) {
    const bool trial_is_full = trial.size() > num_slots / trial_share;
    const bool from_trial = !trial.empty() && (main.empty() || trial_is_full != other_queue);
    auto& queue = from_trial ? trial : main;
    prefetch_turns(queue, slot_of_table);
    const std::uint32_t slot = queue.front();
    queue.pop_front();
    if (use[slot] == kept) continue;
    if (lives(slot) != 0) {
      set_use(slot, newest_hold(slot), from_trial ? 0 : lives(slot) - 1);
      main.push_back(slot);
    } else if (newest_hold(slot) >= oldest_live) {
      queue.push_back(slot);
      other_queue = !other_queue;
    } else {
      slot_of_table[table_of(slot)].erase_if_equal(row_of(slot), slot);
      return slot;
    }
  }
  return std::nullopt;
}

// Slots leave in no order of memory: what is known of one is asked for two distances ahead, its place in the map one.
void Shelf::prefetch_turns(const std::deque<std::uint32_t>& queue, std::span<SlotMap> slot_of_table) const {
  if (queue.size() <= 2 * prefetch_distance) return;
  const std::uint32_t later = queue[2 * prefetch_distance];
  __builtin_prefetch(&use[later], 1);
  __builtin_prefetch(&key[later], 1);
  const std::uint32_t soon = queue[prefetch_distance];
  if (lives(soon) == 0) slot_of_table[table_of(soon)].prefetch(row_of(soon));
}

Shelving shelve(const std::vector<RowTable>& tables, std::uint64_t bytes) {
  Shelving shelving;
  auto& shelves = shelving.shelves;
  for (const RowTable& table : tables) {
    const auto same = [&](const Shelving::Size& size) {
      return size.table->weight_bytes() == table.weight_bytes() && size.table->state_bytes() == table.state_bytes();
    };
    auto size = std::find_if(shelves.begin(), shelves.end(), same);
    if (size == shelves.end()) size = shelves.insert(shelves.end(), {&table, 0, 0});
    size->num_rows += table.owned_rows();
    shelving.shelf_of_table.push_back(static_cast<std::size_t>(size - shelves.begin()));
  }
  share_out_slots(bytes, shelves);
  return shelving;
}

std::uint64_t least_bytes(const std::vector<RowTable>& tables, const std::vector<std::uint64_t>& wanted) {
  std::vector<Shelving::Size> sizes = shelve(tables, 0).shelves;
  const auto fits = [&](std::uint64_t bytes) {
    share_out_slots(bytes, sizes);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i].num_slots < wanted[i]) return false;
    }
    return true;
  };
  constexpr std::uint64_t most = std::uint64_t{1} << 62;
  std::uint64_t low = 0;
  std::uint64_t high = 1;
  while (high < most && !fits(high)) low = std::exchange(high, 2 * high);
  while (high - low > 1) {
    const std::uint64_t middle = low + (high - low) / 2;
    (fits(middle) ? high : low) = middle;
  }
  return high;
}

}  // namespace holdfast
