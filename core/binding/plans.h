// Collections as Python holds them, and the plans that they make.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/format.h"
#include "step/collection.h"

namespace holdfast {

// What it is, and the plans that it hands out.
struct Collection {
  std::shared_ptr<const CollectionSpec> spec;
  std::shared_ptr<PlanPool> plans;
};

// keys_of: the directory of a table, by number; null where its ids are row numbers.
Collection make_collection(const std::vector<format::TableRecord>& records, const std::vector<std::uint32_t>& tables,
                           const std::vector<std::tuple<std::string, std::uint32_t>>& features,
                           const std::function<std::shared_ptr<KeyDirectory>(std::uint32_t)>& keys_of);

template <class Matrix>
void check_shape(const Plan& plan, const Matrix& matrix) {
  if (matrix.shape(0) != plan.num_bags || matrix.shape(1) != plan.output_width) {
    throw nanobind::value_error("expected [batch_size, output_width]");
  }
}

}  // namespace holdfast
