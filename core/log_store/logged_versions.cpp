#include "log_store/logged_versions.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "log_store/log_record.h"
#include "log_store/sector_runs.h"

namespace holdfast {
namespace {

constexpr std::size_t row_numbers_bytes = std::size_t{32} << 20;  // of parts, read at once

}  // namespace

using format::RowLogSection;
using log_record::sections_of;

void LoggedVersions::set_memory(CopyFromMemory copy) {
  const std::lock_guard turn(memory_mutex_);
  copy_from_memory_ = std::move(copy);
}

RecordRange LoggedVersions::records_between(std::optional<std::uint64_t> after_step, std::uint64_t limit_step,
                                            std::uint64_t most_bytes) const {
  const std::uint64_t limit = std::min(limit_step, store_.log.durable_step());
  RecordRange found;
  for (const RowLog::Live& record : store_.log.live()) {
    if (record.link.mark.step > limit) break;
    if (after_step && record.link.mark.step <= *after_step) continue;
    if (!found.records.empty() && record.end() - found.records.front().link.position > most_bytes) break;
    found.records.push_back(record);
  }
  if (!found.records.empty()) {
    const std::uint64_t begin = found.records.front().link.position;
    found.stretch = {begin % store_.log.ring_bytes(), found.records.back().end() - begin, store_.log.ring_bytes()};
  }
  return found;
}

// What was appended last when it was copied is the chosen version if that is what was appended last afterwards.
void LoggedVersions::copy_images(std::uint32_t number, std::span<const LocatedVersion> chosen, HomeVersions& versions,
                                 std::vector<LocatedVersion>& others) {
  const RowLayout& layout = store_.tables[number].layout;
  std::vector<std::uint64_t> rows;
  for (const LocatedVersion& version : chosen) rows.push_back(version.row);
  std::vector<bool> has;
  std::byte* const first = versions.images.data() + versions.rows.size() * layout.image_bytes();
  {
    const std::lock_guard turn(memory_mutex_);
    if (copy_from_memory_) has = copy_from_memory_(number, rows, first, layout.image_bytes());
  }
  if (has.empty()) {
    others.insert(others.end(), chosen.begin(), chosen.end());
    return;
  }
  {
    const LogIndex::Locked locked(store_.index);
    const RowIndex& index = locked.of(number);
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      prefetch_ahead(index, rows.data(), i, rows.size());
      if (has[i]) has[i] = index.find(rows[i]) == chosen[i].location;
    }
  }
  std::byte* next = first;
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    if (!has[i]) {
      others.push_back(chosen[i]);
      continue;
    }
    const std::byte* values = first + i * layout.image_bytes();
    if (next != values) std::memmove(next, values, layout.image_bytes());
    tag_image(layout, number, rows[i], next);
    versions.rows.push_back({rows[i], static_cast<std::uint64_t>(next - versions.images.data())});
    next += layout.image_bytes();
  }
}

std::size_t LoggedVersions::read_images(std::uint32_t number, std::span<const LocatedVersion> chosen,
                                        const SectorBuffer& buffer, const PartSize& most, HomeVersions& versions) {
  const RowLayout& layout = store_.tables[number].layout;
  const std::size_t image_bytes = layout.image_bytes();
  SectorRuns runs(buffer, {.read_gap_bytes = read_gap_bytes,
                           .write_gap_bytes = read_gap_bytes,
                           .unit_bytes = store_.io.unit_bytes,
                           .most_bytes = most.bytes,
                           .most_writes = most.requests});
  std::vector<const std::byte*> images;
  for (const LocatedVersion& version : chosen) {
    const std::byte* image = runs.place(store_.log.file(), LogIndex::offset_of(version.location), image_bytes);
    if (image == nullptr) break;
    images.push_back(image);
  }
  store_.io.queue.read_many(runs.reads());
  note_reads(runs.reads().size(), runs.read_bytes());
  for (std::size_t i = 0; i < images.size(); ++i) {
    const auto [row, location] = chosen[i];
    if (check_image(layout, number, row, images[i]) != ImageState::whole) {
      throw Error(ErrorKind::corrupted,
                  damaged_row(store_.log.file().place(LogIndex::offset_of(location)), number, row));
    }
    const std::size_t at = versions.rows.size() * image_bytes;
    std::memcpy(versions.images.data() + at, images[i], image_bytes);
    versions.rows.push_back({row, at});
  }
  return runs.reads().size();
}

// The row numbers are checked here, and read again when they are wanted.
std::vector<std::vector<RecordPart>> LoggedVersions::parts_of(const RecordRange& range, const Between& between) {
  std::vector<std::vector<RecordPart>> parts(store_.tables.size());
  std::uint64_t bytes = 0;
  for (auto record = range.records.rbegin(); record != range.records.rend(); ++record) {
    between();
    const SpareBuffers::Borrowed data = records_.read_rows(*record);
    for (const RowLogSection& section : sections_of(data.data())) {
      parts[section.table].push_back({record->link.position, section});
    }
    bytes += record->images_offset;
  }
  note_reads(range.records.size(), bytes);
  return parts;
}

std::vector<LocatedVersion> LoggedVersions::newest_of(std::span<const RecordPart> parts,
                                                      std::span<const LocatedVersion> wanted, const Between& between) {
  RowIndex missing;
  for (const LocatedVersion& version : wanted) missing.insert(version.row, 0);
  std::vector<LocatedVersion> found;
  for (std::size_t done = 0; done < parts.size() && missing.size() != 0;) {
    between();
    const auto some = some_parts(parts.subspan(done));
    done += some.size();
    std::vector<const std::uint64_t*> numbers;
    const auto data = read_row_numbers(some, numbers);
    for (std::size_t part = 0; part < some.size(); ++part) {
      const std::uint64_t num_rows = some[part].section.num_rows;
      LogIndex::Locations locations = store_.index.locations_of(some[part].position, some[part].section);
      for (std::uint64_t i = 0; i < num_rows; ++i) {
        prefetch_ahead(missing, numbers[part], i, num_rows);
        const std::uint64_t row = numbers[part][i];
        const std::uint64_t location = locations.next();
        if (!missing.find(row)) continue;
        missing.erase_if_equal(row, 0);
        found.push_back({row, location});
      }
    }
  }
  return found;
}

// As many as there is room for at once; at least one.
std::span<const RecordPart> LoggedVersions::some_parts(std::span<const RecordPart> parts) const {
  std::size_t bytes = 0;
  std::size_t count = 0;
  for (const RecordPart& part : parts) {
    bytes += part.section.num_rows * sizeof(std::uint64_t);
    if (bytes > std::min(row_numbers_bytes, most_bytes_) && count != 0) break;
    ++count;
  }
  return parts.first(count);
}

// The parts' row numbers, which live as long as what is returned.
SpareBuffers::Borrowed LoggedVersions::read_row_numbers(std::span<const RecordPart> parts,
                                                        std::vector<const std::uint64_t*>& numbers) {
  const auto extent_of = [unit = store_.io.unit_bytes](const RowLogSection& section) {
    const std::uint64_t begin = section.rows_offset / unit * unit;
    const std::uint64_t end = section.rows_offset + section.num_rows * sizeof(std::uint64_t);
    return std::pair(begin, format::align_up(end, unit) - begin);
  };
  std::size_t bytes = 0;
  for (const RecordPart& part : parts) bytes += extent_of(part.section).second;
  SpareBuffers::Borrowed data = store_.io.spare.borrow(bytes);
  std::vector<BlockRead> reads;
  std::byte* next = data.data();
  for (const RecordPart& part : parts) {
    const auto [begin, extent_bytes] = extent_of(part.section);
    reads.push_back({&store_.log.file(), store_.log.offset_of(part.position) + begin, extent_bytes, next});
    numbers.push_back(reinterpret_cast<const std::uint64_t*>(next + (part.section.rows_offset - begin)));
    next += extent_bytes;
  }
  store_.io.queue.read_many(reads);
  note_reads(reads.size(), bytes);
  return data;
}

void LoggedVersions::note_reads(std::uint64_t requests, std::uint64_t bytes) {
  store_.io.counters.change([&](LogStoreCounters& counters) {
    counters.merge_log_requests += requests;
    counters.merge_log_bytes_read += bytes;
  });
}

}  // namespace holdfast
