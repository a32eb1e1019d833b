// Scratchpad: a fixed number of rows in memory, those of the coming steps among them.
//
// A hold is the rows of one plan. It is collected (which rows are in, which slots do the others get), exchanged (the
// others are fetched) and inserted, on two threads: one hold is collected while another is fetched.
//
// Invariants
// - Holds are numbered in the order in which they are asked for, and become ready in that order. From then until it is
//   let go, a hold's rows are in.
// - A row is in one slot at most, and there is no newer version of it anywhere else. Where steps are undone, their rows
//   are read again before anybody asks for them.
// - A slot is given to another row only when every hold that uses it is let go: as a rule when the newest one and every
//   hold before that are, and where that gives no room by a look at all of them. So what a step still needs stays; and
//   what it wrote stays until it can be read below, if that is when its hold is let go.
// - With a victim cache, the row that a slot had goes there before the slot is filled. It is the exchanging thread's, which
//   takes holds in their order: whoever wants that row is exchanged later. Others use it only when nothing is exchanged.
// - A row may come in without a hold (warm) while its shelf has free slots. A shelf with a free slot has never evicted, so
//   a row that is not in was not in since the scratchpad was made, and nobody has changed it since: what was read of it
//   below, at any time since then, is its newest version.
// - So a hold may leave rows that it misses to a sweep, in tables whose rows all have room: their slots are its own, and
//   filled by whoever comes first, until it claims those that are left. It is ready when all are filled.
// - The order of holds, what they evict and what came in without one decide which rows are fetched when, never what a row is.
// - After a failed fetch every hold throws that failure: slots may hold anything.
// - expect, hold and read are called by one thread; a hold may be let go by any.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/background.h"
#include "base/stage_spans.h"
#include "kernels/kernels.h"
#include "log_store/log_store.h"
#include "rows/row_table.h"
#include "scratchpad/shelf.h"
#include "scratchpad/slot_map.h"
#include "scratchpad/victim_cache.h"
#include "step/collection.h"

namespace holdfast {

struct ScratchpadCounters {
  std::uint64_t rows_hit;  // rows of holds that were in
  std::uint64_t rows_missed;  // and that were not
  std::uint64_t rows_demanded;  // of these: missed by holds that nobody had announced
  std::uint64_t rows_from_victims;  // of these: those that the victim cache had
  std::uint64_t holds_delayed;  // announced holds that had to wait for room: the window did not fit
  double seconds_stalled;  // that callers of hold waited
};

class Scratchpad {
 public:
  // Fills in the newest versions of rows, as LogStore::fetch does. Called from a thread of the scratchpad's and from
  // callers of read.
  using Fetch = std::function<void(std::span<const TableRows>)>;

  struct Turns;

  class Hold {
   public:
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

    // Of table t of the plan: the slot of each of its unique rows. Only of a hold that is ready.
    const std::uint32_t* slots(std::size_t t) const { return slots_[t].data(); }

   private:
    friend class Scratchpad;
    Hold(std::shared_ptr<Turns> turns, const std::shared_ptr<const Plan>& plan, bool announced)
        : turns_(std::move(turns)), plan_(plan), spec_(plan->spec), announced_(announced) {}

    struct Missed {
      std::vector<std::uint64_t> rows;
      std::vector<std::uint32_t> slots;
      std::size_t num_from_victims = 0;  // the first of the slots, whose rows are not among these any more
      struct Victim {
        std::uint64_t key;
        std::uint32_t slot;  // that it leaves
      };
      std::vector<Victim> victims;
    };

    std::shared_ptr<Turns> turns_;
    std::weak_ptr<const Plan> plan_;
    std::shared_ptr<const CollectionSpec> spec_;
    std::uint64_t order_ = 0;  // from 1; 0: it does not live yet
    std::vector<std::vector<std::uint32_t>> slots_;
    std::vector<Missed> missed_;  // per table of the plan
    std::uint64_t num_missed_ = 0;
    bool leaves_rows_ = false;  // to the sweep
    std::uint64_t oldest_live_ = 0;  // hold, when this one last looked
    bool announced_;  // by expect; these, and what follows, are guarded by the mutex of Turns
    bool given_up_ = false;
    bool delayed_ = false;
  };

  // As many rows as fit in `bytes`, everything counted. Throws config where that is none.
  // nodes: of the machine, on which rows lie; none: on any. victims: for rows that leave; null: they are fetched again.
  Scratchpad(const std::vector<RowTable>& tables, std::uint64_t bytes, Fetch fetch, StageSpans& spans,
             std::span<const unsigned> nodes = {}, const VictimMemory* victims = nullptr);
  ~Scratchpad();
  Scratchpad(const Scratchpad&) = delete;
  Scratchpad& operator=(const Scratchpad&) = delete;

  // The rows of `plan` are going to be held. The announcement is forgotten with the plan.
  void expect(std::shared_ptr<const Plan> plan);
  // The rows of `plan`, ready. `make_room` is called where there is no room for them: it waits until other holds are
  // let go that are going to be. Throws batch_too_large where that does not help.
  std::shared_ptr<const Hold> hold(const std::shared_ptr<const Plan>& plan, const std::function<void()>& make_room);

  // Rows [begin, end) of compact arrays, row u from or to slots[u], all of which are a hold's. Thread-safe.
  void gather(std::uint32_t table, const std::uint32_t* slots, const WorkingRows& working, std::size_t begin,
              std::size_t end) const;
  void scatter(std::uint32_t table, const std::uint32_t* slots, const WorkingRows& working, std::size_t begin,
               std::size_t end);

  // Announcements are forgotten, and nothing is on its way into a slot any more.
  void settle();
  // Of these rows those that are in become what they are below, whatever they were. Nobody uses them meanwhile.
  void read_again(std::uint32_t table, std::vector<std::uint64_t> rows);

  // The rows of a hold stay in for good: a static cache.
  void keep(const Hold& hold);

  // A sweep begins, or has ended: all rows that there are of tables that have room for all of theirs come in without a
  // hold. While it is not far from its end, the missed rows of holds are left to it, but for the last few: fetching
  // rows one by one costs the disk a hundred times what they cost a sweep. may_come: which of a table's rows it may bring.
  using MayCome = std::function<std::vector<bool>(std::uint32_t table, std::span<const std::uint64_t> rows)>;
  void begin_sweep(MayCome may_come);
  void note_sweep(double share);  // that is done
  void end_sweep();
  // Rows as they are below: those that are not in come in, while there are free slots, and so do those that a hold left
  // to the sweep. Returns how many came in. Thread-safe.
  std::size_t warm(std::uint32_t table, std::span<const SweptRow> rows);
  // Whether all rows of the table have room.
  bool holds_all(std::uint32_t table) const { return shelf_of(table).holds_all; }
  bool has_free_slots(std::uint32_t table) const;

  // Of a table whose rows all have room: weights and state of those of the rows that are in and that no hold uses, each
  // row `stride` bytes behind the one before. Says which these are, or nothing. What it copies is the version that was
  // appended last: whoever changed a row had a hold until it was. Thread-safe.
  std::vector<bool> copy_settled(std::uint32_t table, std::span<const std::uint64_t> rows, std::byte* out,
                                 std::size_t stride) const;

  // Fills in the plan's rows without a trace.
  void read(const Plan& plan, const std::vector<WorkingRows>& rows);

  std::uint64_t num_rows() const;  // that there is room for
  std::uint64_t num_victims() const { return victims_ ? victims_->num_rows() : 0; }  // and in the victim cache
  ScratchpadCounters counters() const;

 private:
  struct Staging;

  Shelf& shelf_of(std::uint32_t table) const { return *shelves_[shelf_of_table_[table]]; }
  std::shared_ptr<Hold> enqueue(const std::shared_ptr<const Plan>& plan, bool announced);
  std::shared_ptr<Hold> take_expected(const std::shared_ptr<const Plan>& plan);
  void forget_dropped_plans();
  void give_up_expected();
  void check_fits(const Plan& plan) const;
  // False where there is no room for the hold until others are let go.
  bool wait_until_ready(const Hold& hold);

  void collect(std::shared_ptr<Hold> hold);
  void collect_table(Hold& hold, std::size_t t, const std::vector<std::uint64_t>& rows);
  std::optional<std::uint32_t> take_slot(Hold& hold, std::size_t t, Shelf& shelf);
  bool wait_for_room(Hold& hold);
  void take_back_slots();
  static void copy_row(const Shelf& shelf, const SlotRows& from, std::size_t i, const WorkingRows& to, std::size_t u);
  void exchange(std::shared_ptr<Hold> hold);
  void stage(const Hold& hold);
  std::vector<TableRows> wanted_below(Hold& hold);
  void swap_victims(Hold& hold);
  std::vector<const std::byte*> take_victims(Hold& hold, std::size_t t);
  void stage_victims(const Shelf& shelf, std::span<const std::byte* const> found, std::size_t t);
  void put_victims(std::size_t number, std::span<const Hold::Missed::Victim> victims);
  void drop_victims(std::uint32_t table, std::span<const std::uint64_t> rows);
  void insert(Hold& hold);
  void fail(std::exception_ptr failure);
  std::size_t warm_some(std::uint32_t table, std::span<const SweptRow> rows);
  void leave_to_sweep(const Hold& hold);
  void claim(Hold& hold);

  std::vector<RowTable> tables_;
  Fetch fetch_;
  MayCome may_come_;  // while there is a sweep
  StageSpans& spans_;
  std::vector<std::unique_ptr<Shelf>> shelves_;
  std::vector<std::size_t> shelf_of_table_;
  std::unique_ptr<Staging> staging_;  // of exchange
  std::optional<VictimCache> victims_;

  mutable std::mutex map_mutex_;  // which row is in which slot; taken before that of Turns
  std::vector<SlotMap> slot_of_;  // per table

  std::shared_ptr<Turns> turns_;  // holds may outlive the scratchpad

  Background exchanging_{"hf-exchange"};
  Background collecting_{"hf-collect"};  // last: it hands over to exchanging_
};

}  // namespace holdfast
