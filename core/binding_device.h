// Slots of device memory and what goes there, for the module.
#pragma once

#include <nanobind/nanobind.h>

namespace holdfast {

void bind_device(nanobind::module_& m);

}  // namespace holdfast
