// Log store: rows on a block device. New versions are appended to the row log; a merge folds them into the home files.
//
// Invariants, beside those of its parts
// - A row's newest version is in the log where the index says so, else at home (log_index.h); a row that has neither is
//   untouched and has its initial value, a function of (seed, table, row).
// - append writes the log alone. Its rows can be fetched when it returns; they are durable after the next sync.
// - Home is written by import_rows, while the log holds no record, and by merge (home_writer.h, log_merge.h), with versions
//   that are durable in the log and stay there until home is durable. One of these at a time.
// - Home never holds a version of a step after the merge's limit. So roll_back must not go below a limit that was
//   ever given to merge, in this life or an earlier one: the caller's limit is the older valid dense slot's step.
// - An extent of the log is written again only after: home is durable, the checkpoint that moves the tail is durable,
//   the index does not name it any more, and every fetch that resolved rows into it is done.
// - One thread appends, recovers, rolls back and imports; drafts, fetch, touched_rows, sync and merge may be called from
//   any.
// - A full medium is an error (full) after which nothing has changed. After any other failure of an append's or a
//   sync's writing, or of a merge once it writes home, these refuse until the store is opened again. A failed fetch
//   changes nothing.
// - A store that is not writable opens its files for reading only, and writes nothing.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "layout/label.h"
#include "log_store/failure_latch.h"
#include "log_store/home_writer.h"
#include "log_store/homes.h"
#include "log_store/log_index.h"
#include "log_store/log_merge.h"
#include "log_store/log_records.h"
#include "log_store/log_writer.h"
#include "log_store/logged_versions.h"
#include "log_store/row_fetch.h"
#include "log_store/row_log.h"
#include "log_store/store_parts.h"
#include "log_store/store_survey.h"
#include "log_store/store_sweep.h"
#include "rows/row_table.h"
#include "rows/row_values.h"

namespace holdfast {

// A record that was read whole, in memory of its own.
struct FollowedRecord {
  RowLog::Link link;
  SpareBuffers::Borrowed data;
};

class LogStore {
 public:
  // Makes the files of a store in `directory`, which exists: sparse homes, an allocated ring that begins after the
  // mark's step. adopt: the homes are there, and stay as they are. Throws full; corrupted where one that is adopted is
  // missing, another pool's, or of another size than it needs. identity: of the pool; its rows' is in the tables.
  static void create(const std::string& directory, const std::vector<RowTable>& tables, std::uint64_t ring_bytes,
                     Caching caching = Caching::direct, const StepMark& mark = {}, bool adopt = false,
                     const Identity& identity = {});
  // Those that have a label.
  static std::vector<LabelledName> files(const std::vector<RowTable>& tables, const Identity& identity);

  // Opens them; throws corrupted where one is missing or has another size than it needs. recover comes next, or scan
  // and view where the store is not writable.
  LogStore(const std::string& directory, std::vector<RowTable> tables, const LogStoreOptions& options = {});

  // Reads the log, once, and returns what its newest whole record says. Throws corrupted. Changes nothing.
  StepMark scan();
  // Checks that life `epoch` can begin at the end of `step_limit`, and reads where the rows of the steps up to there
  // are. Throws corrupted. Changes nothing.
  void index(std::uint64_t epoch, std::uint64_t step_limit);
  // Begins life `epoch`, once, greater than all before: reads the log unless scan and index did, forgets steps after
  // `step_limit`, and returns the step at whose end rows are now, durably.
  std::uint64_t recover(std::uint64_t epoch, std::uint64_t step_limit);
  // Back to the end of `step`, or of the newest step before it, durably. Only between recover and the first append.
  // Throws step where rows are merged beyond.
  void roll_back(std::uint64_t step);
  // The same in a store that steps were appended to, all of which are durable: life `epoch`, a later one, begins at the
  // end of `step`. Before anything else goes on, and beside no merge, `forgotten` is told the rows of the steps that are
  // undone, by table and in no order. Nothing else may call meanwhile. check_go_back says whether it can be.
  using Forgotten = std::function<void(std::vector<std::vector<std::uint64_t>> rows)>;
  void check_go_back(std::uint64_t epoch, std::uint64_t step) const { log_.check_start(epoch, step); }
  void go_back(std::uint64_t epoch, std::uint64_t step, const Forgotten& forgotten);

  // After scan, in a store that is not writable: rows are at the end of the newest step. Then fetch and touched_rows
  // may be called, nothing that writes.
  void view();
  // Of a view: every image that does not hold, in the log or, where the log has no version of a step up to `step`, at
  // home; by file and offset, 100 problems at most.
  std::vector<std::string> verify(std::uint64_t step);

  // After scan, in a store that is not writable and is no view: follow gives the records that scan found, oldest first,
  // then those that a writer has appended since, one at a call; nothing while there is no further one. Throws corrupted
  // where a record that was there does not hold any more. Returns the links of
  // the record before the first one, and of those that scan found.
  std::vector<RowLog::Link> follow_from_tail();
  std::optional<FollowedRecord> follow();
  void visit_rows(
      const FollowedRecord& record,
      const std::function<void(std::uint32_t table, std::uint64_t row, const std::byte* image)>& visit) const;
  std::vector<RowTable> tables() const;
  // The newest checkpoint's merged step, as it is in the file now.
  std::uint64_t read_merged_step() const { return log_.read_merged_step(); }
  // For messages: where the checkpoint lies that counts, and the one that neither counts nor holds, if there is such a
  // one.
  std::string place_of_checkpoint() const { return log_.place_of_checkpoint(); }
  std::uint64_t epoch_of_checkpoint() const { return log_.epoch_of_checkpoint(); }
  std::optional<std::string> broken_checkpoint() const { return log_.broken_checkpoint(); }
  std::optional<std::uint64_t> offset_of_broken_checkpoint() const { return log_.offset_of_broken_checkpoint(); }
  const std::string& log_name() const { return log_.file().name(); }
  // Rows as home has them at that instant, from place `first` on in the order in which they lie there, `count` at most;
  // those of them that do not hold, because they are being written, are listed in `torn` instead. What is in the log
  // alone is not there. Places begin with 0, and end with the table's number of rows.
  HomeRead read_home(std::uint32_t table, std::uint64_t first, const RowValues& out, std::size_t count,
                     std::vector<std::uint64_t>& torn) {
    return store_survey::read_home(view_, table, first, out, count, torn);
  }

  // These need a store that was recovered, or a view where they only read; a step error otherwise.

  // Fills in the newest versions: weights and state, and in `rows` the fresh bit of those that are untouched (bits are
  // clear on entry). Throws corrupted where a row does not hold.
  void fetch(std::span<const TableRows> tables);

  // The rows at or after `first` that an update or an import ever wrote, ascending, `count` at most. Of those that are
  // appended meanwhile any may be there.
  std::vector<std::uint64_t> touched_rows(std::uint32_t table, std::uint64_t first, std::size_t count);

  // For whoever wants all that there is: it is read in long pieces, and `take` gets rows of one table as they were at some
  // time in the call, some at a time. What is appended or merged beside it, it may have or not.
  using Take = store_sweep::Take;
  // What homes have of the table, in stretches of about so many bytes, by where they lie. Not beside a merge.
  std::vector<HomeStretch> home_stretches(std::uint32_t table, std::uint64_t bytes) const {
    return store_sweep::home_stretches(view_, table, bytes);
  }
  // Of a stretch the rows of which the log has no version.
  void sweep_home(const HomeStretch& stretch, const Take& take);
  // The rows whose newest version lies in the `bytes` of the ring before `back` from its head, of tables that are wanted.
  void sweep_log(std::uint64_t back, std::uint64_t bytes, const store_sweep::IsWanted& is_wanted, const Take& take);
  // Which of the rows such calls may give.
  std::vector<bool> may_be_swept(std::uint32_t table, std::span<const std::uint64_t> rows) const {
    return store_sweep::may_be_swept(view_, table, rows);
  }

  // Of a record of these rows, and of one that is made of these drafts.
  std::uint64_t record_bytes(std::span<const TableRows> tables) const { return records_.shape_of(tables).header.bytes; }
  std::uint64_t record_bytes(std::span<const RecordDraft> drafts) const { return record_bytes(tables_of(drafts)); }
  // The rows of these drafts.
  static std::vector<TableRows> tables_of(std::span<const RecordDraft> drafts) { return LogRecords::tables_of(drafts); }
  // Begins a record of these rows; tables ascend, and only the rows' numbers are read.
  RecordDraft draft(std::span<const TableRows> tables) const { return records_.draft(tables); }
  // Packs the new values of `count` of a section's rows, from its row number `begin` on; `rows` are these alone. `begin`
  // is a multiple of unit_rows, and so is `count` but at the end. Each row once, by any thread.
  void pack_rows(const RecordDraft& draft, std::size_t section, const WorkingRows& rows, std::size_t begin,
                 std::size_t count) const {
    records_.pack_rows(draft, section, rows, begin, count);
  }
  std::size_t unit_rows(std::uint32_t table) const { return tables_[table].layout.unit_rows(); }
  // Makes one record of drafts of different tables, of which every row is packed, at the end of the mark's step; of none
  // where the step updated nothing. One alone becomes the record, several are copied. Throws batch_too_large where the
  // ring never has the room.
  PackedRecord seal(const StepMark& mark, std::vector<RecordDraft> drafts) const {
    return records_.seal(mark, std::move(drafts));
  }
  // All of that where all values are there.
  PackedRecord pack(const StepMark& mark, std::span<const TableRows> tables) const {
    return records_.pack(mark, tables);
  }
  // Writes the record, whose step is greater than all before. Returns its bytes, or nothing where the ring has no room
  // now: merge, then try again.
  std::optional<std::uint64_t> append(const PackedRecord& packed);
  // Makes all steps durable whose append had returned.
  void sync();
  // Folds the records of steps up to the limit that are durable into home. Returns how many bytes of the log that was;
  // 0: nothing to do. It asks for the limit, a step that may rise meanwhile, again and again, on its own thread. Between
  // its parts it calls `rest`: there it can be held up, so that fetches and commits come first, and rows come again that
  // need not be written. wanted: how long it would rest; progress: how much of all is done, 0 to 1. Where the answer is
  // that it is in a hurry, it takes long parts, which get more done and hold others up for longer. Where `gives_up`,
  // which it asks between its parts and while it reads, says so, it leaves everything in the log and returns 0; once it
  // is past its last write home it ends as others do. most_bytes: of the log, that it takes, but one record at least: the
  // oldest ones, whose space is free the sooner.
  using Limit = LogMerge::Limit;
  using Rest = LogMerge::Rest;
  using GivesUp = LogMerge::GivesUp;
  std::uint64_t merge(
      const Limit& limit, const Rest& rest = [](std::chrono::nanoseconds, double) { return true; },
      const GivesUp& gives_up = [] { return false; }, std::uint64_t most_bytes = ~std::uint64_t{0});

  // Where rows are in memory as well, a merge need not read them in the log: of those of the rows of which it has the very
  // version that was appended last, `copy` writes weights and state to `out`, each row `stride` bytes behind the one
  // before, and says which they are. It is called until another one is given, or none.
  using CopyFromMemory = LoggedVersions::CopyFromMemory;
  void merge_from_memory(CopyFromMemory copy) { versions_.set_memory(std::move(copy)); }

  // Writes these rows straight home. Only while the log holds no record, and alone. Durable after sync_home; what a
  // failure or a crash before that leaves of them is unknown, but for rows that home may have had before: these go
  // through the log, so each is old or new. Throws config where a row is not there.
  void import_rows(std::uint32_t table, const ImportedRows& imported);
  void sync_home();

  // What the newest record says, or said, if it is merged.
  StepMark last() const { return log_.last(); }
  std::uint64_t durable_step() const { return log_.durable_step(); }
  std::uint64_t merged_step() const { return log_.merged_step(); }
  std::uint64_t ring_bytes() const { return log_.ring_bytes(); }
  std::uint64_t used_bytes() const { return log_.used_bytes(); }  // of the ring
  // By table, how many rows its homes have room for, or have where they lie by first touch.
  std::vector<std::uint64_t> home_rows() const { return homes_.num_rows(); }
  // Of the tables, as far as they lie here: how many rows a block of home has, and how many blocks.
  double rows_per_home_block() const { return homes_.rows_per_block(); }
  double num_home_blocks() const { return homes_.num_blocks(); }
  std::size_t index_entries() const { return index_.size(); }
  std::size_t index_bytes() const { return index_.memory_bytes() + homes_.memory_bytes(); }
  LogStoreCounters counters() const { return io_.counters.read(); }

 private:
  void rebuild_index(std::uint64_t step);
  void require_readable() const;
  void require_usable() const;

  const bool writable_;
  StoreIo io_;
  const StoreTables tables_;
  RowLog log_;
  FailureLatch latch_;
  LogIndex index_;
  Homes homes_;
  LogRecords records_;
  LogWriter log_writer_;
  HomeWriter home_writer_;
  const StoreView view_;
  LoggedVersions versions_;
  LogMerge merge_;

  std::mutex merge_mutex_;  // of one who merges, imports, syncs home or goes back
  bool scanned_ = false;
  std::optional<std::uint64_t> indexed_step_;
  bool viewed_ = false;
  std::deque<RowLog::Live> unread_;  // of those that scan found, by whoever follows
  std::uint64_t epoch_ = 0;  // 0: not recovered
};

}  // namespace holdfast
