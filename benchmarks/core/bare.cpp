// The strong baseline of the comparison: lookup and update from home, with no log, no commit and no dense slot; and
// logs that the caller waits for, for the ablation. A C interface, which benchmarks/ours loads with ctypes.
//
// - Same plan, same threads, same chunks and same arithmetic, operation by operation, as holdfast's kernels: rows come
//   out with the same bits, which the benchmark checks.
// - Lookup pools straight from home; update reads and writes home rows in place, each read once and written once.
// - Homes lie in files of the same medium, mapped and advised as a pool's are, and are written in full beforehand.
// - float32 rows of 16 or 32 elements, SGD and row-wise Adagrad, sum pooling, one feature a table: what is measured.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#define HOLDFAST_ISA bare
#if defined(__AVX512F__)
#define HOLDFAST_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define HOLDFAST_VECTOR_BYTES 32
#else
#define HOLDFAST_VECTOR_BYTES 16
#endif
#pragma GCC diagnostic ignored "-Wunused-function"  // the kernels that are not needed here
#include "base/checksum.h"
#include "base/parallel.h"
#include "kernels/kernels.inc.h"
#include "step/plan.h"

namespace holdfast {
namespace {

// A file of the medium, mapped whole. It keeps its name: the benchmark reads the rows back from it.
class Mapping {
 public:
  Mapping(const std::string& path, std::size_t bytes, int advice) : bytes_(bytes) {
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) fail(path);
    if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 || fallocate(fd, 0, 0, static_cast<off_t>(bytes)) != 0)
      fail(path);
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ::close(fd);
    if (memory == MAP_FAILED) fail(path);
    madvise(memory, bytes, advice);
    madvise(memory, bytes, MADV_HUGEPAGE);
    data_ = static_cast<std::byte*>(memory);
  }
  ~Mapping() { munmap(data_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  [[noreturn]] static void fail(const std::string& path) {
    throw std::runtime_error(path + ": " + std::strerror(errno));
  }
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

struct Chunk {
  std::size_t table;
  std::size_t begin;
  std::size_t end;
};

constexpr std::size_t bags_per_chunk = 256;         // as core/step/lookup.cpp
constexpr std::size_t row_chunk_bytes = 128 * 1024;  // as core/step/lookup.h
constexpr std::size_t lookup_distance_rows = 48;     // home rows come from DRAM, not from a compact working set

struct BareTable {
  std::unique_ptr<Mapping> weights;
  std::unique_ptr<Mapping> state;  // null for SGD
  TablePlan plan;

  float* home() const { return reinterpret_cast<float*>(weights->data()); }
  float* home_state() const { return state ? reinterpret_cast<float*>(state->data()) : nullptr; }
};

template <std::uint32_t Dim>
void pool_from_home(const float* home, const std::uint32_t* rows, const std::uint32_t* bag_start, std::size_t begin,
                    std::size_t end, float* out, std::size_t out_stride) {
  const bare::Shape<Dim> shape(Dim);
  const std::size_t last = bag_start[end];
  for (std::size_t bag = begin; bag < end; ++bag) {
    bare::Lanes sum[bare::Shape<Dim>::max_blocks];
    bare::for_each_block(shape, [&](std::uint32_t block, auto) { sum[block] = bare::zero(); });
    for (std::size_t j = bag_start[bag]; j < bag_start[bag + 1]; ++j) {
      if (j + lookup_distance_rows < last) {
        bare::prefetch<bare::Access::read>(home + std::size_t{rows[j + lookup_distance_rows]} * Dim, Dim * 4);
      }
      const float* const row = home + std::size_t{rows[j]} * Dim;
      bare::for_each_block(shape, [&](std::uint32_t block, auto extent) {
        sum[block] = sum[block] + bare::load(row + block * bare::num_lanes, extent);
      });
    }
    bare::for_each_block(shape, [&](std::uint32_t block, auto extent) {
      bare::store(out + bag * out_stride + block * bare::num_lanes, sum[block], extent);
    });
  }
}

// Groups of rows, as in core/kernels/update.inc.h: ask for the next group's home rows for writing, sum this group's
// gradients, then read, compute and write each row in place.
template <class Optimizer, std::uint32_t Dim>
void update_in_place(const BareTable& table, const UpdateSpec& update, const float* grad, std::size_t begin,
                     std::size_t end) {
  constexpr std::size_t group_rows = 64;  // 16 to 64 tried: kaggle 1.64, 1.39, 1.15 ms on one thread
  constexpr std::uint32_t blocks = Dim / bare::num_lanes;
  const bare::Shape<Dim> shape(Dim);
  const bare::StepConstants step(update);
  const TablePlan& plan = table.plan;
  const Occurrences occurrences{plan.row_start.data(), plan.gradient_offset.data(), nullptr};
  float* const home = table.home();
  float* const state = table.home_state();
  bare::Lanes gradients[group_rows * blocks];
  bare::Finiteness unread;
  const auto ask_for = [&](std::size_t first, std::size_t last) __attribute__((always_inline)) {
    for (std::size_t u = first; u < last; ++u) {
      const std::uint64_t row = plan.rows[u];
      bare::prefetch<bare::Access::write>(home + row * Dim, Dim * 4);
      if (state != nullptr) bare::prefetch_line<bare::Access::write>(state + row);
    }
  };
  std::size_t group_end = std::min(begin + group_rows, end);
  ask_for(begin, group_end);
  for (std::size_t group = begin; group < end;) {
    const std::size_t next_end = std::min(group_end + group_rows, end);
    ask_for(group_end, next_end);
    bare::sum_group<false>(shape, occurrences, grad, group, group_end, gradients);
    for (std::size_t u = group; u < group_end; ++u) {
      float* const weights = home + plan.rows[u] * Dim;
      float* const row_state = state == nullptr ? nullptr : state + plan.rows[u];
      const bare::RowUpdate<bare::Float32> row{.old_weights = weights,
                                               .old_state = row_state,
                                               .new_weights = weights,
                                               .new_state = row_state,
                                               .rounding = {0},
                                               .streams = false,
                                               .finiteness = unread};
      Optimizer::apply(shape, step, gradients + (u - group) * blocks, row);
    }
    group = group_end;
    group_end = next_end;
  }
}

// A log that the caller waits for. An entry: row numbers, weights and state of every chunk, each chunk with a checksum
// by the thread that copied it; then a header over all of it, whose checksum is the flag. Entries overwrite each other
// in a ring of `log_bytes`.
struct EntryHeader {
  std::uint64_t number;
  std::uint64_t bytes;
  std::uint32_t payload_crc;
  std::uint32_t crc;
};

class Bare {
 public:
  Bare(const std::string& directory, std::size_t num_tables, std::uint64_t num_rows, std::uint32_t dim,
       RowOptimizer optimizer, std::size_t batch_size, std::size_t log_bytes, std::size_t dense_bytes)
      : num_rows_(num_rows),
        dim_(dim),
        optimizer_(optimizer),
        batch_size_(batch_size),
        log_(directory + "/log", log_bytes, MADV_SEQUENTIAL),
        dense_log_(directory + "/dense", 2 * (dense_bytes + 4096), MADV_SEQUENTIAL) {
    if (dim != 16 && dim != 32) throw std::invalid_argument("rows have 16 or 32 elements");
    if (optimizer != RowOptimizer::sgd && optimizer != RowOptimizer::rowwise_adagrad) {
      throw std::invalid_argument("SGD or row-wise Adagrad");
    }
    tables_.resize(num_tables);
    for (std::size_t t = 0; t < num_tables; ++t) {
      char name[32];
      std::snprintf(name, sizeof name, "/table-%04zu", t);
      BareTable& table = tables_[t];
      table.weights = std::make_unique<Mapping>(directory + name + ".weights", num_rows * dim * 4, MADV_RANDOM);
      if (state_floats() != 0) {
        table.state = std::make_unique<Mapping>(directory + name + ".state", num_rows * 4, MADV_RANDOM);
        std::memset(table.state->data(), 0, num_rows * 4);
      }
    }
    touched_.assign(num_rows / 64 + 1, ~std::uint64_t{0});
    std::memset(log_.data(), 0, log_.bytes());
    std::memset(dense_log_.data(), 0, dense_log_.bytes());
  }

  void write_table(std::size_t t, const float* weights) {
    std::memcpy(tables_[t].weights->data(), weights, tables_[t].weights->bytes());
  }

  // ids, offsets: as peers.batches.Batch has them.
  void plan(const std::int64_t* ids, const std::int64_t* offsets) {
    parallel_for(tables_.size(), [&](std::size_t t) {
      const FeatureInput feature{{ids, offsets + t * batch_size_, true, batch_size_},
                                 nullptr,
                                 static_cast<std::uint32_t>(t) * dim_,
                                 output_width()};
      plan_table({&feature, 1}, num_rows_, Pooling::sum, tables_[t].plan);
    });
    row_chunks_.clear();
    const std::size_t chunk_rows = std::max<std::size_t>(64, row_chunk_bytes / (std::size_t{dim_} * 4));
    for (std::size_t t = 0; t < tables_.size(); ++t) {
      const std::size_t rows = tables_[t].plan.num_unique();
      for (std::size_t u = 0; u < rows; u += chunk_rows) row_chunks_.push_back({t, u, std::min(u + chunk_rows, rows)});
    }
  }

  // rows: the planned batch's ids as uint32, feature by feature.
  void lookup(const std::uint32_t* rows, float* out) const {
    const std::size_t chunks = (batch_size_ + bags_per_chunk - 1) / bags_per_chunk;
    std::vector<std::size_t> first(tables_.size(), 0);
    for (std::size_t t = 1; t < tables_.size(); ++t) first[t] = first[t - 1] + tables_[t - 1].plan.num_lookups();
    parallel_for(tables_.size() * chunks, [&](std::size_t i) {
      const std::size_t t = i / chunks;
      const std::size_t begin = i % chunks * bags_per_chunk;
      const auto pool = dim_ == 16 ? pool_from_home<16> : pool_from_home<32>;
      const DefaultFloatMode mode;
      pool(tables_[t].home(), rows + first[t], tables_[t].plan.bag_start.data(), begin,
           std::min(begin + bags_per_chunk, batch_size_), out + t * dim_, output_width());
    });
  }

  void update(const float* grad, float learning_rate, float epsilon) {
    UpdateSpec spec{};
    spec.learning_rate = learning_rate;
    spec.epsilon = epsilon;
    spec.gradient_scale = 1;
    spec.step = ++num_updates_;
    const bool sgd = optimizer_ == RowOptimizer::sgd;
    const auto body = dim_ == 16 ? (sgd ? update_in_place<bare::Sgd, 16> : update_in_place<bare::RowwiseAdagrad, 16>)
                                 : (sgd ? update_in_place<bare::Sgd, 32> : update_in_place<bare::RowwiseAdagrad, 32>);
    parallel_for(row_chunks_.size(), [&](std::size_t i) {
      const Chunk& chunk = row_chunks_[i];
      const DefaultFloatMode mode;
      body(tables_[chunk.table], spec, grad, chunk.begin, chunk.end);
    });
  }

  // Copies the planned rows with their state as they are now; returns when the entry is complete. Gives its bytes.
  std::size_t log_rows() {
    const std::size_t row_bytes = 8 + std::size_t{dim_} * 4 + state_floats() * 4;
    std::vector<std::size_t> offsets;
    std::size_t bytes = line_up(sizeof(EntryHeader) + row_chunks_.size() * sizeof(std::uint32_t));
    const std::size_t crcs_offset = sizeof(EntryHeader);
    for (const Chunk& chunk : row_chunks_) {
      offsets.push_back(bytes);
      bytes += line_up((chunk.end - chunk.begin) * row_bytes) + 3 * 64;
    }
    if (bytes > log_.bytes()) throw std::length_error("the log is smaller than one batch's rows");
    if (log_head_ + bytes > log_.bytes()) log_head_ = 0;
    std::byte* const entry = log_.data() + log_head_;
    auto* const crcs = reinterpret_cast<std::uint32_t*>(entry + crcs_offset);
    std::memset(entry, 0, sizeof(EntryHeader));
    const Kernels& kernels = best_kernels();
    parallel_for(row_chunks_.size(), [&](std::size_t i) {
      const Chunk& chunk = row_chunks_[i];
      const BareTable& table = tables_[chunk.table];
      const std::size_t rows = chunk.end - chunk.begin;
      std::byte* const data = entry + offsets[i];
      const std::size_t weights_offset = line_up(rows * 8);
      const std::size_t state_offset = weights_offset + line_up(rows * dim_ * 4);
      const std::size_t end = state_offset + rows * state_floats() * 4;
      const WorkingRows working{reinterpret_cast<std::uint64_t*>(data), data + weights_offset,
                                reinterpret_cast<float*>(data + state_offset)};
      std::memcpy(working.rows, table.plan.rows.data() + chunk.begin, rows * 8);
      const RowSpec spec{dim_, RowDtype::f32, optimizer_, state_floats(), 0, 0, 0, 0};
      const HomeRows home{table.weights->data(), table.home_state(), touched_.data()};
      kernels.capture(spec, home, working, 0, rows);
      crcs[i] = crc32c(0, data, end);
    });
    seal(entry, bytes, crc32c(0, crcs, row_chunks_.size() * sizeof(std::uint32_t)));
    log_head_ += bytes;
    return bytes;
  }

  // Copies the dense state to one of two slots by turns, with a checksum; returns when it is complete.
  void log_dense(std::size_t count, const void* const* data, const std::uint64_t* bytes) {
    constexpr std::size_t part_bytes = 256 * 1024;
    struct Part {
      const std::byte* from;
      std::size_t offset;
      std::size_t bytes;
    };
    std::vector<Part> parts;
    std::size_t offset = 0;
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t at = 0; at < bytes[i]; at += part_bytes) {
        parts.push_back({static_cast<const std::byte*>(data[i]) + at, offset + at,
                         std::min<std::size_t>(part_bytes, bytes[i] - at)});
      }
      offset += line_up(bytes[i]);
    }
    const std::size_t slot_bytes = dense_log_.bytes() / 2;
    if (offset + 4096 > slot_bytes) throw std::length_error("the dense state is larger than its slot");
    std::byte* const slot = dense_log_.data() + slot_bytes * (dense_number_++ % 2);
    std::memset(slot, 0, sizeof(EntryHeader));
    std::vector<std::uint32_t> crcs(parts.size());
    parallel_for(parts.size(), [&](std::size_t i) {
      std::byte* const to = slot + 4096 + parts[i].offset;
      std::memcpy(to, parts[i].from, parts[i].bytes);
      crcs[i] = crc32c(0, to, parts[i].bytes);
    });
    seal(slot, offset, crc32c(0, crcs.data(), crcs.size() * sizeof(std::uint32_t)));
  }

  std::size_t num_unique() const {
    std::size_t rows = 0;
    for (const BareTable& table : tables_) rows += table.plan.num_unique();
    return rows;
  }

 private:
  static std::size_t line_up(std::size_t bytes) { return (bytes + 63) / 64 * 64; }
  std::uint32_t state_floats() const { return state_floats_of(optimizer_, dim_); }
  std::uint32_t output_width() const { return static_cast<std::uint32_t>(tables_.size()) * dim_; }

  void seal(std::byte* entry, std::size_t bytes, std::uint32_t payload_crc) {
    EntryHeader header{++entries_, bytes, payload_crc, 0};
    header.crc = crc32c(0, &header, offsetof(EntryHeader, crc));
    __atomic_signal_fence(__ATOMIC_SEQ_CST);  // level `process`: stores of one thread survive in program order
    std::memcpy(entry, &header, sizeof header);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
  }

  std::uint64_t num_rows_;
  std::uint32_t dim_;
  RowOptimizer optimizer_;
  std::size_t batch_size_;
  std::vector<BareTable> tables_;
  std::vector<Chunk> row_chunks_;
  std::vector<std::uint64_t> touched_;
  std::uint64_t num_updates_ = 0;
  Mapping log_;
  Mapping dense_log_;
  std::size_t log_head_ = 0;
  std::uint64_t dense_number_ = 0;
  std::uint64_t entries_ = 0;
};

thread_local std::string last_error;

// Runs `body`; what it throws becomes bare_error() and `failed`.
template <class Result, class Body>
Result guarded(Result failed, const Body& body) {
  try {
    last_error.clear();
    return body();
  } catch (const std::exception& error) {
    last_error = error.what();
    return failed;
  }
}

}  // namespace
}  // namespace holdfast

#define BARE_API extern "C" __attribute__((visibility("default")))

using holdfast::Bare;

// What went wrong in this thread's last call; empty if nothing did.
BARE_API const char* bare_error() { return holdfast::last_error.c_str(); }

BARE_API Bare* bare_open(const char* directory, std::uint64_t num_tables, std::uint64_t num_rows, std::uint32_t dim,
                         std::uint32_t optimizer, std::uint64_t batch_size, std::uint64_t log_bytes,
                         std::uint64_t dense_bytes, int num_threads) {
  return holdfast::guarded<Bare*>(nullptr, [&] {
    holdfast::set_num_threads(num_threads);
    return new Bare(directory, num_tables, num_rows, dim, static_cast<holdfast::RowOptimizer>(optimizer), batch_size,
                    log_bytes, dense_bytes);
  });
}
BARE_API void bare_close(Bare* bare) { delete bare; }

BARE_API int bare_write_table(Bare* bare, std::uint64_t table, const float* weights) {
  return holdfast::guarded(-1, [&] { return bare->write_table(table, weights), 0; });
}
BARE_API int bare_plan(Bare* bare, const std::int64_t* ids, const std::int64_t* offsets) {
  return holdfast::guarded(-1, [&] { return bare->plan(ids, offsets), 0; });
}
BARE_API int bare_lookup(Bare* bare, const std::uint32_t* rows, float* out) {
  return holdfast::guarded(-1, [&] { return bare->lookup(rows, out), 0; });
}
BARE_API int bare_update(Bare* bare, const float* grad, float learning_rate, float epsilon) {
  return holdfast::guarded(-1, [&] { return bare->update(grad, learning_rate, epsilon), 0; });
}
BARE_API std::uint64_t bare_log_rows(Bare* bare) {
  return holdfast::guarded<std::uint64_t>(0, [&] { return bare->log_rows(); });
}
BARE_API int bare_log_dense(Bare* bare, std::uint64_t count, const void* const* data, const std::uint64_t* bytes) {
  return holdfast::guarded(-1, [&] { return bare->log_dense(count, data, bytes), 0; });
}
BARE_API std::uint64_t bare_num_unique(Bare* bare) { return bare->num_unique(); }
