#include "pool/pool.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/parallel.h"
#include "step/gradients.h"

namespace holdfast {

namespace {

void check_same_collection(const Plan& next, const Plan& now) {
  if (next.spec == now.spec) return;
  throw Error(ErrorKind::step,
              "batches of different collections share no rows: look the next one up ahead of a batch of its own");
}

}  // namespace

Pool::~Pool() {
  if (!is_inherited()) background_.stop();
}

void Pool::check_here() const {
  if (!is_inherited()) return;
  throw Error(ErrorKind::step,
              "the pool was opened by the process of which this one is a fork (a worker of a DataLoader?): only that "
              "one can use it; let workers give ids, and plan and look up in the process that trains");
}

void Pool::check_not_closed() const {
  check_here();
  if (last_) throw Error(ErrorKind::step, "the pool is closed");
}

void Pool::check_open() const {
  check_not_closed();
  const auto refuse = [](ErrorKind kind, const char* why) {
    throw Error(kind, std::string(why) + "; the pool takes no further step until it is opened again");
  };
  try {
    background_.check();
  } catch (const Error& failure) {
    constexpr ErrorKind kept[] = {ErrorKind::full, ErrorKind::read_only, ErrorKind::corrupted};
    const bool is_kept = std::ranges::find(kept, failure.kind()) != std::end(kept);
    refuse(is_kept ? failure.kind() : ErrorKind::failed, failure.what());
  } catch (const std::exception& failure) {
    refuse(ErrorKind::failed, failure.what());
  }
}

// What a verb refuses leaves everything as it was. After any other failure nobody knows what is there, in memory or on
// the medium. A failure in the background is the same error whoever meets it first.
void Pool::latch() {
  try {
    throw;
  } catch (const Error& error) {
    check_open();
    constexpr ErrorKind refusals[] = {ErrorKind::full, ErrorKind::batch_too_large, ErrorKind::corrupted,
                                      ErrorKind::step, ErrorKind::config};
    if (std::ranges::find(refusals, error.kind()) == std::end(refusals)) background_.fail(std::current_exception());
    throw;
  } catch (...) {
    check_open();
    background_.fail(std::current_exception());
    throw;
  }
}

std::optional<DenseState> Pool::dense_state() {
  check_not_closed();
  latching([&] { finish_pending(); });
  return dense_->newest(step_);
}

const RowTable& Pool::checked_table(std::size_t number) const {
  check_open();
  const std::size_t num_tables = backend_->tables().size();
  if (number < num_tables) return backend_->tables()[number];
  throw Error(ErrorKind::config, "table " + std::to_string(number) + " of " + std::to_string(num_tables));
}

// A plan may come from elsewhere: no row of another pool, or of another writer, is ever looked for here.
void Pool::check_rows(const Plan& plan) const {
  for (const CollectionSpec::Table& table : plan.spec->tables) {
    const auto& tables = backend_->tables();
    if (table.number < tables.size() && table.num_rows == tables[table.number].num_rows &&
        table.dim == tables[table.number].spec.dim && table.keys == keys_[table.number].directory) {
      continue;
    }
    throw Error(ErrorKind::config, "the plan was made by a collection of another pool, which has other tables");
  }
  if (shards()) require_own_rows(plan, backend_->tables());
}

// Without rows for all of its keys, its new ones could not be kept.
void Pool::check_trains(const Plan& plan) const {
  if (!plan.reads_only || !has_keys(plan)) return;
  throw Error(ErrorKind::step,
              "the batch was planned to be evaluated, without rows for its new keys: plan it to train");
}

void Pool::read_rows(const Plan& plan, const std::vector<WorkingRows>& rows) {
  read_with_keys(
      plan, backend_->tables(), rows,
      [&](const Plan& stored, const std::vector<WorkingRows>& of_stored) { backend_->read(stored, of_stored); },
      [&](std::uint32_t number) -> const LivingKeys& { return backend_->living_of(number); });
}

std::shared_ptr<KeyDirectory> Pool::keys(std::uint32_t number) {
  const RowTable& table = checked_table(number);
  if (!table.has_keys()) return nullptr;
  TableKeys& keys = keys_[number];
  if (keys.directory == nullptr) {
    latching([&] {
      keys = keys_of(
          table, step_,
          [&](std::uint64_t first, std::size_t count) { return backend_->touched_rows(number, first, count); },
          [&](const WorkingRows& rows, std::size_t count) { backend_->read_state(number, rows, count); });
    });
    backend_->leave_keys_behind(number, keys.ages.living());
  }
  return keys.directory;
}

void Pool::take_keys(const Pool& former) {
  for (std::size_t number = 0; number < former.keys_.size(); ++number) keys_.at(number) = former.keys_[number];
}

bool Pool::leaves_keys(const Plan& plan) const {
  return std::ranges::any_of(plan.spec->tables, [&](const CollectionSpec::Table& table) {
    return backend_->tables()[table.number].key_policy.leaves_keys();
  });
}

void Pool::leave_keys_behind() {
  for (std::uint32_t number = 0; number < keys_.size(); ++number) {
    TableKeys& keys = keys_[number];
    if (keys.directory == nullptr || !backend_->tables()[number].key_policy.leaves_keys()) continue;
    LivingKeys living = keys.ages.leave_behind(step_);
    backend_->leave_keys_behind(number, living);
    keys.directory->pass(step_, std::move(living));
  }
}

void Pool::expect_keys(const Plan& plan) {
  check_open();
  check_rows(plan);
  check_trains(plan);
  keep_keys(plan, KeyDirectory::steps_ahead / 2);
}

std::vector<std::uint64_t> Pool::oldest_keys(std::uint32_t table) const {
  checked_table(table);
  return backend_->living_of(table).oldest_steps();
}

// Of a batch that was planned long ago, keys may have been left behind since, and their rows be others'. steps: from now
// until it is captured, at most.
void Pool::keep_keys(const Plan& plan, std::uint64_t steps) {
  for (std::size_t t = 0; t < plan.tables.size(); ++t) {
    const CollectionSpec::Table& table = plan.spec->tables[t];
    const TablePlan& of_table = plan.tables[t];
    if (!backend_->tables()[table.number].key_policy.leaves_keys()) continue;
    if (step_ + steps <= of_table.planned_after + KeyDirectory::steps_ahead) continue;
    if (table.keys->keep(of_table.keys, of_table.rows, step_ + steps)) continue;
    throw Error(ErrorKind::step, "the batch was planned when step " + std::to_string(of_table.planned_after) +
                                     " was over, and keys of it have left their rows since: plan it again");
  }
}

// Of a step's update: `rows` are as the step found them.
void Pool::count_keys(const CollectionSpec& spec, const std::vector<WorkingRows>& rows,
                      const std::vector<std::uint64_t>& num_rows) {
  parallel_for(spec.tables.size(), [&](std::size_t t) {
    const std::uint32_t number = spec.tables[t].number;
    const RowTable& table = backend_->tables()[number];
    if (table.has_keys()) count_update(table, rows[t], num_rows[t], step_ + 1, keys_[number]);
  });
}

void Pool::count_keys(const Capture& capture) {
  std::vector<std::uint64_t> num_rows;
  for (const TablePlan& table : capture.plan->tables) num_rows.push_back(table.num_unique());
  count_keys(*capture.plan->spec, capture.tables, num_rows);
}

std::optional<KeyCounts> Pool::key_counts() const {
  if (last_) return last_->key_counts;
  std::optional<KeyCounts> counts;
  for (std::uint32_t number = 0; number < keys_.size(); ++number) {
    const KeyPolicy& policy = backend_->tables()[number].key_policy;
    if (!policy.leaves_keys() && policy.admission.admits_all()) continue;
    if (!counts) counts.emplace();
    const TableKeys& keys = keys_[number];
    counts->admitted += keys.admitted;
    counts->held_back += keys.held_back;
    // Those of the newest step that are spared count as left behind until they are updated again.
    counts->left_behind +=
        static_cast<std::uint64_t>(std::max<std::int64_t>(keys.ages.num_left() - keys.left_before, 0));
  }
  return counts;
}

void Pool::check_capture(const Capture& capture) const {
  if (capture.pool != number_) throw Error(ErrorKind::step, "the capture is another pool's, or of an earlier opening");
  if (capture.step == step_ + 1) return;
  throw Error(ErrorKind::step, "the capture is of step " + std::to_string(capture.step) + ", and step " +
                                   std::to_string(step_ + 1) +
                                   " is under way: capture (or call forward) again in each step");
}

void Pool::check_captures(const std::vector<RowGradients>& gradients) const {
  for (const RowGradients& part : gradients) check_capture(*part.capture);
}

void Pool::announce(std::shared_ptr<const Plan> plan) {
  check_open();
  check_rows(*plan);
  check_trains(*plan);
  latching([&] { backend_->announce(std::move(plan)); });
}

void Pool::keep_rows(std::uint32_t table, std::vector<std::uint64_t> rows) {
  check_open();
  const bool ascends = std::adjacent_find(rows.begin(), rows.end(), std::greater_equal<>()) == rows.end();
  if (table >= backend_->tables().size() || !ascends || backend_->tables()[table].first_foreign(rows)) {
    throw Error(ErrorKind::config, "rows to keep must ascend and lie in their table");
  }
  latching([&] { backend_->keep_rows(table, std::move(rows)); });
}

std::shared_ptr<Capture> Pool::capture(std::shared_ptr<const Plan> plan) {
  check_open();
  const Turn turn(is_changing_);
  if (updated_) {
    throw Error(ErrorKind::step,
                "step " + std::to_string(step_ + 1) +
                    " has updated its rows already: commit it before the next forward pass, or open the "
                    "pool again to take it back");
  }
  check_rows(*plan);
  check_trains(*plan);
  keep_keys(*plan, 1);
  return latching([&] {
    auto capture = backend_->capture(std::move(plan), step_ + 1);
    capture->pool = number_;
    return capture;
  });
}

bool Pool::capture_ahead(std::shared_ptr<const Plan> next) {
  check_open();
  const Turn turn(is_changing_);
  check_rows(*next);
  check_trains(*next);
  if (leaves_keys(*next)) return false;  // which of its keys are left behind, this step decides
  return !updated_ && latching([&] { return backend_->capture_ahead(std::move(next), step_ + 1); });
}

void Pool::lookup(const Capture& capture, float* out) const {
  check_open();
  check_capture(capture);
  DialService service(dial_.get(),
                      dial_ ? backend_->lookups_of(*capture.plan, num_lookups(*capture.plan)) : DialWork{});
  pool_features(*capture.plan, capture.tables, backend_->tables(), out);
  service.finish();
}

void Pool::evaluate(const Plan& plan, float* out) {
  check_not_closed();
  check_rows(plan);
  const auto read = [&](const std::vector<WorkingRows>& rows) { read_rows(plan, rows); };
  latching([&] { evaluator_.pool(plan, backend_->tables(), read, out); });
}

void Pool::lookup_ahead(const Plan& next, const Plan& now, float* out) {
  check_open();
  check_rows(next);
  check_same_collection(next, now);
  const auto read = [&](const Plan& plan, const std::vector<WorkingRows>& rows) { read_rows(plan, rows); };
  DialWork work;
  if (dial_) {
    std::vector<std::uint64_t> own = num_lookups(next);
    const std::vector<std::uint64_t> shared = num_shared_lookups(next, now);
    std::ranges::transform(own, shared, own.begin(), std::minus<>());
    work = backend_->lookups_of(next, own);
  }
  DialService service(dial_.get(), work);
  latching([&] { relaxed_lookup_.pool_own(next, now, backend_->tables(), read, out); });
  service.finish();
}

void Pool::lookup_rest(const Capture& capture, const Plan& now, float* out) {
  check_open();
  check_capture(capture);
  check_same_collection(*capture.plan, now);
  DialService service(dial_.get(),
                      dial_ ? backend_->lookups_of(*capture.plan, num_shared_lookups(*capture.plan, now)) : DialWork{});
  const auto living_of = [&](std::uint32_t number) -> const LivingKeys& { return backend_->living_of(number); };
  relaxed_lookup_.pool_shared(*capture.plan, now, capture.tables, backend_->tables(), living_of, out);
  service.finish();
}

void Pool::read_missing(const Admission& admission, std::span<std::byte> weights, std::span<float> state) {
  check_open();
  const Plan plan = admission.missing_rows();
  check_rows(plan);
  const auto table_of = [&](std::size_t t) -> const RowTable& {
    return backend_->tables().at(plan.spec->tables[t].number);
  };
  std::size_t weight_bytes = 0, state_floats = 0;
  for (std::size_t t = 0; t < plan.tables.size(); ++t) {
    weight_bytes += plan.tables[t].num_unique() * table_of(t).weight_bytes();
    state_floats += plan.tables[t].num_unique() * table_of(t).spec.state_floats;
  }
  if (weights.size() != weight_bytes || state.size() != state_floats) {
    throw Error(ErrorKind::config, "the " + std::to_string(plan.num_unique()) + " missing rows take " +
                                       std::to_string(weight_bytes) + " bytes of weights and " +
                                       std::to_string(state_floats) + " floats of state; the arrays have " +
                                       std::to_string(weights.size()) + " and " + std::to_string(state.size()));
  }
  std::vector<std::uint64_t> numbers(plan.num_unique());
  std::vector<WorkingRows> rows;
  WorkingRows next{numbers.data(), weights.data(), state.data()};
  for (std::size_t t = 0; t < plan.tables.size(); ++t) {
    const std::size_t num_rows = plan.tables[t].num_unique();
    rows.push_back(next);
    next.rows += num_rows;
    next.weights += num_rows * table_of(t).weight_bytes();
    next.state += num_rows * table_of(t).spec.state_floats;
  }
  latching([&] { backend_->read(plan, rows); });
}

void Pool::scale_gradients(const Capture& capture, std::size_t feature, const float* grad, float* out) const {
  check_open();
  check_capture(capture);
  if (feature >= capture.plan->features.size()) {
    throw Error(ErrorKind::config,
                "feature " + std::to_string(feature) + " of " + std::to_string(capture.plan->features.size()));
  }
  holdfast::scale_gradients(backend_->tables(), capture, feature, grad, out);
}

std::unique_ptr<SummedGradients> Pool::sum_gradients(std::vector<RowGradients> gradients) const {
  check_open();
  check_captures(gradients);
  return holdfast::sum_gradients(backend_->tables(), std::move(gradients));
}

// No row is overwritten twice in a step: the second update would start from the rows before the first.
void Pool::begin_update(const std::vector<const CollectionSpec*>& specs) {
  std::vector<bool> updated_tables = updated_tables_;
  for (const CollectionSpec* spec : specs) {
    for (const auto& table : spec->tables) {
      if (updated_tables[table.number]) {
        throw Error(ErrorKind::step, "the rows of table '" + backend_->tables()[table.number].name +
                                         "' were updated in this step already, by another collection or an earlier "
                                         "optimizer.step(); a commit would leave out what came after: open the pool "
                                         "again, let one collection read all features of the table, and step its "
                                         "optimizer once, after the last backward");
      }
      updated_tables[table.number] = true;
    }
  }
  updated_tables_ = std::move(updated_tables);
  backend_->begin_update();
}

void Pool::note_written(const std::optional<NamedRow>& non_finite) {
  if (!non_finite_) non_finite_ = non_finite;
}

void Pool::update(const std::vector<RowGradients>& gradients, const UpdateSpec& spec) {
  check_open();
  if (gradients.size() != 1) {
    update(*sum_gradients(gradients), spec);
    return;
  }
  const Turn turn(is_changing_);
  const RowGradients& only = gradients.front();
  check_capture(*only.capture);
  latching([&] {
    begin_update({only.capture->plan->spec.get()});
    note_written(backend_->update(only.capture, only.grad, of_this_step(spec)));
    backend_->finish_update(1);
    count_keys(*only.capture);
  });
  updated_ = true;
}

void Pool::update(const SummedGradients& gradients, const UpdateSpec& spec) {
  check_open();
  const Turn turn(is_changing_);
  for (const auto& capture : gradients.captures) check_capture(*capture);
  latching([&] {
    begin_update({gradients.spec.get()});
    note_written(backend_->update(gradients, of_this_step(spec)));
    backend_->finish_update(gradients.captures.size());
    count_keys(*gradients.spec, gradients.rows(), gradients.num_rows);
  });
  updated_ = true;
}

void Pool::put(const std::vector<RowsPart>& parts) {
  check_open();
  const Turn turn(is_changing_);
  for (const RowsPart& part : parts) check_capture(*part.capture);
  const std::vector<ReadyCapture> captures = ready_captures(backend_->tables(), parts);
  std::vector<const CollectionSpec*> specs;
  for (const ReadyCapture& ready : captures) specs.push_back(ready.capture->plan->spec.get());
  latching([&] {
    begin_update(specs);
    for (const ReadyCapture& ready : captures) note_written(backend_->put(ready.capture, ready.tables));
    backend_->finish_update(captures.size());
    for (const ReadyCapture& ready : captures) count_keys(*ready.capture);
  });
  updated_ = true;
}

bool Pool::log_is_low() const {
  check_here();
  return last_ ? last_->log_is_low : backend_->log_is_low();
}

std::uint64_t Pool::log_bytes() const { return last_ ? last_->log_bytes : backend_->log_bytes(); }

std::uint64_t Pool::log_bytes_free() const {
  check_here();
  return last_ ? last_->log_bytes_free : backend_->log_bytes_free();
}

std::optional<Traffic> Pool::traffic() const {
  check_here();
  return last_ ? last_->traffic : backend_->traffic();
}

std::optional<Dial::Counts> Pool::dial_counts() const {
  check_here();
  if (!dial_) return std::nullopt;
  return dial_->counts();
}

std::vector<StageSpans::Span> Pool::take_spans() {
  check_here();
  return spans_.take();
}

std::optional<RowMapping> Pool::mapping(std::uint32_t table) const {
  checked_table(table);
  return backend_->mapping(table);
}

std::uint64_t Pool::materialize(const Plan& plan) {
  check_open();
  check_rows(plan);
  return latching([&] { return backend_->materialize(plan); });
}

UpdateSpec Pool::of_this_step(UpdateSpec spec) const {
  spec.step = row_updates_ + 1;
  spec.rounding_seed = header().seed;
  spec.pool_step = static_cast<std::uint32_t>(step_ + 1);
  return spec;
}

}  // namespace holdfast
