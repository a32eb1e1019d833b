#include "log_store/store_sweep.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "log_store/sector_runs.h"

namespace holdfast::store_sweep {

namespace {

constexpr std::size_t rows_at_once = 4096;  // looked up while others wait for the index
constexpr std::size_t buffer_bytes = std::size_t{4} << 20;  // of the log, read at once
constexpr std::size_t log_gap_bytes = std::size_t{16} << 10;  // read with what is beside: most of a log is wanted

// A row whose newest version is in the log.
struct LoggedRow {
  std::uint64_t location;  // ascends with the ring's bytes
  std::uint64_t row;
  std::uint32_t table;
};

std::uint64_t begin_fetch(const StoreView& store, bool reads_log) {
  const LogIndex::Locked locked(store.index);
  return store.index.begin_fetch(locked, reads_log);
}

// Which of them: by position.
std::vector<std::size_t> not_in_log(const StoreView& store, std::uint32_t table, std::span<const std::uint64_t> rows) {
  std::vector<std::size_t> found;
  found.reserve(rows.size());
  for (std::size_t i = 0; i < rows.size();) {
    const LogIndex::Locked locked(store.index);
    const RowIndex& index = locked.of(table);
    for (const std::size_t stop = std::min(rows.size(), i + rows_at_once); i < stop; ++i) {
      prefetch_ahead(index, rows.data(), i, rows.size());
      if (!index.find(rows[i])) found.push_back(i);
    }
  }
  return found;
}

// Some at a time: what was checked is in the processor's caches when it is taken. place: of the image of a row, for
// messages.
void give_swept(const StoreView& store, std::uint32_t table, std::span<const std::uint64_t> rows,
                std::span<const std::byte* const> images, const Take& take,
                const std::function<std::string(std::size_t)>& place) {
  constexpr std::size_t at_once = 1024;
  const RowLayout& layout = store.tables[table].layout;
  std::vector<SweptRow> swept;
  for (std::size_t first = 0; first < rows.size(); first += at_once) {
    const auto some = rows.subspan(first, std::min(at_once, rows.size() - first));
    const auto of_some = images.subspan(first, some.size());
    const std::size_t whole = count_whole(layout, table, some, of_some);
    if (whole != some.size()) throw Error(ErrorKind::corrupted, damaged_row(place(first + whole), table, some[whole]));
    swept.clear();
    for (std::size_t i = 0; i < some.size(); ++i) {
      swept.push_back({some[i], of_some[i], of_some[i] + layout.weight_bytes()});
    }
    take(table, swept);
  }
}

// By where they lie.
std::vector<LoggedRow> rows_in_log_behind(const StoreView& store, std::uint64_t back, std::uint64_t bytes,
                                          const IsWanted& is_wanted) {
  const std::uint64_t used = store.log.used_bytes();
  const std::uint64_t from_head = std::min(used, back + bytes);
  if (from_head <= back) return {};
  const LogStretch stretch{(store.log.tail() + used - from_head) % store.log.ring_bytes(), from_head - back,
                           store.log.ring_bytes()};
  std::vector<LoggedRow> rows;
  for (std::uint32_t t = 0; t < store.tables.size(); ++t) {
    if (!is_wanted(t)) continue;
    const std::size_t of_others = rows.size();
    store.index.visit(
        t, [&] { rows.resize(of_others); }, [] {},
        [&](std::uint64_t row, std::uint64_t location) {
          if (stretch.has(location)) rows.push_back({location, row, t});
        });
  }
  std::ranges::sort(rows, {}, &LoggedRow::location);
  return rows;
}

// As many of the rows, from the first on, as the buffer holds; returns how many. Sections of a record are of one table.
std::size_t take_logged(const StoreView& store, std::span<const LoggedRow> logged, const SectorBuffer& buffer,
                        const Take& take) {
  SectorRuns runs(buffer, {.read_gap_bytes = log_gap_bytes, .unit_bytes = store.io.unit_bytes});
  std::vector<const std::byte*> images;
  for (const LoggedRow& row : logged) {
    const std::byte* image =
        runs.place(store.log.file(), LogIndex::offset_of(row.location), store.tables[row.table].layout.image_bytes());
    if (image == nullptr) break;
    images.push_back(image);
  }
  store.io.queue.read_many(runs.reads());
  store.io.note_fetched(images.size(), runs.read_bytes(), runs.reads().size());
  std::vector<std::uint64_t> rows;
  for (std::size_t i = 0, first = 0; i < images.size(); ++i) {
    rows.push_back(logged[i].row);
    if (i + 1 < images.size() && logged[i + 1].table == logged[i].table) continue;
    give_swept(
        store, logged[i].table, std::span(rows).subspan(first), std::span(images).subspan(first, i + 1 - first), take,
        [&](std::size_t of) { return store.log.file().place(LogIndex::offset_of(logged[first + of].location)); });
    first = i + 1;
  }
  return images.size();
}

}  // namespace

std::vector<HomeStretch> home_stretches(const StoreView& store, std::uint32_t number, std::uint64_t bytes) {
  const std::uint64_t rows = std::max<std::uint64_t>(1, bytes / store.tables.at(number).layout.image_bytes());
  const std::span<const Home> homes = store.homes.of(number);
  std::vector<HomeStretch> stretches;
  for (std::uint32_t i = 0; i < homes.size(); ++i) {
    const Home& home = homes[i];
    const std::uint64_t end = home.addresses ? home.addresses->durable_count() : home.num_images();
    for (std::uint64_t first = 0; first < end; first += rows) {
      stretches.push_back({number, i, first, std::min(end, first + rows)});
    }
  }
  return stretches;
}

void sweep_home(const StoreView& store, const HomeStretch& stretch, const Take& take) {
  const RowLayout& layout = store.tables.at(stretch.table).layout;
  const Home& home = store.homes.of(stretch.table)[stretch.home];
  const LogIndex::Fetching fetching(store.index, begin_fetch(store, false));
  std::optional<HomePiece> piece = store.homes.place_piece(stretch.table, home, stretch.first,
                                                           layout.bytes_for(stretch.end - stretch.first), stretch.end);
  if (!piece) return;
  const std::vector<std::size_t> at_home = not_in_log(store, stretch.table, piece->rows);
  if (at_home.empty()) return;
  store.homes.read_piece(*piece);
  std::vector<std::uint64_t> rows;
  std::vector<const std::byte*> images;
  rows.reserve(at_home.size());
  images.reserve(at_home.size());
  for (const std::size_t i : at_home) {
    const std::byte* image = piece->image(layout, i);
    if (!home.addresses && !has_tag(layout, image)) continue;  // nobody wrote it
    rows.push_back(piece->rows[i]);
    images.push_back(image);
  }
  store.io.note_fetched(rows.size(), piece->bytes, 1);
  const auto offset_of = [&](std::size_t i) {
    return piece->offset + static_cast<std::uint64_t>(images[i] - piece->data.data());
  };
  give_swept(store, stretch.table, rows, images, take, [&](std::size_t i) { return home.file->place(offset_of(i)); });
}

void sweep_log(const StoreView& store, std::uint64_t back, std::uint64_t bytes, const IsWanted& is_wanted,
               const Take& take) {
  const LogIndex::Fetching fetching(store.index, begin_fetch(store, true));
  const std::vector<LoggedRow> logged = rows_in_log_behind(store, back, bytes, is_wanted);
  const SpareBuffers::Borrowed buffer = store.io.spare.borrow(buffer_bytes);
  for (std::size_t done = 0; done < logged.size();) {
    done += take_logged(store, std::span(logged).subspan(done), buffer.buffer(), take);
  }
}

std::vector<bool> may_be_swept(const StoreView& store, std::uint32_t table, std::span<const std::uint64_t> rows) {
  const std::span<const Home> homes = store.homes.of(table);
  std::vector<bool> may_be(rows.size());
  for (std::size_t i = 0; i < rows.size();) {
    const LogIndex::Locked locked(store.index);
    const RowIndex& index = locked.of(table);
    for (const std::size_t stop = std::min(rows.size(), i + rows_at_once); i < stop; ++i) {
      prefetch_ahead(index, rows.data(), i, rows.size());
      may_be[i] = index.find(rows[i]) || store.homes.address_of(homes[store.homes.home_of(table, rows[i])], rows[i]);
    }
  }
  return may_be;
}

}  // namespace holdfast::store_sweep
