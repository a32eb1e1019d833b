// Arrays as Python gives them, a batch's ids in them, and calls without the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "routing/route_message.h"
#include "step/jagged.h"

namespace holdfast {

using Unlocked = nanobind::call_guard<nanobind::gil_scoped_release>;

using Bytes = nanobind::ndarray<std::uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using ConstBytes = nanobind::ndarray<const std::uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using RowNumbers = nanobind::ndarray<std::uint64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using ConstRowNumbers =
    nanobind::ndarray<const std::uint64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using FloatMatrix = nanobind::ndarray<float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using ConstFloatMatrix = nanobind::ndarray<const float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using FloatVector = nanobind::ndarray<float, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using ConstFloatVector = nanobind::ndarray<const float, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using CountMatrix = nanobind::ndarray<const std::int64_t, nanobind::ndim<3>, nanobind::c_contig, nanobind::device::cpu>;
using Ids = nanobind::ndarray<const std::int64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using OutIds = nanobind::ndarray<std::int64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Offsets = nanobind::ndarray<nanobind::ro, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

// Counts of bags and ids as Python has them: two int64 each, the second one with 2^32 more where the ids have weights.
inline std::vector<BagCounts> counts_in(const CountMatrix& counts) {
  std::vector<BagCounts> found(counts.size() / 2);
  if (!found.empty()) std::memcpy(found.data(), counts.data(), found.size() * sizeof(BagCounts));
  return found;
}

// Checks what the arrays' sizes say; the offsets between the first and the last are the plan's to check.
inline BatchIds batch_of(const Ids& ids, const Offsets& offsets, const std::optional<ConstFloatVector>& weights,
                         const std::vector<std::uint32_t>& block_of, std::size_t num_blocks, std::size_t num_features) {
  const bool wide = offsets.dtype() == nanobind::dtype<std::int64_t>();
  if (!wide && offsets.dtype() != nanobind::dtype<std::int32_t>()) {
    throw nanobind::type_error("offsets must be int32 or int64");
  }
  if (num_blocks == 0 || offsets.shape(0) == 0 || (offsets.shape(0) - 1) % num_blocks != 0) {
    throw nanobind::value_error("offsets must have num_features * batch_size + 1 entries");
  }
  if (block_of.size() != num_features ||
      std::any_of(block_of.begin(), block_of.end(), [&](std::uint32_t block) { return block >= num_blocks; })) {
    throw nanobind::value_error("block_of does not fit the collection's features");
  }
  const std::size_t last = offsets.shape(0) - 1;
  const std::int64_t end = wide ? static_cast<const std::int64_t*>(offsets.data())[last]
                                : static_cast<const std::int32_t*>(offsets.data())[last];
  if (end < 0 || static_cast<std::uint64_t>(end) > ids.shape(0)) {
    throw nanobind::value_error("the last offset lies beyond the ids");
  }
  if (weights && weights->shape(0) != ids.shape(0)) throw nanobind::value_error("one weight per id is needed");
  return {ids.data(), offsets.data(), wide, weights ? weights->data() : nullptr, last / num_blocks, block_of};
}

}  // namespace holdfast
