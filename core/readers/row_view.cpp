#include "readers/row_view.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "base/error.h"
#include "in_place/in_place_store.h"
#include "in_place/undo.h"
#include "in_place/undo_log.h"
#include "layout/pool_files.h"
#include "log_store/log_store.h"
#include "step/lookup.h"

namespace holdfast {
namespace {

class InPlaceView final : public RowView {
 public:
  InPlaceView(Medium& medium, Superblock& superblock)
      : RowView(superblock.row_tables()),
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
    fill_rows(plan, rows, [&](std::uint32_t table, const WorkingRows& of_table, std::size_t begin, std::size_t end) {
      read(table, of_table, begin, end);
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
    const Identity& identity = superblock_.identity();
    const auto ring = open_log_file(medium_, identity, superblock_.header().log_bytes, false);
    std::set<std::pair<std::size_t, std::uint64_t>> undone;  // rows that recovery restores, whatever they are now
    std::vector<std::string> problems;
    try {
      const UndoPlan plan = plan_undo(superblock_, UndoLog(medium_, *ring, identity.seed()), store_, step);
      for (const Record& record : plan.records) {
        for (const format::RecordSection& section : record.sections()) {
          const auto* rows = reinterpret_cast<const std::uint64_t*>(record.data + section.rows_offset);
          for (std::uint64_t i = 0; i < section.num_rows; ++i) undone.emplace(section.table, rows[i] & ~fresh_bit);
        }
      }
    } catch (const Error& error) {
      problems.emplace_back(error.what());
    }
    for (const Excess& excess : bits_beyond_the_last_row()) {
      problems.push_back(excess.file->place(excess.offset) + ": touched bits beyond the last row of table '" +
                         excess.table + "'");
    }
    const auto is_undone = [&](std::size_t table, std::uint64_t row) { return undone.contains({table, row}); };
    for (std::string& problem : store_.bad_rows(is_undone)) problems.push_back(std::move(problem));
    return problems;
  }

  // They are no row's.
  void plan_repair(std::optional<std::uint64_t>, RepairPlan& plan) override {
    for (const Excess& excess : bits_beyond_the_last_row()) {
      std::vector<std::byte> bytes(sizeof(excess.right));
      std::memcpy(bytes.data(), &excess.right, bytes.size());
      plan.edits.push_back({excess.file->name(), excess.offset, std::move(bytes),
                            "touched bits beyond the last row of table '" + excess.table + "' are cleared"});
    }
  }

 private:
  // A row that another process is updating holds its checksum a moment later.
  void read(std::uint32_t table, const WorkingRows& rows, std::size_t begin, std::size_t end) const {
    constexpr auto moment = std::chrono::milliseconds(1);
    constexpr int turns = 100;
    for (int turn = 1; (begin = store_.try_capture(table, rows, begin, end)) != end; ++turn) {
      if (turn == turns) throw Error(ErrorKind::corrupted, store_.bad_row(table, rows.rows[begin]));
      std::this_thread::sleep_for(moment);
    }
  }

  struct Excess {
    std::string table;
    const File* file;
    std::uint64_t offset;  // of the word
    std::uint64_t right;  // as it should be
  };

  std::vector<Excess> bits_beyond_the_last_row() const {
    std::vector<Excess> found;
    for (const InPlaceStore::Table& table : store_.tables()) {
      const auto* words = reinterpret_cast<const std::uint64_t*>(table.touched.file->data());
      for (const RowPiece& piece : table.owned_pieces()) {
        const std::uint64_t tail = piece.end() % 64;
        const std::uint64_t last = piece.end() / 64;
        if (tail == 0 || table.touched.file->next_data(last * 8) > last * 8 || (words[last] >> tail) == 0) continue;
        const std::uint64_t right = words[last] & ((std::uint64_t{1} << tail) - 1);
        found.push_back({table.name, table.touched.file.get(), last * 8, right});
      }
    }
    return found;
  }

  Medium& medium_;
  Superblock& superblock_;
  InPlaceStore store_;
};

// A writer appends, merges and reuses what this reads. What does not hold is looked at again through a newer view.
class LogView final : public RowView {
 public:
  LogView(std::string directory, Superblock& superblock)
      : RowView(superblock.row_tables()),
        directory_(std::move(directory)),
        superblock_(superblock),
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
    std::vector<std::string> problems = store_->verify(step);
    if (const std::uint64_t epoch = store_->epoch_of_checkpoint(); epoch > superblock_.epoch().epoch) {
      problems.push_back(store_->place_of_checkpoint() + ": a checkpoint of epoch " + std::to_string(epoch) +
                         ", the pool is in epoch " + std::to_string(superblock_.epoch().epoch));
    }
    if (const auto broken = store_->broken_checkpoint(); broken && superblock_.epoch().clean != 0) {
      problems.push_back(*broken);
    }
    if (store_->merged_step() > step) {
      problems.push_back(store_->place_of_checkpoint() + ": rows are merged up to step " +
                         std::to_string(store_->merged_step()) + ", and the newest dense state is of step " +
                         std::to_string(step));
    }
    return problems;
  }

  // Where the log that the other checkpoint begins is whole, and ends where the pool was closed, this one is not
  // needed: if it was the newer one, rows that had been merged are in that log still, and are merged again.
  void plan_repair(std::optional<std::uint64_t> closed_step, RepairPlan& plan) override {
    const auto offset = store_->offset_of_broken_checkpoint();
    if (!offset || superblock_.epoch().clean == 0) return;
    if (closed_step == store_->last().step && store_->verify(*closed_step).empty()) {
      plan.edits.push_back({store_->log_name(), *offset, std::vector<std::byte>(sizeof(format::RowLogCheckpoint)),
                            "the row log's checkpoint that does not count is emptied, as creation leaves it"});
    } else {
      plan.refusals.push_back(*store_->broken_checkpoint() + ": it may be the one that counts");
    }
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
        LogStoreOptions{.writable = false, .ring_bytes = ring_bytes_, .identity = superblock_.identity()});
    store->scan();
    store->view();
    store_ = std::move(store);
  }

  std::string directory_;
  Superblock& superblock_;
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
