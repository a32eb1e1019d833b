// The log store's way home that an import takes.
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/parallel.h"
#include "log_store/log_store.h"

namespace holdfast {
namespace {

constexpr std::size_t buffer_bytes = std::size_t{8} << 20;  // of blocks, written at once
constexpr std::size_t images_bytes = std::size_t{32} << 20;  // that are made at a time,
constexpr std::size_t chunk_bytes = std::size_t{64} << 10;  // and by one thread
constexpr std::size_t most_writes = 8 * BlockQueue::depth;

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
    const std::size_t rows_at_once = std::max<std::size_t>(1, images_bytes / layout.image_bytes());
    for (std::uint64_t done = 0; done < count;) {
      const std::uint64_t some = std::min<std::uint64_t>(count - done, rows_at_once);
      const std::byte* of_weights = weights.data() + done * layout.weight_bytes();
      const float* of_state = state.empty() ? nullptr : state.data() + done * what.spec.state_floats;
      write_rows(table, first + done, some, of_weights, of_state);
      done += some;
    }
  });
}

void LogStore::write_rows(std::uint32_t number, std::uint64_t first, std::size_t count, const std::byte* weights,
                          const float* state) {
  Table& table = tables_[number];
  table.homes[table.home_of(first)].is_importing = true;
  const RowLayout& layout = table.layout;
  const std::vector<float> zeros(table.what.spec.state_floats);
  std::vector<std::byte> images(count * layout.image_bytes());
  const std::size_t chunk_rows = std::max<std::size_t>(1, chunk_bytes / layout.image_bytes());
  parallel_for((count + chunk_rows - 1) / chunk_rows, [&](std::size_t chunk) {
    for (std::size_t i = chunk * chunk_rows; i < std::min(count, (chunk + 1) * chunk_rows); ++i) {
      const float* of_row = state == nullptr ? zeros.data() : state + i * table.what.spec.state_floats;
      write_image(layout, number, first + i, weights + i * layout.weight_bytes(), of_row,
                  images.data() + i * layout.image_bytes());
    }
  });
  std::vector<Version> versions;
  versions.reserve(count);
  for (std::size_t i = count; i-- > 0;) versions.push_back({first + i, i * layout.image_bytes()});
  settle_addresses(table, versions);  // which begins with the last of them
  const SpareBuffers::Borrowed buffer = spare_.borrow(buffer_bytes);
  for (std::size_t done = 0; done < versions.size();) {
    const auto some = std::span(versions).subspan(done);
    done += write_home(table, some, images.data(), buffer.buffer(), {buffer_bytes, most_writes}).versions;
  }
}

// As far as rows are there, where they lie by first touch.
double LogStore::num_home_blocks() const {
  double bytes = 0;
  const std::lock_guard lock(mutex_);
  for (const Table& table : tables_) {
    for (const Home& home : table.homes) bytes += static_cast<double>(table.layout.bytes_for(home.num_images()));
  }
  return std::max(1.0, bytes / format::block_bytes);
}

double LogStore::rows_per_home_block() const {
  double rows = 0;
  {
    const std::lock_guard lock(mutex_);
    for (const Table& table : tables_) {
      // The first that come to a home lie together.
      for (const Home& home : table.homes) rows += static_cast<double>(std::max<std::uint64_t>(1, home.num_images()));
    }
  }
  return rows / num_home_blocks();
}

// No log has these rows: what a crash leaves of them at home is there for whoever looks. So the checkpoint gives the
// bits up before the first of them is written, and takes them back once they are durable. Addresses count when they and
// their images are durable.
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
    if (const auto home_rows = sync_home_rows(); home_rows && log_.home_rows() != home_rows) log_.checkpoint();
  });
}

// Which rows are home, whose images are durable: the next checkpoint may rest on it. Returns how many, where that is known.
std::optional<std::uint64_t> LogStore::sync_home_rows() {
  std::optional<std::uint64_t> home_rows;
  if (home_bits_) {
    home_bits_->sync();
    home_rows = home_bits_->count();
  }
  for (const Table& table : tables_) {
    for (const Home& home : table.homes) {
      if (!home.addresses) continue;
      home.addresses->sync();
      home_rows = home_rows.value_or(0) + home.addresses->count();
    }
  }
  if (home_rows) log_.set_home_rows(home_rows);
  return home_rows;
}

}  // namespace holdfast
