#include "log_store/homes.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "media/medium.h"

namespace holdfast {
namespace {

constexpr std::size_t tables_with_few_files = 200;  // each has two

std::string bits_path(const std::string& directory) { return directory + "/home-bits-0000"; }

bool is_by_first_touch(const RowTable& table) { return table.home_order == HomeOrder::by_first_touch; }

}  // namespace

std::optional<std::uint64_t> Homes::create(const std::string& directory, const std::vector<RowTable>& tables,
                                           Caching caching, bool adopt) {
  // How many rows homes have that are adopted, their addresses say; by number, nobody knows.
  const bool by_first_touch = std::ranges::all_of(tables, is_by_first_touch);
  std::optional<std::uint64_t> num_rows;
  if (by_first_touch || !adopt) num_rows = 0;
  BlockQueue queue;
  std::uint64_t owned_rows = 0;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    for (const RowPiece& piece : tables[i].owned_pieces()) {
      owned_rows += piece.num_rows;
      if (!adopt) {
        create_home(directory, tables[i], i, piece);
        continue;
      }
      const Home home = open_home(directory, tables[i], i, piece, caching, nullptr, Opening::read_only, queue);
      if (by_first_touch) *num_rows += home.addresses->read_count();
    }
  }
  if (!by_first_touch && !adopt) HomeBits::create(bits_path(directory), owned_rows);
  return num_rows;
}

Homes::Homes(const std::string& directory, const StoreTables& tables, const LogStoreOptions& options, StoreIo& io,
             RowLog& log, std::mutex& finders)
    : tables_(tables), io_(io), finders_(finders), writable_(options.writable), homes_(tables.size()) {
  std::uint64_t num_rows = 0;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const RowTable& table = tables[i].what;
    if (table.layout || tables.size() > tables_with_few_files) allow_many_files();
    for (const RowPiece& piece : table.owned_pieces()) {
      Home& home = homes_[i].emplace_back(
          open_home(directory, table, i, piece, options.caching, options.watcher, options.opening(), io.queue));
      home.file->set_dial(options.dial);
      if (home.addresses) home.addresses->set_dial(options.dial);
      home.first_number = num_rows;
      num_rows += piece.num_rows;
    }
  }
  // Who only reads beside a writer would not see what that adds.
  const auto least_rows = log.home_rows();
  if (!writable_ || !least_rows) return;
  if (std::ranges::all_of(tables, [](const StoreTable& table) { return is_by_first_touch(table.what); })) return;
  bits_ = HomeBits::open(bits_path(directory), num_rows, options.caching, options.watcher, io.queue,
                         options.identity.seed());
  if (bits_ && bits_->count() < *least_rows) bits_.reset();  // it is older than the checkpoint
  if (bits_ && bits_->count() > *least_rows) bits_->write_again();
  if (!bits_) log.set_home_rows(std::nullopt);
}

void Homes::read_addresses(const RowLog& log) {
  std::vector<Home*> homes;
  std::vector<HomeAddresses*> addresses;
  for (std::vector<Home>& of_table : homes_) {
    for (Home& home : of_table) {
      if (!home.addresses) continue;
      homes.push_back(&home);
      addresses.push_back(home.addresses.get());
    }
  }
  if (homes.empty()) return;
  const std::uint64_t least_rows = log.home_rows().value_or(0);
  HomeAddresses::read_all(addresses, least_rows);
  std::uint64_t num_rows = 0;
  for (Home* home : homes) {
    home->end_of_images = home->addresses->count();
    num_rows += home->addresses->count();
  }
  if (num_rows < least_rows) {
    throw Error(ErrorKind::corrupted, log.file().name() + ": " + std::to_string(least_rows) +
                                          " rows are home, and the homes' addresses name " + std::to_string(num_rows) +
                                          ": older files were put back");
  }
  if (!writable_ || num_rows == least_rows) return;
  for (Home* home : homes) home->addresses->write_header_again();
}

std::size_t Homes::home_of(std::uint32_t table, std::uint64_t row) const {
  const std::vector<Home>& homes = homes_[table];
  const auto after = std::ranges::upper_bound(homes, row, {}, &Home::first);
  if (!has(table, row)) {
    throw Error(ErrorKind::config,
                "row " + std::to_string(row) + " of table '" + tables_[table].what.name + "' is not in this store");
  }
  return static_cast<std::size_t>(after - homes.begin()) - 1;
}

bool Homes::has(std::uint32_t table, std::uint64_t row) const {
  const std::vector<Home>& homes = homes_[table];
  const auto after = std::ranges::upper_bound(homes, row, {}, &Home::first);
  return after != homes.begin() && row < (after - 1)->end;
}

std::size_t Homes::unit_bytes() const {
  std::size_t bytes = 0;
  for (const std::vector<Home>& of_table : homes_) {
    for (const Home& home : of_table) bytes = std::max(bytes, home.file->unit_bytes());
  }
  return bytes;
}

std::vector<std::uint64_t> Homes::num_rows() const {
  std::vector<std::uint64_t> rows;
  const std::lock_guard lock(finders_);
  for (const std::vector<Home>& of_table : homes_) {
    rows.push_back(0);
    for (const Home& home : of_table) rows.back() += home.num_images();
  }
  return rows;
}

// As far as rows are there, where they lie by first touch.
double Homes::num_blocks() const {
  double bytes = 0;
  const std::lock_guard lock(finders_);
  for (std::size_t t = 0; t < homes_.size(); ++t) {
    for (const Home& home : homes_[t]) bytes += static_cast<double>(tables_[t].layout.bytes_for(home.num_images()));
  }
  return std::max(1.0, bytes / format::block_bytes);
}

double Homes::rows_per_block() const {
  double rows = 0;
  {
    const std::lock_guard lock(finders_);
    for (const std::vector<Home>& of_table : homes_) {
      // The first that come to a home lie together.
      for (const Home& home : of_table) rows += static_cast<double>(std::max<std::uint64_t>(1, home.num_images()));
    }
  }
  return rows / num_blocks();
}

std::size_t Homes::memory_bytes() const {
  const std::lock_guard lock(finders_);
  std::size_t bytes = bits_ ? bits_->memory_bytes() : 0;
  for (const std::vector<Home>& of_table : homes_) {
    for (const Home& home : of_table) bytes += home.addresses ? home.addresses->memory_bytes() : 0;
  }
  return bytes;
}

std::optional<HomePiece> Homes::place_piece(std::uint32_t table, const Home& home, std::uint64_t address,
                                            std::uint64_t bytes, std::uint64_t end) const {
  const RowLayout& layout = tables_[table].layout;
  if (!home.addresses) {
    const std::uint64_t data = home.file->next_data(address / layout.unit_rows() * layout.unit_bytes());
    address = std::max(address, data / layout.unit_bytes() * layout.unit_rows());
  }
  if (address >= end) return std::nullopt;
  const std::uint64_t unit = address / layout.unit_rows();
  const std::uint64_t units = std::max<std::uint64_t>(1, bytes / layout.unit_bytes());
  const std::uint64_t piece_end = std::min(end, (unit + units) * layout.unit_rows());
  const std::uint64_t offset = unit * layout.unit_bytes() / io_.unit_bytes * io_.unit_bytes;
  const std::uint64_t data_end = format::align_up(layout.bytes_for(piece_end), io_.unit_bytes);
  HomePiece piece{&home, address, {}, offset, data_end - offset, {}};
  if (home.addresses) {
    piece.rows = home.addresses->rows_at(address, piece_end - address);
  } else {
    piece.rows.resize(piece_end - address);
    std::iota(piece.rows.begin(), piece.rows.end(), address);
  }
  for (std::uint64_t& row : piece.rows) row += home.first;
  return piece;
}

void Homes::read_piece(HomePiece& piece) const {
  piece.data = io_.spare.borrow(piece.bytes);
  io_.queue.read_range(*piece.home->file, piece.offset, piece.bytes, piece.data.data());
}

std::optional<HomePiece> Homes::next_piece(std::uint32_t table, const Home& home, std::uint64_t address,
                                           std::uint64_t bytes) const {
  std::optional<HomePiece> piece = place_piece(table, home, address, bytes, home.num_images());
  if (piece) read_piece(*piece);
  return piece;
}

}  // namespace holdfast
