#include "row_view.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "error.h"
#include "in_place_store.h"
#include "log_store.h"
#include "lookup.h"
#include "pool_files.h"
#include "undo.h"
#include "undo_log.h"

namespace holdfast {
namespace {

class InPlaceView final : public RowView {
 public:
  InPlaceView(Medium& medium, Superblock& superblock)
      : RowView(row_tables_of(superblock.tables(), superblock.header().seed)),
        medium_(medium),
        superblock_(superblock),
        store_(medium, tables(), superblock.header().row_checksums != 0, false) {}

  StepMark newest() override {
    const format::CommitRecord commit = superblock_.read_commit();
    return {commit.step, commit.cursor, commit.row_updates};
  }
  void read(std::uint32_t table, const WorkingRows& rows, std::size_t num_rows) override {
    read(table, rows, 0, num_rows);
  }
  void read(const Plan& plan, const std::vector<WorkingRows>& rows) override {
    for_rows(plan, [&](std::size_t t, std::size_t begin, std::size_t end) {
      const std::uint64_t* numbers = plan.tables[t].rows.data();
      std::copy(numbers + begin, numbers + end, rows[t].rows + begin);
      read(plan.spec->tables[t].number, rows[t], begin, end);
    });
  }
  std::vector<std::uint64_t> touched_rows(std::uint32_t table, std::uint64_t first, std::size_t count) override {
    return store_.touched_rows(table, first, count);
  }
  bool commits_by_record() const override { return true; }
  LogUse log_use() const override {
    const format::CommitRecord commit = superblock_.read_commit();
    return {commit.log_head - commit.log_tail, std::nullopt};
  }

  std::vector<std::string> verify(std::uint64_t step) override {
    const auto ring = open_log_file(medium_, superblock_.header().log_bytes, false);
    std::set<std::pair<std::size_t, std::uint64_t>> undone;  // rows that recovery restores, whatever they are now
    std::vector<std::string> problems;
    try {
      const UndoPlan plan = plan_undo(superblock_, UndoLog(medium_, *ring), store_, step);
      for (const Record& record : plan.records) {
        for (const format::RecordSection& section : record.sections()) {
          const auto* rows = reinterpret_cast<const std::uint64_t*>(record.data + section.rows_offset);
          for (std::uint64_t i = 0; i < section.num_rows; ++i) undone.emplace(section.table, rows[i] & ~fresh_bit);
        }
      }
    } catch (const Error& error) {
      problems.emplace_back(error.what());
    }
    const auto is_undone = [&](std::size_t table, std::uint64_t row) { return undone.contains({table, row}); };
    for (std::string& problem : store_.verify(is_undone)) problems.push_back(std::move(problem));
    return problems;
  }

 private:
  // A row that another process is updating holds its checksum a moment later.
  void read(std::uint32_t table, const WorkingRows& rows, std::size_t begin, std::size_t end) const {
    constexpr auto moment = std::chrono::milliseconds(1);
    constexpr int turns = 100;
    for (int turn = 1; (begin = store_.try_capture(table, rows, begin, end)) != end; ++turn) {
      if (turn == turns) throw Error(ErrorKind::corrupted, store_.bad_row(table, rows.rows[begin] & ~fresh_bit));
      std::this_thread::sleep_for(moment);
      for (std::size_t u = begin; u < end; ++u) rows.rows[u] &= ~fresh_bit;
    }
  }

  Medium& medium_;
  Superblock& superblock_;
  InPlaceStore store_;
};

// A writer appends, merges and reuses what this reads. What does not hold is looked at again through a newer view.
class LogView final : public RowView {
 public:
  LogView(std::string directory, Superblock& superblock)
      : RowView(row_tables_of(superblock.tables(), superblock.header().seed)),
        directory_(std::move(directory)),
        ring_bytes_(superblock.header().log_bytes) {
    retrying([] {});
  }

  StepMark newest() override { return store_->last(); }
  void read(std::uint32_t table, const WorkingRows& rows, std::size_t num_rows) override {
    retrying([&] {
      for (std::size_t i = 0; i < num_rows; ++i) rows.rows[i] &= ~fresh_bit;
      const TableRows wanted{table, num_rows, rows};
      store_->fetch({&wanted, 1});
    });
  }
  void read(const Plan& plan, const std::vector<WorkingRows>& rows) override {
    for (std::size_t t = 0; t < rows.size(); ++t) {
      const auto& numbers = plan.tables[t].rows;
      std::copy(numbers.begin(), numbers.end(), rows[t].rows);
      read(plan.spec->tables[t].number, rows[t], numbers.size());
    }
  }
  std::vector<std::uint64_t> touched_rows(std::uint32_t table, std::uint64_t first, std::size_t count) override {
    return store_->touched_rows(table, first, count);
  }
  bool commits_by_record() const override { return false; }
  LogUse log_use() const override { return {store_->used_bytes(), store_->merged_step()}; }

  std::vector<std::string> verify(std::uint64_t step) override {
    std::vector<std::string> problems = store_->verify();
    if (store_->merged_step() > step) {
      problems.push_back("rows are merged up to step " + std::to_string(store_->merged_step()) +
                         ", and the newest dense state is of step " + std::to_string(step));
    }
    return problems;
  }

 private:
  template <class Work>
  void retrying(const Work& work) {
    constexpr int turns = 5;
    for (int turn = 1;; ++turn) {
      try {
        if (!store_) open();
        return work();
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::corrupted || turn == turns) throw;
        store_.reset();
      }
    }
  }

  void open() {
    auto store = std::make_unique<LogStore>(
        directory_, tables(),
        LogStoreOptions{.caching = caching_of(directory_), .writable = false, .ring_bytes = ring_bytes_});
    store->scan();
    store->view();
    store_ = std::move(store);
  }

  std::string directory_;
  std::uint64_t ring_bytes_;
  std::unique_ptr<LogStore> store_;
};

}  // namespace

std::unique_ptr<RowView> open_row_view(const std::string& directory, Medium& medium, Superblock& superblock) {
  if (superblock.header().store == static_cast<std::uint32_t>(format::Store::in_place)) {
    return std::make_unique<InPlaceView>(medium, superblock);
  }
  return std::make_unique<LogView>(directory, superblock);
}

}  // namespace holdfast
