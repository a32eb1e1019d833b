// Log backend: rows on a block device, those of the coming steps in a scratchpad.
//
// A step's way: its rows are held in the scratchpad; capture copies them into a working set; update computes the new
// rows from it, some at a time, and while these are in the processor's caches scatters them into the scratchpad's slots
// and packs them for the log; end_step makes one record of them, which the background thread appends to the row log and
// syncs. The record is the commit: it carries step, cursor and row_updates, so a step is there whole or not at all.
//
// Invariants
// - A step's holds are let go only when its record is appended: until then no row of it is read from below, where an
//   older version is.
// - Rows are overwritten in memory only: whatever was not appended is gone after a crash, and so is its step.
// - Home is merged up to the newest durable dense state, which is where exact recovery goes; without dense states up to
//   the newest durable step.
// - The log has room for several of the largest records, so that it always comes to a step that may be merged.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/background.h"
#include "base/stage_spans.h"
#include "layout/superblock.h"
#include "log_store/log_merger.h"
#include "log_store/log_store.h"
#include "media/spare_buffers.h"
#include "scratchpad/scratchpad.h"
#include "scratchpad/warming.h"
#include "step/row_backend.h"

namespace holdfast {

class LogBackend final : public RowBackend {
 public:
  struct Options {
    std::uint64_t scratchpad_bytes;
    bool warm;  // fill the scratchpad beside the first steps
    // Of the background thread: finishes the pending dense write, where it is of a step before `step`.
    std::function<void(std::uint64_t step)> finish_dense;
    BlockWatcher* watcher;  // for tests
    StageSpans& spans;
    Dial* dial = nullptr;  // of the homes' device; null: as it is
    Dial* log_dial = nullptr;  // of the log's
    std::vector<unsigned> scratchpad_nodes = {};  // of the machine; none: any
    std::optional<VictimOptions> victims = std::nullopt;
  };

  // adopt: homes are there, and are taken as they are.
  static void create(const std::string& directory, const std::vector<RowTable>& tables, std::uint64_t log_bytes,
                     const StepMark& mark, bool adopt, const Identity& identity);
  LogBackend(const std::string& directory, Superblock& superblock, Background& background, Options options);

  StepMark newest() override { return newest_; }
  void check_roll_back(std::uint64_t epoch, std::uint64_t step) override;
  RolledBack roll_back(std::uint64_t epoch, std::uint64_t step) override;
  void start(std::uint64_t epoch, const StepMark& mark) override;

  void check_go_back(std::uint64_t epoch, std::uint64_t step) override;
  RolledBack go_back(std::uint64_t epoch, const StepMark& mark) override;

  void announce(std::shared_ptr<const Plan> plan) override;
  std::shared_ptr<Capture> capture(std::shared_ptr<const Plan> plan, std::uint64_t step) override;
  // The scratchpad holds the coming rows already.
  bool capture_ahead(std::shared_ptr<const Plan>, std::uint64_t) override { return false; }
  void keep_rows(std::uint32_t table, std::vector<std::uint64_t> rows) override;
  void read(const Plan& plan, const std::vector<WorkingRows>& rows) override;
  std::vector<std::uint64_t> touched_rows(std::uint32_t table, std::uint64_t first, std::size_t count) override {
    return store_.touched_rows(table, first, count);
  }
  void read_state(std::uint32_t table, const WorkingRows& rows, std::size_t count) override {
    const TableRows wanted{table, count, rows};
    store_.fetch({&wanted, 1});
  }

  void begin_update() override {}
  std::optional<NamedRow> update(const std::shared_ptr<const Capture>& capture, const float* grad,
                                 const UpdateSpec& spec) override;
  std::optional<NamedRow> update(const SummedGradients& gradients, const UpdateSpec& spec) override;
  std::optional<NamedRow> put(const std::shared_ptr<const Capture>& capture,
                              const std::vector<ReadyRows>& ready) override;
  void finish_update(std::size_t) override {}

  std::uint64_t materialize(const Plan&) override;
  std::optional<RowMapping> mapping(std::uint32_t) const override { return std::nullopt; }

  std::function<void()> end_step(const StepMark& mark) override;
  void note_recoverable(std::uint64_t step) override;
  void empty_log() override;
  bool log_is_low() const override;
  bool step_has_begun() const override;

  void import_rows(std::size_t table, const ImportedRows& imported) override;
  void end_steps() override;
  void close(bool updated) override;
  void stop() noexcept override;

  std::uint64_t log_bytes() const override { return store_.ring_bytes(); }
  std::uint64_t log_bytes_free() const override { return store_.ring_bytes() - store_.used_bytes(); }
  Merging merging() const override { return merger_->merging(); }
  std::optional<Traffic> traffic() const override;

 private:
  using HoldPtr = std::shared_ptr<const Scratchpad::Hold>;
  // Holds of rows that were overwritten, until their record is appended. Where they end before it is, the scratchpad has rows
  // that the log does not have, and merges take nothing from it any more.
  struct Overwriting {
    std::vector<HoldPtr> holds;
    std::shared_ptr<std::atomic<bool>> is_logged;  // all that was ever let go
    ~Overwriting() {
      if (!holds.empty()) *is_logged = false;
    }
  };
  struct HeldCapture final : Capture {
    HoldPtr hold;
    SpareBuffers::Borrowed memory;  // of the working set
  };

  // Room for rows of the tables of `spec`, compact, in one borrowed piece of memory.
  std::vector<WorkingRows> borrow_rows(const CollectionSpec& spec, const std::vector<std::uint64_t>& num_rows,
                                       SpareBuffers::Borrowed& memory);
  // The rows of one table of a collection that an update overwrites: as they are, and where in the scratchpad.
  struct Overwritten {
    std::uint64_t num_rows;
    WorkingRows old;
    const std::uint32_t* slots;
  };
  // Computes the new values of rows [begin, end) of table t into `fresh`, which is these rows alone; on all threads.
  // Returns which of these is the first that is not finite, or how many they are.
  using NewRows =
      std::function<std::size_t(std::size_t t, std::size_t begin, std::size_t end, const WorkingRows& fresh)>;
  // Overwrites rows of every table of `spec`, and adds them to the step's record. Returns the first that is not finite.
  std::optional<NamedRow> overwrite(const CollectionSpec& spec, const std::vector<Overwritten>& tables,
                                    const NewRows& new_rows);
  std::vector<Overwritten> overwritten_by(const HeldCapture& capture) const;
  void check_fits_log(std::uint64_t record_bytes, const char* whose) const;
  void append(const PackedRecord& record);
  void note_stall(std::chrono::steady_clock::time_point began);
  void append_when_there_is_room(const PackedRecord& record);
  Scratchpad& scratchpad();
  void begin_to_warm();
  void begin_life(std::uint64_t epoch, const StepMark& mark);

  Superblock& superblock_;
  Background& background_;
  Options options_;
  LogStore store_;
  StepMark newest_;
  SpareBuffers spare_;

  // Of the current step.
  std::uint64_t num_captures_ = 0;
  std::vector<std::weak_ptr<const Capture>> captures_;
  std::vector<RecordDraft> drafts_;  // the new rows of each update
  std::vector<HoldPtr> updated_holds_;  // before the first of their rows is overwritten
  const std::shared_ptr<std::atomic<bool>> is_logged_ = std::make_shared<std::atomic<bool>>(true);

  mutable std::mutex mutex_;  // guards what follows
  struct Logged {
    std::uint64_t step;
    std::uint64_t bytes;
  };
  std::deque<Logged> unmergeable_;  // steps after the newest that recovery may go back to
  std::uint64_t largest_record_bytes_ = 0;
  double seconds_without_room_ = 0;

  std::optional<VictimMemory> victims_;
  std::unique_ptr<Scratchpad> scratchpad_;  // made by the first row that it is needed for
  std::unique_ptr<LogMerger> merger_;  // these last: their threads end before anything they use
  std::unique_ptr<Warming> warming_;
};

}  // namespace holdfast
