// Repair's plans, for the module.
#include "readers/repair.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "binding/module.h"
#include "binding/records.h"
#include "readers/superblock_repair.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {

using Edits = std::vector<std::tuple<std::string, std::uint64_t, nb::bytes, std::string>>;

template <RepairPlan (*planner)(const std::string&)>
std::tuple<Edits, std::vector<std::string>> planned(const std::string& directory) {
  const RepairPlan plan = [&] {
    const nb::gil_scoped_release unlocked;
    return planner(directory);
  }();
  Edits edits;
  for (const Edit& edit : plan.edits) edits.emplace_back(edit.file, edit.offset, to_bytes(edit.bytes), edit.why);
  return {edits, plan.refusals};
}

void bind_repair(nb::module_& m) {
  m.def(
      "plan_repair", &planned<plan_repair>, "directory"_a,
      "What of a damaged pool may be put right without a guess: (file, offset, bytes, why) of each edit, and what may "
      "not.");
  m.def("plan_label_repair", &planned<plan_label_repair>, "directory"_a,
        "The same of the labels of a pool's files, or of those of a part of a group.");
  m.def(
      "plan_superblock_repair",
      [](const std::string& directory) -> std::optional<std::tuple<std::string, nb::bytes, std::string>> {
        const auto file = [&] {
          const nb::gil_scoped_release unlocked;
          return plan_superblock_repair(directory);
        }();
        if (!file) return std::nullopt;
        return std::tuple{file->name, to_bytes(file->bytes), file->why};
      },
      "directory"_a,
      "The superblock or its copy, whichever of the two is lost or does not hold, and can be made of the other: (name, "
      "bytes, why). Raises Corrupted, FormatMismatch where what it was cannot be told.");
}

}  // namespace holdfast
