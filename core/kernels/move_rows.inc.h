// Initial values, capture, restore and put: rows between home and compact arrays.

namespace holdfast::HOLDFAST_ISA {
namespace {

// Home rows are all over the memory: ask for them this many rows before they are copied.
constexpr std::size_t move_distance_rows = 32;

HOLDFAST_INLINE bool is_touched(const std::uint64_t* touched, std::uint64_t row) {
  return (__atomic_load_n(touched + row / 64, __ATOMIC_RELAXED) >> row % 64 & 1) != 0;
}
// Other threads' rows may share the word.
HOLDFAST_INLINE void mark_touched(std::uint64_t* touched, std::uint64_t row) {
  if (!is_touched(touched, row)) __atomic_fetch_or(touched + row / 64, std::uint64_t{1} << row % 64, __ATOMIC_RELAXED);
}
HOLDFAST_INLINE void mark_untouched(std::uint64_t* touched, std::uint64_t row) {
  if (is_touched(touched, row)) {
    __atomic_fetch_and(touched + row / 64, ~(std::uint64_t{1} << row % 64), __ATOMIC_RELAXED);
  }
}

// The largest float below a finite or infinite x.
inline float next_below(float x) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  bits = x > 0 ? bits - 1 : x == 0 ? 0x80000001u : bits + 1;
  __builtin_memcpy(&x, &bits, sizeof bits);
  return x;
}

// Element e of a row is low + (high - low) × (bits >> 8) × 2^-24, each operation rounded to float32, where bits are
//   element_bits(absorb(absorb(absorb(initial_values, seed), table), row), e)
// of counter_rng.h. What rounding brings up to `high` becomes the float before it; an empty interval gives `low`.
// 16-bit formats then round to the nearest, ties to even, and never to infinity.
template <class Format, std::uint32_t Dim>
HOLDFAST_INLINE void write_initial(Shape<Dim> shape, const RowSpec& spec, std::uint64_t row,
                                   typename Format::Element* weights) {
  using counter_rng::absorb;
  const std::uint64_t number = own_row(spec.shard_bits, spec.stride_bits, spec.first_shard, row);
  const std::uint64_t key = absorb(absorb(absorb(counter_rng::initial_values, spec.seed), spec.table), number);
  const float span = spec.init_low < spec.init_high ? spec.init_high - spec.init_low : 0.0f;
  const float largest = span > 0 ? next_below(spec.init_high) : spec.init_low;
  for_each_block(shape, [&](std::uint32_t block, auto extent) {
    const Words bits = element_bits(key, block * num_lanes);
    Lanes values;
    for (std::uint32_t p = 0; p < num_parts; ++p) {
      const FloatPart uniform =
          __builtin_convertvector(reinterpret_cast<IntPart>(bits.part[p] >> 8), FloatPart) * 0x1p-24f;
      const FloatPart value = spec.init_low + span * uniform;
      values.part[p] = value < largest ? value : FloatPart{} + largest;
    }
    Format::store_nearest(weights + block * num_lanes, values, extent);
  });
}

__attribute__((noinline)) void write_initial_row(const RowSpec& spec, std::uint64_t row, std::byte* weights) {
  with_format(spec.dtype, [&](auto format) {
    using Format = decltype(format);
    write_initial<Format>(Shape<0>(spec.dim), spec, row, elements<Format>(weights));
  });
}

void initial_row(const RowSpec& spec, std::uint64_t row, std::byte* weights) {
  const DefaultFloatMode mode;
  write_initial_row(spec, row, weights);
}

// Sizes known when compiling (0: not known), so that copies become a few loads and stores.
template <std::size_t Bytes>
HOLDFAST_INLINE void copy_bytes(void* to, const void* from, std::size_t bytes) {
  __builtin_memcpy(to, from, Bytes == 0 ? bytes : Bytes);
}

template <std::size_t WeightBytes, std::size_t StateBytes>
void capture_rows(const RowSpec& spec, const HomeRows& home, const WorkingRows& working, std::size_t begin,
                  std::size_t end, std::size_t weight_bytes, std::size_t state_bytes) {
  if constexpr (WeightBytes != 0) weight_bytes = WeightBytes;
  if constexpr (StateBytes != 0) state_bytes = StateBytes;
  std::byte* const home_state = reinterpret_cast<std::byte*>(home.state);
  std::byte* const working_state = reinterpret_cast<std::byte*>(working.state);

  const auto ask_for = [&](std::size_t u) __attribute__((always_inline)) {
    const std::uint64_t row = working.rows[u];
    prefetch<Access::read>(home.weights + row * weight_bytes, weight_bytes);
    if (state_bytes != 0) prefetch<Access::read>(home_state + row * state_bytes, state_bytes);
    prefetch_line<Access::read>(home.touched + row / 64);
  };
  const std::size_t warm = end - begin < move_distance_rows ? end : begin + move_distance_rows;
  for (std::size_t u = begin; u < warm; ++u) ask_for(u);
  for (std::size_t u = begin; u < end; ++u) {
    if (u + move_distance_rows < end) ask_for(u + move_distance_rows);
    const std::uint64_t row = working.rows[u];
    if (is_touched(home.touched, row)) [[likely]] {
      copy_bytes<WeightBytes>(working.weights + u * weight_bytes, home.weights + row * weight_bytes, weight_bytes);
      if (state_bytes != 0) {
        copy_bytes<StateBytes>(working_state + u * state_bytes, home_state + row * state_bytes, state_bytes);
      }
    } else {
      write_initial_row(spec, row, working.weights + u * weight_bytes);
      if (state_bytes != 0) __builtin_memset(working_state + u * state_bytes, 0, state_bytes);
      working.rows[u] = row | fresh_bit;
    }
  }
}

template <std::size_t WeightBytes, std::size_t StateBytes>
void restore_rows(const HomeRows& home, const WorkingRows& working, std::size_t begin, std::size_t end,
                  std::size_t weight_bytes, std::size_t state_bytes) {
  if constexpr (WeightBytes != 0) weight_bytes = WeightBytes;
  if constexpr (StateBytes != 0) state_bytes = StateBytes;
  std::byte* const home_state = reinterpret_cast<std::byte*>(home.state);
  const std::byte* const working_state = reinterpret_cast<const std::byte*>(working.state);
  for (std::size_t u = begin; u < end; ++u) {
    if (u + move_distance_rows < end) {
      const std::uint64_t row = working.rows[u + move_distance_rows];
      if ((row & fresh_bit) == 0) {
        prefetch<Access::write>(home.weights + row * weight_bytes, weight_bytes);
        if (state_bytes != 0) prefetch<Access::write>(home_state + row * state_bytes, state_bytes);
      }
    }
    const std::uint64_t row = working.rows[u] & ~fresh_bit;
    if ((working.rows[u] & fresh_bit) != 0) {
      mark_untouched(home.touched, row);
      continue;
    }
    copy_bytes<WeightBytes>(home.weights + row * weight_bytes, working.weights + u * weight_bytes, weight_bytes);
    if (state_bytes != 0) {
      copy_bytes<StateBytes>(home_state + row * state_bytes, working_state + u * state_bytes, state_bytes);
    }
  }
}

// Whole lines, past the caches.
HOLDFAST_INLINE void stream_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t line = 0; line < bytes; line += line_bytes) {
    Lanes values;
    static_assert(sizeof values == line_bytes);
    __builtin_memcpy(&values, from + line, sizeof values);
    stream(reinterpret_cast<float*>(to + line), values);
  }
}

// Home rows that are whole lines are written past the caches (see update.inc.h).
template <std::size_t WeightBytes, std::size_t StateBytes>
void put_rows(const HomeRows& home, const std::uint64_t* rows, const ReadyRows& ready, std::size_t begin,
              std::size_t end, std::size_t weight_bytes, std::size_t state_bytes) {
  if constexpr (WeightBytes != 0) weight_bytes = WeightBytes;
  if constexpr (StateBytes != 0) state_bytes = StateBytes;
  std::byte* const home_state = reinterpret_cast<std::byte*>(home.state);
  const std::byte* const ready_state = reinterpret_cast<const std::byte*>(ready.state);
  const bool streams = weight_bytes % line_bytes == 0 && !home.read_soon &&
                       reinterpret_cast<std::uintptr_t>(home.weights) % line_bytes == 0;

  const auto ask_for = [&](std::size_t u) __attribute__((always_inline)) {
    const std::uint64_t row = rows[u] & ~fresh_bit;
    if (!streams) prefetch<Access::write>(home.weights + row * weight_bytes, weight_bytes);
    if (state_bytes != 0) prefetch<Access::write>(home_state + row * state_bytes, state_bytes);
  };
  const std::size_t warm = end - begin < move_distance_rows ? end : begin + move_distance_rows;
  for (std::size_t u = begin; u < warm; ++u) ask_for(u);
  for (std::size_t u = begin; u < end; ++u) {
    if (u + move_distance_rows < end) ask_for(u + move_distance_rows);
    const std::uint64_t row = rows[u] & ~fresh_bit;
    std::byte* const to = home.weights + row * weight_bytes;
    const std::byte* const from = ready.weights + u * weight_bytes;
    if (streams) {
      stream_bytes(to, from, weight_bytes);
    } else {
      copy_bytes<WeightBytes>(to, from, weight_bytes);
    }
    if (state_bytes != 0) {
      copy_bytes<StateBytes>(home_state + row * state_bytes, ready_state + u * state_bytes, state_bytes);
    }
    if ((rows[u] & fresh_bit) != 0) mark_touched(home.touched, row);
  }
  if (streams) finish_streaming();
}

enum class Move { gather, scatter };

template <Move move, std::size_t WeightBytes, std::size_t StateBytes>
void move_slots(const SlotRows& there, const std::uint32_t* slots, const WorkingRows& working, std::size_t begin,
                std::size_t end, std::size_t weight_bytes, std::size_t state_bytes) {
  if constexpr (WeightBytes != 0) weight_bytes = WeightBytes;
  if constexpr (StateBytes != 0) state_bytes = StateBytes;
  std::byte* const there_state = reinterpret_cast<std::byte*>(there.state);
  std::byte* const working_state = reinterpret_cast<std::byte*>(working.state);
  constexpr Access access = move == Move::gather ? Access::read : Access::write;

  const auto ask_for = [&](std::size_t u) __attribute__((always_inline)) {
    const std::size_t slot = slots[u];
    prefetch<access>(there.weights + slot * weight_bytes, weight_bytes);
    if (state_bytes != 0) prefetch<access>(there_state + slot * state_bytes, state_bytes);
  };
  const std::size_t warm = end - begin < move_distance_rows ? end : begin + move_distance_rows;
  for (std::size_t u = begin; u < warm; ++u) ask_for(u);
  for (std::size_t u = begin; u < end; ++u) {
    if (u + move_distance_rows < end) ask_for(u + move_distance_rows);
    std::byte* const weights = there.weights + slots[u] * weight_bytes;
    std::byte* const compact = working.weights + u * weight_bytes;
    copy_bytes<WeightBytes>(move == Move::gather ? compact : weights, move == Move::gather ? weights : compact,
                            weight_bytes);
    if (state_bytes == 0) continue;
    std::byte* const state = there_state + slots[u] * state_bytes;
    std::byte* const compact_state = working_state + u * state_bytes;
    copy_bytes<StateBytes>(move == Move::gather ? compact_state : state, move == Move::gather ? state : compact_state,
                           state_bytes);
  }
}

// Calls body.operator()<WeightBytes, StateBytes>(weight_bytes, state_bytes) with the sizes as constants where they
// are common: SGD and row-wise Adagrad (with keys, too) on rows of 16 to 512 bytes.
template <class Body>
HOLDFAST_INLINE void with_sizes(const RowSpec& spec, Body&& body) {
  const std::size_t weight_bytes = std::size_t{spec.dim} * (spec.dtype == RowDtype::f32 ? 4 : 2);
  const std::size_t state_bytes = std::size_t{spec.state_floats} * 4;
  const auto with_state = [&]<std::size_t WeightBytes>() {
    if (state_bytes == 4) return body.template operator()<WeightBytes, 4>(weight_bytes, state_bytes);
    if (state_bytes == 20) return body.template operator()<WeightBytes, 20>(weight_bytes, state_bytes);
    return body.template operator()<WeightBytes, 0>(weight_bytes, state_bytes);
  };
  switch (weight_bytes) {
    case 16: return with_state.template operator()<16>();
    case 32: return with_state.template operator()<32>();
    case 64: return with_state.template operator()<64>();
    case 128: return with_state.template operator()<128>();
    case 256: return with_state.template operator()<256>();
    case 512: return with_state.template operator()<512>();
    default: return with_state.template operator()<0>();
  }
}

void capture(const RowSpec& spec, const HomeRows& home, const WorkingRows& working, std::size_t begin,
             std::size_t end) {
  const DefaultFloatMode mode;
  with_sizes(spec,
             [&]<std::size_t WeightBytes, std::size_t StateBytes>(std::size_t weight_bytes, std::size_t state_bytes) {
               capture_rows<WeightBytes, StateBytes>(spec, home, working, begin, end, weight_bytes, state_bytes);
             });
}

void put(const RowSpec& spec, const HomeRows& home, const std::uint64_t* rows, const ReadyRows& ready,
         std::size_t begin, std::size_t end) {
  with_sizes(spec,
             [&]<std::size_t WeightBytes, std::size_t StateBytes>(std::size_t weight_bytes, std::size_t state_bytes) {
               put_rows<WeightBytes, StateBytes>(home, rows, ready, begin, end, weight_bytes, state_bytes);
             });
}

void gather(const RowSpec& spec, const SlotRows& from, const std::uint32_t* slots, const WorkingRows& working,
            std::size_t begin, std::size_t end) {
  with_sizes(
      spec, [&]<std::size_t WeightBytes, std::size_t StateBytes>(std::size_t weight_bytes, std::size_t state_bytes) {
        move_slots<Move::gather, WeightBytes, StateBytes>(from, slots, working, begin, end, weight_bytes, state_bytes);
      });
}

void scatter(const RowSpec& spec, const SlotRows& to, const std::uint32_t* slots, const WorkingRows& working,
             std::size_t begin, std::size_t end) {
  with_sizes(
      spec, [&]<std::size_t WeightBytes, std::size_t StateBytes>(std::size_t weight_bytes, std::size_t state_bytes) {
        move_slots<Move::scatter, WeightBytes, StateBytes>(to, slots, working, begin, end, weight_bytes, state_bytes);
      });
}

void restore(const RowSpec& spec, const HomeRows& home, const WorkingRows& working, std::size_t begin,
             std::size_t end) {
  with_sizes(spec,
             [&]<std::size_t WeightBytes, std::size_t StateBytes>(std::size_t weight_bytes, std::size_t state_bytes) {
               restore_rows<WeightBytes, StateBytes>(home, working, begin, end, weight_bytes, state_bytes);
             });
}

}  // namespace
}  // namespace holdfast::HOLDFAST_ISA
