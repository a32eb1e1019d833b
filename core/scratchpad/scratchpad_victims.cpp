// Rows between a scratchpad's slots and its victim cache.
#include <cstring>
#include <utility>
#include <vector>

#include "scratchpad/scratchpad.h"
#include "scratchpad/scratchpad_turns.h"

namespace holdfast {
namespace {

constexpr std::size_t prefetch_distance = 8;  // rows

void prefetch_row(const void* begin, std::size_t bytes, bool writes) {
  const auto* const line = static_cast<const std::byte*>(begin);
  for (std::size_t at = 0; at < bytes; at += format::line_bytes) {
    if (writes) {
      __builtin_prefetch(line + at, 1);
    } else {
      __builtin_prefetch(line + at, 0);
    }
  }
}

}  // namespace

// In the order in which the hold's tables were collected: what one of them drove out, another may want. Of one table, what
// it wants leaves the victim cache before what it drives out comes. The rows that the slots had are still in them: they are
// filled when all of this is done.
void Scratchpad::swap_victims(Hold& hold) {
  std::uint64_t num_found = 0;
  for (std::size_t t = 0; t < hold.missed_.size(); ++t) {
    const std::size_t number = shelf_of_table_[hold.spec_->tables[t].number];
    if (!victims_->has_room(number)) continue;
    const Shelf& shelf = *shelves_[number];
    const std::vector<const std::byte*> found = take_victims(hold, t);
    DialWork work;
    if (Dial* const dial = victims_->dial(); dial != nullptr) {
      const std::size_t row_bytes = shelf.weight_bytes + shelf.state_bytes;
      dial->add_reads(work, found.size(), row_bytes);
      dial->add_writes(work, hold.missed_[t].victims.size(), row_bytes);
    }
    DialService service(victims_->dial(), work);
    stage_victims(shelf, found, t);
    put_victims(number, std::exchange(hold.missed_[t].victims, {}));
    service.finish();
    num_found += found.size();
  }
  const std::lock_guard lock(turns_->mutex);
  turns_->counters.rows_from_victims += num_found;
}

// Where the values are of those of the hold's missed rows that the victim cache has. Their slots are the first then, in
// this order, and the rows that are still missed have the others.
std::vector<const std::byte*> Scratchpad::take_victims(Hold& hold, std::size_t t) {
  Hold::Missed& missed = hold.missed_[t];
  const std::uint32_t table = hold.spec_->tables[t].number;
  const std::size_t shelf = shelf_of_table_[table];
  std::vector<const std::byte*> found;
  std::vector<std::uint32_t> slots;
  std::size_t num_left = 0;
  for (std::size_t i = 0; i < missed.rows.size(); ++i) {
    if (i + prefetch_distance < missed.rows.size()) {
      victims_->prefetch(shelf, Shelf::key_of(table, missed.rows[i + prefetch_distance]));
    }
    if (const std::byte* const values = victims_->take(shelf, Shelf::key_of(table, missed.rows[i]));
        values != nullptr) {
      found.push_back(values);
      slots.push_back(missed.slots[i]);
    } else {
      missed.rows[num_left] = missed.rows[i];
      missed.slots[num_left++] = missed.slots[i];
    }
  }
  missed.rows.resize(num_left);
  missed.slots.resize(num_left);
  missed.num_from_victims = slots.size();
  slots.insert(slots.end(), missed.slots.begin(), missed.slots.end());
  missed.slots = std::move(slots);
  return found;
}

void Scratchpad::stage_victims(const Shelf& shelf, std::span<const std::byte* const> found, std::size_t t) {
  Staging::Rows& staged = staging_->tables[t];
  auto* const state = reinterpret_cast<std::byte*>(staged.state.data());
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (i + prefetch_distance < found.size()) {
      prefetch_row(found[i + prefetch_distance], shelf.weight_bytes + shelf.state_bytes, false);
    }
    std::memcpy(staged.weights.data() + i * shelf.weight_bytes, found[i], shelf.weight_bytes);
    if (shelf.state_bytes == 0) continue;
    std::memcpy(state + i * shelf.state_bytes, found[i] + shelf.weight_bytes, shelf.state_bytes);
  }
}

void Scratchpad::put_victims(std::size_t number, std::span<const Hold::Missed::Victim> victims) {
  const Shelf& shelf = *shelves_[number];
  const auto* const state = reinterpret_cast<const std::byte*>(shelf.state.data());
  std::vector<std::byte*> places(victims.size());
  for (std::size_t i = 0; i < victims.size(); ++i) {
    if (i + prefetch_distance < victims.size()) victims_->prefetch(number, victims[i + prefetch_distance].key);
    places[i] = victims_->put(number, victims[i].key);
  }
  for (std::size_t i = 0; i < victims.size(); ++i) {
    if (i + prefetch_distance < victims.size()) {
      const std::uint32_t later = victims[i + prefetch_distance].slot;
      prefetch_row(shelf.weights.data() + later * shelf.weight_bytes, shelf.weight_bytes, false);
      prefetch_row(state + later * shelf.state_bytes, shelf.state_bytes, false);
      prefetch_row(places[i + prefetch_distance], shelf.weight_bytes + shelf.state_bytes, true);
    }
    std::memcpy(places[i], shelf.weights.data() + victims[i].slot * shelf.weight_bytes, shelf.weight_bytes);
    if (shelf.state_bytes == 0) continue;
    std::memcpy(places[i] + shelf.weight_bytes, state + victims[i].slot * shelf.state_bytes, shelf.state_bytes);
  }
}

// These rows change below. Nothing is exchanged meanwhile.
void Scratchpad::drop_victims(std::uint32_t table, std::span<const std::uint64_t> rows) {
  if (!victims_) return;
  const std::size_t shelf = shelf_of_table_[table];
  if (!victims_->has_room(shelf)) return;
  for (const std::uint64_t row : rows) victims_->take(shelf, Shelf::key_of(table, row));
}

}  // namespace holdfast
