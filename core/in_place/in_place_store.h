// In-place store: rows mapped from the medium and overwritten where they are.
//
// Invariants
// - A row is overwritten only after the record with its before-image is sealed (the pool sees to that).
// - No store hits a hole: prepare allocates the pages of a step's rows, and of their touched bits, before capture.
//   What is allocated is remembered for this life only; asking again for an allocated page changes nothing.
// - A row is touched once an update has written it. An untouched row's bytes at home mean nothing: its value is the
//   initial one, which is a function of (seed, table, row).
// - At level `power`, update, put and restore return when the rows they wrote are durable.
// - With row checksums, every row that is copied from home is checked; one that does not hold is never handed out.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/forks.h"
#include "base/format.h"
#include "in_place/allocated_pages.h"
#include "in_place/huge_pages.h"
#include "kernels/kernels.h"
#include "layout/label.h"
#include "media/medium.h"
#include "rows/row_checksums.h"
#include "rows/row_table.h"
#include "rows/row_values.h"

namespace holdfast {

class InPlaceStore {
 public:
  struct Table : RowTable {
    struct Column {
      std::unique_ptr<File> file;
      std::unique_ptr<AllocatedPages> pages;  // null when read-only
    };
    Column weights;
    Column state;  // no file when the optimizer keeps none
    Column touched;
    Column tags;  // no file without row checksums

    HomeRows home() const;
    std::optional<RowChecksums> checksums() const;
  };

  // Makes the (sparse) files of the tables: of their rows that this writer owns.
  static void create(Medium& medium, const std::vector<RowTable>& tables, bool row_checksums);
  // Those, by name.
  static std::vector<LabelledName> files(const std::vector<RowTable>& tables, bool row_checksums);
  // Opens them; throws corrupted when one is missing or has another size than its table needs.
  InPlaceStore(Medium& medium, std::vector<RowTable> tables, bool row_checksums, bool writable);

  const std::vector<Table>& tables() const { return tables_; }
  const Table& table(std::size_t i) const { return tables_[i]; }

  // For all of these: rows [begin, end) of `working`; ranges may run on several threads. What writes new rows returns the
  // first that is not finite, or `end`.
  void prepare(std::size_t table, const WorkingRows& working, std::size_t begin, std::size_t end);
  // Has the processor fetch what a capture of them reads.
  void ask_for(std::size_t table, const WorkingRows& working, std::size_t begin, std::size_t end) const;
  // Throws corrupted where a row does not hold its checksum.
  void capture(std::size_t table, const WorkingRows& working, std::size_t begin, std::size_t end) const;
  // The same while another process may be updating rows: ends at the first that does not hold its checksum, whose place
  // it returns; `end` where it copied all. Only the rows before that have their fresh bits set.
  std::size_t try_capture(std::size_t table, const WorkingRows& working, std::size_t begin, std::size_t end) const;
  std::size_t update(std::size_t table, const UpdateSpec& spec, const WorkingRows& working,
                     const Occurrences& occurrences, const float* grad, const std::uint32_t* forward,
                     const WorkingRows* next, std::size_t begin, std::size_t end);
  std::size_t update_from_sums(std::size_t table, const UpdateSpec& spec, const WorkingRows& working, const float* sums,
                               const std::uint32_t* forward, const WorkingRows* next, std::size_t begin,
                               std::size_t end);
  // The rows of `working` become those of `ready`.
  std::size_t put(std::size_t table, const WorkingRows& working, const ReadyRows& ready, std::size_t begin,
                  std::size_t end);
  void restore(std::size_t table, const WorkingRows& working, std::size_t begin, std::size_t end);

  // What reading, or writing, so many rows of a table at random places asks of a dialled medium. Touched bits are few
  // enough to stay in caches, and are not counted.
  void add_reads(DialWork& work, std::size_t table, std::uint64_t num_rows) const;
  void add_writes(DialWork& work, std::size_t table, std::uint64_t num_rows) const;

  // Writes the initial value of each of `rows` that is untouched to its place at home, for whoever reads there without
  // asking; it stays untouched. Returns how many were. Not while rows are updated: one could become touched meanwhile.
  std::size_t materialize(std::size_t table, std::span<const std::uint64_t> rows);
  RowMapping mapping(std::size_t table) const;

  // Overwrites rows without a log; throws config where one is not there.
  void import_rows(std::size_t table, const ImportedRows& imported);

  // For messages: this row does not hold its checksum.
  std::string bad_row(std::size_t table, std::uint64_t row) const;
  // The rows that do not hold their checksums, but for those of `torn`: 100 at most.
  std::vector<std::string> bad_rows(const std::function<bool(std::size_t table, std::uint64_t row)>& torn) const;

  // The touched rows at or after `first`, ascending, `count` at most. Skips holes of the file, not rows. A row that has
  // a checksum is one of them, whatever its touched bit says: whoever reads it finds out.
  std::vector<std::uint64_t> touched_rows(std::size_t table, std::uint64_t first, std::size_t count) const;
  // The state of `count` touched rows. Throws corrupted where a row does not hold its checksum.
  void read_state(std::size_t table, const WorkingRows& rows, std::size_t count) const;

  void sync();

 private:
  // Those of rows [first, end) of one piece, until there are `count` of them.
  static void add_touched_rows(const Table& table, std::uint64_t first, std::uint64_t end, std::size_t count,
                               std::vector<std::uint64_t>& rows);
  static void add_touched_or_tagged_rows(const Table& table, std::uint64_t first, std::uint64_t end, std::size_t count,
                                         std::vector<std::uint64_t>& rows);
  static void hold_back(const Table& table, const WorkingRows& working, const std::uint32_t* forward,
                        const WorkingRows* next, std::size_t begin, std::size_t end);
  void finish_rows(const Table& table, const WorkingRows& working, std::size_t begin, std::size_t end);

  Medium& medium_;
  const Kernels& kernels_;
  std::vector<Table> tables_;
  OwnedHere<HugePages> huge_pages_;  // of the tables' files, where they are written; ends before these
};

}  // namespace holdfast
