// Rows of the scratchpad: those that are in, those that come in without a hold, and a look at both.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "scratchpad/scratchpad.h"
#include "scratchpad/scratchpad_turns.h"

namespace holdfast {

// Rows that are in.

void Scratchpad::gather(std::uint32_t table, const std::uint32_t* slots, const WorkingRows& working, std::size_t begin,
                        std::size_t end) const {
  const Shelf& shelf = shelf_of(table);
  best_kernels().gather(shelf.spec, shelf.rows(), slots, working, begin, end);
}

void Scratchpad::scatter(std::uint32_t table, const std::uint32_t* slots, const WorkingRows& working, std::size_t begin,
                         std::size_t end) {
  const Shelf& shelf = shelf_of(table);
  best_kernels().scatter(shelf.spec, shelf.rows(), slots, working, begin, end);
}

void Scratchpad::settle() {
  give_up_expected();
  collecting_.drain();
  exchanging_.drain();
}

void Scratchpad::read_again(std::uint32_t table, std::vector<std::uint64_t> rows) {
  constexpr std::size_t at_once = 16384;
  std::vector<std::uint32_t> slots;
  drop_victims(table, rows);
  {
    const std::lock_guard lock(map_mutex_);
    std::erase_if(rows, [&](std::uint64_t row) {
      const auto slot = slot_of_[table].find(row);
      if (slot) slots.push_back(*slot);
      return !slot;
    });
  }
  std::vector<std::byte> weights(std::min(at_once, rows.size()) * tables_[table].weight_bytes());
  std::vector<float> state(std::min(at_once, rows.size()) * tables_[table].spec.state_floats);
  for (std::size_t begin = 0; begin < rows.size(); begin += at_once) {
    const std::size_t count = std::min(at_once, rows.size() - begin);
    const TableRows wanted{table, count, {rows.data() + begin, weights.data(), state.data()}};
    fetch_({&wanted, 1});
    scatter(table, slots.data() + begin, wanted.rows, 0, count);
  }
}

void Scratchpad::keep(const Hold& hold) {
  const std::lock_guard lock(map_mutex_);
  for (std::size_t t = 0; t < hold.slots_.size(); ++t) {
    Shelf& shelf = shelf_of(hold.spec_->tables[t].number);
    for (const std::uint32_t slot : hold.slots_[t]) shelf.use[slot] = Shelf::kept;
  }
}

// Rows that come in without a hold.

bool Scratchpad::has_free_slots(std::uint32_t table) const {
  const std::lock_guard lock(map_mutex_);
  const Shelf& shelf = shelf_of(table);
  return shelf.num_used < shelf.num_slots;
}

void Scratchpad::begin_sweep(MayCome may_come) {
  may_come_ = std::move(may_come);
  const std::lock_guard lock(turns_->mutex);
  turns_->sweeping = true;
  turns_->sweep_began = std::chrono::steady_clock::now();
  turns_->swept = 0;
}

void Scratchpad::note_sweep(double share) {
  {
    const std::lock_guard lock(turns_->mutex);
    turns_->swept = std::max(turns_->swept, share);
  }
  turns_->turned.notify_all();
}

void Scratchpad::end_sweep() {
  {
    const std::lock_guard lock(turns_->mutex);
    turns_->sweeping = false;
  }
  turns_->turned.notify_all();
}

// Some at a time: whoever collects a batch waits for the map no longer than it takes to copy so many.
std::size_t Scratchpad::warm(std::uint32_t table, std::span<const SweptRow> rows) {
  constexpr std::size_t at_once = 1024;
  std::size_t num_warmed = 0;
  for (std::size_t first = 0; first < rows.size(); first += at_once) {
    num_warmed += warm_some(table, rows.subspan(first, std::min(at_once, rows.size() - first)));
  }
  return num_warmed;
}

std::size_t Scratchpad::warm_some(std::uint32_t table, std::span<const SweptRow> rows) {
  constexpr std::size_t distance = 16;
  Shelf& shelf = shelf_of(table);
  const std::lock_guard lock(map_mutex_);
  SlotMap& slot_of = slot_of_[table];
  std::size_t num_warmed = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i + distance < rows.size()) slot_of.prefetch(rows[i + distance].row);
    const SweptRow& row = rows[i];
    std::optional<std::uint32_t> slot = slot_of.find(row.row);
    if (slot && shelf.filling[*slot].load(std::memory_order_relaxed) != Filling::left) continue;
    if (!slot) {
      if (shelf.num_used == shelf.num_slots) continue;
      slot = static_cast<std::uint32_t>(shelf.num_used++);
      shelf.note_arrival(*slot, table, row.row);  // of no hold, as the zeros say that a new slot's use begins with
      slot_of.insert(row.row, *slot);
    }
    std::memcpy(shelf.weights.data() + *slot * shelf.weight_bytes, row.weights, shelf.weight_bytes);
    if (shelf.state_bytes != 0) {
      std::memcpy(shelf.state.data() + *slot * shelf.state_bytes, row.state, shelf.state_bytes);
    }
    shelf.filling[*slot].store(Filling::filled, std::memory_order_release);
    ++num_warmed;
  }
  return num_warmed;
}

// Some at a time, as above. No hold is collected meanwhile, so none comes to use a row that none uses.
std::vector<bool> Scratchpad::copy_settled(std::uint32_t table, std::span<const std::uint64_t> rows, std::byte* out,
                                           std::size_t stride) const {
  constexpr std::size_t at_once = 1024;
  const Shelf& shelf = shelf_of(table);
  if (!shelf.holds_all) return {};
  std::vector<bool> has(rows.size());
  std::vector<std::optional<std::uint32_t>> slots(at_once);
  for (std::size_t first = 0; first < rows.size(); first += at_once) {
    const std::size_t count = std::min(at_once, rows.size() - first);
    const std::lock_guard lock(map_mutex_);
    const std::uint64_t oldest_live = [&] {
      const std::lock_guard turn(turns_->mutex);
      return turns_->live.empty() ? turns_->num_holds + 1 : turns_->oldest_live();
    }();
    const SlotMap& slot_of = slot_of_[table];
    for (std::size_t i = 0; i < count; ++i) {
      prefetch_ahead(slot_of, rows.data() + first, i, count);
      slots[i] = slot_of.find(rows[first + i]);
      if (slots[i]) __builtin_prefetch(&shelf.use[*slots[i]]);
    }
    for (std::size_t i = 0; i < count; ++i) {
      const auto slot = slots[i];
      has[first + i] = slot && shelf.newest_hold(*slot) < oldest_live &&
                       shelf.filling[*slot].load(std::memory_order_acquire) == Filling::filled;
      if (has[first + i]) __builtin_prefetch(shelf.weights.data() + *slot * shelf.weight_bytes);
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (!has[first + i]) continue;
      std::byte* values = out + (first + i) * stride;
      std::memcpy(values, shelf.weights.data() + *slots[i] * shelf.weight_bytes, shelf.weight_bytes);
      if (shelf.state_bytes == 0) continue;
      std::memcpy(values + shelf.weight_bytes, shelf.state.data() + *slots[i] * shelf.state_bytes, shelf.state_bytes);
    }
  }
  return has;
}

void Scratchpad::read(const Plan& plan, const std::vector<WorkingRows>& rows) {
  struct Missing {
    std::vector<std::size_t> at;
    std::vector<std::uint64_t> rows;
    Staging::Rows staged;
  };
  const std::size_t num_tables = plan.tables.size();
  std::vector<Missing> missing(num_tables);
  {
    const std::lock_guard lock(map_mutex_);
    for (std::size_t t = 0; t < num_tables; ++t) {
      const std::uint32_t number = plan.spec->tables[t].number;
      const Shelf& shelf = shelf_of(number);
      const auto& wanted = plan.tables[t].rows;
      std::copy(wanted.begin(), wanted.end(), rows[t].rows);
      for (std::size_t u = 0; u < wanted.size(); ++u) {
        const auto slot = slot_of_[number].find(wanted[u]);
        if (!slot || shelf.filling[*slot].load(std::memory_order_acquire) != Filling::filled) {
          missing[t].at.push_back(u);
          missing[t].rows.push_back(wanted[u]);
          continue;
        }
        copy_row(shelf, shelf.rows(), *slot, rows[t], u);
      }
    }
  }
  std::vector<TableRows> wanted;
  for (std::size_t t = 0; t < num_tables; ++t) {
    const std::uint32_t number = plan.spec->tables[t].number;
    Missing& table = missing[t];
    if (table.rows.empty()) continue;
    table.staged.weights.resize(table.rows.size() * tables_[number].weight_bytes());
    table.staged.state.resize(table.rows.size() * tables_[number].spec.state_floats);
    wanted.push_back(
        {number, table.rows.size(), {table.rows.data(), table.staged.weights.data(), table.staged.state.data()}});
  }
  if (wanted.empty()) return;
  fetch_(wanted);
  for (std::size_t t = 0; t < num_tables; ++t) {
    Missing& table = missing[t];
    const Shelf& shelf = shelf_of(plan.spec->tables[t].number);
    for (std::size_t i = 0; i < table.at.size(); ++i) {
      copy_row(shelf, {table.staged.weights.data(), table.staged.state.data()}, i, rows[t], table.at[i]);
    }
  }
}

void Scratchpad::copy_row(const Shelf& shelf, const SlotRows& from, std::size_t i, const WorkingRows& to,
                          std::size_t u) {
  std::memcpy(to.weights + u * shelf.weight_bytes, from.weights + i * shelf.weight_bytes, shelf.weight_bytes);
  if (shelf.state_bytes == 0) return;
  std::memcpy(reinterpret_cast<std::byte*>(to.state) + u * shelf.state_bytes,
              reinterpret_cast<const std::byte*>(from.state) + i * shelf.state_bytes, shelf.state_bytes);
}

}  // namespace holdfast
