#include "rows/finite_rows.h"

namespace holdfast {

void NonFiniteRow::note(const RowTable& table, const WorkingRows& working, std::size_t found) {
  const std::uint64_t place = working.rows[found] & ~fresh_bit;
  NamedRow named{table.spec.table, table.layout ? table.layout->row_of(place) : place};
  if (table.has_keys() && working.keys != nullptr) named.row = working.keys[found];
  const std::lock_guard lock(mutex_);
  if (!first_ || named < *first_) first_ = named;
}

}  // namespace holdfast
