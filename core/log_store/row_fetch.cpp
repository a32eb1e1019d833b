#include "log_store/row_fetch.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "log_store/sector_runs.h"

namespace holdfast {
namespace {

constexpr std::size_t buffer_bytes = std::size_t{8} << 20;      // of sectors, read at once
constexpr std::size_t joined_gap_bytes = 7 * format::sector_bytes;  // reading these costs less than one more request

// One row to read: where it lies, and which row of which of the caller's tables it is.
struct Item {
  std::uint64_t offset;  // of the image, in the file
  std::uint32_t request;
  std::uint32_t file;  // 0: the log, else 1 + which home
  std::size_t row;
};
bool lies_before(const Item& a, const Item& b) { return a.file != b.file ? a.file < b.file : a.offset < b.offset; }

// A row that nobody has: of a table of the caller's, and which of its rows.
struct Untouched {
  std::uint32_t request;
  std::size_t row;
};

struct Resolved {
  std::vector<Item> items;  // of homes, then of the log, each in the order of the files
  std::size_t num_in_log = 0;
  std::vector<Untouched> untouched;
};

struct Reads {
  std::uint64_t bytes = 0;
  std::uint64_t requests = 0;
};

// Returns the number of the fetch that has begun.
std::uint64_t resolve(const StoreView& store, std::span<const TableRows> tables, Resolved& found) {
  std::vector<Item> in_log;
  std::vector<Item>& items = found.items;
  std::uint64_t number = 0;
  {
    const LogIndex::Locked locked(store.index);
    for (std::uint32_t request = 0; request < tables.size(); ++request) {
      const std::uint32_t table = tables[request].table;
      const RowLayout& layout = store.tables.at(table).layout;
      const RowIndex& index = locked.of(table);
      const std::span<const Home> homes = store.homes.of(table);
      const std::size_t at_home_before = items.size();
      std::size_t home = 0;
      for (std::size_t u = 0; u < tables[request].num_rows; ++u) {
        const std::uint64_t* rows = tables[request].rows.rows;
        prefetch_ahead(index, rows, u, tables[request].num_rows);
        const std::uint64_t row = rows[u];
        if (const auto location = index.find(row)) {
          in_log.push_back({LogIndex::offset_of(*location), request, 0, u});
          continue;
        }
        const bool is_there = home < homes.size() && row >= homes[home].first && row < homes[home].end;
        if (!is_there) home = store.homes.home_of(table, row);
        if (const auto address = store.homes.address_of(homes[home], row)) {
          items.push_back({layout.offset_of(*address), request, static_cast<std::uint32_t>(home + 1), u});
        } else {
          found.untouched.push_back({request, u});
        }
      }
      std::sort(items.begin() + static_cast<std::ptrdiff_t>(at_home_before), items.end(), lies_before);
    }
    items.reserve(items.size() + in_log.size());  // nothing throws any more once the fetch is noted
    number = store.index.begin_fetch(locked, !in_log.empty());
  }
  std::sort(in_log.begin(), in_log.end(), lies_before);
  items.insert(items.end(), in_log.begin(), in_log.end());
  found.num_in_log = in_log.size();
  return number;
}

const BlockFile& file_of(const StoreView& store, const TableRows& request, const Item& item) {
  return item.file == 0 ? store.log.file() : *store.homes.of(request.table)[item.file - 1].file;
}

void take_initial(const StoreView& store, const TableRows& request, std::size_t u) {
  const StoreTable& table = store.tables[request.table];
  std::uint64_t& row = request.rows.rows[u];
  best_kernels().initial_row(table.what.spec, row, request.rows.weights + u * table.layout.weight_bytes());
  std::fill_n(request.rows.state + u * table.what.spec.state_floats, table.what.spec.state_floats, 0.0F);
  row |= fresh_bit;
}

void take_image(const StoreView& store, const TableRows& request, const Item& item, const std::byte* image) {
  const StoreTable& table = store.tables[request.table];
  const RowLayout& layout = table.layout;
  const std::uint64_t row = request.rows.rows[item.row];
  std::byte* weights = request.rows.weights + item.row * layout.weight_bytes();
  float* state = request.rows.state + item.row * table.what.spec.state_floats;
  const ImageState found = check_image(layout, request.table, row, image);
  const bool must_be_whole = item.file == 0 || store.homes.of(request.table)[item.file - 1].addresses;
  if (found == ImageState::damaged || (found == ImageState::untouched && must_be_whole)) {
    throw Error(ErrorKind::corrupted,
                damaged_row(file_of(store, request, item).place(item.offset), request.table, row));
  }
  if (found == ImageState::whole) {
    std::memcpy(weights, image, layout.weight_bytes());
    if (layout.state_bytes() != 0) std::memcpy(state, image + layout.weight_bytes(), layout.state_bytes());
    return;
  }
  take_initial(store, request, item.row);
}

// Reads as many of the items, from the first on, as the buffer holds; returns how many.
std::size_t read_items(const StoreView& store, std::span<const TableRows> tables, std::span<const Item> items,
                       const SectorBuffer& buffer, Reads& reads) {
  SectorRuns runs(buffer, {.read_gap_bytes = joined_gap_bytes, .unit_bytes = store.io.unit_bytes});
  std::vector<const std::byte*> images;
  for (const Item& item : items) {
    const TableRows& request = tables[item.request];
    const std::byte* image =
        runs.place(file_of(store, request, item), item.offset, store.tables[request.table].layout.image_bytes());
    if (image == nullptr) break;
    images.push_back(image);
  }
  store.io.queue.read_many(runs.reads());
  for (std::size_t i = 0; i < images.size(); ++i) take_image(store, tables[items[i].request], items[i], images[i]);
  reads.bytes += runs.read_bytes();
  reads.requests += runs.reads().size();
  return images.size();
}

// Of whole units, the most that a piece of images lies in.
std::size_t bytes_around(const StoreView& store, const RowLayout& layout) {
  return format::align_up(layout.unit_bytes() + store.io.unit_bytes - 1, store.io.unit_bytes);
}

}  // namespace

void fetch_rows(const StoreView& store, std::span<const TableRows> tables) {
  Resolved found;
  const LogIndex::Fetching fetching(store.index, resolve(store, tables, found));
  for (const Untouched& row : found.untouched) take_initial(store, tables[row.request], row.row);
  std::size_t most_bytes = 0;
  for (const Item& item : found.items)
    most_bytes += bytes_around(store, store.tables[tables[item.request].table].layout);
  const SpareBuffers::Borrowed buffer =
      store.io.spare.borrow(std::min(buffer_bytes, most_bytes + found.items.size() * joined_gap_bytes));
  Reads reads;
  for (std::size_t done = 0; done < found.items.size();) {
    done += read_items(store, tables, std::span(found.items).subspan(done), buffer.buffer(), reads);
  }
  store.io.counters.change([&](LogStoreCounters& counters) {
    counters.fetched_rows += found.items.size();
    counters.fetched_bytes += reads.bytes;
    counters.fetch_requests += reads.requests;
    counters.log_rows_fetched += found.num_in_log;
    counters.initial_rows += found.untouched.size();
  });
}

}  // namespace holdfast
