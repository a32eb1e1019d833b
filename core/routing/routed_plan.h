// Routed plan: an owner's plan of the ids that the trainers sent it.
//
// Invariants
// - Occurrences are in the order of the global batch: features in order, and of each the trainers in order, whose
//   samples follow one another. So gradients of a row are summed in the order in which one process would sum them.
// - The pooled output is one row of floats: trainer by trainer, in it feature by feature, in it bag by bag.
// - Keys travel as they are, and get their rows here, in that order.
// - Messages come from elsewhere: whatever is in them, a plan is made of places of the tables, or of keys of the shards that
//   are here, or an error is thrown.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "routing/route_message.h"
#include "step/collection.h"

namespace holdfast {

struct RoutedIds {
  const BagCounts* counts;  // [num_trainers][features of the collection]
  std::size_t num_trainers;
  std::span<const std::int32_t> messages;  // the trainers', one after the other
};

// The tables' num_rows is the end of their places. Throws data where messages are malformed, batch_too_large where the
// output is more than a plan can number, full where new keys find no rows.
void plan_routed(const RoutedIds& routed, bool parallel, Plan& plan, NewKeys new_keys = NewKeys::placed);

}  // namespace holdfast
