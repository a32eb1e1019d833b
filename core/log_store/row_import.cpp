#include "log_store/row_import.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/native_thread.h"

namespace holdfast {
namespace {

constexpr std::size_t buffer_bytes = std::size_t{8} << 20;  // of blocks, written at once
constexpr std::size_t images_bytes = std::size_t{8} << 20;   // that are made while others are written
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

// Some of the rows, as they go home.
struct Part {
  ImportedRows imported;
  std::vector<std::size_t> known;  // which of them home may have,
  std::vector<std::size_t> fresh;  // and those that nothing has a version of
  SpareBuffers::Borrowed images;   // of the fresh ones
};

Part made(const ImportStore& store, std::uint32_t table, const ImportedRows& imported) {
  const RowLayout& layout = store.tables[table].layout;
  Part part{imported, {}, {}, {}};
  std::vector<std::uint64_t> rows;
  for (std::size_t i = 0; i < imported.rows().size(); ++i) {
    const std::uint64_t row = imported.rows()[i];
    const Home& home = store.homes.of(table)[store.homes.home_of(table, row)];
    if (store.homes.address_of(home, row)) {
      part.known.push_back(i);
    } else {
      part.fresh.push_back(i);
      rows.push_back(row);
    }
  }
  part.images = store.io.spare.borrow(rows.size() * layout.image_bytes());
  for (std::size_t k = 0; k < rows.size(); ++k) {
    std::byte* const image = part.images.data() + k * layout.image_bytes();
    imported.put(part.fresh[k], layout.weight_bytes(), image, layout.state_bytes(), image + layout.weight_bytes());
  }
  tag_images(layout, table, rows, part.images.data());
  return part;
}

// Gives the fresh ones their addresses, which begin with the last of them.
std::vector<HomeVersion> placed(const ImportStore& store, std::uint32_t table, const Part& part) {
  const std::size_t image_bytes = store.tables[table].layout.image_bytes();
  std::vector<HomeVersion> versions;
  versions.reserve(part.fresh.size());
  for (std::size_t k = part.fresh.size(); k-- > 0;) {
    versions.push_back({part.imported.rows()[part.fresh[k]], k * image_bytes});
  }
  if (versions.empty()) return versions;
  store.home_writer.begin_import(table, versions);
  store.home_writer.settle(table, versions);
  store.home_writer.note_import(table, versions);
  return versions;
}

void write(const ImportStore& store, std::uint32_t table, std::span<const HomeVersion> versions,
           const std::byte* images) {
  const SpareBuffers::Borrowed buffer = store.io.spare.borrow(buffer_bytes);
  while (!versions.empty()) {
    const PartSize most{buffer_bytes, most_writes};
    versions = versions.subspan(store.home_writer.write(table, versions, images, buffer.buffer(), most).versions);
  }
}

void write_over(const ImportStore& store, std::uint32_t table, Part& part,
                const std::function<void(const TableRows& rows)>& through_log) {
  const RowLayout& layout = store.tables[table].layout;
  const ImportedRows& imported = part.imported;
  std::vector<std::size_t>& which = part.known;
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
  const std::size_t rows_at_once = std::max<std::size_t>(1, images_bytes / store.tables[table].layout.image_bytes());
  const std::size_t num_rows = imported.rows().size();
  const auto part_at = [&](std::size_t begin) {
    return made(store, table, imported.part(begin, std::min(num_rows - begin, rows_at_once)));
  };
  store.latch.latching([&] {
    if (num_rows == 0) return;
    Part part = part_at(0);
    for (std::size_t next = rows_at_once;; next += rows_at_once) {
      write_over(store, table, part, through_log);
      const std::vector<HomeVersion> versions = placed(store, table, part);
      if (next >= num_rows) return write(store, table, versions, part.images.data());
      std::optional<Part> following;
      const auto work = [&](std::size_t i) {
        if (i == 0) write(store, table, versions, part.images.data());
        if (i == 1) following = part_at(next);
      };
      if (store.homes.bits() == nullptr) {  // no address is given meanwhile: they are looked for
        in_threads(2, "hf-import", work);
      } else {  // which writing adds to
        work(0);
        work(1);
      }
      part = std::move(*following);
    }
  });
}

}  // namespace holdfast
