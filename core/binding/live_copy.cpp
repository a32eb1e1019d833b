// LiveCopy, for the module.
#include "readers/live_copy.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "binding/arrays.h"
#include "binding/initial_rows.h"
#include "binding/module.h"
#include "binding/records.h"
#include "rows/row_table.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

// Room for rows as Python gives it: all of it is used.
struct RowBuffers {
  RowValues rows;
  std::size_t count;

  RowBuffers(const RowTable& table, const RowNumbers& numbers, const Bytes& values)
      : rows{numbers.data(), reinterpret_cast<std::byte*>(values.data())}, count(numbers.shape(0)) {
    if (count == 0 || values.shape(0) != count * value_bytes(table)) {
      throw nb::value_error("arrays do not fit the rows");
    }
  }
};

// How many rows one of a live copy's streams had for these arrays, and where it goes on.
template <auto stream>
std::pair<std::size_t, std::uint64_t> next_rows(LiveCopy& copy, std::uint32_t table, std::uint64_t first,
                                                const RowNumbers& rows, const Bytes& values) {
  const RowBuffers out(copy.tables().at(table), rows, values);
  const nb::gil_scoped_release unlocked;
  const std::size_t num_rows = (copy.*stream)(table, first, out.rows, out.count);
  return {num_rows, first};
}

}  // namespace

void bind_live_copy(nb::module_& m) {
  nb::class_<LiveCopy>(m, "LiveCopy", "The rows of a pool at the end of one step, while a writer goes on.")
      .def(
          "__init__",
          [](LiveCopy* self, const std::string& directory, bool part) {
            const nb::gil_scoped_release unlocked;
            new (self) LiveCopy(directory, part);
          },
          "directory"_a, "part"_a = false, "part: of a pool of several writers, all of which are copied together.")
      .def_prop_ro("header", [](const LiveCopy& copy) { return to_dict(copy.header(), copy.level()); })
      .def_prop_ro("tables", [](const LiveCopy& copy) { return specs_of(copy.table_records()); })
      .def_prop_ro("fixes_first", &LiveCopy::fixes_first, "Whether fix comes before the rows, or after them.")
      .def_prop_ro("rows_ascend", &LiveCopy::rows_ascend, "Whether copy_rows gives rows in order of their numbers.")
      .def_prop_ro("newest_dense_step", &LiveCopy::newest_dense_step)
      .def(
          "fix",
          [](LiveCopy& copy) {
            const LiveCopy::Fixed fixed = [&] {
              const nb::gil_scoped_release unlocked;
              return copy.fix();
            }();
            std::optional<std::tuple<nb::bytes, nb::bytes>> dense;
            if (fixed.dense) dense = {to_bytes(fixed.dense->structure), to_bytes(fixed.dense->tensors)};
            return std::tuple{fixed.mark.step, fixed.mark.cursor, fixed.mark.row_updates, dense};
          },
          "Decides on the step: step, cursor, row_updates, and structure and tensors of the dense state.")
      .def("newest_step", &LiveCopy::newest_step, Unlocked(), "Of a part: the newest committed step.")
      .def("raise_floor", &LiveCopy::raise_floor, "floor"_a, Unlocked(),
           "Of a part: the step is not going to be below `floor`.")
      .def("fix_at", &LiveCopy::fix_at, "step"_a, Unlocked(),
           "Of a part: decides on a step that all parts have committed.")
      .def("copy_rows", &next_rows<&LiveCopy::copy_rows>, "table"_a, "first"_a, "rows"_a, "values"_a,
           "Touched rows from place `first` on as they lie in the pool, as many as there is room for, of each its "
           "weights and behind them its state: how many, and where to go on.")
      .def("initial_rows", &initial_rows_of<LiveCopy>, "table"_a, "rows"_a, "weights"_a,
           "The weights that rows have before any update.")
      .def_prop_ro(
          "fixed_record", &LiveCopy::fixed_record,
          "After fix: position and checksum of the newest record of a step up to it, where there is a row log.")
      .def("log_goes_on_from", &LiveCopy::log_goes_on_from, "record"_a,
           "Whether everything that was written since that record was in the log when this began, so that corrections "
           "have it.")
      .def_prop_ro("home_rows", &LiveCopy::home_rows, "By table, how many rows homes have, where that is known.")
      .def("settle", &LiveCopy::settle, Unlocked())
      .def("corrections", &next_rows<&LiveCopy::corrections>, "table"_a, "first"_a, "rows"_a, "values"_a,
           "After settle: rows that count instead of those that were copied, likewise.");
}

}  // namespace holdfast
