// The log store's way home that a merge takes: table by table, and a large table a range of rows at a time. Versions are
// read by the order of the log and written by the order of home.
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
      store_.require_log_synced();
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

void LogStore::wait_for_fetches() {
  std::unique_lock lock(mutex_);
  const std::uint64_t begun = num_fetches_;
  fetch_done_.wait(lock, [&] { return fetches_.empty() || fetches_.begin()->first > begun; });
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
    visit_index(
        table, [] {}, [] {},
        [&](std::size_t slot) {
          ++index_version_;
          return table.index.erase_if(slot, merge_slots_, is_home);
        });
  }
  log_.forget(records.records.size());
}

}  // namespace holdfast
