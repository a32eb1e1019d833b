#include "scratchpad/scratchpad.h"

#include <chrono>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/memory_nodes.h"
#include "scratchpad/scratchpad_turns.h"

namespace holdfast {

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

Scratchpad::Scratchpad(const std::vector<RowTable>& tables, std::uint64_t bytes, Fetch fetch, StageSpans& spans,
                       std::span<const unsigned> nodes, const VictimMemory* victims)
    : tables_(tables),
      fetch_(std::move(fetch)),
      spans_(spans),
      staging_(std::make_unique<Staging>()),
      slot_of_(tables.size()),
      turns_(std::make_shared<Turns>()) {
  const VictimShelving with_victims = shelve_with_victims(tables_, bytes, victims != nullptr ? victims->bytes() : 0);
  const Shelving& shelving = with_victims.shelving;
  shelf_of_table_ = shelving.shelf_of_table;
  for (const Shelving::Size& size : shelving.shelves) {
    if (size.num_slots == 0 && size.num_rows != 0) {
      throw Error(ErrorKind::config, "a scratchpad of " + std::to_string(bytes) + " bytes has no room for a row of " +
                                         std::to_string(size.row_bytes()) + " bytes; make scratchpad_bytes larger");
    }
    shelves_.push_back(std::make_unique<Shelf>(*size.table, size.num_slots, size.num_rows));
  }
  for (const auto& shelf : shelves_) {  // of which nothing was touched yet
    place_on_nodes(shelf->weights.data(), shelf->weights.size(), nodes, "scratchpad_nodes");
    place_on_nodes(shelf->state.data(), shelf->state.size(), nodes, "scratchpad_nodes");
  }
  if (victims != nullptr) victims_.emplace(*victims, shelves_, with_victims.num_sets);
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
  std::size_t tight = 0;
  while (tight < shelves_.size() && wanted[tight] <= shelves_[tight]->num_slots) ++tight;
  if (tight == shelves_.size()) return;
  const std::uint64_t bytes =
      least_bytes(tables_, wanted) + (victims_ ? VictimCache::dram_bytes(victims_->num_sets()) : 0);
  const Shelf& shelf = *shelves_[tight];
  // Room for rows of another size, however much there is, is of no use to these.
  throw Error(ErrorKind::batch_too_large, "one batch has " + std::to_string(wanted[tight]) + " rows of " +
                                              std::to_string(shelf.weight_bytes + shelf.state_bytes) +
                                              " bytes, the scratchpad has room for " + std::to_string(shelf.num_slots) +
                                              " of that size; it needs scratchpad_bytes of " + std::to_string(bytes) +
                                              " or more");
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
  const auto is_ready = [&] { return hold.order_ <= turns.newest_ready; };
  turns.turned.wait(lock, [&] { return is_ready() || turns.failure || turns.has_no_room(hold.order_); });
  if (turns.failure) std::rethrow_exception(turns.failure);
  return is_ready();
}

void Scratchpad::fail(std::exception_ptr failure) {
  {
    const std::lock_guard lock(turns_->mutex);
    if (!turns_->failure) turns_->failure = std::move(failure);
  }
  turns_->turned.notify_all();
}

}  // namespace holdfast
