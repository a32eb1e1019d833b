#include "in_place/undo.h"

#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/parallel.h"
#include "step/lookup.h"

namespace holdfast {

using format::RecordSection;

void check_record(const Record& record, const UndoLog& log, const InPlaceStore& store) {
  const auto bad = [&](const std::string& what) {
    throw Error(ErrorKind::corrupted, log.place(record.header.position) + ": " + what);
  };
  for (const RecordSection& section : record.sections()) {
    if (section.table >= store.tables().size()) bad("a section of a table that does not exist");
    const InPlaceStore::Table& table = store.table(section.table);
    std::size_t offset = section.rows_offset;
    if (section.num_rows > table.num_rows || offset > record.header.bytes) bad("a section that does not fit");
    const RecordSection expected = place_section(table, section.table, section.num_rows, offset);
    if (expected.weights_offset != section.weights_offset || expected.state_offset != section.state_offset ||
        section.rows_offset % format::line_bytes != 0 || offset > record.header.bytes) {
      bad("a section that does not fit");
    }
    const std::span rows(reinterpret_cast<const std::uint64_t*>(record.data + section.rows_offset), section.num_rows);
    for (std::size_t i = 1; i < rows.size(); ++i) {
      if ((rows[i] & ~fresh_bit) <= (rows[i - 1] & ~fresh_bit)) bad("rows that are out of order");
    }
    if (table.first_foreign(rows)) bad("rows that its table does not have here");
  }
}

UndoPlan plan_undo(const Superblock& superblock, const UndoLog& log, const InPlaceStore& store, std::uint64_t step) {
  const format::CommitRecord commit = superblock.commit();
  const format::EpochRecord& opened = superblock.epoch();
  // What was captured after the newest commit, newest last; then what the commits since `step` overwrote.
  std::vector<Record> after;
  UndoLog::Link link = UndoLog::Link::of(commit);
  std::uint64_t head = commit.log_head;
  for (;;) {
    const auto record = log.successor(commit.epoch, head, link);
    if (!record || record->header.step <= commit.step) break;
    check_record(*record, log, store);
    after.push_back(*record);
    link = UndoLog::Link::to(record->header);
    head = record->header.position + record->header.bytes;
  }
  // A life that has appended has written its commit record before.
  if (opened.epoch > commit.epoch && log.successor(opened.epoch, head, UndoLog::Link{})) {
    throw Error(ErrorKind::corrupted, log.place(head) + ": a record of epoch " + std::to_string(opened.epoch) +
                                          ", whose commit record is lost");
  }
  std::vector<Record> undo_order(after.rbegin(), after.rend());
  for (link = UndoLog::Link::of(commit); link.position != format::no_position && link.step > step;) {
    std::string why = "a record that was given up, because a later dense state was durable";
    const auto record = link.position < commit.log_tail ? std::nullopt : log.read(link, &why);
    if (!record) {
      throw Error(ErrorKind::corrupted, log.place(link.position) + ": " + why +
                                            "; rows cannot be rolled back to step " + std::to_string(step));
    }
    check_record(*record, log, store);
    undo_order.push_back(*record);
    link = UndoLog::Link::before(record->header);
  }
  if (link.position == format::no_position && link.step > step) {
    throw Error(ErrorKind::corrupted, log.place(head) + ": the chain of records begins at the end of step " +
                                          std::to_string(link.step) + ", whose dense state is lost; rows cannot be " +
                                          "rolled back to step " + std::to_string(step));
  }

  return {head, std::move(undo_order)};
}

std::uint64_t undo_records(const std::vector<Record>& records, InPlaceStore& store, Medium& medium) {
  std::uint64_t rows_restored = 0;
  for (const Record& record : records) {
    for (const RecordSection& section : record.sections()) {
      const WorkingRows rows = rows_of(section, const_cast<std::byte*>(record.data));
      constexpr std::size_t rows_per_chunk = 1024;
      const std::size_t chunks = (section.num_rows + rows_per_chunk - 1) / rows_per_chunk;
      parallel_for(chunks, [&](std::size_t i) {
        const std::size_t begin = i * rows_per_chunk;
        const std::size_t end = std::min<std::size_t>(begin + rows_per_chunk, section.num_rows);
        store.restore(section.table, rows, begin, end);
      });
      rows_restored += section.num_rows;
    }
    medium.persist_point();
  }
  return rows_restored;
}

}  // namespace holdfast
