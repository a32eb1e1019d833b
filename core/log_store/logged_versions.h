// Logged versions: what the log's records have, for a merge: which records there are, where they have a row, and its images,
// which come from memory, where somebody has them there, and else from the log.
//
// Invariants
// - Images that are taken from memory are what the log has: who copies them says that nothing newer was appended then, and
//   the index says afterwards that nothing newer was appended than what was chosen.
// - It reads by the order of the log. What is read there does not change: its records stay until the merge gives them up.
// - It takes memory for a few sections of records, whatever the size of the log and of the tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/format.h"
#include "log_store/home_writer.h"
#include "log_store/log_records.h"
#include "log_store/store_view.h"

namespace holdfast {

// Records of the log, oldest first, and where they lie.
struct RecordRange {
  std::vector<RowLog::Live> records;
  LogStretch stretch;

  std::uint64_t last_step() const { return records.back().link.mark.step; }
};

// One table's part of a record.
struct RecordPart {
  std::uint64_t position;  // of the record
  format::RowLogSection section;
};

// A row's version, by where the index says that it is.
struct LocatedVersion {
  std::uint64_t row;
  std::uint64_t location;
};

// Of a table, with their images.
struct HomeVersions {
  std::vector<HomeVersion> rows;
  std::vector<std::byte> images;
};

class LoggedVersions {
 public:
  // As LogStore::CopyFromMemory.
  using CopyFromMemory = std::function<std::vector<bool>(std::uint32_t table, std::span<const std::uint64_t> rows,
                                                         std::byte* out, std::size_t stride)>;
  // Called again and again by what takes long; throws where that is given up.
  using Between = std::function<void()>;
  // most_bytes: of row numbers that are read at once.
  LoggedVersions(const StoreView& store, const LogRecords& records, std::size_t most_bytes)
      : store_(store), records_(records), most_bytes_(most_bytes) {}

  void set_memory(CopyFromMemory copy);

  // Durable records of steps after one and up to another; of more than one, so many bytes at most, the oldest.
  RecordRange records_between(std::optional<std::uint64_t> after_step, std::uint64_t limit_step,
                              std::uint64_t most_bytes = ~std::uint64_t{0}) const;
  // Of one table's versions those that are in memory; `others` get the rest. `versions` has room for them.
  void copy_images(std::uint32_t table, std::span<const LocatedVersion> chosen, HomeVersions& versions,
                   std::vector<LocatedVersion>& others);
  // Of one table's versions, by the order of the log, as many images as may be read at once, from the first one on;
  // `versions` has room for them. Returns how many requests that took. Throws corrupted.
  std::size_t read_images(std::uint32_t table, std::span<const LocatedVersion> chosen, const SectorBuffer& buffer,
                          const PartSize& most, HomeVersions& versions);

  // The records' parts, by table, those of the newest record first. Throws corrupted.
  std::vector<std::vector<RecordPart>> parts_of(const RecordRange& range, const Between& between);
  // Where the parts, the newest one first, have these rows; those that are in none of them have no place in the list.
  std::vector<LocatedVersion> newest_of(std::span<const RecordPart> parts, std::span<const LocatedVersion> wanted,
                                        const Between& between);

 private:
  std::span<const RecordPart> some_parts(std::span<const RecordPart> parts) const;
  SpareBuffers::Borrowed read_row_numbers(std::span<const RecordPart> parts,
                                          std::vector<const std::uint64_t*>& numbers);
  void note_reads(std::uint64_t requests, std::uint64_t bytes);

  const StoreView& store_;
  const LogRecords& records_;
  const std::size_t most_bytes_;
  std::mutex memory_mutex_;  // guards the next one, and calls of it
  CopyFromMemory copy_from_memory_;
};

}  // namespace holdfast
