// Key rows: rows of a table with keys, between what a store holds of them and whose a batch wants them to be.
//
// A row is a key's once an update wrote its record with it, and until the key is left behind: until its record is none of
// the living ones (key_ages.h). Else, for this key, it has its initial value, whatever the store has there: nothing, or
// what another key left. The record decides, not what planned the batch: so values are a function of the steps that were
// committed, whatever was planned in vain.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/parallel.h"
#include "keys/key_directory.h"
#include "keys/living_keys.h"
#include "rows/row_table.h"
#include "step/collection.h"

namespace holdfast {

// The record of row u of working rows.
KeyRecord key_record(const RowTable& table, const WorkingRows& rows, std::size_t u);

// Row u of `rows` becomes what it is before any update of its key, rows.keys[u].
void start_key(const RowTable& table, const WorkingRows& rows, std::size_t u);

// Of rows [begin, end), starts those that the store says are untouched (fresh). Returns whether there are others that
// are not their key's: these stay as they are.
bool start_fresh_keys(const RowTable& table, const LivingKeys& living, const WorkingRows& rows, std::size_t begin,
                      std::size_t end);
// Starts all that are not their key's.
void start_keys(const RowTable& table, const LivingKeys& living, const WorkingRows& rows, std::size_t begin,
                std::size_t end);

// Of rows [begin, end) that were updated from `old`: those whose keys are not admitted yet get back what they were, but
// for their records. `row_of` says which of `fresh` row u is.
template <class RowOf>
void hold_back_keys(const RowTable& table, const WorkingRows& old, const SlotRows& fresh, std::size_t begin,
                    std::size_t end, const RowOf& row_of);

// The rows of a plan for whoever reads them from a store: all but those of keys that have none.
Plan rows_in_store(const Plan& plan);

// Reads a plan's rows without a capture: read(plan, rows) from a store, then those that are not their key's are started.
// It calls `read` with the plan itself where none of its tables has keys. living_of(number): of a table.
template <class Read, class LivingOf>
void read_with_keys(const Plan& plan, const std::vector<RowTable>& tables, const std::vector<WorkingRows>& rows,
                    const Read& read, const LivingOf& living_of);

// Whether any of the plan's tables has keys.
bool has_keys(const Plan& plan);

// The keys of a table.
struct TableKeys {
  std::shared_ptr<KeyDirectory> directory;
  TableAges ages;
  // Since the pool was opened: updates of keys that were not admitted yet, and those that were the first to train them.
  std::uint64_t held_back = 0;
  std::uint64_t admitted = 0;
  std::int64_t left_before = 0;  // keys that had been left behind by then
};

// What became of keys since the pool was opened.
struct KeyCounts {
  std::uint64_t admitted = 0;
  std::uint64_t held_back = 0;  // updates of those that were not admitted yet
  std::uint64_t left_behind = 0;
};

// As they are at the end of `step`, of the rows that were touched. touched_rows(first, count): those at or after `first`,
// ascending, `count` at most; read(rows, count): fills in their state.
TableKeys keys_of(const RowTable& table, std::uint64_t step,
                  const std::function<std::vector<std::uint64_t>(std::uint64_t first, std::size_t count)>& touched_rows,
                  const std::function<void(const WorkingRows& rows, std::size_t count)>& read);

// What an update of these rows at `step` changes of that. rows: as the step found them.
void count_update(const RowTable& table, const WorkingRows& rows, std::size_t num_rows, std::uint64_t step,
                  TableKeys& keys);

template <class RowOf>
void hold_back_keys(const RowTable& table, const WorkingRows& old, const SlotRows& fresh, std::size_t begin,
                    std::size_t end, const RowOf& row_of) {
  const std::size_t state_floats = table.spec.state_floats;
  const KeyAdmission& admission = table.key_policy.admission;
  for (std::size_t u = begin; u < end; ++u) {
    // The steps that brought the key, this one among them.
    if (admission.admits(old.keys[u], std::uint64_t{key_record(table, old, u).updates} + 1)) continue;
    const std::size_t row = row_of(u);
    std::memcpy(fresh.weights + row * table.weight_bytes(), old.weights + u * table.weight_bytes(),
                table.weight_bytes());
    std::memcpy(fresh.state + row * state_floats, old.state + u * state_floats,
                table.state_bytes() - sizeof(KeyRecord));
  }
}

template <class Read, class LivingOf>
void read_with_keys(const Plan& plan, const std::vector<RowTable>& tables, const std::vector<WorkingRows>& rows,
                    const Read& read, const LivingOf& living_of) {
  if (!has_keys(plan)) return read(plan, rows);
  read(rows_in_store(plan), rows);
  parallel_for(plan.tables.size(), [&](std::size_t t) {
    const TablePlan& of_table = plan.tables[t];
    const RowTable& table = tables[plan.spec->tables[t].number];
    if (!table.has_keys()) return;
    start_keys(table, living_of(plan.spec->tables[t].number), rows[t], 0, of_table.num_placed);
    for (std::size_t u = of_table.num_placed; u < of_table.num_unique(); ++u) start_key(table, rows[t], u);
  });
}

}  // namespace holdfast
