#include "log_store/row_fetch.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "log_store/sector_runs.h"

namespace holdfast {
namespace {

constexpr std::size_t buffer_bytes = std::size_t{8} << 20;      // of sectors, read at once
constexpr std::size_t joined_gap_bytes = 7 * format::sector_bytes;  // reading these costs less than one more request

}  // namespace

void RowFetch::fetch(std::span<const TableRows> tables) {
  Resolved found;
  const LogIndex::Fetching fetching(index_, resolve(tables, found));
  for (const Untouched& row : found.untouched) take_initial(tables[row.request], row.row);
  std::size_t most_bytes = 0;
  for (const Item& item : found.items) most_bytes += bytes_around(tables_[tables[item.request].table].layout);
  const SpareBuffers::Borrowed buffer =
      io_.spare.borrow(std::min(buffer_bytes, most_bytes + found.items.size() * joined_gap_bytes));
  Reads reads;
  for (std::size_t done = 0; done < found.items.size();) {
    done += read_items(tables, std::span(found.items).subspan(done), buffer.buffer(), reads);
  }
  io_.counters.change([&](LogStoreCounters& counters) {
    counters.fetched_rows += found.items.size();
    counters.fetched_bytes += reads.bytes;
    counters.fetch_requests += reads.requests;
    counters.log_rows_fetched += found.num_in_log;
    counters.initial_rows += found.untouched.size();
  });
}

std::uint64_t RowFetch::resolve(std::span<const TableRows> tables, Resolved& found) {
  std::vector<Item> in_log;
  std::vector<Item>& items = found.items;
  std::uint64_t number = 0;
  {
    const LogIndex::Locked locked(index_);
    for (std::uint32_t request = 0; request < tables.size(); ++request) {
      const std::uint32_t table = tables[request].table;
      const RowLayout& layout = tables_.at(table).layout;
      const RowIndex& index = locked.of(table);
      const std::span<const Home> homes = homes_.of(table);
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
        if (!is_there) home = homes_.home_of(table, row);
        if (const auto address = homes_.address_of(homes[home], row)) {
          items.push_back({layout.offset_of(*address), request, static_cast<std::uint32_t>(home + 1), u});
        } else {
          found.untouched.push_back({request, u});
        }
      }
      std::sort(items.begin() + static_cast<std::ptrdiff_t>(at_home_before), items.end(), lies_before);
    }
    items.reserve(items.size() + in_log.size());  // nothing throws any more once the fetch is noted
    number = index_.begin_fetch(locked, !in_log.empty());
  }
  std::sort(in_log.begin(), in_log.end(), lies_before);
  items.insert(items.end(), in_log.begin(), in_log.end());
  found.num_in_log = in_log.size();
  return number;
}

const BlockFile& RowFetch::file_of(const TableRows& request, const Item& item) const {
  return item.file == 0 ? log_.file() : *homes_.of(request.table)[item.file - 1].file;
}

// Reads as many of the items, from the first on, as the buffer holds; returns how many.
std::size_t RowFetch::read_items(std::span<const TableRows> tables, std::span<const Item> items,
                                 const SectorBuffer& buffer, Reads& reads) {
  SectorRuns runs(buffer, {.read_gap_bytes = joined_gap_bytes, .unit_bytes = io_.unit_bytes});
  std::vector<const std::byte*> images;
  for (const Item& item : items) {
    const TableRows& request = tables[item.request];
    const std::byte* image =
        runs.place(file_of(request, item), item.offset, tables_[request.table].layout.image_bytes());
    if (image == nullptr) break;
    images.push_back(image);
  }
  io_.queue.read_many(runs.reads());
  for (std::size_t i = 0; i < images.size(); ++i) take_image(tables[items[i].request], items[i], images[i]);
  reads.bytes += runs.read_bytes();
  reads.requests += runs.reads().size();
  return images.size();
}

void RowFetch::take_image(const TableRows& request, const Item& item, const std::byte* image) const {
  const StoreTable& table = tables_[request.table];
  const RowLayout& layout = table.layout;
  const std::uint64_t row = request.rows.rows[item.row];
  std::byte* weights = request.rows.weights + item.row * layout.weight_bytes();
  float* state = request.rows.state + item.row * table.what.spec.state_floats;
  const ImageState found = check_image(layout, request.table, row, image);
  const bool must_be_whole = item.file == 0 || homes_.of(request.table)[item.file - 1].addresses;
  if (found == ImageState::damaged || (found == ImageState::untouched && must_be_whole)) {
    throw Error(ErrorKind::corrupted, damaged_row(file_of(request, item).place(item.offset), request.table, row));
  }
  if (found == ImageState::whole) {
    std::memcpy(weights, image, layout.weight_bytes());
    if (layout.state_bytes() != 0) std::memcpy(state, image + layout.weight_bytes(), layout.state_bytes());
    return;
  }
  take_initial(request, item.row);
}

void RowFetch::take_initial(const TableRows& request, std::size_t u) const {
  const StoreTable& table = tables_[request.table];
  std::uint64_t& row = request.rows.rows[u];
  kernels_.initial_row(table.what.spec, row, request.rows.weights + u * table.layout.weight_bytes());
  std::fill_n(request.rows.state + u * table.what.spec.state_floats, table.what.spec.state_floats, 0.0F);
  row |= fresh_bit;
}

// Of whole units, the most that a piece of images lies in.
std::size_t RowFetch::bytes_around(const RowLayout& layout) const {
  return format::align_up(layout.unit_bytes() + io_.unit_bytes - 1, io_.unit_bytes);
}

}  // namespace holdfast
