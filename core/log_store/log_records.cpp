#include "log_store/log_records.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checksum.h"
#include "base/error.h"
#include "base/parallel.h"
#include "log_store/log_record.h"

namespace holdfast {

using format::RowLogHeader;
using format::RowLogSection;

namespace {

constexpr std::size_t chunk_bytes = std::size_t{64} << 10;  // of images that one thread packs at a time

}  // namespace

RecordShape LogRecords::shape_of(std::span<const TableRows> tables) const {
  RecordShape shape;
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

RecordDraft LogRecords::draft(std::span<const TableRows> tables) const {
  RecordShape shape = shape_of(tables);
  RowLogHeader& header = shape.header;
  SpareBuffers::Borrowed buffer = io_.spare.borrow(header.bytes);
  std::byte* record = buffer.data();
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
  auto images_sum = std::make_unique<PartsChecksum>(header.bytes - header.images_offset, log_.seed());
  return {std::move(shape), std::move(buffer), std::move(images_sum)};
}

void LogRecords::pack_rows(const RecordDraft& draft, std::size_t section, const WorkingRows& rows, std::size_t begin,
                           std::size_t count) const {
  const RowLogSection& of = draft.shape.sections[section];
  const RowLayout& layout = tables_[of.table].layout;
  const std::uint64_t offset = of.images_offset + layout.offset_of(begin);
  std::byte* images = draft.buffer.data() + offset;
  pack_images(layout, of.table, rows, count, images);
  draft.images_sum->add(offset - draft.shape.header.images_offset, images, layout.bytes_for(count));
}

PackedRecord LogRecords::seal(const StepMark& mark, std::vector<RecordDraft> drafts) const {
  RecordDraft whole = drafts.size() == 1 ? std::move(drafts.front()) : join(drafts);
  RowLogHeader header = whole.shape.header;
  if (header.bytes > log_.ring_bytes()) {
    throw Error(ErrorKind::batch_too_large, "a step's record takes " + std::to_string(header.bytes) +
                                                " bytes of a row log that has " + std::to_string(log_.ring_bytes()));
  }
  header.step = mark.step;
  header.cursor = mark.cursor;
  header.row_updates = mark.row_updates;
  header.images_crc = whole.images_sum->value();
  std::uint64_t num_rows = 0;
  std::uint64_t row_bytes = 0;
  for (const RowLogSection& section : whole.shape.sections) {
    num_rows += section.num_rows;
    row_bytes += section.num_rows * tables_[section.table].layout.image_bytes();
  }
  return {header, num_rows, row_bytes, std::move(whole.buffer)};
}

std::vector<TableRows> LogRecords::tables_of(std::span<const RecordDraft> drafts) {
  std::vector<TableRows> tables;
  for (const RecordDraft& draft : drafts) {
    for (const RowLogSection& section : draft.shape.sections) {
      auto* rows = reinterpret_cast<std::uint64_t*>(draft.buffer.data() + section.rows_offset);
      tables.push_back({section.table, section.num_rows, {rows, nullptr, nullptr}});
    }
  }
  std::ranges::sort(tables, {}, &TableRows::table);
  return tables;
}

RecordDraft LogRecords::join(std::span<const RecordDraft> drafts) const {
  RecordDraft joined = draft(tables_of(drafts));
  const std::vector<RowLogSection>& sections = joined.shape.sections;
  for (const RecordDraft& part : drafts) {
    parallel_for(part.shape.sections.size(), [&](std::size_t i) {
      const RowLogSection& from = part.shape.sections[i];
      const RowLogSection& to = *std::ranges::lower_bound(sections, from.table, {}, &RowLogSection::table);
      const std::size_t bytes = tables_[from.table].layout.bytes_for(from.num_rows);
      std::byte* images = joined.buffer.data() + to.images_offset;
      std::memcpy(images, part.buffer.data() + from.images_offset, bytes);
      joined.images_sum->add(to.images_offset - joined.shape.header.images_offset, images, bytes);
    });
  }
  return joined;
}

PackedRecord LogRecords::pack(const StepMark& mark, std::span<const TableRows> tables) const {
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

void LogRecords::check_sections(const RowLog::Live& record, const std::byte* data) const {
  const auto bad = [&](const char* what) {
    throw Error(ErrorKind::corrupted, log_.place(record.link.position) + ": " + what);
  };
  const RowLogHeader header = log_record::header_of(data);
  const auto sections = log_record::sections_of(data);
  std::vector<TableRows> claimed;
  for (const RowLogSection& section : sections) {
    if (section.table >= tables_.size() || (!claimed.empty() && section.table <= claimed.back().table)) {
      bad("sections of tables that do not exist, or out of order");
    }
    if (section.num_rows > tables_[section.table].what.num_rows) bad("a section of more rows than its table has");
    claimed.push_back({section.table, section.num_rows, {}});
  }
  const RecordShape expected = shape_of(claimed);
  if (expected.header.bytes != header.bytes || expected.header.images_offset != header.images_offset ||
      (!sections.empty() && std::memcmp(expected.sections.data(), sections.data(), sections.size_bytes()) != 0)) {
    bad("a section that does not fit");
  }
  for (const RowLogSection& section : sections) {
    const std::span rows(log_record::rows_of(data, section), section.num_rows);
    for (std::size_t i = 1; i < rows.size(); ++i) {
      if (rows[i] <= rows[i - 1]) bad("rows that are out of order");
    }
    if ((!rows.empty() && (rows.back() & fresh_bit) != 0) || tables_[section.table].what.first_foreign(rows)) {
      bad("rows that its table does not have here");
    }
  }
}

SpareBuffers::Borrowed LogRecords::read_rows(const RowLog::Live& record) const {
  SpareBuffers::Borrowed data = io_.spare.borrow(format::align_up(record.images_offset, io_.unit_bytes));
  log_.read(record, record.images_offset, data.data());
  check_sections(record, data.data());
  return data;
}

}  // namespace holdfast
