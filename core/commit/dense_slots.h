// Dense slots: two places for the dense state, written by turns.
//
// Invariants
// - The slot that is being written is never the newest valid one: a crash leaves that one whole.
// - A slot's header is cleared before its payload is touched, and written after the payload is durable: it is the flag.
// - stage copies what it needs before it returns; the writing goes on in advance and finish, on another thread.
// - One write is pending at a time.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/format.h"
#include "base/identity.h"
#include "base/step_mark.h"
#include "media/block_file.h"
#include "media/medium.h"

namespace holdfast {

// What a slot holds: the structure is JSON text, the tensors are bytes as state_tree.layout places them.
struct DenseState {
  format::DenseHeader header;
  std::span<const std::byte> structure;
  std::span<const std::byte> tensors;
};

// One tensor to copy: `bytes` from `data` to `offset` of the tensors' bytes.
struct DenseTensor {
  const void* data;
  std::size_t bytes;
  std::size_t offset;
};

class DenseSlots {
 public:
  DenseSlots(Medium& medium, std::array<std::unique_ptr<File>, 2> slots, const Identity& identity);

  // Reads both slots and says which hold a state, for a pool whose newest commit record is of `epoch` and `step`. A
  // slot of a later step belongs to a life that was rolled back and is not believed; one of the same epoch proves that
  // a commit record was lost: throws corrupted. So does what no crash leaves behind: a header that stands over a
  // payload that does not hold, one of another pool, a file shorter than its header says and, in a pool that was closed cleanly, a torn
  // header.
  void load(std::uint64_t epoch, std::uint64_t step, bool clean);

  // Makes durable what load has found: whoever wrote it may have died before its flush, or was told that it failed. A
  // header is written once more, since a page that a sync has failed on passes for written; its payload was durable.
  void persist_valid();
  // Empties slots whose header was torn: once the pool is closed cleanly, such a header would be damage.
  void clear_torn();

  // The steps of the states that hold.
  std::vector<StepMark> marks() const;
  // No state of a later step counts any more: clear_torn empties its slot.
  void forget_after(std::uint64_t step);

  // The newest valid state at or before `step`; nothing when there is none.
  std::optional<DenseState> newest(std::uint64_t step) const;
  // Why slot i holds nothing ("never written", "the payload's checksum does not hold").
  const std::string& reason(std::size_t i) const { return reasons_[i]; }
  // Whether that is what no crash leaves.
  bool is_damaged(std::size_t i) const { return damaged_[i]; }

  // Copies the state of the end of a step aside, in parallel, and takes its checksum. Allocates first: throws full, and
  // nothing is lost.
  void stage(std::uint64_t epoch, const StepMark& mark, std::span<const std::byte> structure,
             std::span<const DenseTensor> tensors, std::size_t tensors_bytes);
  bool pending() const { return pending_.has_value(); }
  std::uint64_t pending_step() const { return pending_->header.step; }
  std::uint64_t pending_bytes() const { return pending_ ? payload_bytes(pending_->header) : 0; }

  // Goes on with the pending write by about `bytes`; returns true when that made the slot valid.
  bool advance(std::size_t bytes);
  bool finish() { return advance(~std::size_t{0}); }

  void sync();
  // Makes sure that both files have space for all of their bytes.
  void allocate();

  // The step of the newest valid slot, or nothing.
  std::optional<std::uint64_t> newest_step() const;
  // For messages: where the slot lies that is written next.
  std::string place_of_idle() const { return slots_[idle_slot()]->place(0); }

 private:
  struct Pending {
    std::size_t slot;
    format::DenseHeader header;
    std::size_t done_bytes;  // of the payload, in whole blocks: all of them from the start at level process
  };

  static std::size_t payload_bytes(const format::DenseHeader& header);
  std::optional<format::DenseHeader> read(std::size_t slot, bool clean);
  std::size_t idle_slot() const;
  bool is_staged_in_place() const;
  void clear_header(std::size_t slot);
  void write_header(std::size_t slot, const format::DenseHeader& header);

  Medium& medium_;
  std::array<std::unique_ptr<File>, 2> slots_;
  Identity identity_;
  std::array<std::optional<format::DenseHeader>, 2> valid_;
  std::array<std::string, 2> reasons_;
  std::array<bool, 2> torn_{};
  std::array<bool, 2> damaged_{};
  std::optional<Pending> pending_;
  // Level power, or a dialled medium: elsewhere the idle slot's mapping is the staging buffer. Whole blocks, which a file takes
  // without a copy in the page cache.
  SectorBuffer staging_;
};

}  // namespace holdfast
