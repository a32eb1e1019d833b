#include "log_store/log_merge.h"

#include <algorithm>
#include <numeric>
#include <utility>

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

double done_of(std::size_t done, std::size_t all) { return static_cast<double>(done) / static_cast<double>(all); }

double progress_of(double merged_share) {
  return share_of_first_rests + (1 - share_of_first_rests) * std::min(1.0, merged_share);
}

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

// A table's rows in shares of about as many each: of neighbours at home, so that what is written at once lies close; those
// that have no address when this is made are shared out by number.
class HomeShares {
 public:
  HomeShares(const Homes& homes, std::uint32_t table, std::uint64_t num_rows)
      : homes_(homes), table_(table), num_rows_(num_rows) {
    for (const Home& home : homes.of(table)) {
      num_addresses_.push_back(home.addresses ? home.addresses->count() : 0);
    }
  }
  std::uint64_t share_of(std::uint64_t row, std::uint64_t num_shares) const {
    const std::span<const Home> homes = homes_.of(table_);
    const std::size_t number_of_home = homes_.home_of(table_, row);
    const Home& home = homes[number_of_home];
    std::uint64_t number = row - home.first;
    if (home.addresses) {
      const std::uint64_t num_addresses = num_addresses_[number_of_home];
      const auto address = home.addresses->find(number);
      if (address && *address < num_addresses) {
        const auto rows_per_address = static_cast<double>(home.end - home.first) / static_cast<double>(num_addresses);
        number = static_cast<std::uint64_t>(static_cast<double>(*address) * rows_per_address);
      }
    }
    const std::uint64_t of_table = home.first_number - homes.front().first_number + number;
    return std::min(of_table * num_shares / num_rows_, num_shares - 1);
  }

 private:
  const Homes& homes_;
  std::uint32_t table_;
  std::uint64_t num_rows_;
  std::vector<std::uint64_t> num_addresses_;  // by home
};

}  // namespace

// One at work.
class LogMerge::AtWork {
 public:
  AtWork(const Store& store, RecordRange range, const Terms& terms)
      : store_(store),
        range_(std::move(range)),
        terms_(terms),
        buffer_(store.io.spare.borrow(buffer_bytes)),
        merged_step_(range_.last_step()),
        undecided_(store.tables.size()) {}

  // Returns how many bytes of the log it took. Throws GivenUp.
  std::uint64_t run() {
    merge_tables();
    store_.home_writer.sync_rows();
    store_.log_writer.give_up(range_.stretch, range_.records.size(), merged_step_);
    std::uint64_t bytes = 0;
    for (const RowLog::Live& record : range_.records) bytes += record.bytes;
    const auto standing_bytes = static_cast<std::uint64_t>(mean_standing_bytes());
    store_.io.counters.change([&](LogStoreCounters& counters) {
      ++counters.merges;
      counters.merged_bytes += bytes;
      counters.standing_bytes += standing_bytes;
    });
    return bytes;
  }

 private:
  // A look at the index: which step was the newest, and what share of all bytes was looked at.
  struct Look {
    std::uint64_t newest_step;
    double share;
  };

  std::uint64_t image_bytes(std::uint32_t t) const { return store_.tables[t].layout.image_bytes(); }

  void merge_tables() {
    // As it is now: the index grows by what is appended meanwhile, and shares of that would add up to more than one.
    std::vector<double> begun;
    std::vector<HomeShares> shares;
    for (std::uint32_t t = 0; t < store_.tables.size(); ++t) {
      begun.push_back(index_image_bytes(t));
      shares.emplace_back(store_.homes, t, store_.tables[t].what.owned_rows());
    }
    all_bytes_ = std::accumulate(begun.begin(), begun.end(), 0.0);
    for (int i = 0; i < first_rests; ++i) rest(long_rest, share_of_first_rests);
    for (std::uint32_t t = 0; t < store_.tables.size(); ++t) merge_table(t, shares[t], begun[t]);
    for (int i = 0; i < most_last_rests && !is_decided(); ++i) rest(long_rest, 1.0);
    settle();
  }

  // Of the table's rows that have a version in the log.
  double index_image_bytes(std::uint32_t t) const { return static_cast<double>(store_.index.size(t) * image_bytes(t)); }

  // begun_bytes: of the table's rows that had a version in the log when the merge began.
  void merge_table(std::uint32_t t, const HomeShares& shares, double begun_bytes) {
    const std::uint64_t num_rows = store_.tables[t].what.owned_rows();
    const double bytes = index_image_bytes(t);
    // So many shares that the versions in one of them are not too many to collect; where rows crowd in one they may be
    // more.
    const double taken = static_cast<double>(range_.stretch.bytes) / static_cast<double>(store_.log.used_bytes());
    const auto most_shares =
        static_cast<std::uint64_t>(std::min(1.0, taken) * bytes / static_cast<double>(store_.merge_bytes)) + 1;
    const std::uint64_t num_shares = bytes == 0 ? 0 : std::min(most_shares, num_rows);
    for (std::uint64_t number = 0; number < num_shares; ++number) {
      const double share = all_bytes_ == 0 ? 0 : begun_bytes / static_cast<double>(num_shares) / all_bytes_;
      look_at_limit();
      looks_.push_back({store_.log.last().step, share});
      choose(t, shares, number, num_shares);
      write(t, share);
      if (undecided_image_bytes() > store_.merge_bytes) settle();
    }
    store_.home_writer.sync_written(t);
  }

  // The index's rows of one of so many shares. Those whose newest version is in a record that is merged are chosen; where a
  // later one stands there is nothing to do; of the others the index does not say whether one that is merged has them.
  void choose(std::uint32_t t, const HomeShares& shares, std::uint64_t number, std::uint64_t num_shares) {
    std::vector<LocatedVersion>& undecided = undecided_[t];
    const std::size_t undecided_before = undecided.size();
    chosen_.clear();
    const auto begin = [&] {
      chosen_.clear();
      undecided.resize(undecided_before);
    };
    store_.index.visit(t, begin, between_, [&](std::uint64_t row, std::uint64_t location) {
      if (num_shares != 1 && shares.share_of(row, num_shares) != number) return;
      if (range_.stretch.has(location)) {
        chosen_.push_back({row, location});
      } else if (!standing_.has(location)) {
        undecided.push_back({row, location});
      }
    });
  }

  // The images of what is chosen: from memory, and then the others from the log.
  void read(std::uint32_t t, double share) {
    std::sort(chosen_.begin(), chosen_.end(),
              [](const LocatedVersion& a, const LocatedVersion& b) { return a.location < b.location; });
    const std::size_t count = chosen_.size();
    versions_.rows.clear();
    versions_.images.resize(count * image_bytes(t));
    const auto rest_between = [&](std::size_t done) {
      rest({}, progress_of(merged_share_ + share * done_of(done, count)));
    };
    in_log_.clear();
    for (std::size_t done = 0; done < count;) {
      const auto some = std::span(chosen_).subspan(done, std::min(copied_at_once, count - done));
      store_.versions.copy_images(t, some, versions_, in_log_);
      done += some.size();
      rest_between(versions_.rows.size());
    }
    for (std::size_t done = 0; done < in_log_.size();) {
      const std::size_t before = versions_.rows.size();
      const auto began = std::chrono::steady_clock::now();
      const std::size_t requests = store_.versions.read_images(t, std::span(in_log_).subspan(done), buffer_.buffer(),
                                                               {buffer_bytes, reads_.most()}, versions_);
      reads_.learn(requests, std::chrono::steady_clock::now() - began);
      done += versions_.rows.size() - before;
      rest_between(versions_.rows.size());
    }
  }

  void write(std::uint32_t t, double share) {
    read(t, share_of_reading * share);
    store_.home_writer.settle(t, versions_.rows);
    store_.io.counters.change([&](LogStoreCounters& counters) { counters.merged_rows += versions_.rows.size(); });
    const std::span<const HomeVersion> versions = versions_.rows;
    for (std::size_t done = 0; done < versions.size();) {
      const auto began = std::chrono::steady_clock::now();
      const PartSize most{is_in_a_hurry_ ? buffer_bytes : short_part_bytes, writes_.most()};
      const HomeWriter::Written written =
          store_.home_writer.write(t, versions.subspan(done), versions_.images.data(), buffer_.buffer(), most);
      done += written.versions;
      writes_.learn(written.requests, std::chrono::steady_clock::now() - began);
      const double done_share = share * (share_of_reading + (1 - share_of_reading) * done_of(done, versions.size()));
      rest(rests_per_part * (std::chrono::steady_clock::now() - began), progress_of(merged_share_ + done_share));
    }
    merged_share_ += share;
  }

  void rest(std::chrono::nanoseconds wanted, double progress) {
    is_in_a_hurry_ = terms_.rest(wanted, progress);
    between_();
  }

  // What stands by now. No recovery goes before that any more: rows are left to it.
  void look_at_limit() {
    const RecordRange later = store_.versions.records_between(range_.last_step(), terms_.limit());
    if (later.records.empty()) return;
    merged_step_ = later.last_step();
    standing_ = later.stretch;
  }

  bool is_decided() {
    look_at_limit();
    for (std::vector<LocatedVersion>& of_table : undecided_) {
      std::erase_if(of_table, [&](const LocatedVersion& version) { return standing_.has(version.location); });
    }
    return undecided_image_bytes() == 0;
  }

  // Rows of which a later record did not stand when it was seen, and does not yet: they are searched for in the records.
  void settle() {
    if (is_decided()) return;
    if (!parts_) parts_ = store_.versions.parts_of(range_, between_);
    for (std::uint32_t t = 0; t < undecided_.size(); ++t) {
      if (undecided_[t].empty()) continue;
      chosen_ = store_.versions.newest_of((*parts_)[t], undecided_[t], between_);
      undecided_[t].clear();
      write(t, 0.0);
      store_.home_writer.sync_written(t);
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
      bytes +=
          look.share * static_cast<double>(store_.versions.records_between(range_.last_step(), step).stretch.bytes);
    }
    return bytes;
  }

  const Store& store_;
  const RecordRange range_;
  const Terms& terms_;
  const LoggedVersions::Between between_ = [this] {
    if (terms_.gives_up()) throw GivenUp{};
  };
  const SpareBuffers::Borrowed buffer_;
  std::uint64_t merged_step_;  // of the checkpoint to come
  LogStretch standing_;  // the records that stood when the limit was asked for last
  // By table: rows whose newest version was neither merged nor stood.
  std::vector<std::vector<LocatedVersion>> undecided_;
  std::optional<std::vector<std::vector<RecordPart>>> parts_;  // of the records, once they were searched
  std::vector<LocatedVersion> chosen_;
  std::vector<LocatedVersion> in_log_;  // of these, the ones that are in no memory
  HomeVersions versions_;
  std::vector<Look> looks_;
  double all_bytes_ = 0;
  double merged_share_ = 0;  // of them
  bool is_in_a_hurry_ = false;
  RequestsPerPart reads_{most_reads};
  RequestsPerPart writes_{most_writes};
};

std::uint64_t LogMerge::run(const Terms& terms) {
  RecordRange range = store_.versions.records_between(std::nullopt, terms.limit(), terms.most_bytes);
  if (range.records.empty()) return 0;
  store_.index.wait_for_fetches();
  try {
    return AtWork(store_, std::move(range), terms).run();
  } catch (const GivenUp&) {
    return 0;
  }
}

}  // namespace holdfast
