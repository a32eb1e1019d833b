// Finite rows: whether what a step writes is finite. A row with an infinity or a NaN makes the loss of whatever looks it up
// none, so no step that wrote one is committed.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>

#include "rows/row_table.h"

namespace holdfast {

// A row as whoever trains it knows it.
struct NamedRow {
  std::uint64_t table;
  std::uint64_t row;  // its number; of a table with keys its key
  auto operator<=>(const NamedRow&) const = default;
};

// The first of the rows that a step wrote and that are not finite. Thread-safe.
class NonFiniteRow {
 public:
  // Some of the rows of `working` were written, row `found` of which is the first that is not finite; `end`: none is.
  void note(const RowTable& table, const WorkingRows& working, std::size_t found, std::size_t end) {
    if (found != end) note(table, working, found);
  }
  const std::optional<NamedRow>& first() const { return first_; }

 private:
  void note(const RowTable& table, const WorkingRows& working, std::size_t found);

  std::mutex mutex_;
  std::optional<NamedRow> first_;
};

}  // namespace holdfast
