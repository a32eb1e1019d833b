#include "pool.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <iterator>
#include <random>
#include <utility>

#include "error.h"
#include "gradients.h"
#include "in_place_backend.h"
#include "log_backend.h"
#include "pool_files.h"

namespace holdfast {

using format::CommitRecord;
using format::EpochRecord;

// An advisory lock on the file `lock`: it goes with the process, however that ends.
class Pool::Lock {
 public:
  explicit Lock(const std::string& directory) : path_(directory + "/lock") {
    struct stat status{};
    if (::stat(directory.c_str(), &status) != 0) throw Error(ErrorKind::not_found, "no directory " + directory);
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd_ < 0) {
      const int error = errno;
      const bool denied = error == EROFS || error == EACCES || error == EPERM;
      throw Error(denied ? ErrorKind::read_only : ErrorKind::failed, "locking " + path_ + ": " + std::strerror(error));
    }
    if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      char holder[32] = {};
      const ssize_t got = ::pread(fd_, holder, sizeof(holder) - 1, 0);
      ::close(fd_);
      throw Error(ErrorKind::busy, directory + " is open for writing in process " +
                                       (got > 0 ? std::string(holder) : std::string("(unknown)")) +
                                       "; wait for it, or stop it");
    }
    const std::string self = std::to_string(::getpid());
    if (::ftruncate(fd_, 0) != 0 || ::pwrite(fd_, self.data(), self.size(), 0) < 0) {
      // Only the message of whoever finds the pool busy suffers.
    }
  }
  ~Lock() { ::close(fd_); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  // Files whose names are gone are written as before, and never found again. So it is where the pool was removed, and
  // where its lock was: whoever opens it next finds it unlocked. A pool that was only moved keeps its lock.
  void check() const {
    struct stat status{};
    if (::fstat(fd_, &status) == 0 && status.st_nlink != 0) return;
    throw Error(ErrorKind::failed, path_ +
                                       " was removed while the pool was open: if its other files are gone, too, "
                                       "restore a copy; if not, nothing of it is lost");
  }

 private:
  std::string path_;
  int fd_;
};

namespace {

// The shards that are owned; throws config where they, or the tables', make no sense.
ShardSet checked_shards(const std::optional<Sharding>& of_pool, const std::vector<format::TableRecord>& tables) {
  if (!of_pool) {
    for (const format::TableRecord& table : tables) {
      if (table.table_shards == 0 && table.first_shard == 0) continue;
      throw Error(ErrorKind::config, "table '" + std::string(table.name) + "' has shards, the pool has none");
    }
    return {};
  }
  const Sharding& sharding = *of_pool;
  if (!std::has_single_bit(sharding.num_shards) || sharding.num_shards > max_shards) {
    throw Error(ErrorKind::config, std::to_string(sharding.num_shards) + " shards: give a power of two up to " +
                                       std::to_string(max_shards));
  }
  ShardSet owned;
  for (const std::uint32_t shard : sharding.owned) {
    if (shard >= sharding.num_shards) {
      throw Error(ErrorKind::config, "shard " + std::to_string(shard) + " of " + std::to_string(sharding.num_shards));
    }
    owned.set(shard);
  }
  for (const format::TableRecord& table : tables) {
    const bool is_whole = table.table_shards == 1 && table.first_shard < sharding.num_shards;
    const bool is_split = table.table_shards == sharding.num_shards && table.first_shard < sharding.num_shards;
    if (is_whole || is_split) continue;
    throw Error(ErrorKind::config, "table '" + std::string(table.name) +
                                       "' must be in one shard or be split over all " +
                                       std::to_string(sharding.num_shards));
  }
  return owned;
}

void check_same_collection(const Plan& next, const Plan& now) {
  if (next.spec == now.spec) return;
  throw Error(ErrorKind::step,
              "batches of different collections share no rows: look the next one up ahead of a batch of its own");
}

}  // namespace

void Pool::create(const std::string& directory, const PoolOptions& options, std::vector<format::TableRecord> tables) {
  const Lock lock(directory);
  const bool in_place = options.store == format::Store::in_place;
  const auto medium = open_mapped_medium(directory, in_place ? Flushing::mapped : Flushing::synced);
  if (medium->exists(superblock_name)) throw Error(ErrorKind::exists, directory + " already holds a pool");
  const std::size_t log_bytes = format::align_up(std::max<std::uint64_t>(options.log_bytes, 1), format::block_bytes);
  const ShardSet owned = checked_shards(options.sharding, tables);
  std::optional<format::ShardsRecord> shards;
  if (options.sharding) shards = shards_record(owned, options.sharding->group_uuid);
  const std::vector<RowTable> row_tables = row_tables_of(tables, options.seed, owned);
  const bool adopt = options.sharding && options.sharding->adopt;
  if (in_place) {
    InPlaceBackend::create(*medium, row_tables, log_bytes, options.row_checksums, adopt);
  } else {
    LogBackend::create(directory, row_tables, log_bytes, options.begin, adopt);
  }
  for (const char* name : dense_names) {
    medium->create(name, format::block_bytes, Access::sequential)->allocate(0, format::block_bytes);
  }
  format::PoolHeader header{};
  header.level = static_cast<std::uint32_t>(medium->level());
  std::random_device random;
  for (std::size_t i = 0; i < sizeof(header.uuid); i += 4) {
    const std::uint32_t word = random();
    std::memcpy(header.uuid + i, &word, 4);
  }
  header.seed = options.seed;
  header.store = static_cast<std::uint32_t>(options.store);
  header.log_bytes = log_bytes;
  header.num_shards = options.sharding ? options.sharding->num_shards : 1;
  header.num_writers = 1;
  header.row_checksums = in_place && options.row_checksums ? 1 : 0;
  header.created_unix_ns = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count());
  EpochRecord epoch{};
  epoch.clean = 1;
  epoch.has_steps = 1;
  epoch.step = options.begin.step;
  epoch.dense_step = format::no_position;
  const auto boot = current_boot_id();
  std::copy(boot.begin(), boot.end(), epoch.boot_id);
  CommitRecord commit{};
  commit.step = options.begin.step;
  commit.cursor = options.begin.cursor;
  commit.row_updates = options.begin.row_updates;
  commit.last_record = format::no_position;
  if (in_place) commit.last_record_step = options.begin.step;
  Superblock::write(*medium, header, std::move(tables), shards, epoch, commit);
}

Pool::Pool(const std::string& directory, const OpenOptions& options, std::unique_ptr<Medium> medium,
           BlockWatcher* watcher)
    : lock_(std::make_unique<Lock>(directory)), medium_(medium ? std::move(medium) : open_pool_medium(directory)) {
  if (options.dense_interval == 0) throw Error(ErrorKind::config, "dense_interval must be at least 1");
  const auto started = std::chrono::steady_clock::now();
  dense_interval_ = options.dense_interval;
  in_group_ = options.group.has_value();
  superblock_ = std::make_unique<Superblock>(*medium_, true);
  if (const auto reason = superblock_->reason_to_distrust(); reason && !options.trust_after_reboot) {
    throw Error(ErrorKind::untrusted, directory + " " + *reason +
                                          ". Restore a copy, or open it with trust_after_reboot if you know that "
                                          "everything had been written back");
  }
  make_backend(directory, options, watcher);
  updated_tables_.resize(backend_->tables().size());
  dense_ = std::make_unique<DenseSlots>(*medium_, open_dense_files(*medium_, true));
  dense_->allocate();
  recover(options);
  report_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

Pool::~Pool() { background_.stop(); }

void Pool::make_backend(const std::string& directory, const OpenOptions& options, BlockWatcher* watcher) {
  if (header().store == static_cast<std::uint32_t>(format::Store::in_place)) {
    backend_ = std::make_unique<InPlaceBackend>(
        *medium_, *superblock_, background_,
        InPlaceBackend::Options{dense_interval_, options.grow_log, in_group_, [this] { finish_pending(); }});
    return;
  }
  // A dense state never becomes durable before the rows of its step.
  const auto finish_dense = [this](std::uint64_t step) {
    if (!dense_->pending() || dense_->pending_step() >= step) return;
    dense_->finish();
    note_durable(*dense_->newest_step());
  };
  backend_ = std::make_unique<LogBackend>(directory, *superblock_, background_,
                                          LogBackend::Options{options.scratchpad_bytes, finish_dense, watcher});
}

void Pool::recover(const OpenOptions& options) {
  const EpochRecord opened = superblock_->epoch();
  RecoveryPlan plan = plan_recovery(*superblock_, backend_->newest(), *dense_, options.recovery);
  if (options.group) follow_group(*options.group, plan);
  const StepMark& target = plan.target;
  EpochRecord epoch{};
  const std::uint64_t before = superblock_->commit().epoch;
  epoch.epoch = std::max(opened.epoch, before) + 1;
  backend_->check_roll_back(epoch.epoch, target.step);
  if (options.group) options.group->ready();

  // What a process left that died is in the files, but a power cut may still take it back: not once something rests on
  // it.
  superblock_->persist_records();
  dense_->persist_valid();
  // From here on the pool is written. The epoch comes first; everything after it can be done again from the start.
  const auto boot = current_boot_id();
  std::copy(boot.begin(), boot.end(), epoch.boot_id);
  epoch.process_id = static_cast<std::uint32_t>(::getpid());
  superblock_->write_epoch(epoch);
  if (in_group_) dense_->forget_after(target.step);
  dense_->clear_torn();
  const RolledBack undone = backend_->roll_back(epoch.epoch, target.step);
  if (plan.dense && plan.dense->header.step < target.step) {
    // Relaxed: the older dense state becomes the dense state of the rows' step, before anything is based on it.
    const DenseTensor tensors{plan.dense->tensors.data(), plan.dense->tensors.size(), 0};
    dense_->stage(before, target, plan.dense->structure, {&tensors, 1}, plan.dense->tensors.size());
    dense_->finish();
  }
  backend_->start(epoch.epoch, target);

  step_ = target.step;
  cursor_ = target.cursor;
  row_updates_ = target.row_updates;
  has_dense_ = plan.dense.has_value();
  staged_step_ = target.step;
  durable_step_ = target.step;
  rows_durable_step_ = target.step;
  report_.clean = opened.clean != 0;
  report_.epoch = epoch.epoch;
  report_.rows_step = plan.rows.step;
  if (plan.dense) report_.dense_step = plan.dense->header.step;
  report_.step = target.step;
  report_.cursor = target.cursor;
  report_.records_undone = undone.records;
  report_.rows_restored = undone.rows;
}

// The dense state of another pool of the group may be older than the rows of this one, and its rows older than this one's
// dense state.
void Pool::follow_group(const InGroup& group, RecoveryPlan& plan) const {
  plan.target = group.agree({plan.rows, dense_->marks()});
  const std::uint64_t step = plan.target.step;
  if (step > plan.rows.step) {
    throw Error(ErrorKind::corrupted, superblock_->file_name() + ": the group goes back to step " +
                                          std::to_string(step) + ", the rows are at step " +
                                          std::to_string(plan.rows.step));
  }
  plan.dense = dense_->newest(step);
  if (plan.dense && plan.dense->header.step != step) {
    throw Error(ErrorKind::corrupted, superblock_->file_name() + ": the group goes back to step " +
                                          std::to_string(step) + ", of which there is no dense state");
  }
}

void Pool::check_open() const {
  if (closed_) throw Error(ErrorKind::step, "the pool is closed");
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
template <class Work>
decltype(auto) Pool::latching(const Work& work) {
  try {
    return work();
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
  latching([&] { background_.drain(); });
  return dense_->newest(step_);
}

// A plan of a pool in shards may come from elsewhere: no row of another writer is ever looked for here.
void Pool::check_rows(const Plan& plan) const {
  if (shards()) require_own_rows(plan, backend_->tables());
}

void Pool::announce(std::shared_ptr<const Plan> plan) {
  check_open();
  check_rows(*plan);
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
  if (updated_) {
    throw Error(ErrorKind::step, "step " + std::to_string(step_ + 1) +
                                     " has updated its rows already: commit it before the next forward pass");
  }
  check_rows(*plan);
  return latching([&] { return backend_->capture(std::move(plan), step_ + 1); });
}

bool Pool::capture_ahead(std::shared_ptr<const Plan> next) {
  check_open();
  check_rows(*next);
  return !updated_ && latching([&] { return backend_->capture_ahead(std::move(next), step_ + 1); });
}

void Pool::lookup(const Capture& capture, float* out) const {
  check_open();
  pool_features(*capture.plan, capture.tables, backend_->tables(), out);
}

void Pool::evaluate(const Plan& plan, float* out) {
  if (closed_) throw Error(ErrorKind::step, "the pool is closed");
  check_rows(plan);
  const auto read = [&](const std::vector<WorkingRows>& rows) { backend_->read(plan, rows); };
  latching([&] { evaluator_.pool(plan, backend_->tables(), read, out); });
}

void Pool::lookup_ahead(const Plan& next, const Plan& now, float* out) {
  check_open();
  check_rows(next);
  check_same_collection(next, now);
  const auto read = [&](const Plan& plan, const std::vector<WorkingRows>& rows) { backend_->read(plan, rows); };
  latching([&] { relaxed_lookup_.pool_own(next, now, backend_->tables(), read, out); });
}

void Pool::lookup_rest(const Capture& capture, const Plan& now, float* out) const {
  check_open();
  check_same_collection(*capture.plan, now);
  pool_shared(*capture.plan, now, capture.tables, backend_->tables(), out);
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
  holdfast::scale_gradients(backend_->tables(), capture, feature, grad, out);
}

std::unique_ptr<SummedGradients> Pool::sum_gradients(std::vector<RowGradients> gradients) const {
  check_open();
  return holdfast::sum_gradients(backend_->tables(), std::move(gradients));
}

// No row is overwritten twice in a step: the second update would start from the rows before the first.
void Pool::begin_update(const std::vector<const CollectionSpec*>& specs) {
  std::vector<bool> updated_tables = updated_tables_;
  for (const CollectionSpec* spec : specs) {
    for (const auto& table : spec->tables) {
      if (updated_tables[table.number]) {
        throw Error(ErrorKind::step, "the rows of table '" + backend_->tables()[table.number].name +
                                         "' were updated in this step already: commit it first");
      }
      updated_tables[table.number] = true;
    }
  }
  updated_tables_ = std::move(updated_tables);
  backend_->begin_update();
}

void Pool::update(const std::vector<RowGradients>& gradients, const UpdateSpec& spec) {
  check_open();
  if (gradients.size() != 1) {
    update(*sum_gradients(gradients), spec);
    return;
  }
  const RowGradients& only = gradients.front();
  if (only.capture->step != step_ + 1) throw Error(ErrorKind::step, "row gradients of a step that is over");
  latching([&] {
    begin_update({only.capture->plan->spec.get()});
    backend_->update(only.capture, only.grad, of_this_step(spec));
    backend_->finish_update(1);
  });
  updated_ = true;
}

void Pool::update(const SummedGradients& gradients, const UpdateSpec& spec) {
  check_open();
  for (const auto& capture : gradients.captures) {
    if (capture->step != step_ + 1) throw Error(ErrorKind::step, "row gradients of a step that is over");
  }
  latching([&] {
    begin_update({gradients.spec.get()});
    backend_->update(gradients, of_this_step(spec));
    backend_->finish_update(gradients.captures.size());
  });
  updated_ = true;
}

void Pool::put(const std::vector<RowsPart>& parts) {
  check_open();
  const std::vector<ReadyCapture> captures = ready_captures(backend_->tables(), parts);
  std::vector<const CollectionSpec*> specs;
  for (const ReadyCapture& ready : captures) {
    if (ready.capture->step != step_ + 1) throw Error(ErrorKind::step, "new rows of a step that is over");
    specs.push_back(ready.capture->plan->spec.get());
  }
  latching([&] {
    begin_update(specs);
    for (const ReadyCapture& ready : captures) backend_->put(ready.capture, ready.tables);
    backend_->finish_update(captures.size());
  });
  updated_ = true;
}

std::optional<RowMapping> Pool::mapping(std::uint32_t table) const {
  check_open();
  if (table >= backend_->tables().size()) {
    throw Error(ErrorKind::config,
                "table " + std::to_string(table) + " of " + std::to_string(backend_->tables().size()));
  }
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
  return spec;
}

bool Pool::dense_due() const { return step_ + 1 - staged_step_ >= dense_interval_ || backend_->log_is_low(); }

void Pool::note_durable(std::uint64_t step) {
  lock_->check();
  durable_step_.store(step, std::memory_order_release);
  if (!in_group_) backend_->note_recoverable(step);
}

void Pool::note_group_durable(std::uint64_t step) {
  check_open();
  background_.submit([this, step] { backend_->note_recoverable(step); });
}

void Pool::empty_log() {
  flush();
  latching([&] { backend_->empty_log(); });
}

void Pool::stage(const StepMark& mark, const Dense& dense) {
  if (dense_->pending()) {
    background_.submit([this] { dense_->finish(); });
    background_.drain();
  }
  dense_->stage(report_.epoch, mark, dense.structure, dense.tensors, dense.tensors_bytes);
  staged_step_ = mark.step;
  has_dense_ = true;
}

std::uint64_t Pool::commit(std::uint64_t cursor, const Dense* dense) {
  commit_mark({step_ + 1, cursor, row_updates_ + (updated_ ? 1 : 0)}, dense);
  return step_;
}

void Pool::commit_dense(const StepMark& mark, const Dense& dense) {
  if (!backend_->tables().empty() || mark.step <= step_) {
    throw Error(ErrorKind::step, "step " + std::to_string(mark.step) + " is no step of this pool to come");
  }
  commit_mark(mark, &dense);
}

void Pool::commit_mark(const StepMark& mark, const Dense* dense) {
  check_open();
  const std::uint32_t dense_parts = backend_->log_is_low() ? 1 : dense_interval_;
  std::function<void()> make_durable;
  // Half a commit must not stay: a dense state on its way whose rows are not, or rows without theirs.
  try {
    if (dense != nullptr) {
      background_.drain();
      stage(mark, *dense);
    }
    make_durable = backend_->end_step(mark);
    // However slow the medium is, no more than two steps are on their way to it.
    background_.wait(last_commits_[0]);
  } catch (...) {
    check_open();
    background_.fail(std::current_exception());
    throw;
  }
  last_commits_[0] = last_commits_[1];
  last_commits_[1] =
      background_.submit([this, mark, dense_parts, has_dense = has_dense_, make_durable = std::move(make_durable)] {
        make_durable();
        lock_->check();
        rows_durable_step_.store(mark.step, std::memory_order_release);
        // The first dense state of a pool is finished at once: until then the step durable is the rows', and it must
        // not fall.
        if (dense_->pending()) {
          dense_->advance(dense_->newest_step() ? dense_->pending_bytes() / dense_parts + 1 : dense_->pending_bytes());
        }
        note_durable(has_dense ? dense_->newest_step().value_or(0) : mark.step);
      });
  step_ = mark.step;
  cursor_ = mark.cursor;
  row_updates_ = mark.row_updates;
  updated_ = false;
  updated_tables_.assign(updated_tables_.size(), false);
}

void Pool::write_dense(const Dense& dense) {
  check_open();
  if (backend_->step_has_begun() || updated_)
    throw Error(ErrorKind::step, "a step has begun: commit it with its dense state");
  flush();
  latching([&] { stage({step_, cursor_, row_updates_}, dense); });
  flush();
}

void Pool::import_rows(std::size_t table, std::uint64_t first, std::span<const std::byte> weights,
                       std::span<const float> state) {
  check_open();
  const bool is_new = step_ == 0 || (report_.epoch == 1 && step_ == report_.step);
  if (!is_new || backend_->step_has_begun())
    throw Error(ErrorKind::step, "rows are imported before the first step only");
  latching([&] { backend_->import_rows(table, first, weights, state); });
}

void Pool::flush() {
  check_open();
  latching([&] { finish_pending(); });
}

void Pool::finish_pending() {
  if (has_dense_) {
    background_.submit([this] {
      dense_->finish();
      note_durable(dense_->newest_step().value_or(0));
    });
  }
  background_.drain();
}

void Pool::close() {
  if (closed_) return;
  const auto end = [this] {
    // Whoever opens the pool next is the only one that writes.
    background_.stop();
    backend_->stop();
    closed_ = true;
    lock_.reset();
  };
  try {
    flush();
    sync_everything();
    background_.stop();
    lock_->check();
    EpochRecord epoch = superblock_->epoch();
    epoch.clean = 1;
    epoch.has_steps = 1;
    epoch.step = superblock_->commit().step;
    epoch.dense_step = dense_->newest_step().value_or(format::no_position);
    superblock_->write_epoch(epoch);
  } catch (...) {
    end();
    throw;
  }
  end();
}

void Pool::sync_everything() {
  try {
    backend_->close(updated_);
    dense_->sync();
    superblock_->sync();
  } catch (...) {
    if (medium_->level() == format::Level::process) distrust();
    throw;
  }
}

// Pages whose write failed look written. They hold what they should until the system wants their memory; from then on
// rows are what they were at some earlier time, and nothing would tell.
void Pool::distrust() noexcept {
  EpochRecord epoch = superblock_->epoch();
  ++epoch.epoch;
  std::fill(std::begin(epoch.boot_id), std::end(epoch.boot_id), format::boot_id_byte_of_failed_sync);
  try {
    superblock_->write_epoch(epoch);
  } catch (const std::exception&) {
    // The page is written all the same, which is what the next opening sees, as long as it sees the rows.
  }
}

}  // namespace holdfast
