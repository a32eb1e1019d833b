#include "log_store/row_import.h"

#include <algorithm>
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
  const RowTable& what = store.tables.at(table).what;
  const auto is_there = [&](std::uint64_t row) { return store.homes.has(table, row); };
  if (!std::ranges::all_of(imported.rows(), is_there)) {
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
  const std::size_t num_bytes = which.size() * layout.image_bytes();
  const SpareBuffers::Borrowed images = store.io.spare.borrow(num_bytes);
  std::vector<HomeVersion> versions;  // addresses begin with the last of them
  versions.reserve(which.size());
  for (std::size_t k = which.size(); k-- > 0;)
    versions.push_back({imported.rows()[which[k]], k * layout.image_bytes()});
  store.home_writer.begin_import(table, versions);
  const std::size_t chunk_rows = std::max<std::size_t>(1, chunk_bytes / layout.image_bytes());
  parallel_for((which.size() + chunk_rows - 1) / chunk_rows, [&](std::size_t chunk) {
    const std::size_t first = chunk * chunk_rows;
    const std::size_t count = std::min(which.size() - first, chunk_rows);
    std::byte* const begin = images.data() + first * layout.image_bytes();
    std::vector<std::uint64_t> rows(count);
    for (std::size_t k = 0; k < count; ++k) {
      std::byte* const image = begin + k * layout.image_bytes();
      rows[k] = imported.rows()[which[first + k]];
      imported.put(which[first + k], layout.weight_bytes(), image, layout.state_bytes(), image + layout.weight_bytes());
    }
    tag_images(layout, table, rows, begin);
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
  std::ranges::sort(which, {}, [&](std::size_t i) { return imported.rows()[i]; });
  const std::size_t record_rows = std::max<std::size_t>(
      1, (store.log.ring_bytes() / 2 - format::block_bytes) / (layout.unit_bytes() + sizeof(std::uint64_t)));
  for (std::size_t done = 0; done < which.size();) {
    const auto some = std::span(which).subspan(done, std::min(which.size() - done, record_rows));
    std::vector<std::uint64_t> rows;
    std::vector<std::byte> weights(some.size() * layout.weight_bytes());
    std::vector<float> state(some.size() * layout.state_bytes() / sizeof(float));
    for (std::size_t k = 0; k < some.size(); ++k) {
      rows.push_back(imported.rows()[some[k]]);
      imported.put(some[k], layout.weight_bytes(), weights.data() + k * layout.weight_bytes(), layout.state_bytes(),
                   reinterpret_cast<std::byte*>(state.data()) + k * layout.state_bytes());
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
  store.latch.latching([&] {
    const std::size_t rows_at_once = std::max<std::size_t>(1, images_bytes / layout.image_bytes());
    for (std::size_t done = 0; done < imported.rows().size();) {
      const std::size_t count = std::min(imported.rows().size() - done, rows_at_once);
      const ImportedRows some = imported.part(done, count);
      std::vector<std::size_t> fresh;
      std::vector<std::size_t> known;
      for (std::size_t i = 0; i < count; ++i) {
        const Home& home = store.homes.of(table)[store.homes.home_of(table, some.rows()[i])];
        (store.homes.address_of(home, some.rows()[i]) ? known : fresh).push_back(i);
      }
      write_over(store, table, some, std::move(known), through_log);
      write_fresh(store, table, some, fresh);
      done += count;
    }
  });
}

}  // namespace holdfast
