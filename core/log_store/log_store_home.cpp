// The log store's way home that an import takes.
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/parallel.h"
#include "log_store/log_store.h"

namespace holdfast {
namespace {

constexpr std::size_t buffer_bytes = std::size_t{8} << 20;  // of sectors, written at once
constexpr std::size_t chunk_bytes = std::size_t{64} << 10;  // of images that one thread writes at a time

}  // namespace

void LogStore::import_rows(std::uint32_t table, std::uint64_t first, std::span<const std::byte> weights,
                           std::span<const float> state) {
  const std::lock_guard turn(merge_mutex_);
  require_usable();
  const RowTable& what = tables_.at(table).what;
  const std::size_t count = weights.size() / what.weight_bytes();
  if (weights.size() != count * what.weight_bytes() || !what.has_range(first, count) ||
      (!state.empty() && state.size() != count * what.spec.state_floats)) {
    throw Error(ErrorKind::config, "imported rows do not fit table '" + what.name + "'");
  }
  if (!log_.live().empty()) {
    throw Error(ErrorKind::step, log_.file().name() + ": rows are imported while the log is empty; merge first");
  }
  latching([&] {
    note_imported(tables_[table], first, first + count);
    const RowLayout& layout = tables_[table].layout;
    const std::size_t unit_rows = layout.unit_rows();
    const std::size_t rows_at_once = unit_rows * std::max<std::size_t>(1, buffer_bytes / layout.unit_bytes());
    for (std::uint64_t row = first; row < first + count;) {
      const std::uint64_t end = std::min(first + count, row / unit_rows * unit_rows + rows_at_once);
      write_rows(table, row, end, weights.data() + (row - first) * layout.weight_bytes(),
                 state.empty() ? nullptr : state.data() + (row - first) * what.spec.state_floats);
      row = end;
    }
  });
}

// Whole units of the device; the first and the last keep the rows that they have besides.
void LogStore::write_rows(std::uint32_t number, std::uint64_t first, std::uint64_t end, const std::byte* weights,
                          const float* state) {
  Table& table = tables_[number];
  Home& home = table.homes[table.home_of(first)];
  home.is_importing = true;
  const RowLayout& layout = table.layout;
  const std::size_t unit_rows = layout.unit_rows();
  const std::uint64_t rows_begin = (first - home.first) / unit_rows * layout.unit_bytes();
  const std::uint64_t rows_end = layout.bytes_for(end - home.first);
  const std::uint64_t begin = rows_begin / unit_bytes_ * unit_bytes_;
  const std::size_t bytes = format::align_up(rows_end, unit_bytes_) - begin;
  const SpareBuffers::Borrowed buffer = spare_.borrow(bytes);
  std::memset(buffer.data(), 0, bytes);
  const bool is_shared_first = begin != rows_begin || (first - home.first) % unit_rows != 0;
  const bool is_shared_last = begin + bytes != rows_end || (end - home.first) % unit_rows != 0;
  if (is_shared_first) queue_.read_range(*home.file, begin, unit_bytes_, buffer.data());
  if (is_shared_last) {
    const std::size_t last = bytes - unit_bytes_;
    queue_.read_range(*home.file, begin + last, unit_bytes_, buffer.data() + last);
  }
  const std::vector<float> zeros(table.what.spec.state_floats);
  const std::size_t chunk_rows = unit_rows * std::max<std::size_t>(1, chunk_bytes / layout.unit_bytes());
  parallel_for((end - first + chunk_rows - 1) / chunk_rows, [&](std::size_t chunk) {
    const std::uint64_t stop = std::min(end, first + (chunk + 1) * chunk_rows);
    for (std::uint64_t row = first + chunk * chunk_rows; row < stop; ++row) {
      const float* of_row = state == nullptr ? zeros.data() : state + (row - first) * table.what.spec.state_floats;
      write_image(layout, number, row, weights + (row - first) * layout.weight_bytes(), of_row,
                  buffer.data() + (home.offset_of(layout, row) - begin));
    }
  });
  queue_.write_range(*home.file, begin, bytes, buffer.data());
}

double LogStore::num_home_blocks() const {
  double bytes = 0;
  for (const Table& table : tables_) {
    for (const Home& home : table.homes) bytes += static_cast<double>(home.file->size());
  }
  return std::max(1.0, bytes / format::block_bytes);
}

double LogStore::rows_per_home_block() const {
  double rows = 0;
  for (const Table& table : tables_) rows += static_cast<double>(table.what.owned_rows());
  return rows / num_home_blocks();
}

// No log has these rows: what a crash leaves of them at home is there for whoever looks. So the checkpoint gives the
// bits up before the first of them is written, and takes them back once they are durable.
void LogStore::note_imported(const Table& table, std::uint64_t first, std::uint64_t end) {
  if (!home_bits_ || first == end) return;
  log_.set_home_rows(std::nullopt);
  if (log_.home_rows()) log_.checkpoint();
  const Home& home = table.homes[table.home_of(first)];
  const std::lock_guard lock(mutex_);
  for (std::uint64_t row = first; row < end; ++row) home_bits_->add(home.number_of(row));
}

// What a merge wrote it has synced; where it was given up, that is not relied on, and may be gigabytes.
void LogStore::sync_home() {
  const std::lock_guard turn(merge_mutex_);
  require_usable();
  latching([&] {
    for (Table& table : tables_) {
      for (Home& home : table.homes) {
        if (!home.is_importing) continue;
        home.file->sync();
        home.is_importing = false;
      }
    }
    sync_home_bits();
    if (home_bits_ && log_.home_rows() != home_bits_->count()) log_.checkpoint();
  });
}

// The next checkpoint may believe them.
void LogStore::sync_home_bits() {
  if (!home_bits_) return;
  home_bits_->sync();
  log_.set_home_rows(home_bits_->count());
}

}  // namespace holdfast
