// Pooled lookups and the gradients of per-sample weights, from a working set.

namespace holdfast::HOLDFAST_ISA {
namespace {

// Rows of a working set come from L2 or L3, in the order of lookups.
constexpr std::size_t pool_distance_rows = 16;

// Sum, from zero, of (scale ×) row in order of lookup; the rest of a bag is added to what `out` has. For a mean, the sum
// × (1 / length).
template <class Format, bool scaled, std::uint32_t Dim>
void pool_rows(Shape<Dim> shape, const PoolSpec& spec, std::size_t begin, std::size_t end) {
  using Element = typename Format::Element;
  const Element* const rows = elements<Format>(spec.weights);
  const std::size_t dim = shape.dim();
  const std::size_t num_positions = begin < end ? spec.bag_start[end] : 0;
  const bool is_rest = spec.whole_bag_start != nullptr;
  const std::uint32_t* const whole = is_rest ? spec.whole_bag_start : spec.bag_start;
  for (std::size_t bag = begin; bag < end; ++bag) {
    Lanes sum[Shape<Dim>::max_blocks];
    for_each_block(shape, [&](std::uint32_t block, auto) { sum[block] = zero(); });
    const std::size_t bag_begin = spec.bag_start[bag];
    const std::size_t bag_end = spec.bag_start[bag + 1];
    for (std::size_t j = bag_begin; j < bag_end; ++j) {
      const std::size_t ahead = j + pool_distance_rows;
      if (ahead < num_positions) prefetch<Access::read>(rows + spec.position[ahead] * dim, dim * sizeof(Element));
      const Element* const row = rows + spec.position[j] * dim;
      for_each_block(shape, [&](std::uint32_t block, auto extent) {
        const Lanes values = Format::load_elements(row + block * num_lanes, extent);
        if constexpr (scaled) {
          sum[block] = sum[block] + spec.scale[j] * values;
        } else {
          sum[block] = sum[block] + values;
        }
      });
    }
    const std::uint32_t length = whole[bag + 1] - whole[bag];
    const float mean_factor = spec.mean && length != 0 ? 1.0f / static_cast<float>(length) : 1.0f;
    float* const out = spec.out + bag * spec.out_stride;
    for_each_block(shape, [&](std::uint32_t block, auto extent) {
      if (is_rest) sum[block] = load(out + block * num_lanes, extent) + sum[block];
      store(out + block * num_lanes, spec.mean ? mean_factor * sum[block] : sum[block], extent);
    });
  }
}

__attribute__((noinline)) void pool_bags_any(const PoolSpec& spec, std::size_t begin, std::size_t end) {
  with_format(spec.dtype, [&](auto format) {
    using Format = decltype(format);
    with_shape(spec.dim, [&](auto shape) {
      if (spec.scale != nullptr) {
        pool_rows<Format, true>(shape, spec, begin, end);
      } else {
        pool_rows<Format, false>(shape, spec, begin, end);
      }
    });
  });
}

void pool_bags(const PoolSpec& spec, std::size_t begin, std::size_t end) {
  const DefaultFloatMode mode;
  pool_bags_any(spec, begin, end);
}

// Dot product of the bag's gradient and the row by the same tree as reduce_row's; for a mean, × (1 / length).
template <class Format, std::uint32_t Dim>
void scale_gradients_of(Shape<Dim> shape, const PoolSpec& spec, const std::uint32_t* bag_of, const float* grad,
                        std::size_t grad_stride, float* out, std::size_t begin, std::size_t end) {
  const auto* const rows = elements<Format>(spec.weights);
  for (std::size_t j = begin; j < end; ++j) {
    const std::uint32_t bag = bag_of[j];
    const auto* const row = rows + std::size_t{spec.position[j]} * shape.dim();
    const float* const bag_grad = grad + bag * grad_stride;
    Lanes sum = zero();
    for_each_block(shape, [&](std::uint32_t block, auto extent) {
      sum = sum + load(bag_grad + block * num_lanes, extent) * Format::load_elements(row + block * num_lanes, extent);
    });
    out[j] = fold(sum);
    if (spec.mean) out[j] *= 1.0f / static_cast<float>(spec.bag_start[bag + 1] - spec.bag_start[bag]);
  }
}

__attribute__((noinline)) void scale_gradients_any(const PoolSpec& spec, const std::uint32_t* bag_of, const float* grad,
                                                   std::size_t grad_stride, float* out, std::size_t begin,
                                                   std::size_t end) {
  with_format(spec.dtype, [&](auto format) {
    with_shape(spec.dim, [&](auto shape) {
      scale_gradients_of<decltype(format)>(shape, spec, bag_of, grad, grad_stride, out, begin, end);
    });
  });
}

void scale_gradients(const PoolSpec& spec, const std::uint32_t* bag_of, const float* grad, std::size_t grad_stride,
                     float* out, std::size_t begin, std::size_t end) {
  const DefaultFloatMode mode;
  scale_gradients_any(spec, bag_of, grad, grad_stride, out, begin, end);
}

}  // namespace
}  // namespace holdfast::HOLDFAST_ISA
