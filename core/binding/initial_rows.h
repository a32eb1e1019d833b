// What rows have before any update, for the classes that know a pool's tables.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

#include "binding/arrays.h"
#include "rows/row_values.h"

namespace holdfast {

template <class Tables>
void initial_rows_of(const Tables& of, std::size_t table, const ConstRowNumbers& rows, const Bytes& weights) {
  const RowTable& what = of.tables().at(table);
  if (weights.shape(0) != rows.shape(0) * what.weight_bytes()) {
    throw nanobind::value_error("the array does not fit the rows");
  }
  const nanobind::gil_scoped_release unlocked;
  initial_weights(what, {rows.data(), rows.shape(0)}, reinterpret_cast<std::byte*>(weights.data()));
}

}  // namespace holdfast
