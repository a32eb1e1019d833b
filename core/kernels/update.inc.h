// Sums of gradients, and the update of home rows from them.

namespace holdfast::HOLDFAST_ISA {
namespace {

// Adds the gradients of occurrences [begin, end) to `sum`, one after another.
template <bool scaled, std::uint32_t Dim>
HOLDFAST_INLINE void add_gradients(Shape<Dim> shape, const Occurrences& occurrences, const float* grad,
                                   std::size_t begin, std::size_t end, Lanes* sum) {
  for (std::size_t j = begin; j < end; ++j) {
    const float* const gradient = grad + occurrences.gradient_offset[j];
    for_each_block(shape, [&](std::uint32_t block, auto extent) {
      const Lanes values = load(gradient + block * num_lanes, extent);
      if constexpr (scaled) {
        sum[block] = sum[block] + occurrences.scale[j] * values;
      } else {
        sum[block] = sum[block] + values;
      }
    });
  }
}

template <bool scaled, std::uint32_t Dim>
void sum_rows(Shape<Dim> shape, const Occurrences& occurrences, const float* grad, const std::uint32_t* position,
              bool accumulate, float* sums, std::size_t begin, std::size_t end) {
  for (std::size_t u = begin; u < end; ++u) {
    float* const row_sum = sums + (position == nullptr ? u : position[u]) * shape.dim();
    Lanes sum[Shape<Dim>::max_blocks];
    for_each_block(shape, [&](std::uint32_t block, auto extent) {
      sum[block] = accumulate ? load(row_sum + block * num_lanes, extent) : zero();
    });
    add_gradients<scaled>(shape, occurrences, grad, occurrences.row_start[u], occurrences.row_start[u + 1], sum);
    for_each_block(shape,
                   [&](std::uint32_t block, auto extent) { store(row_sum + block * num_lanes, sum[block], extent); });
  }
}

__attribute__((noinline)) void sum_gradients_any(std::uint32_t dim, const Occurrences& occurrences, const float* grad,
                                                 const std::uint32_t* position, bool accumulate, float* sums,
                                                 std::size_t begin, std::size_t end) {
  with_shape(dim, [&](auto shape) {
    if (occurrences.scale != nullptr) {
      sum_rows<true>(shape, occurrences, grad, position, accumulate, sums, begin, end);
    } else {
      sum_rows<false>(shape, occurrences, grad, position, accumulate, sums, begin, end);
    }
  });
}

void sum_gradients(std::uint32_t dim, const Occurrences& occurrences, const float* grad, const std::uint32_t* position,
                   bool accumulate, float* sums, std::size_t begin, std::size_t end) {
  const DefaultFloatMode mode;
  sum_gradients_any(dim, occurrences, grad, position, accumulate, sums, begin, end);
}

// The same tree as a row's, in double: lane i adds the squares of values i, i + 16, …, then lanes are folded.
__attribute__((noinline)) double sum_of_squares_any(const float* values, std::size_t count) {
  double lanes[num_lanes] = {};
  std::size_t i = 0;
  for (; i + num_lanes <= count; i += num_lanes) {
    for (std::uint32_t lane = 0; lane < num_lanes; ++lane) {
      const double value = static_cast<double>(values[i + lane]);
      lanes[lane] += value * value;
    }
  }
  for (; i < count; ++i) {
    const double value = static_cast<double>(values[i]);
    lanes[i % num_lanes] += value * value;
  }
  for (std::uint32_t half = num_lanes / 2; half != 0; half /= 2) {
    for (std::uint32_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

double sum_of_squares(const float* values, std::size_t count) {
  const DefaultFloatMode mode;
  return sum_of_squares_any(values, count);
}

// No early end: it is the rare case, and the loop without it is vectors only.
bool all_finite(const float* values, std::size_t count) {
  std::uint32_t any_special = 0;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, values + i, sizeof bits);
    any_special |= (bits & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
  }
  return any_special == 0;
}

template <class Format>
bool is_finite_row(const RowSpec& spec, const std::byte* weights, const float* state) {
  std::uint32_t any_special = 0;
  for (std::uint32_t e = 0; e < spec.dim; ++e) {
    typename Format::Element element;
    __builtin_memcpy(&element, weights + e * sizeof element, sizeof element);
    std::uint32_t bits = 0;
    __builtin_memcpy(&bits, &element, sizeof element);
    any_special |= (bits & Format::infinity) == Format::infinity ? 1u : 0u;
  }
  return any_special == 0 && all_finite(state, spec.state_floats - spec.key_floats);
}

std::size_t first_non_finite(const RowSpec& spec, const ReadyRows& rows, std::size_t begin, std::size_t end) {
  const std::size_t weight_bytes = std::size_t{spec.dim} * bytes_of(spec.dtype);
  std::size_t u = begin;
  with_format(spec.dtype, [&](auto format) {
    while (u < end &&
           is_finite_row<decltype(format)>(spec, rows.weights + u * weight_bytes, rows.state + u * spec.state_floats)) {
      ++u;
    }
  });
  return u;
}

// Where the gradients of unique rows come from: their occurrences, or (where `sums` is not null) sums made before.
struct GradientSource {
  const Occurrences* occurrences;
  const float* grad;
  const float* sums;
};

// Where rows go besides home.
struct Forwarding {
  const std::uint32_t* position;  // null: nowhere
  const WorkingRows* next;
};

// Rows are updated in groups: ask for the next group's memory, sum this group's gradients into a buffer that stays in
// L1, then compute and write. Home rows that are whole lines are written past the caches: what was there need not be
// read first, and by the time a row is captured again it would be gone from the caches anyway (Zipf ids, two cores:
// 1.3 to 1.5 times as fast on rows of 128 bytes, the same on rows of 64). Others are asked for in one tight loop, so
// that their page walks overlap. A row that goes to the next step's capture as well is computed there, where it is
// read soon, and streamed home from there.
constexpr std::uint32_t max_group_rows = 128;
constexpr std::uint32_t group_blocks = 256;
constexpr std::uint32_t max_strip = 1024;

template <std::uint32_t Dim>
HOLDFAST_INLINE std::uint32_t num_blocks(Shape<Dim> shape) {
  return (shape.dim() + num_lanes - 1) / num_lanes;
}

// Sums of rows [begin, end), num_blocks each. Most rows have a few occurrences, and it is not predictable how many.
// So this is one loop over the occurrences: the sum so far is stored each time, and cleared by a mask, not by a branch,
// where a row ends. Every row must have an occurrence.
template <bool scaled, std::uint32_t Dim>
HOLDFAST_INLINE void sum_short_rows(Shape<Dim> shape, const Occurrences& occurrences, const float* grad,
                                    std::size_t begin, std::size_t end, Lanes* sums) {
  const std::uint32_t* const row_start = occurrences.row_start;
  const std::size_t last = row_start[end];
  const std::uint32_t blocks = num_blocks(shape);
  std::uint32_t keep[max_strip];  // 0 at the last occurrence of a row, all ones elsewhere
  std::size_t ending = begin;
  std::uint32_t row = 0;
  Lanes sum[Shape<Dim>::max_blocks];
  for_each_block(shape, [&](std::uint32_t b, auto) { sum[b] = zero(); });
  for (std::size_t strip = row_start[begin]; strip < last; strip += max_strip) {
    const std::size_t count = last - strip < max_strip ? last - strip : max_strip;
    for (std::size_t i = 0; i < count; ++i) keep[i] = ~0u;
    for (; ending < end && row_start[ending + 1] <= strip + count; ++ending) {
      keep[row_start[ending + 1] - 1 - strip] = 0;
    }
    for (std::size_t i = 0; i < count; ++i) {
      const float* const gradient = grad + occurrences.gradient_offset[strip + i];
      for_each_block(shape, [&](std::uint32_t b, auto extent) {
        const Lanes values = load(gradient + b * num_lanes, extent);
        if constexpr (scaled) {
          sum[b] = sum[b] + occurrences.scale[strip + i] * values;
        } else {
          sum[b] = sum[b] + values;
        }
        sums[row * blocks + b] = sum[b];
        sum[b] = keep_bits(sum[b], keep[i]);
      });
      row += keep[i] + 1;  // 1 where the row ends, else 0
    }
  }
}

template <bool scaled, std::uint32_t Dim>
__attribute__((noinline)) void sum_group(Shape<Dim> shape, const Occurrences& occurrences, const float* grad,
                                         std::size_t begin, std::size_t end, Lanes* sums) {
  const std::uint32_t* const row_start = occurrences.row_start;
  if constexpr (Dim != 0 && Dim <= 64) {
    bool any_empty = false;
    for (std::size_t u = begin; u < end; ++u) any_empty |= row_start[u] == row_start[u + 1];
    if (!any_empty) return sum_short_rows<scaled>(shape, occurrences, grad, begin, end, sums);
  }
  for (std::size_t u = begin; u < end; ++u, sums += num_blocks(shape)) {
    for_each_block(shape, [&](std::uint32_t b, auto) { sums[b] = zero(); });
    add_gradients<scaled>(shape, occurrences, grad, row_start[u], row_start[u + 1], sums);
  }
}

// What a row's stochastic rounding goes by: its own number, or its key.
HOLDFAST_INLINE std::uint64_t number_of(const RowSpec& spec, const WorkingRows& working, std::size_t u,
                                        std::uint64_t row) {
  if (working.keys != nullptr) return working.keys[u];
  return own_row(spec.shard_bits, spec.stride_bits, spec.first_shard, row);
}

HOLDFAST_INLINE void write_key_record(const float* old_record, std::uint64_t key, std::uint32_t step,
                                      float* new_record) {
  KeyRecord record;
  __builtin_memcpy(&record, old_record, sizeof record);
  record = {key, step, record.updates + (record.updates != ~std::uint32_t{0} ? 1 : 0)};
  __builtin_memcpy(new_record, &record, sizeof record);
}

// Where new rows go: to their places at home, or compact.
enum class Target { home, compact };

// Returns the first row whose new values are not all finite, else `end`.
template <Target target, class Format, class Optimizer, std::uint32_t Dim>
std::size_t update_rows(Shape<Dim> shape, const RowSpec& spec, const UpdateSpec& update, const HomeRows& home,
                        const WorkingRows& working, const GradientSource& source, const Forwarding& forwarding,
                        std::size_t begin, std::size_t end) {
  using counter_rng::absorb;
  constexpr bool rounds = sizeof(typename Format::Element) < 4;
  const StepConstants step(update);
  const std::uint64_t rounding_key =
      absorb(absorb(absorb(counter_rng::stochastic_rounding, update.rounding_seed), spec.table), update.step);
  const std::size_t dim = shape.dim();
  const std::size_t weight_bytes = dim * sizeof(typename Format::Element);
  const std::size_t state_floats = spec.state_floats;
  const std::uint32_t blocks = num_blocks(shape);
  const std::size_t group_rows = group_blocks / blocks < max_group_rows ? group_blocks / blocks : max_group_rows;
  Lanes gradients[group_blocks];
  Finiteness finiteness;
  const bool forwards = forwarding.position != nullptr;
  const bool streams = target == Target::home && Format::can_stream && weight_bytes % line_bytes == 0 &&
                       !home.read_soon && reinterpret_cast<std::uintptr_t>(home.weights) % line_bytes == 0;

  const auto ask_for = [&](std::size_t first, std::size_t last) __attribute__((always_inline)) {
    for (std::size_t u = first; u < last; ++u) {
      const std::uint64_t row = working.rows[u] & ~fresh_bit;
      if (target == Target::home) {
        if (!streams) prefetch<Access::write>(home.weights + row * weight_bytes, weight_bytes);
        if (state_floats != 0) prefetch<Access::write>(home.state + row * state_floats, state_floats * 4);
      }
      prefetch<Access::read>(working.weights + u * weight_bytes, weight_bytes);  // the hardware stops at each page
    }
  };
  std::size_t group_end = begin + group_rows < end ? begin + group_rows : end;
  ask_for(begin, group_end);
  for (std::size_t group = begin; group < end;) {
    const std::size_t next_end = group_end + group_rows < end ? group_end + group_rows : end;
    ask_for(group_end, next_end);
    if (source.sums != nullptr) {
      for (std::size_t u = group; u < group_end; ++u) {
        for_each_block(shape, [&](std::uint32_t b, auto extent) {
          gradients[(u - group) * blocks + b] = load(source.sums + u * dim + b * num_lanes, extent);
        });
      }
    } else if (source.occurrences->scale != nullptr) {
      sum_group<true>(shape, *source.occurrences, source.grad, group, group_end, gradients);
    } else {
      sum_group<false>(shape, *source.occurrences, source.grad, group, group_end, gradients);
    }
    for (std::size_t u = group; u < group_end; ++u) {
      const std::uint64_t row = working.rows[u] & ~fresh_bit;
      const std::uint64_t place = target == Target::home ? row : u;
      std::byte* const at_place = home.weights + place * weight_bytes;
      const bool is_forwarded = forwards && forwarding.position[u] != no_forward;
      std::byte* const at_next =
          is_forwarded ? forwarding.next->weights + forwarding.position[u] * weight_bytes : nullptr;
      const RowUpdate<Format> row_update{
          .old_weights = elements<Format>(working.weights + u * weight_bytes),
          .old_state = working.state + u * state_floats,
          .new_weights = elements<Format>(streams && is_forwarded ? at_next : at_place),
          .new_state = home.state + place * state_floats,
          .rounding = {rounds ? absorb(rounding_key, number_of(spec, working, u, row)) : 0},
          .streams = streams && !is_forwarded,
          .finiteness = finiteness,
      };
      Lanes* const g = gradients + (u - group) * blocks;
      if (step.gradient_scale != 1) {
        for_each_block(shape, [&](std::uint32_t b, auto) { g[b] = step.gradient_scale * g[b]; });
      }
      if (Optimizer::l2_weight_decay && step.weight_decay != 0) {
        for_each_block(shape, [&](std::uint32_t b, auto extent) {
          g[b] = g[b] + step.weight_decay * row_update.weights(b, extent);
        });
      }
      Optimizer::apply(shape, step, g, row_update);
      if (working.keys != nullptr) {
        const std::size_t record = state_floats - key_record_floats;
        write_key_record(row_update.old_state + record, working.keys[u], update.pool_step,
                         row_update.new_state + record);
      }

      if (target == Target::compact) continue;
      if ((working.rows[u] & fresh_bit) != 0) mark_touched(home.touched, row);
      if (is_forwarded) {
        const WorkingRows& next = *forwarding.next;
        const std::size_t p = forwarding.position[u];
        if (streams) {
          stream_bytes(at_place, at_next, weight_bytes);
        } else {
          __builtin_memcpy(at_next, at_place, weight_bytes);
        }
        if (state_floats != 0) {
          __builtin_memcpy(next.state + p * state_floats, row_update.new_state, state_floats * 4);
        }
        next.rows[p] &= ~fresh_bit;
      }
    }
    group = group_end;
    group_end = next_end;
  }
  if (streams) finish_streaming();
  if (finiteness.holds()) return end;
  const auto is_finite = [&](std::size_t u) {
    const std::uint64_t place = target == Target::home ? working.rows[u] & ~fresh_bit : u;
    return is_finite_row<Format>(spec, home.weights + place * weight_bytes, home.state + place * state_floats);
  };
  std::size_t first = begin;
  while (first < end && is_finite(first)) ++first;
  return first;
}

template <class Body>
HOLDFAST_INLINE void with_optimizer(RowOptimizer optimizer, Body&& body) {
  switch (optimizer) {
    case RowOptimizer::sgd: return body(Sgd{});
    case RowOptimizer::rowwise_adagrad: return body(RowwiseAdagrad{});
    case RowOptimizer::adagrad: return body(Adagrad{});
    case RowOptimizer::adam: return body(Adam{});
    case RowOptimizer::rowwise_adam: return body(RowwiseAdam{});
  }
}

template <Target target>
__attribute__((noinline)) std::size_t update_any(const RowSpec& spec, const UpdateSpec& update, const HomeRows& home,
                                                 const WorkingRows& working, const GradientSource& source,
                                                 const Forwarding& forwarding, std::size_t begin, std::size_t end) {
  std::size_t first_non_finite = end;
  with_format(spec.dtype, [&](auto format) {
    with_optimizer(spec.optimizer, [&](auto optimizer) {
      with_shape(spec.dim, [&](auto shape) {
        first_non_finite = update_rows<target, decltype(format), decltype(optimizer)>(
            shape, spec, update, home, working, source, forwarding, begin, end);
      });
    });
  });
  return first_non_finite;
}

std::size_t update(const RowSpec& spec, const UpdateSpec& update, const HomeRows& home, const WorkingRows& working,
                   const Occurrences& occurrences, const float* grad, const std::uint32_t* forward,
                   const WorkingRows* next, std::size_t begin, std::size_t end) {
  const DefaultFloatMode mode;
  return update_any<Target::home>(spec, update, home, working, {&occurrences, grad, nullptr}, {forward, next}, begin,
                                  end);
}

std::size_t update_from_sums(const RowSpec& spec, const UpdateSpec& update, const HomeRows& home,
                             const WorkingRows& working, const float* sums, const std::uint32_t* forward,
                             const WorkingRows* next, std::size_t begin, std::size_t end) {
  const DefaultFloatMode mode;
  return update_any<Target::home>(spec, update, home, working, {nullptr, nullptr, sums}, {forward, next}, begin, end);
}

std::size_t update_compact(const RowSpec& spec, const UpdateSpec& update, const WorkingRows& working,
                           const Occurrences& occurrences, const float* grad, const SlotRows& fresh, std::size_t begin,
                           std::size_t end) {
  const DefaultFloatMode mode;
  return update_any<Target::compact>(spec, update, {fresh.weights, fresh.state, nullptr}, working,
                                     {&occurrences, grad, nullptr}, {nullptr, nullptr}, begin, end);
}

std::size_t update_compact_from_sums(const RowSpec& spec, const UpdateSpec& update, const WorkingRows& working,
                                     const float* sums, const SlotRows& fresh, std::size_t begin, std::size_t end) {
  const DefaultFloatMode mode;
  return update_any<Target::compact>(spec, update, {fresh.weights, fresh.state, nullptr}, working,
                                     {nullptr, nullptr, sums}, {nullptr, nullptr}, begin, end);
}

}  // namespace
}  // namespace holdfast::HOLDFAST_ISA
