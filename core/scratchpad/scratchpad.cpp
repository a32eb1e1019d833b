#include "scratchpad/scratchpad.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace holdfast {
namespace {

constexpr std::uint32_t no_slot = ~std::uint32_t{0};

// So few missed rows of a hold are fetched beside a sweep: in a small part of a step's time.
constexpr std::size_t few_rows = 4096;
// A sweep is waited for as long as it takes no longer yet than fetching what a hold lacks twenty times: as much as the
// batches after it would lack in that time. In its first moments nobody knows how long it takes.
constexpr std::chrono::duration<double> worth_of_a_row{20 * 25e-6};
constexpr std::chrono::duration<double> first_moments{0.25};

}  // namespace

struct Scratchpad::Turns {
  std::mutex mutex;  // guards all of it
  std::condition_variable turned;
  std::vector<std::shared_ptr<Hold>> expected;
  std::map<std::uint64_t, const Hold*> live;  // holds that are not let go
  std::set<std::uint64_t> given_up;           // of these
  bool out_of_order = false;  // a hold was let go before an older one: its slots may be free though the rule holds them
  std::uint64_t num_holds = 0;
  std::uint64_t waiting = 0;  // the hold that is being collected and finds no room, or 0
  std::uint64_t waiting_for = 0;  // the oldest live hold when it last looked
  std::exception_ptr failure;
  bool stopping = false;
  bool sweeping = false;
  std::chrono::steady_clock::time_point sweep_began;
  double swept = 0;  // its share
  ScratchpadCounters counters{};

  std::uint64_t oldest_live() const { return live.begin()->first; }
  void give_up(Hold& hold) {
    hold.given_up_ = true;
    given_up.insert(hold.order_);
  }
  // Does the hold of `order` find no room, whatever those that were given up before it leave?
  bool has_no_room(std::uint64_t order) const {
    return waiting != 0 && waiting <= order && waiting_for == oldest_live() && !out_of_order &&
           (given_up.empty() || *given_up.begin() > waiting);
  }
  bool sweep_takes_longer_than(std::chrono::duration<double> limit) const {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - sweep_began;
    return took > first_moments && took * (1 - swept) > limit * swept;
  }
};

Scratchpad::Hold::~Hold() {
  {
    const std::lock_guard lock(turns_->mutex);
    if (order_ == 0) return;
    if (order_ != turns_->oldest_live()) turns_->out_of_order = true;
    turns_->live.erase(order_);
    turns_->given_up.erase(order_);
  }
  turns_->turned.notify_all();
}

// Missed rows on their way into slots.
struct Scratchpad::Staging {
  struct Rows {
    std::vector<std::byte> weights;
    std::vector<float> state;
  };
  std::vector<Rows> tables;
};

Scratchpad::Scratchpad(const std::vector<RowTable>& tables, std::uint64_t bytes, Fetch fetch, StageSpans& spans)
    : tables_(tables),
      fetch_(std::move(fetch)),
      spans_(spans),
      staging_(std::make_unique<Staging>()),
      slot_of_(tables.size()),
      turns_(std::make_shared<Turns>()) {
  const Shelving shelving = shelve(tables_, bytes);
  shelf_of_table_ = shelving.shelf_of_table;
  for (const Shelving::Size& size : shelving.shelves) {
    if (size.num_slots == 0 && size.num_rows != 0) {
      throw Error(ErrorKind::config, "a scratchpad of " + std::to_string(bytes) + " bytes has no room for a row of " +
                                         std::to_string(size.row_bytes()) + " bytes; make scratchpad_bytes larger");
    }
    shelves_.push_back(std::make_unique<Shelf>(*size.table, size.num_slots, size.num_rows));
  }
  for (std::uint32_t t = 0; t < tables_.size(); ++t) {
    const std::vector<RowPiece> pieces = tables_[t].owned_pieces();
    if (holds_all(t) && pieces.size() == 1) slot_of_[t] = SlotMap(pieces[0].first, pieces[0].num_rows);
  }
}

Scratchpad::~Scratchpad() {
  std::vector<std::shared_ptr<Hold>> expected;  // they hold the turns, which hold them
  {
    const std::lock_guard lock(turns_->mutex);
    turns_->stopping = true;
    expected.swap(turns_->expected);
  }
  turns_->turned.notify_all();
  expected.clear();
  collecting_.stop();
  exchanging_.stop();
}

std::uint64_t Scratchpad::num_rows() const {
  return std::accumulate(shelves_.begin(), shelves_.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const auto& shelf) { return sum + shelf->num_slots; });
}

ScratchpadCounters Scratchpad::counters() const {
  const std::lock_guard lock(turns_->mutex);
  return turns_->counters;
}

// Asking for holds.

void Scratchpad::expect(std::shared_ptr<const Plan> plan) {
  forget_dropped_plans();
  auto hold = enqueue(plan, true);
  const std::lock_guard lock(turns_->mutex);
  turns_->expected.push_back(std::move(hold));
}

std::shared_ptr<const Scratchpad::Hold> Scratchpad::hold(const std::shared_ptr<const Plan>& plan,
                                                         const std::function<void()>& make_room) {
  const auto began = std::chrono::steady_clock::now();
  check_fits(*plan);
  forget_dropped_plans();
  auto hold = take_expected(plan);
  if (!hold) hold = enqueue(plan, false);
  bool is_ready = wait_until_ready(*hold);
  if (!is_ready) {
    make_room();
    is_ready = wait_until_ready(*hold);
  }
  if (!is_ready) {
    give_up_expected();
    is_ready = wait_until_ready(*hold);
  }
  if (!is_ready) {
    {
      const std::lock_guard lock(turns_->mutex);
      turns_->give_up(*hold);
    }
    turns_->turned.notify_all();
    throw Error(ErrorKind::batch_too_large,
                "the forward passes of this step need more than the " + std::to_string(num_rows()) +
                    " rows that the scratchpad has room for; make scratchpad_bytes larger, the batch smaller, or "
                    "evaluate under torch.no_grad()");
  }
  const std::chrono::duration<double> stalled = std::chrono::steady_clock::now() - began;
  const std::lock_guard lock(turns_->mutex);
  turns_->counters.seconds_stalled += stalled.count();
  return hold;
}

void Scratchpad::check_fits(const Plan& plan) const {
  std::vector<std::uint64_t> wanted(shelves_.size());
  for (std::size_t t = 0; t < plan.tables.size(); ++t) {
    wanted[shelf_of_table_[plan.spec->tables[t].number]] += plan.tables[t].num_unique();
  }
  bool fits = true;
  for (std::size_t i = 0; i < shelves_.size(); ++i) fits = fits && wanted[i] <= shelves_[i]->num_slots;
  if (fits) return;
  const std::uint64_t bytes = least_bytes(tables_, wanted);
  throw Error(ErrorKind::batch_too_large, "one batch has " + std::to_string(plan.num_unique()) +
                                              " rows, the scratchpad has room for " + std::to_string(num_rows()) +
                                              "; it needs scratchpad_bytes of " + std::to_string(bytes) + " or more");
}

std::shared_ptr<Scratchpad::Hold> Scratchpad::enqueue(const std::shared_ptr<const Plan>& plan, bool announced) {
  const std::shared_ptr<Hold> hold(new Hold(turns_, plan, announced));
  {
    const std::lock_guard lock(turns_->mutex);
    if (turns_->failure) std::rethrow_exception(turns_->failure);
    turns_->live.emplace(turns_->num_holds + 1, hold.get());
    hold->order_ = ++turns_->num_holds;
  }
  collecting_.submit([this, of = hold]() mutable { collect(std::move(of)); });
  return hold;
}

std::shared_ptr<Scratchpad::Hold> Scratchpad::take_expected(const std::shared_ptr<const Plan>& plan) {
  const std::lock_guard lock(turns_->mutex);
  auto& expected = turns_->expected;
  const auto found = std::find_if(expected.begin(), expected.end(),
                                  [&](const std::shared_ptr<Hold>& hold) { return hold->plan_.lock() == plan; });
  if (found == expected.end()) return nullptr;
  auto hold = std::move(*found);
  expected.erase(found);
  return hold;
}

void Scratchpad::forget_dropped_plans() {
  std::vector<std::shared_ptr<Hold>> dropped;  // let go after the lock
  const std::lock_guard lock(turns_->mutex);
  auto& expected = turns_->expected;
  const auto kept = std::stable_partition(expected.begin(), expected.end(),
                                          [](const std::shared_ptr<Hold>& hold) { return !hold->plan_.expired(); });
  for (auto hold = kept; hold != expected.end(); ++hold) {
    turns_->give_up(**hold);
    dropped.push_back(std::move(*hold));
  }
  expected.erase(kept, expected.end());
  if (!dropped.empty()) turns_->turned.notify_all();
}

// Announcements are hints: their plans are held when they are asked for.
void Scratchpad::give_up_expected() {
  std::vector<std::shared_ptr<Hold>> given_up;
  {
    const std::lock_guard lock(turns_->mutex);
    given_up.swap(turns_->expected);
    for (const auto& hold : given_up) turns_->give_up(*hold);
  }
  given_up.clear();
  turns_->turned.notify_all();
}

bool Scratchpad::wait_until_ready(const Hold& hold) {
  Turns& turns = *turns_;
  std::unique_lock lock(turns.mutex);
  turns.turned.wait(lock, [&] { return hold.ready_ || turns.failure || turns.has_no_room(hold.order_); });
  if (turns.failure) std::rethrow_exception(turns.failure);
  return hold.ready_;
}

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
    std::optional<std::uint32_t> slot = take_slot(shelf, hold.oldest_live_);
    while (!slot) {
      lock.unlock();
      const bool changed = wait_for_room(hold);
      lock.lock();
      if (!changed) {  // given up: what was collected is exchanged, so that every slot is filled
        std::erase(slots, no_slot);
        return;
      }
      slot = take_slot(shelf, hold.oldest_live_);
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

// A slot without a row. The caller holds map_mutex_.
std::optional<std::uint32_t> Scratchpad::take_slot(Shelf& shelf, std::uint64_t oldest_live) {
  if (shelf.num_used < shelf.num_slots) return static_cast<std::uint32_t>(shelf.num_used++);
  return shelf.evict(oldest_live, slot_of_);
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
    const std::size_t num_tables = hold->spec_->tables.size();
    if (staging_->tables.size() < num_tables) staging_->tables.resize(num_tables);
    std::vector<TableRows> wanted;
    for (std::size_t t = 0; t < num_tables; ++t) {
      const std::uint32_t number = hold->spec_->tables[t].number;
      std::vector<std::uint64_t>& rows = hold->missed_[t].rows;
      if (rows.empty()) continue;
      Staging::Rows& staged = staging_->tables[t];
      const std::size_t weights = rows.size() * tables_[number].weight_bytes();
      const std::size_t state = rows.size() * tables_[number].spec.state_floats;
      if (staged.weights.size() < weights) staged.weights.resize(weights);
      if (staged.state.size() < state) staged.state.resize(state);
      wanted.push_back({number, rows.size(), {rows.data(), staged.weights.data(), staged.state.data()}});
    }
    if (!wanted.empty()) {
      {
        const StageSpans::Timing timing(spans_, Stage::exchange);
        fetch_(wanted);
      }
      insert(*hold, wanted);
    }
    {
      const std::lock_guard lock(turns_->mutex);
      hold->ready_ = true;
    }
    hold.reset();  // before whoever waits goes on: a step may be over before this thread runs again
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

// `fetched` are the hold's missed rows, table by table.
void Scratchpad::insert(Hold& hold, std::span<const TableRows> fetched) {
  const StageSpans::Timing timing(spans_, Stage::insert);
  auto of_table = fetched.begin();
  for (Hold::Missed& missed : hold.missed_) {
    if (missed.rows.empty()) continue;
    Shelf& shelf = shelf_of(of_table->table);
    best_kernels().scatter(shelf.spec, shelf.rows(), missed.slots.data(), of_table->rows, 0, missed.slots.size());
    for (const std::uint32_t slot : missed.slots) {
      shelf.filling[slot].store(Filling::filled, std::memory_order_release);
    }
    missed = {};
    ++of_table;
  }
}

void Scratchpad::fail(std::exception_ptr failure) {
  {
    const std::lock_guard lock(turns_->mutex);
    if (!turns_->failure) turns_->failure = std::move(failure);
  }
  turns_->turned.notify_all();
}

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
