// plan_repair, for the module.
#include "repair.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "binding/module.h"
#include "binding/records.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {

void bind_repair(nb::module_& m) {
  m.def(
      "plan_repair",
      [](const std::string& directory) {
        const RepairPlan plan = [&] {
          const nb::gil_scoped_release unlocked;
          return plan_repair(directory);
        }();
        std::vector<std::tuple<std::string, std::uint64_t, nb::bytes, std::string>> edits;
        for (const Edit& edit : plan.edits) edits.emplace_back(edit.file, edit.offset, to_bytes(edit.bytes), edit.why);
        return std::tuple{edits, plan.refusals};
      },
      "directory"_a,
      "What of a damaged pool may be put right without a guess: (file, offset, bytes, why) of each edit, and what may "
      "not.");
}

}  // namespace holdfast
