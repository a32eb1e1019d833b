#include "step/jagged.h"

#include <string_view>

namespace holdfast {
namespace {

[[noreturn]] void throw_bad(std::string_view what, std::size_t feature, std::size_t sample, std::int64_t value) {
  throw BadId(std::string(what) + " " + std::to_string(value) + " (feature " + std::to_string(feature) + ", sample " +
                  std::to_string(sample) + ")",
              feature, sample, value);
}

}  // namespace

std::size_t checked_num_ids(const JaggedIds& feature, std::size_t feature_index) {
  return with_offsets(feature, [&](auto offsets) {
    bool bad = offsets[0] < 0;
    for (std::size_t bag = 0; bag < feature.num_bags; ++bag) bad |= offsets[bag + 1] < offsets[bag];
    if (bad) {
      if (offsets[0] < 0) throw_bad("negative offset", feature_index, feature.first_sample, offsets[0]);
      std::size_t bag = 0;
      while (offsets[bag + 1] >= offsets[bag]) ++bag;
      throw_bad("offsets decrease to", feature_index, feature.first_sample + bag, offsets[bag + 1]);
    }
    return static_cast<std::size_t>(offsets.back()) - static_cast<std::size_t>(offsets[0]);
  });
}

void throw_first_bad_id(const JaggedIds& feature, std::size_t feature_index, std::uint64_t num_rows) {
  with_offsets(feature, [&](auto offsets) {
    for (std::size_t bag = 0; bag < feature.num_bags; ++bag) {
      for (auto i = offsets[bag]; i < offsets[bag + 1]; ++i) {
        const std::int64_t id = feature.ids[i];
        if (static_cast<std::uint64_t>(id) >= num_rows) {
          throw_bad("id outside [0, " + std::to_string(num_rows) + "):", feature_index, feature.first_sample + bag, id);
        }
      }
    }
  });
  throw std::logic_error("a bad id vanished while it was looked for");
}

}  // namespace holdfast
