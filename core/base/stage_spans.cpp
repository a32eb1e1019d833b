#include "base/stage_spans.h"

#include <new>

namespace holdfast {
namespace {

struct Names {
  const char* stage;
  const char* thread;
};
// By the order of Stage.
constexpr Names names[] = {
    {"collect", "hf-collect"}, {"exchange", "hf-exchange"}, {"insert", "hf-exchange"}, {"merge", "hf-merge"},
    {"persist", "hf-commit"},  {"append", "hf-commit"},     {"sync", "hf-commit"},     {"dense", "hf-commit"},
};

}  // namespace

const char* name_of(Stage stage) { return names[static_cast<std::size_t>(stage)].stage; }
const char* thread_of(Stage stage) { return names[static_cast<std::size_t>(stage)].thread; }

void StageSpans::add(const Span& span) noexcept {
  const std::lock_guard lock(mutex_);
  if (spans_.size() == capacity) spans_.pop_front();
  try {
    spans_.push_back(span);
  } catch (const std::bad_alloc&) {
    return;
  }
}

std::vector<StageSpans::Span> StageSpans::take() {
  const std::lock_guard lock(mutex_);
  std::vector<Span> taken(spans_.begin(), spans_.end());
  spans_.clear();
  return taken;
}

}  // namespace holdfast
