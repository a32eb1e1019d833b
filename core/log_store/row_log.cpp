#include "log_store/row_log.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checksum.h"
#include "base/error.h"
#include "layout/label.h"

namespace holdfast {

using format::RowLogCheckpoint;
using format::RowLogHeader;
using format::RowLogSection;

namespace {

RowLogCheckpoint seal(RowLogCheckpoint checkpoint, std::uint32_t seed) {
  checkpoint.magic = format::row_log_checkpoint_magic;
  checkpoint.crc = crc_of(checkpoint, seed);
  return checkpoint;
}

RowLogCheckpoint read_bytes(const BlockFile& file, std::uint64_t offset, BlockQueue& queue) {
  const SectorBuffer block(format::block_bytes);
  const BlockRead read{&file, offset, block.size(), block.data()};
  queue.read_many({&read, 1});
  RowLogCheckpoint checkpoint;
  std::memcpy(&checkpoint, block.data(), sizeof(checkpoint));
  return checkpoint;
}

bool is_whole(const RowLogCheckpoint& checkpoint, std::uint32_t seed) {
  return checkpoint.magic == format::row_log_checkpoint_magic && checkpoint.crc == crc_of(checkpoint, seed);
}

std::optional<RowLogCheckpoint> read_checkpoint(const BlockFile& file, std::uint64_t offset, BlockQueue& queue,
                                                std::uint32_t seed) {
  const RowLogCheckpoint checkpoint = read_bytes(file, offset, queue);
  return is_whole(checkpoint, seed) ? std::optional(checkpoint) : std::nullopt;
}

}  // namespace

void RowLog::write_block(BlockFile& file, std::uint64_t offset, const RowLogCheckpoint& checkpoint) {
  const SectorBuffer block(format::block_bytes);
  std::memset(block.data(), 0, block.size());
  std::memcpy(block.data(), &checkpoint, sizeof(checkpoint));
  file.write(offset, block.size(), block.data());
}

RowLog::Live RowLog::Live::of(const RowLogHeader& header) {
  return {{header.position, header.crc, {header.step, header.cursor, header.row_updates}},
          {header.previous,
           header.previous_crc,
           {header.previous_step, header.previous_cursor, header.previous_row_updates}},
          header.bytes,
          header.images_offset};
}

void RowLog::create(const std::string& path, std::uint64_t ring_bytes, Caching caching, const StepMark& mark,
                    std::optional<std::uint64_t> home_rows, const Identity& identity) {
  if (ring_bytes == 0 || ring_bytes % format::block_bytes != 0) {
    throw Error(ErrorKind::config, path + ": a row log's ring takes a multiple of 4096 bytes");
  }
  create_labelled_blocks(path, format::row_log_ring_offset + ring_bytes, identity, {format::FileKind::row_log});
  BlockFile file(path, caching);
  file.allocate(0, file.size());
  RowLogCheckpoint checkpoint{};
  checkpoint.last_record = format::no_position;
  checkpoint.last_record_step = mark.step;
  checkpoint.last_record_cursor = mark.cursor;
  checkpoint.last_record_row_updates = mark.row_updates;
  checkpoint.merged_step = mark.step;
  checkpoint.home_rows = home_rows ? *home_rows + 1 : 0;
  write_block(file, format::row_log_checkpoint_offset[0], seal(checkpoint, identity.seed()));
  file.sync();
}

RowLog::RowLog(const std::string& path, Caching caching, BlockWatcher* watcher, Opening opening, BlockQueue& queue,
               const Identity& identity)
    : file_(path, caching, watcher, opening), queue_(queue), seed_(identity.seed()) {
  check_label_of(file_, queue_, identity, {format::FileKind::row_log});
  if (file_.size() <= format::row_log_ring_offset || file_.size() % format::block_bytes != 0) {
    throw Error(ErrorKind::corrupted, path + ": " + std::to_string(file_.size()) + " bytes are no row log");
  }
  const auto first = read_checkpoint(file_, format::row_log_checkpoint_offset[0], queue_, seed_);
  const auto second = read_checkpoint(file_, format::row_log_checkpoint_offset[1], queue_, seed_);
  if (!first && !second) throw Error(ErrorKind::corrupted, file_.place(0) + ": neither checkpoint holds its checksum");
  checkpoint_slot_ = first && (!second || first->sequence > second->sequence) ? 0 : 1;
  checkpoint_ = checkpoint_slot_ == 0 ? *first : *second;
  next_home_rows_ = checkpoint_.home_rows;
}

std::optional<std::uint64_t> RowLog::home_rows() const {
  return checkpoint_.home_rows == 0 ? std::nullopt : std::optional(checkpoint_.home_rows - 1);
}

void RowLog::set_home_rows(std::optional<std::uint64_t> count) { next_home_rows_ = count ? *count + 1 : 0; }

void RowLog::checkpoint() { checkpoint_without(0, checkpoint_.merged_step); }

std::optional<std::uint64_t> RowLog::offset_of_broken_checkpoint() const {
  const std::uint64_t offset = format::row_log_checkpoint_offset[1 - checkpoint_slot_];
  const RowLogCheckpoint other = read_bytes(file_, offset, queue_);
  const bool is_empty = other.magic == 0 && other.crc == 0;
  return is_empty || is_whole(other, seed_) ? std::nullopt : std::optional(offset);
}

std::optional<std::string> RowLog::broken_checkpoint() const {
  const auto offset = offset_of_broken_checkpoint();
  if (!offset) return std::nullopt;
  return file_.place(*offset) + ": the checksum of this checkpoint does not hold";
}

void RowLog::read_range(std::uint64_t position, std::uint64_t bytes, std::byte* dst) const {
  queue_.read_range(file_, offset_of(position), bytes, dst);
}

std::optional<RowLogHeader> RowLog::check_header(const std::byte* data, std::uint64_t position,
                                                 std::string* why) const {
  const auto refuse = [why](const char* reason) -> std::optional<RowLogHeader> {
    *why = reason;
    return std::nullopt;
  };
  RowLogHeader header;
  std::memcpy(&header, data, sizeof(header));
  if (header.magic != format::row_log_record_magic) return refuse("no record here");
  if (header.crc != crc_of(header, seed_)) return refuse("the record header's checksum does not hold");
  if (header.position != position) return refuse("a record of another turn of the ring");
  if (header.bytes % format::block_bytes != 0 || header.bytes > ring_bytes() - position % ring_bytes() ||
      header.images_offset > header.bytes || header.images_offset % format::sector_bytes != 0 ||
      header.images_offset < sizeof(header) ||
      header.num_sections > (header.images_offset - sizeof(header)) / sizeof(RowLogSection)) {
    return refuse("a record length that does not fit");
  }
  return header;
}

std::optional<RowLogHeader> RowLog::read_header(std::uint64_t position, std::string* why) const {
  const SectorBuffer unit(file_.unit_bytes());
  read_range(position, file_.unit_bytes(), unit.data());
  return check_header(unit.data(), position, why);
}

void RowLog::read(const Live& record, std::uint64_t bytes, std::byte* dst) const {
  read_range(record.link.position, format::align_up(bytes, file_.unit_bytes()), dst);
  std::string why;
  const auto header = check_header(dst, record.link.position, &why);
  if (!header || header->crc != record.link.crc) {
    throw Error(ErrorKind::corrupted,
                place(record.link.position) + ": " + (header ? "a record that breaks the chain" : why));
  }
  if (crc32c(seed_, dst + sizeof(RowLogHeader), header->images_offset - sizeof(RowLogHeader)) != header->rows_crc) {
    throw Error(ErrorKind::corrupted,
                place(record.link.position) + ": the checksum of the record's row numbers does not hold");
  }
}

void RowLog::check_start(std::uint64_t epoch, std::uint64_t step) const {
  const bool again = epoch_ != 0 && epoch == epoch_;
  if (!again && epoch <= checkpoint_.epoch) {
    throw Error(ErrorKind::corrupted, file_.place(format::row_log_checkpoint_offset[checkpoint_slot_]) +
                                          ": a checkpoint of epoch " + std::to_string(checkpoint_.epoch) +
                                          ", the pool is in epoch " + std::to_string(epoch));
  }
  if (step < checkpoint_.merged_step) {
    throw Error(ErrorKind::step, file_.name() + ": cannot go back to step " + std::to_string(step) +
                                     ", rows are merged up to step " + std::to_string(checkpoint_.merged_step));
  }
  if (again && appended_)
    throw Error(ErrorKind::step, file_.name() + ": steps were appended; open it again to go back");
}

void RowLog::start(std::uint64_t epoch, std::uint64_t step) {
  check_start(epoch, step);
  make_found_durable();
  epoch_ = epoch;
  appended_ = false;
  {
    const std::lock_guard lock(mutex_);
    while (!live_.empty() && live_.back().link.mark.step > step) {
      newest_ = {live_.back().previous, live_.back().link.position};
      live_.pop_back();
      if (!live_.empty()) newest_.end = live_.back().end();
    }
    durable_ = newest_;
  }
  write_checkpoint(live_.empty() ? newest_.end : live_.front().link.position, checkpoint_.merged_step, durable_);
}

std::optional<std::uint64_t> RowLog::room_for(std::uint64_t bytes, std::uint64_t pinned) const {
  const std::lock_guard lock(mutex_);
  std::uint64_t position = newest_.end;
  if (position % ring_bytes() + bytes > ring_bytes()) position = next_turn(position);
  // An empty log has no tail to spare: it may begin anywhere, so a record as large as the ring fits.
  const std::uint64_t tail = live_.empty() ? position : live_.front().link.position;
  if (position + bytes - std::min(tail, pinned) > ring_bytes()) return std::nullopt;
  return position;
}

RowLog::Live RowLog::write(RowLogHeader header, std::uint64_t position, std::byte* record) {
  {
    const std::lock_guard lock(mutex_);
    header.durable = durable_.end;
    header.previous = newest_.last.position;
    header.previous_crc = newest_.last.crc;
    header.previous_step = newest_.last.mark.step;
    header.previous_cursor = newest_.last.mark.cursor;
    header.previous_row_updates = newest_.last.mark.row_updates;
  }
  header.magic = format::row_log_record_magic;
  header.epoch = epoch_;
  header.position = position;
  header.crc = crc_of(header, seed_);
  std::memcpy(record, &header, sizeof(header));
  appended_ = true;
  file_.write(offset_of(position), header.bytes, record);
  return Live::of(header);
}

void RowLog::append(const Live& record) {
  const std::lock_guard lock(mutex_);
  live_.push_back(record);
  newest_ = {record.link, record.end()};
}

void RowLog::sync() {
  Point point;
  {
    const std::lock_guard lock(mutex_);
    if (durable_.end == newest_.end) return;
    point = newest_;
  }
  file_.sync();
  const std::lock_guard lock(mutex_);
  if (point.end > durable_.end) durable_ = point;
}

void RowLog::checkpoint_without(std::size_t count, std::uint64_t merged_step) {
  std::uint64_t tail;
  Point durable;
  {
    const std::lock_guard lock(mutex_);
    tail = live_.size() > count ? live_[count].link.position : newest_.end;
    durable = durable_;
  }
  write_checkpoint(tail, merged_step, durable);
}

void RowLog::write_checkpoint(std::uint64_t tail, std::uint64_t merged_step, const Point& durable) {
  RowLogCheckpoint checkpoint{};
  checkpoint.epoch = epoch_;
  checkpoint.sequence = checkpoint_.sequence + 1;
  checkpoint.tail = tail;
  checkpoint.head = durable.end;
  checkpoint.merged_step = merged_step;
  checkpoint.home_rows = next_home_rows_;
  checkpoint.last_record = durable.last.position;
  checkpoint.last_record_crc = durable.last.crc;
  checkpoint.last_record_step = durable.last.mark.step;
  checkpoint.last_record_cursor = durable.last.mark.cursor;
  checkpoint.last_record_row_updates = durable.last.mark.row_updates;
  write_block(file_, format::row_log_checkpoint_offset[1 - checkpoint_slot_], seal(checkpoint, seed_));
  file_.sync();
  const std::lock_guard lock(mutex_);
  checkpoint_ = checkpoint;
  checkpoint_slot_ = 1 - checkpoint_slot_;
}

void RowLog::forget(std::size_t count) {
  const std::lock_guard lock(mutex_);
  live_.erase(live_.begin(), live_.begin() + static_cast<std::ptrdiff_t>(count));
}

std::deque<RowLog::Live> RowLog::live() const {
  const std::lock_guard lock(mutex_);
  return live_;
}

StepMark RowLog::last() const {
  const std::lock_guard lock(mutex_);
  return newest_.last.mark;
}

RowLog::Link RowLog::newest() const {
  const std::lock_guard lock(mutex_);
  return newest_.last;
}

std::uint64_t RowLog::durable_step() const {
  const std::lock_guard lock(mutex_);
  return durable_.last.mark.step;
}

std::uint64_t RowLog::read_merged_step() const {
  std::uint64_t step = 0;
  for (const std::uint64_t offset : format::row_log_checkpoint_offset) {
    if (const auto checkpoint = read_checkpoint(file_, offset, queue_, seed_))
      step = std::max(step, checkpoint->merged_step);
  }
  return step;
}

std::uint64_t RowLog::merged_step() const {
  const std::lock_guard lock(mutex_);
  return checkpoint_.merged_step;
}

std::uint64_t RowLog::tail() const {
  const std::lock_guard lock(mutex_);
  return live_.empty() ? newest_.end : live_.front().link.position;
}

std::uint64_t RowLog::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return live_.empty() ? 0 : newest_.end - live_.front().link.position;
}

}  // namespace holdfast
