// Log store: rows on a block device. New versions are appended to the row log; a merge folds them into the home
// files.
//
// Invariants
// - A row's newest version is in the log where the index says so, else at home; a row that has neither is untouched
//   and has its initial value, a function of (seed, table, row).
// - append writes the log alone. Its rows can be fetched when it returns; they are durable after the next sync.
// - What is read and written is whole units of the device, which may be larger than sectors: what an update does not
//   change in them is written with the bytes that it had.
// - Home is written by import_rows, while the log holds no record, and by merge, with versions that are durable in the
//   log and stay there until home is durable. Only sectors are atomic, and that is enough: an image that shares its
//   sector is old or new, one that has several has them to itself, and rows that are not merged are written with the
//   bytes that they had. What a torn merge wrote, the log has; until a later merge writes it again, nobody reads it.
// - Home never holds a version of a step after the merge's limit. So roll_back must not go below a limit that was
//   ever given to merge, in this life or an earlier one: the caller's limit is the older valid dense slot's step.
// - A merge takes every record of a step up to the limit that is durable, or the oldest of them, and writes each row's
//   newest version of these, but for rows of which a later record stands: one that is durable, of a step up to what the limit is by then.
//   That record stays in the log, where the index finds the row, in this life and after every recovery; the checkpoint
//   says that none goes back before it. The checkpoint, which moves the tail, is what makes versions that were not
//   written home unreachable; a crash before it leaves everything in the log. Any other append beside the merge is of
//   no account.
// - Which rows home has is known: of a row that neither the log nor home has nothing is read. Home's addresses say it; in
//   pools before version 5, where rows lie by number, HomeBits, but for pools made before those were, and for homes that
//   were adopted.
// - After a merge the index names none of the records that it took: the versions that it named were each the newest of
//   their row, and those are home. A row that was appended meanwhile has another entry, which stays.
// - A merge that is given up leaves what a crash in it would: no checkpoint has moved, so everything is in the log, where
//   the index finds it, and bits of HomeBits that are set say nothing. What it wrote home is not relied on, was not synced
//   perhaps, and is written again by the next merge that takes those rows, in this life or a later one, before that
//   one's sync. It is no failure.
// - An extent of the log is written again only after: home is durable, the checkpoint that moves the tail is durable,
//   the index does not name it any more, and every fetch that resolved rows into it is done.
// - A merge writes home after the fetches that had begun before it are done. Those that begin later find the rows
//   that it moves in the log, so no row is read at home while it is being written there.
// - One thread appends, recovers, rolls back and imports; drafts, fetch, touched_rows, sync and merge may be called from
//   any. Of a fetch and an append at the same time the fetch sees all of a row or nothing of it.
// - Rows that a merge takes from memory are what the log has of them: who copies them says that nothing newer was appended
//   then, and the index says afterwards that nothing newer was appended than what the merge chose.
// - A merge takes memory for a few sections of records and for a bounded part of the images that it moves, whatever the
//   size of the log and of the tables.
// - A device may tell one of those who sync at the same time, and only that one, that it lost what all of them wrote. So a
//   merge's checkpoint waits for a sync of the log that is under way, and is not written if that failed.
// - A full medium is an error (full) after which nothing has changed. After any other failure of an append's or a
//   sync's writing, or of a merge once it writes home, these refuse until the store is opened again. A failed fetch
//   changes nothing.
// - A store that is not writable opens its files for reading only, and writes nothing.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/format.h"
#include "kernels/kernels.h"
#include "layout/label.h"
#include "log_store/home.h"
#include "log_store/log_store_counters.h"
#include "log_store/record_draft.h"
#include "log_store/row_log.h"
#include "media/block_file.h"
#include "media/block_queue.h"
#include "media/spare_buffers.h"
#include "rows/row_image.h"
#include "rows/row_index.h"
#include "rows/row_table.h"

namespace holdfast {

struct LogStoreOptions {
  Caching caching = Caching::direct;
  BlockQueue::Way way = BlockQueue::Way::io_uring;
  BlockWatcher* watcher = nullptr;  // for tests
  Dial* dial = nullptr;  // of the homes' device; null: as it is
  Dial* log_dial = nullptr;  // of the log's
  bool writable = true;
  std::uint64_t ring_bytes = 0;  // that the log was made with; 0: whatever it has
  Identity identity{};  // of the pool
  std::size_t merge_bytes = std::size_t{64} << 20;  // of versions that a merge collects before it writes them
  std::size_t merge_slots = 8192;  // of the index that it looks at at a time, while fetches and appends wait
};

// A record that was read whole, in memory of its own.
struct FollowedRecord {
  RowLog::Link link;
  SpareBuffers::Borrowed data;
};

// A row's newest version, where it was read to.
struct SweptRow {
  std::uint64_t row;
  const std::byte* weights;
  const std::byte* state;
};

// Of one of a table's homes, images [first, end).
struct HomeStretch {
  std::uint32_t table;
  std::uint32_t home;
  std::uint64_t first;
  std::uint64_t end;
};

// What was read of a table's homes: so many rows; it goes on at place `next`.
struct HomeRead {
  std::size_t num_rows;
  std::uint64_t next;
};

class SectorRuns;

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
  HomeRead read_home(std::uint32_t table, std::uint64_t first, const WorkingRows& out, std::size_t count,
                     std::vector<std::uint64_t>& torn);

  // These need a store that was recovered, or a view where they only read; a step error otherwise.

  // Fills in the newest versions: weights and state, and in `rows` the fresh bit of those that are untouched (bits are
  // clear on entry). Throws corrupted where a row does not hold.
  void fetch(std::span<const TableRows> tables);

  // The rows at or after `first` that an update or an import ever wrote, ascending, `count` at most. Of those that are
  // appended meanwhile any may be there.
  std::vector<std::uint64_t> touched_rows(std::uint32_t table, std::uint64_t first, std::size_t count);

  // For whoever wants all that there is: it is read in long pieces, and `take` gets rows of one table as they were at some
  // time in the call, some at a time. What is appended or merged beside it, it may have or not.
  using Take = std::function<void(std::uint32_t table, std::span<const SweptRow> rows)>;
  // What homes have of the table, in stretches of about so many bytes, by where they lie. Not beside a merge.
  std::vector<HomeStretch> home_stretches(std::uint32_t table, std::uint64_t bytes) const;
  // Of a stretch the rows of which the log has no version.
  void sweep_home(const HomeStretch& stretch, const Take& take);
  // The rows whose newest version lies in the `bytes` of the ring before `back` from its head, of tables that are wanted.
  void sweep_log(std::uint64_t back, std::uint64_t bytes, const std::function<bool(std::uint32_t table)>& is_wanted,
                 const Take& take);
  // Which of the rows such calls may give.
  std::vector<bool> may_be_swept(std::uint32_t table, std::span<const std::uint64_t> rows) const;

  // Of a record of these rows, and of one that is made of these drafts.
  std::uint64_t record_bytes(std::span<const TableRows> tables) const { return shape_of(tables).header.bytes; }
  std::uint64_t record_bytes(std::span<const RecordDraft> drafts) const { return record_bytes(tables_of(drafts)); }
  // The rows of these drafts.
  static std::vector<TableRows> tables_of(std::span<const RecordDraft> drafts);
  // Begins a record of these rows; tables ascend, and only the rows' numbers are read.
  RecordDraft draft(std::span<const TableRows> tables) const;
  // Packs the new values of `count` of a section's rows, from its row number `begin` on; `rows` are these alone. `begin`
  // is a multiple of unit_rows, and so is `count` but at the end. Each row once, by any thread.
  void pack_rows(const RecordDraft& draft, std::size_t section, const WorkingRows& rows, std::size_t begin,
                 std::size_t count) const;
  std::size_t unit_rows(std::uint32_t table) const { return tables_[table].layout.unit_rows(); }
  // Makes one record of drafts of different tables, of which every row is packed, at the end of the mark's step; of none
  // where the step updated nothing. One alone becomes the record, several are copied. Throws batch_too_large where the
  // ring never has the room.
  PackedRecord seal(const StepMark& mark, std::vector<RecordDraft> drafts) const;
  // All of that where all values are there.
  PackedRecord pack(const StepMark& mark, std::span<const TableRows> tables) const;
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
  using Limit = std::function<std::uint64_t()>;
  using Rest = std::function<bool(std::chrono::nanoseconds wanted, double progress)>;
  using GivesUp = std::function<bool()>;
  std::uint64_t merge(
      const Limit& limit, const Rest& rest = [](std::chrono::nanoseconds, double) { return true; },
      const GivesUp& gives_up = [] { return false; }, std::uint64_t most_bytes = ~std::uint64_t{0});

  // Where rows are in memory as well, a merge need not read them in the log: of those of the rows of which it has the very
  // version that was appended last, `copy` writes weights and state to `out`, each row `stride` bytes behind the one
  // before, and says which they are. It is called until another one is given, or none.
  using CopyFromMemory = std::function<std::vector<bool>(std::uint32_t table, std::span<const std::uint64_t> rows,
                                                         std::byte* out, std::size_t stride)>;
  void merge_from_memory(CopyFromMemory copy);

  // Writes these rows, in any order and each once, straight home; their state becomes zeros where `state` is empty. Only
  // while the log holds no record, and alone. Durable after sync_home; what a failure or a crash before that leaves of
  // them is unknown, but for rows that home may have had before: these go through the log, so each is old or new.
  // Throws config where the arrays do not fit the table.
  void import_rows(std::uint32_t table, std::span<const std::uint64_t> rows, std::span<const std::byte> weights,
                   std::span<const float> state);
  void sync_home();

  // What the newest record says, or said, if it is merged.
  StepMark last() const { return log_.last(); }
  std::uint64_t durable_step() const { return log_.durable_step(); }
  std::uint64_t merged_step() const { return log_.merged_step(); }
  std::uint64_t ring_bytes() const { return log_.ring_bytes(); }
  std::uint64_t used_bytes() const { return log_.used_bytes(); }  // of the ring
  // By table, how many rows its homes have room for, or have where they lie by first touch.
  std::vector<std::uint64_t> home_rows() const;
  // Of the tables, as far as they lie here: how many rows a block of home has, and how many blocks.
  double rows_per_home_block() const;
  double num_home_blocks() const;
  std::size_t index_entries() const;
  std::size_t index_bytes() const;
  LogStoreCounters counters() const;

 private:
  struct Table {
    RowTable what;
    RowLayout layout;
    std::vector<Home> homes;  // by row; one, or one for each shard that this writer owns
    RowIndex index;  // guarded by mutex_

    // Of a row that is in one; throws config otherwise.
    std::size_t home_of(std::uint64_t row) const;
    bool has(std::uint64_t row) const;
  };
  // A record's shape: its header's sizes, and its sections.
  struct Shape {
    format::RowLogHeader header{};
    std::vector<format::RowLogSection> sections;
  };
  // One row to read: where it lies, and which row of which of the caller's tables it is.
  struct Item {
    std::uint64_t offset;  // of the image, in the file
    std::uint32_t request;
    std::uint32_t file;  // 0: the log, else 1 + which home
    std::size_t row;
  };
  static bool lies_before(const Item& a, const Item& b) {
    return a.file != b.file ? a.file < b.file : a.offset < b.offset;
  }
  // A row that nobody has: of a table of the caller's, and which of its rows.
  struct Untouched {
    std::uint32_t request;
    std::size_t row;
  };
  // So many bytes of the ring, from `begin` on.
  struct Stretch {
    std::uint64_t begin = 0;
    std::uint64_t bytes = 0;
  };
  // Records of the log, oldest first, and where they lie.
  struct Records {
    std::vector<RowLog::Live> records;
    Stretch stretch;

    std::uint64_t last_step() const { return records.back().link.mark.step; }
  };
  // One table's part of a record.
  struct Part {
    std::uint64_t position;  // of the record
    format::RowLogSection section;
  };
  // One of several parts of a table, of about as many rows each.
  struct Share {
    std::uint64_t number;
    std::uint64_t of;
  };
  // A row's version, by where the index says that it is.
  struct Located {
    std::uint64_t row;
    std::uint64_t location;
  };
  // Of a table: a version that goes home, and where.
  struct Version {
    std::uint64_t row;
    std::uint64_t image;  // where in `images`
    std::uint64_t address = 0;
    std::uint32_t home = 0;
  };
  struct Versions {
    std::vector<Version> rows;
    std::vector<std::byte> images;
  };
  class Merge;
  // Of what is read or written at once.
  struct PartSize {
    std::size_t bytes;
    std::size_t requests;
  };
  // The index's rows of one table in order, as they were at some version of the index.
  struct Listing {
    std::uint32_t table = 0;
    std::uint64_t version = 0;  // none yet
    std::vector<std::uint64_t> rows;
  };
  // Rows of a home in memory, ascending by address, in whole units of the device.
  struct Piece {
    const Home* home;
    std::uint64_t first_address;
    std::vector<std::uint64_t> rows;  // by address
    std::uint64_t offset;  // in its file, of what is read
    std::uint64_t bytes;
    SpareBuffers::Borrowed data;

    const std::byte* image(const RowLayout& layout, std::size_t i) const {
      return data.data() + (layout.offset_of(first_address + i) - offset);
    }
  };
  // While it lives, the extents that a fetch resolved rows into are not used again.
  class Fetching {
   public:
    Fetching(LogStore& store, std::uint64_t number) : store_(store), number_(number) {}
    ~Fetching() {
      {
        const std::lock_guard lock(store_.mutex_);
        store_.fetches_.erase(number_);
      }
      store_.fetch_done_.notify_all();
    }
    Fetching(const Fetching&) = delete;
    Fetching& operator=(const Fetching&) = delete;

   private:
    LogStore& store_;
    std::uint64_t number_;
  };
  // A row whose newest version is in the log.
  struct LoggedRow {
    std::uint64_t location;  // ascends with the ring's bytes
    std::uint64_t row;
    std::uint32_t table;
  };

  std::optional<std::uint64_t> append_record(const PackedRecord& packed);
  std::uint64_t merge_records(const Limit& limit, const Rest& rest, const GivesUp& gives_up, std::uint64_t most_bytes);
  // Where the index says that a section's images are, one behind another.
  class Locations {
   public:
    Locations(std::uint64_t first, const RowLayout& layout) : first_(first), layout_(layout) {}
    std::uint64_t next() { return first_ + layout_.offset_of(number_++); }

   private:
    std::uint64_t first_;
    const RowLayout& layout_;
    std::uint64_t number_ = 0;
  };

  std::size_t bytes_around(const RowLayout& layout) const;
  Shape shape_of(std::span<const TableRows> tables) const;
  RecordDraft join(std::span<const RecordDraft> drafts) const;
  Locations locations_of(std::uint64_t position, const format::RowLogSection& section) const;
  static std::uint64_t offset_of_location(std::uint64_t location);
  void check_sections(const RowLog::Live& record, const std::byte* data) const;
  SpareBuffers::Borrowed read_rows(const RowLog::Live& record) const;
  void index_record(const RowLog::Live& record, const std::byte* data);
  void rebuild_index(std::uint64_t step);
  void read_addresses();

  // Returns the fetch's number: from now on it is in `fetches_`.
  std::uint64_t resolve(std::span<const TableRows> tables, std::vector<Item>& items, std::vector<Untouched>& untouched);
  std::size_t read_items(std::span<const TableRows> tables, std::span<const Item> items, const SectorBuffer& buffer);
  void take_image(const TableRows& request, const Item& item, const std::byte* image) const;
  void take_initial(const TableRows& request, std::size_t u) const;
  const BlockFile& file_of(const TableRows& request, const Item& item) const;

  std::vector<std::uint64_t> rows_in_log(std::uint32_t table, std::uint64_t first, std::size_t count);
  std::vector<std::uint64_t> rows_at_home(const Table& table, std::uint64_t first, std::uint64_t end,
                                          std::size_t count);
  std::vector<std::uint64_t> rows_with_address(const Table& table, std::uint64_t first, std::uint64_t end,
                                               std::size_t count) const;
  std::vector<std::uint64_t> rows_with_tag(const Table& table, std::uint64_t first, std::uint64_t end,
                                           std::size_t count);
  std::vector<LoggedRow> rows_in_log_behind(std::uint64_t back, std::uint64_t bytes,
                                            const std::function<bool(std::uint32_t table)>& is_wanted);
  std::size_t take_logged(std::span<const LoggedRow> rows, const SectorBuffer& buffer, const Take& take);
  void give_swept(std::uint32_t table, std::span<const std::uint64_t> rows, std::span<const std::byte* const> images,
                  const Take& take, const std::function<std::string(std::size_t)>& place) const;
  std::vector<std::size_t> not_in_log(const Table& table, std::span<const std::uint64_t> rows) const;
  std::uint64_t begin_fetch(bool reads_log);
  void note_fetched(std::uint64_t rows, std::uint64_t bytes, std::uint64_t requests);
  std::optional<Piece> place_piece(const Table& table, const Home& home, std::uint64_t address, std::uint64_t bytes,
                                   std::uint64_t end);
  void read_piece(Piece& piece);
  std::optional<Piece> next_piece(const Table& table, const Home& home, std::uint64_t address, std::uint64_t bytes);
  void verify_home(std::uint32_t number, std::vector<std::string>& problems);
  void verify_record(const RowLog::Live& record, std::vector<std::string>& problems);

  Records records_between(std::optional<std::uint64_t> after_step, std::uint64_t limit_step,
                          std::uint64_t most_bytes = ~std::uint64_t{0}) const;
  bool lies_in(const Stretch& stretch, std::uint64_t location) const;
  // Called again and again by what takes long in a merge; throws where that is given up.
  using Between = std::function<void()>;
  // Goes through a table's index part by part, each from a slot on, under the mutex: visit_part returns the slot after it. `begin`
  // says that what was seen so far is going to be seen again, since entries came to lie elsewhere meanwhile.
  template <class Begin, class Visit>
  void visit_index(Table& table, const Begin& begin, const Between& between, const Visit& visit_part) {
    std::size_t num_slots = 0;
    for (std::size_t slot = 0;;) {
      between();
      const std::lock_guard lock(mutex_);
      if (table.index.is_growing() || table.index.num_slots() != num_slots) {
        table.index.grow_on(merge_slots_);
        if (table.index.is_growing()) continue;
        num_slots = table.index.num_slots();
        begin();
        slot = 0;
      }
      if (slot == num_slots) return;
      slot = visit_part(slot);
    }
  }
  std::vector<std::vector<Part>> parts_of(const Records& records, const Between& between);
  std::span<const Part> some_parts(std::span<const Part> parts) const;
  SpareBuffers::Borrowed read_row_numbers(std::span<const Part> parts, std::vector<const std::uint64_t*>& numbers);
  std::vector<Located> newest_of(std::span<const Part> parts, std::span<const Located> wanted, const Between& between);
  std::uint64_t share_of(const Table& table, std::uint64_t row, std::uint64_t num_shares) const;
  void choose(std::uint32_t table, const Share& share, const Stretch& merged, const Stretch& standing,
              std::vector<Located>& chosen, std::vector<Located>& undecided, const Between& between);
  void copy_images(std::uint32_t table, std::span<const Located> chosen, Versions& versions,
                   std::vector<Located>& others);
  std::size_t read_images(std::uint32_t table, std::span<const Located> chosen, const SectorBuffer& buffer,
                          const PartSize& most, Versions& versions);
  struct Written {
    std::size_t versions;
    std::size_t requests;
  };
  void settle_addresses(Table& table, std::vector<Version>& versions);
  void read_homes(Table& table, const SectorRuns& runs);
  Written write_home(Table& table, std::span<const Version> versions, const std::byte* version_images,
                     const SectorBuffer& buffer, const PartSize& most);
  std::optional<std::uint64_t> sync_home_rows();
  void require_log_synced();
  // Rows that are imported, their weights and their state, if they have some.
  struct Imported {
    std::span<const std::uint64_t> rows;
    const std::byte* weights;
    const float* state;
  };
  void import_some(std::uint32_t number, const Imported& imported);
  void import_fresh(std::uint32_t number, const Imported& imported, std::span<const std::size_t> which);
  void import_over(std::uint32_t number, const Imported& imported, std::vector<std::size_t> which);
  void note_imported(const Table& table, const Imported& imported, std::span<const std::size_t> which);
  void note_home(std::span<const std::uint64_t> numbers);
  void give_up(const Records& records);
  void note_log_reads(std::uint64_t requests, std::uint64_t bytes);
  void wait_for_fetches();
  void sync_merged(Table& table);

  static std::string damaged(const std::string& place, std::uint32_t table, std::uint64_t row);
  void require_readable() const;
  void require_usable() const;
  void require_unfailed() const;
  void fail(std::exception_ptr failure);
  void latching(const std::function<void()>& work);

  const Kernels& kernels_;
  BlockQueue queue_;
  RowLog log_;
  std::vector<Table> tables_;
  std::size_t unit_bytes_;  // of log and homes, the greatest: what is read and written as a whole
  std::unique_ptr<HomeBits> home_bits_;  // none: home may have any row. Changed under merge_mutex_
  bool writable_;
  std::size_t merge_bytes_;
  std::size_t merge_slots_;
  bool scanned_ = false;
  std::optional<std::uint64_t> indexed_step_;
  bool viewed_ = false;
  std::deque<RowLog::Live> unread_;  // of those that scan found, by whoever follows
  std::uint64_t epoch_ = 0;  // 0: not recovered
  SpareBuffers spare_;
  std::atomic<bool> failed_{false};
  std::mutex merge_mutex_;
  std::mutex log_sync_mutex_;
  std::mutex memory_mutex_;  // guards the next one, and calls of it
  CopyFromMemory copy_from_memory_;

  std::mutex listing_mutex_;
  Listing listing_;  // of the table that was asked for last

  mutable std::mutex mutex_;  // guards the index, what home_bits_ says, and what follows
  std::uint64_t index_version_ = 1;
  std::condition_variable fetch_done_;
  std::map<std::uint64_t, std::uint64_t> fetches_;  // number → oldest position that it may read
  std::uint64_t num_fetches_ = 0;
  LogStoreCounters counters_{};
  std::exception_ptr failure_;  // there before failed_ is set
};

}  // namespace holdfast
