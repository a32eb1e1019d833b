// Log merge: one merge at work. It takes the log's oldest records and folds their rows' newest versions into home: table by
// table, and a large table a share of its rows at a time.
//
// Invariants
// - Home never gets a version of a step after the limit, nor one that is not durable in the log; and the log has it until
//   home is durable.
// - It takes every record of a step up to the limit that is durable, or the oldest of them, and writes each row's newest
//   version of these, but for rows of which a later record stands: one that is durable, of a step up to what the limit is by
//   then. That record stays in the log, where the index finds the row, in this life and after every recovery; the
//   checkpoint says that none goes back before it. The checkpoint, which moves the tail, is what makes versions that were
//   not written home unreachable; a crash before it leaves everything in the log. Any other append beside the merge is of
//   no account.
// - Afterwards the index names none of the records that it took: the versions that it named were each the newest of their
//   row, and those are home. A row that was appended meanwhile has another entry, which stays.
// - One that is given up leaves what a crash in it would: no checkpoint has moved, so everything is in the log, where the
//   index finds it, and bits of HomeBits that are set say nothing. What it wrote home is written again by the next merge
//   that takes those rows, in this life or a later one, before that one's sync. It is no failure.
// - It takes memory for a bounded part of the images that it moves, whatever the size of the log and of the tables.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "log_store/home_writer.h"
#include "log_store/homes.h"
#include "log_store/log_index.h"
#include "log_store/log_writer.h"
#include "log_store/logged_versions.h"
#include "log_store/row_log.h"
#include "log_store/store_parts.h"
#include "media/block_queue.h"

namespace holdfast {

// So many requests make a part of a merge that does not take too long.
class RequestsPerPart {
 public:
  explicit RequestsPerPart(std::size_t most) : most_(most) {}
  std::size_t most() const { return now_; }
  void learn(std::size_t requests, std::chrono::nanoseconds took);

 private:
  std::size_t most_;
  std::size_t now_ = BlockQueue::depth;
};

class LogMerge {
 public:
  // What it works over.
  struct Store {
    const StoreTables& tables;
    StoreIo& io;
    const RowLog& log;
    const LogIndex& index;
    const Homes& homes;
    LoggedVersions& versions;
    HomeWriter& home_writer;
    LogWriter& log_writer;
    std::size_t merge_bytes;  // of versions that are collected before they are written
  };
  // As LogStore::merge says.
  using Limit = std::function<std::uint64_t()>;
  using Rest = std::function<bool(std::chrono::nanoseconds wanted, double progress)>;
  using GivesUp = std::function<bool()>;
  struct Terms {
    const Limit& limit;
    const Rest& rest;
    const GivesUp& gives_up;
  };

  // Of these records; fetches that had begun are done. One `run` each.
  LogMerge(const Store& store, RecordRange range, const Terms& terms);
  // Returns how many bytes of the log it took; 0 where it was given up.
  std::uint64_t run();

 private:
  // A look at the index: which step was the newest, and what share of all bytes was looked at.
  struct Look {
    std::uint64_t newest_step;
    double share;
  };

  void merge_tables();
  std::uint64_t image_bytes(std::uint32_t t) const { return store_.tables[t].layout.image_bytes(); }
  double index_image_bytes(std::uint32_t t) const;
  void merge_table(std::uint32_t t, const HomeShares& shares, double begun_bytes);
  void read(std::uint32_t t, double share);
  void write(std::uint32_t t, double share);
  void rest(std::chrono::nanoseconds wanted, double progress);
  void look_at_limit();
  bool is_decided();
  void settle();
  std::uint64_t undecided_image_bytes() const;
  double mean_standing_bytes() const;

  const Store store_;
  const RecordRange range_;
  const Terms terms_;
  const LoggedVersions::Between between_;
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
  RequestsPerPart reads_;
  RequestsPerPart writes_;
};

}  // namespace holdfast
