#include "readers/superblock_repair.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/checksum.h"
#include "base/error.h"
#include "commit/dense_slots.h"
#include "in_place/undo_log.h"
#include "layout/pool_files.h"
#include "layout/superblock.h"
#include "layout/unpublished.h"
#include "log_store/log_store.h"
#include "media/directory.h"
#include "media/medium.h"

namespace holdfast {
namespace {

using format::CommitRecord;
using format::EpochRecord;
using format::RecordHeader;

using Bytes = std::vector<std::byte>;

// Nothing where there is no such file. One that is there and cannot be read is not lost: whoever asks is told.
std::optional<Bytes> bytes_of(const std::string& directory, const char* name) {
  if (!has_name(directory + "/" + name)) return std::nullopt;
  const auto file = open_mapped_medium(directory)->open(name, false, Access::sequential);
  return Bytes(file->data(), file->data() + file->size());
}

bool same_once(const Bytes& superblock, const Bytes& copy) {
  if (superblock.size() != copy.size()) return false;
  const auto same = [&](std::size_t begin, std::size_t end) {
    return std::memcmp(superblock.data() + begin, copy.data() + begin, end - begin) == 0;
  };
  return same(0, format::epoch_offset[0]) && same(format::tables_offset, copy.size());
}

Bytes without_records(Bytes image) {
  std::fill(image.begin() + static_cast<std::ptrdiff_t>(format::epoch_offset[0]),
            image.begin() + static_cast<std::ptrdiff_t>(format::tables_offset), std::byte{});
  return image;
}

template <format::Persistent T>
std::optional<T> record_in(const Bytes& image, std::size_t offset, std::uint64_t magic, std::uint32_t seed) {
  if (image.size() < offset + sizeof(T)) return std::nullopt;
  T value;
  std::memcpy(&value, image.data() + offset, sizeof(T));
  if (value.magic != magic || value.crc != crc_of(value, seed)) return std::nullopt;
  return value;
}

template <format::Persistent T>
bool has_record(const Bytes& image, const std::size_t (&offsets)[2], std::uint64_t magic, std::uint32_t seed) {
  return record_in<T>(image, offsets[0], magic, seed) || record_in<T>(image, offsets[1], magic, seed);
}

// Where recovery begins: the life that wrote last, and a step of it with a dense state.
class LastLife {
 public:
  LastLife(const std::string& directory, const Superblock::Once& once)
      : directory_(directory),
        once_(once),
        in_place_(once.header.store == static_cast<std::uint32_t>(format::Store::in_place)) {}

  CommitRecord commit() const {
    const auto medium = open_mapped_medium(directory_, in_place_ ? Flushing::mapped : Flushing::synced);
    DenseSlots slots(*medium, open_dense_files(*medium, false), Superblock::identity_of(once_.header));
    slots.load(0, std::numeric_limits<std::uint64_t>::max(), false);
    const auto dense = slots.newest(std::numeric_limits<std::uint64_t>::max());
    return in_place_ ? of_undo_log(*medium, dense) : of_row_log(dense);
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw Error(ErrorKind::corrupted, directory_ + ": " + why + ", and nothing but the lost " + superblock_name +
                                          " says at which step the pool was");
  }

  static CommitRecord at(const format::DenseHeader& state, std::uint64_t epoch) {
    CommitRecord record{};
    record.epoch = epoch;
    record.step = state.step;
    record.cursor = state.cursor;
    record.row_updates = state.row_updates;
    record.last_record = format::no_position;
    return record;
  }

  // Every row log's record says all that a commit record would.
  CommitRecord of_row_log(const std::optional<DenseState>& dense) const {
    const ShardSet owned = once_.shards ? shards_of(*once_.shards) : ShardSet{};
    LogStoreOptions options;
    options.ring_bytes = once_.header.log_bytes;
    options.writable = false;
    options.identity = Superblock::identity_of(once_.header);
    const Identity of_rows = Superblock::row_identity_of(once_.header);
    const HomeOrder order = Superblock::home_order_of(once_.header);
    LogStore store(directory_, row_tables_of(once_.tables, once_.header.seed, owned, of_rows, order), options);
    const StepMark newest = store.scan();
    CommitRecord record{};
    record.epoch = std::max(store.epoch_of_checkpoint(), dense ? dense->header.epoch : 0);
    record.step = newest.step;
    record.cursor = newest.cursor;
    record.row_updates = newest.row_updates;
    record.last_record = format::no_position;
    return record;
  }

  // Rows are at the newest dense state's step once everything that was logged after it is undone. That is one unbroken
  // chain of the last life that has any: the lives between had undone theirs, and what was given up is of earlier steps.
  CommitRecord of_undo_log(Medium& medium, const std::optional<DenseState>& dense) const {
    if (once_.shards) refuse("this part of a group's pool has no dense states");
    if (!dense) refuse("no dense state was ever saved, or none holds");
    const format::DenseHeader& state = dense->header;
    const Identity identity = Superblock::identity_of(once_.header);
    const auto ring = open_log_file(medium, identity, once_.header.log_bytes, false);
    const UndoLog log(medium, *ring, identity.seed());
    std::uint64_t end = 0;
    std::vector<RecordHeader> after = records_of_last_life(*ring, log, state, end);
    CommitRecord record = at(state, after.empty() ? state.epoch : after.front().epoch);
    std::erase_if(after, [&](const RecordHeader& found) { return found.step <= state.step; });
    if (after.empty()) {
      record.log_head = record.log_tail = end;
      record.last_record_step = state.step;
      return record;
    }
    const RecordHeader& first = after.front();
    const bool begins_there = first.previous == format::no_position
                                  ? first.previous_step == state.step
                                  : first.epoch == state.epoch && first.previous_step <= state.step;
    if (!begins_there) refuse("the log does not lead back to the dense state of step " + std::to_string(state.step));
    for (std::size_t i = 1; i < after.size(); ++i) {
      if (after[i].previous == after[i - 1].position && after[i].previous_crc == after[i - 1].crc) continue;
      refuse(log.place(after[i].position) + ": the record before this one is lost");
    }
    record.log_head = record.log_tail = first.position;
    record.last_record = first.previous;
    record.last_record_step = first.previous_step;
    record.last_record_crc = first.previous_crc;
    return record;
  }

  // By position. end: behind every record of any life.
  static std::vector<RecordHeader> records_of_last_life(const File& ring, const UndoLog& log,
                                                        const format::DenseHeader& state, std::uint64_t& end) {
    std::vector<RecordHeader> records;
    for (std::size_t offset = 0; offset + sizeof(RecordHeader) <= ring.size(); offset += format::line_bytes) {
      RecordHeader header;
      std::memcpy(&header, ring.data() + offset, sizeof(header));
      if (header.magic != format::record_magic || header.position % ring.size() != offset) continue;
      const auto record = log.read(header.position);
      if (!record) continue;
      end = std::max(end, header.position + header.bytes);
      if (header.epoch < state.epoch || (!records.empty() && header.epoch < records.front().epoch)) continue;
      if (!records.empty() && header.epoch > records.front().epoch) records.clear();
      records.push_back(header);
    }
    std::ranges::sort(records, {}, &RecordHeader::position);
    return records;
  }

  std::string directory_;
  const Superblock::Once& once_;
  bool in_place_;
};

// Whether the machine has been down since the pool was open nobody knows any more, unless that takes the pool with it.
EpochRecord unclosed(std::uint64_t epoch, const std::string& directory) {
  EpochRecord record{};
  record.epoch = epoch;
  if (is_volatile(directory)) {
    const auto boot = current_boot_id();
    std::copy(boot.begin(), boot.end(), record.boot_id);
  }
  return record;
}

WholeFile rebuilt(const std::string& directory, const Bytes& copy, const Superblock::Once& once, const Bytes& was) {
  const std::uint32_t seed = Superblock::identity_of(once.header).seed();
  const bool has_both = has_record<EpochRecord>(was, format::epoch_offset, format::epoch_magic, seed) &&
                        has_record<CommitRecord>(was, format::commit_offset, format::commit_magic, seed);
  if (has_both) {
    Bytes image = copy;
    const auto begin = static_cast<std::ptrdiff_t>(format::epoch_offset[0]);
    const auto end = static_cast<std::ptrdiff_t>(format::tables_offset);
    std::copy(was.begin() + begin, was.begin() + end, image.begin() + begin);
    return {
        superblock_name, std::move(image),
        std::string("what is written once comes from ") + superblock_copy_name + "; its epoch and commit records hold"};
  }
  const CommitRecord commit = LastLife(directory, once).commit();
  const EpochRecord epoch = unclosed(commit.epoch, directory);
  const bool is_trusted =
      is_volatile(directory) || once.header.level == static_cast<std::uint32_t>(format::Level::power);
  return {
      superblock_name, Superblock::with_records(copy, epoch, commit),
      "made anew from " + std::string(superblock_copy_name) + ", the log and the dense slots, as of a life that was " +
          "not closed: the next opening recovers step " + std::to_string(commit.step) + " or an earlier one with a " +
          "dense state" +
          (is_trusted ? "" : "; whether the machine has been down since is not known, so it wants trust_after_reboot")};
}

// Of the superblock or its copy in `image`; throws format_mismatch or corrupted.
Superblock::Once once_in(const std::string& directory, const char* name) {
  const auto medium = open_mapped_medium(directory, Flushing::synced);
  const auto file = medium->open(name, false, Access::sequential);
  return Superblock::read_once(*file);
}

bool holds(const std::string& directory, const char* name) {
  try {
    once_in(directory, name);
    return true;
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::not_found || error.kind() == ErrorKind::corrupted ||
        error.kind() == ErrorKind::format_mismatch) {
      return false;
    }
    throw;
  }
}

}  // namespace

std::optional<std::string> broken_copy(const std::string& directory) {
  const auto superblock = bytes_of(directory, superblock_name);
  const auto copy = bytes_of(directory, superblock_copy_name);
  if (!copy || !superblock || same_once(*superblock, *copy)) return std::nullopt;
  return directory + "/" + superblock_copy_name + ": not the same as what is written once of " + superblock_name;
}

std::optional<WholeFile> plan_superblock_repair(const std::string& directory) {
  const auto was = bytes_of(directory, superblock_name);
  if (was && holds(directory, superblock_name)) {
    if (!broken_copy(directory)) return std::nullopt;
    return WholeFile{superblock_copy_name, without_records(*was),
                     std::string("what is written once comes from ") + superblock_name + ", which holds"};
  }
  if (is_unpublished(directory)) {
    throw Error(ErrorKind::corrupted, directory + ": the pool was never published: train, and it is made anew");
  }
  const auto copy = bytes_of(directory, superblock_copy_name);
  if (!copy) {
    throw Error(ErrorKind::corrupted, directory + ": " + superblock_name + " is " + (was ? "damaged" : "lost") +
                                          ", and there is no " + superblock_copy_name +
                                          " that says what it was; put one of them back from a copy of the directory");
  }
  return rebuilt(directory, *copy, once_in(directory, superblock_copy_name), was.value_or(Bytes{}));
}

}  // namespace holdfast
