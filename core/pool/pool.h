// Pool: the verbs of a step over one directory. capture → lookup → update (or put) → commit, and recovery when it is
// opened.
//
// Invariants
// - What makes the rows of a step durable (see RowBackend) comes before its dense slot; both are the background
//   thread's work, in that order. durable_step() reports s only after both.
// - Neither follows a step whose files have lost their names: the pool was removed.
// - After the first failure to write or to read, no verb does anything but throw it again, as `failed` unless it was
//   `full`, `read_only` or `corrupted`, until the pool is opened again.
// - Verbs are called from one thread at a time; plan_batch may run on another meanwhile. Those that change rows or steps
//   throw where another thread is in one of them, and have changed nothing.
// - Verbs take captures of this pool and of the step under way, and no other: what an older one points to is gone.
// - A child of fork changes nothing: its verbs throw, close and the destructor leave everything to the parent.
// - Opening validates everything that recovery is going to use before it changes a byte.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/background.h"
#include "base/forks.h"
#include "base/stage_spans.h"
#include "base/turn.h"
#include "commit/dense_slots.h"
#include "commit/recovery.h"
#include "device/slot_directory.h"
#include "layout/superblock.h"
#include "media/block_file.h"
#include "media/medium.h"
#include "pool/pool_lock.h"
#include "scratchpad/victim_memory.h"
#include "step/capture.h"
#include "step/collection.h"
#include "step/key_rows.h"
#include "step/lookup.h"
#include "step/put_rows.h"
#include "step/relaxed_lookup.h"
#include "step/row_backend.h"

namespace holdfast {

// Of a pool that has one writer of several: the shards that it owns lie beside it, in shard-NNNN two levels up.
struct Sharding {
  std::uint32_t num_shards;  // of the whole: a power of two, 4096 at most
  std::vector<std::uint32_t> owned;
  Uuid group_uuid;
  // The shards are there, at the step where the pool begins, and are taken as they are: whoever had them before has
  // emptied its log and closed its pool.
  bool adopt = false;
};

struct PoolOptions {
  std::uint64_t seed;
  std::uint64_t log_bytes;  // rounded up to blocks
  format::Store store = format::Store::in_place;
  bool row_checksums = false;  // of rows in place; a log store always has them
  StepMark begin{};  // the step at whose end the pool is made: its rows are imported, its dense state written
  std::optional<Sharding> sharding{};  // then every table says how it is cut
  std::optional<Uuid> group_uuid{};  // of a part of a group's pool that has no shards; one with shards says it there
  std::uint32_t version = format::version;  // of the format; an older one, as the other parts of an older group
  std::string log_directory{};  // of a row log that lies on a medium of its own; empty: in the pool's directory
};

// What a pool that belongs to a group could go back to.
struct Survey {
  StepMark rows;  // the newest step whose rows are all there; older ones may be, as far back as the group's last word
  std::vector<StepMark> dense;  // of the dense states that hold, at or before that
};

// A pool of a group is not alone in what it goes back to, nor in what it gives up: it keeps what leads back to the step
// that note_group_durable was told last.
struct InGroup {
  // The step that the group goes back to. Asked before anything is written; what it throws, opening throws.
  std::function<StepMark(const Survey&)> agree;
  // All that going back there takes was found in this pool: returns when it was found in every pool of the group.
  std::function<void()> ready;
};

struct OpenOptions {
  Recovery recovery = Recovery::exact;
  std::uint32_t dense_interval = 1;  // steps from one dense slot to the next
  bool grow_log = true;  // make the undo log larger when batches want it
  std::uint64_t scratchpad_bytes = std::uint64_t{1} << 30;  // of a pool with a log store
  std::vector<unsigned> scratchpad_nodes = {};  // of the machine, on which its rows lie; none: on any
  bool warm = true;  // of a pool with a log store: fill the scratchpad beside the first steps (scratchpad/warming.h)
  // Nothing is made durable beside training: the log is written when the update wants it, and a commit returns when its
  // step is durable. What checkpoints on the critical path do, for comparison.
  bool synchronous = false;
  std::optional<DialSpec> dial = std::nullopt;  // the medium is made as slow as this
  std::optional<DialSpec> log_dial = std::nullopt;  // and that of the row log; nothing: as the pool's
  std::optional<VictimOptions> victims = std::nullopt;  // for rows that leave the scratchpad
  bool trust_after_reboot = false;  // believe a process-level pool that was open when the machine went down
  std::optional<InGroup> group = std::nullopt;
};

// What recovery found, and what it did.
struct RecoveryReport {
  bool clean;  // closed cleanly: nothing to do
  std::uint64_t epoch;  // of this life
  std::uint64_t rows_step;  // rows were durable at the end of this step
  std::optional<std::uint64_t> dense_step;  // newest dense slot, where there is one
  std::uint64_t step;  // training goes on after this step
  std::uint64_t cursor;
  std::uint64_t records_undone;
  std::uint64_t rows_restored;
  double seconds;
};

class Pool {
 public:
  // Makes a pool in an existing directory without one. The directory becomes a pool with the last thing written.
  // Throws exists where there is one, corrupted where parts of one are that was published: nothing has changed then.
  static void create(const std::string& directory, const PoolOptions& options, std::vector<format::TableRecord> tables);
  // The directory is one without a pool again, which may be made anew. Throws exists, and has changed nothing, unless
  // the pool is closed and nothing was ever done in it.
  static void take_back(const std::string& directory);

  // Opens for writing: takes the lock, recovers.
  // medium: of the directory; where none is given, the one that it lies on. watcher: of a log store's block files.
  Pool(const std::string& directory, const OpenOptions& options, std::unique_ptr<Medium> medium = nullptr,
       BlockWatcher* watcher = nullptr);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Of a writer's pool of a group: goes on in another group, as if it had been opened again, from the step that this one
  // agrees on. What was not committed is taken back; captures of it must be gone, and collections made anew. What
  // `group` throws, it throws, and stays at its step; after any other failure it has to be opened again.
  void go_on(const InGroup& group);

  const RecoveryReport& recovery() const { return report_; }
  const std::vector<format::TableRecord>& table_records() const { return superblock_->tables(); }
  const format::PoolHeader& header() const { return superblock_->header(); }
  const std::optional<format::ShardsRecord>& shards() const { return superblock_->shards(); }
  std::string medium_description() const { return medium_->description(); }
  format::Level level() const { return medium_->level(); }

  // The dense state that training goes on with (valid until the next commit), also where it was on its way to its slot
  // still, or nothing in a new pool.
  std::optional<DenseState> dense_state();

  // `plan` is going to be captured, after those that were announced before: its rows may be fetched ahead.
  void announce(std::shared_ptr<const Plan> plan);
  // Rows (ascending, in the table) that stay in the scratchpad for good, where there is one. Throws batch_too_large
  // where it has no room for them.
  void keep_rows(std::uint32_t table, std::vector<std::uint64_t> rows);
  // The rows of `plan` become step step() + 1's (one of its captures); the copy is complete when this returns, its
  // seal is on its way. Throws batch_too_large, full.
  std::shared_ptr<Capture> capture(std::shared_ptr<const Plan> plan);
  // Captures the next step's rows on the background thread, but for those that this step's only capture updates too:
  // these are handed over by update. Returns false (and does nothing) when that is not possible now.
  bool capture_ahead(std::shared_ptr<const Plan> next);

  // Pools a capture's rows into out [num_bags, output_width].
  void lookup(const Capture& capture, float* out) const;
  // Pools straight from home: no log, no effect on rows.
  void evaluate(const Plan& plan, float* out);
  // Relaxed: pools the coming batch's bags in two parts (relaxed_lookup.h), both into the same out. The first, before the
  // update of the step whose only capture has the plan `now`, from the rows that this does not have; without a trace.
  void lookup_ahead(const Plan& next, const Plan& now, float* out);
  // The second, from the capture of the batch: adds the rows that `now` has, and reads those over whose keys were left
  // behind since.
  void lookup_rest(const Capture& capture, const Plan& now, float* out);
  // The rows that an admission found missing, compact and in their order, likewise; of a table with keys as the store has
  // them, whoever's they are. Throws config where the arrays have another size.
  void read_missing(const Admission& admission, std::span<std::byte> weights, std::span<float> state);
  // d loss / d per-sample weights, in the order of the plan's lookups of feature f (evaluation rows or a capture's).
  void scale_gradients(const Capture& capture, std::size_t feature, const float* grad, float* out) const;

  // Sums the gradients of a step's captures per row.
  std::unique_ptr<SummedGradients> sum_gradients(std::vector<RowGradients> gradients) const;
  // new rows = f(old rows, gradients); waits for the seals first.
  void update(const std::vector<RowGradients>& gradients, const UpdateSpec& spec);
  void update(const SummedGradients& gradients, const UpdateSpec& spec);
  // The same where the new rows were computed elsewhere: parts of the step's captures, of each capture all tables, no
  // table twice. Throws config, step, and has changed nothing. A capture that was begun ahead is made anew.
  void put(const std::vector<RowsPart>& parts);

  // Where the rows of a table are in memory until the pool is closed; nothing in a log store. The bytes of a row that no
  // update has touched mean nothing, until materialize has written them.
  std::optional<RowMapping> mapping(std::uint32_t table) const;
  // Of the plan's rows, writes the initial values of those that are untouched where `mapping` says: they stay untouched.
  // Returns how many. Throws full, config where the pool has a log store.
  std::uint64_t materialize(const Plan& plan);

  // Is there room for few steps more?
  bool log_is_low() const;
  // Does the next commit want the dense state? (every dense_interval steps, or when the log runs low)
  bool dense_due() const;
  // Ends step step() + 1: makes it durable in the background. `structure` is null when the dense state is not given.
  struct Dense {
    std::span<const std::byte> structure;
    std::span<const DenseTensor> tensors;
    std::size_t tensors_bytes;
  };
  std::uint64_t commit(std::uint64_t cursor, const Dense* dense);
  // Of a pool without tables, which holds the dense states of a group: the mark's step, any after step(), with its
  // dense state.
  void commit_dense(const StepMark& mark, const Dense& dense);
  // Of a pool of a group: no pool of the group will ever go back below `step`.
  void note_group_durable(std::uint64_t step);
  // After that, and a flush: whatever the log still holds goes home.
  void empty_log();
  // Writes the dense state of step() itself, between steps: a new pool's initial state, or that of the newest step
  // where it was not due. Waits.
  void write_dense(const Dense& dense);

  // Stores rows of a new pool, before its first step, from elsewhere: rows of a table, in any order and each once, weights
  // as its dtype keeps them and, where `state` is not empty, optimizer state. Not logged: build the pool under another
  // name and rename it.
  void import_rows(std::size_t table, std::span<const std::uint64_t> rows, std::span<const std::byte> weights,
                   std::span<const float> state);
  // The same of rows [first, ...).
  void import_rows(std::size_t table, std::uint64_t first, std::span<const std::byte> weights,
                   std::span<const float> state);
  // The same of rows whose weights and state lie together.
  void import_values(std::size_t table, std::span<const std::uint64_t> rows, std::span<const std::byte> values);

  // No further step is going to be committed, but the one under way: no commit is held up for the sake of later ones any
  // more. From any thread, while the pool is there.
  void end_steps();
  // Waits until everything committed is durable, the newest dense state included.
  void flush();
  // flush, sync, mark as cleanly closed. The pool can be used no more, and has given back its memory and its files, also
  // where it throws; what it counted, it still tells. Idempotent; in a child of fork it does nothing.
  void close();
  // Whether this process is a fork of the one that opened the pool.
  bool is_inherited() const { return !made_here_.is_here(); }

  // Which of a table's rows has which key, where ids of the table are keys; else nothing. Filled from the rows when it is
  // asked for first, before the first step that updates them.
  std::shared_ptr<KeyDirectory> keys(std::uint32_t table);
  // The batch is on its way, and its rows are going to be read before it is captured: for some steps its keys keep them.
  // Throws step where some have lost theirs since it was planned.
  void expect_keys(const Plan& plan);
  // Of a table with keys, in step step() + 1: records of earlier steps do not count. Of each of its shards, where these
  // count for themselves (max_keys), else one.
  std::vector<std::uint64_t> oldest_keys(std::uint32_t table) const;
  // This pool was made anew, with more tables, in the place of one that nothing had happened in, and which is closed: collections
  // that were made of it plan with its directories.
  void take_keys(const Pool& former);

  std::uint64_t step() const { return step_; }
  std::uint64_t cursor() const { return cursor_; }
  std::uint64_t row_updates() const { return row_updates_; }
  std::uint64_t durable_step() const { return durable_step_.load(std::memory_order_acquire); }
  std::uint64_t rows_durable_step() const { return rows_durable_step_.load(std::memory_order_acquire); }
  std::uint64_t epoch() const { return report_.epoch; }
  std::uint64_t log_bytes() const;
  std::uint64_t log_bytes_free() const;
  // Of a pool that is open.
  Merging merging() const { return backend_->merging(); }
  std::optional<Traffic> traffic() const;
  // Of the tables in which keys may wait or be left behind, together; nothing where there is none.
  std::optional<KeyCounts> key_counts() const;
  // What was asked of a dialled medium; nothing where it is as it is.
  std::optional<Dial::Counts> dial_counts() const;
  // When the stages beside training ran that ended since the last call.
  std::vector<StageSpans::Span> take_spans();

 private:
  // Of a backend that is there no more.
  struct Figures {
    std::uint64_t log_bytes;
    std::uint64_t log_bytes_free;
    bool log_is_low;
    std::optional<Traffic> traffic;
    std::optional<KeyCounts> key_counts;
  };

  void import_into_backend(std::size_t table, const ImportedRows& imported);
  void recover(const std::string& directory, const OpenOptions& options);
  void follow_group(const InGroup& group, RecoveryPlan& plan) const;
  void commit_mark(const StepMark& mark, const Dense* dense);
  void make_step_durable(const StepMark& mark, const std::function<void()>& make_rows_durable,
                         std::uint32_t dense_parts, bool has_dense);
  void begin_update(const std::vector<const CollectionSpec*>& specs);
  // Finishes the pending dense write, and waits for everything else.
  void finish_pending();
  void make_backend(const std::string& directory, const OpenOptions& options, BlockWatcher* watcher);
  void stage(const StepMark& mark, const Dense& dense);
  UpdateSpec of_this_step(UpdateSpec spec) const;
  // Of the background thread: `step` is what exact recovery never goes below from now on.
  void note_durable(std::uint64_t step);
  void check_open() const;
  // Throws config where there is no such table.
  const RowTable& checked_table(std::size_t number) const;
  void check_here() const;
  void check_not_closed() const;
  void check_rows(const Plan& plan) const;
  void check_trains(const Plan& plan) const;
  void keep_keys(const Plan& plan, std::uint64_t steps);
  // Of all tables, for the step after step().
  void leave_keys_behind();
  void count_keys(const CollectionSpec& spec, const std::vector<WorkingRows>& rows,
                  const std::vector<std::uint64_t>& num_rows);
  void count_keys(const Capture& capture);
  bool leaves_keys(const Plan& plan) const;
  // Of a plan, as they are at the end of the newest committed step; without a trace.
  void read_rows(const Plan& plan, const std::vector<WorkingRows>& rows);
  void check_capture(const Capture& capture) const;
  void note_written(const std::optional<NamedRow>& non_finite);
  void check_finite() const;
  void check_captures(const std::vector<RowGradients>& gradients) const;
  // Runs a verb's work; where it throws, what counts as a failure stays one.
  template <class Work>
  decltype(auto) latching(const Work& work) {
    try {
      return work();
    } catch (...) {
      latch();
    }
  }
  // Of an exception that is being handled, which it throws again.
  [[noreturn]] void latch();
  void sync_everything();
  // Ends all threads that write, and gives back what the pool has, its lock last.
  void let_go();
  // At level process, after a sync that failed: the next opening must not believe the rows.
  void distrust() noexcept;

  const MadeHere made_here_;
  const std::uint64_t number_;  // of all pools that this process opened
  std::unique_ptr<PoolLock> lock_;
  OwnedHere<Medium> medium_;
  OwnedHere<Superblock> superblock_;
  OwnedHere<DenseSlots> dense_;
  RecoveryReport report_{};
  std::uint32_t dense_interval_ = 1;
  bool in_group_ = false;
  bool synchronous_ = false;
  std::shared_ptr<Dial> dial_;  // null: the medium is as it is
  std::shared_ptr<Dial> log_dial_;  // of a row log's medium

  std::uint64_t step_ = 0;  // committed
  std::uint64_t cursor_ = 0;
  std::uint64_t row_updates_ = 0;  // steps that updated rows
  std::uint64_t staged_step_ = 0;  // newest step whose dense state was staged
  bool has_dense_ = false;
  bool updated_ = false;  // the current step has written rows home
  std::optional<NamedRow> non_finite_;  // one of these that is not finite: the step is not committed
  std::vector<bool> updated_tables_;  // and of these tables
  std::optional<Figures> last_;  // of one that is closed, and of no other
  std::atomic<bool> is_changing_ = false;  // a thread is in a verb that changes rows or steps
  Background::Ticket last_commits_[2] = {0, 0};  // the older one first
  Evaluator evaluator_;
  RelaxedLookup relaxed_lookup_;
  std::vector<TableKeys> keys_;  // by table; of those with keys, once they were asked for

  std::atomic<std::uint64_t> durable_step_{0};
  std::atomic<std::uint64_t> rows_durable_step_{0};
  StageSpans spans_;
  std::mutex ending_;  // guards backend_ where end_steps meets close
  OwnedHere<RowBackend> backend_;  // none once it is closed
  // Last: its thread ends before anything it uses.
  OwnedHere<Background> owned_background_ = std::make_unique<Background>("hf-commit");
  Background& background_ = *owned_background_;
};

}  // namespace holdfast
