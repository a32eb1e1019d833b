#include "readers/reader.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/error.h"
#include "commit/recovery.h"
#include "layout/pool_files.h"
#include "media/directory.h"
#include "readers/superblock_repair.h"
#include "step/key_rows.h"

namespace holdfast {

Reader::Reader(const std::string& directory) : medium_(open_pool_medium(directory)) {
  superblock_ = std::make_unique<Superblock>(*medium_, false);
  rows_ = open_row_view(directory, *medium_, *superblock_);
}

format::CommitRecord Reader::commit() const {
  format::CommitRecord commit = superblock_->read_commit();
  const StepMark mark = rows_->newest();
  commit.step = mark.step;
  commit.cursor = mark.cursor;
  commit.row_updates = mark.row_updates;
  return commit;
}

std::optional<std::uint64_t> Reader::unfinished_return() const { return holdfast::unfinished_return(*superblock_); }

std::optional<DenseCopy> Reader::dense_state(std::uint64_t last) const {
  return copy_newest_dense(*medium_, *superblock_, rows_->commits_by_record(), last);
}

void Reader::evaluate(const Plan& plan, float* out) {
  if (shards()) require_own_rows(plan, tables());
  const auto read = [&](const std::vector<WorkingRows>& rows) {
    read_with_keys(
        plan, tables(), rows,
        [&](const Plan& stored, const std::vector<WorkingRows>& of_stored) { rows_->read(stored, of_stored); },
        [&](std::uint32_t number) -> const LivingKeys& { return living_[number]; });
  };
  evaluator_.pool(plan, tables(), read, out);
}

std::shared_ptr<KeyDirectory> Reader::keys(std::uint32_t number) {
  const RowTable& table = tables().at(number);
  if (!table.has_keys()) return nullptr;
  const TableKeys keys = keys_of(
      table, rows_->newest().step,
      [&](std::uint64_t first, std::size_t count) { return rows_->touched_rows(number, first, count); },
      [&](const WorkingRows& rows, std::size_t count) { rows_->read(number, rows, count); });
  living_.resize(tables().size());
  living_[number] = keys.ages.living();
  return keys.directory;
}

void Reader::gather_rows(std::size_t index, std::vector<std::uint64_t> rows, std::byte* weights, float* state,
                         std::uint8_t* differs) const {
  const RowTable& table = tables()[index];
  if (!std::is_sorted(rows.begin(), rows.end())) throw Error(ErrorKind::config, "rows to gather must ascend");
  require_own_rows(rows, table);
  rows_->read(static_cast<std::uint32_t>(index), {rows.data(), weights, state}, rows.size());
  if (differs == nullptr) return;
  std::vector<std::byte> initial(table.weight_bytes());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    best_kernels().initial_row(table.spec, rows[i] & ~fresh_bit, initial.data());
    const float* row_state = state + i * table.spec.state_floats;
    differs[i] = std::memcmp(initial.data(), weights + i * initial.size(), initial.size()) != 0 ||
                 std::any_of(row_state, row_state + table.spec.state_floats, [](float value) {
                   std::uint32_t bits;
                   std::memcpy(&bits, &value, 4);
                   return bits != 0;
                 });
  }
}

void Reader::read_rows(std::size_t table, std::uint64_t first, std::size_t count, std::byte* weights,
                       float* state) const {
  std::vector<std::uint64_t> rows(count);
  std::iota(rows.begin(), rows.end(), first);
  gather_rows(table, std::move(rows), weights, state, nullptr);
}

std::vector<std::string> Reader::verify(std::optional<std::uint64_t> step) const {
  std::vector<std::string> problems;
  if (superblock_->epoch().clean != 0) problems = superblock_->broken_records();
  if (auto broken = broken_copy(directory_of(superblock_->file_name()))) problems.push_back(std::move(*broken));
  const auto add = [&](const std::string& problem) {
    const bool known = std::any_of(problems.begin(), problems.end(),
                                   [&](const std::string& other) { return other.ends_with(problem); });
    if (!known) problems.push_back(problem);
  };
  DenseSlots slots(*medium_, open_dense_files(*medium_, false), superblock_->identity());
  std::uint64_t target = rows_->newest().step;
  try {
    target = plan_recovery(*superblock_, rows_->newest(), slots, Recovery::exact).target.step;
  } catch (const Error& error) {
    add(error.what());
  }
  for (std::size_t i = 0; i < 2; ++i) {
    if (slots.reason(i).empty() || slots.reason(i) == "empty") continue;
    add(std::string(dense_names[i]) + " at offset 0: " + slots.reason(i));
  }

  for (const std::string& problem : rows_->verify(step.value_or(target))) add(problem);
  return problems;
}

}  // namespace holdfast
