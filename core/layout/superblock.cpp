#include "layout/superblock.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

#include "base/checksum.h"
#include "base/error.h"
#include "kernels/kernels.h"
#include "media/directory.h"

namespace holdfast {

using format::CommitRecord;
using format::EpochRecord;
using format::PoolHeader;
using format::ShardsRecord;
using format::TableRecord;

namespace {

template <format::Persistent T>
std::optional<T> read_valid(const File& file, std::size_t offset, std::uint64_t magic, std::uint32_t seed) {
  T value;
  std::memcpy(&value, file.data() + offset, sizeof(T));
  if (value.magic != magic || value.crc != crc_of(value, seed)) return std::nullopt;
  return value;
}

template <format::Persistent T>
T sealed(T value, std::uint64_t magic, std::uint32_t seed) {
  value.magic = magic;
  value.crc = crc_of(value, seed);
  return value;
}

template <format::Persistent T>
void put(std::vector<std::byte>& image, std::size_t offset, const T& value) {
  std::memcpy(image.data() + offset, &value, sizeof(T));
}

void write_whole(Medium& medium, const std::string& name, const std::vector<std::byte>& image) {
  const auto file = medium.create(name, image.size(), Access::sequential);
  file->allocate(0, image.size());
  std::memcpy(file->data(), image.data(), image.size());
  medium.persist(file->data(), image.size());
  file->sync();
}

bool newer(const CommitRecord& a, const CommitRecord& b) {
  return a.epoch != b.epoch ? a.epoch > b.epoch : a.step > b.step;
}
bool newer(const EpochRecord& a, const EpochRecord& b) {
  return a.epoch != b.epoch ? a.epoch > b.epoch : a.clean > b.clean;
}

// Reads the pair of records at `offsets` and says which slot holds the newer one.
template <class T>
std::pair<T, std::size_t> read_pair(const File& file, const std::size_t (&offsets)[2], std::uint64_t magic,
                                    std::uint32_t seed, const char* what) {
  const auto first = read_valid<T>(file, offsets[0], magic, seed);
  const auto second = read_valid<T>(file, offsets[1], magic, seed);
  if (!first && !second) {
    throw Error(ErrorKind::corrupted, file.place(offsets[0]) + ": neither " + what + " record holds its checksum");
  }
  const std::size_t slot = first && (!second || newer(*first, *second)) ? 0 : 1;
  return {slot == 0 ? *first : *second, slot};
}

void check_table(const TableRecord& table, const PoolHeader& header, const std::string& where) {
  const auto bad = [&](const std::string& what) { throw Error(ErrorKind::corrupted, where + ": " + what); };
  if (table.num_embeddings == 0 || table.num_embeddings > std::uint64_t{1} << 40) bad("impossible number of rows");
  if (table.embedding_dim == 0 || table.embedding_dim > 4096) bad("impossible embedding_dim");
  if (table.dtype > static_cast<std::uint32_t>(RowDtype::bf16)) bad("unknown row dtype");
  if (table.optimizer > static_cast<std::uint32_t>(RowOptimizer::rowwise_adam)) bad("unknown row optimizer");
  const bool has_keys = table.id_map == static_cast<std::uint32_t>(format::IdMap::dynamic);
  const std::uint32_t state_floats = state_floats_of(static_cast<RowOptimizer>(table.optimizer), table.embedding_dim);
  if (table.state_floats != state_floats + (has_keys ? key_record_floats : 0)) {
    bad("state_floats does not fit the optimizer");
  }
  if (table.pooling > 1) bad("unknown pooling");
  if (table.id_map != static_cast<std::uint32_t>(format::IdMap::identity) && !has_keys) {
    throw Error(ErrorKind::format_mismatch, where + ": this build knows no id map but identity and dynamic");
  }
  if (table.keys > static_cast<std::uint32_t>(format::KeyKind::int64)) {
    throw Error(ErrorKind::format_mismatch, where + ": this build knows no keys but of 64 bits");
  }
  if (has_keys != (table.keys != static_cast<std::uint32_t>(format::KeyKind::none))) bad("id map and keys do not fit");
  if (has_keys && table.turned_away[format::num_admission_chances - 1] == KeyAdmission::never) {
    bad("a table that never admits a key");
  }
  if (has_keys && (!std::ranges::is_sorted(table.stay) || std::ranges::max(table.stay) > format::max_stay_steps)) {
    bad("impossible steps for keys to stay");
  }
  if (table.name[sizeof(table.name) - 1] != '\0') bad("a name without end");
  const bool is_whole = table.table_shards == 1 && table.first_shard < header.num_shards;
  const bool is_split = table.table_shards == header.num_shards && table.first_shard < header.num_shards;
  const bool is_unsharded = table.table_shards == 0 && table.first_shard == 0;
  if (format::has_shards(header) ? !is_whole && !is_split : !is_unsharded) bad("impossible shards");
  if (has_keys && table.table_shards > 1 && table.max_keys != 0 && table.max_keys < table.table_shards) {
    bad("fewer keys than shards");
  }
  const auto layout = shard_layout_of(table);
  const std::uint64_t end_place = layout ? layout->end_place() : table.num_embeddings;
  if (has_keys && end_place > format::max_keyed_rows) bad("impossible number of rows for a table with keys");
}

}  // namespace

std::unique_ptr<Medium> open_pool_medium(const std::string& directory) {
  if (!has_name(directory + "/" + superblock_name)) {
    throw Error(ErrorKind::not_found, directory + " holds no pool");
  }
  auto medium = open_mapped_medium(directory);
  const auto store = static_cast<format::Store>(Superblock(*medium, false).header().store);
  return store == format::Store::in_place ? std::move(medium) : open_mapped_medium(directory, Flushing::synced);
}

ShardSet shards_of(const format::ShardsRecord& record) {
  ShardSet owned;
  for (std::size_t shard = 0; shard < max_shards; ++shard)
    owned[shard] = (record.owned[shard / 8] >> shard % 8 & 1) != 0;
  return owned;
}

format::ShardsRecord shards_record(const ShardSet& owned, const std::array<std::uint8_t, 16>& group_uuid) {
  format::ShardsRecord record{};
  std::copy(group_uuid.begin(), group_uuid.end(), record.group_uuid);
  for (std::size_t shard = 0; shard < max_shards; ++shard) {
    if (owned[shard]) record.owned[shard / 8] |= static_cast<std::uint8_t>(1U << shard % 8);
  }
  return record;
}

std::array<std::uint8_t, 16> current_boot_id() {
  std::array<std::uint8_t, 16> id{};
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  std::getline(file, text);
  std::size_t digit = 0;
  for (const char c : text) {
    int value;
    if (c >= '0' && c <= '9') {
      value = c - '0';
    } else if (c >= 'a' && c <= 'f') {
      value = c - 'a' + 10;
    } else {
      continue;
    }
    if (digit >= 32) break;
    id[digit / 2] = static_cast<std::uint8_t>(id[digit / 2] << 4 | value);
    ++digit;
  }
  return id;
}

bool is_current_boot(const std::uint8_t (&boot_id)[16]) {
  const auto current = current_boot_id();
  return current != decltype(current){} && std::ranges::equal(current, boot_id);
}

std::vector<std::byte> Superblock::write_once(PoolHeader header, std::vector<TableRecord> tables,
                                              const std::optional<ShardsRecord>& shards) {
  std::vector<std::byte> image(format::pool_file_bytes(tables.size(), shards.has_value()));
  const std::uint32_t seed = identity_of(header).seed();
  header.num_tables = static_cast<std::uint32_t>(tables.size());
  put(image, format::header_offset, sealed(header, format::pool_magic, 0));
  for (std::size_t i = 0; i < tables.size(); ++i) {
    tables[i].number = static_cast<std::uint32_t>(i + 1);
    put(image, format::tables_offset + i * sizeof(TableRecord), sealed(tables[i], format::table_magic, seed));
  }
  if (shards) put(image, format::shards_offset(tables.size()), sealed(*shards, format::shards_magic, seed));
  return image;
}

std::vector<std::byte> Superblock::with_records(std::vector<std::byte> image, const EpochRecord& epoch,
                                                const CommitRecord& commit) {
  PoolHeader header;
  std::memcpy(&header, image.data() + format::header_offset, sizeof(header));
  const std::uint32_t seed = identity_of(header).seed();
  put(image, format::epoch_offset[0], sealed(epoch, format::epoch_magic, seed));
  put(image, format::commit_offset[0], sealed(commit, format::commit_magic, seed));
  return image;
}

void Superblock::write_copy(Medium& medium, const std::vector<std::byte>& image) {
  write_whole(medium, superblock_copy_name, image);
}

void Superblock::publish(Medium& medium, const std::vector<std::byte>& image) {
  const std::string fresh = std::string(superblock_name) + ".new";
  write_whole(medium, fresh, image);
  medium.rename(fresh, superblock_name);
  medium.persist_point();
}

Identity Superblock::identity_of(const PoolHeader& header) {
  return header.version >= format::identity_version ? Identity(std::to_array(header.uuid)) : Identity();
}

Identity Superblock::row_identity_of(const PoolHeader& header) {
  const Identity own = identity_of(header);
  return own.uuid() && format::has_shards(header) ? Identity(std::to_array(header.group_uuid)) : own;
}

HomeOrder Superblock::home_order_of(const PoolHeader& header) {
  return header.version >= format::first_touch_version ? HomeOrder::by_first_touch : HomeOrder::by_row;
}

PoolHeader Superblock::read_header(const File& file) {
  PoolHeader header;
  if (file.size() < sizeof(PoolHeader)) {
    throw Error(ErrorKind::format_mismatch, file.name() + ": too short to be a pool");
  }
  std::memcpy(&header, file.data(), sizeof(header));
  if (header.magic != format::pool_magic) {
    throw Error(ErrorKind::format_mismatch, file.name() + ": not a holdfast pool");
  }
  if (header.version < format::oldest_version || header.version > format::version) {
    throw Error(ErrorKind::format_mismatch, file.name() + ": format version " + std::to_string(header.version) +
                                                ", this build knows versions up to " + std::to_string(format::version) +
                                                "; use the holdfast that wrote it");
  }
  if (header.crc != crc_of(header, 0)) {
    throw Error(ErrorKind::corrupted, file.place(0) + ": the pool header's checksum does not hold");
  }
  if (file.size() < format::pool_file_bytes(0, false) ||
      header.num_tables > (file.size() - format::tables_offset) / sizeof(TableRecord) ||
      (format::has_shards(header) && file.size() < format::pool_file_bytes(header.num_tables, true))) {
    throw Error(ErrorKind::corrupted, file.name() + ": truncated to " + std::to_string(file.size()) + " bytes");
  }
  if (header.num_writers != 1 || (!format::has_shards(header) && header.num_shards != 1)) {
    throw Error(ErrorKind::format_mismatch,
                file.name() + ": " + std::to_string(header.num_shards) + " shards; this build opens pools of one");
  }
  if (!std::has_single_bit(header.num_shards) || header.num_shards > max_shards) {
    throw Error(ErrorKind::corrupted,
                file.place(0) + ": impossible number of shards, " + std::to_string(header.num_shards));
  }
  if (header.row_checksums > 1) {
    throw Error(ErrorKind::format_mismatch, file.name() + ": row checksums of a kind that this build does not know");
  }
  const auto newest_store = static_cast<std::uint32_t>(
      header.version < format::log_store_version ? format::Store::in_place : format::Store::log);
  if (header.store > newest_store) {
    throw Error(ErrorKind::corrupted, file.place(0) + ": unknown store");
  }
  if (header.level > static_cast<std::uint32_t>(format::Level::power)) {
    throw Error(ErrorKind::corrupted, file.place(0) + ": unknown durability level");
  }
  return header;
}

Superblock::Once Superblock::read_once(const File& file) {
  Once once{read_header(file), {}, {}};
  const std::uint32_t seed = identity_of(once.header).seed();
  for (std::size_t i = 0; i < once.header.num_tables; ++i) {
    const std::size_t offset = format::tables_offset + i * sizeof(TableRecord);
    const auto table = read_valid<TableRecord>(file, offset, format::table_magic, seed);
    if (!table) {
      throw Error(ErrorKind::corrupted,
                  file.place(offset) + ": the checksum of table record " + std::to_string(i) + " does not hold");
    }
    check_table(*table, once.header, file.place(offset));
    if (table->number != 0 && table->number != i + 1) {
      throw Error(ErrorKind::corrupted, file.place(offset) + ": table record " + std::to_string(table->number - 1) +
                                            " where number " + std::to_string(i) + " belongs");
    }
    once.tables.push_back(*table);
  }
  if (format::has_shards(once.header)) {
    const std::size_t offset = format::shards_offset(once.header.num_tables);
    once.shards = read_valid<ShardsRecord>(file, offset, format::shards_magic, seed);
    if (!once.shards) {
      throw Error(ErrorKind::corrupted, file.place(offset) + ": the checksum of the shards record does not hold");
    }
    if ((shards_of(*once.shards) >> once.header.num_shards).any()) {
      throw Error(ErrorKind::corrupted, file.place(offset) + ": shards that the pool does not have");
    }
    const bool is_identified = identity_of(once.header).uuid().has_value();
    if (is_identified && !std::ranges::equal(once.shards->group_uuid, once.header.group_uuid)) {
      throw Error(ErrorKind::corrupted, file.place(offset) + ": shards of another group than the header's");
    }
  }
  return once;
}

namespace {

// What can be done about a superblock that cannot be read; empty where nothing can.
std::string remedy(Medium& medium) {
  try {
    Superblock::read_once(*medium.open(superblock_copy_name, false, Access::sequential));
  } catch (const std::exception&) {
    return "";
  }
  return "; `holdfast verify --repair` makes it anew from " + std::string(superblock_copy_name);
}

}  // namespace

Superblock::Superblock(Medium& medium, bool writable) : medium_(medium) {
  file_ = medium.open(superblock_name, writable, Access::sequential);
  const File& file = *file_;
  Once once;
  try {
    once = read_once(file);
  } catch (const Error& error) {
    throw Error(error.kind(), error.what() + remedy(medium));
  }
  header_ = once.header;
  tables_ = std::move(once.tables);
  shards_ = once.shards;
  identity_ = identity_of(header_);
  row_identity_ = row_identity_of(header_);
  const std::uint32_t seed = identity_.seed();
  // In this order: an epoch is durable before anything that carries it, so a reader beside a writer finds none missing.
  std::tie(commit_, commit_slot_) =
      read_pair<CommitRecord>(file, format::commit_offset, format::commit_magic, seed, "commit");
  std::tie(epoch_, epoch_slot_) =
      read_pair<EpochRecord>(file, format::epoch_offset, format::epoch_magic, seed, "epoch");
  if (commit_.epoch > epoch_.epoch) {
    throw Error(ErrorKind::corrupted, file.place(format::epoch_offset[1 - epoch_slot_]) +
                                          ": the epoch record of epoch " + std::to_string(commit_.epoch) + " is lost");
  }
}

std::vector<RowTable> Superblock::row_tables() const {
  return row_tables_of(tables_, header_.seed, shards_ ? shards_of(*shards_) : ShardSet{}, row_identity_,
                       home_order_of(header_));
}

std::optional<std::string> Superblock::reason_to_distrust() const {
  const auto& of_record = epoch_.boot_id;
  if (medium_.level() != format::Level::process || epoch_.clean != 0 || is_current_boot(of_record)) {
    return std::nullopt;
  }
  const std::string what_follows = " (" + medium_.description() +
                                   ") keeps no order across that: its rows may be from any moment. Restore a copy, or, "
                                   "if you know that everything had been written back, open it with trust_after_reboot "
                                   "(holdfast train --trust-after-reboot)";
  constexpr std::array<std::uint8_t, 16> unknown{};
  const bool says_no_boot = std::ranges::equal(of_record, unknown);
  if (says_no_boot || current_boot_id() == unknown) {
    const std::string why = says_no_boot ? "it was repaired, or /proc/sys/kernel/random/boot_id was missing then"
                                         : "/proc/sys/kernel/random/boot_id is missing";
    return "was open when it was left, and whether the machine has been down since cannot be told here (" + why +
           "); its medium" + what_follows;
  }
  const bool sync_failed = std::all_of(std::begin(of_record), std::end(of_record),
                                       [](std::uint8_t byte) { return byte == format::boot_id_byte_of_failed_sync; });
  return (sync_failed ? "could not be synced when it was closed, and its medium"
                      : "was open when the machine went down, and its medium") +
         what_follows;
}

std::vector<std::string> Superblock::broken_records() const {
  std::vector<std::string> broken;
  const auto look_at = [&]<class T>(const std::size_t (&offsets)[2], std::uint64_t magic, const char* what, T) {
    for (const std::size_t offset : offsets) {
      T value;
      std::memcpy(&value, file_->data() + offset, sizeof(T));
      if ((value.magic == 0 && value.crc == 0) || read_valid<T>(*file_, offset, magic, identity_.seed())) continue;
      broken.push_back(file_->place(offset) + ": the checksum of this " + what + " record does not hold");
    }
  };
  if (medium_.level() != format::Level::power) {
    look_at(format::epoch_offset, format::epoch_magic, "epoch", EpochRecord{});
  }
  look_at(format::commit_offset, format::commit_magic, "commit", CommitRecord{});
  return broken;
}

// Written once more: after a sync that failed, a page may be right in memory alone, and pass for written.
void Superblock::persist_records() {
  const auto write = [&](std::size_t offset, const auto& record) {
    alignas(format::sector_bytes) std::array<std::byte, format::sector_bytes> sector{};
    static_assert(sizeof(record) <= sector.size());
    std::memcpy(sector.data(), &record, sizeof(record));
    file_->write(offset, sector.data(), sector.size());
    medium_.flush(file_->data() + offset, sector.size());
  };
  write(format::epoch_offset[epoch_slot_], epoch_);
  write(format::commit_offset[commit_slot_], commit_);
  medium_.persist_point();
}

std::string Superblock::place_of_older_commit() const { return file_->place(format::commit_offset[1 - commit_slot_]); }

void Superblock::write_epoch(EpochRecord record) {
  record.magic = format::epoch_magic;
  record.crc = crc_of(record, identity_.seed());
  epoch_slot_ = 1 - epoch_slot_;
  std::byte* target = file_->data() + format::epoch_offset[epoch_slot_];
  std::memcpy(target, &record, sizeof(record));
  medium_.persist(target, sizeof(record));
  file_->sync();
  epoch_ = record;
}

void Superblock::write_commit(CommitRecord record) {
  record.magic = format::commit_magic;
  record.crc = crc_of(record, identity_.seed());
  commit_slot_ = 1 - commit_slot_;
  std::byte* target = file_->data() + format::commit_offset[commit_slot_];
  medium_.persist_point();
  std::memcpy(target, &record, sizeof(record));
  medium_.persist(target, sizeof(record));
  commit_ = record;
}

CommitRecord Superblock::read_commit() const {
  return read_pair<CommitRecord>(*file_, format::commit_offset, format::commit_magic, identity_.seed(), "commit").first;
}

EpochRecord Superblock::read_epoch() const {
  return read_pair<EpochRecord>(*file_, format::epoch_offset, format::epoch_magic, identity_.seed(), "epoch").first;
}

}  // namespace holdfast
