// Records before they are in the log: which rows they have, and their new values, packed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/checksum.h"
#include "base/format.h"
#include "kernels/kernels.h"
#include "media/spare_buffers.h"

namespace holdfast {

// Rows of one table: ascending, no row twice.
struct TableRows {
  std::uint32_t table;
  std::size_t num_rows;
  WorkingRows rows;
};

// A record in the making, in a buffer that is used again when the record is gone: which rows it has is settled, their
// new values are packed as they are computed.
class RecordDraft {
  friend class LogStore;
  RecordDraft() = default;

  format::RowLogHeader header_{};
  std::vector<format::RowLogSection> sections_;  // by table, ascending
  SpareBuffers::Borrowed buffer_;
  std::unique_ptr<PartsChecksum> images_sum_;
};

// A record on its way to the log.
class PackedRecord {
 public:
  std::uint64_t step() const { return header_.step; }
  std::uint64_t bytes() const { return header_.bytes; }

 private:
  friend class LogStore;
  PackedRecord() = default;

  format::RowLogHeader header_{};  // lacks what the log knows: position and chain
  std::uint64_t num_rows_ = 0;
  std::uint64_t row_bytes_ = 0;  // of their images
  SpareBuffers::Borrowed buffer_;
};

}  // namespace holdfast
