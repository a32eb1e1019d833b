#include "readers/live_copy.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/checksum.h"
#include "base/error.h"
#include "base/native_thread.h"
#include "in_place/in_place_store.h"
#include "in_place/undo_follower.h"
#include "layout/pool_files.h"
#include "log_store/log_store.h"
#include "log_store/row_log_follower.h"

namespace holdfast {
namespace {

constexpr auto rest = std::chrono::milliseconds(1);  // between two looks at the log

std::uint64_t end_of(std::size_t num_rows, std::size_t count, const std::uint64_t* rows, std::uint64_t table_end) {
  return num_rows < count ? table_end : rows[num_rows - 1] + 1;
}

}  // namespace

// What the two kinds of stores do differently.
class LiveCopy::Source {
 public:
  virtual ~Source() = default;
  virtual bool fixes_first() const = 0;
  virtual void follow(std::uint64_t floor) = 0;
  // At the end of a dense state's step, or, where there is none, of the step that is returned.
  virtual void fix(std::uint64_t step) = 0;
  virtual StepMark fix_without_dense() = 0;
  virtual std::uint64_t newest_step() = 0;
  // Not in the thread that follows, and beside it.
  virtual std::size_t copy_rows(std::uint32_t table, std::uint64_t& first, const RowValues& out, std::size_t count) = 0;
  virtual void settle() = 0;
  virtual RowVersions& versions() = 0;
  virtual std::optional<RecordName> fixed_record() const { return std::nullopt; }
  virtual bool log_goes_on_from(const RecordName&) const { return false; }
  virtual std::vector<std::uint64_t> home_rows() const { return {}; }
};

class LiveCopy::InPlaceSource final : public Source {
 public:
  InPlaceSource(Medium& medium, const Superblock& superblock, const std::vector<RowTable>& tables)
      : superblock_(superblock),
        store_(medium, tables, superblock.header().row_checksums != 0, false),
        follower_(medium, superblock, store_),
        torn_(tables.size()) {}

  bool fixes_first() const override { return true; }
  void follow(std::uint64_t floor) override { follower_.follow(floor); }
  void fix(std::uint64_t step) override { follower_.fix(step); }
  StepMark fix_without_dense() override {
    const format::CommitRecord& commit = follower_.begin();
    follower_.fix(commit.step);
    return {commit.step, commit.cursor, commit.row_updates};
  }
  std::uint64_t newest_step() override { return superblock_.read_commit().step; }
  std::size_t copy_rows(std::uint32_t table, std::uint64_t& first, const RowValues& out, std::size_t count) override {
    const RowTable& what = store_.table(table);
    const std::vector<std::uint64_t> rows = store_.touched_rows(table, first, count);
    const std::size_t some = std::clamp<std::size_t>(apart_bytes / value_bytes(what), 1, count);
    weights_.resize(some * what.weight_bytes());
    state_.resize(some * what.spec.state_floats);
    for (std::size_t done = 0; done < rows.size(); done += some) {
      const auto part = std::span(rows).subspan(done, std::min(some, rows.size() - done));
      copy_part(table, part, {out.rows + done, out.values + done * value_bytes(what)});
    }
    first = end_of(rows.size(), count, out.rows, what.num_rows);
    return rows.size();
  }
  // A row that the writer was updating is of a later step than the fixed one.
  void settle() override {
    follower_.catch_up();
    for (std::uint32_t t = 0; t < torn_.size(); ++t) {
      for (const std::uint64_t row : torn_[t]) {
        if (!follower_.versions().has(t, row)) throw Error(ErrorKind::corrupted, store_.bad_row(t, row));
      }
    }
  }
  RowVersions& versions() override { return follower_.versions(); }

 private:
  // Weights and state lie apart at home: there is room for so much of both.
  static constexpr std::size_t apart_bytes = std::size_t{128} << 10;

  void copy_part(std::uint32_t table, std::span<const std::uint64_t> rows, const RowValues& out) {
    const RowTable& what = store_.table(table);
    const WorkingRows apart{out.rows, weights_.data(), state_.data()};
    std::ranges::copy(rows, out.rows);
    for (std::size_t begin = 0; begin < rows.size(); ++begin) {
      begin = store_.try_capture(table, apart, begin, rows.size());
      if (begin < rows.size()) torn_[table].push_back(rows[begin]);
    }
    const ImportedRows captured =
        ImportedRows::apart(what, rows, std::span(weights_).first(rows.size() * what.weight_bytes()),
                            std::span(state_).first(rows.size() * what.spec.state_floats));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      out.rows[i] &= ~fresh_bit;
      std::byte* const values = out.values + i * value_bytes(what);
      captured.put(i, what.weight_bytes(), values, what.state_bytes(), values + what.weight_bytes());
    }
  }

  const Superblock& superblock_;
  InPlaceStore store_;
  UndoFollower follower_;
  std::vector<std::byte> weights_;
  std::vector<float> state_;
  std::vector<std::vector<std::uint64_t>> torn_;  // by table: rows that did not hold their checksum
};

class LiveCopy::LogSource final : public Source {
 public:
  LogSource(const std::string& directory, const std::vector<RowTable>& tables, const Identity& identity)
      : store_(scanned(directory, tables, identity)), follower_(*store_), torn_(tables.size()) {}

  bool fixes_first() const override { return false; }
  void follow(std::uint64_t floor) override { follower_.follow(floor); }
  void fix(std::uint64_t step) override { follower_.fix(step); }
  StepMark fix_without_dense() override {
    const StepMark newest = follower_.catch_up();
    follower_.fix(newest.step);
    return newest;
  }
  std::uint64_t newest_step() override { return follower_.newest_step(); }
  std::size_t copy_rows(std::uint32_t table, std::uint64_t& first, const RowValues& out, std::size_t count) override {
    const HomeRead read = store_->read_home(table, first, out, count, torn_.at(table));
    first = read.next;
    return read.num_rows;
  }
  // A row that a merge was writing is of a record that was taken.
  void settle() override {
    for (std::uint32_t t = 0; t < torn_.size(); ++t) {
      for (const std::uint64_t row : torn_[t]) {
        if (follower_.versions().has(t, row)) continue;
        throw Error(ErrorKind::corrupted, "row " + std::to_string(row) + " of table " + std::to_string(t) +
                                              " does not hold its checksum at home, and the log has no version of it");
      }
    }
  }
  RowVersions& versions() override { return follower_.versions(); }
  std::optional<RecordName> fixed_record() const override {
    const RowLog::Link record = follower_.fixed_record();
    if (record.position == format::no_position) return std::nullopt;
    return RecordName(record.position, record.crc);
  }
  bool log_goes_on_from(const RecordName& record) const override {
    return follower_.goes_on_from({record.first, record.second});
  }
  std::vector<std::uint64_t> home_rows() const override { return store_->home_rows(); }

 private:
  // A writer may use space of the log again between the look at its checkpoint and the scan: what does not hold is looked
  // at once more.
  static std::unique_ptr<LogStore> scanned(const std::string& directory, const std::vector<RowTable>& tables,
                                           const Identity& identity) {
    constexpr int turns = 10;
    for (int turn = 1;; ++turn) {
      try {
        auto store =
            std::make_unique<LogStore>(directory, tables, LogStoreOptions{.writable = false, .identity = identity});
        store->scan();
        return store;
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::corrupted || turn == turns) throw;
      }
    }
  }

  std::unique_ptr<LogStore> store_;
  RowLogFollower follower_;
  std::vector<std::vector<std::uint64_t>> torn_;
};

LiveCopy::LiveCopy(const std::string& directory, bool part) : medium_(open_pool_medium(directory)) {
  superblock_ = std::make_unique<Superblock>(*medium_, false);
  if (superblock_->shards().has_value() != part) {
    throw Error(ErrorKind::format_mismatch,
                directory + (part ? " is no part of a pool of several writers"
                                  : " is one writer's part of a pool of several writers; it is not copied alone"));
  }
  if (part) floor_ = 0;
  if (const auto reason = superblock_->reason_to_distrust()) {
    throw Error(ErrorKind::untrusted, directory + " " + *reason);
  }
  epoch_ = superblock_->epoch().epoch;
  tables_ = superblock_->row_tables();
  dense_ = open_dense_files(*medium_, false);
  for (const auto& slot : dense_) {
    if (slot->size() >= format::dense_payload_offset) continue;
    throw Error(ErrorKind::corrupted, slot->place(0) + ": the file is shorter than its header block");
  }
  if (superblock_->header().store == static_cast<std::uint32_t>(format::Store::in_place)) {
    source_ = std::make_unique<InPlaceSource>(*medium_, *superblock_, tables_);
  } else {
    source_ = std::make_unique<LogSource>(directory, tables_, superblock_->identity());
  }
  thread_ = start_thread("hf-follow", [this] { run(); });
}

LiveCopy::~LiveCopy() { stop(); }

bool LiveCopy::fixes_first() const { return source_->fixes_first(); }

bool LiveCopy::rows_ascend() const {
  return fixes_first() ||
         std::ranges::none_of(tables_, [](const RowTable& t) { return t.home_order == HomeOrder::by_first_touch; });
}

// A header is written after its payload and cleared before that is overwritten, so it says enough.
std::optional<std::uint64_t> LiveCopy::newest_dense_step() const {
  std::optional<std::uint64_t> step;
  std::uint64_t limit = ~std::uint64_t{0};
  std::array<format::DenseHeader, 2> headers;
  for (std::size_t i = 0; i < 2; ++i) std::memcpy(&headers[i], dense_[i]->data(), sizeof(headers[i]));
  if (fixes_first()) limit = superblock_->read_commit().step;
  for (const format::DenseHeader& header : headers) {
    if (header.magic != format::dense_magic || header.crc != crc_of(header, superblock_->identity().seed()) ||
        header.step > limit)
      continue;
    step = std::max(step.value_or(0), header.step);
  }
  return step;
}

std::optional<std::vector<std::uint64_t>> LiveCopy::home_rows() const {
  if (rows_ascend()) return std::nullopt;
  return source_->home_rows();
}

std::optional<LiveCopy::RecordName> LiveCopy::fixed_record() const {
  const std::lock_guard lock(mutex_);
  return source_->fixed_record();
}

bool LiveCopy::log_goes_on_from(const RecordName& record) const {
  const std::lock_guard lock(mutex_);
  return source_->log_goes_on_from(record);
}

void LiveCopy::run() {
  std::unique_lock lock(mutex_);
  try {
    while (!stopping_) {
      source_->follow(fixing_ ? 0 : floor_ ? *floor_ : newest_dense_step().value_or(0));
      stopped_.wait_for(lock, rest);
    }
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void LiveCopy::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stopped_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void LiveCopy::check() {
  if (failure_) std::rethrow_exception(failure_);
}

void LiveCopy::refuse_another_life() const {
  if (superblock_->read_epoch().epoch == epoch_) return;
  throw Error(ErrorKind::overtaken, medium_->description() + ": the pool was opened anew");
}

// Where the pool was opened anew, what is there does not go on from what was read. That is no damage.
template <class Work>
auto LiveCopy::in_one_life(const Work& work) const {
  try {
    return work();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::corrupted) refuse_another_life();
    throw;
  }
}

LiveCopy::Fixed LiveCopy::fix() {
  {
    const std::lock_guard lock(mutex_);
    fixing_ = true;
  }
  const bool has_dense = newest_dense_step().has_value();
  // Where both slots change hands while they are looked at, neither is found.
  constexpr int turns = 100;
  std::optional<DenseCopy> dense;
  for (int turn = 0; turn < turns && !dense; ++turn) {
    dense = copy_newest_dense(*medium_, *superblock_, fixes_first());
    if (!has_dense) break;
  }
  if (has_dense && !dense) throw Error(ErrorKind::overtaken, dense_[0]->name() + ": written over while it was read");
  const std::lock_guard lock(mutex_);
  in_one_life([this] { check(); });
  if (!dense) return {in_one_life([this] { return source_->fix_without_dense(); }), std::nullopt};
  in_one_life([&] { source_->fix(dense->header.step); });
  return {{dense->header.step, dense->header.cursor, dense->header.row_updates}, std::move(dense)};
}

std::uint64_t LiveCopy::newest_step() {
  const std::lock_guard lock(mutex_);
  return in_one_life([this] {
    check();
    return source_->newest_step();
  });
}

void LiveCopy::raise_floor(std::uint64_t floor) {
  const std::lock_guard lock(mutex_);
  floor_ = std::max(floor_.value_or(0), floor);
}

void LiveCopy::fix_at(std::uint64_t step) {
  const std::lock_guard lock(mutex_);
  in_one_life([&] {
    check();
    fixing_ = true;
    source_->fix(step);
  });
}

std::size_t LiveCopy::copy_rows(std::uint32_t table, std::uint64_t& first, const RowValues& out, std::size_t count) {
  {
    const std::lock_guard lock(mutex_);
    in_one_life([this] { check(); });
  }
  return in_one_life([&] { return source_->copy_rows(table, first, out, count); });
}

void LiveCopy::settle() {
  stop();
  in_one_life([this] {
    check();
    source_->settle();
  });
  refuse_another_life();
}

std::size_t LiveCopy::corrections(std::uint32_t table, std::uint64_t& first, const RowValues& out, std::size_t count) {
  const std::size_t num_rows = source_->versions().read(table, first, out, count);
  first = end_of(num_rows, count, out.rows, tables_.at(table).num_rows);
  return num_rows;
}

}  // namespace holdfast
