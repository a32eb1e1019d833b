#include "log_store/row_import.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/parallel.h"

namespace holdfast {
namespace {

constexpr std::size_t buffer_bytes = std::size_t{8} << 20;  // of blocks, written at once
constexpr std::size_t images_bytes = std::size_t{32} << 20;  // that are made at a time,
constexpr std::size_t chunk_bytes = std::size_t{64} << 10;  // and by one thread
constexpr std::size_t most_writes = 8 * BlockQueue::depth;

void check(const ImportStore& store, std::uint32_t table, const ImportedRows& imported) {
  const auto& [what, layout] = store.tables.at(table);
  const auto& [rows, weights, state] = imported;
  const bool are_there = std::ranges::all_of(rows, [&](std::uint64_t row) { return store.homes.has(table, row); });
  if (!are_there || weights.size() != rows.size() * layout.weight_bytes() ||
      (!state.empty() && state.size() != rows.size() * what.spec.state_floats)) {
    throw Error(ErrorKind::config, "imported rows do not fit table '" + what.name + "'");
  }
  if (!store.log.live().empty()) {
    throw Error(ErrorKind::step, store.log.file().name() + ": rows are imported while the log is empty; merge first");
  }
}

// Which of them: rows that nothing has a version of.
void write_fresh(const ImportStore& store, std::uint32_t table, const ImportedRows& imported,
                 std::span<const std::size_t> which) {
  if (which.empty()) return;
  const RowLayout& layout = store.tables[table].layout;
  const std::vector<float> zeros(store.tables[table].what.spec.state_floats);
  std::vector<std::byte> images(which.size() * layout.image_bytes());
  std::vector<HomeVersion> versions;  // addresses begin with the last of them
  versions.reserve(which.size());
  for (std::size_t k = which.size(); k-- > 0;) versions.push_back({imported.rows[which[k]], k * layout.image_bytes()});
  store.home_writer.begin_import(table, versions);
  const std::size_t chunk_rows = std::max<std::size_t>(1, chunk_bytes / layout.image_bytes());
  parallel_for((which.size() + chunk_rows - 1) / chunk_rows, [&](std::size_t chunk) {
    for (std::size_t k = chunk * chunk_rows; k < std::min(which.size(), (chunk + 1) * chunk_rows); ++k) {
      const std::size_t i = which[k];
      const float* state = imported.state.empty() ? zeros.data() : imported.state.data() + i * zeros.size();
      write_image(layout, table, imported.rows[i], imported.weights.data() + i * layout.weight_bytes(), state,
                  images.data() + k * layout.image_bytes());
    }
  });
  store.home_writer.settle(table, versions);
  store.home_writer.note_import(table, versions);
  const SpareBuffers::Borrowed buffer = store.io.spare.borrow(buffer_bytes);
  for (std::size_t done = 0; done < versions.size();) {
    const auto some = std::span(versions).subspan(done);
    done += store.home_writer.write(table, some, images.data(), buffer.buffer(), {buffer_bytes, most_writes}).versions;
  }
}

// Which of them: rows that home may have.
void write_over(const ImportStore& store, std::uint32_t table, const ImportedRows& imported,
                std::vector<std::size_t> which, const std::function<void(const TableRows& rows)>& through_log) {
  const RowLayout& layout = store.tables[table].layout;
  const std::size_t state_floats = layout.state_bytes() / sizeof(float);
  std::ranges::sort(which, {}, [&](std::size_t i) { return imported.rows[i]; });
  const std::size_t record_rows = std::max<std::size_t>(
      1, (store.log.ring_bytes() / 2 - format::block_bytes) / (layout.unit_bytes() + sizeof(std::uint64_t)));
  for (std::size_t done = 0; done < which.size();) {
    const auto some = std::span(which).subspan(done, std::min(which.size() - done, record_rows));
    std::vector<std::uint64_t> rows;
    std::vector<std::byte> weights(some.size() * layout.weight_bytes());
    std::vector<float> state(some.size() * state_floats);
    for (std::size_t k = 0; k < some.size(); ++k) {
      rows.push_back(imported.rows[some[k]]);
      std::memcpy(weights.data() + k * layout.weight_bytes(), imported.weights.data() + some[k] * layout.weight_bytes(),
                  layout.weight_bytes());
      if (imported.state.empty()) continue;
      std::copy_n(imported.state.data() + some[k] * state_floats, state_floats, state.data() + k * state_floats);
    }
    through_log({table, rows.size(), {rows.data(), weights.data(), state.data()}});
    done += some.size();
  }
}

}  // namespace

void import_rows(const ImportStore& store, std::uint32_t table, const ImportedRows& imported,
                 const std::function<void(const TableRows& rows)>& through_log) {
  check(store, table, imported);
  const RowLayout& layout = store.tables[table].layout;
  const std::size_t state_floats = store.tables[table].what.spec.state_floats;
  store.latch.latching([&] {
    const std::size_t rows_at_once = std::max<std::size_t>(1, images_bytes / layout.image_bytes());
    for (std::size_t done = 0; done < imported.rows.size();) {
      const std::size_t count = std::min(imported.rows.size() - done, rows_at_once);
      ImportedRows some{imported.rows.subspan(done, count), imported.weights.subspan(done * layout.weight_bytes()), {}};
      if (!imported.state.empty()) some.state = imported.state.subspan(done * state_floats);
      std::vector<std::size_t> fresh;
      std::vector<std::size_t> known;
      for (std::size_t i = 0; i < count; ++i) {
        const Home& home = store.homes.of(table)[store.homes.home_of(table, some.rows[i])];
        (store.homes.address_of(home, some.rows[i]) ? known : fresh).push_back(i);
      }
      write_over(store, table, some, std::move(known), through_log);
      write_fresh(store, table, some, fresh);
      done += count;
    }
  });
}

}  // namespace holdfast
