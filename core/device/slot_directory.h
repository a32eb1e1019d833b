// Slot directory: which slot of a device's memory has which row. It knows numbers alone, and touches no row.
//
// Invariants
// - A row is in one slot at most, a slot has one row at most.
// - From its admission to its release a plan's rows keep their slots. A row that nobody holds stays until its slot is
//   needed, or, where rows are not kept, leaves at once.
// - admit gives slots to all rows of a plan, or to none, and then nothing has changed.
// - Who admits a row that has no slot brings its bytes: it is *missing*. Later admissions find it there, and rely on
//   that one. Where the bytes never came (forget), it is missing again for the next admission that wants it.
// - Which slot a row gets is a function of the calls made and of their order: no clock, no random seed, no threads.
// - Memory is in proportion to the slots, whatever the tables have. A release allocates none.
// - A row of a table with keys is known by its number, as to the pool that reads and writes it: a key has one row at a time.
//   Whose a row in a slot is, its own record says there (holdfast/device/kernels/keys.py), as at home.
// - Thread-safe. Admissions may outlive the directory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "step/collection.h"

namespace holdfast {

class SlotDirectory;

// The slots of one plan's rows, held until release; its end is a release, too.
class Admission {
 public:
  ~Admission();
  Admission(const Admission&) = delete;
  Admission& operator=(const Admission&) = delete;

  const std::shared_ptr<const Plan>& plan() const { return plan_; }
  // Indexes into the plan's tables: those of the directory, ascending.
  std::span<const std::uint32_t> tables() const;
  // Of each unique row: table after table, rows ascending.
  std::span<const std::uint32_t> slots() const;
  // Indexes into slots(), ascending: the rows that had none.
  std::span<const std::uint32_t> missing() const;
  std::size_t num_lookups() const { return num_lookups_; }
  std::uint32_t max_occurrences() const { return max_occurrences_; }  // of one row; 0 without lookups

  // These rows as a plan that a pool can read: they and their tables, nothing else.
  Plan missing_rows() const;

  // Throws step where it was released: other rows may be in its slots.
  void check_held() const;

 private:
  friend class SlotDirectory;
  struct Memory;
  struct Directory;
  Admission(std::shared_ptr<Directory> directory, std::shared_ptr<const Plan> plan, std::shared_ptr<Memory> memory);

  std::shared_ptr<Directory> directory_;
  std::shared_ptr<const Plan> plan_;
  std::shared_ptr<Memory> memory_;
  std::size_t num_lookups_ = 0;
  std::uint32_t max_occurrences_ = 0;
  bool held_ = false;  // guarded by the directory's mutex
};

class SlotDirectory {
 public:
  struct Counts {
    std::uint64_t resident;  // rows that have slots
    std::uint64_t held;  // of these, by admissions
    std::uint64_t hit;  // rows of admissions that were there
    std::uint64_t missed;  // and that were missing
  };

  // tables: indexes into the collection's, ascending; their rows share the slots. Throws config where their rows differ
  // in dim or pooling, or in whether they have keys, or where there are more of them (2^63) or of the slots (2^31) than
  // can be numbered.
  SlotDirectory(const std::shared_ptr<const CollectionSpec>& spec, std::vector<std::uint32_t> tables,
                std::uint64_t num_slots, bool keep);

  // Nothing where there is no room for the plan's rows before others are released. Throws window_too_large where that
  // would not help; config where the plan is another collection's.
  std::shared_ptr<Admission> admit(std::shared_ptr<const Plan> plan);
  // Once; later ones change nothing. Throws config where the admission is another directory's.
  void release(Admission& admission);
  // As release, and what it found missing has never come. Who has admitted one of these rows since relies on bytes that
  // are not there: forget these admissions as well.
  void forget(Admission& admission);
  // The rows that nobody holds lose their slots.
  void clear();

  std::uint64_t num_slots() const;
  Counts counts() const;

 private:
  std::shared_ptr<Admission::Directory> directory_;
};

}  // namespace holdfast
