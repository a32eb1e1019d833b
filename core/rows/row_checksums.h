// Row checksums: a tag for each row of a table in place, in a file beside the rows.
//
// Invariants
// - The tag is 0 where the row is untouched, else the row's (row_tag.h): so a flipped touched bit is found, too.
// - A tag is written after its row. Between the two the row is one whose before-image is sealed: a crash there leaves a
//   row that does not hold, and recovery restores it together with its tag.
// - What this writes is durable with the rows: the store flushes both.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"
#include "rows/row_table.h"

namespace holdfast {

class RowChecksums {
 public:
  static constexpr std::size_t row_bytes = sizeof(std::uint32_t);
  // tags: of all rows of the table; `table` is kept.
  RowChecksums(const RowTable& table, std::uint32_t* tags) : table_(table), tags_(tags) {}

  // Writes the tags of rows [begin, end) of `rows` for what is at home.
  void write(const HomeRows& home, const WorkingRows& rows, std::size_t begin, std::size_t end) const;
  // The first of rows [begin, end) of `copies`, which were just copied from home, that does not hold; `end` where all
  // do.
  std::size_t find_bad(const WorkingRows& copies, std::size_t begin, std::size_t end) const;

 private:
  const RowTable& table_;
  std::uint32_t* tags_;
};

}  // namespace holdfast
