#include "scratchpad/log_backend.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/error.h"
#include "base/memory_nodes.h"
#include "base/parallel.h"
#include "step/gradients.h"
#include "step/key_rows.h"
#include "step/lookup.h"

namespace holdfast {
namespace {

// Records like the largest that the log must have room for: two on their way to become durable, the one between the
// newest dense state and them, the one that is being merged, one that does not fit before the ring's end, and one more.
constexpr std::uint64_t least_records = 6;

std::vector<std::uint64_t> num_rows_of(const Plan& plan) {
  std::vector<std::uint64_t> num_rows;
  for (const TablePlan& table : plan.tables) num_rows.push_back(table.num_unique());
  return num_rows;
}

WorkingRows rows_from(std::size_t begin, const WorkingRows& rows, const RowTable& table) {
  return {rows.rows + begin, rows.weights + begin * table.weight_bytes(), rows.state + begin * table.spec.state_floats,
          rows.keys == nullptr ? nullptr : rows.keys + begin};
}

// The new rows of `old` lie compact in `fresh`, from `begin` on.
void hold_back(const RowTable& table, const WorkingRows& old, const WorkingRows& fresh, std::size_t begin,
               std::size_t end) {
  if (table.key_policy.admission.admits_all()) return;
  hold_back_keys(table, old, {fresh.weights, fresh.state}, begin, end, [&](std::size_t u) { return u - begin; });
}

// Room for so many rows of these numbers, the thread's own until it asks again.
WorkingRows scratch_rows(std::uint64_t* rows, std::size_t count, const RowTable& table) {
  static thread_local std::vector<std::byte> memory;
  const std::size_t weight_bytes = format::line_up(count * table.weight_bytes());
  const std::size_t bytes = format::line_bytes + weight_bytes + count * table.state_bytes();
  if (memory.size() < bytes) memory.resize(bytes);
  std::byte* const weights = line_aligned(memory);
  return {rows, weights, reinterpret_cast<float*>(weights + weight_bytes)};
}

}  // namespace

void LogBackend::create(const std::string& directory, const std::vector<RowTable>& tables, std::uint64_t log_bytes,
                        const StepMark& mark, bool adopt, const Identity& identity) {
  LogStore::create(directory, tables, log_bytes, Caching::direct, mark, adopt, identity);
}

LogBackend::LogBackend(const std::string& directory, Superblock& superblock, Background& background, Options options)
    : RowBackend(superblock.row_tables()),
      superblock_(superblock),
      background_(background),
      options_(std::move(options)),
      store_(directory, tables(),
             {.watcher = options_.watcher,
              .dial = options_.dial,
              .log_dial = options_.log_dial,
              .ring_bytes = superblock.header().log_bytes,
              .identity = superblock.identity()}),
      newest_(store_.scan()) {
  check_nodes(options_.scratchpad_nodes, "scratchpad_nodes");
  if (options_.victims) victims_.emplace(*options_.victims);
}

// Recovery.

void LogBackend::check_roll_back(std::uint64_t epoch, std::uint64_t step) {
  if (const auto broken = store_.broken_checkpoint(); broken && superblock_.epoch().clean != 0) {
    throw Error(ErrorKind::corrupted, *broken);
  }
  if (store_.merged_step() > step) {
    throw Error(ErrorKind::corrupted, store_.place_of_checkpoint() + ": rows are merged up to step " +
                                          std::to_string(store_.merged_step()) +
                                          ", and the newest dense state that holds is of step " + std::to_string(step));
  }
  store_.index(epoch, step);
}

RolledBack LogBackend::roll_back(std::uint64_t epoch, std::uint64_t step) {
  store_.recover(epoch, step);
  return {newest_.step - step, 0};
}

void LogBackend::start(std::uint64_t epoch, const StepMark& mark) {
  begin_life(epoch, mark);
  merger_ = std::make_unique<LogMerger>(store_, options_.spans);
  if (options_.warm) begin_to_warm();  // before a merge may begin
  merger_->allow(mark.step);
}

void LogBackend::begin_life(std::uint64_t epoch, const StepMark& mark) {
  format::CommitRecord fresh{};
  fresh.epoch = epoch;
  fresh.step = mark.step;
  fresh.cursor = mark.cursor;
  fresh.row_updates = mark.row_updates;
  fresh.last_record = format::no_position;
  superblock_.write_commit(fresh);
}

void LogBackend::check_go_back(std::uint64_t epoch, std::uint64_t step) { store_.check_go_back(epoch, step); }

// Only memory has what was not committed: rows of the scratchpad, which are read again below, and those of steps that are
// undone. Their holds are let go after that, so that no merge takes them from there before.
RolledBack LogBackend::go_back(std::uint64_t epoch, const StepMark& mark) {
  const std::uint64_t num_steps = store_.last().step - mark.step;
  merger_->pause();  // it rests for as long as others read
  if (warming_) warming_->stop();  // what it has read may be of a step that is undone
  if (scratchpad_) scratchpad_->settle();
  std::uint64_t num_rows = 0;
  store_.go_back(epoch, mark.step, [&](std::vector<std::vector<std::uint64_t>> rows) {
    for (const TableRows& of_table : LogStore::tables_of(drafts_)) {
      auto& again = rows[of_table.table];
      for (std::size_t i = 0; i < of_table.num_rows; ++i) again.push_back(of_table.rows.rows[i] & ~fresh_bit);
    }
    for (std::uint32_t table = 0; table < rows.size(); ++table) {
      std::vector<std::uint64_t>& again = rows[table];
      std::ranges::sort(again);
      again.erase(std::unique(again.begin(), again.end()), again.end());
      num_rows += again.size();
      if (scratchpad_) scratchpad_->read_again(table, std::move(again));
    }
  });
  drafts_.clear();
  captures_.clear();
  updated_holds_.clear();
  {
    const std::lock_guard lock(mutex_);
    while (!unmergeable_.empty() && unmergeable_.back().step > mark.step) unmergeable_.pop_back();
  }
  begin_life(epoch, mark);
  merger_->allow(mark.step);
  merger_->resume();
  return {num_steps, num_rows};
}

// A scratchpad that has no room for a row is an error of the first step that wants one, not of opening.
void LogBackend::begin_to_warm() {
  try {
    warming_ = std::make_unique<Warming>(store_, scratchpad());
  } catch (const Error&) {
  }
}

// Capture.

Scratchpad& LogBackend::scratchpad() {
  if (!scratchpad_) {
    scratchpad_ = std::make_unique<Scratchpad>(
        tables(), options_.scratchpad_bytes, [this](std::span<const TableRows> wanted) { store_.fetch(wanted); },
        options_.spans, options_.scratchpad_nodes, victims_ ? &*victims_ : nullptr);
    // Looked at afterwards: by then it is known of every hold that was found to be over.
    store_.merge_from_memory([pad = scratchpad_.get(), is_logged = is_logged_](std::uint32_t table,
                                                                               std::span<const std::uint64_t> rows,
                                                                               std::byte* out, std::size_t stride) {
      std::vector<bool> has = pad->copy_settled(table, rows, out, stride);
      if (!*is_logged) has.clear();
      return has;
    });
  }
  return *scratchpad_;
}

void LogBackend::announce(std::shared_ptr<const Plan> plan) { scratchpad().expect(std::move(plan)); }

std::shared_ptr<Capture> LogBackend::capture(std::shared_ptr<const Plan> plan, std::uint64_t step) {
  std::vector<TableRows> record;
  for (std::size_t t = 0; t < plan->tables.size(); ++t) {
    record.push_back({plan->spec->tables[t].number, plan->tables[t].num_unique(), {}});
  }
  const std::uint64_t record_bytes = store_.record_bytes(record);
  check_fits_log(record_bytes, "one batch's");
  std::erase_if(captures_, [](const auto& capture) { return capture.expired(); });
  auto capture = std::make_shared<HeldCapture>();
  capture->hold = scratchpad().hold(plan, [this] { background_.drain(); });
  capture->plan = plan;
  capture->step = step;
  capture->order = ++num_captures_;
  capture->tables = borrow_rows(*plan->spec, num_rows_of(*plan), capture->memory);
  name_keys(*plan, capture->tables);
  for_rows(*plan, [&](std::size_t t, std::size_t begin, std::size_t end) {
    const std::uint64_t* rows = plan->tables[t].rows.data();
    std::copy(rows + begin, rows + end, capture->tables[t].rows + begin);
    const std::uint32_t number = plan->spec->tables[t].number;
    scratchpad_->gather(number, capture->hold->slots(t), capture->tables[t], begin, end);
    if (tables()[number].has_keys()) start_keys(tables()[number], living_of(number), capture->tables[t], begin, end);
  });
  capture->bytes = record_bytes;
  captures_.push_back(capture);
  return capture;
}

void LogBackend::check_fits_log(std::uint64_t record_bytes, const char* whose) const {
  if (record_bytes * least_records <= store_.ring_bytes()) return;
  throw Error(ErrorKind::batch_too_large,
              std::string(whose) + " rows take " + std::to_string(record_bytes) + " bytes of row log, which has " +
                  std::to_string(store_.ring_bytes()) + " and needs room for " + std::to_string(least_records) +
                  " such steps; make the pool with log_bytes of " + std::to_string(record_bytes * least_records) +
                  " or more, or the batch smaller");
}

std::vector<WorkingRows> LogBackend::borrow_rows(const CollectionSpec& spec, const std::vector<std::uint64_t>& num_rows,
                                                 SpareBuffers::Borrowed& memory) {
  std::size_t bytes = 0;
  std::vector<format::RecordSection> sections;
  for (std::size_t t = 0; t < spec.tables.size(); ++t) {
    const std::uint32_t number = spec.tables[t].number;
    sections.push_back(place_section(tables()[number], number, num_rows[t], bytes));
  }
  memory = spare_.borrow(bytes);
  std::vector<WorkingRows> rows;
  for (const format::RecordSection& section : sections) rows.push_back(rows_of(section, memory.data()));
  return rows;
}

void LogBackend::keep_rows(std::uint32_t table, std::vector<std::uint64_t> rows) {
  const RowTable& what = tables()[table];
  auto spec = std::make_shared<CollectionSpec>();
  spec->tables = {{table, what.num_rows, what.spec.dim, Pooling::sum}};
  auto plan = std::make_shared<Plan>();
  plan->spec = std::move(spec);
  plan->tables.emplace_back().rows = std::move(rows);
  scratchpad().keep(*scratchpad().hold(plan, [this] { background_.drain(); }));
}

void LogBackend::read(const Plan& plan, const std::vector<WorkingRows>& rows) { scratchpad().read(plan, rows); }

// Update.

std::vector<LogBackend::Overwritten> LogBackend::overwritten_by(const HeldCapture& capture) const {
  std::vector<Overwritten> tables;
  for (std::size_t t = 0; t < capture.tables.size(); ++t) {
    tables.push_back({capture.plan->tables[t].num_unique(), capture.tables[t], capture.hold->slots(t)});
  }
  return tables;
}

std::optional<NamedRow> LogBackend::overwrite(const CollectionSpec& spec, const std::vector<Overwritten>& tables,
                                              const NewRows& new_rows) {
  std::vector<TableRows> record;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    if (tables[t].num_rows != 0) record.push_back({spec.tables[t].number, tables[t].num_rows, tables[t].old});
  }
  std::ranges::sort(record, {}, &TableRows::table);
  RecordDraft draft = store_.draft(record);
  std::vector<std::size_t> section_of;
  for (const CollectionSpec::Table& table : spec.tables) {
    const auto section = std::ranges::lower_bound(record, table.number, {}, &TableRows::table);
    section_of.push_back(static_cast<std::size_t>(section - record.begin()));
  }
  NonFiniteRow non_finite;
  for_rows(
      spec, [&](std::size_t t) { return tables[t].num_rows; },
      [&](std::size_t t, std::size_t begin, std::size_t end) {
        const std::uint32_t number = spec.tables[t].number;
        const WorkingRows fresh = scratch_rows(tables[t].old.rows + begin, end - begin, this->tables()[number]);
        non_finite.note(this->tables()[number], tables[t].old, begin + new_rows(t, begin, end, fresh), end);
        scratchpad_->scatter(number, tables[t].slots + begin, fresh, 0, end - begin);
        store_.pack_rows(draft, section_of[t], fresh, begin, end - begin);
      },
      [&](std::size_t t) { return store_.unit_rows(spec.tables[t].number); });
  drafts_.push_back(std::move(draft));
  return non_finite.first();
}

std::optional<NamedRow> LogBackend::update(const std::shared_ptr<const Capture>& capture, const float* grad,
                                           const UpdateSpec& update) {
  const auto& held = static_cast<const HeldCapture&>(*capture);
  const Plan& plan = *capture->plan;
  updated_holds_.push_back(held.hold);
  return overwrite(*plan.spec, overwritten_by(held),
                   [&](std::size_t t, std::size_t begin, std::size_t end, const WorkingRows& fresh) {
                     const RowTable& table = tables()[plan.spec->tables[t].number];
                     Occurrences occurrences = occurrences_of(plan.tables[t]);
                     occurrences.row_start += begin;
                     const std::size_t non_finite =
                         best_kernels().update_compact(table.spec, update, rows_from(begin, capture->tables[t], table),
                                                       occurrences, grad, {fresh.weights, fresh.state}, 0, end - begin);
                     hold_back(table, capture->tables[t], fresh, begin, end);
                     return non_finite;
                   });
}

std::optional<NamedRow> LogBackend::update(const SummedGradients& gradients, const UpdateSpec& update) {
  const CollectionSpec& spec = *gradients.spec;
  std::vector<std::vector<std::uint32_t>> slots(spec.tables.size());
  parallel_for(slots.size(), [&](std::size_t t) {
    slots[t].resize(gradients.num_rows[t]);
    for (const auto& capture : gradients.captures) {
      const std::uint32_t* slots_of_capture = static_cast<const HeldCapture&>(*capture).hold->slots(t);
      const auto positions = positions_among(gradients.rows()[t].rows, capture->plan->tables[t].rows);
      for (std::size_t u = 0; u < positions.size(); ++u) slots[t][positions[u]] = slots_of_capture[u];
    }
  });
  std::vector<Overwritten> overwritten;
  for (std::size_t t = 0; t < slots.size(); ++t) {
    overwritten.push_back({gradients.num_rows[t], gradients.rows()[t], slots[t].data()});
  }
  for (const auto& capture : gradients.captures) {
    updated_holds_.push_back(static_cast<const HeldCapture&>(*capture).hold);
  }
  return overwrite(spec, overwritten, [&](std::size_t t, std::size_t begin, std::size_t end, const WorkingRows& fresh) {
    const RowTable& table = tables()[spec.tables[t].number];
    const std::size_t non_finite = best_kernels().update_compact_from_sums(
        table.spec, update, rows_from(begin, gradients.rows()[t], table),
        gradients.sums[t].data() + begin * table.spec.dim, {fresh.weights, fresh.state}, 0, end - begin);
    hold_back(table, gradients.rows()[t], fresh, begin, end);
    return non_finite;
  });
}

std::optional<NamedRow> LogBackend::put(const std::shared_ptr<const Capture>& capture,
                                        const std::vector<ReadyRows>& ready) {
  const auto& held = static_cast<const HeldCapture&>(*capture);
  const CollectionSpec& spec = *capture->plan->spec;
  updated_holds_.push_back(held.hold);
  return overwrite(
      spec, overwritten_by(held), [&](std::size_t t, std::size_t begin, std::size_t end, const WorkingRows& fresh) {
        const RowTable& table = tables()[spec.tables[t].number];
        const std::size_t weight_bytes = table.weight_bytes();
        const std::size_t state_floats = table.spec.state_floats;
        std::copy(ready[t].weights + begin * weight_bytes, ready[t].weights + end * weight_bytes, fresh.weights);
        std::copy(ready[t].state + begin * state_floats, ready[t].state + end * state_floats, fresh.state);
        return best_kernels().first_non_finite(table.spec, {fresh.weights, fresh.state}, 0, end - begin);
      });
}

std::uint64_t LogBackend::materialize(const Plan&) {
  throw Error(ErrorKind::config, store_.log_name() + ": rows of a log store have no places in memory; reach them " +
                                     "through a scratchpad, or keep them in a pool of medium 'memory'");
}

// Commit.

std::function<void()> LogBackend::end_step(const StepMark& mark) {
  check_fits_log(store_.record_bytes(drafts_), "the step's");
  // Both in shared pointers, because what the background runs is copyable.
  const auto record = std::make_shared<PackedRecord>(store_.seal(mark, std::exchange(drafts_, {})));
  const auto overwriting = std::make_shared<Overwriting>(Overwriting{{}, is_logged_});
  overwriting->holds.swap(updated_holds_);
  captures_.clear();
  {
    const std::lock_guard lock(mutex_);
    unmergeable_.push_back({mark.step, record->bytes()});
    largest_record_bytes_ = std::max(largest_record_bytes_, record->bytes());
  }
  return [this, record, overwriting] {
    {
      const StageSpans::Timing timing(options_.spans, Stage::append);
      append(*record);
    }
    overwriting->holds.clear();
    const StageSpans::Timing timing(options_.spans, Stage::sync);
    store_.sync();
  };
}

void LogBackend::append(const PackedRecord& record) {
  auto began = std::chrono::steady_clock::now();
  const bool waited = merger_->wait_for_turn(record.bytes());
  if (waited) note_stall(began);
  if (store_.append(record)) return;
  began = std::chrono::steady_clock::now();
  append_when_there_is_room(record);
  note_stall(began);
}

void LogBackend::note_stall(std::chrono::steady_clock::time_point began) {
  const std::chrono::duration<double> stalled = std::chrono::steady_clock::now() - began;
  const std::lock_guard lock(mutex_);
  seconds_without_room_ += stalled.count();
}

void LogBackend::append_when_there_is_room(const PackedRecord& record) {
  options_.finish_dense(record.step());
  // A fetch may still be reading where the record is to go: that is over in milliseconds.
  constexpr int turns = 1000;
  for (int turn = 0; turn < turns; ++turn) {
    const bool merged = merger_->make_room();
    if (store_.append(record)) return;
    if (!merged) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  throw Error(ErrorKind::failed, "the row log (" + std::to_string(store_.ring_bytes()) + " bytes, " +
                                     std::to_string(store_.used_bytes()) + " in use) has no room for step " +
                                     std::to_string(record.step()) +
                                     ", and nothing more of it may be merged before a newer dense state " +
                                     "is durable; make the pool with a larger log_bytes, or lower dense_interval");
}

void LogBackend::note_recoverable(std::uint64_t step) {
  {
    const std::lock_guard lock(mutex_);
    while (!unmergeable_.empty() && unmergeable_.front().step <= step) unmergeable_.pop_front();
  }
  merger_->allow(step);
  merger_->wake();
}

void LogBackend::empty_log() {
  while (store_.used_bytes() != 0) {
    if (merger_->make_room()) continue;
    throw Error(ErrorKind::step, store_.log_name() + ": it holds steps that recovery may still take back");
  }
}

// More than half of the log may not be merged, or is about to be so.
bool LogBackend::log_is_low() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t bytes = 2 * largest_record_bytes_;
  for (const Logged& logged : unmergeable_) bytes += logged.bytes;
  return bytes > store_.ring_bytes() / 2;
}

bool LogBackend::step_has_begun() const {
  return !drafts_.empty() ||
         std::any_of(captures_.begin(), captures_.end(), [](const auto& capture) { return !capture.expired(); });
}

void LogBackend::import_rows(std::size_t table, const ImportedRows& imported) {
  warming_.reset();
  store_.merge_from_memory(nullptr);
  scratchpad_.reset();  // it may hold what the rows were
  store_.import_rows(static_cast<std::uint32_t>(table), imported);
}

void LogBackend::end_steps() { merger_->let_through(); }

// An update that was not committed is in memory only.
void LogBackend::close(bool) {
  stop();
  store_.sync();
  store_.sync_home();
  const StepMark last = store_.last();
  format::CommitRecord commit = superblock_.commit();
  commit.step = last.step;
  commit.cursor = last.cursor;
  commit.row_updates = last.row_updates;
  superblock_.write_commit(commit);
}

void LogBackend::stop() noexcept {
  if (warming_) warming_->stop();
  merger_->stop();
}

std::optional<Traffic> LogBackend::traffic() const {
  const LogStoreCounters store = store_.counters();
  Traffic traffic{};
  if (scratchpad_) {
    const ScratchpadCounters pad = scratchpad_->counters();
    traffic.rows_hit = pad.rows_hit;
    traffic.rows_missed = pad.rows_missed;
    traffic.demand_fetches = pad.rows_demanded;
    traffic.window_shrunk = pad.holds_delayed;
    traffic.stall_seconds = pad.seconds_stalled;
    traffic.scratchpad_rows = scratchpad_->num_rows();
    traffic.rows_from_victims = pad.rows_from_victims;
    traffic.victim_rows = scratchpad_->num_victims();
  }
  if (warming_) {
    traffic.rows_warmed = warming_->num_rows();
    traffic.is_warming = !warming_->is_over();
  }
  {
    const std::lock_guard lock(mutex_);
    traffic.log_stall_seconds = seconds_without_room_;
  }
  traffic.rows_fetched = store.fetched_rows;
  traffic.rows_from_log = store.log_rows_fetched;
  traffic.rows_initial = store.initial_rows;
  traffic.fetched_bytes = store.fetched_bytes;
  traffic.fetch_reads = store.fetch_requests;
  traffic.updated_rows = store.appended_rows;
  traffic.updated_row_bytes = store.appended_row_bytes;
  traffic.appended_bytes = store.appended_bytes;
  traffic.merges = store.merges;
  traffic.merged_bytes = store.merged_bytes;
  traffic.standing_bytes = store.standing_bytes;
  traffic.log_bytes_read = store.merge_log_bytes_read;
  traffic.home_bytes_read = store.home_bytes_read;
  traffic.home_bytes_written = store.home_bytes_written;
  traffic.merge_log_reads = store.merge_log_requests;
  traffic.merge_reads = store.home_read_requests;
  traffic.merge_writes = store.home_write_requests;
  traffic.index_entries = store_.index_entries();
  traffic.index_bytes = store_.index_bytes();
  return traffic;
}

}  // namespace holdfast
