// DialProbe, for the module.
#include "media/dial_probe.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "binding/module.h"
#include "binding/pool_arguments.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {

void bind_dial_probe(nb::module_& m) {
  nb::class_<DialProbe>(m, "DialProbe", "Reads and writes a file of its own on a dialled medium.")
      .def(
          "__init__",
          [](DialProbe* self, const std::string& directory, const std::string& name, std::uint64_t bytes, bool block,
             const DialFigures& dial) {
            const nb::gil_scoped_release unlocked;
            new (self) DialProbe(directory, name, bytes, block ? DialProbe::Kind::block : DialProbe::Kind::mapped,
                                 dial_spec(dial));
          },
          "directory"_a, "name"_a, "bytes"_a, nb::kw_only(), "block"_a, "dial"_a,
          "Makes the file, and writes it once; the caller removes it.")
      .def_prop_ro("unit_bytes", &DialProbe::unit_bytes, "What random pieces are multiples of.")
      .def("read_all", &DialProbe::read_all, Unlocked(), "All of the file, in long runs.")
      .def("write_all", &DialProbe::write_all, Unlocked())
      .def("sync", &DialProbe::sync, Unlocked())
      .def("read_at_random", &DialProbe::read_at_random, "count"_a, "bytes_each"_a, Unlocked(),
           "As many at a time as the medium takes.")
      .def("write_at_random", &DialProbe::write_at_random, "count"_a, "bytes_each"_a, Unlocked())
      .def("read_one_by_one", &DialProbe::read_one_by_one, "count"_a, "bytes_each"_a, Unlocked(),
           "Each begins when the one before has come.");
}

}  // namespace holdfast
