#include "rows/row_checksums.h"

#include "rows/row_tag.h"

namespace holdfast {
namespace {

// Tags are all over the file: ask for them this many rows before they are looked at.
constexpr std::size_t distance_rows = 16;

}  // namespace

void RowChecksums::write(const HomeRows& home, const WorkingRows& rows, std::size_t begin, std::size_t end) const {
  const std::size_t weight_bytes = table_.weight_bytes();
  const std::size_t state_floats = table_.spec.state_floats;
  for (std::size_t u = begin; u < end; ++u) {
    if (u + distance_rows < end) __builtin_prefetch(tags_ + (rows.rows[u + distance_rows] & ~fresh_bit), 1);
    const std::uint64_t row = rows.rows[u] & ~fresh_bit;
    const bool touched = (home.touched[row / 64] >> (row % 64) & 1) != 0;
    tags_[row] = touched ? row_tag(table_.spec.tag_seed, table_.spec.table, row, home.weights + row * weight_bytes,
                                   weight_bytes, home.state + row * state_floats, table_.state_bytes())
                         : 0;
  }
}

std::size_t RowChecksums::find_bad(const WorkingRows& copies, std::size_t begin, std::size_t end) const {
  const std::size_t weight_bytes = table_.weight_bytes();
  const std::size_t state_floats = table_.spec.state_floats;
  for (std::size_t u = begin; u < end; ++u) {
    if (u + distance_rows < end) __builtin_prefetch(tags_ + (copies.rows[u + distance_rows] & ~fresh_bit));
    const std::uint64_t row = copies.rows[u] & ~fresh_bit;
    const bool fresh = (copies.rows[u] & fresh_bit) != 0;
    const std::uint32_t expected =
        fresh ? 0
              : row_tag(table_.spec.tag_seed, table_.spec.table, row, copies.weights + u * weight_bytes, weight_bytes,
                        copies.state + u * state_floats, table_.state_bytes());
    if (tags_[row] != expected) return u;
  }
  return end;
}

}  // namespace holdfast
