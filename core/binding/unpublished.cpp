// What lies where a pool is made, for the module.
#include "layout/unpublished.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "binding/arrays.h"
#include "binding/module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {

void bind_unpublished(nb::module_& m) {
  m.def("pool_parts", &pool_parts, "directory"_a, Unlocked(),
        "The files of pools in a directory, by their names from there, without those that publish one.");
  m.def("is_unpublished", &is_unpublished, "directory"_a, Unlocked(),
        "Whether a pool is being made in the directory, or was when the maker died: what lies there may be removed.");
  m.def("mark_unpublished", &mark_unpublished, "directory"_a, Unlocked(),
        "Durably says so; before the first file of a pool is made there.");
  m.def("mark_published", &mark_published, "directory"_a, Unlocked(),
        "Durably takes that back: once the pool is published, and before anything else is written to it.");
  m.def("remove_unpublished_parts", &remove_unpublished_parts, "directory"_a, Unlocked(),
        "Removes the files of pools in the directory. Raises Corrupted where they do not lie beside a mark.");
}

}  // namespace holdfast
