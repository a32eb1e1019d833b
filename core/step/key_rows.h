// Key rows: rows of a table with keys, between what a store holds of them and whose a batch wants them to be.
//
// A row is a key's once an update wrote its record with it. Until then, for this key, it has its initial value, whatever
// the store has there: nothing, or what another key left. The record decides, not what planned the batch: so values are
// a function of the steps that were committed, whatever was planned in vain.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "keys/key_directory.h"
#include "rows/row_table.h"
#include "step/collection.h"

namespace holdfast {

// The record of row u of working rows.
KeyRecord key_record(const RowTable& table, const WorkingRows& rows, std::size_t u);

// Row u of `rows` becomes what it is before any update of its key, rows.keys[u].
void start_key(const RowTable& table, const WorkingRows& rows, std::size_t u);

// Of rows [begin, end), starts those that the store says are untouched (fresh). Returns whether there are others that
// are not their key's: these stay as they are.
bool start_fresh_keys(const RowTable& table, const WorkingRows& rows, std::size_t begin, std::size_t end);
// Starts all that are not their key's.
void start_keys(const RowTable& table, const WorkingRows& rows, std::size_t begin, std::size_t end);

// The rows of a plan for whoever reads them from a store: all but those of keys that have none.
Plan rows_in_store(const Plan& plan);

// Reads a plan's rows without a capture: read(plan, rows) from a store, then those that are not their key's are started.
// It calls `read` with the plan itself where none of its tables has keys.
template <class Read>
void read_with_keys(const Plan& plan, const std::vector<RowTable>& tables, const std::vector<WorkingRows>& rows,
                    const Read& read);

// Whether any of the plan's tables has keys.
bool has_keys(const Plan& plan);

// A new directory of a table's keys, filled from the rows that were touched. touched_rows(first, count): those at or
// after `first`, ascending, `count` at most; read(rows, count): fills in their state.
std::shared_ptr<KeyDirectory> directory_of(
    const RowTable& table, const std::function<std::vector<std::uint64_t>(std::uint64_t first, std::size_t count)>& touched_rows,
    const std::function<void(const WorkingRows& rows, std::size_t count)>& read);

template <class Read>
void read_with_keys(const Plan& plan, const std::vector<RowTable>& tables, const std::vector<WorkingRows>& rows,
                    const Read& read) {
  if (!has_keys(plan)) return read(plan, rows);
  read(rows_in_store(plan), rows);
  parallel_for(plan.tables.size(), [&](std::size_t t) {
    const TablePlan& of_table = plan.tables[t];
    const RowTable& table = tables[plan.spec->tables[t].number];
    if (!table.has_keys()) return;
    start_keys(table, rows[t], 0, of_table.num_placed);
    for (std::size_t u = of_table.num_placed; u < of_table.num_unique(); ++u) start_key(table, rows[t], u);
  });
}

}  // namespace holdfast
