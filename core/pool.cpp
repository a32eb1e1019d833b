#include "pool.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>
#include <utility>

#include "checksum.h"
#include "error.h"
#include "lookup.h"
#include "parallel.h"
#include "pool_files.h"
#include "recovery.h"

namespace holdfast {

using format::CommitRecord;
using format::EpochRecord;
using format::RecordHeader;
using format::RecordSection;

namespace {

Occurrences occurrences_of(const TablePlan& plan) {
  return {plan.row_start.data(), plan.gradient_offset.data(), plan.scale.empty() ? nullptr : plan.scale.data()};
}

// Zeroes the bytes between what a section holds and the lines that it takes: they are part of the checksum.
void clear_gaps(const RecordSection& section, const InPlaceStore::Table& table, std::byte* data) {
  const auto clear = [&](std::uint64_t offset, std::size_t bytes) {
    std::memset(data + offset + bytes, 0, format::line_up(bytes) - bytes);
  };
  clear(section.rows_offset, section.num_rows * 8);
  clear(section.weights_offset, section.num_rows * table.weight_bytes());
  clear(section.state_offset, section.num_rows * table.state_bytes());
}

}  // namespace

// An advisory lock on the file `lock`: it goes with the process, however that ends.
class Pool::Lock {
 public:
  explicit Lock(const std::string& directory) {
    const std::string path = directory + "/lock";
    struct stat status{};
    if (::stat(directory.c_str(), &status) != 0) throw Error(ErrorKind::not_found, "no directory " + directory);
    fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd_ < 0) {
      const int error = errno;
      const bool denied = error == EROFS || error == EACCES || error == EPERM;
      throw Error(denied ? ErrorKind::read_only : ErrorKind::failed, "locking " + path + ": " + std::strerror(error));
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

 private:
  int fd_;
};

void Pool::create(const std::string& directory, const PoolOptions& options, std::vector<format::TableRecord> tables) {
  const Lock lock(directory);
  const auto medium = open_mapped_medium(directory);
  if (medium->exists(superblock_name)) throw Error(ErrorKind::exists, directory + " already holds a pool");
  InPlaceStore::create(*medium, row_tables_of(tables, options.seed));
  const std::size_t log_bytes = format::align_up(std::max<std::uint64_t>(options.log_bytes, 1), format::block_bytes);
  const auto ring = medium->create(log_name, log_bytes, Access::sequential);
  ring->allocate(0, log_bytes);
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
  header.log_bytes = log_bytes;
  header.num_shards = 1;
  header.num_writers = 1;
  header.created_unix_ns = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count());
  EpochRecord epoch{};
  epoch.clean = 1;
  const auto boot = current_boot_id();
  std::copy(boot.begin(), boot.end(), epoch.boot_id);
  CommitRecord commit{};
  commit.last_record = format::no_position;
  Superblock::write(*medium, header, std::move(tables), epoch, commit);
}

Pool::Pool(const std::string& directory, const OpenOptions& options)
    : lock_(std::make_unique<Lock>(directory)), medium_(open_mapped_medium(directory)) {
  if (!medium_->exists(superblock_name)) throw Error(ErrorKind::not_found, directory + " holds no pool");
  if (options.dense_interval == 0) throw Error(ErrorKind::config, "dense_interval must be at least 1");
  const auto started = std::chrono::steady_clock::now();
  dense_interval_ = options.dense_interval;
  grow_log_ = options.grow_log;
  superblock_ = std::make_unique<Superblock>(*medium_, true);
  const EpochRecord& epoch = superblock_->epoch();
  const auto boot = current_boot_id();
  const bool same_boot = std::equal(boot.begin(), boot.end(), epoch.boot_id);
  if (medium_->level() == format::Level::process && epoch.clean == 0 && !same_boot && !options.trust_after_reboot) {
    throw Error(ErrorKind::untrusted,
                directory + " was open when the machine went down, and its medium (" + medium_->description() +
                    ") keeps no order across that: its rows may be from any moment. Restore a copy, or open it with "
                    "trust_after_reboot if you know that everything had been written back");
  }
  store_ = std::make_unique<InPlaceStore>(*medium_, row_tables_of(superblock_->tables(), header().seed), true);
  ring_ = open_log_file(*medium_, superblock_->header().log_bytes, true);
  log_ = std::make_unique<UndoLog>(*medium_, *ring_);
  dense_ = std::make_unique<DenseSlots>(*medium_, open_dense_files(*medium_, true));
  // A life that ended while it made one of these larger may have left it with holes.
  ring_->allocate(0, ring_->size());
  dense_->allocate();
  recover(options);
  report_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

Pool::~Pool() { background_.stop(); }

void Pool::recover(const OpenOptions& options) {
  const EpochRecord opened = superblock_->epoch();
  const RecoveryPlan plan = plan_recovery(*superblock_, *log_, *dense_, *store_, options.recovery);

  // From here on the pool is written. The epoch comes first; everything after it can be done again from the start.
  EpochRecord epoch{};
  epoch.epoch = std::max(opened.epoch, plan.commit.epoch) + 1;
  const auto boot = current_boot_id();
  std::copy(boot.begin(), boot.end(), epoch.boot_id);
  epoch.process_id = static_cast<std::uint32_t>(::getpid());
  superblock_->write_epoch(epoch);
  report_.rows_restored = undo_records(plan.undo, *store_, *medium_);
  if (plan.dense && plan.dense->header.step < plan.step) {
    // Relaxed: the older dense state becomes the dense state of the rows' step, before anything is based on it.
    const DenseTensor tensors{plan.dense->tensors.data(), plan.dense->tensors.size(), 0};
    dense_->stage(plan.commit.epoch, plan.step, plan.cursor, plan.row_updates, plan.dense->structure, {&tensors, 1},
                  plan.dense->tensors.size());
    dense_->finish();
  }
  CommitRecord fresh{};
  fresh.epoch = epoch.epoch;
  fresh.step = plan.step;
  fresh.cursor = plan.cursor;
  fresh.row_updates = plan.row_updates;
  fresh.log_head = plan.log_head;
  fresh.log_tail = plan.log_head;
  fresh.last_record = format::no_position;
  superblock_->write_commit(fresh);
  log_->start(epoch.epoch, plan.log_head);

  step_ = plan.step;
  cursor_ = plan.cursor;
  row_updates_ = plan.row_updates;
  has_dense_ = plan.dense.has_value();
  staged_step_ = plan.step;
  durable_step_ = plan.step;
  rows_durable_step_ = plan.step;
  report_.clean = opened.clean != 0;
  report_.epoch = epoch.epoch;
  report_.rows_step = plan.commit.step;
  if (plan.dense) report_.dense_step = plan.dense->header.step;
  report_.step = plan.step;
  report_.cursor = plan.cursor;
  report_.records_undone = plan.undo.size();
}

std::optional<DenseState> Pool::dense_state() {
  background_.drain();
  return dense_->newest(step_);
}

void Pool::check_open() const {
  if (closed_) throw Error(ErrorKind::step, "the pool is closed");
  try {
    background_.check();
  } catch (const std::exception& failure) {
    throw Error(ErrorKind::failed, std::string("an earlier write failed (") + failure.what() +
                                       "); the pool takes no further step until it is opened again");
  }
}

std::shared_ptr<Capture> Pool::reserve(std::shared_ptr<const Plan> plan, std::uint64_t step) {
  const CollectionSpec& spec = *plan->spec;
  std::size_t bytes = sizeof(RecordHeader) + spec.tables.size() * sizeof(RecordSection);
  std::vector<RecordSection> sections;
  for (std::size_t t = 0; t < spec.tables.size(); ++t) {
    const std::uint32_t number = spec.tables[t].number;
    sections.push_back(place_section(store_->table(number), number, plan->tables[t].num_unique(), bytes));
  }
  if (grow_log_) grow_log(bytes);
  if (bytes > log_->ring_bytes()) {
    throw Error(ErrorKind::batch_too_large, "one batch's rows take " + std::to_string(bytes) +
                                                " bytes of log, the log has " + std::to_string(log_->ring_bytes()) +
                                                "; make the pool with a larger log_bytes, or the batch smaller");
  }
  auto position = log_->reserve(step, bytes);
  if (!position) {
    // What is on its way to become durable is finished now rather than waited for.
    flush();
    position = log_->reserve(step, bytes);
  }
  if (!position) {
    throw Error(ErrorKind::batch_too_large,
                "the log (" + std::to_string(log_->ring_bytes()) + " bytes, " + std::to_string(log_->free_bytes()) +
                    " free) has no room for the " + std::to_string(bytes) + " bytes of step " + std::to_string(step) +
                    ": it holds the rows of every step since dense state " + std::to_string(durable_step()) + " and " +
                    std::to_string(parts_.size()) +
                    " forward passes of this step; make the pool with a larger log_bytes, lower dense_interval, or "
                    "evaluate under torch.no_grad()");
  }
  auto capture = std::make_shared<Capture>();
  capture->plan = std::move(plan);
  capture->step = step;
  capture->position = *position;
  capture->bytes = bytes;
  std::byte* data = log_->at(*position);
  std::memcpy(data + sizeof(RecordHeader), sections.data(), sections.size() * sizeof(RecordSection));
  for (std::size_t t = 0; t < sections.size(); ++t) {
    clear_gaps(sections[t], store_->table(sections[t].table), data);
    capture->tables.push_back(rows_of(sections[t], data));
  }
  return capture;
}

// An open-ended log holds the records of dense_interval steps and a few more; it grows between steps, when everything
// in it has become durable and nothing in it is needed.
void Pool::grow_log(std::size_t record_bytes) {
  constexpr std::size_t spare_records = 4;
  constexpr std::size_t interval_bytes_limit = std::size_t{1} << 30;
  const std::size_t interval_bytes = std::min(record_bytes * dense_interval_, interval_bytes_limit);
  const std::size_t wanted = interval_bytes + spare_records * record_bytes;
  if (wanted <= log_->ring_bytes() || !parts_.empty()) return;
  flush();
  if (!log_->empty()) return;
  log_->grow(format::align_up(wanted + wanted / 4, format::block_bytes));
}

// Writes the row numbers of a capture, makes sure that its rows have space at home and, unless that is left to the
// background, copies them and takes the record's checksum while they are in the caches; one parallel region for all.
void Pool::fill(Capture& capture, Rows rows_are) {
  const std::byte* const payload = log_->at(capture.position) + sizeof(RecordHeader);
  PartsChecksum checksum(capture.bytes - sizeof(RecordHeader));
  const auto add = [&](const void* part, std::size_t bytes) {
    checksum.add(static_cast<std::size_t>(static_cast<const std::byte*>(part) - payload), part, bytes);
  };
  try {
    for_rows(*capture.plan, [&](std::size_t t, std::size_t begin, std::size_t end) {
      const std::uint64_t* rows = capture.plan->tables[t].rows.data();
      const WorkingRows& working = capture.tables[t];
      std::copy(rows + begin, rows + end, working.rows + begin);
      const std::uint32_t number = capture.plan->spec->tables[t].number;
      store_->prepare(number, working, begin, end);
      if (rows_are == Rows::copied_later) return;
      store_->capture(number, working, begin, end);
      const InPlaceStore::Table& table = store_->table(number);
      add(working.rows + begin, (end - begin) * sizeof(std::uint64_t));
      add(working.weights + begin * table.weight_bytes(), (end - begin) * table.weight_bytes());
      add(working.state + begin * table.spec.state_floats, (end - begin) * table.state_bytes());
    });
  } catch (...) {
    background_.drain();
    log_->rewind(capture.position, log_->last());
    throw;
  }
  if (rows_are == Rows::copied_later) return;
  add(payload, capture.tables.size() * sizeof(RecordSection));
  capture.payload_crc = checksum.value();
}

void Pool::submit_seal(Capture& capture) {
  capture.sealed = background_.submit(
      [this, step = capture.step, position = capture.position, bytes = capture.bytes,
       sections = static_cast<std::uint32_t>(capture.tables.size()),
       payload_crc = capture.payload_crc] { log_->seal(step, position, bytes, sections, payload_crc); });
}

// Forward passes whose results were thrown away leave records that nobody needs. They are taken back, and the records
// behind them that are still needed move up; home has not changed since, so nothing is lost if that is interrupted.
void Pool::drop_dead_captures() {
  const auto dead = std::find_if(parts_.begin(), parts_.end(), [](const Part& part) { return part.capture.expired(); });
  if (dead == parts_.end() || updated_) return;
  background_.drain();
  struct Saved {
    std::shared_ptr<Capture> capture;
    std::vector<std::byte> bytes;
  };
  std::vector<Saved> saved;
  for (auto part = dead; part != parts_.end(); ++part) {
    if (auto capture = part->capture.lock()) {
      const std::byte* data = log_->at(capture->position);
      saved.push_back({capture, {data, data + capture->bytes}});
    }
  }
  log_->rewind(dead->position, log_->before(dead->position));
  parts_.erase(dead, parts_.end());
  for (const auto& [capture, bytes] : saved) {
    const auto position = log_->reserve(capture->step, capture->bytes);
    if (!position) throw Error(ErrorKind::failed, "the log lost the room it had");
    std::byte* from = log_->at(capture->position);
    std::byte* to = log_->at(*position);
    std::memcpy(to + sizeof(RecordHeader), bytes.data() + sizeof(RecordHeader), bytes.size() - sizeof(RecordHeader));
    for (WorkingRows& rows : capture->tables) {
      rows.rows = reinterpret_cast<std::uint64_t*>(to + (reinterpret_cast<std::byte*>(rows.rows) - from));
      rows.weights = to + (rows.weights - from);
      rows.state = reinterpret_cast<float*>(to + (reinterpret_cast<std::byte*>(rows.state) - from));
    }
    capture->position = *position;
    submit_seal(*capture);
    parts_.push_back({capture, capture->position, capture->sealed});
  }
}

void Pool::drop_ahead() {
  if (!ahead_) return;
  background_.wait(ahead_->copied);
  if (!ahead_->complete) {
    background_.drain();
    log_->rewind(ahead_->capture->position, log_->last());
  } else {
    parts_.push_back({ahead_->capture, ahead_->capture->position, ahead_->capture->sealed});
  }
  ahead_.reset();
}

std::shared_ptr<Capture> Pool::capture(std::shared_ptr<const Plan> plan) {
  check_open();
  if (updated_) {
    throw Error(ErrorKind::step, "step " + std::to_string(step_ + 1) +
                                     " has updated its rows already: commit it before the next forward pass");
  }
  if (ahead_ && ahead_->complete && ahead_->capture->plan == plan && parts_.empty()) {
    auto capture = ahead_->capture;
    ahead_.reset();
    parts_.push_back({capture, capture->position, capture->sealed});
    return capture;
  }
  drop_ahead();
  drop_dead_captures();
  auto capture = reserve(std::move(plan), step_ + 1);
  fill(*capture, Rows::copied_now);
  submit_seal(*capture);
  parts_.push_back({capture, capture->position, capture->sealed});
  return capture;
}

bool Pool::capture_ahead(std::shared_ptr<const Plan> next) {
  check_open();
  if (ahead_ || updated_ || parts_.size() != 1) return false;
  const auto current = parts_.front().capture.lock();
  if (!current || current->plan->spec != next->spec) return false;
  if (log_is_low()) return false;
  Ahead ahead;
  ahead.current = current;
  ahead.capture = reserve(next, step_ + 2);
  ahead.complete = false;
  fill(*ahead.capture, Rows::copied_later);
  const std::size_t num_tables = next->tables.size();
  ahead.forward.resize(num_tables);
  std::vector<std::vector<std::pair<std::size_t, std::size_t>>> own(num_tables);  // ranges that are captured
  parallel_for(num_tables, [&](std::size_t t) {
    const auto& now = current->plan->tables[t].rows;
    const auto& then = next->tables[t].rows;
    auto& forward = ahead.forward[t];
    forward.assign(now.size(), no_forward);
    std::size_t begin = 0;
    std::size_t u = 0;
    for (std::size_t v = 0; v < then.size(); ++v) {
      while (u < now.size() && now[u] < then[v]) ++u;
      if (u == now.size() || now[u] != then[v]) continue;
      forward[u] = static_cast<std::uint32_t>(v);
      if (begin < v) own[t].emplace_back(begin, v);
      begin = v + 1;
    }
    if (begin < then.size()) own[t].emplace_back(begin, then.size());
  });
  ahead.copied = background_.submit([this, capture = ahead.capture, own = std::move(own)] {
    for (std::size_t t = 0; t < own.size(); ++t) {
      const std::uint32_t number = capture->plan->spec->tables[t].number;
      for (const auto& [begin, end] : own[t]) store_->capture(number, capture->tables[t], begin, end);
    }
  });
  ahead_ = std::move(ahead);
  return true;
}

void Pool::lookup(const Capture& capture, float* out) const {
  check_open();
  pool_features(*capture.plan, capture.tables, *store_, out);
}

void Pool::evaluate(const Plan& plan, float* out) {
  if (closed_) throw Error(ErrorKind::step, "the pool is closed");
  evaluator_.pool(plan, *store_, out);
}

void Pool::scale_gradients(const Capture& capture, std::size_t f, const float* grad, float* out) const {
  check_open();
  const Plan& plan = *capture.plan;
  const CollectionSpec& spec = *plan.spec;
  const auto& feature = spec.features[f];
  const auto& table = spec.tables[feature.table];
  const TablePlan& part = plan.tables[feature.table];
  const std::uint32_t* bag_start = plan.bag_start(f);
  const std::size_t first = bag_start[0];
  const std::size_t count = bag_start[plan.num_bags] - first;
  std::vector<std::uint32_t> bag_of(count);
  for (std::size_t bag = 0; bag < plan.num_bags; ++bag) {
    std::fill(bag_of.begin() + static_cast<std::ptrdiff_t>(bag_start[bag] - first),
              bag_of.begin() + static_cast<std::ptrdiff_t>(bag_start[bag + 1] - first),
              static_cast<std::uint32_t>(bag));
  }
  const PoolSpec pooling{capture.tables[feature.table].weights, table.dim, store_->table(table.number).spec.dtype,
                         part.position.data() + first,          bag_start, nullptr,
                         table.pooling == Pooling::mean,        nullptr,   0};
  best_kernels().scale_gradients(pooling, bag_of.data(), grad + feature.column, spec.output_width, out, 0, count);
}

std::unique_ptr<SummedGradients> Pool::sum_gradients(std::vector<RowGradients> gradients) const {
  check_open();
  if (gradients.empty()) throw Error(ErrorKind::step, "there are no row gradients: no backward pass in this step");
  // Occurrences are in order of the forward passes, whatever the order of the backward passes.
  std::sort(gradients.begin(), gradients.end(),
            [](const RowGradients& a, const RowGradients& b) { return a.capture->position < b.capture->position; });
  const Kernels& kernels = best_kernels();
  auto summed = std::make_unique<SummedGradients>();
  const auto& spec_pointer = gradients.front().capture->plan->spec;
  const CollectionSpec& spec = *spec_pointer;
  summed->spec = spec_pointer;
  const std::size_t num_tables = spec.tables.size();
  summed->num_rows.resize(num_tables);
  summed->rows.resize(num_tables);
  summed->sums.resize(num_tables);
  summed->storage.resize(num_tables);
  for (const RowGradients& part : gradients) {
    if (part.capture->plan->spec != spec_pointer) {
      throw Error(ErrorKind::step, "row gradients of different collections cannot be summed together");
    }
    summed->captures.push_back(part.capture);
  }
  std::vector<double> squares(num_tables);
  parallel_for(num_tables, [&](std::size_t t) {
    const std::uint32_t dim = spec.tables[t].dim;
    if (gradients.size() == 1) {
      const Capture& capture = *gradients.front().capture;
      const TablePlan& plan = capture.plan->tables[t];
      summed->num_rows[t] = plan.num_unique();
      summed->rows[t] = capture.tables[t];
      summed->sums[t].resize(plan.num_unique() * dim);
      kernels.sum_gradients(dim, occurrences_of(plan), gradients.front().grad, nullptr, false, summed->sums[t].data(),
                            0, plan.num_unique());
    } else {
      std::vector<std::uint64_t> merged;
      for (const RowGradients& part : gradients) {
        const auto& rows = part.capture->plan->tables[t].rows;
        std::vector<std::uint64_t> both;
        std::set_union(merged.begin(), merged.end(), rows.begin(), rows.end(), std::back_inserter(both));
        merged.swap(both);
      }
      // Home still holds the before-images: no capture of this step has been updated.
      const InPlaceStore::Table& table = store_->table(spec.tables[t].number);
      std::size_t bytes = 0;
      const RecordSection section = place_section(table, spec.tables[t].number, merged.size(), bytes);
      summed->storage[t].resize(bytes + format::line_bytes);
      summed->rows[t] = rows_of(section, line_aligned(summed->storage[t]));
      summed->num_rows[t] = merged.size();
      std::copy(merged.begin(), merged.end(), summed->rows[t].rows);
      store_->capture(spec.tables[t].number, summed->rows[t], 0, merged.size());
      summed->sums[t].assign(merged.size() * dim, 0.0f);
      for (const RowGradients& part : gradients) {
        const TablePlan& plan = part.capture->plan->tables[t];
        std::vector<std::uint32_t> position(plan.num_unique());
        std::size_t at = 0;
        for (std::size_t u = 0; u < plan.num_unique(); ++u) {
          while (merged[at] != plan.rows[u]) ++at;
          position[u] = static_cast<std::uint32_t>(at);
        }
        kernels.sum_gradients(dim, occurrences_of(plan), part.grad, position.data(), true, summed->sums[t].data(), 0,
                              plan.num_unique());
      }
    }
    squares[t] = kernels.sum_of_squares(summed->sums[t].data(), summed->sums[t].size());
  });
  summed->sum_of_squares = 0;
  for (const double square : squares) summed->sum_of_squares += square;
  return summed;
}

// No row is overwritten before every record of this step is sealed, nor twice in a step: the second update would start
// from the rows before the first.
void Pool::begin_update(const CollectionSpec& spec) {
  updated_tables_.resize(store_->tables().size());
  for (const auto& table : spec.tables) {
    if (updated_tables_[table.number]) {
      throw Error(ErrorKind::step, "the rows of table '" + store_->table(table.number).name +
                                       "' were updated in this step already: commit it first");
    }
  }
  for (const auto& table : spec.tables) updated_tables_[table.number] = true;
  for (const Part& part : parts_) background_.wait(part.sealed);
  if (ahead_) background_.wait(ahead_->copied);
  medium_->persist_point();
}

void Pool::finish_update(std::size_t num_captures) {
  updated_ = true;
  if (ahead_ && num_captures == 1 && parts_.size() == 1) {
    ahead_->complete = true;
    submit_seal(*ahead_->capture);
  }
}

const Pool::Ahead* Pool::forwarding(const Capture& capture) const {
  return ahead_ && ahead_->current.lock().get() == &capture ? &*ahead_ : nullptr;
}

void Pool::update(const std::vector<RowGradients>& gradients, UpdateSpec spec) {
  check_open();
  if (gradients.size() != 1) {
    update(*sum_gradients(gradients), spec);
    return;
  }
  const Capture& capture = *gradients.front().capture;
  if (capture.step != step_ + 1) throw Error(ErrorKind::step, "row gradients of a step that is over");
  const float* grad = gradients.front().grad;
  begin_update(*capture.plan->spec);
  spec.step = row_updates_ + 1;
  spec.rounding_seed = header().seed;
  const Ahead* ahead = forwarding(capture);
  for_rows(*capture.plan, [&](std::size_t t, std::size_t begin, std::size_t end) {
    store_->update(capture.plan->spec->tables[t].number, spec, capture.tables[t],
                   occurrences_of(capture.plan->tables[t]), grad, ahead != nullptr ? ahead->forward[t].data() : nullptr,
                   ahead != nullptr ? &ahead->capture->tables[t] : nullptr, begin, end);
  });
  finish_update(1);
}

void Pool::update(const SummedGradients& gradients, UpdateSpec spec) {
  check_open();
  for (const auto& capture : gradients.captures) {
    if (capture->step != step_ + 1) throw Error(ErrorKind::step, "row gradients of a step that is over");
  }
  begin_update(*gradients.spec);
  spec.step = row_updates_ + 1;
  spec.rounding_seed = header().seed;
  const Ahead* ahead = gradients.captures.size() == 1 ? forwarding(*gradients.captures.front()) : nullptr;
  for_rows(
      *gradients.spec, [&](std::size_t t) { return gradients.num_rows[t]; },
      [&](std::size_t t, std::size_t begin, std::size_t end) {
        store_->update_from_sums(gradients.spec->tables[t].number, spec, gradients.rows[t], gradients.sums[t].data(),
                                 ahead != nullptr ? ahead->forward[t].data() : nullptr,
                                 ahead != nullptr ? &ahead->capture->tables[t] : nullptr, begin, end);
      });
  finish_update(gradients.captures.size());
}

bool Pool::log_is_low() const { return log_->free_bytes() < 2 * log_->largest_record_bytes(); }

bool Pool::dense_due() const { return step_ + 1 - staged_step_ >= dense_interval_ || log_is_low(); }

void Pool::note_durable(std::uint64_t step) {
  durable_step_.store(step, std::memory_order_release);
  log_->release(step);
}

void Pool::stage(std::uint64_t step, std::uint64_t cursor, std::uint64_t row_updates, const Dense& dense) {
  if (dense_->pending()) {
    background_.submit([this] { dense_->finish(); });
    background_.drain();
  }
  dense_->stage(report_.epoch, step, cursor, row_updates, dense.structure, dense.tensors, dense.tensors_bytes);
  staged_step_ = step;
  has_dense_ = true;
}

std::uint64_t Pool::commit(std::uint64_t cursor, const Dense* dense) {
  check_open();
  const std::uint64_t step = step_ + 1;
  if (ahead_ && !ahead_->complete) drop_ahead();
  // Every seal of this step is in the queue already, so the commit record follows them.
  const std::uint32_t dense_parts = log_is_low() ? 1 : dense_interval_;
  const std::uint64_t row_updates = row_updates_ + (updated_ ? 1 : 0);
  if (dense != nullptr) {
    background_.drain();
    try {
      stage(step, cursor, row_updates, *dense);
    } catch (...) {
      background_.fail(std::current_exception());
      throw;
    }
  }
  cursor_ = cursor;
  row_updates_ = row_updates;
  CommitRecord record{};
  record.epoch = report_.epoch;
  record.step = step;
  record.cursor = cursor_;
  record.row_updates = row_updates_;
  record.log_head = ahead_ ? ahead_->capture->position : log_->head();
  const auto ahead_position = ahead_ ? ahead_->capture->position : format::no_position;
  background_.submit([this, record, dense_parts, ahead_position, has_dense = has_dense_]() mutable {
    UndoLog::Link last = log_->last();
    if (last.position != format::no_position && last.position == ahead_position) {
      last = log_->before(ahead_position);
    }
    record.last_record = last.position;
    record.last_record_crc = last.crc;
    record.last_record_step = last.step;
    record.log_tail = log_->tail();
    superblock_->write_commit(record);
    rows_durable_step_.store(record.step, std::memory_order_release);
    // The first dense state of a pool is finished at once: until then the step durable is the rows', and it must not fall.
    if (dense_->pending()) {
      dense_->advance(dense_->newest_step() ? dense_->pending_bytes() / dense_parts + 1 : dense_->pending_bytes());
    }
    note_durable(has_dense ? dense_->newest_step().value_or(0) : record.step);
  });
  step_ = step;
  updated_ = false;
  updated_tables_.assign(updated_tables_.size(), false);
  parts_.clear();
  return step;
}

void Pool::write_dense(const Dense& dense) {
  check_open();
  if (!parts_.empty() || updated_) throw Error(ErrorKind::step, "a step has begun: commit it with its dense state");
  flush();
  stage(step_, cursor_, row_updates_, dense);
  flush();
}

void Pool::import_rows(std::size_t table, std::uint64_t first, std::span<const std::byte> weights,
                       std::span<const float> state) {
  check_open();
  if (step_ != 0 || !parts_.empty()) throw Error(ErrorKind::step, "rows are imported before the first step only");
  store_->import_rows(table, first, weights, state);
}

void Pool::flush() {
  check_open();
  if (!has_dense_) {
    background_.drain();
    return;
  }
  background_.submit([this] {
    dense_->finish();
    note_durable(dense_->newest_step().value_or(0));
  });
  background_.drain();
}

void Pool::close() {
  if (closed_) return;
  try {
    flush();
    if (updated_) {
      // A step that wrote rows but was not committed is undone, as recovery would.
      std::vector<Record> records;
      for (auto part = parts_.rbegin(); part != parts_.rend(); ++part) {
        background_.wait(part->sealed);
        if (const auto record = log_->read(part->position)) records.push_back(*record);
      }
      undo_records(records, *store_, *medium_);
    }
    store_->sync();
    ring_->sync();
    dense_->sync();
    superblock_->sync();
  } catch (...) {
    background_.stop();
    closed_ = true;
    lock_.reset();
    throw;
  }
  background_.stop();
  EpochRecord epoch = superblock_->epoch();
  epoch.clean = 1;
  superblock_->write_epoch(epoch);
  superblock_->sync();
  closed_ = true;
  lock_.reset();
}

}  // namespace holdfast
