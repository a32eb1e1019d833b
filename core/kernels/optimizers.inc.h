// The row optimizers: new weights and state of one row from the old ones and the gradient.
//
// The definitions are FBGEMM's (fbgemm_gpu/codegen: optimizers.py and embedding_backward_split_cpu_approx), the order
// of operations is fixed here. Every line below is one float32 operation per operator, evaluated as the parentheses
// say, elementwise unless said otherwise, so that a reference in elementwise float32 gives the same bits.
//
// For each row, first, in this order:
//   g = 0 + gradients of its occurrences, one after another (each: scale × gradient, where there are scales)
//   if gradient_scale != 1:                          g = gradient_scale * g
//   if weight_decay != 0 (sgd, rowwise_adagrad, adagrad: L2):  g = g + weight_decay * w
// mean_square(g) = sum_of_squares / dim, where lane i of 16 adds the squares of elements i, i + 16, i + 32 …, starting
// from 0, absent elements counting as 0, and then lanes are folded: i + (i + 8), i + (i + 4), i + (i + 2), i + (i + 1).
//
// Powers of beta are taken in double by repeated squaring (power_of), because libm's pow differs from CPU to CPU, and
// rounded to float32 at the end: correction1 = float(1 - beta1^step), correction2 = float(1 - beta2^step).

namespace holdfast::HOLDFAST_ISA {
namespace {

// base^exponent, multiplying in the bits of the exponent from the lowest to the highest.
inline double power_of(double base, std::uint64_t exponent) {
  double power = 1.0;
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) power *= base;
    base *= base;
  }
  return power;
}

// The same for all rows of a step.
struct StepConstants {
  explicit StepConstants(const UpdateSpec& update)
      : learning_rate(update.learning_rate),
        epsilon(update.epsilon),
        weight_decay(update.weight_decay),
        gradient_scale(update.gradient_scale),
        beta1(update.beta1),
        beta2(update.beta2),
        rest1(1.0f - update.beta1),
        rest2(1.0f - update.beta2),
        correction1(static_cast<float>(1.0 - power_of(static_cast<double>(update.beta1), update.step))),
        correction2(static_cast<float>(1.0 - power_of(static_cast<double>(update.beta2), update.step))) {}
  float learning_rate, epsilon, weight_decay, gradient_scale;
  float beta1, beta2, rest1, rest2, correction1, correction2;
};

// Whether all of what was written is finite, without a branch: x - x is 0 of a finite number, and NaN of any other.
// Where a row's blocks are a call, which sees its address, it lies in memory and not in registers: so they are inlined.
class Finiteness {
 public:
  template <class Extent>
  HOLDFAST_INLINE void add(const Lanes& values, Extent extent) {
    const Lanes differences = only(values - values, extent);
    for (std::uint32_t p = 0; p < num_parts; ++p) {
      lanes_.part[p] |= reinterpret_cast<WordPart>(differences.part[p]);
    }
  }
  HOLDFAST_INLINE void add(float value) {
    const float difference = value - value;
    std::uint32_t bits;
    __builtin_memcpy(&bits, &difference, sizeof bits);
    values_ |= bits;
  }
  HOLDFAST_INLINE bool holds() const {
    std::uint32_t bits = values_;
    for (const WordPart& part : lanes_.part) {
      for (std::uint32_t i = 0; i < part_lanes; ++i) bits |= part[i];
    }
    return bits == 0;
  }

 private:
  Words lanes_{};
  std::uint32_t values_ = 0;
};

// One row on its way from the working set home.
template <class Format>
struct RowUpdate {
  const typename Format::Element* old_weights;
  const float* old_state;
  typename Format::Element* new_weights;
  float* new_state;
  RoundingKey rounding;
  bool streams;  // new_weights are whole lines that nobody reads soon
  Finiteness& finiteness;

  template <class Extent>
  HOLDFAST_INLINE Lanes weights(std::uint32_t block, Extent extent) const {
    return Format::load_elements(old_weights + block * num_lanes, extent);
  }
  template <class Extent>
  HOLDFAST_INLINE void put_weights(std::uint32_t block, const Lanes& values, Extent extent) const {
    finiteness.add(values, extent);
    if constexpr (Format::can_stream) {
      if (streams) return Format::stream_elements(new_weights + block * num_lanes, values);
    }
    Format::store_elements(new_weights + block * num_lanes, values, extent, rounding, block * num_lanes);
  }
  template <class Extent>
  HOLDFAST_INLINE void put_state(std::size_t first, const Lanes& values, Extent extent) const {
    finiteness.add(values, extent);
    store(new_state + first, values, extent);
  }
  HOLDFAST_INLINE void put_state(std::size_t at, float value) const {
    finiteness.add(value);
    new_state[at] = value;
  }
};

template <std::uint32_t Dim>
HOLDFAST_INLINE float mean_square(Shape<Dim> shape, const Lanes* g) {
  return reduce_row(shape, g) / static_cast<float>(shape.dim());
}

// FBGEMM: exact_sgd.
//   w = w - learning_rate * g
struct Sgd {
  static constexpr bool l2_weight_decay = true;
  template <class Format, std::uint32_t Dim>
  static HOLDFAST_INLINE void apply(Shape<Dim> shape, const StepConstants& step, const Lanes* g,
                                    const RowUpdate<Format>& row) {
    for_each_block(shape, [&](std::uint32_t b, auto extent) __attribute__((always_inline)) {
      row.put_weights(b, row.weights(b, extent) - step.learning_rate * g[b], extent);
    });
  }
};

// FBGEMM: exact_row_wise_adagrad.
//   m = m + mean_square(g)                          (one value for the row)
//   multiplier = learning_rate / (sqrt(m) + epsilon)
//   w = w - multiplier * g
struct RowwiseAdagrad {
  static constexpr bool l2_weight_decay = true;
  template <class Format, std::uint32_t Dim>
  static HOLDFAST_INLINE void apply(Shape<Dim> shape, const StepConstants& step, const Lanes* g,
                                    const RowUpdate<Format>& row) {
    const float m = row.old_state[0] + mean_square(shape, g);
    const float multiplier = step.learning_rate / (sqrt(m) + step.epsilon);
    row.put_state(0, m);
    for_each_block(shape, [&](std::uint32_t b, auto extent) __attribute__((always_inline)) {
      row.put_weights(b, row.weights(b, extent) - multiplier * g[b], extent);
    });
  }
};

// FBGEMM: exact_adagrad.
//   m = m + g * g
//   w = w - (learning_rate * g) / (sqrt(m) + epsilon)
struct Adagrad {
  static constexpr bool l2_weight_decay = true;
  template <class Format, std::uint32_t Dim>
  static HOLDFAST_INLINE void apply(Shape<Dim> shape, const StepConstants& step, const Lanes* g,
                                    const RowUpdate<Format>& row) {
    for_each_block(shape, [&](std::uint32_t b, auto extent) __attribute__((always_inline)) {
      const std::uint32_t e = b * num_lanes;
      const Lanes m = load(row.old_state + e, extent) + g[b] * g[b];
      row.put_state(e, m, extent);
      row.put_weights(b, row.weights(b, extent) - (step.learning_rate * g[b]) / (sqrt(m) + step.epsilon), extent);
    });
  }
};

// What both Adams do with exp_avg m and the root of the corrected exp_avg_sq:
//   direction = (m / correction1) / (root + epsilon)
//   if weight_decay != 0: direction = direction + weight_decay * w   (decoupled, as FBGEMM's adam has it)
//   w = w - learning_rate * direction
template <class Format, class Root, class Extent>
HOLDFAST_INLINE void take_adam_step(const StepConstants& step, const RowUpdate<Format>& row, std::uint32_t b,
                                    const Lanes& m, const Root& root, Extent extent) {
  const Lanes w = row.weights(b, extent);
  Lanes direction = (m / step.correction1) / (root + step.epsilon);
  if (step.weight_decay != 0) direction = direction + step.weight_decay * w;
  row.put_weights(b, w - step.learning_rate * direction, extent);
}

// FBGEMM: adam. State: m (dim values), then v (dim values).
//   m = (beta1 * m) + ((1 - beta1) * g)
//   v = (beta2 * v) + ((1 - beta2) * (g * g))
//   root = sqrt(v / correction2)                    then as take_adam_step says
struct Adam {
  static constexpr bool l2_weight_decay = false;
  template <class Format, std::uint32_t Dim>
  static HOLDFAST_INLINE void apply(Shape<Dim> shape, const StepConstants& step, const Lanes* g,
                                    const RowUpdate<Format>& row) {
    for_each_block(shape, [&](std::uint32_t b, auto extent) __attribute__((always_inline)) {
      const std::size_t e_m = b * num_lanes;
      const std::size_t e_v = shape.dim() + e_m;
      const Lanes m = step.beta1 * load(row.old_state + e_m, extent) + step.rest1 * g[b];
      const Lanes v = step.beta2 * load(row.old_state + e_v, extent) + step.rest2 * (g[b] * g[b]);
      row.put_state(e_m, m, extent);
      row.put_state(e_v, v, extent);
      take_adam_step(step, row, b, m, sqrt(v / step.correction2), extent);
    });
  }
};

// FBGEMM: partial_rowwise_adam. State: m (dim values), then v (one value for the row).
//   m = (beta1 * m) + ((1 - beta1) * g)
//   v = (beta2 * v) + ((1 - beta2) * mean_square(g))
//   root = sqrt(v / correction2)                    then as take_adam_step says
struct RowwiseAdam {
  static constexpr bool l2_weight_decay = false;
  template <class Format, std::uint32_t Dim>
  static HOLDFAST_INLINE void apply(Shape<Dim> shape, const StepConstants& step, const Lanes* g,
                                    const RowUpdate<Format>& row) {
    const float v = step.beta2 * row.old_state[shape.dim()] + step.rest2 * mean_square(shape, g);
    row.put_state(shape.dim(), v);
    const Lanes root = broadcast(sqrt(v / step.correction2));
    for_each_block(shape, [&](std::uint32_t b, auto extent) __attribute__((always_inline)) {
      const std::uint32_t e = b * num_lanes;
      const Lanes m = step.beta1 * load(row.old_state + e, extent) + step.rest1 * g[b];
      row.put_state(e, m, extent);
      take_adam_step(step, row, b, m, root, extent);
    });
  }
};

}  // namespace
}  // namespace holdfast::HOLDFAST_ISA
