#include "log_store/row_log_follower.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace holdfast {
namespace {

[[noreturn]] void overtaken(std::uint64_t step) {
  throw Error(ErrorKind::overtaken,
              "the row log came round before the record after step " + std::to_string(step) + " was read");
}

}  // namespace

RowLogFollower::RowLogFollower(LogStore& store)
    : store_(store),
      newest_(store.last()),
      begun_(store.follow_from_tail()),
      kept_(begun_.front()),
      versions_(store.tables()) {}

bool RowLogFollower::goes_on_from(const RowLog::Link& record) const {
  return record.position != format::no_position && std::ranges::find(begun_, record) != begun_.end();
}

bool RowLogFollower::advance() {
  auto record = store_.follow();
  if (!record) return false;
  if (record->link.mark.step > newest_.step) newest_ = record->link.mark;
  pending_.push_back(std::move(*record));
  return true;
}

void RowLogFollower::keep_up_to(std::uint64_t step) {
  for (; !pending_.empty() && pending_.front().link.mark.step <= step; pending_.pop_front()) {
    kept_ = pending_.front().link;
    store_.visit_rows(pending_.front(), [this](std::uint32_t table, std::uint64_t row, const std::byte* image) {
      versions_.replace(table, row, image);
    });
  }
}

void RowLogFollower::follow(std::uint64_t floor) {
  do {
    keep_up_to(floor);
  } while (advance());
  keep_up_to(floor);
}

std::uint64_t RowLogFollower::newest_step() {
  follow(0);
  return newest_.step;
}

// A dense state is durable after the record of its step: what is not there now was there.
void RowLogFollower::fix(std::uint64_t step) {
  follow(step);
  if (newest_.step < step) overtaken(newest_.step);
  pending_.clear();
}

StepMark RowLogFollower::catch_up() {
  do {
    follow(0);
    if (store_.read_merged_step() <= newest_.step) return newest_;
  } while (advance());
  overtaken(newest_.step);
}

}  // namespace holdfast
