// Row kernels: everything that touches the bytes of embedding rows.
//
// Invariants
// - The bits of every result are a function of the inputs alone. They do not depend on the instruction set (the
//   same source is compiled once for each, without contraction and without reassociation), on the number of
//   threads, or on how a caller cuts [begin, end) ranges.
// - Sums over a bag and over the occurrences of a row run in order of occurrence. Sums over a row's elements use
//   the one fixed tree of reduce_row (16 lanes, then 8 + 8, 4 + 4, 2 + 2, 1 + 1).
// - Kernels never allocate, never throw, never synchronise. Callers check ids, sizes and alignment.
// - Weights and optimizer state are split arrays: row r's weights start at r * dim * sizeof(dtype), its state at
//   r * state_floats * 4.
#pragma once

#include <cstddef>
#include <cstdint>

namespace holdfast {

enum class RowDtype : std::uint32_t { f32 = 0, f16 = 1, bf16 = 2 };

enum class RowOptimizer : std::uint32_t {
  sgd = 0,
  rowwise_adagrad = 1,  // FBGEMM exact_row_wise_adagrad
  adagrad = 2,
  adam = 3,
  rowwise_adam = 4,  // FBGEMM partial_row_wise_adam
};

// How the rows of one table look and how they come to be.
struct RowSpec {
  std::uint32_t dim;
  RowDtype dtype;
  RowOptimizer optimizer;
  std::uint32_t state_floats;  // float32 values of optimizer state per row, see state_floats_of
  std::uint64_t seed;          // of the pool
  std::uint64_t table;         // the table's number: rows' initial values are a function of (seed, table, row)
  float init_low;              // initial weights are uniform in [init_low, init_high), rounded to dtype
  float init_high;
  std::uint32_t shard_bits = 0;   // rows are addressed by place (shards.h); of initial values and rounding `row` is
  std::uint32_t stride_bits = 0;  // the row's own number: own_row(shard_bits, stride_bits, first_shard, place)
  std::uint32_t first_shard = 0;
  std::uint32_t tag_seed = 0;  // of whoever owns the rows: what their tags go on from
  std::uint32_t key_floats = 0;  // of state_floats, the last: of a table with keys, the row's KeyRecord; else 0
};

// Whose a row is, in a table with keys: the end of its state. All zeros: nobody's yet.
struct KeyRecord {
  std::uint64_t key;
  std::uint32_t step;     // of the pool, that updated the row last
  std::uint32_t updates;  // steps that updated it since it became the key's
};
static_assert(sizeof(KeyRecord) == 16);
inline constexpr std::uint32_t key_record_floats = sizeof(KeyRecord) / 4;

constexpr std::uint32_t bytes_of(RowDtype dtype) { return dtype == RowDtype::f32 ? 4 : 2; }

// sgd 0 · rowwise_adagrad 1 · adagrad dim · adam 2 × dim (exp_avg, then exp_avg_sq) · rowwise_adam dim + 1
// (exp_avg, then the row's exp_avg_sq).
constexpr std::uint32_t state_floats_of(RowOptimizer optimizer, std::uint32_t dim) {
  switch (optimizer) {
    case RowOptimizer::sgd: return 0;
    case RowOptimizer::rowwise_adagrad: return 1;
    case RowOptimizer::adagrad: return dim;
    case RowOptimizer::adam: return 2 * dim;
    case RowOptimizer::rowwise_adam: return dim + 1;
  }
  return 0;
}

// Where rows live for good: mapped arrays and one bit per row that says whether an update has ever written it.
struct HomeRows {
  std::byte* weights;
  float* state;                // null when the optimizer keeps none
  std::uint64_t* touched;      // bit r % 64 of word r / 64
  bool read_soon = false;      // what update writes is read again at once: it goes through the caches, not past them
};

// Rows in slots: which slot a row has is for the caller to know.
struct SlotRows {
  std::byte* weights;
  float* state;  // null when the optimizer keeps none
};

// New values of a step's unique rows, computed elsewhere: compact, in the order of its WorkingRows.
struct ReadyRows {
  const std::byte* weights;
  const float* state;  // null when the optimizer keeps none
};

// A step's unique rows of one table, compact and ascending. `rows` carries the row number in its low 63 bits;
// bit 63 says that the row was untouched when it was captured.
struct WorkingRows {
  std::uint64_t* rows;
  std::byte* weights;
  float* state;
  const std::uint64_t* keys = nullptr;  // of a table with keys: whose the rows are; null where nobody asks
};
inline constexpr std::uint64_t fresh_bit = std::uint64_t{1} << 63;

// The occurrences of a table's unique rows in a batch (CSR). Occurrence j of unique row u (row_start[u] <= j <
// row_start[u + 1], in order of occurrence) takes its gradient from grad + gradient_offset[j], dim floats.
struct Occurrences {
  const std::uint32_t* row_start;        // [num_unique + 1]
  const std::uint32_t* gradient_offset;  // [num_lookups], elements
  const float* scale;                    // [num_lookups] or null: 1/length for mean, per-sample weights
};

// Hyperparameters of one row-optimizer step. `step` counts updates from 1; `gradient_scale` multiplies the summed
// gradient first (1 leaves it untouched: the multiplication is then skipped).
struct UpdateSpec {
  float learning_rate;
  float epsilon;
  float beta1;
  float beta2;
  float weight_decay;  // L2: gradient += weight_decay * weight
  float gradient_scale;
  std::uint64_t step;
  std::uint64_t
      rounding_seed;  // of the stochastic rounding of f16 and bf16 rows: f(rounding_seed, table, row, step, element)
  std::uint32_t pool_step = 0;  // the step that is under way, as records of keys have it
};

// Where bags take rows from and put their sums.
struct PoolSpec {
  const std::byte* weights;       // rows, `dim` elements of `dtype` each
  std::uint32_t dim;
  RowDtype dtype;
  const std::uint32_t* position;  // [num_lookups] of this feature: which of the rows
  const std::uint32_t* bag_start; // [num_bags + 1], indexes into position (and into scale)
  const float* scale;             // [num_lookups] per-sample weights, or null
  bool mean;                      // divide by the bag's length (an empty bag gives zeros)
  float* out;                     // bag b's sum goes to out + b * out_stride
  std::size_t out_stride;         // elements
  // Where the bags are the rest of longer ones, the starts of those: `out` has the sums of what came before, the rest is
  // added, and a mean divides by the whole length. Else null.
  const std::uint32_t* whole_bag_start = nullptr;  // [num_bags + 1]
};

// One set of kernels for each instruction set. All of them give the same bits.
struct Kernels {
  const char* name;  // "avx512", "avx2", "scalar"

  // Writes the initial weights of `row`; in a table with keys, of the key. State starts at zero.
  void (*initial_row)(const RowSpec& spec, std::uint64_t row, std::byte* weights);

  // Copies rows [begin, end) of `working.rows` (row numbers, fresh bit clear on entry) from home to working: weights
  // and state. An untouched row gets its initial value, and its fresh bit is set in working.rows.
  void (*capture)(const RowSpec& spec, const HomeRows& home, const WorkingRows& working, std::size_t begin,
                  std::size_t end);

  // Copies rows [begin, end) back home: the undo. A row whose fresh bit is set becomes untouched again instead: what it
  // has at home means nothing then.
  void (*restore)(const RowSpec& spec, const HomeRows& home, const WorkingRows& working, std::size_t begin,
                  std::size_t end);

  // Copies rows [begin, end) of `ready` home and marks fresh rows as touched, as update does. rows: of working.
  void (*put)(const RowSpec& spec, const HomeRows& home, const std::uint64_t* rows, const ReadyRows& ready,
              std::size_t begin, std::size_t end);

  // Copies rows [begin, end) of working: row u from slot slots[u], or to it. Weights and state; not row numbers.
  void (*gather)(const RowSpec& spec, const SlotRows& from, const std::uint32_t* slots, const WorkingRows& working,
                 std::size_t begin, std::size_t end);
  void (*scatter)(const RowSpec& spec, const SlotRows& to, const std::uint32_t* slots, const WorkingRows& working,
                  std::size_t begin, std::size_t end);

  // Pools bags [begin, end).
  void (*pool_bags)(const PoolSpec& spec, std::size_t begin, std::size_t end);

  // sums[u] = (accumulate ? sums[u] : 0) + the gradients of unique row u, for u in [begin, end). `position` says
  // which row of `sums` u is (null: u itself).
  void (*sum_gradients)(std::uint32_t dim, const Occurrences& occurrences, const float* grad,
                        const std::uint32_t* position, bool accumulate, float* sums, std::size_t begin,
                        std::size_t end);

  // Sum of the squares of `count` floats, by the fixed tree, in double.
  double (*sum_of_squares)(const float* values, std::size_t count);

  // Whether none of `count` floats is infinite or a NaN.
  bool (*all_finite)(const float* values, std::size_t count);

  // Which of rows [begin, end) is the first whose weights or state are not all finite; `end` where all are.
  std::size_t (*first_non_finite)(const RowSpec& spec, const ReadyRows& rows, std::size_t begin, std::size_t end);

  // new = f(old, gradient), for rows [begin, end) of working: reads working (never writes it), writes home weights
  // and state, marks fresh rows as touched. The gradient of row u is the sum of its occurrences' (fused). Where the table
  // has keys, working.keys says whose the rows are; their new records say so, too.
  // `forward[u]`, where `forward` is not null and the entry is not no_forward, is the position in `next` that gets
  // the new weights and state too (its fresh bit is cleared).
  // Returns the first row whose new values are not all finite, `end` where all are; and so do the others.
  std::size_t (*update)(const RowSpec& spec, const UpdateSpec& update, const HomeRows& home, const WorkingRows& working,
                        const Occurrences& occurrences, const float* grad, const std::uint32_t* forward,
                        const WorkingRows* next, std::size_t begin, std::size_t end);

  // The same from gradients that were summed before: row u's gradient is sums + u * dim.
  std::size_t (*update_from_sums)(const RowSpec& spec, const UpdateSpec& update, const HomeRows& home,
                                  const WorkingRows& working, const float* sums, const std::uint32_t* forward,
                                  const WorkingRows* next, std::size_t begin, std::size_t end);

  // The same two, but row u's new weights and state go to place u of `fresh`, compact as `working` is.
  std::size_t (*update_compact)(const RowSpec& spec, const UpdateSpec& update, const WorkingRows& working,
                                const Occurrences& occurrences, const float* grad, const SlotRows& fresh,
                                std::size_t begin, std::size_t end);
  std::size_t (*update_compact_from_sums)(const RowSpec& spec, const UpdateSpec& update, const WorkingRows& working,
                                          const float* sums, const SlotRows& fresh, std::size_t begin, std::size_t end);

  // d loss / d scale of the occurrences [begin, end) of a feature, in original order: dot(grad of the bag, row).
  // bag_of[j] is j's bag; grad of bag b starts at grad + b * grad_stride.
  void (*scale_gradients)(const PoolSpec& spec, const std::uint32_t* bag_of, const float* grad, std::size_t grad_stride,
                          float* out, std::size_t begin, std::size_t end);
};
inline constexpr std::uint32_t no_forward = 0xffffffffu;

// The best set that this CPU runs; `name` ("avx512", "avx2", "scalar") picks one, or gives null where it cannot run.
const Kernels& best_kernels();
const Kernels* kernels_named(const char* name);

}  // namespace holdfast
