// How a pool is made, and how it is opened: recovery, alone or with its group.
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "in_place/in_place_backend.h"
#include "layout/pool_files.h"
#include "layout/row_log_place.h"
#include "layout/unpublished.h"
#include "pool/pool.h"
#include "readers/row_view.h"
#include "scratchpad/log_backend.h"

namespace holdfast {

using format::CommitRecord;
using format::EpochRecord;

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

format::PoolHeader new_header(const PoolOptions& options, format::Level level, std::uint64_t log_bytes) {
  const bool in_place = options.store == format::Store::in_place;
  format::PoolHeader header{};
  const bool identified = options.version >= format::identity_version;
  header.version = identified         ? options.version
                   : options.sharding ? format::shards_version
                   : in_place         ? format::oldest_version
                                      : format::log_store_version;
  header.level = static_cast<std::uint32_t>(level);
  if (::getentropy(header.uuid, sizeof(header.uuid)) != 0)
    throw Error(ErrorKind::failed, "the system has no random numbers for the pool's identity");
  header.seed = options.seed;
  header.store = static_cast<std::uint32_t>(options.store);
  header.log_bytes = log_bytes;
  header.num_shards = options.sharding ? options.sharding->num_shards : 1;
  header.num_writers = 1;
  header.row_checksums = in_place && options.row_checksums ? 1 : 0;
  header.created_unix_ns = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count());
  if (!identified) return header;
  header.has_shards = options.sharding ? 1 : 0;
  const std::optional<Uuid> group = options.sharding ? options.sharding->group_uuid : options.group_uuid;
  if (group) std::ranges::copy(*group, header.group_uuid);
  return header;
}

void check_keyed(const format::TableRecord& table) {
  const auto layout = shard_layout_of(table);
  const std::string name(table.name);
  if (layout && layout->end_place() > format::max_keyed_rows) {
    throw Error(ErrorKind::config, "table '" + name + "' has keys: over " + std::to_string(layout->num_shards()) +
                                       " shards it needs " + std::to_string(layout->end_place()) + " places, and " +
                                       std::to_string(format::max_keyed_rows) +
                                       " are the most; make its capacity smaller, or the pool with fewer shards");
  }
  if (table.num_embeddings > format::max_keyed_rows) {
    throw Error(ErrorKind::config, "table '" + name + "' has keys: it can have " +
                                       std::to_string(format::max_keyed_rows) + " rows at most");
  }
  if (layout && table.max_keys != 0 && table.max_keys < layout->num_shards()) {
    throw Error(ErrorKind::config, "table '" + name + "': max_keys = " + std::to_string(table.max_keys) +
                                       ", of which each of its " + std::to_string(layout->num_shards()) +
                                       " shards has its part; make it as many, or more");
  }
}

}  // namespace

void Pool::create(const std::string& directory, const PoolOptions& options, std::vector<format::TableRecord> tables) {
  const PoolLock lock(directory);
  const bool in_place = options.store == format::Store::in_place;
  const auto medium = open_mapped_medium(directory, in_place ? Flushing::mapped : Flushing::synced);
  if (medium->exists(superblock_name)) throw Error(ErrorKind::exists, directory + " already holds a pool");
  const std::size_t log_bytes = format::align_up(std::max<std::uint64_t>(options.log_bytes, 1), format::block_bytes);
  const ShardSet owned = checked_shards(options.sharding, tables);
  std::optional<format::ShardsRecord> shards;
  if (options.sharding) shards = shards_record(owned, options.sharding->group_uuid);
  for (const format::TableRecord& table : tables) {
    if (table.id_map != static_cast<std::uint32_t>(format::IdMap::dynamic)) continue;
    check_keyed(table);
  }
  if (!options.log_directory.empty() && in_place) {
    throw Error(ErrorKind::config, "log_directory: a pool whose rows are overwritten in place has its log beside them");
  }
  format::PoolHeader header = new_header(options, medium->level(), log_bytes);
  const Identity identity = Superblock::identity_of(header);
  const std::vector<RowTable> row_tables = row_tables_of(
      tables, options.seed, owned, Superblock::row_identity_of(header), Superblock::home_order_of(header));
  const bool adopt = options.sharding && options.sharding->adopt;
  begin_making(directory);
  if (!options.log_directory.empty()) {
    Uuid uuid;
    std::ranges::copy(header.uuid, uuid.begin());
    place_row_log(directory, options.log_directory, uuid);
    // What the pool survives is what the weaker of the two media does.
    header.level = static_cast<std::uint32_t>(open_mapped_medium(directory, Flushing::synced)->level());
  }
  if (in_place) {
    InPlaceBackend::create(*medium, row_tables, log_bytes, options.row_checksums, adopt, identity);
  } else {
    LogBackend::create(directory, row_tables, log_bytes, options.begin, adopt, identity);
  }
  for (const char* name : dense_names) {
    const auto slot = medium->create(name, format::block_bytes, Access::sequential);
    slot->allocate(0, format::block_bytes);
    slot->sync();
  }
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
  const auto image = Superblock::write_once(header, std::move(tables), shards);
  Superblock::write_copy(*medium, image);
  sync_names(directory, row_tables);
  Superblock::publish(*medium, Superblock::with_records(image, epoch, commit));
  mark_published(directory);
}

void Pool::take_back(const std::string& directory) {
  const PoolLock lock(directory);
  const auto refuse = [&](const char* why) {
    throw Error(ErrorKind::exists, directory + " holds a pool that " + why + ": it cannot be made anew");
  };
  {
    const auto medium = open_pool_medium(directory);
    Superblock superblock(*medium, false);
    DenseSlots dense(*medium, open_dense_files(*medium, false), superblock.identity());
    const auto rows = open_row_view(directory, *medium, superblock);
    const std::uint64_t step = rows->newest().step;
    dense.load(superblock.commit().epoch, step, superblock.epoch().clean != 0);
    if (superblock.epoch().clean == 0) refuse("was not closed");
    if (step != 0 || dense.newest_step()) refuse("was trained");
    for (std::uint32_t table = 0; table < superblock.tables().size(); ++table) {
      if (!rows->touched_rows(table, 0, 1).empty()) refuse("has rows");
    }
  }
  unpublish(directory);
}

namespace {

std::uint64_t next_number() {
  static std::atomic<std::uint64_t> opened{0};
  return opened.fetch_add(1) + 1;
}

}  // namespace

Pool::Pool(const std::string& directory, const OpenOptions& options, std::unique_ptr<Medium> medium,
           BlockWatcher* watcher)
    : number_(next_number()),
      lock_(std::make_unique<PoolLock>(directory)),
      medium_(medium ? std::move(medium) : open_pool_medium(directory)) {
  if (options.dense_interval == 0) throw Error(ErrorKind::config, "dense_interval must be at least 1");
  const auto started = std::chrono::steady_clock::now();
  dense_interval_ = options.dense_interval;
  in_group_ = options.group.has_value();
  synchronous_ = options.synchronous;
  if (synchronous_) background_.run_when_awaited();
  if (options.dial) dial_ = std::make_shared<Dial>(*options.dial);
  log_dial_ = options.log_dial ? std::make_shared<Dial>(*options.log_dial) : dial_;
  medium_->set_dial(dial_);
  superblock_ = std::make_unique<Superblock>(*medium_, true);
  if (const auto reason = superblock_->reason_to_distrust(); reason && !options.trust_after_reboot) {
    throw Error(ErrorKind::untrusted, directory + " " + *reason);
  }
  make_backend(directory, options, watcher);
  updated_tables_.resize(backend_->tables().size());
  keys_.resize(backend_->tables().size());
  dense_ = std::make_unique<DenseSlots>(*medium_, open_dense_files(*medium_, true), superblock_->identity());
  dense_->allocate();
  recover(directory, options);
  report_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

void Pool::make_backend(const std::string& directory, const OpenOptions& options, BlockWatcher* watcher) {
  if (header().store == static_cast<std::uint32_t>(format::Store::in_place)) {
    if (options.victims) {
      throw Error(ErrorKind::config,
                  "victims: a pool whose rows are overwritten in place has no scratchpad that they could leave");
    }
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
  backend_ = std::make_unique<LogBackend>(
      directory, *superblock_, background_,
      LogBackend::Options{options.scratchpad_bytes, options.warm, finish_dense, watcher, spans_, dial_.get(),
                          log_dial_.get(), options.scratchpad_nodes, options.victims});
}

void Pool::recover(const std::string& directory, const OpenOptions& options) {
  const EpochRecord opened = superblock_->epoch();
  RecoveryPlan plan = plan_recovery(*superblock_, backend_->newest(), *dense_, options.recovery);
  if (options.group) follow_group(*options.group, plan);
  const StepMark& target = plan.target;
  if (const auto unfinished = unfinished_return(*superblock_); unfinished && target.step > *unfinished) {
    throw Error(ErrorKind::corrupted, superblock_->file_name() + ": rows were on their way back to step " +
                                          std::to_string(*unfinished) + ", and cannot be those of step " +
                                          std::to_string(target.step));
  }
  EpochRecord epoch{};
  const std::uint64_t before = superblock_->commit().epoch;
  epoch.epoch = std::max(opened.epoch, before) + 1;
  backend_->check_roll_back(epoch.epoch, target.step);
  // What a process left that died is in the files, but a power cut may still take it back: not once something rests on
  // it. What others of a group write once all are ready does.
  superblock_->persist_records();
  dense_->persist_valid();
  if (options.group) options.group->ready();

  // From here on the pool is written, so it was published, whatever a death has left. The epoch comes first; everything
  // after it can be done again from the start.
  if (opened.epoch == 0 || is_unpublished(directory)) mark_published(directory);
  const auto boot = current_boot_id();
  std::copy(boot.begin(), boot.end(), epoch.boot_id);
  epoch.process_id = static_cast<std::uint32_t>(::getpid());
  epoch.has_steps = 1;
  epoch.step = target.step;
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

// The steps of recover, over rows that are open. Nothing but this process has written since, so what was found durable
// then, or was made so since, is.
void Pool::go_on(const InGroup& group) {
  if (!in_group_ || has_dense_ || backend_->tables().empty()) {
    throw Error(ErrorKind::step, "this pool is no writer's of a group: close it, and open it again");
  }
  flush();
  RecoveryPlan plan{};
  plan.rows = plan.target = {step_, cursor_, row_updates_};
  follow_group(group, plan);
  const StepMark& target = plan.target;
  EpochRecord epoch = superblock_->epoch();
  ++epoch.epoch;
  epoch.has_steps = 1;
  epoch.step = target.step;
  latching([&] { backend_->check_go_back(epoch.epoch, target.step); });
  group.ready();

  const auto started = std::chrono::steady_clock::now();
  report_.rows_step = step_;
  latching([&] {
    lock_->check();
    superblock_->write_epoch(epoch);
    const RolledBack undone = backend_->go_back(epoch.epoch, target);
    report_.records_undone = undone.records;
    report_.rows_restored = undone.rows;
  });
  step_ = target.step;
  cursor_ = target.cursor;
  row_updates_ = target.row_updates;
  updated_ = false;
  non_finite_.reset();
  updated_tables_.assign(updated_tables_.size(), false);
  staged_step_ = target.step;
  durable_step_ = target.step;
  rows_durable_step_ = target.step;
  for (std::uint32_t table = 0; table < keys_.size(); ++table) {
    keys_[table] = {};  // it may have keys of steps that are undone
    backend_->leave_keys_behind(table, {});
  }
  report_.clean = false;
  report_.epoch = epoch.epoch;
  report_.step = target.step;
  report_.cursor = target.cursor;
  report_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
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

}  // namespace holdfast
