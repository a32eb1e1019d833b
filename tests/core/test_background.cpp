// The background's promises: order, waiting, and what a failure leaves.
#include <atomic>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/background.h"
#include "base/error.h"
#include "check.h"

namespace holdfast {
namespace {

std::function<void()> failing(const char* what) {
  return [what] { throw Error(ErrorKind::full, what); };
}

// What work throws.
std::string said_by(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void jobs_run_in_their_order_with_a_thread_and_without() {
  for (const bool beside : {true, false}) {
    check::context = beside ? "beside" : "when awaited";
    std::vector<int> ran;
    {
      Background background("test");
      if (!beside) background.run_when_awaited();
      Background::Ticket third = 0;
      for (int i = 0; i < 8; ++i) {
        const auto ticket = background.submit([&ran, i] { ran.push_back(i); });
        if (i == 2) third = ticket;
      }
      if (!beside) {
        CHECK(ran.empty() && !background.done(third));
        background.wait(third);
        CHECK(ran.size() == 3);
      }
      background.wait(third);
      CHECK(background.done(third));
    }  // which finishes what is queued
    CHECK((ran == std::vector{0, 1, 2, 3, 4, 5, 6, 7}));
  }
}

void the_first_failure_stays_and_what_was_queued_is_dropped() {
  for (const bool beside : {true, false}) {
    check::context = beside ? "a failure beside" : "a failure when awaited";
    Background background("test");
    if (!beside) background.run_when_awaited();
    std::atomic<bool> may_fail{false};
    std::atomic<bool> ran{false};
    const auto failed = background.submit([&] {
      while (!may_fail) std::this_thread::yield();
      failing("the first")();
    });
    background.submit([&] { ran = true; });
    may_fail = true;
    CHECK(said_by([&] { background.wait(failed); }) == "the first");
    background.fail(std::make_exception_ptr(Error(ErrorKind::failed, "another")));
    CHECK(said_by([&] { background.check(); }) == "the first");
    CHECK(said_by([&] { background.submit([&] { ran = true; }); }) == "the first");
    CHECK(said_by([&] { background.drain(); }) == "the first");
    background.stop();
    CHECK(!ran);
  }
}

// A job that is under way when somebody else fails ends as it will; it is not the failure.
void a_job_that_fails_after_a_failure_is_not_the_failure() {
  check::context = "two failures";
  Background background("test");
  std::atomic<bool> is_running{false};
  std::atomic<bool> may_end{false};
  background.submit([&] {
    is_running = true;
    while (!may_end) std::this_thread::yield();
    failing("the second")();
  });
  while (!is_running) std::this_thread::yield();
  background.fail(std::make_exception_ptr(Error(ErrorKind::failed, "the first")));
  may_end = true;
  background.stop();
  CHECK(said_by([&] { background.check(); }) == "the first");
}

void jobs_that_nobody_awaited_after_a_failure_do_not_run() {
  check::context = "a failure before a job";
  Background background("test");
  background.run_when_awaited();
  bool ran = false;
  background.submit([&] { ran = true; });
  background.fail(std::make_exception_ptr(Error(ErrorKind::failed, "the first")));
  background.stop();
  CHECK(!ran);
}

}  // namespace
}  // namespace holdfast

int main() {
  using namespace holdfast;
  jobs_run_in_their_order_with_a_thread_and_without();
  the_first_failure_stays_and_what_was_queued_is_dropped();
  a_job_that_fails_after_a_failure_is_not_the_failure();
  jobs_that_nobody_awaited_after_a_failure_do_not_run();
  return check::passed();
}
