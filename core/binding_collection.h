// A collection as Python holds it.
#pragma once

#include <memory>

#include "collection.h"

namespace holdfast {

// What it is, and the plans that it hands out.
struct Collection {
  std::shared_ptr<const CollectionSpec> spec;
  std::shared_ptr<PlanPool> plans;
};

}  // namespace holdfast
