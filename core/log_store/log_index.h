// Log index: of every table, where in the log each row's newest version lies, and which fetches read there.
//
// Invariants
// - A row's newest version is in the log where the index says so, else at home.
// - A record is in the log, and its rows are in the index, at one instant. Of a fetch and an append at the same time the
//   fetch sees all of a row or nothing of it.
// - Whoever looks a row up looks here and then at home under one lock, this index's: it also guards which rows homes have
//   (homes.h).
// - An extent of the log is free to be written again only after the index does not name it any more and every fetch that
//   resolved rows into it is done.
// - A pass over the index holds others up for a part of it at a time. What was there all the time it meets once, or
//   begins again.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "base/format.h"
#include "log_store/row_log.h"
#include "log_store/store_parts.h"
#include "rows/row_index.h"

namespace holdfast {

// So many bytes of a ring, from `begin` on.
struct LogStretch {
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  std::uint64_t ring_bytes = 0;

  // Whether an image that the index says to be there lies in it.
  bool has(std::uint64_t location) const {
    return (location >= begin ? location - begin : location + ring_bytes - begin) < bytes;
  }
};

class LogIndex {
 public:
  // slots_at_once: that a pass looks at while others wait.
  LogIndex(const StoreTables& tables, RowLog& log, std::size_t slots_at_once)
      : tables_(tables), log_(log), slots_at_once_(slots_at_once), indexes_(tables.size()) {}

  // While it lives, everybody else waits.
  class Locked {
   public:
    explicit Locked(const LogIndex& index) : lock_(index.mutex_), indexes_(index.indexes_) {}
    const RowIndex& of(std::uint32_t table) const { return indexes_[table]; }

   private:
    const std::lock_guard<std::mutex> lock_;
    const std::vector<RowIndex>& indexes_;
  };
  // What it locks, for who changes which rows homes have.
  std::mutex& mutex() const { return mutex_; }

  // Where a section's images are, one behind another.
  class Locations {
   public:
    Locations(std::uint64_t first, const RowLayout& layout) : first_(first), layout_(layout) {}
    std::uint64_t next() { return first_ + layout_.offset_of(number_++); }

   private:
    std::uint64_t first_;
    const RowLayout& layout_;
    std::uint64_t number_ = 0;
  };
  // position: of the record.
  Locations locations_of(std::uint64_t position, const format::RowLogSection& section) const {
    return {position % log_.ring_bytes() + section.images_offset, tables_[section.table].layout};
  }
  // In the log's file.
  static std::uint64_t offset_of(std::uint64_t location) { return format::row_log_ring_offset + location; }

  void clear();
  // Of a record that is in the log, and is newer than what is known; its row numbers are in `data`.
  void add(const RowLog::Live& record, const std::byte* data);
  // Of one that was written and comes to be in the log.
  void append(const RowLog::Live& record, const std::byte* data);
  // Where a record of `bytes` would go, or nothing when there is no room now.
  std::optional<std::uint64_t> room_for(std::uint64_t bytes) const;
  // The log's `count` oldest records, which are the stretch, are home: forgets their rows, then gives up their space.
  void forget(const LogStretch& stretch, std::size_t count);

  // Calls visit_entry(row, location) for each row of the table. between() is called again and again, unlocked; it may throw.
  // begin() says that what was seen so far is going to be seen again, since entries came to lie elsewhere meanwhile.
  template <class Begin, class Between, class Visit>
  void visit(std::uint32_t table, const Begin& begin, const Between& between, const Visit& visit_entry) {
    in_parts(indexes_[table], begin, between,
             [&](RowIndex& index, std::size_t slot) { return index.visit(slot, slots_at_once_, visit_entry); });
  }
  // The table's rows at or after `first`, ascending, `count` at most.
  std::vector<std::uint64_t> rows(std::uint32_t table, std::uint64_t first, std::size_t count);
  // Of a table, and of all.
  std::size_t size(std::uint32_t table) const;
  std::size_t size() const;
  std::size_t memory_bytes() const;

  // While it lives, the extents that a fetch resolved rows into are not used again.
  class Fetching {
   public:
    Fetching(LogIndex& index, std::uint64_t number) : index_(index), number_(number) {}
    ~Fetching();
    Fetching(const Fetching&) = delete;
    Fetching& operator=(const Fetching&) = delete;

   private:
    LogIndex& index_;
    std::uint64_t number_;
  };
  // Begins one, whose number it returns: of rows that were resolved in `locked`, or will be.
  std::uint64_t begin_fetch(const Locked& locked, bool reads_log);
  // Returns when the fetches that have begun are done.
  void wait_for_fetches();

 private:
  // The rows of one table in order, as they were at some version of the index.
  struct Listing {
    std::uint32_t table = 0;
    std::uint64_t version = 0;  // none yet
    std::vector<std::uint64_t> rows;
  };

  void insert(const RowLog::Live& record, const std::byte* data);
  // Goes through a table's index part by part, each from a slot on, under the mutex: visit_part returns the slot after it.
  template <class Begin, class Between, class Visit>
  void in_parts(RowIndex& index, const Begin& begin, const Between& between, const Visit& visit_part) {
    std::size_t num_slots = 0;
    for (std::size_t slot = 0;;) {
      between();
      const std::lock_guard lock(mutex_);
      if (index.is_growing() || index.num_slots() != num_slots) {
        index.grow_on(slots_at_once_);
        if (index.is_growing()) continue;
        num_slots = index.num_slots();
        begin();
        slot = 0;
      }
      if (slot == num_slots) return;
      slot = visit_part(index, slot);
    }
  }

  const StoreTables& tables_;
  RowLog& log_;
  const std::size_t slots_at_once_;

  mutable std::mutex mutex_;  // guards what follows up to fetches_, and which rows homes have
  std::vector<RowIndex> indexes_;  // by table
  std::uint64_t version_ = 1;
  std::condition_variable fetch_done_;
  std::uint64_t num_fetches_ = 0;
  std::map<std::uint64_t, std::uint64_t> fetches_;  // number → oldest position that it may read

  std::mutex listing_mutex_;
  Listing listing_;  // of the table that was asked for last
};

}  // namespace holdfast
