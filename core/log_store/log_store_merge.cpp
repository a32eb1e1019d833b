// The log store's way home that a merge takes: table by table, and a large table a range of rows at a time. The index
// says which rows have their newest version in the records that are merged, and where; those are read by the order of
// the log and written by the order of home.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

#include "base/error.h"
#include "log_store/log_record.h"
#include "log_store/log_store.h"
#include "log_store/sector_runs.h"

namespace holdfast {

using format::RowLogSection;
using log_record::sections_of;

namespace {

// A part of a merge: so much is read, then written. Beside training a thread waits for its turn after each of the two,
// so long parts get more done. But a commit waits for the device as long as a part takes, several times: so parts are
// short, and there are rests in proportion, while there is time.
constexpr std::size_t buffer_bytes = std::size_t{32} << 20;
constexpr std::size_t short_part_bytes = std::size_t{4} << 20;
// And whatever the device, nobody waits for a part much longer than this: neither a commit nor who stops a merge.
constexpr std::chrono::milliseconds longest_part{300};
constexpr std::size_t least_requests = 16;
constexpr std::size_t most_writes = 8 * BlockQueue::depth;
constexpr std::size_t most_reads = 64 * BlockQueue::depth;
constexpr int rests_per_part = 3;
// A device reads what is between two blocks while it would turn to another request, which also takes a microsecond of
// CPU. What is written wears it out: there one block goes with its neighbours, no more.
constexpr std::size_t read_gap_bytes = 2 * format::block_bytes;
constexpr std::size_t write_gap_bytes = format::block_bytes;
// A merge begins and ends with rests. Before the first look, rows come again that it need not write; they are the first
// share of its progress. At the end, the last steps that it met come to stand, as a rule.
constexpr std::chrono::milliseconds long_rest{200};
constexpr int first_rests = 5;
constexpr double share_of_first_rests = 0.2;
constexpr int most_last_rests = 10;
constexpr std::size_t copied_at_once = std::size_t{64} << 10;  // versions, from memory
constexpr double share_of_reading = 0.2;  // of a merge's progress: what it reads of the log

struct GivenUp {};

// So many requests make a part that does not take too long.
class RequestsPerPart {
 public:
  explicit RequestsPerPart(std::size_t most) : most_(most) {}
  std::size_t most() const { return now_; }
  void learn(std::size_t requests, std::chrono::nanoseconds took) {
    const auto fitting = static_cast<double>(requests) * (std::chrono::duration<double>(longest_part) / took);
    const auto wanted = std::min(fitting, 2.0 * static_cast<double>(now_));  // one that was cached says little
    now_ = std::clamp(static_cast<std::size_t>(wanted), least_requests, most_);
  }

 private:
  std::size_t most_;
  std::size_t now_ = BlockQueue::depth;
};

}  // namespace

// A merge at work.
class LogStore::Merge {
 public:
  Merge(LogStore& store, Records records, const Limit& limit, const Rest& rest, const GivesUp& gives_up)
      : store_(store),
        records_(std::move(records)),
        limit_(limit),
        rest_(rest),
        gives_up_(gives_up),
        buffer_(store.spare_.borrow(buffer_bytes)),
        merged_step_(records_.last_step()),
        undecided_(store.tables_.size()) {}

  // Returns how many bytes of the log it took. Throws GivenUp.
  std::uint64_t run() {
    // As it is now: the index grows by what is appended meanwhile, and shares of that would add up to more than one.
    std::vector<double> begun;
    for (std::uint32_t t = 0; t < store_.tables_.size(); ++t) begun.push_back(index_image_bytes(t));
    all_bytes_ = std::accumulate(begun.begin(), begun.end(), 0.0);
    for (Table& table : store_.tables_) {
      for (Home& home : table.homes) home.addresses_when_begun = home.addresses ? home.addresses->count() : 0;
    }
    for (int i = 0; i < first_rests; ++i) rest(long_rest, share_of_first_rests);
    for (std::uint32_t t = 0; t < store_.tables_.size(); ++t) merge_table(t, begun[t]);
    for (int i = 0; i < most_last_rests && !is_decided(); ++i) rest(long_rest, 1.0);
    settle();
    store_.latching([&] {
      store_.require_unfailed();
      store_.sync_home_rows();
      store_.log_.checkpoint_without(records_.records.size(), merged_step_);
      store_.give_up(records_);
    });
    std::uint64_t bytes = 0;
    for (const RowLog::Live& record : records_.records) bytes += record.bytes;
    const std::lock_guard lock(store_.mutex_);
    ++store_.counters_.merges;
    store_.counters_.merged_bytes += bytes;
    store_.counters_.standing_bytes += static_cast<std::uint64_t>(mean_standing_bytes());
    return bytes;
  }

 private:
  // A look at the index: which step was the newest, and what share of all bytes was looked at.
  struct Look {
    std::uint64_t newest_step;
    double share;
  };

  std::uint64_t image_bytes(std::uint32_t t) const { return store_.tables_[t].layout.image_bytes(); }
  // Of the table's rows that have a version in the log.
  double index_image_bytes(std::uint32_t t) const {
    const std::lock_guard lock(store_.mutex_);
    return static_cast<double>(store_.tables_[t].index.size() * image_bytes(t));
  }

  // begun_bytes: of the table's rows that had a version in the log when the merge began.
  void merge_table(std::uint32_t t, double begun_bytes) {
    Table& table = store_.tables_[t];
    const std::uint64_t num_rows = table.what.owned_rows();
    const double bytes = index_image_bytes(t);
    // So many shares that the versions in one of them are not too many to collect; where rows crowd in one they may be
    // more.
    const double taken = static_cast<double>(records_.stretch.bytes) / static_cast<double>(store_.used_bytes());
    const auto most_shares =
        static_cast<std::uint64_t>(std::min(1.0, taken) * bytes / static_cast<double>(store_.merge_bytes_)) + 1;
    const std::uint64_t num_shares = bytes == 0 ? 0 : std::min(most_shares, num_rows);
    for (std::uint64_t number = 0; number < num_shares; ++number) {
      const double share = all_bytes_ == 0 ? 0 : begun_bytes / static_cast<double>(num_shares) / all_bytes_;
      look_at_limit();
      chosen_.clear();
      looks_.push_back({store_.log_.last().step, share});
      store_.choose(t, {number, num_shares}, records_.stretch, standing_, chosen_, undecided_[t], between_);
      write(t, share);
      if (undecided_image_bytes() > store_.merge_bytes_) settle();
    }
    store_.sync_merged(table);
  }

  // The images of what is chosen: from memory, and then the others from the log.
  void read(std::uint32_t t, double share) {
    std::sort(chosen_.begin(), chosen_.end(),
              [](const Located& a, const Located& b) { return a.location < b.location; });
    const std::size_t count = chosen_.size();
    versions_.rows.clear();
    versions_.images.resize(count * image_bytes(t));
    const auto rest_between = [&](std::size_t done) {
      rest({}, progress_of(merged_share_ + share * done_of(done, count)));
    };
    in_log_.clear();
    for (std::size_t done = 0; done < count;) {
      const auto some = std::span(chosen_).subspan(done, std::min(copied_at_once, count - done));
      store_.copy_images(t, some, versions_, in_log_);
      done += some.size();
      rest_between(versions_.rows.size());
    }
    for (std::size_t done = 0; done < in_log_.size();) {
      const std::size_t before = versions_.rows.size();
      const auto began = std::chrono::steady_clock::now();
      const std::size_t requests = store_.read_images(t, std::span(in_log_).subspan(done), buffer_.buffer(),
                                                      {buffer_bytes, reads_.most()}, versions_);
      reads_.learn(requests, std::chrono::steady_clock::now() - began);
      done += versions_.rows.size() - before;
      rest_between(versions_.rows.size());
    }
  }

  void write(std::uint32_t t, double share) {
    read(t, share_of_reading * share);
    store_.settle_addresses(store_.tables_[t], versions_.rows);
    {
      const std::lock_guard lock(store_.mutex_);
      store_.counters_.merged_rows += versions_.rows.size();
    }
    const std::span<const Version> versions = versions_.rows;
    for (std::size_t done = 0; done < versions.size();) {
      const auto began = std::chrono::steady_clock::now();
      const PartSize most{is_in_a_hurry_ ? buffer_bytes : short_part_bytes, writes_.most()};
      Written written{};
      store_.latching([&] {
        written = store_.write_home(store_.tables_[t], versions.subspan(done), versions_.images.data(),
                                    buffer_.buffer(), most);
      });
      done += written.versions;
      writes_.learn(written.requests, std::chrono::steady_clock::now() - began);
      const double done_share = share * (share_of_reading + (1 - share_of_reading) * done_of(done, versions.size()));
      rest(rests_per_part * (std::chrono::steady_clock::now() - began), progress_of(merged_share_ + done_share));
    }
    merged_share_ += share;
  }

  void rest(std::chrono::nanoseconds wanted, double progress) {
    is_in_a_hurry_ = rest_(wanted, progress);
    between_();
  }

  static double done_of(std::size_t done, std::size_t all) {
    return static_cast<double>(done) / static_cast<double>(all);
  }

  static double progress_of(double merged_share) {
    return share_of_first_rests + (1 - share_of_first_rests) * std::min(1.0, merged_share);
  }

  // What stands by now. No recovery goes before that any more: rows are left to it.
  void look_at_limit() {
    const Records later = store_.records_between(records_.last_step(), limit_());
    if (later.records.empty()) return;
    merged_step_ = later.last_step();
    standing_ = later.stretch;
  }

  bool is_decided() {
    look_at_limit();
    for (std::vector<Located>& of_table : undecided_) {
      std::erase_if(of_table, [&](const Located& version) { return store_.lies_in(standing_, version.location); });
    }
    return undecided_image_bytes() == 0;
  }

  // Rows of which a later record did not stand when it was seen, and does not yet: they are searched for in the records.
  void settle() {
    if (is_decided()) return;
    if (!parts_) parts_ = store_.parts_of(records_, between_);
    for (std::uint32_t t = 0; t < undecided_.size(); ++t) {
      if (undecided_[t].empty()) continue;
      chosen_ = store_.newest_of((*parts_)[t], undecided_[t], between_);
      undecided_[t].clear();
      write(t, 0.0);
      store_.sync_merged(store_.tables_[t]);
    }
  }

  std::uint64_t undecided_image_bytes() const {
    std::uint64_t bytes = 0;
    for (std::uint32_t t = 0; t < undecided_.size(); ++t) bytes += undecided_[t].size() * image_bytes(t);
    return bytes;
  }

  // Of the later records whose rows were left to them.
  double mean_standing_bytes() const {
    double bytes = 0;
    for (const Look& look : looks_) {
      const std::uint64_t step = std::min(look.newest_step, merged_step_);
      bytes += look.share * static_cast<double>(store_.records_between(records_.last_step(), step).stretch.bytes);
    }
    return bytes;
  }

  LogStore& store_;
  const Records records_;
  const Limit& limit_;
  const Rest& rest_;
  const GivesUp& gives_up_;
  const Between between_ = [this] {
    if (gives_up_()) throw GivenUp{};
  };
  const SpareBuffers::Borrowed buffer_;
  std::uint64_t merged_step_;  // of the checkpoint to come
  Stretch standing_;  // the records that stood when the limit was asked for last
  std::vector<std::vector<Located>> undecided_;  // by table: rows whose newest version was neither merged nor stood
  std::optional<std::vector<std::vector<Part>>> parts_;  // of the records, once they were searched
  std::vector<Located> chosen_;
  std::vector<Located> in_log_;  // of these, the ones that are in no memory
  Versions versions_;
  std::vector<Look> looks_;
  double all_bytes_ = 0;
  double merged_share_ = 0;  // of them
  bool is_in_a_hurry_ = false;
  RequestsPerPart reads_{most_reads};
  RequestsPerPart writes_{most_writes};
};

std::uint64_t LogStore::merge(const Limit& limit, const Rest& rest, const GivesUp& gives_up, std::uint64_t most_bytes) {
  const std::lock_guard turn(merge_mutex_);
  require_usable();
  return merge_records(limit, rest, gives_up, most_bytes);
}

std::uint64_t LogStore::merge_records(const Limit& limit, const Rest& rest, const GivesUp& gives_up,
                                      std::uint64_t most_bytes) {
  Records records = records_between(std::nullopt, limit(), most_bytes);
  if (records.records.empty()) return 0;
  wait_for_fetches();
  try {
    return Merge(*this, std::move(records), limit, rest, gives_up).run();
  } catch (const GivenUp&) {
    return 0;
  }
}

// Durable ones.
LogStore::Records LogStore::records_between(std::optional<std::uint64_t> after_step, std::uint64_t limit_step,
                                            std::uint64_t most_bytes) const {
  const std::uint64_t limit = std::min(limit_step, log_.durable_step());
  Records found;
  for (const RowLog::Live& record : log_.live()) {
    if (record.link.mark.step > limit) break;
    if (after_step && record.link.mark.step <= *after_step) continue;
    if (!found.records.empty() && record.end() - found.records.front().link.position > most_bytes) break;
    found.records.push_back(record);
  }
  if (!found.records.empty()) {
    const std::uint64_t begin = found.records.front().link.position;
    found.stretch = {begin % log_.ring_bytes(), found.records.back().end() - begin};
  }
  return found;
}

bool LogStore::lies_in(const Stretch& stretch, std::uint64_t location) const {
  const std::uint64_t distance =
      location >= stretch.begin ? location - stretch.begin : location + log_.ring_bytes() - stretch.begin;
  return distance < stretch.bytes;
}

// Shares are of neighbours at home, so that what is written at once lies close; those that have no address yet are
// shared out by number.
std::uint64_t LogStore::share_of(const Table& table, std::uint64_t row, std::uint64_t num_shares) const {
  const Home& home = table.homes[table.home_of(row)];
  std::uint64_t number = row - home.first;
  if (home.addresses) {
    const auto address = home.addresses->find(number);
    if (address && *address < home.addresses_when_begun) {
      const auto rows_per_address =
          static_cast<double>(home.end - home.first) / static_cast<double>(home.addresses_when_begun);
      number = static_cast<std::uint64_t>(static_cast<double>(*address) * rows_per_address);
    }
  }
  const std::uint64_t of_table = home.first_number - table.homes.front().first_number + number;
  return std::min(of_table * num_shares / table.what.owned_rows(), num_shares - 1);
}

// The index's rows of the share. Those whose newest version is in a record that is merged are chosen; where a later one
// stands there is nothing to do; of the others, `undecided`, the index does not say whether one that is merged has them.
void LogStore::choose(std::uint32_t number, const Share& share, const Stretch& merged, const Stretch& standing,
                      std::vector<Located>& chosen, std::vector<Located>& undecided, const Between& between) {
  Table& table = tables_[number];
  const std::size_t decided_before = undecided.size();
  std::size_t num_slots = 0;
  for (std::size_t slot = 0;;) {
    between();
    const std::lock_guard lock(mutex_);
    if (table.index.is_growing() || (slot != 0 && table.index.num_slots() != num_slots)) {
      table.index.grow_on(merge_slots_);
      slot = 0;  // entries lie elsewhere: from the start
      chosen.clear();
      undecided.resize(decided_before);
      if (table.index.is_growing()) continue;
    }
    num_slots = table.index.num_slots();
    if (slot == num_slots) return;
    slot = table.index.visit(slot, merge_slots_, [&](std::uint64_t row, std::uint64_t location) {
      if (share.of != 1 && share_of(table, row, share.of) != share.number) return;
      if (lies_in(merged, location)) {
        chosen.push_back({row, location});
      } else if (!lies_in(standing, location)) {
        undecided.push_back({row, location});
      }
    });
  }
}

// Of one table's versions those that are in memory; `others` get the rest. What was appended last when it was copied is the
// chosen version if that is what was appended last afterwards.
void LogStore::copy_images(std::uint32_t number, std::span<const Located> chosen, Versions& versions,
                           std::vector<Located>& others) {
  const Table& table = tables_[number];
  const RowLayout& layout = table.layout;
  std::vector<std::uint64_t> rows;
  for (const Located& version : chosen) rows.push_back(version.row);
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
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      prefetch_ahead(table.index, rows.data(), i, rows.size());
      if (has[i]) has[i] = table.index.find(rows[i]) == chosen[i].location;
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

void LogStore::merge_from_memory(CopyFromMemory copy) {
  const std::lock_guard turn(memory_mutex_);
  copy_from_memory_ = std::move(copy);
}

// Of one table's versions, by the order of the log, as many images as may be read at once, from the first one on;
// `versions` has room for them. Returns how many requests that took.
std::size_t LogStore::read_images(std::uint32_t number, std::span<const Located> chosen, const SectorBuffer& buffer,
                                  const PartSize& most, Versions& versions) {
  const Table& table = tables_[number];
  const std::size_t image_bytes = table.layout.image_bytes();
  SectorRuns runs(buffer, {.read_gap_bytes = read_gap_bytes,
                           .write_gap_bytes = read_gap_bytes,
                           .unit_bytes = unit_bytes_,
                           .most_bytes = most.bytes,
                           .most_writes = most.requests});
  std::vector<const std::byte*> images;
  for (const Located& version : chosen) {
    const std::byte* image = runs.place(log_.file(), offset_of_location(version.location), image_bytes);
    if (image == nullptr) break;
    images.push_back(image);
  }
  queue_.read_many(runs.reads());
  note_log_reads(runs.reads().size(), runs.read_bytes());
  for (std::size_t i = 0; i < images.size(); ++i) {
    const auto [row, location] = chosen[i];
    if (check_image(table.layout, number, row, images[i]) != ImageState::whole) {
      throw Error(ErrorKind::corrupted, damaged(log_.file().place(offset_of_location(location)), number, row));
    }
    const std::size_t at = versions.rows.size() * image_bytes;
    std::memcpy(versions.images.data() + at, images[i], image_bytes);
    versions.rows.push_back({row, at});
  }
  return runs.reads().size();
}

// By table, those of the newest record first. The row numbers are checked here, and read again when they are wanted.
std::vector<std::vector<LogStore::Part>> LogStore::parts_of(const Records& records, const Between& between) {
  std::vector<std::vector<Part>> parts(tables_.size());
  std::uint64_t bytes = 0;
  for (auto record = records.records.rbegin(); record != records.records.rend(); ++record) {
    between();
    const SpareBuffers::Borrowed data = read_rows(*record);
    for (const RowLogSection& section : sections_of(data.data())) {
      parts[section.table].push_back({record->link.position, section});
    }
    bytes += record->images_offset;
  }
  note_log_reads(records.records.size(), bytes);
  return parts;
}

// Where the parts, the newest one first, have these rows; those that are in none of them have no place in the list.
std::vector<LogStore::Located> LogStore::newest_of(std::span<const Part> parts, std::span<const Located> wanted,
                                                   const Between& between) {
  RowIndex missing;
  for (const Located& version : wanted) missing.insert(version.row, 0);
  std::vector<Located> found;
  for (std::size_t done = 0; done < parts.size() && missing.size() != 0;) {
    between();
    const auto some = some_parts(parts.subspan(done));
    done += some.size();
    std::vector<const std::uint64_t*> numbers;
    const auto data = read_row_numbers(some, numbers);
    for (std::size_t part = 0; part < some.size(); ++part) {
      const std::uint64_t num_rows = some[part].section.num_rows;
      Locations locations = locations_of(some[part].position, some[part].section);
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
std::span<const LogStore::Part> LogStore::some_parts(std::span<const Part> parts) const {
  std::size_t bytes = 0;
  std::size_t count = 0;
  for (const Part& part : parts) {
    bytes += part.section.num_rows * sizeof(std::uint64_t);
    if (bytes > std::min(buffer_bytes, merge_bytes_) && count != 0) break;
    ++count;
  }
  return parts.first(count);
}

// The parts' row numbers, which live as long as what is returned.
SpareBuffers::Borrowed LogStore::read_row_numbers(std::span<const Part> parts,
                                                  std::vector<const std::uint64_t*>& numbers) {
  const auto extent_of = [unit = unit_bytes_](const RowLogSection& section) {
    const std::uint64_t begin = section.rows_offset / unit * unit;
    const std::uint64_t end = section.rows_offset + section.num_rows * sizeof(std::uint64_t);
    return std::pair(begin, format::align_up(end, unit) - begin);
  };
  std::size_t bytes = 0;
  for (const Part& part : parts) bytes += extent_of(part.section).second;
  SpareBuffers::Borrowed data = spare_.borrow(bytes);
  std::vector<BlockRead> reads;
  std::byte* next = data.data();
  for (const Part& part : parts) {
    const auto [begin, extent_bytes] = extent_of(part.section);
    reads.push_back({&log_.file(), log_.offset_of(part.position) + begin, extent_bytes, next});
    numbers.push_back(reinterpret_cast<const std::uint64_t*>(next + (part.section.rows_offset - begin)));
    next += extent_bytes;
  }
  queue_.read_many(reads);
  note_log_reads(reads.size(), bytes);
  return data;
}

void LogStore::wait_for_fetches() {
  std::unique_lock lock(mutex_);
  const std::uint64_t begun = num_fetches_;
  fetch_done_.wait(lock, [&] { return fetches_.empty() || fetches_.begin()->first > begun; });
}

// Where a merge has written.
void LogStore::sync_merged(Table& table) {
  latching([&] {
    for (Home& home : table.homes) {
      if (std::exchange(home.is_merging, false)) home.file->sync();
    }
  });
}

// Says where at home the versions go, and sorts them by it. Rows without an address get one, those of which the log was
// told last first: rows that are wanted often, as a rule, which so come to lie together. Nobody else gives addresses, so
// that they are looked for while others look, too.
void LogStore::settle_addresses(Table& table, std::vector<Version>& versions) {
  constexpr std::size_t ahead = 16;
  struct New {
    std::vector<std::uint64_t> rows;
    std::vector<std::size_t> versions;
  };
  std::vector<New> of_homes(table.homes.size());
  for (std::size_t i = versions.size(); i-- > 0;) {
    Version& version = versions[i];
    version.home = static_cast<std::uint32_t>(table.home_of(version.row));
    const Home& home = table.homes[version.home];
    version.address = version.row - home.first;
    if (!home.addresses) continue;
    if (i >= ahead && versions[i - ahead].row >= home.first && versions[i - ahead].row < home.end) {
      home.addresses->prefetch(versions[i - ahead].row - home.first);
    }
    if (const auto found = home.addresses->find(version.address)) {
      version.address = *found;
    } else {
      of_homes[version.home].rows.push_back(version.address);
      of_homes[version.home].versions.push_back(i);
    }
  }
  for (std::size_t number = 0; number < of_homes.size(); ++number) {
    const New& added = of_homes[number];
    if (added.rows.empty()) continue;
    std::uint64_t address = table.homes[number].addresses->add(added.rows, mutex_);
    for (const std::size_t i : added.versions) versions[i].address = address++;
  }
  std::ranges::sort(versions, {}, [](const Version& version) { return std::pair(version.home, version.address); });
}

// What lies beside the versions in the blocks that are written. Behind its last address a home has nothing.
void LogStore::read_homes(Table& table, const SectorRuns& runs) {
  std::vector<BlockRead> reads;
  std::uint64_t bytes = 0;
  for (auto home = table.homes.begin(); const BlockRead& read : runs.reads()) {
    while (home->file.get() != read.file) ++home;
    const std::uint64_t end = table.layout.bytes_for(home->end_of_images);
    if (home->addresses && read.offset >= end) {
      std::memset(read.dst, 0, read.bytes);
      continue;
    }
    reads.push_back(read);
    bytes += read.bytes;
  }
  queue_.read_many(reads);
  const std::lock_guard lock(mutex_);
  counters_.home_bytes_read += bytes;
  counters_.home_read_requests += reads.size();
}

// Writes as many of the versions, from the first on, as may be written at once. By whole blocks of the file system: single
// sectors in holes cost it six times the CPU, and the medium rewrites a block either way. A block between two that are
// written is written back as it was read.
LogStore::Written LogStore::write_home(Table& table, std::span<const Version> versions, const std::byte* version_images,
                                       const SectorBuffer& buffer, const PartSize& most) {
  const RowLayout& layout = table.layout;
  // No other row is in what is written: it need not be read.
  const bool alone = layout.unit_rows() == 1 && layout.unit_bytes() % unit_bytes_ == 0;
  RunShape shape{.unit_bytes = unit_bytes_, .most_bytes = most.bytes, .most_writes = most.requests};
  if (!alone) {
    shape.read_gap_bytes = read_gap_bytes;
    shape.write_gap_bytes = write_gap_bytes;
    shape.unit_bytes = format::block_bytes;
  }
  SectorRuns runs(buffer, shape);
  std::vector<std::byte*> images;
  std::vector<std::uint64_t> numbers;
  std::pair<std::uint32_t, std::uint64_t> changed{0, 0};  // of a home, the sectors up to there are counted
  std::uint64_t changed_sectors = 0;
  for (const Version& version : versions) {
    Home& home = table.homes[version.home];
    const std::uint64_t offset = layout.offset_of(version.address);
    std::byte* image = runs.place(*home.file, offset, layout.image_bytes());
    if (image == nullptr) break;
    home.is_merging = true;
    images.push_back(image);
    if (home_bits_) numbers.push_back(home.number_of(version.row));
    if (changed.first != version.home) changed = {version.home, 0};
    const std::uint64_t end = (offset + layout.image_bytes() - 1) / format::sector_bytes + 1;
    changed_sectors += end - std::max(changed.second, offset / format::sector_bytes);
    changed.second = end;
  }
  note_home(numbers);
  if (!alone) read_homes(table, runs);
  for (std::size_t i = 0; i < images.size(); ++i) {
    if (alone) std::memset(images[i], 0, layout.unit_bytes());
    std::memcpy(images[i], version_images + versions[i].image, layout.image_bytes());
  }
  queue_.write_many(runs.writes());
  for (const Version& version : versions.first(images.size())) {
    std::uint64_t& end = table.homes[version.home].end_of_images;
    end = std::max(end, version.address + 1);
  }
  const std::lock_guard lock(mutex_);
  counters_.home_bytes_written += runs.written_bytes();
  counters_.home_write_requests += runs.writes().size();
  counters_.home_sectors_changed += changed_sectors;
  return {images.size(), runs.writes().size()};
}

// Rows that are going to be written home, by their numbers.
void LogStore::note_home(std::span<const std::uint64_t> numbers) {
  if (!home_bits_) return;
  const std::lock_guard lock(mutex_);
  for (const std::uint64_t number : numbers) home_bits_->add(number);
}

void LogStore::note_log_reads(std::uint64_t requests, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  counters_.merge_log_requests += requests;
  counters_.merge_log_bytes_read += bytes;
}

// The records' rows are home: the index forgets them, then their space may be used again.
void LogStore::give_up(const Records& records) {
  const auto is_home = [&](std::uint64_t location) { return lies_in(records.stretch, location); };
  for (Table& table : tables_) {
    std::size_t num_slots = 0;
    for (std::size_t slot = 0; slot == 0 || slot != num_slots;) {
      const std::lock_guard lock(mutex_);
      ++index_version_;
      if (table.index.is_growing() || table.index.num_slots() != num_slots) slot = 0;
      table.index.grow_on(merge_slots_);
      if (table.index.is_growing()) continue;
      num_slots = table.index.num_slots();
      slot = table.index.erase_if(slot, merge_slots_, is_home);
    }
  }
  log_.forget(records.records.size());
}

}  // namespace holdfast
