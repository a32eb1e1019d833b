// What the module is made of, in the order of its stub: each in the file of its name.
#pragma once

#include <nanobind/nanobind.h>

namespace holdfast {

void bind_records(nanobind::module_& m);
void bind_plans(nanobind::module_& m);
void bind_routing(nanobind::module_& m);
void bind_channels(nanobind::module_& m);
void bind_device(nanobind::module_& m);
void bind_pool(nanobind::module_& m);
void bind_reader(nanobind::module_& m);
void bind_live_copy(nanobind::module_& m);
void bind_repair(nanobind::module_& m);
void bind_dial_probe(nanobind::module_& m);
void bind_shards(nanobind::module_& m);
void bind_keys(nanobind::module_& m);
void bind_unpublished(nanobind::module_& m);
void bind_row_values(nanobind::module_& m);

}  // namespace holdfast
