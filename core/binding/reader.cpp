// Reader, for the module.
#include "readers/reader.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "binding/arrays.h"
#include "binding/initial_rows.h"
#include "binding/module.h"
#include "binding/plans.h"
#include "binding/records.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {

void bind_reader(nb::module_& m) {
  nb::class_<Reader>(m, "Reader", "A pool seen without a lock and without changing it.")
      .def(nb::init<const std::string&>(), "directory"_a)
      .def_prop_ro("header", [](const Reader& reader) { return to_dict(reader.header(), reader.level()); })
      .def_prop_ro("owned", &owned_by<Reader>, "The shards of this writer; none where the pool has no other.")
      .def_prop_ro("group_uuid", &group_of<Reader>, "Of the pool of which this is one writer's.")
      .def_prop_ro("tables", [](const Reader& reader) { return specs_of(reader.table_records()); })
      .def_prop_ro("medium", &Reader::medium_description)
      .def_prop_ro("epoch", [](const Reader& reader) { return reader.epoch().epoch; })
      .def_prop_ro("clean", [](const Reader& reader) { return reader.epoch().clean != 0; })
      .def_prop_ro("commit", [](const Reader& reader) { return to_dict(reader.commit()); })
      .def_prop_ro(
          "unfinished_return", &Reader::unfinished_return,
          "The step to which rows in place were on their way back when a writer died: those of later steps may "
          "be of either. None where there is none.")
      .def_prop_ro(
          "log_bytes_used", [](const Reader& reader) { return reader.log_use().bytes; },
          "What of the log is needed: by recovery, and in a log store by readers.")
      .def_prop_ro(
          "merged_step", [](const Reader& reader) { return reader.log_use().merged_step; },
          "Of a log store: its homes have the rows of this step at the latest.")
      .def(
          "dense_state",
          [](const Reader& reader,
             std::optional<std::uint64_t> last) -> std::optional<std::tuple<std::uint64_t, nb::bytes, nb::bytes>> {
            const auto state = reader.dense_state(last.value_or(every_step));
            if (!state) return std::nullopt;
            return std::tuple{state->header.step, to_bytes(state->structure), to_bytes(state->tensors)};
          },
          "last"_a = nb::none(), "The newest one, of steps up to `last`: its step, structure and tensors.")
      .def(
          "dense_marks",
          [](const Reader& reader) {
            std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>> marks;
            for (const StepMark& mark : reader.dense_marks())
              marks.emplace_back(mark.step, mark.cursor, mark.row_updates);
            return marks;
          },
          "Step, cursor and row_updates of all dense states that hold.")
      .def(
          "collection",
          [](Reader& reader, const std::vector<std::uint32_t>& tables,
             const std::vector<std::tuple<std::string, std::uint32_t>>& features) {
            const nb::gil_scoped_release unlocked;
            return make_collection(reader.table_records(), tables, features,
                                   [&](std::uint32_t table) { return reader.keys(table); });
          },
          "tables"_a, "features"_a)
      .def(
          "evaluate",
          [](Reader& reader, const Plan& plan, const FloatMatrix& out) {
            check_shape(plan, out);
            const nb::gil_scoped_release unlocked;
            reader.evaluate(plan, out.data());
          },
          "plan"_a, "out"_a)
      .def(
          "touched_rows",
          [](const Reader& reader, std::size_t table, std::uint64_t first, std::size_t count) {
            static_cast<void>(reader.tables().at(table));
            return reader.touched_rows(table, first, count);
          },
          "table"_a, "first"_a, "count"_a, Unlocked())
      .def(
          "gather_rows",
          [](const Reader& reader, std::size_t table, const std::vector<std::uint64_t>& rows, const Bytes& weights,
             const Bytes& state, const Bytes& differs) {
            const auto& spec = reader.tables().at(table);
            if (weights.shape(0) != rows.size() * spec.weight_bytes() ||
                state.shape(0) != rows.size() * spec.state_bytes() || differs.shape(0) != rows.size() ||
                std::any_of(rows.begin(), rows.end(), [&](std::uint64_t row) { return row >= spec.num_rows; })) {
              throw nb::value_error("arrays do not fit the rows");
            }
            const nb::gil_scoped_release unlocked;
            reader.gather_rows(table, rows, reinterpret_cast<std::byte*>(weights.data()),
                               reinterpret_cast<float*>(state.data()), differs.data());
          },
          "table"_a, "rows"_a, "weights"_a, "state"_a, "differs"_a)
      .def(
          "read_rows",
          [](const Reader& reader, std::size_t table, std::uint64_t first, std::size_t count, const Bytes& weights,
             const Bytes& state) {
            const auto& spec = reader.tables().at(table);
            if (first > spec.num_rows || count > spec.num_rows - first ||
                weights.shape(0) != count * spec.weight_bytes() || state.shape(0) != count * spec.state_bytes()) {
              throw nb::value_error("arrays do not fit the rows");
            }
            const nb::gil_scoped_release unlocked;
            reader.read_rows(table, first, count, reinterpret_cast<std::byte*>(weights.data()),
                             reinterpret_cast<float*>(state.data()));
          },
          "table"_a, "first"_a, "count"_a, "weights"_a, "state"_a)
      .def("initial_rows", &initial_rows_of<Reader>, "table"_a, "rows"_a, "weights"_a,
           "The weights that rows have before any update.")
      .def("verify", &Reader::verify, "step"_a = nb::none(), Unlocked(),
           "step: where the pool goes back to when it is opened, where a group says that.");
}

}  // namespace holdfast
