#include "rows/row_versions.h"

#include <algorithm>
#include <cstring>

namespace holdfast {
namespace {

constexpr std::size_t block_bytes = std::size_t{1} << 18;

}  // namespace

RowVersions::RowVersions(const std::vector<RowTable>& tables) {
  for (const RowTable& table : tables) {
    const std::size_t bytes = table.weight_bytes() + table.state_bytes();
    tables_.push_back(
        {table.weight_bytes(), table.state_bytes(), std::max<std::size_t>(1, block_bytes / bytes), {}, {}, {}});
  }
}

std::byte* RowVersions::add(Table& table, std::uint64_t row) {
  const std::uint64_t place = table.index.size();
  if (place / table.block_rows == table.blocks.size()) {
    table.blocks.push_back(std::make_unique<std::byte[]>(table.block_rows * (table.weight_bytes + table.state_bytes)));
  }
  table.index.insert(row, place);
  return table.at(place);
}

void RowVersions::keep_first(std::uint32_t number, const WorkingRows& rows, std::size_t num_rows) {
  Table& table = tables_[number];
  const auto* state = reinterpret_cast<const std::byte*>(rows.state);
  for (std::size_t i = 0; i < num_rows; ++i) {
    const std::uint64_t row = rows.rows[i] & ~fresh_bit;
    if (table.index.find(row)) continue;
    std::byte* image = add(table, row);
    std::memcpy(image, rows.weights + i * table.weight_bytes, table.weight_bytes);
    if (table.state_bytes != 0) {
      std::memcpy(image + table.weight_bytes, state + i * table.state_bytes, table.state_bytes);
    }
  }
}

void RowVersions::replace(std::uint32_t number, std::uint64_t row, const std::byte* image) {
  Table& table = tables_[number];
  const auto place = table.index.find(row);
  std::memcpy(place ? table.at(*place) : add(table, row), image, table.weight_bytes + table.state_bytes);
}

std::size_t RowVersions::read(std::uint32_t number, std::uint64_t first, const RowValues& out, std::size_t count) {
  Table& table = tables_.at(number);
  if (table.sorted.size() != table.index.size()) {
    table.sorted = table.index.rows();
    std::sort(table.sorted.begin(), table.sorted.end());
  }
  const auto begin = std::lower_bound(table.sorted.begin(), table.sorted.end(), first);
  const std::size_t num_rows = std::min(count, static_cast<std::size_t>(table.sorted.end() - begin));
  std::copy_n(begin, num_rows, out.rows);
  const std::size_t num_bytes = table.weight_bytes + table.state_bytes;
  for (std::size_t i = 0; i < num_rows; ++i) {
    std::memcpy(out.values + i * num_bytes, table.at(*table.index.find(out.rows[i])), num_bytes);
  }
  return num_rows;
}

}  // namespace holdfast
