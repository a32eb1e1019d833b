#include "in_place/in_place_backend.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <span>
#include <utility>

#include "base/checksum.h"
#include "base/error.h"
#include "base/parallel.h"
#include "layout/pool_files.h"
#include "step/gradients.h"
#include "step/key_rows.h"
#include "step/lookup.h"

namespace holdfast {

using format::CommitRecord;
using format::RecordHeader;
using format::RecordSection;

namespace {

constexpr std::size_t ranges_asked_ahead = 16;

// Of each row of `now`: which of `then` it is, into `forward`. Returns the ranges of `then` that `now` does not have.
// Which of the two comes next cannot be predicted, so the merge does not branch on it.
std::vector<std::pair<std::size_t, std::size_t>> split_rows(std::span<const std::uint64_t> now,
                                                            std::span<const std::uint64_t> then,
                                                            std::vector<std::uint32_t>& forward) {
  forward.assign(now.size(), no_forward);
  std::vector<std::uint32_t> shared(std::min(now.size(), then.size()) + 1);  // of `then`, ascending
  std::size_t num_shared = 0;
  for (std::size_t u = 0, v = 0; u < now.size() && v < then.size();) {
    const std::uint64_t a = now[u], b = then[v];
    forward[u] = a == b ? static_cast<std::uint32_t>(v) : no_forward;
    shared[num_shared] = static_cast<std::uint32_t>(v);
    num_shared += a == b;
    u += a <= b;
    v += b <= a;
  }
  std::vector<std::pair<std::size_t, std::size_t>> own;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < num_shared; ++i) {
    if (begin < shared[i]) own.emplace_back(begin, shared[i]);
    begin = std::size_t{shared[i]} + 1;
  }
  if (begin < then.size()) own.emplace_back(begin, then.size());
  return own;
}

// Zeroes the bytes between what a section holds and the lines that it takes: they are part of the checksum.
void clear_gaps(const RecordSection& section, const RowTable& table, std::byte* data) {
  const auto clear = [&](std::uint64_t offset, std::size_t bytes) {
    std::memset(data + offset + bytes, 0, format::line_up(bytes) - bytes);
  };
  clear(section.rows_offset, section.num_rows * 8);
  clear(section.weights_offset, section.num_rows * table.weight_bytes());
  clear(section.state_offset, section.num_rows * table.state_bytes());
}

}  // namespace

void InPlaceBackend::create(Medium& medium, const std::vector<RowTable>& tables, std::uint64_t log_bytes,
                            bool row_checksums, bool adopt, const Identity& identity) {
  if (adopt) {
    InPlaceStore(medium, tables, row_checksums, false);  // throws where a file is not there
  } else {
    InPlaceStore::create(medium, tables, row_checksums);
  }
  const auto log = create_labelled(medium, log_name, log_bytes, Access::sequential, identity, {format::FileKind::log});
  log->sync();  // its size, before the superblock
}

InPlaceBackend::InPlaceBackend(Medium& medium, Superblock& superblock, Background& background, Options options)
    : RowBackend(superblock.row_tables()),
      medium_(medium),
      superblock_(superblock),
      background_(background),
      options_(std::move(options)),
      store_(medium, tables(), superblock.header().row_checksums != 0, true),
      ring_(open_log_file(medium, superblock.identity(), superblock.header().log_bytes, true)),
      log_(medium, *ring_, superblock.identity().seed()) {
  // A life that ended while it made it larger may have left it with holes.
  ring_->allocate(0, ring_->size());
}

// Recovery.

StepMark InPlaceBackend::newest() {
  const CommitRecord& commit = superblock_.commit();
  return {commit.step, commit.cursor, commit.row_updates};
}

void InPlaceBackend::check_roll_back(std::uint64_t, std::uint64_t step) {
  undo_ = plan_undo(superblock_, log_, store_, step);
}

RolledBack InPlaceBackend::roll_back(std::uint64_t, std::uint64_t) {
  return {undo_->records.size(), undo_records(undo_->records, store_, medium_)};
}

void InPlaceBackend::start(std::uint64_t epoch, const StepMark& mark) {
  epoch_ = epoch;
  CommitRecord fresh{};
  fresh.epoch = epoch;
  fresh.step = mark.step;
  fresh.cursor = mark.cursor;
  fresh.row_updates = mark.row_updates;
  fresh.log_head = undo_->log_head;
  fresh.log_tail = undo_->log_head;
  fresh.last_record = format::no_position;
  fresh.last_record_step = mark.step;
  superblock_.write_commit(fresh);
  log_.start(epoch, undo_->log_head, UndoLog::Link::of(fresh));
  undo_.reset();
}

// In the log is what a process that died now would leave, but for a capture that was begun ahead.
void InPlaceBackend::check_go_back(std::uint64_t epoch, std::uint64_t step) {
  drop_ahead();
  background_.drain();
  check_roll_back(epoch, step);
}

RolledBack InPlaceBackend::go_back(std::uint64_t epoch, const StepMark& mark) {
  const RolledBack undone = roll_back(epoch, mark.step);
  parts_.clear();
  updated_ = false;
  start(epoch, mark);
  return undone;
}

// What a dialled medium is asked for.

DialWork InPlaceBackend::reads_of(const Plan& plan) const {
  DialWork work;
  for (std::size_t t = 0; t < plan.tables.size(); ++t) {
    store_.add_reads(work, plan.spec->tables[t].number, plan.tables[t].num_unique());
  }
  return work;
}

DialWork InPlaceBackend::writes_of(const CollectionSpec& spec,
                                   const std::function<std::uint64_t(std::size_t t)>& num_rows) const {
  DialWork work;
  const Dial* dial = medium_.dial();
  if (dial == nullptr) return work;
  std::uint64_t bytes = 0;
  for (std::size_t t = 0; t < spec.tables.size(); ++t) {
    const RowTable& table = store_.table(spec.tables[t].number);
    store_.add_writes(work, spec.tables[t].number, num_rows(t));
    bytes += num_rows(t) * (table.weight_bytes() + table.state_bytes());
  }
  work.stream_read_bytes = static_cast<std::uint64_t>(static_cast<double>(bytes) * dial->uncached(bytes));
  return work;
}

// Asked for where the medium is dialled.
DialWork InPlaceBackend::lookups_of(const Plan& plan, const std::vector<std::uint64_t>& num_lookups) const {
  DialWork work;
  const Dial* dial = medium_.dial();
  std::uint64_t bytes = 0;
  for (std::size_t t = 0; t < plan.tables.size(); ++t) {
    const RowTable& table = store_.table(plan.spec->tables[t].number);
    bytes += plan.tables[t].num_unique() * (table.weight_bytes() + table.state_bytes());
  }
  const double uncached = dial->uncached(bytes);
  for (std::size_t t = 0; t < plan.tables.size(); ++t) {
    const auto reads = static_cast<std::uint64_t>(static_cast<double>(num_lookups[t]) * uncached);
    dial->add_reads(work, reads, store_.table(plan.spec->tables[t].number).weight_bytes());
  }
  return work;
}

// Capture.

std::shared_ptr<InPlaceBackend::LoggedCapture> InPlaceBackend::reserve(std::shared_ptr<const Plan> plan,
                                                                       std::uint64_t step, Room room) {
  const CollectionSpec& spec = *plan->spec;
  std::size_t bytes = sizeof(RecordHeader) + spec.tables.size() * sizeof(RecordSection);
  std::vector<RecordSection> sections;
  for (std::size_t t = 0; t < spec.tables.size(); ++t) {
    const std::uint32_t number = spec.tables[t].number;
    sections.push_back(place_section(store_.table(number), number, plan->tables[t].num_unique(), bytes));
  }
  if (room == Room::made) grow_log(bytes);
  auto position = log_.reserve(step, bytes);
  if (!position && room == Room::found) return nullptr;
  if (!position) position = make_room(step, bytes);
  auto capture = std::make_shared<LoggedCapture>();
  capture->plan = std::move(plan);
  capture->step = step;
  capture->order = ++num_captures_;
  capture->position = *position;
  capture->bytes = bytes;
  std::byte* data = log_.at(*position);
  std::memcpy(data + sizeof(RecordHeader), sections.data(), sections.size() * sizeof(RecordSection));
  for (std::size_t t = 0; t < sections.size(); ++t) {
    clear_gaps(sections[t], store_.table(sections[t].table), data);
    capture->tables.push_back(rows_of(sections[t], data));
  }
  name_keys(*capture->plan, capture->tables);
  capture->apart.resize(sections.size());
  return capture;
}

// Writes the row numbers of a capture, makes sure that its rows have space at home and, unless that is left to the
// background, copies them and takes the record's checksum while they are in the caches; one parallel region for all.
void InPlaceBackend::fill(LoggedCapture& capture, Rows rows_are) {
  const std::byte* const payload = log_.at(capture.position) + sizeof(RecordHeader);
  PartsChecksum checksum(capture.bytes - sizeof(RecordHeader), log_.seed());
  DialService service(medium_.dial(), rows_are == Rows::copied_now ? reads_of(*capture.plan) : DialWork{});
  const auto add = [&](const void* part, std::size_t bytes) {
    checksum.add(static_cast<std::size_t>(static_cast<const std::byte*>(part) - payload), part, bytes);
  };
  std::vector<std::atomic<bool>> reuses(capture.tables.size());
  try {
    for_rows(*capture.plan, [&](std::size_t t, std::size_t begin, std::size_t end) {
      const std::uint64_t* rows = capture.plan->tables[t].rows.data();
      const WorkingRows& working = capture.tables[t];
      std::copy(rows + begin, rows + end, working.rows + begin);
      const std::uint32_t number = capture.plan->spec->tables[t].number;
      store_.prepare(number, working, begin, end);
      if (rows_are == Rows::copied_later) return;
      store_.capture(number, working, begin, end);
      const RowTable& table = store_.table(number);
      if (table.has_keys() && start_fresh_keys(table, living_of(number), working, begin, end)) reuses[t] = true;
      add(working.rows + begin, (end - begin) * sizeof(std::uint64_t));
      add(working.weights + begin * table.weight_bytes(), (end - begin) * table.weight_bytes());
      add(working.state + begin * table.spec.state_floats, (end - begin) * table.state_bytes());
    });
  } catch (...) {
    background_.drain();
    log_.rewind(capture.position, log_.last());
    throw;
  }
  if (rows_are == Rows::copied_later) return;
  service.finish();
  for (std::size_t t = 0; t < reuses.size(); ++t) {
    if (reuses[t]) set_apart(capture, t);
  }
  add(payload, capture.tables.size() * sizeof(RecordSection));
  capture.payload_crc = checksum.value();
}

// The record keeps what the rows were, whoever's; what is computed from is their keys'.
void InPlaceBackend::set_apart(LoggedCapture& capture, std::size_t t) {
  WorkingRows& working = capture.tables[t];
  const std::uint32_t number = capture.plan->spec->tables[t].number;
  const RowTable& table = store_.table(number);
  const std::size_t num_rows = capture.plan->tables[t].num_unique();
  const std::size_t weight_bytes = format::line_up(num_rows * table.weight_bytes());
  capture.apart[t].resize(weight_bytes + num_rows * table.state_bytes() + format::line_bytes);
  std::byte* const apart = line_aligned(capture.apart[t]);
  std::memcpy(apart, working.weights, num_rows * table.weight_bytes());
  std::memcpy(apart + weight_bytes, working.state, num_rows * table.state_bytes());
  working.weights = apart;
  working.state = reinterpret_cast<float*>(apart + weight_bytes);
  start_keys(table, living_of(number), working, 0, num_rows);
}

void InPlaceBackend::submit_seal(LoggedCapture& capture) {
  capture.sealed = background_.submit(
      [this, step = capture.step, position = capture.position, bytes = capture.bytes,
       sections = static_cast<std::uint32_t>(capture.tables.size()),
       payload_crc = capture.payload_crc] { log_.seal(step, position, bytes, sections, payload_crc); });
}

void InPlaceBackend::drop_ahead() {
  if (!ahead_) return;
  background_.wait(ahead_->copied);
  if (!ahead_->complete) {
    background_.drain();
    log_.rewind(ahead_->capture->position, log_.last());
  } else {
    add_part(ahead_->capture);
  }
  ahead_.reset();
}

std::shared_ptr<Capture> InPlaceBackend::capture(std::shared_ptr<const Plan> plan, std::uint64_t step) {
  if (ahead_ && ahead_->complete && ahead_->capture->plan == plan && parts_.empty()) {
    auto capture = ahead_->capture;
    ahead_.reset();
    add_part(capture);
    return capture;
  }
  drop_ahead();
  drop_dead_captures();
  auto capture = reserve(std::move(plan), step, Room::made);
  fill(*capture, Rows::copied_now);
  submit_seal(*capture);
  add_part(capture);
  return capture;
}

bool InPlaceBackend::capture_ahead(std::shared_ptr<const Plan> next, std::uint64_t step) {
  if (ahead_ || parts_.size() != 1) return false;
  const auto current = parts_.front().capture.lock();
  if (!current || current->plan->spec != next->spec) return false;
  if (log_is_low()) return false;
  Ahead ahead;
  ahead.current = current;
  ahead.capture = reserve(next, step + 1, Room::found);
  if (!ahead.capture) return false;
  ahead.complete = false;
  fill(*ahead.capture, Rows::copied_later);
  const std::size_t num_tables = next->tables.size();
  ahead.forward.resize(num_tables);
  std::vector<std::vector<RowRange>> own(num_tables);  // that are captured
  parallel_for(num_tables, [&](std::size_t t) {
    own[t] = split_rows(current->plan->tables[t].rows, next->tables[t].rows, ahead.forward[t]);
  });
  ahead.copied =
      background_.submit([this, capture = ahead.capture, own = std::move(own)] { copy_ahead(*capture, own); });
  ahead_ = std::move(ahead);
  return true;
}

void InPlaceBackend::copy_ahead(LoggedCapture& capture, const std::vector<std::vector<RowRange>>& own) const {
  DialWork reads;
  for (std::size_t t = 0; t < own.size(); ++t) {
    std::uint64_t num_rows = 0;
    for (const auto& [begin, end] : own[t]) num_rows += end - begin;
    store_.add_reads(reads, capture.plan->spec->tables[t].number, num_rows);
  }
  DialService service(medium_.dial(), reads);
  for (std::size_t t = 0; t < own.size(); ++t) {
    const std::uint32_t number = capture.plan->spec->tables[t].number;
    const RowTable& table = store_.table(number);
    const WorkingRows& rows = capture.tables[t];
    std::size_t asked = 0;  // ranges
    for (std::size_t range = 0; range < own[t].size(); ++range) {
      // Ranges are a few rows each, so what comes next is asked for here rather than within a range.
      for (; asked < std::min(own[t].size(), range + ranges_asked_ahead); ++asked) {
        store_.ask_for(number, rows, own[t][asked].first, own[t][asked].second);
      }
      const auto [begin, end] = own[t][range];
      if (store_.try_capture(number, rows, begin, end) != end) capture.is_damaged = true;
      if (table.has_keys() && start_fresh_keys(table, living_of(number), rows, begin, end)) {
        capture.has_reused_rows = true;
      }
    }
  }
  service.finish();
}

void InPlaceBackend::add_part(const std::shared_ptr<LoggedCapture>& capture) {
  parts_.push_back({capture, capture->position, capture->sealed});
}

void InPlaceBackend::read(const Plan& plan, const std::vector<WorkingRows>& rows) {
  DialService service(medium_.dial(), reads_of(plan));
  fill_rows(plan, rows, [&](std::uint32_t table, const WorkingRows& of_table, std::size_t begin, std::size_t end) {
    store_.capture(table, of_table, begin, end);
  });
  service.finish();
}

// Update.

// No row is overwritten before every record of this step is sealed.
void InPlaceBackend::begin_update() {
  for (const Part& part : parts_) background_.wait(part.sealed);
  if (ahead_) {
    background_.wait(ahead_->copied);
    // The next step captures its rows itself; of damaged ones it says which.
    if (ahead_->capture->is_damaged || ahead_->capture->has_reused_rows) drop_ahead();
  }
  medium_.persist_point();
}

std::optional<NamedRow> InPlaceBackend::update(const std::shared_ptr<const Capture>& capture, const float* grad,
                                               const UpdateSpec& spec) {
  const Plan& plan = *capture->plan;
  const Ahead* ahead = forwarding(*capture);
  DialService service(medium_.dial(),
                      writes_of(*plan.spec, [&](std::size_t t) { return plan.tables[t].num_unique(); }));
  NonFiniteRow non_finite;
  for_rows(plan, [&](std::size_t t, std::size_t begin, std::size_t end) {
    const std::uint32_t number = plan.spec->tables[t].number;
    const std::size_t found = store_.update(number, spec, capture->tables[t], occurrences_of(plan.tables[t]), grad,
                                            ahead != nullptr ? ahead->forward[t].data() : nullptr,
                                            ahead != nullptr ? &ahead->capture->tables[t] : nullptr, begin, end);
    non_finite.note(tables()[number], capture->tables[t], found, end);
  });
  service.finish();
  return non_finite.first();
}

std::optional<NamedRow> InPlaceBackend::update(const SummedGradients& gradients, const UpdateSpec& spec) {
  const Ahead* ahead = gradients.captures.size() == 1 ? forwarding(*gradients.captures.front()) : nullptr;
  const auto num_rows = [&](std::size_t t) { return gradients.num_rows[t]; };
  DialService service(medium_.dial(), writes_of(*gradients.spec, num_rows));
  NonFiniteRow non_finite;
  for_rows(*gradients.spec, num_rows, [&](std::size_t t, std::size_t begin, std::size_t end) {
    const std::uint32_t number = gradients.spec->tables[t].number;
    const std::size_t found =
        store_.update_from_sums(number, spec, gradients.rows()[t], gradients.sums[t].data(),
                                ahead != nullptr ? ahead->forward[t].data() : nullptr,
                                ahead != nullptr ? &ahead->capture->tables[t] : nullptr, begin, end);
    non_finite.note(tables()[number], gradients.rows()[t], found, end);
  });
  service.finish();
  return non_finite.first();
}

std::optional<NamedRow> InPlaceBackend::put(const std::shared_ptr<const Capture>& capture,
                                            const std::vector<ReadyRows>& ready) {
  drop_ahead();
  const Plan& plan = *capture->plan;
  DialService service(medium_.dial(),
                      writes_of(*plan.spec, [&](std::size_t t) { return plan.tables[t].num_unique(); }));
  NonFiniteRow non_finite;
  for_rows(plan, [&](std::size_t t, std::size_t begin, std::size_t end) {
    const std::uint32_t number = plan.spec->tables[t].number;
    non_finite.note(tables()[number], capture->tables[t], store_.put(number, capture->tables[t], ready[t], begin, end),
                    end);
  });
  service.finish();
  return non_finite.first();
}

void InPlaceBackend::finish_update(std::size_t num_captures) {
  updated_ = true;
  if (ahead_ && num_captures == 1 && parts_.size() == 1) {
    ahead_->complete = true;
    submit_seal(*ahead_->capture);
  }
}

const InPlaceBackend::Ahead* InPlaceBackend::forwarding(const Capture& capture) const {
  return ahead_ && ahead_->current.lock().get() == &capture ? &*ahead_ : nullptr;
}

// Direct access.

std::uint64_t InPlaceBackend::materialize(const Plan& plan) {
  std::atomic<std::uint64_t> num_untouched{0};
  for_rows(plan, [&](std::size_t t, std::size_t begin, std::size_t end) {
    const std::span<const std::uint64_t> rows = plan.tables[t].rows;
    num_untouched += store_.materialize(plan.spec->tables[t].number, rows.subspan(begin, end - begin));
  });
  return num_untouched;
}

// Commit.

// Every seal of this step is in the queue already, so the commit record follows them.
std::function<void()> InPlaceBackend::end_step(const StepMark& mark) {
  // Complete, it is of the next step; or of this one, which ends without it.
  if (ahead_ && (!ahead_->complete || ahead_->capture->step == mark.step)) drop_ahead();
  CommitRecord record{};
  record.epoch = epoch_;
  record.step = mark.step;
  record.cursor = mark.cursor;
  record.row_updates = mark.row_updates;
  record.log_head = ahead_ ? ahead_->capture->position : log_.head();
  const auto ahead_position = ahead_ ? ahead_->capture->position : format::no_position;
  parts_.clear();
  updated_ = false;
  return [this, record, ahead_position]() mutable {
    UndoLog::Link last = log_.last();
    if (last.position != format::no_position && last.position == ahead_position) {
      last = log_.before(ahead_position);
    }
    record.last_record = last.position;
    record.last_record_crc = last.crc;
    record.last_record_step = last.step;
    record.log_tail = log_.tail();
    superblock_.write_commit(record);
  };
}

// A forward pass whose result was thrown away begins none.
bool InPlaceBackend::step_has_begun() const {
  return updated_ || std::ranges::any_of(parts_, [](const Part& part) { return !part.capture.expired(); });
}

void InPlaceBackend::import_rows(std::size_t table, const ImportedRows& imported) {
  // What was captured would take rows back to what they were before.
  drop_ahead();
  drop_dead_captures();
  store_.import_rows(table, imported);
}

// A step that wrote rows but was not committed is undone, as recovery would.
void InPlaceBackend::close(bool updated) {
  if (updated) {
    std::vector<Record> records;
    for (auto part = parts_.rbegin(); part != parts_.rend(); ++part) {
      background_.wait(part->sealed);
      if (const auto record = log_.read(part->position)) records.push_back(*record);
    }
    undo_records(records, store_, medium_);
  }
  store_.sync();
  ring_->sync();
}

}  // namespace holdfast
