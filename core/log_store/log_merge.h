// Log merge: takes the log's oldest records and folds their rows' newest versions into home: table by
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

#include "log_store/home_writer.h"
#include "log_store/log_writer.h"
#include "log_store/logged_versions.h"
#include "log_store/store_view.h"

namespace holdfast {

class LogMerge {
 public:
  // What it works over.
  struct Store : StoreView {
    LoggedVersions& versions;
    HomeWriter& home_writer;
    LogWriter& log_writer;
    std::size_t merge_bytes;  // of versions that are collected before they are written
  };
  using Limit = std::function<std::uint64_t()>;
  using Rest = std::function<bool(std::chrono::nanoseconds wanted, double progress)>;
  using GivesUp = std::function<bool()>;
  struct Terms {
    const Limit& limit;
    const Rest& rest;
    const GivesUp& gives_up;
    std::uint64_t most_bytes;
  };

  explicit LogMerge(const Store& store) : store_(store) {}
  // As LogStore::merge says; one at a time.
  std::uint64_t run(const Terms& terms);

 private:
  class AtWork;

  const Store store_;
};

}  // namespace holdfast
