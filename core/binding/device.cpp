// Slots of device memory and what goes there, for the module.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "binding/arrays.h"
#include "binding/module.h"
#include "binding/plans.h"
#include "device/device_plan.h"
#include "device/slot_directory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

using Arrays = nb::typed<nb::dict, nb::str, nb::typed<nb::tuple, nb::int_, nb::int_>>;

Arrays arrays_of(const DevicePlan& layout) {
  nb::dict arrays;
  const auto add = [&](const char* name, const PackedArray& array) {
    arrays[name] = nb::make_tuple(array.offset, array.count);
  };
  add("slots", layout.slots);
  add("rows", layout.rows);
  if (layout.places) add("places", *layout.places);
  add("tables", layout.tables);
  if (layout.keys) add("keys", *layout.keys);
  if (layout.shards) add("shards", *layout.shards);
  add("missing", layout.missing);
  add("row_start", layout.row_start);
  add("gradient_offset", layout.gradient_offset);
  if (layout.gradient_scale) add("gradient_scale", *layout.gradient_scale);
  add("lookup_slot", layout.lookup_slot);
  add("bag_start", layout.bag_start);
  if (layout.lookup_scale) add("lookup_scale", *layout.lookup_scale);
  add("columns", layout.columns);
  return nb::borrow<Arrays>(arrays);
}

Arrays packed(const Admission& admission, const Bytes& out) {
  const DevicePlan layout = device_plan_of(admission);
  if (out.shape(0) < layout.bytes) throw nb::value_error("out has fewer than packed_bytes");
  if (reinterpret_cast<std::uintptr_t>(out.data()) % alignof(std::uint64_t) != 0) {
    throw nb::value_error("out must begin at a multiple of 8 bytes");
  }
  {
    const nb::gil_scoped_release unlocked;
    pack(admission, layout, reinterpret_cast<std::byte*>(out.data()));
  }
  return arrays_of(layout);
}

}  // namespace

void bind_device(nb::module_& m) {
  nb::class_<Admission>(m, "Admission", "A plan's rows in their slots. They keep them until it is released, or gone.")
      .def_prop_ro("plan", [](const Admission& a) { return std::const_pointer_cast<Plan>(a.plan()); })
      .def_prop_ro("num_unique", [](const Admission& a) { return a.slots().size(); })
      .def_prop_ro("num_lookups", &Admission::num_lookups)
      .def_prop_ro(
          "num_missing", [](const Admission& a) { return a.missing().size(); }, "Rows whose bytes have to be brought.")
      .def_prop_ro("max_occurrences", &Admission::max_occurrences, "Of one row.")
      .def_prop_ro(
          "packed_bytes", [](const Admission& a) { return device_plan_of(a).bytes; }, "What pack needs.")
      .def("pack", &packed, "out"_a,
           "Writes into `out`, whose first byte is at a multiple of 8, what kernels need, and says where: {name: "
           "(byte offset, number of elements)}, offsets multiples of 128. With U unique rows (the directory's tables "
           "in order, rows ascending), M of them missing, L lookups and F features of B bags: slots int32 [U], rows "
           "int64 [U] (their numbers in the whole table), places int64 [U] (where a table is split: which rows of the "
           "mapping they are), tables int32 [U] (the pool's numbers), keys int64 [U] (of tables with keys), shards "
           "int32 [U] (of such where one is split: the rows'), missing int32 [M] (indexes of unique rows, ascending), "
           "row_start int32 [U + 1] and gradient_offset int32 [L] (of each row's occurrences, in order: where its bag "
           "begins in [num_bags, output_width]), gradient_scale float32 [L] "
           "(absent where all are 1), lookup_slot int32 [L] (in the order of the batch), bag_start int32 [F * B + 1] "
           "(indexes into lookup_slot), lookup_scale float32 [L] (per-sample weights; absent without), columns int32 "
           "[F]. A routed plan's output is [1, output_width], and each of its bags has columns of its own: columns "
           "int32 [bags]. Raises ConfigError where an offset does not fit, StepError after the release.");

  nb::class_<SlotDirectory>(m, "SlotDirectory", "Which slot of a device's memory has which row. Thread-safe.")
      .def(
          "__init__",
          [](SlotDirectory* self, const Collection& collection, const std::vector<std::uint32_t>& tables,
             std::uint64_t num_slots,
             bool keep) { new (self) SlotDirectory(collection.spec, tables, num_slots, keep); },
          "collection"_a, "tables"_a, "num_slots"_a, nb::kw_only(), "keep"_a = true,
          "tables: indexes into the collection's, ascending; their rows share the slots. keep: rows that nobody holds "
          "stay until their slots are needed. Raises ConfigError.")
      .def(
          "admit", [](SlotDirectory& self, std::shared_ptr<Plan> plan) { return self.admit(std::move(plan)); },
          "plan"_a, Unlocked(), nb::sig("def admit(self, plan: Plan) -> Admission | None"),
          "Slots for all of the plan's rows; None, and nothing has changed, where there is no room before others are "
          "released. Raises WindowTooLarge where there are fewer slots than rows, ConfigError where the plan is "
          "another collection's.")
      .def("release", &SlotDirectory::release, "admission"_a, Unlocked(),
           "Its rows may lose their slots from now on. Again: nothing happens. Raises ConfigError where it is another "
           "directory's.")
      .def("forget", &SlotDirectory::forget, "admission"_a, Unlocked(),
           "As release; and its missing rows have never come: they are missing again for whoever admits them next. "
           "Admissions made since that have these rows rely on what is not there: forget them as well.")
      .def("clear", &SlotDirectory::clear, Unlocked(), "The rows that nobody holds lose their slots.")
      .def_prop_ro("num_slots", &SlotDirectory::num_slots)
      .def_prop_ro(
          "num_resident", [](const SlotDirectory& self) { return self.counts().resident; }, "Rows that have slots.")
      .def_prop_ro("num_held", [](const SlotDirectory& self) { return self.counts().held; })
      .def_prop_ro(
          "rows_hit", [](const SlotDirectory& self) { return self.counts().hit; },
          "Rows of all admissions that were there.")
      .def_prop_ro(
          "rows_missed", [](const SlotDirectory& self) { return self.counts().missed; }, "And that were missing.");
}

}  // namespace holdfast
