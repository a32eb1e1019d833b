// Log records: how a step's rows become one record of the row log, as they are computed or all at once, and what a record
// that is there says.
//
// Invariants
// - Which rows a record has is settled before their values are: a draft has its row numbers and their checksum, and room
//   for the images, which any thread packs, each once.
// - A record's bytes hold their checksums, which is the log's business; that its sections make sense for these tables is
//   checked here, before anybody uses them.
// - A record that is made lies in a buffer that is used again when it is gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/checksum.h"
#include "base/format.h"
#include "base/step_mark.h"
#include "kernels/kernels.h"
#include "log_store/row_log.h"
#include "log_store/store_parts.h"
#include "media/spare_buffers.h"

namespace holdfast {

// Rows of one table: ascending, no row twice.
struct TableRows {
  std::uint32_t table;
  std::size_t num_rows;
  WorkingRows rows;
};

// A record's shape: its header's sizes, and its sections.
struct RecordShape {
  format::RowLogHeader header{};
  std::vector<format::RowLogSection> sections;  // by table, ascending
};

// A record in the making: LogRecords' alone.
struct RecordDraft {
  RecordShape shape;
  SpareBuffers::Borrowed buffer;
  std::unique_ptr<PartsChecksum> images_sum;
};

// A record on its way to the log, which nobody changes any more.
struct PackedRecord {
  format::RowLogHeader header;  // lacks what the log knows: position and chain
  std::uint64_t num_rows;
  std::uint64_t row_bytes;  // of their images
  SpareBuffers::Borrowed buffer;

  std::uint64_t step() const { return header.step; }
  std::uint64_t bytes() const { return header.bytes; }
};

class LogRecords {
 public:
  LogRecords(const StoreTables& tables, StoreIo& io, const RowLog& log) : tables_(tables), io_(io), log_(log) {}

  RecordShape shape_of(std::span<const TableRows> tables) const;
  // The rows of these drafts, by table: their numbers alone, where the drafts have them.
  static std::vector<TableRows> tables_of(std::span<const RecordDraft> drafts);
  // As LogStore's.
  RecordDraft draft(std::span<const TableRows> tables) const;
  void pack_rows(const RecordDraft& draft, std::size_t section, const WorkingRows& rows, std::size_t begin,
                 std::size_t count) const;
  PackedRecord seal(const StepMark& mark, std::vector<RecordDraft> drafts) const;
  PackedRecord pack(const StepMark& mark, std::span<const TableRows> tables) const;

  // A record of the log without its images. Throws corrupted where it does not hold or makes no sense.
  SpareBuffers::Borrowed read_rows(const RowLog::Live& record) const;
  // Of one that holds: that it makes sense for the tables. Throws corrupted.
  void check_sections(const RowLog::Live& record, const std::byte* data) const;

 private:
  RecordDraft join(std::span<const RecordDraft> drafts) const;

  const StoreTables& tables_;
  StoreIo& io_;
  const RowLog& log_;
};

}  // namespace holdfast
