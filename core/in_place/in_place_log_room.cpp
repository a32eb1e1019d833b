// Room of the undo log: when it is low, how an open-ended one grows, and what moves within it.
#include <algorithm>
#include <cstring>
#include <exception>
#include <string>

#include "base/error.h"
#include "in_place/in_place_backend.h"

namespace holdfast {

using format::RecordHeader;

// How many more steps like the largest so far a log that is not low has room for. What it lacks is known at the end of a
// step, and a dense state is durable before the step after the next one; in a group the others are told with the ids of
// batches, which travel ahead of them. A record that does not fit before the end of the ring takes room for two.
std::uint64_t InPlaceBackend::spare_steps() const { return options_.in_group ? 4 : 2; }

bool InPlaceBackend::log_is_low() const { return log_.free_bytes() < spare_steps() * log_.largest_step_bytes(); }

// An open-ended log holds the records of all steps since the dense state that recovery may go back to, and a few more. The
// next one is begun dense_interval steps after that, and written while as many pass; a group's, which is another pool's, at
// once.
std::size_t InPlaceBackend::wanted_log_bytes(std::size_t step_bytes) const {
  const std::size_t steps = options_.in_group ? options_.dense_interval : 2 * std::size_t{options_.dense_interval} - 1;
  constexpr std::size_t steps_bytes_limit = std::size_t{1} << 30;
  // A device is a few steps ahead of the log.
  const std::size_t more_steps = spare_steps() + (options_.in_group ? 6 : 3);
  const std::size_t wanted = std::min(step_bytes * steps, steps_bytes_limit) + more_steps * step_bytes;
  return format::align_up(wanted + wanted / 4, format::block_bytes);
}

// Between steps, when everything in it has become durable and nothing in it is needed.
void InPlaceBackend::grow_log(std::size_t record_bytes) {
  const std::size_t step_bytes = std::max<std::size_t>(record_bytes, log_.largest_step_bytes());
  if (!options_.grow_log || !parts_.empty() || wanted_log_bytes(step_bytes) <= log_.ring_bytes()) return;
  if (!log_.empty() && log_is_low()) options_.finish_pending();
  if (log_.empty()) log_.grow(wanted_log_bytes(step_bytes));
}

// For a record of the step that is under way.
std::uint64_t InPlaceBackend::make_room(std::uint64_t step, std::size_t bytes) {
  // What is on its way to become durable is finished now rather than waited for.
  options_.finish_pending();
  if (const auto position = log_.reserve(step, bytes)) return *position;
  // An open-ended log grows beneath the step that is under way, if that is all it holds.
  const std::uint64_t begin = parts_.empty() ? log_.head() : parts_.front().position;
  if (options_.grow_log && log_.tail() == begin && !updated_) {
    const std::size_t step_bytes = log_.head() - begin + bytes;
    move_parts(parts_.begin(), [&] { log_.grow(wanted_log_bytes(step_bytes)); });
    if (const auto position = log_.reserve(step, bytes)) return *position;
  }
  if (bytes > log_.ring_bytes()) {
    throw Error(ErrorKind::batch_too_large, "one batch's rows take " + std::to_string(bytes) +
                                                " bytes of log, the log has " + std::to_string(log_.ring_bytes()) +
                                                "; make the pool with a larger log_bytes, or the batch smaller");
  }
  throw Error(ErrorKind::batch_too_large,
              "the log (" + std::to_string(log_.ring_bytes()) + " bytes, " + std::to_string(log_.free_bytes()) +
                  " free) has no room for the " + std::to_string(bytes) + " bytes of step " + std::to_string(step) +
                  ": it holds the rows of every step since the newest durable dense state and " +
                  std::to_string(parts_.size()) +
                  " forward passes of this step; make the pool with a larger log_bytes, lower dense_interval, or "
                  "evaluate under torch.no_grad()");
}

// Forward passes whose results were thrown away leave records that nobody needs.
void InPlaceBackend::drop_dead_captures() {
  const auto dead = std::find_if(parts_.begin(), parts_.end(), [](const Part& part) { return part.capture.expired(); });
  if (dead == parts_.end() || updated_) return;
  move_parts(dead, [] {});
}

// The records from `first` on are taken back, and those that are still needed are put where there is room once `change`
// was called. Home has not changed since they were made, so nothing is lost if that is interrupted.
void InPlaceBackend::move_parts(std::vector<Part>::iterator first, const std::function<void()>& change) {
  background_.drain();
  struct Saved {
    std::shared_ptr<LoggedCapture> capture;
    std::vector<std::byte> bytes;
    const std::byte* from;
  };
  std::vector<Saved> saved;
  for (auto part = first; part != parts_.end(); ++part) {
    if (auto capture = part->capture.lock()) {
      const std::byte* data = log_.at(capture->position);
      saved.push_back({capture, {data, data + capture->bytes}, data});
    }
  }
  if (first != parts_.end()) log_.rewind(first->position, log_.before(first->position));
  parts_.erase(first, parts_.end());
  std::exception_ptr refused;
  try {
    change();
  } catch (...) {
    refused = std::current_exception();
  }
  try {
    for (const auto& [capture, bytes, from] : saved) put_back(capture, bytes, from);
  } catch (...) {
    // A row would be overwritten whose record is nowhere.
    background_.fail(std::current_exception());
    throw;
  }
  if (refused) std::rethrow_exception(refused);
}

// bytes: the capture's record, as it lay at `from`.
void InPlaceBackend::put_back(const std::shared_ptr<LoggedCapture>& capture, std::span<const std::byte> bytes,
                              const std::byte* from) {
  const auto position = log_.reserve(capture->step, bytes.size());
  if (!position) throw Error(ErrorKind::failed, "the log lost the room it had");
  std::byte* const to = log_.at(*position);
  std::memcpy(to + sizeof(RecordHeader), bytes.data() + sizeof(RecordHeader), bytes.size() - sizeof(RecordHeader));
  for (std::size_t t = 0; t < capture->tables.size(); ++t) {
    WorkingRows& rows = capture->tables[t];
    rows.rows = reinterpret_cast<std::uint64_t*>(to + (reinterpret_cast<std::byte*>(rows.rows) - from));
    if (!capture->apart[t].empty()) continue;
    rows.weights = to + (rows.weights - from);
    rows.state = reinterpret_cast<float*>(to + (reinterpret_cast<std::byte*>(rows.state) - from));
  }
  capture->position = *position;
  submit_seal(*capture);
  add_part(capture);
}

}  // namespace holdfast
