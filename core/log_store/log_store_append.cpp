// The log store's way into the log: a step's rows are packed into a record, as they are computed or all at once, and the
// record is written.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checksum.h"
#include "base/error.h"
#include "base/parallel.h"
#include "log_store/log_record.h"
#include "log_store/log_store.h"

namespace holdfast {

using format::RowLogHeader;
using format::RowLogSection;

namespace {

constexpr std::size_t chunk_bytes = std::size_t{64} << 10;  // of images that one thread packs at a time

}  // namespace

LogStore::Shape LogStore::shape_of(std::span<const TableRows> tables) const {
  Shape shape;
  std::uint64_t offset = sizeof(RowLogHeader) + tables.size() * sizeof(RowLogSection);
  for (const TableRows& rows : tables) {
    RowLogSection section{};
    section.table = rows.table;
    section.num_rows = rows.num_rows;
    section.rows_offset = offset;
    offset += rows.num_rows * sizeof(std::uint64_t);
    shape.sections.push_back(section);
  }
  offset = format::align_up(offset, format::sector_bytes);
  shape.header.num_sections = static_cast<std::uint32_t>(tables.size());
  shape.header.images_offset = offset;
  for (RowLogSection& section : shape.sections) {
    section.images_offset = offset;
    offset += tables_[section.table].layout.bytes_for(section.num_rows);
  }
  shape.header.bytes = format::align_up(offset, format::block_bytes);
  return shape;
}

RecordDraft LogStore::draft(std::span<const TableRows> tables) const {
  Shape shape = shape_of(tables);
  RowLogHeader& header = shape.header;
  RecordDraft draft;
  draft.buffer_ = spare_.borrow(header.bytes);
  std::byte* record = draft.buffer_.data();
  std::memset(record, 0, header.images_offset);
  if (!tables.empty()) {
    std::memcpy(record + sizeof(header), shape.sections.data(), tables.size() * sizeof(RowLogSection));
  }
  std::uint64_t images_end = header.images_offset;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    auto* rows = reinterpret_cast<std::uint64_t*>(record + shape.sections[i].rows_offset);
    std::transform(tables[i].rows.rows, tables[i].rows.rows + tables[i].num_rows, rows,
                   [](std::uint64_t row) { return row & ~fresh_bit; });
    images_end += tables_[tables[i].table].layout.bytes_for(tables[i].num_rows);
  }
  std::memset(record + images_end, 0, header.bytes - images_end);
  header.rows_crc = crc32c(log_.seed(), record + sizeof(header), header.images_offset - sizeof(header));
  draft.images_sum_ = std::make_unique<PartsChecksum>(header.bytes - header.images_offset, log_.seed());
  draft.header_ = header;
  draft.sections_ = std::move(shape.sections);
  return draft;
}

void LogStore::pack_rows(const RecordDraft& draft, std::size_t section, const WorkingRows& rows, std::size_t begin,
                         std::size_t count) const {
  const RowLogSection& of = draft.sections_[section];
  const RowLayout& layout = tables_[of.table].layout;
  const std::uint64_t offset = of.images_offset + layout.offset_of(begin);
  std::byte* images = draft.buffer_.data() + offset;
  pack_images(layout, of.table, rows, count, images);
  draft.images_sum_->add(offset - draft.header_.images_offset, images, layout.bytes_for(count));
}

PackedRecord LogStore::seal(const StepMark& mark, std::vector<RecordDraft> drafts) const {
  RecordDraft whole = drafts.size() == 1 ? std::move(drafts.front()) : join(drafts);
  PackedRecord record;
  record.header_ = whole.header_;
  if (record.header_.bytes > log_.ring_bytes()) {
    throw Error(ErrorKind::batch_too_large, "a step's record takes " + std::to_string(record.header_.bytes) +
                                                " bytes of a row log that has " + std::to_string(log_.ring_bytes()));
  }
  record.header_.step = mark.step;
  record.header_.cursor = mark.cursor;
  record.header_.row_updates = mark.row_updates;
  record.header_.images_crc = whole.images_sum_->value();
  for (const RowLogSection& section : whole.sections_) {
    record.num_rows_ += section.num_rows;
    record.row_bytes_ += section.num_rows * tables_[section.table].layout.image_bytes();
  }
  record.buffer_ = std::move(whole.buffer_);
  return record;
}

// Their numbers alone, where the drafts have them; by table.
std::vector<TableRows> LogStore::tables_of(std::span<const RecordDraft> drafts) {
  std::vector<TableRows> tables;
  for (const RecordDraft& draft : drafts) {
    for (const RowLogSection& section : draft.sections_) {
      auto* rows = reinterpret_cast<std::uint64_t*>(draft.buffer_.data() + section.rows_offset);
      tables.push_back({section.table, section.num_rows, {rows, nullptr, nullptr}});
    }
  }
  std::ranges::sort(tables, {}, &TableRows::table);
  return tables;
}

RecordDraft LogStore::join(std::span<const RecordDraft> drafts) const {
  RecordDraft joined = draft(tables_of(drafts));
  for (const RecordDraft& part : drafts) {
    parallel_for(part.sections_.size(), [&](std::size_t i) {
      const RowLogSection& from = part.sections_[i];
      const RowLogSection& to = *std::ranges::lower_bound(joined.sections_, from.table, {}, &RowLogSection::table);
      std::byte* images = joined.buffer_.data() + to.images_offset;
      const std::size_t bytes = tables_[from.table].layout.bytes_for(from.num_rows);
      std::memcpy(images, part.buffer_.data() + from.images_offset, bytes);
      joined.images_sum_->add(to.images_offset - joined.header_.images_offset, images, bytes);
    });
  }
  return joined;
}

PackedRecord LogStore::pack(const StepMark& mark, std::span<const TableRows> tables) const {
  struct Chunk {
    std::size_t section;
    std::size_t begin;
    std::size_t count;
  };
  std::vector<Chunk> chunks;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const RowLayout& layout = tables_[tables[i].table].layout;
    const std::size_t rows = layout.unit_rows() * std::max<std::size_t>(1, chunk_bytes / layout.unit_bytes());
    for (std::size_t begin = 0; begin < tables[i].num_rows; begin += rows) {
      chunks.push_back({i, begin, std::min(rows, tables[i].num_rows - begin)});
    }
  }
  std::vector<RecordDraft> drafts;
  drafts.push_back(draft(tables));
  parallel_for(chunks.size(), [&](std::size_t c) {
    const auto [section, begin, count] = chunks[c];
    const RowLayout& layout = tables_[tables[section].table].layout;
    const WorkingRows& rows = tables[section].rows;
    pack_rows(drafts.front(), section,
              {rows.rows + begin, rows.weights + begin * layout.weight_bytes(),
               rows.state + begin * (layout.state_bytes() / sizeof(float))},
              begin, count);
  });
  return seal(mark, std::move(drafts));
}

std::optional<std::uint64_t> LogStore::append(const PackedRecord& packed) {
  require_usable();
  const RowLogHeader& header = packed.header_;
  if (header.step <= log_.last().step) {
    throw Error(ErrorKind::step, "step " + std::to_string(header.step) + " cannot follow step " +
                                     std::to_string(log_.last().step) + " in " + log_.file().name());
  }
  return append_record(packed);
}

std::optional<std::uint64_t> LogStore::append_record(const PackedRecord& packed) {
  const RowLogHeader& header = packed.header_;
  std::optional<std::uint64_t> position;
  {
    const std::lock_guard lock(mutex_);
    std::uint64_t pinned = format::no_position;
    for (const auto& [number, oldest] : fetches_) pinned = std::min(pinned, oldest);
    position = log_.room_for(header.bytes, pinned);
  }
  if (!position) return std::nullopt;
  RowLog::Live record;
  latching([&] {
    record = log_.write(header, *position, packed.buffer_.data());
    const std::lock_guard lock(mutex_);
    index_record(record, packed.buffer_.data());
    log_.append(record);
  });
  const std::lock_guard lock(mutex_);
  counters_.appended_rows += packed.num_rows_;
  counters_.appended_row_bytes += packed.row_bytes_;
  counters_.appended_bytes += header.bytes;
  return header.bytes;
}

void LogStore::sync() {
  require_usable();
  const std::lock_guard turn(log_sync_mutex_);
  latching([&] { log_.sync(); });
}

}  // namespace holdfast
