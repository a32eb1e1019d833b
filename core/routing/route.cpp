// What a trainer does with a route: it joins what owners send, and sends them gradients.
#include <algorithm>
#include <cstring>

#include "base/float_mode.h"
#include "base/parallel.h"
#include "routing/router.h"

namespace holdfast {

std::size_t Route::num_floats() const {
  std::int64_t sum = 0;
  for (const std::int64_t floats : block_floats) sum += floats;
  return static_cast<std::size_t>(sum);
}

void Route::combine(const float* blocks, float* out) const {
  const std::size_t width = spec->output_width;
  const std::size_t num_features = spec->features.size();
  parallel_for(num_features, [&](std::size_t f) {
    const DefaultFloatMode mode;
    const std::size_t dim = spec->tables[spec->features[f].table].dim;
    float* const sums = out + spec->features[f].column;
    for (std::size_t i = first_empty[f]; i < first_empty[f + 1]; ++i) {
      std::fill_n(sums + empty_bags[i] * width, dim, 0.0f);
    }
    for (std::size_t o = 0; o < spec->num_owners; ++o) {
      const std::size_t at = o * num_features + f;
      const std::uint32_t* const bags = bag_of.data() + first_vector[at];
      const float* from = blocks + first_float[at];
      const std::size_t count = static_cast<std::size_t>(counts[at].bags);
      for (std::size_t v = 0; v < count; ++v, from += dim) {
        float* const to = sums + (bags[v] & ~adds_bit) * width;
        if ((bags[v] & adds_bit) != 0) {
          for (std::size_t k = 0; k < dim; ++k) to[k] += from[k];
        } else {
          std::memcpy(to, from, dim * sizeof(float));
        }
      }
    }
    if (first_scale[f] == no_scale) return;
    const float* const factor = scale.data() + first_scale[f];
    for (std::size_t bag = 0; bag < num_bags; ++bag) {
      float* const to = sums + bag * width;
      for (std::size_t k = 0; k < dim; ++k) to[k] = factor[bag] * to[k];
    }
  });
}

void Route::spread(const float* grad, float* blocks) const {
  const std::size_t width = spec->output_width;
  const std::size_t num_features = spec->features.size();
  parallel_for(num_features, [&](std::size_t f) {
    const DefaultFloatMode mode;
    const std::size_t dim = spec->tables[spec->features[f].table].dim;
    const float* const gradients = grad + spec->features[f].column;
    const float* const factor = weighted || first_scale[f] == no_scale ? nullptr : scale.data() + first_scale[f];
    for (std::size_t o = 0; o < spec->num_owners; ++o) {
      const std::size_t at = o * num_features + f;
      const std::uint32_t* const bags = bag_of.data() + first_vector[at];
      float* to = blocks + first_float[at];
      const std::size_t count = static_cast<std::size_t>(counts[at].bags);
      for (std::size_t v = 0; v < count; ++v, to += dim) {
        const std::size_t bag = bags[v] & ~adds_bit;
        const float* const from = gradients + bag * width;
        if (factor == nullptr) {
          std::memcpy(to, from, dim * sizeof(float));
        } else {
          for (std::size_t k = 0; k < dim; ++k) to[k] = factor[bag] * from[k];
        }
      }
    }
  });
}

void Route::gather_weights(const float* blocks, float* out) const {
  const DefaultFloatMode mode;
  std::size_t id = 0;
  for (const auto& [begin, end] : spans) {
    for (std::size_t i = begin; i < end; ++i, ++id) out[i] = blocks[weight_source[id]] * weight_factor[id];
  }
}

}  // namespace holdfast
