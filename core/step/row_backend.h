// Row backend: how a pool keeps its rows and makes a step's updates durable. InPlaceBackend maps them and keeps an undo
// log; LogBackend appends new versions to a row log and holds the rows of the coming steps in a scratchpad.
//
// What the pool relies on
// - capture gives the rows' values at the end of the newest committed step. They stay as they are in the capture.
// - begin_update returns when the rows of the step may be overwritten; the updates and puts of a step come between it
//   and finish_update, each table once. They return the first row, if any, that they wrote and that is not finite.
// - end_step is called once per step, in order. What it returns runs on the background thread, in order: when it is
//   done, the rows of the step are durable at the pool's level.
// - Whatever comes between capture and end_step leaves the rows of the newest committed step recoverable.
// - Exact recovery may go back to any step at or after the one that note_recoverable was told last.
// - newest and check_roll_back read, and change nothing; roll_back and start follow, once, before the first capture.
// - check_go_back changes nothing that counts; go_back follows, when everything that was committed is durable and no
//   capture is used any more. Then rows are as if they had been opened and rolled back to there.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/step_mark.h"
#include "media/dial.h"
#include "rows/finite_rows.h"
#include "rows/row_table.h"
#include "rows/row_values.h"
#include "step/capture.h"

namespace holdfast {

// What a roll back took back.
struct RolledBack {
  std::uint64_t records = 0;
  std::uint64_t rows = 0;
};

// Rows and bytes since a pool was opened.
struct Traffic {
  std::uint64_t rows_hit;  // that captures found in the scratchpad
  std::uint64_t rows_missed;  // and that it had to get
  std::uint64_t rows_from_victims;  // of these: from its victim cache; the others had to be fetched
  std::uint64_t demand_fetches;  // of these: fetched while training waited, nobody had announced them
  std::uint64_t window_shrunk;  // announced batches that had to wait for room in the scratchpad
  double stall_seconds;  // that captures waited for rows
  double log_stall_seconds;  // that records waited for room in the log; training waits for them
  std::uint64_t rows_fetched;  // evaluation's included
  std::uint64_t rows_from_log;  // of these: those whose newest version the row log had
  std::uint64_t rows_initial;  // untouched ones, for which nothing was read
  std::uint64_t fetched_bytes;
  std::uint64_t fetch_reads;  // requests to the device
  std::uint64_t updated_rows;
  std::uint64_t updated_row_bytes;  // of their images, as the log and home keep them
  std::uint64_t appended_bytes;  // to the row log
  std::uint64_t merges;
  std::uint64_t merged_bytes;  // of the row log, folded home
  std::uint64_t standing_bytes;  // of later records, whose rows a merge leaves to the log: its mean, for each merge
  std::uint64_t log_bytes_read;  // by that
  std::uint64_t home_bytes_read;
  std::uint64_t home_bytes_written;
  std::uint64_t merge_log_reads;  // requests, of the row log
  std::uint64_t merge_reads;  // and of home
  std::uint64_t merge_writes;
  std::uint64_t index_entries;  // rows whose newest version is in the log
  std::uint64_t index_bytes;
  std::uint64_t scratchpad_rows;  // that there is room for
  std::uint64_t victim_rows;  // and in its victim cache
  std::uint64_t rows_warmed;  // that came into the scratchpad before anybody asked for them
  bool is_warming;  // more of them may come
};

// Of a log that is folded home. wanted: it is, or is about to be; awaited: a record waits for it meanwhile; given_up: it
// is being left undone, since the pool is closed.
enum class Merging { none, wanted, awaited, given_up };

class RowBackend {
 public:
  explicit RowBackend(std::vector<RowTable> tables) : tables_(std::move(tables)), living_(tables_.size()) {}
  virtual ~RowBackend() = default;
  RowBackend(const RowBackend&) = delete;
  RowBackend& operator=(const RowBackend&) = delete;

  const std::vector<RowTable>& tables() const { return tables_; }

  // Of a table with keys, before a step: records of other keys do not count any more.
  void leave_keys_behind(std::uint32_t table, LivingKeys living) { living_.at(table) = std::move(living); }
  const LivingKeys& living_of(std::uint32_t table) const { return living_[table]; }

  // The newest step whose rows are all there.
  virtual StepMark newest() = 0;
  // Throws corrupted where rows cannot go back to the end of `step`.
  virtual void check_roll_back(std::uint64_t epoch, std::uint64_t step) = 0;
  // Goes back there, durably, in life `epoch`. Returns what that took.
  virtual RolledBack roll_back(std::uint64_t epoch, std::uint64_t step) = 0;
  // Training goes on from here.
  virtual void start(std::uint64_t epoch, const StepMark& mark) = 0;

  // Of one that was started: throws corrupted where rows cannot go back to the end of `step`, the newest or an older
  // one. What the step under way has captured is forgotten.
  virtual void check_go_back(std::uint64_t epoch, std::uint64_t step) = 0;
  // Goes back there, durably, takes back what was not committed, and training goes on from there in life `epoch`.
  virtual RolledBack go_back(std::uint64_t epoch, const StepMark& mark) = 0;

  // `plan` is going to be captured, after those that were announced before. A hint: rows may be fetched ahead.
  virtual void announce(std::shared_ptr<const Plan> plan) = 0;
  virtual std::shared_ptr<Capture> capture(std::shared_ptr<const Plan> plan, std::uint64_t step) = 0;
  // Begins the capture of the step after `step`, on the background thread; false where that is not possible now.
  virtual bool capture_ahead(std::shared_ptr<const Plan> next, std::uint64_t step) = 0;
  // These rows (ascending) are going to be wanted all the time: they stay in fast memory. A hint.
  virtual void keep_rows(std::uint32_t table, std::vector<std::uint64_t> rows) = 0;
  // Fills `rows`, one for each of the plan's tables, without a trace.
  virtual void read(const Plan& plan, const std::vector<WorkingRows>& rows) = 0;

  // What pooling a batch's rows, which were copied, asks of a dialled medium: of each table so many of its lookups.
  virtual DialWork lookups_of(const Plan&, const std::vector<std::uint64_t>&) const { return {}; }
  // The touched rows of a table at or after `first`, ascending, `count` at most; and the state of some rows. Before the
  // first step that updates any of them.
  virtual std::vector<std::uint64_t> touched_rows(std::uint32_t table, std::uint64_t first, std::size_t count) = 0;
  virtual void read_state(std::uint32_t table, const WorkingRows& rows, std::size_t count) = 0;

  virtual void begin_update() = 0;
  virtual std::optional<NamedRow> update(const std::shared_ptr<const Capture>& capture, const float* grad,
                                         const UpdateSpec& spec) = 0;
  virtual std::optional<NamedRow> update(const SummedGradients& gradients, const UpdateSpec& spec) = 0;
  // The capture's rows become those of `ready`, one for each of its plan's tables.
  virtual std::optional<NamedRow> put(const std::shared_ptr<const Capture>& capture,
                                      const std::vector<ReadyRows>& ready) = 0;
  virtual void finish_update(std::size_t num_captures) = 0;

  // Whoever reads rows where they are finds their values there: of the plan's rows, those that are untouched get theirs.
  // Returns how many. Throws config where rows have no places in memory.
  virtual std::uint64_t materialize(const Plan& plan) = 0;
  virtual std::optional<RowMapping> mapping(std::uint32_t table) const = 0;

  virtual std::function<void()> end_step(const StepMark& mark) = 0;
  // Of the background thread: recovery never goes below `step` from now on.
  virtual void note_recoverable(std::uint64_t step) = 0;
  // Everything in the log is of steps that recovery never goes below, and durable: it goes home, all of it.
  virtual void empty_log() = 0;
  // Is there room for few steps before a newer dense state has to be durable?
  virtual bool log_is_low() const = 0;
  // Has the current step captured rows?
  virtual bool step_has_begun() const = 0;

  // Throws config where a row is not there.
  virtual void import_rows(std::size_t table, const ImportedRows& imported) = 0;
  // No step follows: those that are on their way are not held up for the sake of later ones.
  virtual void end_steps() {}
  // Takes back an update that was not committed, and syncs. The last call, but for stop.
  virtual void close(bool updated) = 0;
  // Ends every thread that writes, whatever failed before: from now on nothing is written.
  virtual void stop() noexcept = 0;

  virtual std::uint64_t log_bytes() const = 0;
  virtual std::uint64_t log_bytes_free() const = 0;
  // From any thread.
  virtual Merging merging() const = 0;
  // Nothing where rows are read and written in place.
  virtual std::optional<Traffic> traffic() const = 0;

 private:
  std::vector<RowTable> tables_;
  std::vector<LivingKeys> living_;
};

}  // namespace holdfast
