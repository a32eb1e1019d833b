// Router and Route, for the module.
#pragma once

#include <nanobind/nanobind.h>

namespace holdfast {

void bind_routing(nanobind::module_& m);

}  // namespace holdfast
