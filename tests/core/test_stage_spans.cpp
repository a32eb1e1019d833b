#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/stage_spans.h"
#include "check.h"

namespace holdfast {
namespace {

using Clock = StageSpans::Clock;

StageSpans::Span span_of(int number) {
  const auto at = Clock::time_point(std::chrono::seconds(number));
  return {Stage::collect, at, at + std::chrono::milliseconds(1)};
}

void spans_are_given_once_in_the_order_in_which_they_ended() {
  StageSpans spans;
  CHECK(spans.take().empty());
  for (int number = 0; number < 3; ++number) spans.add(span_of(number));
  const std::vector<StageSpans::Span> taken = spans.take();
  CHECK(taken.size() == 3);
  for (int number = 0; number < 3; ++number)
    CHECK(taken[static_cast<std::size_t>(number)].began == span_of(number).began);
  CHECK(spans.take().empty());
}

void of_those_that_nobody_takes_the_newest_stay() {
  StageSpans spans;
  constexpr int count = static_cast<int>(StageSpans::capacity) + 100;
  for (int number = 0; number < count; ++number) spans.add(span_of(number));
  const std::vector<StageSpans::Span> taken = spans.take();
  CHECK(taken.size() == StageSpans::capacity);
  CHECK(taken.front().began == span_of(100).began);
  CHECK(taken.back().began == span_of(count - 1).began);
}

void work_that_fails_has_a_span_too() {
  StageSpans spans;
  const Clock::time_point before = Clock::now();
  try {
    const StageSpans::Timing timing(spans, Stage::exchange);
    throw std::runtime_error("the disk");
  } catch (const std::runtime_error&) {
  }
  const std::vector<StageSpans::Span> taken = spans.take();
  CHECK(taken.size() == 1);
  CHECK(taken[0].stage == Stage::exchange);
  CHECK(before <= taken[0].began && taken[0].began <= taken[0].ended && taken[0].ended <= Clock::now());
}

void threads_add_at_the_same_time() {
  StageSpans spans;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&spans] {
      for (int i = 0; i < 500; ++i) const StageSpans::Timing timing(spans, Stage::append);
    });
  }
  std::size_t taken = spans.take().size();
  for (std::thread& thread : threads) thread.join();
  taken += spans.take().size();
  CHECK(taken == 2000);
}

void every_stage_has_its_name_and_its_thread() {
  CHECK(std::string(name_of(Stage::collect)) == "collect");
  CHECK(std::string(name_of(Stage::merge)) == "merge");
  CHECK(std::string(name_of(Stage::dense)) == "dense");
  CHECK(std::string(thread_of(Stage::insert)) == "hf-exchange");
  CHECK(std::string(thread_of(Stage::merge)) == "hf-merge");
  CHECK(std::string(thread_of(Stage::persist)) == "hf-commit");
}

}  // namespace
}  // namespace holdfast

int main() {
  holdfast::spans_are_given_once_in_the_order_in_which_they_ended();
  holdfast::of_those_that_nobody_takes_the_newest_stay();
  holdfast::work_that_fails_has_a_span_too();
  holdfast::threads_add_at_the_same_time();
  holdfast::every_stage_has_its_name_and_its_thread();
  return check::passed();
}
