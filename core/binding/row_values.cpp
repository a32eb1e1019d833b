// Row values in order, for the module.
#include "rows/row_values.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "binding/arrays.h"
#include "binding/module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

using Values = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstValues = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void put_in_order(const ConstRowNumbers& rows, const OutIds& order) {
  if (order.shape(0) != rows.shape(0)) throw nb::value_error("arrays do not fit each other");
  const nb::gil_scoped_release unlocked;
  ascending_order({rows.data(), rows.shape(0)}, {order.data(), order.shape(0)});
}

void take(const ConstValues& values, const Ids& order, const Values& out) {
  const std::span<const std::int64_t> places(order.data(), order.shape(0));
  const std::size_t line_bytes = values.shape(1);
  if (out.shape(0) != places.size() || out.shape(1) != line_bytes) {
    throw nb::value_error("arrays do not fit each other");
  }
  const auto num_rows = static_cast<std::int64_t>(values.shape(0));
  const nb::gil_scoped_release unlocked;
  if (!std::ranges::all_of(places, [&](std::int64_t place) { return 0 <= place && place < num_rows; })) {
    throw nb::index_error("a place beyond the values");
  }
  take_pieces(reinterpret_cast<const std::byte*>(values.data()), line_bytes, places,
              reinterpret_cast<std::byte*>(out.data()));
}

}  // namespace

void bind_row_values(nb::module_& m) {
  m.def("ascending_order", &put_in_order, "rows"_a, "order"_a,
        "Which of the rows is the first by number, which the second, and so on.");
  m.def("take_values", &take, "values"_a, "order"_a, "out"_a,
        "Copies the lines of `values` that `order` names into those of `out`.");
}

}  // namespace holdfast
