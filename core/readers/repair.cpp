#include "readers/repair.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "base/checksum.h"
#include "base/error.h"
#include "base/format.h"
#include "commit/dense_slots.h"
#include "in_place/in_place_store.h"
#include "layout/label.h"
#include "layout/pool_files.h"
#include "layout/superblock.h"
#include "log_store/log_store.h"
#include "readers/row_view.h"

namespace holdfast {
namespace {

using format::CommitRecord;
using format::DenseHeader;
using format::EpochRecord;

template <format::Persistent T>
std::vector<std::byte> bytes_of(const T& value) {
  std::vector<std::byte> bytes(sizeof(T));
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

template <format::Persistent T>
T sealed(T value, std::uint64_t magic, std::uint32_t seed) {
  value.magic = magic;
  value.crc = crc_of(value, seed);
  return value;
}

// Two records that are written by turns, as they lie in the superblock.
template <format::Persistent T>
class Twins {
 public:
  Twins(const File& file, const std::size_t (&offsets)[2], std::uint64_t magic, std::uint32_t seed)
      : offsets_(offsets) {
    for (std::size_t i = 0; i < 2; ++i) {
      std::memcpy(&values_[i], file.data() + offsets[i], sizeof(T));
      holds_[i] = values_[i].magic == magic && values_[i].crc == crc_of(values_[i], seed);
    }
  }
  // Which of the two does not hold, where the other does.
  std::optional<std::size_t> lost() const {
    if (holds_[0] == holds_[1]) return std::nullopt;
    return holds_[0] ? 1 : 0;
  }
  bool is_empty(std::size_t i) const { return values_[i].magic == 0 && values_[i].crc == 0; }
  const T& other(std::size_t i) const { return values_[1 - i]; }
  std::size_t offset(std::size_t i) const { return offsets_[i]; }
  std::optional<std::uint64_t> newest_epoch() const {
    std::optional<std::uint64_t> epoch;
    for (std::size_t i = 0; i < 2; ++i) {
      if (holds_[i]) epoch = std::max(epoch.value_or(0), values_[i].epoch);
    }
    return epoch;
  }

 private:
  const std::size_t (&offsets_)[2];
  std::array<T, 2> values_;
  std::array<bool, 2> holds_;
};

// Which life the lost record was of cannot be told, but that the life after the other record's had begun is always a
// state that a crash leaves: recovery then looks at everything. Where the machine has been down since the other record
// was written, the new one is of no boot, and whoever opens the pool at level `process` decides whether to trust it.
std::optional<Edit> epoch_record(const File& file, format::Level level, std::uint32_t seed) {
  const Twins<EpochRecord> epochs(file, format::epoch_offset, format::epoch_magic, seed);
  const Twins<CommitRecord> commits(file, format::commit_offset, format::commit_magic, seed);
  const auto lost = epochs.lost();
  if (!lost) return std::nullopt;
  const EpochRecord& other = epochs.other(*lost);
  const std::uint64_t epoch_of_commits = commits.newest_epoch().value_or(0);
  const bool is_refused = level == format::Level::process && other.clean != 0 && !epochs.is_empty(*lost);
  if (!is_refused && epoch_of_commits <= other.epoch) return std::nullopt;
  EpochRecord record{};
  record.epoch = std::max(other.epoch + 1, epoch_of_commits);
  const bool same_boot = is_current_boot(other.boot_id);
  if (same_boot) std::ranges::copy(other.boot_id, record.boot_id);
  return Edit{
      file.name(), epochs.offset(*lost), bytes_of(sealed(record, format::epoch_magic, seed)),
      std::string("the epoch record says that a life had begun which was not closed: the next opening recovers the "
                  "pool") +
          (same_boot ? "" : "; the machine has been down since, so that wants trust_after_reboot")};
}

class Planner {
 public:
  explicit Planner(const std::string& directory, Medium& medium)
      : medium_(medium),
        superblock_(medium, false),
        rows_(open_row_view(directory, medium, superblock_)),
        seed_(superblock_.identity().seed()),
        closed_(superblock_.epoch()),
        knows_its_end_(closed_.clean != 0 && closed_.has_steps != 0) {}

  RepairPlan plan() {
    commit_record();
    dense_slots();
    rows_->plan_repair(knows_its_end_ ? std::optional(closed_.step) : std::nullopt, plan_);
    return std::move(plan_);
  }

 private:
  void refuse(const std::string& where, const std::string& why) { plan_.refusals.push_back(where + ": " + why); }

  // The older one of a pool that was closed: which one that is, the epoch record says. With a log store the newer one
  // says nothing that the row log does not.
  void commit_record() {
    const auto file = medium_.open(superblock_name, false, Access::sequential);
    const Twins<CommitRecord> commits(*file, format::commit_offset, format::commit_magic, seed_);
    const auto lost = commits.lost();
    if (!lost || closed_.clean == 0) return;
    const CommitRecord& other = commits.other(*lost);
    const std::string where = file->place(commits.offset(*lost));
    if (!knows_its_end_) {
      if (!commits.is_empty(*lost)) refuse(where, "this pool does not say at which step it was closed");
    } else if (other.epoch == closed_.epoch && other.step == closed_.step) {
      if (commits.is_empty(*lost)) return;
      plan_.edits.push_back({file->name(), commits.offset(*lost), bytes_of(CommitRecord{}),
                             "the commit record that does not count is emptied, as creation leaves it"});
    } else if (const StepMark end = rows_->newest(); !rows_->commits_by_record() && end.step == closed_.step) {
      CommitRecord record{};
      record.epoch = closed_.epoch;
      record.step = end.step;
      record.cursor = end.cursor;
      record.row_updates = end.row_updates;
      record.last_record = format::no_position;
      plan_.edits.push_back({file->name(), commits.offset(*lost), bytes_of(sealed(record, format::commit_magic, seed_)),
                             "the commit record is written anew: the row log says step, cursor and row updates, too"});
    } else {
      refuse(where, "the newest commit record is lost, and with it the way into the log");
    }
  }

  void dense_slots() {
    DenseSlots slots(medium_, open_dense_files(medium_, false), superblock_.identity());
    const std::uint64_t step = rows_->newest().step;
    try {
      slots.load(superblock_.commit().epoch, step, closed_.clean != 0);
    } catch (const Error&) {
      // Which of them is damaged, and why, they say below.
    }
    const auto other = slots.newest(step);
    for (std::size_t i = 0; i < 2; ++i) {
      if (!slots.is_damaged(i)) continue;
      const auto file = open_pool_file(medium_, dense_names[i], false);
      const std::string where = file->place(0) + ": " + slots.reason(i);
      if (!other) {
        refuse(where, "the other slot holds no state either");
      } else if (other->header.step == (knows_its_end_ ? closed_.dense_step : step)) {
        // A file that is shorter than its header's block is as long as that again.
        const std::size_t bytes = file->size() < format::block_bytes ? format::block_bytes : sizeof(DenseHeader);
        plan_.edits.push_back({file->name(), 0, std::vector<std::byte>(bytes),
                               "the dense slot that does not count is emptied; the other one holds the state of step " +
                                   std::to_string(other->header.step)});
      } else {
        refuse(where, "it may hold the newest state; the other slot's is of step " +
                          std::to_string(other->header.step) + ", rows are at the end of step " + std::to_string(step));
      }
    }
  }

  Medium& medium_;
  Superblock superblock_;
  std::unique_ptr<RowView> rows_;
  std::uint32_t seed_;
  EpochRecord closed_;
  bool knows_its_end_;
  RepairPlan plan_;
};

}  // namespace

RepairPlan plan_repair(const std::string& directory) {
  auto medium = open_mapped_medium(directory);
  const auto file = open_pool_file(*medium, superblock_name, false);
  const format::PoolHeader header = Superblock::read_header(*file);
  if (format::has_shards(header)) {
    throw Error(ErrorKind::format_mismatch,
                directory + " is one writer's part of a pool of several writers; it is not " + "repaired alone");
  }
  if (header.store != static_cast<std::uint32_t>(format::Store::in_place)) {
    medium = open_mapped_medium(directory, Flushing::synced);
  }
  if (auto edit = epoch_record(*file, medium->level(), Superblock::identity_of(header).seed()))
    return {{std::move(*edit)}, {}};
  return Planner(directory, *medium).plan();
}

RepairPlan plan_label_repair(const std::string& directory) {
  const auto medium = open_mapped_medium(directory);
  const Superblock superblock(*medium, false);
  const std::vector<RowTable> tables = superblock.row_tables();
  const format::PoolHeader& header = superblock.header();
  std::vector<LabelledName> files;
  if (header.store == static_cast<std::uint32_t>(format::Store::in_place)) {
    files = InPlaceStore::files(tables, header.row_checksums != 0);
    files.push_back({log_name, {format::FileKind::log}, superblock.identity()});
  } else {
    files = LogStore::files(tables, superblock.identity());
  }
  RepairPlan plan;
  for (const LabelledName& file : files) {
    const std::string path = directory + "/" + file.name;
    auto damaged = damaged_label(path, file.identity, file.role);
    if (!damaged) continue;
    if (damaged->bytes) {
      plan.edits.push_back({path, damaged->offset, std::move(*damaged->bytes),
                            "the label is written anew: what was left of it says that it was this file's"});
    } else {
      plan.refusals.push_back(path + ": its label does not say that the file is this pool's; put the pool's own back");
    }
  }
  return plan;
}

}  // namespace holdfast
