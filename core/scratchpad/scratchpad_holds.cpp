// What a hold lacks comes in, on two threads of the scratchpad's own.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "scratchpad/scratchpad.h"
#include "scratchpad/scratchpad_turns.h"

namespace holdfast {
namespace {

constexpr std::uint32_t no_slot = ~std::uint32_t{0};

// So few missed rows of a hold are fetched beside a sweep: in a small part of a step's time.
constexpr std::size_t few_rows = 4096;
// A sweep is waited for as long as it takes no longer yet than fetching what a hold lacks twenty times: as much as the
// batches after it would lack in that time.
constexpr std::chrono::duration<double> worth_of_a_row{20 * 25e-6};

}  // namespace

// Collecting: on a thread of its own.

void Scratchpad::collect(std::shared_ptr<Hold> hold) {
  try {
    const StageSpans::Timing timing(spans_, Stage::collect);
    const std::size_t num_tables = hold->spec_->tables.size();
    hold->slots_.resize(num_tables);
    hold->missed_.resize(num_tables);
    {
      const std::lock_guard lock(turns_->mutex);
      hold->oldest_live_ = turns_->oldest_live();
      hold->leaves_rows_ = turns_->sweeping;
    }
    if (const auto plan = hold->plan_.lock()) {
      for (std::size_t t = 0; t < num_tables; ++t) collect_table(*hold, t, plan->tables[t].rows);
    }
    {
      const std::lock_guard lock(turns_->mutex);
      std::uint64_t num_rows = 0;
      for (const auto& slots : hold->slots_) num_rows += slots.size();
      ScratchpadCounters& counters = turns_->counters;
      counters.rows_hit += num_rows - hold->num_missed_;
      counters.rows_missed += hold->num_missed_;
      if (!hold->announced_) counters.rows_demanded += hold->num_missed_;
    }
    exchanging_.submit([this, of = std::move(hold)]() mutable { exchange(std::move(of)); });
  } catch (...) {
    fail(std::current_exception());
  }
}

void Scratchpad::collect_table(Hold& hold, std::size_t t, const std::vector<std::uint64_t>& rows) {
  const std::uint32_t table = hold.spec_->tables[t].number;
  Shelf& shelf = shelf_of(table);
  auto& slots = hold.slots_[t];
  auto& missed = hold.missed_[t];
  slots.resize(rows.size());
  std::unique_lock lock(map_mutex_);
  SlotMap& slot_of = slot_of_[table];
  // Those that are in, first: so their misses of the processor's caches overlap, and none of them is evicted here.
  for (std::size_t u = 0; u < rows.size(); ++u) {
    prefetch_ahead(slot_of, rows.data(), u, rows.size());
    const auto found = slot_of.find(rows[u]);
    slots[u] = found.value_or(no_slot);
    if (found) __builtin_prefetch(&shelf.use[*found], 1);
  }
  for (const std::uint32_t slot : slots) {
    if (slot != no_slot) shelf.use_again(slot, hold.order_);
  }
  for (std::size_t u = 0; u < rows.size(); ++u) {
    if (slots[u] != no_slot) continue;
    const std::uint64_t row = rows[u];
    std::optional<std::uint32_t> slot = take_slot(hold, t, shelf);
    while (!slot) {
      lock.unlock();
      const bool changed = wait_for_room(hold);
      lock.lock();
      if (!changed) {  // given up: what was collected is exchanged, so that every slot is filled
        std::erase(slots, no_slot);
        return;
      }
      slot = take_slot(hold, t, shelf);
    }
    shelf.set_use(*slot, hold.order_, 0);
    const bool leaves = hold.leaves_rows_ && shelf.holds_all;
    shelf.filling[*slot].store(leaves ? Filling::left : Filling::under_way, std::memory_order_relaxed);
    shelf.note_arrival(*slot, table, row);
    slot_of.insert(row, *slot);
    slots[u] = *slot;
    missed.rows.push_back(row);
    missed.slots.push_back(*slot);
    ++hold.num_missed_;
  }
}

// A slot without a row, for the hold's table t. The caller holds map_mutex_.
std::optional<std::uint32_t> Scratchpad::take_slot(Hold& hold, std::size_t t, Shelf& shelf) {
  if (shelf.num_used < shelf.num_slots) return static_cast<std::uint32_t>(shelf.num_used++);
  const auto slot = shelf.evict(hold.oldest_live_, slot_of_);
  if (slot && victims_) hold.missed_[t].victims.push_back({shelf.key[*slot], *slot});
  return slot;
}

// Returns when a hold was let go since this one last looked; false where this hold was given up, or the end has come.
bool Scratchpad::wait_for_room(Hold& hold) {
  Turns& turns = *turns_;
  std::unique_lock lock(turns.mutex);
  const auto looked_at = std::exchange(hold.oldest_live_, turns.oldest_live());
  const auto took_back = [&] {
    const bool worth_it = std::exchange(turns.out_of_order, false);
    if (worth_it) take_back_slots();
    return worth_it;
  };
  if (took_back() || looked_at != hold.oldest_live_) return true;
  if (hold.announced_ && !std::exchange(hold.delayed_, true)) ++turns.counters.holds_delayed;
  turns.waiting = hold.order_;
  turns.waiting_for = looked_at;
  turns.turned.notify_all();
  turns.turned.wait(lock, [&] {
    return turns.stopping || hold.given_up_ || turns.out_of_order || turns.oldest_live() != turns.waiting_for;
  });
  turns.waiting = 0;
  hold.oldest_live_ = turns.oldest_live();
  return took_back() || hold.oldest_live_ != looked_at;
}

// Slots that no live hold uses are free, however new the newest one was. The caller holds the mutex of Turns: no hold
// ends meanwhile.
void Scratchpad::take_back_slots() {
  std::vector<std::vector<bool>> used;
  for (const auto& shelf : shelves_) used.emplace_back(shelf->num_used);
  for (const auto& [order, hold] : turns_->live) {
    for (std::size_t t = 0; t < hold->slots_.size(); ++t) {
      auto& of_shelf = used[shelf_of_table_[hold->spec_->tables[t].number]];
      for (const std::uint32_t slot : hold->slots_[t]) {
        if (slot != no_slot) of_shelf[slot] = true;  // the one that finds no room has some without
      }
    }
  }
  for (std::size_t i = 0; i < shelves_.size(); ++i) {
    Shelf& shelf = *shelves_[i];
    if (shelf.holds_all) continue;  // there is room
    for (std::uint32_t slot = 0; slot < shelf.num_used; ++slot) {
      if (!used[i][slot] && shelf.use[slot] != Shelf::kept) shelf.set_use(slot, 0, shelf.lives(slot));
    }
  }
}

// Exchanging and inserting: on another thread.

void Scratchpad::exchange(std::shared_ptr<Hold> hold) {
  try {
    if (hold->leaves_rows_) {
      leave_to_sweep(*hold);
      claim(*hold);
    }
    if (hold->num_missed_ != 0) {
      {
        const StageSpans::Timing timing(spans_, Stage::exchange);
        stage(*hold);
        if (victims_) swap_victims(*hold);
        const std::vector<TableRows> wanted = wanted_below(*hold);
        if (!wanted.empty()) fetch_(wanted);
      }
      insert(*hold);
    }
    // Let go of before anybody is told: by the time this thread runs again, a step may be over and its rows' room wanted.
    const std::uint64_t order = hold->order_;
    hold.reset();
    {
      const std::lock_guard lock(turns_->mutex);
      turns_->newest_ready = order;
    }
    turns_->turned.notify_all();
  } catch (...) {
    fail(std::current_exception());
  }
}

// Returns when few of the hold's missed rows are left that a sweep may bring, or it is not worth waiting for.
void Scratchpad::leave_to_sweep(const Hold& hold) {
  struct Left {
    const Shelf* shelf;
    std::vector<std::uint32_t> slots;
  };
  std::vector<Left> left;
  for (std::size_t t = 0; t < hold.missed_.size(); ++t) {
    const std::uint32_t table = hold.spec_->tables[t].number;
    const Hold::Missed& missed = hold.missed_[t];
    if (missed.rows.empty() || !holds_all(table)) continue;
    const std::vector<bool> may_come = may_come_(table, missed.rows);
    Left& of_table = left.emplace_back(Left{&shelf_of(table), {}});
    for (std::size_t i = 0; i < may_come.size(); ++i) {
      if (may_come[i]) of_table.slots.push_back(missed.slots[i]);
    }
  }
  const auto num_left = [&] {
    std::size_t count = 0;
    for (const auto& [shelf, slots] : left) {
      for (const std::uint32_t slot : slots)
        count += shelf->filling[slot].load(std::memory_order_relaxed) == Filling::left;
    }
    return count;
  };
  Turns& turns = *turns_;
  std::unique_lock lock(turns.mutex);
  turns.turned.wait(lock, [&] {
    if (turns.stopping || turns.failure || !turns.sweeping) return true;
    const std::size_t count = num_left();
    return count <= few_rows || turns.sweep_takes_longer_than(static_cast<double>(count) * worth_of_a_row);
  });
}

// What no sweep has brought by now the hold fetches itself.
void Scratchpad::claim(Hold& hold) {
  const std::lock_guard lock(map_mutex_);
  for (std::size_t t = 0; t < hold.missed_.size(); ++t) {
    Hold::Missed& missed = hold.missed_[t];
    Shelf& shelf = shelf_of(hold.spec_->tables[t].number);
    std::size_t kept = 0;
    for (std::size_t i = 0; i < missed.slots.size(); ++i) {
      std::atomic<Filling>& filling = shelf.filling[missed.slots[i]];
      if (filling.load(std::memory_order_relaxed) == Filling::filled) continue;
      filling.store(Filling::under_way, std::memory_order_relaxed);
      missed.rows[kept] = missed.rows[i];
      missed.slots[kept++] = missed.slots[i];
    }
    missed.rows.resize(kept);
    missed.slots.resize(kept);
  }
}

// Room for the hold's missed rows.
void Scratchpad::stage(const Hold& hold) {
  const std::size_t num_tables = hold.missed_.size();
  if (staging_->tables.size() < num_tables) staging_->tables.resize(num_tables);
  for (std::size_t t = 0; t < num_tables; ++t) {
    const RowTable& table = tables_[hold.spec_->tables[t].number];
    Staging::Rows& staged = staging_->tables[t];
    const std::size_t weights = hold.missed_[t].slots.size() * table.weight_bytes();
    const std::size_t state = hold.missed_[t].slots.size() * table.spec.state_floats;
    if (staged.weights.size() < weights) staged.weights.resize(weights);
    if (staged.state.size() < state) staged.state.resize(state);
  }
}

// What is still missed, and where it is staged: behind the rows that came from the victim cache.
std::vector<TableRows> Scratchpad::wanted_below(Hold& hold) {
  std::vector<TableRows> wanted;
  for (std::size_t t = 0; t < hold.missed_.size(); ++t) {
    const std::uint32_t number = hold.spec_->tables[t].number;
    Hold::Missed& missed = hold.missed_[t];
    if (missed.rows.empty()) continue;
    Staging::Rows& staged = staging_->tables[t];
    wanted.push_back(
        {number,
         missed.rows.size(),
         {missed.rows.data(), staged.weights.data() + missed.num_from_victims * tables_[number].weight_bytes(),
          staged.state.data() + missed.num_from_victims * tables_[number].spec.state_floats}});
  }
  return wanted;
}

// The hold's missed rows go from where they are staged into their slots.
void Scratchpad::insert(Hold& hold) {
  const StageSpans::Timing timing(spans_, Stage::insert);
  for (std::size_t t = 0; t < hold.missed_.size(); ++t) {
    Hold::Missed& missed = hold.missed_[t];
    if (missed.slots.empty()) continue;
    Shelf& shelf = shelf_of(hold.spec_->tables[t].number);
    Staging::Rows& staged = staging_->tables[t];
    best_kernels().scatter(shelf.spec, shelf.rows(), missed.slots.data(),
                           {nullptr, staged.weights.data(), staged.state.data()}, 0, missed.slots.size());
    for (const std::uint32_t slot : missed.slots) {
      shelf.filling[slot].store(Filling::filled, std::memory_order_release);
    }
    missed = {};
  }
}

}  // namespace holdfast
