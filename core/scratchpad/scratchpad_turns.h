// Scratchpad turns: what the threads of a scratchpad, and whoever lets a hold go, tell one another.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "scratchpad/scratchpad.h"

namespace holdfast {

struct Scratchpad::Turns {
  std::mutex mutex;  // guards all of it
  std::condition_variable turned;
  std::vector<std::shared_ptr<Hold>> expected;
  std::map<std::uint64_t, const Hold*> live;  // holds that are not let go
  std::set<std::uint64_t> given_up;           // of these
  bool out_of_order = false;  // a hold was let go before an older one: its slots may be free though the rule holds them
  std::uint64_t num_holds = 0;
  std::uint64_t newest_ready = 0;  // hold: all before it are ready, too
  std::uint64_t waiting = 0;  // the hold that is being collected and finds no room, or 0
  std::uint64_t waiting_for = 0;  // the oldest live hold when it last looked
  std::exception_ptr failure;
  bool stopping = false;
  bool sweeping = false;
  std::chrono::steady_clock::time_point sweep_began;
  double swept = 0;  // its share
  ScratchpadCounters counters{};

  std::uint64_t oldest_live() const { return live.begin()->first; }
  void give_up(Hold& hold) {
    hold.given_up_ = true;
    given_up.insert(hold.order_);
  }
  // Does the hold of `order` find no room, whatever those that were given up before it leave?
  bool has_no_room(std::uint64_t order) const {
    return waiting != 0 && waiting <= order && waiting_for == oldest_live() && !out_of_order &&
           (given_up.empty() || *given_up.begin() > waiting);
  }
  // Not in its first moments, when nobody knows.
  bool sweep_takes_longer_than(std::chrono::duration<double> limit) const {
    constexpr std::chrono::duration<double> first_moments{0.25};
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - sweep_began;
    return took > first_moments && took * (1 - swept) > limit * swept;
  }
};

// Missed rows on their way into slots.
struct Scratchpad::Staging {
  struct Rows {
    std::vector<std::byte> weights;
    std::vector<float> state;
  };
  std::vector<Rows> tables;
};

}  // namespace holdfast
