// A small pool, of two tables where nothing else is said, and a run over it whose ids and gradients are functions of
// the step.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "pool/pool.h"
#include "readers/reader.h"
#include "step/gradients.h"
#include "temporary_directory.h"

namespace holdfast {

inline format::TableRecord table_record(const char* name, std::uint64_t rows, std::uint32_t dim,
                                        RowOptimizer optimizer) {
  format::TableRecord record{};
  record.num_embeddings = rows;
  record.embedding_dim = dim;
  record.optimizer = static_cast<std::uint32_t>(optimizer);
  record.state_floats = state_floats_of(optimizer, dim);
  record.init_low = -0.1f;
  record.init_high = 0.1f;
  std::strncpy(record.name, name, sizeof(record.name) - 1);
  return record;
}

// What a pool holds, and how much of it a batch takes: each table has a feature of its own.
struct Script {
  std::vector<format::TableRecord> tables = {table_record("a", 300, 8, RowOptimizer::rowwise_adagrad),
                                             table_record("b", 40, 4, RowOptimizer::adam)};
  std::size_t num_bags = 16;
  std::size_t ids_per_bag = 3;
  bool has_dense = true;
  bool row_checksums = false;
  std::uint64_t num_passes = 1;  // forward passes of a step, each of a batch of its own
};

inline void make_pool(const std::string& path, std::uint64_t log_bytes, format::Store store = format::Store::in_place,
                      const Script& script = {}) {
  Pool::create(path, {1, log_bytes, store, script.row_checksums}, script.tables);
}

// Where a step's new rows are computed: by the pool's update, beside it, to be put, or in odd steps there.
enum class Updates { by_pool, elsewhere, by_turns };

// Trains scripted steps: ids and gradients are functions of the step.
class Run {
 public:
  Run(const std::string& path, const OpenOptions& options, Script of_run = {}, std::unique_ptr<Medium> medium = nullptr,
      BlockWatcher* watcher = nullptr)
      : pool(path, options, std::move(medium), watcher), script(std::move(of_run)) {
    auto spec = std::make_shared<CollectionSpec>();
    for (std::uint32_t t = 0; t < script.tables.size(); ++t) {
      const format::TableRecord& table = script.tables[t];
      spec->tables.push_back({t, table.num_embeddings, table.embedding_dim, t % 2 == 0 ? Pooling::sum : Pooling::mean});
      spec->features.push_back({t, spec->output_width, table.name});
      spec->output_width += table.embedding_dim;
    }
    output_width_ = spec->output_width;
    plans_ = std::make_shared<PlanPool>(spec);
  }

  std::shared_ptr<Plan> plan(std::uint64_t step) {
    std::mt19937_64 random(step);
    std::vector<std::int64_t> ids;
    std::vector<std::int64_t> offsets = {0};
    std::vector<std::uint32_t> features;
    for (const format::TableRecord& table : script.tables) {
      for (std::size_t i = 0; i < script.num_bags * script.ids_per_bag; ++i) {
        ids.push_back(static_cast<std::int64_t>(random() % table.num_embeddings));
        if (ids.size() % script.ids_per_bag == 0) offsets.push_back(static_cast<std::int64_t>(ids.size()));
      }
      features.push_back(static_cast<std::uint32_t>(features.size()));
    }
    auto plan = plans_->take();
    plan_batch({ids.data(), offsets.data(), true, nullptr, script.num_bags, features}, true, *plan);
    return plan;
  }

  static UpdateSpec hyperparameters() {
    UpdateSpec spec{};
    spec.learning_rate = 0.1f;
    spec.epsilon = 1e-6f;
    spec.beta1 = 0.9f;
    spec.beta2 = 0.99f;
    spec.gradient_scale = 1;
    return spec;
  }

  // A step of which the coming `window` batches are announced.
  void step_ahead(std::uint64_t window) {
    const std::uint64_t number = pool.step() + 1;
    while (announced_.size() < window) {
      announced_.push_back(plan(number + announced_.size()));
      pool.announce(announced_.back());
    }
    if (window != 0) {
      next_ = announced_.front();
      announced_.pop_front();
    }
    step(false);
  }

  void step(bool ahead, bool commit = true) {
    const std::uint64_t number = pool.step() + 1;
    auto now = next_ ? std::exchange(next_, nullptr) : plan(number);
    if (reads_in_place) {
      pool.materialize(*now);
      after_verb();
    }
    const auto capture = pool.capture(now);
    after_verb();
    std::vector<std::shared_ptr<const Capture>> others;
    for (std::uint64_t pass = 1; pass < script.num_passes; ++pass) {
      others.push_back(pool.capture(plan(number + 1000 * pass)));
      after_verb();
    }
    const auto gradient_of = [&](const Capture& of) {
      std::vector<float> out(script.num_bags * output_width_);
      pool.lookup(of, out.data());
      for (std::size_t i = 0; i < out.size(); ++i) out[i] = out[i] * 0.5f + static_cast<float>(i % 7) * 0.01f;
      return out;
    };
    std::vector<std::vector<float>> gradients = {gradient_of(*capture)};
    std::vector<RowGradients> of_all = {{capture, gradients.front().data()}};
    for (const auto& other : others) {
      gradients.push_back(gradient_of(*other));
      of_all.push_back({other, gradients.back().data()});
    }
    if (ahead) {
      next_ = plan(number + 1);
      pool.capture_ahead(next_);
      after_verb();
    }
    const bool puts = updates == Updates::elsewhere || (updates == Updates::by_turns && number % 2 == 1);
    if (puts) {
      put(capture, gradients.front().data());
    } else {
      pool.update(of_all, hyperparameters());
    }
    after_verb();
    if (commit) commit_step(number);
  }

  // After a step that threw: the next one plans its batch itself.
  void forget_plans() {
    next_ = nullptr;
    announced_.clear();
  }

  void commit_step(std::uint64_t number) {
    with_dense(number, [&](const Pool::Dense& state) {
      pool.commit(number * script.num_bags, script.has_dense && pool.dense_due() ? &state : nullptr);
    });
    after_verb();
  }
  // The dense state that the run begins with.
  void write_dense() {
    with_dense(pool.step(), [&](const Pool::Dense& state) { pool.write_dense(state); });
    after_verb();
  }

  // New rows of one of a capture's tables, computed as update does.
  struct NewRows {
    std::vector<std::byte> weights;
    std::vector<float> state;
  };
  NewRows new_rows(const Capture& capture, std::uint32_t t, const float* grad) const {
    const RowTable table =
        row_tables_of(pool.table_records(), pool.header().seed)[capture.plan->spec->tables[t].number];
    const TablePlan& plan = capture.plan->tables[t];
    UpdateSpec spec = hyperparameters();
    spec.step = pool.row_updates() + 1;
    spec.rounding_seed = pool.header().seed;
    NewRows rows{std::vector<std::byte>(plan.num_unique() * table.weight_bytes()),
                 std::vector<float>(plan.num_unique() * table.spec.state_floats)};
    best_kernels().update_compact(table.spec, spec, capture.tables[t], occurrences_of(plan), grad,
                                  {rows.weights.data(), rows.state.data()}, 0, plan.num_unique());
    return rows;
  }
  // Puts every table's new rows as a part of its own, the last table's first.
  void put(const std::shared_ptr<const Capture>& capture, const float* grad) {
    std::deque<NewRows> rows;
    std::vector<RowsPart> parts;
    for (auto t = static_cast<std::uint32_t>(script.tables.size()); t-- != 0;) {
      rows.push_back(new_rows(*capture, t, grad));
      parts.push_back({capture, {t}, rows.back().weights, rows.back().state});
    }
    pool.put(parts);
  }

  Pool pool;
  const Script script;
  Updates updates = Updates::by_pool;
  bool reads_in_place = false;  // somebody does, so that rows must be where they lie
  std::function<void()> after_verb = [] {};

 private:
  static void with_dense(std::uint64_t number, const std::function<void(const Pool::Dense&)>& use) {
    const std::string structure = "{\"step\": " + std::to_string(number) + "}";
    const std::vector<double> tensor(500, static_cast<double>(number));
    const DenseTensor dense{tensor.data(), tensor.size() * sizeof(double), 0};
    use({{reinterpret_cast<const std::byte*>(structure.data()), structure.size()},
         {&dense, 1},
         tensor.size() * sizeof(double)});
  }

  std::size_t output_width_ = 0;
  std::shared_ptr<PlanPool> plans_;
  std::shared_ptr<Plan> next_;
  std::deque<std::shared_ptr<Plan>> announced_;
};

inline std::vector<std::byte> rows_of(const Reader& reader) {
  std::vector<std::byte> all;
  for (std::size_t t = 0; t < reader.tables().size(); ++t) {
    const auto& table = reader.tables()[t];
    std::vector<std::byte> weights(table.num_rows * table.weight_bytes());
    std::vector<float> state(table.num_rows * table.spec.state_floats);
    reader.read_rows(t, 0, table.num_rows, weights.data(), state.data());
    all.insert(all.end(), weights.begin(), weights.end());
    const auto* bytes = reinterpret_cast<const std::byte*>(state.data());
    all.insert(all.end(), bytes, bytes + state.size() * 4);
  }
  return all;
}

inline std::vector<std::byte> rows_of_pool(const std::string& path) { return rows_of(Reader(path)); }

inline std::vector<std::byte> reference(std::uint64_t steps, const Script& script = {}) {
  const TemporaryDirectory directory;
  make_pool(directory.path(), 1 << 20, format::Store::in_place, script);
  Run run(directory.path(), {}, script);
  while (run.pool.step() < steps) run.step(false);
  run.pool.close();
  return rows_of_pool(directory.path());
}

}  // namespace holdfast
