// Jagged ids: bags of ids as a batch brings them, and the checks that come before anything else is done with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace holdfast {

// A bad id or offset. `feature` indexes the table's features.
struct BadId : std::runtime_error {
  BadId(const std::string& what, std::size_t feature_, std::size_t sample_, std::int64_t value_)
      : std::runtime_error(what), feature(feature_), sample(sample_), value(value_) {}
  std::size_t feature;
  std::size_t sample;
  std::int64_t value;
};

// A feature's ids: bag b holds ids[offsets[b]] .. ids[offsets[b + 1]] (offsets[0] need not be 0).
struct JaggedIds {
  const std::int64_t* ids;
  const void* offsets;  // [num_bags + 1], int32 or int64
  bool offsets_are_int64;
  std::size_t num_bags;
  std::size_t first_sample = 0;  // the one that bag 0 is of, for messages
};

// A batch's ids as they come: bag b of the feature in block k holds ids[offsets[k * num_bags + b]] up to
// ids[offsets[k * num_bags + b + 1]]. `block_of[f]` says which block is feature f's.
struct BatchIds {
  const std::int64_t* ids;
  const void* offsets;
  bool offsets_are_int64;
  const float* weights;  // per id, or null
  std::size_t num_bags;
  std::vector<std::uint32_t> block_of;
};

// Feature f's ids, those of `count` bags from bag `first` on.
inline JaggedIds ids_of(const BatchIds& batch, std::size_t f, std::size_t first, std::size_t count) {
  const std::size_t at = std::size_t{batch.block_of[f]} * batch.num_bags + first;
  const void* offsets = batch.offsets_are_int64
                            ? static_cast<const void*>(static_cast<const std::int64_t*>(batch.offsets) + at)
                            : static_cast<const void*>(static_cast<const std::int32_t*>(batch.offsets) + at);
  return {batch.ids, offsets, batch.offsets_are_int64, count, first};
}

// Calls body(offsets) with the feature's offsets in their own type.
template <class Body>
auto with_offsets(const JaggedIds& feature, const Body& body) {
  const std::size_t count = feature.num_bags + 1;
  return feature.offsets_are_int64 ? body(std::span(static_cast<const std::int64_t*>(feature.offsets), count))
                                   : body(std::span(static_cast<const std::int32_t*>(feature.offsets), count));
}

// All of the feature's ids, in order. Wants offsets that were checked.
inline std::span<const std::int64_t> all_ids(const JaggedIds& feature) {
  return with_offsets(feature, [&](auto offsets) {
    return std::span(feature.ids + offsets.front(), static_cast<std::size_t>(offsets.back() - offsets.front()));
  });
}

// Number of ids between the feature's first and last offset. Throws BadId where an offset is negative or they decrease.
std::size_t checked_num_ids(const JaggedIds& feature, std::size_t feature_index);

// For whoever has seen that not all of the ids lie in [0, num_rows).
[[noreturn]] void throw_first_bad_id(const JaggedIds& feature, std::size_t feature_index, std::uint64_t num_rows);

}  // namespace holdfast
