// Reader: a pool seen without a lock and without changing it. For inspect, verify, evaluation, digests and exports.
//
// Invariants
// - Nothing is written, no file is mapped for writing.
// - A writer may be at work: the commit record and dense state that are returned are whole (their checksums hold); of
//   rows see RowView.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/forks.h"
#include "commit/dense_copy.h"
#include "layout/superblock.h"
#include "readers/row_view.h"
#include "step/collection.h"
#include "step/lookup.h"

namespace holdfast {

class Reader {
 public:
  explicit Reader(const std::string& directory);

  const format::PoolHeader& header() const { return superblock_->header(); }
  const std::optional<format::ShardsRecord>& shards() const { return superblock_->shards(); }
  const std::vector<format::TableRecord>& table_records() const { return superblock_->tables(); }
  format::EpochRecord epoch() const { return superblock_->epoch(); }
  // The newest commit: its epoch and place in the log are those of the newest commit record, its step may be newer.
  format::CommitRecord commit() const;
  // The step to which rows were on their way back when a writer died, or nothing (commit/recovery.h).
  std::optional<std::uint64_t> unfinished_return() const;
  format::Level level() const { return medium_->level(); }
  std::string medium_description() const { return medium_->description(); }
  LogUse log_use() const { return rows_->log_use(); }
  const std::vector<RowTable>& tables() const { return rows_->tables(); }

  // A whole copy of the newest dense state, or nothing when there is none.
  std::optional<DenseCopy> dense_state(std::uint64_t last = every_step) const;  // of steps up to `last`
  // The steps of all dense states that hold.
  std::vector<StepMark> dense_marks() const {
    return dense_marks_of(*medium_, *superblock_, rows_->commits_by_record());
  }

  void evaluate(const Plan& plan, float* out);
  // Which of a table's rows has which key, as Pool::keys.
  std::shared_ptr<KeyDirectory> keys(std::uint32_t table);

  // The touched rows at or after `first`, ascending, `count` at most.
  std::vector<std::uint64_t> touched_rows(std::size_t table, std::uint64_t first, std::size_t count) const {
    return rows_->touched_rows(static_cast<std::uint32_t>(table), first, count);
  }
  // Rows [first, first + count) of a table: weights and state (count × their bytes), initial values where untouched.
  void read_rows(std::size_t table, std::uint64_t first, std::size_t count, std::byte* weights, float* state) const;
  // The given rows (ascending), likewise; and for each whether its bits differ from its initial ones.
  void gather_rows(std::size_t table, std::vector<std::uint64_t> rows, std::byte* weights, float* state,
                   std::uint8_t* differs) const;

  // Everything that is wrong, each with file and offset; empty when the pool is whole. Call it while no writer is.
  // step: where the pool goes back to when it is opened, where a group says that.
  std::vector<std::string> verify(std::optional<std::uint64_t> step = std::nullopt) const;

 private:
  // Readers of a log store have threads where the system has no io_uring.
  OwnedHere<Medium> medium_;
  OwnedHere<Superblock> superblock_;
  OwnedHere<RowView> rows_;
  Evaluator evaluator_;
  std::vector<LivingKeys> living_;  // by table, of those whose keys were asked for
};

}  // namespace holdfast
