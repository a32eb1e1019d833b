// A dialled medium is never sooner than it is declared to be, is shared by whoever is under way, and counts what passes.
#include <chrono>
#include <cstdint>
#include <thread>

#include "base/background.h"
#include "base/error.h"
#include "check.h"
#include "media/dial.h"

namespace holdfast {
namespace {

using Clock = Dial::Clock;

constexpr DialSpec slow{.read_bytes_per_s = 1e6,
                        .write_bytes_per_s = 5e5,
                        .stream_write_bytes_per_s = 5e5,
                        .read_latency_s = 1e-3,
                        .write_latency_s = 2e-3,
                        .outstanding_requests = 4,
                        .granularity_bytes = 256,
                        .sync_latency_s = 3e-3,
                        .cache_bytes = 1e4};

double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

bool is_near(double value, double wanted) { return value > wanted * (1 - 1e-9) && value < wanted * (1 + 1e-9); }

void requests_take_what_bandwidth_or_latencies_allow() {
  const Dial dial(slow);
  DialWork small, large, all;
  dial.add_reads(small, 8, 100);  // a granule each: 2 ms of bytes, 2 turns of four latencies
  dial.add_reads(large, 8, 1000);  // four granules each
  CHECK(small.read_granules == 8 && large.read_granules == 32);
  CHECK(is_near(dial.seconds(small), 8 * 256 / 1e6));
  CHECK(is_near(dial.seconds(large), 32 * 256 / 1e6));
  DialSpec few = slow;
  few.outstanding_requests = 1;
  CHECK(is_near(Dial(few).seconds(small), 8 * 1e-3));
  dial.add_reads(all, 1, 256);
  dial.add_writes(all, 1, 257);
  all.stream_read_bytes = 1000;
  all.stream_written_bytes = 1000;
  all.syncs = 2;
  CHECK(is_near(dial.seconds(all), 256 / 1e6 + 512 / 5e5 + 1e-3 + 2e-3 + 6e-3));
}

void of_a_duplex_medium_the_slower_way_decides() {
  DialSpec link = slow;
  link.duplex = true;
  DialWork work;
  Dial(link).add_reads(work, 1, 256 * 100);
  Dial(link).add_writes(work, 1, 256 * 10);
  CHECK(is_near(Dial(link).seconds(work), 25600 / 1e6));
  CHECK(is_near(Dial(slow).seconds(work), 25600 / 1e6 + 2560 / 5e5));
  work.stream_written_bytes = 100'000;
  work.syncs = 1;
  CHECK(is_near(Dial(link).seconds(work), 2560 / 5e5 + 0.2 + 3e-3));
}

void of_rows_that_a_cache_has_no_room_for_the_rest_is_read_again() {
  const Dial dial(slow);
  CHECK(dial.uncached(0) == 0 && dial.uncached(10'000) == 0);
  CHECK(is_near(dial.uncached(40'000), 0.75));
}

void nothing_ends_sooner_than_is_declared() {
  Dial dial(slow);
  const auto began = Clock::now();
  DialService stream(&dial, {.stream_written_bytes = 5000});
  stream.finish();
  CHECK(seconds_since(began) >= 10e-3);
  CHECK(is_near(dial.counts().declared_s, 10e-3));
  CHECK(dial.counts().waited_s > 0);
}

void what_real_work_took_is_not_waited_for_again() {
  Dial dial(slow);
  DialService stream(&dial, {.stream_written_bytes = 5000});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  stream.finish();
  CHECK(dial.counts().waited_s == 0);
  CHECK(dial.counts().late_s >= 10e-3);
}

// Bandwidth is the medium's: two that are under way take as long as one after the other.
void work_under_way_shares_the_medium() {
  Dial dial(slow);
  const auto began = Clock::now();
  DialService one(&dial, {.stream_written_bytes = 5000});
  DialService other(&dial, {.stream_written_bytes = 5000});
  std::thread beside([&] { other.finish(); });
  one.finish();
  beside.join();
  CHECK(seconds_since(began) >= 20e-3);
}

// A short one beside a long one ends when both have had as much. Behind it, this test would take an hour.
void a_short_piece_does_not_wait_for_a_long_one() {
  Dial dial(slow);
  DialService longer(&dial, {.stream_written_bytes = 2'000'000'000});
  DialService shorter(&dial, {.stream_written_bytes = 500});
  shorter.finish();
}

// If it shared with the writes, this test would take an hour.
void a_read_of_a_duplex_medium_does_not_share_with_writes() {
  DialSpec link = slow;
  link.duplex = true;
  Dial dial(link);
  for (int i = 0; i < 200'000; ++i) DialService(&dial, {.stream_written_bytes = 2'000'000'000});
  DialService read(&dial, {.stream_read_bytes = 20'000});
  read.finish();
}

void without_a_dial_nothing_is_asked() {
  DialService nothing(nullptr, {.stream_written_bytes = std::uint64_t{1} << 60});
  nothing.finish();
}

void figures_that_no_medium_has_are_refused() {
  const auto refused = [](auto change) {
    DialSpec spec = slow;
    change(spec);
    try {
      const Dial dial(spec);
    } catch (const Error& error) {
      return error.kind() == ErrorKind::config;
    }
    return false;
  };
  CHECK(refused([](DialSpec& spec) { spec.read_bytes_per_s = 0; }));
  CHECK(refused([](DialSpec& spec) { spec.write_bytes_per_s = -1; }));
  CHECK(refused([](DialSpec& spec) { spec.granularity_bytes = 0; }));
  CHECK(refused([](DialSpec& spec) { spec.outstanding_requests = 0; }));
  CHECK(refused([](DialSpec& spec) { spec.read_latency_s = -1e-9; }));
}

void jobs_that_run_when_they_are_awaited_run_in_the_thread_that_waits() {
  Background background("test");
  background.run_when_awaited();
  const auto here = std::this_thread::get_id();
  int done = 0;
  const auto job = [&] {
    CHECK(std::this_thread::get_id() == here);
    ++done;
  };
  const auto first = background.submit(job);
  background.submit(job);
  CHECK(done == 0);
  background.wait(first);
  CHECK(done == 1);
  background.submit(job);
  background.stop();
  CHECK(done == 3);
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  check::seed_from(argc, argv);
  requests_take_what_bandwidth_or_latencies_allow();
  of_a_duplex_medium_the_slower_way_decides();
  of_rows_that_a_cache_has_no_room_for_the_rest_is_read_again();
  nothing_ends_sooner_than_is_declared();
  what_real_work_took_is_not_waited_for_again();
  work_under_way_shares_the_medium();
  a_short_piece_does_not_wait_for_a_long_one();
  a_read_of_a_duplex_medium_does_not_share_with_writes();
  without_a_dial_nothing_is_asked();
  figures_that_no_medium_has_are_refused();
  jobs_that_run_when_they_are_awaited_run_in_the_thread_that_waits();
  return check::passed();
}
