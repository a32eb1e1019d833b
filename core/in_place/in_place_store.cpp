#include "in_place/in_place_store.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "layout/label.h"
#include "step/key_rows.h"

namespace holdfast {
namespace {

constexpr std::size_t page_bytes = format::block_bytes;
constexpr std::size_t most_asked_bytes = 512;  // of a row: behind these, the hardware follows by itself

std::size_t touched_bytes(std::uint64_t num_rows) { return format::align_up((num_rows + 7) / 8, 8); }
std::size_t pages_of(std::size_t bytes) { return format::align_up(bytes, page_bytes) / page_bytes; }

// An array of a table's rows: a file in every shard.
struct ColumnShape {
  const char* what;
  format::FileKind kind;
  InPlaceStore::Table::Column InPlaceStore::Table::* column;
  std::size_t row_bytes;  // 0: a bit

  std::size_t bytes(std::uint64_t num_rows) const {
    return row_bytes != 0 ? num_rows * row_bytes : touched_bytes(num_rows);
  }
  FileRole role(std::size_t table, std::uint32_t shard) const {
    return {kind, static_cast<std::uint32_t>(table), shard};
  }
};
std::vector<ColumnShape> shapes_of(const RowTable& table, bool row_checksums) {
  using Table = InPlaceStore::Table;
  using Kind = format::FileKind;
  std::vector<ColumnShape> shapes = {{"weights", Kind::weights, &Table::weights, table.weight_bytes()}};
  if (table.state_bytes() != 0) shapes.push_back({"state", Kind::state, &Table::state, table.state_bytes()});
  shapes.push_back({"touched", Kind::touched, &Table::touched, 0});
  if (row_checksums) shapes.push_back({"checksums", Kind::checksums, &Table::tags, RowChecksums::row_bytes});
  return shapes;
}

// Of every file of the tables: its table's number, its column, its shard's piece, and its name.
template <class Visit>
void for_each_file(const std::vector<RowTable>& tables, bool row_checksums, const Visit& visit) {
  for (std::size_t i = 0; i < tables.size(); ++i) {
    for (const ColumnShape& shape : shapes_of(tables[i], row_checksums)) {
      for (const RowPiece& piece : tables[i].owned_pieces()) {
        visit(i, shape, piece, row_file_name(tables[i], piece.shard, i, shape.what));
      }
    }
  }
}

// All rows in one file, or the pieces of a split table as one; their places begin at pages.
InPlaceStore::Table::Column open_column(Medium& medium, const RowTable& table, std::size_t number,
                                        const ColumnShape& shape, bool writable) {
  std::unique_ptr<File> file;
  std::size_t num_pages = 0;
  std::vector<JoinedPiece> pieces;
  for (const RowPiece& piece : table.owned_pieces()) {
    const std::size_t bytes = shape.bytes(piece.num_rows);
    pieces.push_back({row_file_name(table, piece.shard, number, shape.what), shape.bytes(piece.first), bytes,
                      labelled_bytes(bytes, table.identity)});
    num_pages += pages_of(pieces.back().bytes);
  }
  try {
    const std::size_t bytes = pieces.empty() ? 0 : shape.bytes(table.num_rows);
    const bool is_one = pieces.size() == 1 && pieces.front().bytes == bytes;
    if (is_one) {
      file = open_labelled(medium, pieces.front().name, writable, Access::random, table.identity,
                           shape.role(number, table.owned_pieces().front().shard), bytes);
    } else {
      file = medium.open_joined(pieces, bytes, writable, Access::random);
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        check_label_of(medium, pieces[i].name, table.identity, shape.role(number, table.owned_pieces()[i].shard));
      }
    }
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::not_found) throw;
    throw Error(ErrorKind::corrupted, std::string(error.what()) + "; table '" + table.name + "' has lost a file");
  }
  auto allocated = writable ? std::make_unique<AllocatedPages>(*file, num_pages) : nullptr;
  return {std::move(file), std::move(allocated)};
}

// Of rows [first, first + num_rows), which one writer owns: all of their pages at once, large ones where there are any.
void allocate_rows(const InPlaceStore::Table& table, std::uint64_t first, std::size_t num_rows) {
  for (const ColumnShape& shape : shapes_of(table, table.tags.file != nullptr)) {
    const std::size_t row_bytes = shape.row_bytes;
    if (row_bytes != 0) (table.*shape.column).pages->ensure(first * row_bytes, num_rows * row_bytes);
  }
}

}  // namespace

HomeRows InPlaceStore::Table::home() const {
  return {weights.file->data(), state.file ? reinterpret_cast<float*>(state.file->data()) : nullptr,
          reinterpret_cast<std::uint64_t*>(touched.file->data()), tags.file != nullptr};
}

std::optional<RowChecksums> InPlaceStore::Table::checksums() const {
  if (!tags.file) return std::nullopt;
  return RowChecksums(*this, reinterpret_cast<std::uint32_t*>(tags.file->data()));
}

void InPlaceStore::create(Medium& medium, const std::vector<RowTable>& tables, bool row_checksums) {
  std::vector<std::unique_ptr<File>> files;
  if (std::ranges::any_of(tables, [](const RowTable& table) { return table.layout.has_value(); })) allow_many_files();
  for_each_file(tables, row_checksums,
                [&](std::size_t table, const ColumnShape& shape, const RowPiece& piece, const std::string& name) {
                  files.push_back(create_labelled(medium, name, shape.bytes(piece.num_rows), Access::random,
                                                  tables[table].identity, shape.role(table, piece.shard)));
                });
  // All of them first: a file system that journals has most to do for the first one.
  for (const auto& file : files) file->sync();
}

std::vector<LabelledName> InPlaceStore::files(const std::vector<RowTable>& tables, bool row_checksums) {
  std::vector<LabelledName> files;
  for_each_file(tables, row_checksums,
                [&](std::size_t table, const ColumnShape& shape, const RowPiece& piece, const std::string& name) {
                  files.push_back({name, shape.role(table, piece.shard), tables[table].identity});
                });
  return files;
}

InPlaceStore::InPlaceStore(Medium& medium, std::vector<RowTable> tables, bool row_checksums, bool writable)
    : medium_(medium), kernels_(best_kernels()) {
  std::vector<HugePages::Column> columns;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    Table table{std::move(tables[i]), {}, {}, {}, {}};
    if (table.layout) allow_many_files();
    for (const ColumnShape& shape : shapes_of(table, row_checksums)) {
      Table::Column& column = table.*shape.column;
      column = open_column(medium, table, i, shape, writable);
      columns.push_back({column.file.get(), column.pages.get()});
    }
    tables_.push_back(std::move(table));
  }
  if (writable) huge_pages_.reset(new HugePages(columns));
}

void InPlaceStore::prepare(std::size_t index, const WorkingRows& working, std::size_t begin, std::size_t end) {
  Table& table = tables_[index];
  const auto ensure = [&](Table::Column& column, auto offset_of, std::size_t bytes) {
    if (!column.file || column.pages->complete()) return;
    for (std::size_t u = begin; u < end; ++u) column.pages->ensure(offset_of(working.rows[u] & ~fresh_bit), bytes);
  };
  const std::size_t weight_bytes = table.weight_bytes();
  const std::size_t state_bytes = table.state_bytes();
  ensure(table.weights, [=](std::uint64_t row) { return row * weight_bytes; }, weight_bytes);
  ensure(table.state, [=](std::uint64_t row) { return row * state_bytes; }, state_bytes);
  ensure(table.touched, [](std::uint64_t row) { return row / 64 * 8; }, 8);
  ensure(table.tags, [](std::uint64_t row) { return row * 4; }, 4);
}

void InPlaceStore::ask_for(std::size_t index, const WorkingRows& working, std::size_t begin, std::size_t end) const {
  const Table& table = tables_[index];
  const HomeRows home = table.home();
  const std::size_t weight_bytes = table.weight_bytes();
  for (std::size_t u = begin; u < end; ++u) {
    const std::uint64_t row = working.rows[u] & ~fresh_bit;
    const std::byte* const weights = home.weights + row * weight_bytes;
    for (std::size_t at = 0; at < std::min(weight_bytes, most_asked_bytes); at += format::line_bytes) {
      __builtin_prefetch(weights + at);
    }
    if (home.state != nullptr) __builtin_prefetch(home.state + row * table.spec.state_floats);
    __builtin_prefetch(home.touched + row / 64);
  }
}

void InPlaceStore::capture(std::size_t index, const WorkingRows& working, std::size_t begin, std::size_t end) const {
  const std::size_t bad = try_capture(index, working, begin, end);
  if (bad != end) throw Error(ErrorKind::corrupted, bad_row(index, working.rows[bad]));
}

std::size_t InPlaceStore::try_capture(std::size_t index, const WorkingRows& working, std::size_t begin,
                                      std::size_t end) const {
  const Table& table = tables_[index];
  kernels_.capture(table.spec, table.home(), working, begin, end);
  const auto checksums = table.checksums();
  const std::size_t bad = checksums ? checksums->find_bad(working, begin, end) : end;
  for (std::size_t u = bad; u < end; ++u) working.rows[u] &= ~fresh_bit;
  return bad;
}

std::size_t InPlaceStore::update(std::size_t index, const UpdateSpec& spec, const WorkingRows& working,
                                 const Occurrences& occurrences, const float* grad, const std::uint32_t* forward,
                                 const WorkingRows* next, std::size_t begin, std::size_t end) {
  const Table& table = tables_[index];
  const std::size_t non_finite =
      kernels_.update(table.spec, spec, table.home(), working, occurrences, grad, forward, next, begin, end);
  hold_back(table, working, forward, next, begin, end);
  finish_rows(table, working, begin, end);
  return non_finite;
}

std::size_t InPlaceStore::update_from_sums(std::size_t index, const UpdateSpec& spec, const WorkingRows& working,
                                           const float* sums, const std::uint32_t* forward, const WorkingRows* next,
                                           std::size_t begin, std::size_t end) {
  const Table& table = tables_[index];
  const std::size_t non_finite =
      kernels_.update_from_sums(table.spec, spec, table.home(), working, sums, forward, next, begin, end);
  hold_back(table, working, forward, next, begin, end);
  finish_rows(table, working, begin, end);
  return non_finite;
}

std::size_t InPlaceStore::put(std::size_t index, const WorkingRows& working, const ReadyRows& ready, std::size_t begin,
                              std::size_t end) {
  const Table& table = tables_[index];
  kernels_.put(table.spec, table.home(), working.rows, ready, begin, end);
  finish_rows(table, working, begin, end);
  return kernels_.first_non_finite(table.spec, ready, begin, end);
}

void InPlaceStore::add_reads(DialWork& work, std::size_t index, std::uint64_t num_rows) const {
  const Dial* dial = medium_.dial();
  if (dial == nullptr) return;
  const Table& table = tables_[index];
  dial->add_reads(work, num_rows, table.weight_bytes());
  dial->add_reads(work, num_rows, table.state_bytes());
  if (table.tags.file) dial->add_reads(work, num_rows, RowChecksums::row_bytes);
}

// Asked for where the medium is dialled.
void InPlaceStore::add_writes(DialWork& work, std::size_t index, std::uint64_t num_rows) const {
  const Dial* dial = medium_.dial();
  const Table& table = tables_[index];
  dial->add_writes(work, num_rows, table.weight_bytes());
  dial->add_writes(work, num_rows, table.state_bytes());
  if (table.tags.file) dial->add_writes(work, num_rows, RowChecksums::row_bytes);
}

std::size_t InPlaceStore::materialize(std::size_t index, std::span<const std::uint64_t> rows) {
  const Table& table = tables_[index];
  const HomeRows home = table.home();
  std::vector<std::uint64_t> untouched;
  std::ranges::copy_if(rows, std::back_inserter(untouched),
                       [&](std::uint64_t row) { return (home.touched[row / 64] >> (row % 64) & 1) == 0; });
  prepare(index, {untouched.data(), nullptr, nullptr}, 0, untouched.size());
  for (const std::uint64_t row : untouched) {
    kernels_.initial_row(table.spec, row, home.weights + row * table.weight_bytes());
    if (home.state != nullptr) std::fill_n(home.state + row * table.spec.state_floats, table.spec.state_floats, 0.0f);
  }
  return untouched.size();
}

RowMapping InPlaceStore::mapping(std::size_t index) const {
  const Table& table = tables_[index];
  const HomeRows home = table.home();
  RowMapping mapping{home.weights, home.state};
  for (const RowPiece& piece : table.owned_pieces()) {
    const auto add = [&](std::byte* first_row, std::size_t row_bytes) {
      mapping.ranges.emplace_back(first_row + piece.first * row_bytes, piece.num_rows * row_bytes);
    };
    add(home.weights, table.weight_bytes());
    if (home.state != nullptr) add(reinterpret_cast<std::byte*>(home.state), table.state_bytes());
  }
  return mapping;
}

void InPlaceStore::restore(std::size_t index, const WorkingRows& working, std::size_t begin, std::size_t end) {
  const Table& table = tables_[index];
  kernels_.restore(table.spec, table.home(), working, begin, end);
  finish_rows(table, working, begin, end);
}

// At home, and where the update has handed them to the next step's capture.
void InPlaceStore::hold_back(const Table& table, const WorkingRows& working, const std::uint32_t* forward,
                             const WorkingRows* next, std::size_t begin, std::size_t end) {
  if (table.key_policy.admission.admits_all()) return;
  const HomeRows home = table.home();
  hold_back_keys(table, working, {home.weights, home.state}, begin, end,
                 [&](std::size_t u) { return working.rows[u] & ~fresh_bit; });
  if (forward == nullptr) return;
  for (std::size_t u = begin; u < end; ++u) {
    if (forward[u] == no_forward) continue;
    hold_back_keys(table, working, {next->weights, next->state}, u, u + 1, [&](std::size_t) { return forward[u]; });
  }
}

// Rows [begin, end) of `working` are home: their checksums, and the way to the medium.
void InPlaceStore::finish_rows(const Table& table, const WorkingRows& working, std::size_t begin, std::size_t end) {
  const HomeRows home = table.home();
  if (const auto checksums = table.checksums()) checksums->write(home, working, begin, end);
  if (medium_.level() == format::Level::power) {
    const std::size_t weight_bytes = table.weight_bytes();
    for (std::size_t u = begin; u < end; ++u) {
      const std::uint64_t row = working.rows[u] & ~fresh_bit;
      medium_.flush(home.weights + row * weight_bytes, weight_bytes);
      if (home.state != nullptr) medium_.flush(home.state + row * table.spec.state_floats, table.state_bytes());
      if ((working.rows[u] & fresh_bit) != 0) medium_.flush(home.touched + row / 64, 8);
      if (table.tags.file) medium_.flush(table.tags.file->data() + row * sizeof(std::uint32_t), sizeof(std::uint32_t));
    }
  }
  medium_.persist_point();
}

void InPlaceStore::import_rows(std::size_t index, const ImportedRows& imported) {
  Table& table = tables_[index];
  std::vector<std::uint64_t> rows(imported.rows().begin(), imported.rows().end());
  const bool are_there = std::ranges::all_of(rows, [&](std::uint64_t row) { return table.has_range(row, 1); });
  if (!are_there) throw Error(ErrorKind::config, "imported rows do not fit table '" + table.name + "'");
  const WorkingRows working{rows.data(), nullptr, nullptr};
  const bool are_neighbours = !rows.empty() && rows.back() - rows.front() == rows.size() - 1;
  if (are_neighbours && std::ranges::is_sorted(rows)) allocate_rows(table, rows.front(), rows.size());
  prepare(index, working, 0, rows.size());
  const HomeRows home = table.home();
  const std::size_t state_bytes = home.state == nullptr ? 0 : table.state_bytes();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::uint64_t row = rows[i];
    imported.put(i, table.weight_bytes(), home.weights + row * table.weight_bytes(), state_bytes,
                 reinterpret_cast<std::byte*>(home.state) + row * state_bytes);
    home.touched[row / 64] |= std::uint64_t{1} << (row % 64);
    rows[i] |= fresh_bit;  // flush its touched bit too
  }
  finish_rows(table, working, 0, rows.size());
}

std::vector<std::uint64_t> InPlaceStore::touched_rows(std::size_t index, std::uint64_t first, std::size_t count) const {
  const Table& table = tables_[index];
  std::vector<std::uint64_t> rows;
  for (const RowPiece& piece : table.owned_pieces()) {
    if (rows.size() == count) break;
    if (first >= piece.end()) continue;
    const std::uint64_t begin = std::max(first, piece.first);
    if (table.tags.file) {
      add_touched_or_tagged_rows(table, begin, piece.end(), count, rows);
    } else {
      add_touched_rows(table, begin, piece.end(), count, rows);
    }
  }
  return rows;
}

void InPlaceStore::read_state(std::size_t index, const WorkingRows& rows, std::size_t count) const {
  const Table& table = tables_[index];
  if (table.tags.file) return capture(index, rows, 0, count);
  const HomeRows home = table.home();
  const std::size_t state_floats = table.spec.state_floats;
  for (std::size_t u = 0; u < count; ++u) {
    std::memcpy(rows.state + u * state_floats, home.state + rows.rows[u] * state_floats, table.state_bytes());
  }
}

void InPlaceStore::add_touched_rows(const Table& table, std::uint64_t first, std::uint64_t end, std::size_t count,
                                    std::vector<std::uint64_t>& rows) {
  const HomeRows home = table.home();
  for (std::uint64_t row = first; row < end && rows.size() < count;) {
    const std::size_t data = table.touched.file->next_data(row / 64 * 8);
    row = std::max<std::uint64_t>(row, data / 8 * 64);
    const std::uint64_t page_end = std::min<std::uint64_t>(end, (data / page_bytes + 1) * page_bytes * 8);
    for (; row < page_end && rows.size() < count; ++row) {
      if (row % 64 == 0 && home.touched[row / 64] == 0) {
        row += 63;
        continue;
      }
      if ((home.touched[row / 64] >> (row % 64) & 1) != 0) rows.push_back(row);
    }
  }
}

void InPlaceStore::add_touched_or_tagged_rows(const Table& table, std::uint64_t first, std::uint64_t end,
                                              std::size_t count, std::vector<std::uint64_t>& rows) {
  const auto* touched = reinterpret_cast<const std::uint64_t*>(table.touched.file->data());
  const auto* tags = reinterpret_cast<const std::uint32_t*>(table.tags.file->data());
  constexpr std::size_t tags_per_page = page_bytes / RowChecksums::row_bytes;
  for (std::uint64_t row = first; row < end && rows.size() < count;) {
    const std::uint64_t next_touched = table.touched.file->next_data(row / 64 * 8) / 8 * 64;
    const std::uint64_t next_tag = table.tags.file->next_data(row * RowChecksums::row_bytes) / RowChecksums::row_bytes;
    row = std::max(row, std::min(next_touched, next_tag));
    const std::uint64_t page_end = std::min<std::uint64_t>(end, (row / tags_per_page + 1) * tags_per_page);
    for (; row < page_end && rows.size() < count; ++row) {
      if ((touched[row / 64] >> (row % 64) & 1) != 0 || tags[row] != 0) rows.push_back(row);
    }
  }
}

std::string InPlaceStore::bad_row(std::size_t index, std::uint64_t row) const {
  const Table& table = tables_[index];
  return table.weights.file->place(row * table.weight_bytes()) + ": row " + std::to_string(row) + " of table '" +
         table.name + "' does not hold its checksum, " + table.tags.file->place(row * sizeof(std::uint32_t)) +
         "; restore a snapshot, or what you have of the pool";
}

std::vector<std::string> InPlaceStore::bad_rows(
    const std::function<bool(std::size_t table, std::uint64_t row)>& torn) const {
  constexpr std::size_t most_problems = 100;
  std::vector<std::string> problems;
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    const Table& table = tables_[t];
    if (!table.tags.file) continue;
    constexpr std::size_t chunk_rows = 4096;
    std::vector<std::byte> weights(chunk_rows * table.weight_bytes());
    std::vector<float> state(chunk_rows * table.spec.state_floats);
    std::uint64_t next = 0;
    while (problems.size() < most_problems) {
      std::vector<std::uint64_t> rows = touched_rows(t, next, chunk_rows);
      if (rows.empty()) break;
      next = rows.back() + 1;
      const WorkingRows copies{rows.data(), weights.data(), state.data()};
      for (std::size_t begin = 0; begin < rows.size() && problems.size() < most_problems;) {
        const std::size_t bad = try_capture(t, copies, begin, rows.size());
        if (bad == rows.size()) break;
        if (!torn(t, rows[bad])) problems.push_back(bad_row(t, rows[bad]));
        begin = bad + 1;
      }
    }
  }
  return problems;
}

void InPlaceStore::sync() {
  for (Table& table : tables_) {
    for (Table::Column* column : {&table.weights, &table.state, &table.touched, &table.tags}) {
      if (column->file) column->file->sync();
    }
  }
}

}  // namespace holdfast
