// The log store's way into the log: a step's rows are packed into a record, the record is written.
#include <algorithm>
#include <cstring>
#include <utility>

#include "checksum.h"
#include "error.h"
#include "log_record.h"
#include "log_store.h"
#include "parallel.h"

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

PackedRecord LogStore::pack(const StepMark& mark, std::span<const TableRows> tables) const {
  Shape shape = shape_of(tables);
  shape.header.step = mark.step;
  shape.header.cursor = mark.cursor;
  shape.header.row_updates = mark.row_updates;
  if (shape.header.bytes > log_.ring_bytes()) {
    throw Error(ErrorKind::batch_too_large, "step " + std::to_string(mark.step) + " takes " +
                                                std::to_string(shape.header.bytes) + " bytes of a row log that has " +
                                                std::to_string(log_.ring_bytes()));
  }
  PackedRecord record;
  record.buffer_ = spare_.borrow(shape.header.bytes);
  fill_rows(shape, tables, record.buffer_.data());
  shape.header.images_crc = fill_images(shape, tables, record.buffer_.data());
  record.header_ = shape.header;
  for (const TableRows& rows : tables) {
    record.num_rows_ += rows.num_rows;
    record.row_bytes_ += rows.num_rows * tables_[rows.table].layout.image_bytes();
  }
  return record;
}

// Sections, row numbers and their checksum; the header itself comes last, when the record's place is known.
void LogStore::fill_rows(Shape& shape, std::span<const TableRows> tables, std::byte* record) const {
  RowLogHeader& header = shape.header;
  std::memset(record, 0, header.images_offset);
  if (!tables.empty()) {
    std::memcpy(record + sizeof(header), shape.sections.data(), tables.size() * sizeof(RowLogSection));
  }
  for (std::size_t i = 0; i < tables.size(); ++i) {
    auto* rows = reinterpret_cast<std::uint64_t*>(record + shape.sections[i].rows_offset);
    std::transform(tables[i].rows.rows, tables[i].rows.rows + tables[i].num_rows, rows,
                   [](std::uint64_t row) { return row & ~fresh_bit; });
  }
  header.rows_crc = crc32c(0, record + sizeof(header), header.images_offset - sizeof(header));
}

// Returns the checksum of the images and of the zeros behind them.
std::uint32_t LogStore::fill_images(const Shape& shape, std::span<const TableRows> tables, std::byte* record) const {
  struct Chunk {
    std::size_t request;
    std::size_t begin;
    std::size_t end;
  };
  std::vector<Chunk> chunks;
  std::uint64_t images_end = shape.header.images_offset;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const RowLayout& layout = tables_[tables[i].table].layout;
    const std::size_t rows = layout.unit_rows() * std::max<std::size_t>(1, chunk_bytes / layout.unit_bytes());
    for (std::size_t begin = 0; begin < tables[i].num_rows; begin += rows) {
      chunks.push_back({i, begin, std::min(begin + rows, tables[i].num_rows)});
    }
    images_end += layout.bytes_for(tables[i].num_rows);
  }
  std::memset(record + images_end, 0, shape.header.bytes - images_end);
  PartsChecksum checksum(shape.header.bytes - shape.header.images_offset);
  parallel_for(chunks.size(), [&](std::size_t c) {
    const auto [i, begin, end] = chunks[c];
    const RowLayout& layout = tables_[tables[i].table].layout;
    std::byte* images = record + shape.sections[i].images_offset;
    const std::size_t bytes = pack_images(layout, tables[i].table, tables[i].rows, begin, end, images);
    const std::uint64_t offset = shape.sections[i].images_offset + layout.offset_of(begin);
    checksum.add(offset - shape.header.images_offset, record + offset, bytes);
  });
  return checksum.value();
}

std::optional<std::uint64_t> LogStore::append(const PackedRecord& packed) {
  require_usable();
  const RowLogHeader& header = packed.header_;
  if (header.step <= log_.last().step) {
    throw Error(ErrorKind::step, "step " + std::to_string(header.step) + " cannot follow step " +
                                     std::to_string(log_.last().step) + " in " + log_.file().name());
  }
  std::optional<std::uint64_t> position;
  {
    const std::lock_guard lock(mutex_);
    std::uint64_t pinned = format::no_position;
    for (const auto& [number, oldest] : fetches_) pinned = std::min(pinned, oldest);
    position = log_.room_for(header.bytes, pinned);
  }
  if (!position) return std::nullopt;
  RowLog::Live record;
  latching([&] { record = log_.write(header, *position, packed.buffer_.data()); });

  const std::lock_guard lock(mutex_);
  index_record(record, packed.buffer_.data());
  log_.append(record);
  counters_.appended_rows += packed.num_rows_;
  counters_.appended_row_bytes += packed.row_bytes_;
  counters_.appended_bytes += header.bytes;
  return header.bytes;
}

void LogStore::sync() {
  require_usable();
  latching([&] { log_.sync(); });
}

}  // namespace holdfast
