// The kernels once more, one float at a time and in the plainest way: what every instruction set is held against.
// Written from kernels.h and from the comments in core/kernels, not from the code.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/counter_rng.h"
#include "kernels/kernels.h"

namespace holdfast::reference_kernels {

// ---- 16-bit formats, by arithmetic on exact doubles ----

struct Format16 {
  int fraction_bits;
  int min_exponent;     // of normal numbers
  std::uint32_t infinity;
};
inline constexpr Format16 half_format{10, -14, 0x7c00};
inline constexpr Format16 bfloat_format{7, -126, 0x7f80};

inline const Format16& format_of(RowDtype dtype) { return dtype == RowDtype::f16 ? half_format : bfloat_format; }

inline float widen(std::uint16_t bits, const Format16& format) {
  const std::uint32_t magnitude = bits & 0x7fffu;
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  const std::uint32_t fraction = magnitude & ((1u << format.fraction_bits) - 1);
  const int exponent_field = static_cast<int>(magnitude >> format.fraction_bits);
  if (magnitude > format.infinity && &format == &half_format) {
    return std::bit_cast<float>(sign | 0x7fc00000u | fraction << 13);  // made quiet
  }
  if (magnitude > format.infinity) return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  double value;
  if (magnitude == format.infinity) {
    value = std::numeric_limits<double>::infinity();
  } else if (exponent_field == 0) {
    value = std::ldexp(fraction, format.min_exponent - format.fraction_bits);
  } else {
    value = std::ldexp(fraction + (1u << format.fraction_bits),
                       exponent_field - 1 + format.min_exponent - format.fraction_bits);
  }
  return static_cast<float>(sign != 0 ? -value : value);
}

// Magnitude bits of |value| once it is cut to units of the format: `added` in units of 2^-cut.
template <class AddedBelow>
std::uint16_t narrow(float value, const Format16& format, const AddedBelow& added_below) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  if (std::isnan(value)) {
    const int quiet = 1 << (format.fraction_bits - 1);
    const std::uint32_t payload = bits >> (23 - format.fraction_bits) & static_cast<std::uint32_t>(quiet - 1);
    return static_cast<std::uint16_t>(sign | format.infinity | static_cast<std::uint32_t>(quiet) | payload);
  }
  if (std::isinf(value)) return static_cast<std::uint16_t>(sign | format.infinity);
  if (value == 0) return static_cast<std::uint16_t>(sign);
  const double magnitude = std::fabs(static_cast<double>(value));
  const int exponent = std::max(std::ilogb(magnitude), format.min_exponent);
  const double in_units = std::ldexp(magnitude, format.fraction_bits - exponent);
  // A float has 23 fraction bits; where the format keeps fewer because of its range, more are cut off.
  const int cut = std::min(31, 23 - format.fraction_bits + exponent - std::max(std::ilogb(magnitude), -126));
  const std::uint64_t fixed = static_cast<std::uint64_t>(std::floor(std::ldexp(in_units, cut)));
  const std::uint64_t rounded = (fixed + added_below(fixed, cut)) >> cut;
  // `rounded` units: 2^fraction_bits of them are the implicit bit.
  const std::uint64_t field =
      rounded + (static_cast<std::uint64_t>(exponent - format.min_exponent) << format.fraction_bits);
  return static_cast<std::uint16_t>(sign | std::min<std::uint64_t>(field, format.infinity - 1));
}

inline std::uint16_t narrow_randomly(float value, const Format16& format, std::uint32_t random) {
  return narrow(value, format, [&](std::uint64_t, int cut) { return random & ((std::uint64_t{1} << cut) - 1); });
}
inline std::uint16_t narrow_to_nearest(float value, const Format16& format) {
  return narrow(value, format,
                [](std::uint64_t fixed, int cut) { return (std::uint64_t{1} << (cut - 1)) - 1 + (fixed >> cut & 1); });
}

inline float get(const std::byte* weights, RowDtype dtype, std::size_t index) {
  if (dtype == RowDtype::f32) {
    float value;
    std::memcpy(&value, weights + index * 4, 4);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, weights + index * 2, 2);
  return widen(bits, format_of(dtype));
}
inline void put16(std::byte* weights, std::size_t index, std::uint16_t bits) {
  std::memcpy(weights + index * 2, &bits, 2);
}

inline std::uint64_t key_of(std::uint64_t purpose, std::initializer_list<std::uint64_t> values) {
  for (const std::uint64_t value : values) purpose = counter_rng::absorb(purpose, value);
  return purpose;
}

// ---- kernels ----

inline void initial_row(const RowSpec& spec, std::uint64_t row, std::byte* weights) {
  const std::uint64_t key = key_of(counter_rng::initial_values, {spec.seed, spec.table, row});
  for (std::uint32_t e = 0; e < spec.dim; ++e) {
    const std::uint32_t bits = counter_rng::element_bits<std::uint32_t>(key, e);
    float value = spec.init_low;
    if (spec.init_low < spec.init_high) {
      const float span = spec.init_high - spec.init_low;
      value = spec.init_low + span * (static_cast<float>(bits >> 8) * 0x1p-24f);
      if (value >= spec.init_high) value = std::nextafter(spec.init_high, -std::numeric_limits<float>::infinity());
    }
    if (spec.dtype == RowDtype::f32) {
      std::memcpy(weights + e * 4, &value, 4);
    } else {
      put16(weights, e, narrow_to_nearest(value, format_of(spec.dtype)));
    }
  }
}

inline std::size_t weight_bytes(const RowSpec& spec) { return std::size_t{spec.dim} * bytes_of(spec.dtype); }

inline void capture(const RowSpec& spec, const HomeRows& home, const WorkingRows& working, std::size_t begin,
                    std::size_t end) {
  for (std::size_t u = begin; u < end; ++u) {
    const std::uint64_t row = working.rows[u];
    std::byte* const weights = working.weights + u * weight_bytes(spec);
    if ((home.touched[row / 64] >> row % 64 & 1) != 0) {
      std::memcpy(weights, home.weights + row * weight_bytes(spec), weight_bytes(spec));
      for (std::uint32_t i = 0; i < spec.state_floats; ++i) {
        working.state[u * spec.state_floats + i] = home.state[row * spec.state_floats + i];
      }
    } else {
      initial_row(spec, row, weights);
      for (std::uint32_t i = 0; i < spec.state_floats; ++i) working.state[u * spec.state_floats + i] = 0;
      working.rows[u] |= fresh_bit;
    }
  }
}

inline void restore(const RowSpec& spec, const HomeRows& home, const WorkingRows& working, std::size_t begin,
                    std::size_t end) {
  for (std::size_t u = begin; u < end; ++u) {
    const std::uint64_t row = working.rows[u] & ~fresh_bit;
    if ((working.rows[u] & fresh_bit) != 0) {
      home.touched[row / 64] &= ~(std::uint64_t{1} << row % 64);
      continue;
    }
    std::memcpy(home.weights + row * weight_bytes(spec), working.weights + u * weight_bytes(spec), weight_bytes(spec));
    for (std::uint32_t i = 0; i < spec.state_floats; ++i) {
      home.state[row * spec.state_floats + i] = working.state[u * spec.state_floats + i];
    }
  }
}

inline void put(const RowSpec& spec, const HomeRows& home, const std::uint64_t* rows, const ReadyRows& ready,
                std::size_t begin, std::size_t end) {
  for (std::size_t u = begin; u < end; ++u) {
    const std::uint64_t row = rows[u] & ~fresh_bit;
    std::memcpy(home.weights + row * weight_bytes(spec), ready.weights + u * weight_bytes(spec), weight_bytes(spec));
    for (std::uint32_t i = 0; i < spec.state_floats; ++i) {
      home.state[row * spec.state_floats + i] = ready.state[u * spec.state_floats + i];
    }
    home.touched[row / 64] |= std::uint64_t{1} << row % 64;
  }
}

inline void pool_bags(const PoolSpec& spec, std::size_t begin, std::size_t end) {
  for (std::size_t bag = begin; bag < end; ++bag) {
    const std::uint32_t* const whole = spec.whole_bag_start != nullptr ? spec.whole_bag_start : spec.bag_start;
    const std::uint32_t length = whole[bag + 1] - whole[bag];
    for (std::uint32_t e = 0; e < spec.dim; ++e) {
      float sum = 0;
      for (std::uint32_t j = spec.bag_start[bag]; j < spec.bag_start[bag + 1]; ++j) {
        const float value = get(spec.weights, spec.dtype, std::size_t{spec.position[j]} * spec.dim + e);
        sum += spec.scale == nullptr ? value : spec.scale[j] * value;
      }
      float& out = spec.out[bag * spec.out_stride + e];
      if (spec.whole_bag_start != nullptr) sum = out + sum;
      if (spec.mean && length != 0) sum *= 1.0f / static_cast<float>(length);
      out = sum;
    }
  }
}

inline void sum_gradients(std::uint32_t dim, const Occurrences& occurrences, const float* grad,
                          const std::uint32_t* position, bool accumulate, float* sums, std::size_t begin,
                          std::size_t end) {
  for (std::size_t u = begin; u < end; ++u) {
    for (std::uint32_t e = 0; e < dim; ++e) {
      float& sum = sums[(position == nullptr ? u : position[u]) * dim + e];
      if (!accumulate) sum = 0;
      for (std::uint32_t j = occurrences.row_start[u]; j < occurrences.row_start[u + 1]; ++j) {
        const float value = grad[occurrences.gradient_offset[j] + e];
        sum += occurrences.scale == nullptr ? value : occurrences.scale[j] * value;
      }
    }
  }
}

template <class Float>
Float fold(std::array<Float, 16> lanes) {
  for (std::size_t half = 8; half != 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

inline double sum_of_squares(const float* values, std::size_t count) {
  std::array<double, 16> lanes{};
  for (std::size_t i = 0; i < count; ++i) {
    lanes[i % 16] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  }
  return fold(lanes);
}

inline float mean_square(const std::vector<float>& g) {
  std::array<float, 16> lanes{};
  for (std::size_t i = 0; i < g.size(); ++i) lanes[i % 16] += g[i] * g[i];
  return fold(lanes) / static_cast<float>(g.size());
}

inline float one_minus_power(float beta, std::uint64_t step) {
  double power = 1;
  double base = beta;
  for (std::uint64_t left = step; left != 0; left /= 2, base *= base) {
    if (left % 2 != 0) power *= base;
  }
  return static_cast<float>(1.0 - power);
}

inline void update_row(const RowSpec& spec, const UpdateSpec& update, std::vector<float> g,
                       const std::byte* old_weights, const float* old_state, std::uint64_t row, std::byte* new_weights,
                       float* new_state) {
  const std::uint32_t dim = spec.dim;
  const bool adam = spec.optimizer == RowOptimizer::adam || spec.optimizer == RowOptimizer::rowwise_adam;
  std::vector<float> w(dim);
  for (std::uint32_t e = 0; e < dim; ++e) {
    w[e] = get(old_weights, spec.dtype, e);
    if (update.gradient_scale != 1) g[e] = update.gradient_scale * g[e];
    if (!adam && update.weight_decay != 0) g[e] = g[e] + update.weight_decay * w[e];
  }
  const float lr = update.learning_rate;
  const float correction1 = one_minus_power(update.beta1, update.step);
  const float correction2 = one_minus_power(update.beta2, update.step);
  const auto adam_step = [&](float weight, float m, float root) {
    float direction = (m / correction1) / (root + update.epsilon);
    if (update.weight_decay != 0) direction = direction + update.weight_decay * weight;
    return weight - lr * direction;
  };
  switch (spec.optimizer) {
    case RowOptimizer::sgd:
      for (std::uint32_t e = 0; e < dim; ++e) w[e] = w[e] - lr * g[e];
      break;
    case RowOptimizer::rowwise_adagrad: {
      new_state[0] = old_state[0] + mean_square(g);
      const float multiplier = lr / (std::sqrt(new_state[0]) + update.epsilon);
      for (std::uint32_t e = 0; e < dim; ++e) w[e] = w[e] - multiplier * g[e];
      break;
    }
    case RowOptimizer::adagrad:
      for (std::uint32_t e = 0; e < dim; ++e) {
        new_state[e] = old_state[e] + g[e] * g[e];
        w[e] = w[e] - (lr * g[e]) / (std::sqrt(new_state[e]) + update.epsilon);
      }
      break;
    case RowOptimizer::adam:
      for (std::uint32_t e = 0; e < dim; ++e) {
        new_state[e] = update.beta1 * old_state[e] + (1 - update.beta1) * g[e];
        new_state[dim + e] = update.beta2 * old_state[dim + e] + (1 - update.beta2) * (g[e] * g[e]);
        w[e] = adam_step(w[e], new_state[e], std::sqrt(new_state[dim + e] / correction2));
      }
      break;
    case RowOptimizer::rowwise_adam:
      new_state[dim] = update.beta2 * old_state[dim] + (1 - update.beta2) * mean_square(g);
      for (std::uint32_t e = 0; e < dim; ++e) {
        new_state[e] = update.beta1 * old_state[e] + (1 - update.beta1) * g[e];
        w[e] = adam_step(w[e], new_state[e], std::sqrt(new_state[dim] / correction2));
      }
      break;
  }
  const std::uint64_t key =
      key_of(counter_rng::stochastic_rounding, {update.rounding_seed, spec.table, update.step, row});
  for (std::uint32_t e = 0; e < dim; ++e) {
    if (spec.dtype == RowDtype::f32) {
      std::memcpy(new_weights + e * 4, &w[e], 4);
    } else {
      const std::uint32_t random = counter_rng::element_bits<std::uint32_t>(key, e);
      put16(new_weights, e, narrow_randomly(w[e], format_of(spec.dtype), random));
    }
  }
}

inline bool all_finite(const float* values, std::size_t count) {
  return std::all_of(values, values + count, [](float value) { return std::isfinite(value); });
}

inline bool is_finite_row(const RowSpec& spec, const std::byte* weights, const float* state) {
  for (std::uint32_t e = 0; e < spec.dim; ++e) {
    if (!std::isfinite(get(weights, spec.dtype, e))) return false;
  }
  return all_finite(state, spec.state_floats - spec.key_floats);
}

inline std::size_t first_non_finite(const RowSpec& spec, const ReadyRows& rows, std::size_t begin, std::size_t end) {
  while (begin < end &&
         is_finite_row(spec, rows.weights + begin * weight_bytes(spec), rows.state + begin * spec.state_floats)) {
    ++begin;
  }
  return begin;
}

inline std::size_t update_from_sums(const RowSpec& spec, const UpdateSpec& update, const HomeRows& home,
                                    const WorkingRows& working, const float* sums, const std::uint32_t* forward,
                                    const WorkingRows* next, std::size_t begin, std::size_t end) {
  std::size_t non_finite = end;
  for (std::size_t u = begin; u < end; ++u) {
    const std::uint64_t row = working.rows[u] & ~fresh_bit;
    std::byte* const home_weights = home.weights + row * weight_bytes(spec);
    float* const home_state = home.state + row * spec.state_floats;
    update_row(spec, update, std::vector<float>(sums + u * spec.dim, sums + (u + 1) * spec.dim),
               working.weights + u * weight_bytes(spec), working.state + u * spec.state_floats, row, home_weights,
               home_state);
    if ((working.rows[u] & fresh_bit) != 0) home.touched[row / 64] |= std::uint64_t{1} << row % 64;
    if (forward != nullptr && forward[u] != no_forward) {
      std::memcpy(next->weights + forward[u] * weight_bytes(spec), home_weights, weight_bytes(spec));
      for (std::uint32_t i = 0; i < spec.state_floats; ++i) {
        next->state[forward[u] * spec.state_floats + i] = home_state[i];
      }
      next->rows[forward[u]] = row;
    }
    if (non_finite == end && !is_finite_row(spec, home_weights, home_state)) non_finite = u;
  }
  return non_finite;
}

inline std::size_t update_compact_from_sums(const RowSpec& spec, const UpdateSpec& update, const WorkingRows& working,
                                            const float* sums, const SlotRows& fresh, std::size_t begin,
                                            std::size_t end) {
  for (std::size_t u = begin; u < end; ++u) {
    update_row(spec, update, std::vector<float>(sums + u * spec.dim, sums + (u + 1) * spec.dim),
               working.weights + u * weight_bytes(spec), working.state + u * spec.state_floats,
               working.rows[u] & ~fresh_bit, fresh.weights + u * weight_bytes(spec),
               fresh.state + u * spec.state_floats);
  }
  return first_non_finite(spec, {fresh.weights, fresh.state}, begin, end);
}

inline std::size_t update_compact(const RowSpec& spec, const UpdateSpec& update, const WorkingRows& working,
                                  const Occurrences& occurrences, const float* grad, const SlotRows& fresh,
                                  std::size_t begin, std::size_t end) {
  std::vector<float> sums(end * spec.dim);
  sum_gradients(spec.dim, occurrences, grad, nullptr, false, sums.data(), begin, end);
  return update_compact_from_sums(spec, update, working, sums.data(), fresh, begin, end);
}

inline void gather(const RowSpec& spec, const SlotRows& from, const std::uint32_t* slots, const WorkingRows& working,
                   std::size_t begin, std::size_t end) {
  for (std::size_t u = begin; u < end; ++u) {
    std::copy_n(from.weights + slots[u] * weight_bytes(spec), weight_bytes(spec),
                working.weights + u * weight_bytes(spec));
    std::copy_n(from.state + slots[u] * spec.state_floats, spec.state_floats, working.state + u * spec.state_floats);
  }
}

inline void scatter(const RowSpec& spec, const SlotRows& to, const std::uint32_t* slots, const WorkingRows& working,
                    std::size_t begin, std::size_t end) {
  for (std::size_t u = begin; u < end; ++u) {
    std::copy_n(working.weights + u * weight_bytes(spec), weight_bytes(spec),
                to.weights + slots[u] * weight_bytes(spec));
    std::copy_n(working.state + u * spec.state_floats, spec.state_floats, to.state + slots[u] * spec.state_floats);
  }
}

inline std::size_t update(const RowSpec& spec, const UpdateSpec& update, const HomeRows& home,
                          const WorkingRows& working, const Occurrences& occurrences, const float* grad,
                          const std::uint32_t* forward, const WorkingRows* next, std::size_t begin, std::size_t end) {
  std::vector<float> sums(end * spec.dim);
  sum_gradients(spec.dim, occurrences, grad, nullptr, false, sums.data(), begin, end);
  return update_from_sums(spec, update, home, working, sums.data(), forward, next, begin, end);
}

inline void scale_gradients(const PoolSpec& spec, const std::uint32_t* bag_of, const float* grad,
                            std::size_t grad_stride, float* out, std::size_t begin, std::size_t end) {
  for (std::size_t j = begin; j < end; ++j) {
    std::array<float, 16> lanes{};
    const std::uint32_t bag = bag_of[j];
    for (std::uint32_t e = 0; e < spec.dim; ++e) {
      lanes[e % 16] +=
          grad[bag * grad_stride + e] * get(spec.weights, spec.dtype, std::size_t{spec.position[j]} * spec.dim + e);
    }
    out[j] = fold(lanes);
    if (spec.mean) out[j] *= 1.0f / static_cast<float>(spec.bag_start[bag + 1] - spec.bag_start[bag]);
  }
}

inline constexpr Kernels kernels{
    .name = "reference",
    .initial_row = initial_row,
    .capture = capture,
    .restore = restore,
    .put = put,
    .gather = gather,
    .scatter = scatter,
    .pool_bags = pool_bags,
    .sum_gradients = sum_gradients,
    .sum_of_squares = sum_of_squares,
    .all_finite = all_finite,
    .first_non_finite = first_non_finite,
    .update = update,
    .update_from_sums = update_from_sums,
    .update_compact = update_compact,
    .update_compact_from_sums = update_compact_from_sums,
    .scale_gradients = scale_gradients,
};

}  // namespace holdfast::reference_kernels
