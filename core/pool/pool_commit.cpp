// How a step becomes durable, and everything else that is waited for: dense states, imports, the end.
#include <algorithm>
#include <functional>
#include <new>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "pool/pool.h"

namespace holdfast {

using format::CommitRecord;
using format::EpochRecord;

bool Pool::dense_due() const { return step_ + 1 - staged_step_ >= dense_interval_ || log_is_low(); }

void Pool::note_durable(std::uint64_t step) {
  lock_->check();
  durable_step_.store(step, std::memory_order_release);
  if (!in_group_) backend_->note_recoverable(step);
}

void Pool::note_group_durable(std::uint64_t step) {
  check_open();
  background_.submit([this, step] { backend_->note_recoverable(step); });
}

void Pool::empty_log() {
  flush();
  latching([&] { backend_->empty_log(); });
}

void Pool::stage(const StepMark& mark, const Dense& dense) {
  if (dense_->pending()) {
    background_.submit([this] { dense_->finish(); });
    background_.drain();
  }
  dense_->stage(report_.epoch, mark, dense.structure, dense.tensors, dense.tensors_bytes);
  staged_step_ = mark.step;
  has_dense_ = true;
}

void Pool::check_finite() const {
  if (!non_finite_) return;
  const RowTable& table = backend_->tables()[non_finite_->table];
  const std::string row = table.has_keys() ? "of key " + std::to_string(static_cast<std::int64_t>(non_finite_->row))
                                           : std::to_string(non_finite_->row);
  throw Error(ErrorKind::non_finite,
              "row " + row + " of table '" + table.name + "' is not finite at the end of step " +
                  std::to_string(step_ + 1) + ", in its weights or its optimizer's state: the pool stays at step " +
                  std::to_string(step_) +
                  ", and goes on from there when it is opened again; lower the learning rate, or clip gradients "
                  "(train.max_grad_norm)");
}

std::uint64_t Pool::commit(std::uint64_t cursor, const Dense* dense) {
  check_open();
  const Turn turn(is_changing_);
  check_finite();
  commit_mark({step_ + 1, cursor, row_updates_ + (updated_ ? 1 : 0)}, dense);
  return step_;
}

void Pool::commit_dense(const StepMark& mark, const Dense& dense) {
  check_open();
  const Turn turn(is_changing_);
  if (!backend_->tables().empty() || mark.step <= step_) {
    throw Error(ErrorKind::step, "step " + std::to_string(mark.step) + " is no step of this pool to come");
  }
  commit_mark(mark, &dense);
}

void Pool::commit_mark(const StepMark& mark, const Dense* dense) {
  const std::uint32_t dense_parts = backend_->log_is_low() ? 1 : dense_interval_;
  // Half a commit must not stay: a dense state on its way whose rows are not, or rows without theirs.
  try {
    if (dense != nullptr) {
      background_.wait(last_commits_[1]);  // what else is under way leaves dense states alone
      stage(mark, *dense);
    }
    std::function<void()> make_durable = backend_->end_step(mark);
    // However slow the medium is, no more than two steps are on their way to it.
    background_.wait(last_commits_[0]);
    last_commits_[0] = last_commits_[1];
    last_commits_[1] =
        background_.submit([this, mark, dense_parts, has_dense = has_dense_, make_durable = std::move(make_durable)] {
          make_step_durable(mark, make_durable, dense_parts, has_dense);
        });
    if (synchronous_) background_.wait(last_commits_[1]);
  } catch (...) {
    check_open();
    background_.fail(std::current_exception());
    throw;
  }
  step_ = mark.step;
  cursor_ = mark.cursor;
  row_updates_ = mark.row_updates;
  updated_ = false;
  non_finite_.reset();
  leave_keys_behind();
  updated_tables_.assign(updated_tables_.size(), false);
}

// Of the background thread.
void Pool::make_step_durable(const StepMark& mark, const std::function<void()>& make_rows_durable,
                             std::uint32_t dense_parts, bool has_dense) {
  {
    const StageSpans::Timing timing(spans_, Stage::persist);
    make_rows_durable();
  }
  lock_->check();
  rows_durable_step_.store(mark.step, std::memory_order_release);
  // The first dense state of a pool is finished at once: until then the step durable is the rows', and it must not
  // fall.
  if (dense_->pending()) {
    const StageSpans::Timing timing(spans_, Stage::dense);
    dense_->advance(dense_->newest_step() ? dense_->pending_bytes() / dense_parts + 1 : dense_->pending_bytes());
  }
  note_durable(has_dense ? dense_->newest_step().value_or(0) : mark.step);
}

void Pool::write_dense(const Dense& dense) {
  check_open();
  const Turn turn(is_changing_);
  if (backend_->step_has_begun() || updated_)
    throw Error(ErrorKind::step,
                "a step has begun, with a lookup: commit it first; a new pool is resumed (checkpoint.resume()) before "
                "its first lookup");
  flush();
  latching([&] { stage({step_, cursor_, row_updates_}, dense); });
  flush();
}

void Pool::import_rows(std::size_t table, std::uint64_t first, std::span<const std::byte> weights,
                       std::span<const float> state) {
  const RowTable& what = checked_table(table);
  std::vector<std::uint64_t> rows(weights.size() / what.weight_bytes());
  std::iota(rows.begin(), rows.end(), first);
  import_into_backend(table, ImportedRows::apart(what, rows, weights, state));
}

void Pool::import_rows(std::size_t table, std::span<const std::uint64_t> rows, std::span<const std::byte> weights,
                       std::span<const float> state) {
  import_into_backend(table, ImportedRows::apart(checked_table(table), rows, weights, state));
}

void Pool::import_values(std::size_t table, std::span<const std::uint64_t> rows, std::span<const std::byte> values) {
  import_into_backend(table, ImportedRows::together(checked_table(table), rows, values));
}

void Pool::import_into_backend(std::size_t table, const ImportedRows& imported) {
  const bool is_new = step_ == 0 || (report_.epoch == 1 && step_ == report_.step);
  if (!is_new || backend_->step_has_begun())
    throw Error(ErrorKind::step, "rows are imported before the first step only");
  latching([&] { backend_->import_rows(table, imported); });
}

void Pool::flush() {
  check_open();
  latching([&] { finish_pending(); });
}

void Pool::finish_pending() {
  if (has_dense_) {
    background_.submit([this] {
      dense_->finish();
      note_durable(dense_->newest_step().value_or(0));
    });
  }
  background_.drain();
}

void Pool::close() {
  if (last_ || is_inherited()) return;
  try {
    backend_->end_steps();
    flush();
    sync_everything();
    background_.stop();
    lock_->check();
    EpochRecord epoch = superblock_->epoch();
    epoch.clean = 1;
    epoch.has_steps = 1;
    epoch.step = superblock_->commit().step;
    epoch.dense_step = dense_->newest_step().value_or(format::no_position);
    superblock_->write_epoch(epoch);
  } catch (...) {
    let_go();
    throw;
  }
  let_go();
}

// Whoever opens the pool next is the only one that writes; and whoever takes away its disk, or makes the next pool in
// this process, finds nothing of it in use.
void Pool::let_go() {
  background_.stop();
  backend_->stop();
  last_ = {log_bytes(), log_bytes_free(), log_is_low(), traffic(), key_counts()};
  {
    const std::lock_guard lock(ending_);
    backend_.reset();
  }
  dense_.reset();
  superblock_->close();
  lock_.reset();
}

void Pool::end_steps() {
  const std::lock_guard lock(ending_);
  if (backend_) backend_->end_steps();
}

void Pool::sync_everything() {
  try {
    backend_->close(updated_);
    dense_->sync();
    superblock_->sync();
  } catch (const std::bad_alloc&) {
    throw;  // nothing that was asked of the medium failed
  } catch (...) {
    if (medium_->level() == format::Level::process) distrust();
    throw;
  }
}

// Pages whose write failed look written. They hold what they should until the system wants their memory; from then on
// rows are what they were at some earlier time, and nothing would tell.
void Pool::distrust() noexcept {
  EpochRecord epoch = superblock_->epoch();
  ++epoch.epoch;
  epoch.has_steps = 0;  // it goes back to no step
  epoch.step = 0;
  std::fill(std::begin(epoch.boot_id), std::end(epoch.boot_id), format::boot_id_byte_of_failed_sync);
  try {
    superblock_->write_epoch(epoch);
  } catch (const std::exception&) {
    // The page is written all the same, which is what the next opening sees, as long as it sees the rows.
  }
}

}  // namespace holdfast
