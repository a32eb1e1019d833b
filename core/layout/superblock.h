// Superblock: the file that makes a directory a pool. Who it is, its tables, its epoch, its commit record.
//
// Invariants
// - Header and table records are written once, into a new file that is renamed into place when a copy of them lies
//   beside it.
// - Epoch and commit records have two blocks each, written by turns: a torn write leaves the older one whole.
// - An epoch record is on the medium when write_epoch returns, at every level: it is what a machine that went down
//   leaves of whether the pool was open. So it is there before anything that carries the epoch, or that belongs to its
//   life, is written.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/format.h"
#include "media/medium.h"
#include "rows/row_table.h"

namespace holdfast {

inline constexpr const char* superblock_name = "pool.holdfast";
inline constexpr const char* superblock_copy_name = "pool.copy";

// The machine's current boot, or zeros where it cannot be told.
std::array<std::uint8_t, 16> current_boot_id();
// Whether it is that one. A boot that cannot be told is never the same.
bool is_current_boot(const std::uint8_t (&boot_id)[16]);

// Shards as a record has them, and back.
ShardSet shards_of(const format::ShardsRecord& record);
format::ShardsRecord shards_record(const ShardSet& owned, const std::array<std::uint8_t, 16>& group_uuid);

// The medium of the pool in `directory`, as its store wants it. Throws not_found where there is none.
std::unique_ptr<Medium> open_pool_medium(const std::string& directory);

class Superblock {
 public:
  // The file's bytes, as far as they are written once: header and table records, sealed here, and the shards of a pool
  // of several writers. The header has its version and the uuid that everything else is of.
  static std::vector<std::byte> write_once(format::PoolHeader header, std::vector<format::TableRecord> tables,
                                           const std::optional<format::ShardsRecord>& shards);
  // With the first of its records, sealed here.
  static std::vector<std::byte> with_records(std::vector<std::byte> image, const format::EpochRecord& epoch,
                                             const format::CommitRecord& commit);
  // What is written once, beside the superblock: what a repair makes a lost one of. Its name is not durable yet.
  static void write_copy(Medium& medium, const std::vector<std::byte>& image);
  // Writes the whole file and renames it into place: from then on there is a pool.
  static void publish(Medium& medium, const std::vector<std::byte>& image);

  struct Once {
    format::PoolHeader header;
    std::vector<format::TableRecord> tables;
    std::optional<format::ShardsRecord> shards;
  };
  // What is written once, of the file or of its copy. Throws format_mismatch or corrupted.
  static Once read_once(const File& file);

  // Of the pool with this header, and of its rows: nothing before version 4.
  static Identity identity_of(const format::PoolHeader& header);
  static Identity row_identity_of(const format::PoolHeader& header);
  static HomeOrder home_order_of(const format::PoolHeader& header);
  // The header alone. Throws format_mismatch or corrupted.
  static format::PoolHeader read_header(const File& file);
  // Reads and checks; throws not_found, format_mismatch or corrupted, and changes nothing.
  Superblock(Medium& medium, bool writable);

  const std::string& file_name() const { return file_->name(); }
  const format::PoolHeader& header() const { return header_; }
  const std::vector<format::TableRecord>& tables() const { return tables_; }
  // Of a pool of several writers.
  const std::optional<format::ShardsRecord>& shards() const { return shards_; }
  // Of the pool's structures, and of the rows, which are the group's where there is one.
  const Identity& identity() const { return identity_; }
  const Identity& row_identity() const { return row_identity_; }
  // What this writer has of the tables.
  std::vector<RowTable> row_tables() const;
  const format::EpochRecord& epoch() const { return epoch_; }
  const format::CommitRecord& commit() const { return commit_; }
  // Why rows may be from any moment, which only those of a process-level pool ever are, and what to do; or nothing.
  std::optional<std::string> reason_to_distrust() const;
  // Epoch and commit records that neither hold their checksum nor were never written, each with file and offset. After
  // a crash one of each may be torn; after a clean close none is. But for one that does not count: at level `power` an
  // epoch record may be torn by a cut while the next life began, before it changed anything.
  std::vector<std::string> broken_records() const;
  // For messages: where the commit record lies that does not count.
  std::string place_of_older_commit() const;
  // Makes durable what was read: whoever wrote it may have died before its flush, or was told that it failed.
  void persist_records();
  // Seals the record and makes it durable; write_epoch beyond what the level asks for.
  void write_epoch(format::EpochRecord record);
  void write_commit(format::CommitRecord record);
  // For readers of a pool in use: the newest records as they stand now.
  format::CommitRecord read_commit() const;
  format::EpochRecord read_epoch() const;
  void sync() { file_->sync(); }
  // What was read stays; nothing is read or written any more.
  void close() { file_.reset(); }

 private:
  Medium& medium_;
  std::unique_ptr<File> file_;
  format::PoolHeader header_;
  std::vector<format::TableRecord> tables_;
  std::optional<format::ShardsRecord> shards_;
  Identity identity_;
  Identity row_identity_;
  format::EpochRecord epoch_;
  format::CommitRecord commit_;
  std::size_t epoch_slot_ = 0;
  std::size_t commit_slot_ = 0;
};

}  // namespace holdfast
