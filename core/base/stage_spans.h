// Stage spans: when the stages ran that run beside training, for whoever draws them or adds them up.
//
// Invariants
// - Thread-safe. Of the spans that nobody has taken the newest `capacity` are kept, in the order in which they ended.
// - Times are of CLOCK_MONOTONIC, which Python's time.perf_counter reads as well.
// - A stage that lies within another one (append and sync in persist) has a span of its own beside that one's.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

namespace holdfast {

// What runs where: collect, exchange (a fetch with its waits for the disk) and insert of a scratchpad; merge, the rests
// between its parts left out; persist, a step that is over becomes durable, with append and sync where rows are in a log
// store; dense, a part of a dense state.
enum class Stage : std::uint8_t { collect, exchange, insert, merge, persist, append, sync, dense };
const char* name_of(Stage stage);
const char* thread_of(Stage stage);  // by whose name it runs, whoever helps

class StageSpans {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t capacity = 4096;

  struct Span {
    Stage stage;
    Clock::time_point began;
    Clock::time_point ended;
  };

  // A span of its own life, also where it ends with an exception.
  class Timing {
   public:
    Timing(StageSpans& spans, Stage stage) : spans_(spans), stage_(stage) {}
    ~Timing() { spans_.add({stage_, began_, Clock::now()}); }
    Timing(const Timing&) = delete;
    Timing& operator=(const Timing&) = delete;

   private:
    StageSpans& spans_;
    Stage stage_;
    Clock::time_point began_ = Clock::now();
  };

  // Where there is no memory for it, the span is left out: what it tells of goes on.
  void add(const Span& span) noexcept;
  // Those that ended since the last call.
  std::vector<Span> take();

 private:
  std::mutex mutex_;
  std::deque<Span> spans_;
};

}  // namespace holdfast
