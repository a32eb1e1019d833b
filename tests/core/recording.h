// A recording of what a pool stores and makes durable, and every state that a power cut may leave at any point of it.
//
// What it models
// - A file arrives in units: words of 8 bytes of byte-addressable memory, sectors of 512 bytes of a block device. No
//   unit is torn, and nothing larger is atomic.
// - A unit may have arrived with any value that it has had since it was last guaranteed: caches write back when they
//   like.
// - A flush guarantees nothing yet; the next fence of its thread guarantees what the flushed units held at the flush.
//   Lines of eight words are flushed whole, and pages of eight sectors.
// - Files grow at once and for good: that is the file system's journal, not the protocol's order.
//
// What is stored is taken down once, in a journal. A disk is what the journal has made of a pool's files so far;
// cutting the power changes neither.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/format.h"
#include "check.h"

namespace holdfast {

inline constexpr std::size_t word_bytes = 8;
inline constexpr std::size_t units_per_flush = 8;  // words of a line, sectors of a page

using Bytes = std::vector<std::byte>;

inline Bytes bytes_of_file(const std::filesystem::path& path) {
  Bytes bytes(std::filesystem::file_size(path));
  std::ifstream stream(path, std::ios::binary);
  stream.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  CHECK(stream.good());
  return bytes;
}

inline void write_file(const std::filesystem::path& path, std::span<const std::byte> bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream stream(path, std::ios::binary | std::ios::trunc);
  stream.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  CHECK(stream.good());
}

// Files that are written and synced by sector, whatever the pool's other files are.
inline bool is_block_file(const std::string& name) {
  return name.ends_with(".home") || name.ends_with(".addresses") || name.starts_with("row-log");
}

// What was reported of a run when a power cut comes: it goes back to no step before `durable`, and not beyond `begun`.
struct Claims {
  std::uint64_t durable = 0;
  std::uint64_t begun = 0;

  bool operator==(const Claims&) const = default;
};

// Events, in the order of the run. Stores are of whole units.
struct Store {
  std::string file;
  std::size_t offset;
  Bytes bytes;
};
struct Resize {
  std::string file;
  std::size_t bytes;
};
struct Flush {
  std::string file;
  std::size_t offset;
  std::size_t bytes;
  std::uint64_t first_word = 0;  // of what is flushed, where it is mapped
  std::optional<std::size_t> written = std::nullopt;  // where this life changed the file last
  bool by_merge = false;
  std::uint64_t thread = 0;  // where threads are told apart
};
struct Fence {
  std::string file = {};  // a block file; of mapped files all at once
  std::uint64_t thread = 0;
};
struct Point {  // the power may be cut here
  Claims claims;
};
using Event = std::variant<Store, Resize, Flush, Fence, Point>;

// Thread-safe; the run sees to it that its threads take turns, so that it is the same each time. But for one thing: a
// merge that a commit sets off may begin before or after it is allowed that commit's step.
class Journal {
 public:
  explicit Journal(const Claims& claims = {}) : claims_(claims) {}

  void add(Event event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
  }
  void point() {
    const std::lock_guard lock(mutex_);
    if (durable_) claims_.durable = std::max(claims_.durable, durable_());
    events_.emplace_back(Point{claims_});
  }
  void begin_step(std::uint64_t step) {
    const std::lock_guard lock(mutex_);
    claims_.begun = std::max(claims_.begun, step);
  }
  // Which step a run reports durable, from now on; null when it ends.
  void ask(std::function<std::uint64_t()> durable) {
    const std::lock_guard lock(mutex_);
    durable_ = std::move(durable);
  }

  // When the run is over.
  const std::vector<Event>& events() const { return events_; }

 private:
  std::mutex mutex_;
  std::vector<Event> events_;
  Claims claims_;
  std::function<std::uint64_t()> durable_;
};

// Of each open unit, how many of its values have arrived: 0, and it is what was guaranteed.
using Arrival = std::vector<std::size_t>;

class Disk {
 public:
  // Files of a pool, all of which has arrived. Those that are mapped arrive in units of `mapped_unit_bytes`.
  Disk(const std::string& directory, std::size_t mapped_unit_bytes) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
      if (!entry.is_regular_file() || entry.path().filename() == "lock") continue;
      const std::string name = std::filesystem::relative(entry.path(), directory).string();
      files_[name] = {
          is_block_file(name) ? format::sector_bytes : mapped_unit_bytes, bytes_of_file(entry.path()), {}, {}};
    }
  }

  void operator()(const Store& store) {
    ++num_stores_;
    Contents& file = files_.at(store.file);
    CHECK(store.offset % file.unit_bytes == 0 && store.bytes.size() % file.unit_bytes == 0);
    for (std::size_t at = 0; at < store.bytes.size(); at += file.unit_bytes) {
      const auto first = store.bytes.begin() + static_cast<std::ptrdiff_t>(at);
      file.pending[(store.offset + at) / file.unit_bytes].push_back(
          {num_stores_, {first, first + static_cast<std::ptrdiff_t>(file.unit_bytes)}});
    }
  }
  void operator()(const Point&) {}
  void operator()(const Resize& resize) { files_.at(resize.file).durable.resize(resize.bytes); }
  void operator()(const Flush& flush) {
    Contents& file = files_.at(flush.file);
    const std::size_t flushed_bytes = file.unit_bytes * units_per_flush;
    const std::size_t begin = flush.offset / flushed_bytes * units_per_flush;
    const std::size_t end = format::align_up(flush.offset + flush.bytes, flushed_bytes) / file.unit_bytes;
    for (auto unit = file.pending.lower_bound(begin); unit != file.pending.end() && unit->first < end; ++unit) {
      file.flushed[unit->first][flush.thread] = unit->second.size();
    }
  }
  void operator()(const Fence& fence) {
    for (auto& [name, file] : files_) {
      if (fence.file.empty() ? is_block_file(name) : name != fence.file) continue;
      for (auto unit = file.flushed.begin(); unit != file.flushed.end();) {
        const auto [number, of_threads] = *unit;
        unit = std::next(unit);
        if (const auto own = of_threads.find(fence.thread); own != of_threads.end())
          file.guarantee(number, own->second);
      }
    }
  }

  // Where the process has died before its fence.
  Disk without_flushes() const {
    Disk disk = *this;
    for (auto& [name, file] : disk.files_) file.flushed.clear();
    return disk;
  }

  std::size_t num_open() const {
    std::size_t count = 0;
    for (const auto& [name, file] : files_) count += file.pending.size();
    return count;
  }

  // In which blocks of which files something is open; far into a file all blocks are one.
  using Places = std::set<std::pair<std::string, std::size_t>>;
  Places open_places() const {
    constexpr std::size_t told_apart = 5;
    Places places;
    for (const auto& [name, file] : files_) {
      for (const auto& [unit, values] : file.pending) {
        places.emplace(name, std::min(unit * file.unit_bytes / format::block_bytes, told_apart));
      }
    }
    return places;
  }

  Arrival none() const { return Arrival(num_open()); }
  Arrival all() const {
    Arrival arrival;
    for_open([&](const Contents&, std::size_t, const Values& values) { arrival.push_back(values.size()); });
    return arrival;
  }
  // The newest store has arrived, and nothing before it.
  Arrival newest() const {
    return stores([this](std::uint64_t store) { return store == num_stores_; });
  }
  // What has arrived, drawn in one of several ways: by stores, files, lines or pages, units, all but one of them or
  // only one.
  Arrival drawn(std::mt19937_64& random) const {
    enum Way : std::uint64_t { by_store, by_file, by_flush, by_unit, only_one, all_but_one, num_ways };
    const std::uint64_t way = random() % num_ways;
    const std::uint64_t percent = std::array{5, 50, 95}[random() % 3];
    if (way == by_store) {
      std::map<std::uint64_t, bool> arrived;
      return stores([&](std::uint64_t store) { return arrived.try_emplace(store, random() % 2 == 0).first->second; });
    }
    const std::size_t odd_one = random() % std::max<std::size_t>(1, num_open());
    Arrival arrival;
    std::pair<const Contents*, std::size_t> together{nullptr, 0};
    bool has_arrived = false;
    for_open([&](const Contents& file, std::size_t unit, const Values& values) {
      const std::pair now{&file, way == by_file ? 0 : unit / units_per_flush};
      const bool is_odd = arrival.size() == odd_one;
      if (way == by_unit) has_arrived = random() % 100 < percent;
      if (way == only_one) has_arrived = is_odd;
      if (way == all_but_one) has_arrived = !is_odd;
      if (way == by_flush && now != together) has_arrived = random() % 100 < percent;
      if (way == by_file && now != together) has_arrived = random() % 2 == 0;
      together = now;
      arrival.push_back(has_arrived ? 1 + random() % values.size() : 0);
    });
    return arrival;
  }
  // `most` of the states at this point, each once: all of them where there are no more, else none, all, the newest
  // store alone, and drawn ones; where it is one, any of these.
  std::set<Arrival> states(std::uint64_t most, std::mt19937_64& random) const {
    std::set<Arrival> states;
    std::uint64_t count = 1;
    for_open([&](const Contents&, std::size_t, const Values& values) {
      if (count <= most) count *= values.size() + 1;
    });
    if (count <= most) {
      for (std::uint64_t number = 0; number < count; ++number) states.insert(numbered(number));
      return states;
    }
    if (most == 1) return {std::array{none(), all(), newest(), drawn(random)}[random() % 4]};
    states = {none(), all(), newest()};
    for (std::uint64_t tries = 0; states.size() < most && tries < 2 * most; ++tries) states.insert(drawn(random));
    return states;
  }

  // Makes files of the state, in `directory`.
  void leave(const std::string& directory, const Arrival& arrival) const {
    auto next = arrival.begin();
    for (const auto& [name, file] : files_) {
      Contents left{file.unit_bytes, file.durable, {}, {}};
      for (const auto& [unit, values] : file.pending) {
        const std::size_t count = *next++;
        if (count != 0) left.put(unit, values[count - 1]);
      }
      write_file(std::filesystem::path(directory) / name, left.durable);
    }
  }

 private:
  struct Value {
    std::uint64_t store;  // number of the one that it is part of
    Bytes bytes;
  };
  using Values = std::vector<Value>;  // of a unit, oldest first
  struct Contents {
    std::size_t unit_bytes;
    Bytes durable;
    std::map<std::size_t, Values> pending;
    // unit → of each thread that has flushed it, how many of its pending values were there then
    std::map<std::size_t, std::map<std::uint64_t, std::size_t>> flushed;

    // The unit's first `count` pending values are over, and the last of them is there for good.
    void guarantee(std::size_t unit, std::size_t count) {
      auto& values = pending.at(unit);
      put(unit, values[count - 1]);
      values.erase(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(count));
      if (values.empty()) pending.erase(unit);
      auto& of_threads = flushed.at(unit);
      std::erase_if(of_threads, [count](const auto& flush) { return flush.second <= count; });
      for (auto& [thread, left] : of_threads) left -= count;
      if (of_threads.empty()) flushed.erase(unit);
    }

    void put(std::size_t unit, const Value& value) {
      CHECK((unit + 1) * unit_bytes <= durable.size());
      std::copy(value.bytes.begin(), value.bytes.end(),
                durable.begin() + static_cast<std::ptrdiff_t>(unit * unit_bytes));
    }
  };

  template <class Visit>
  void for_open(const Visit& visit) const {
    for (const auto& [name, file] : files_) {
      for (const auto& [unit, values] : file.pending) visit(file, unit, values);
    }
  }
  // Of each unit the newest value that is part of a store which has arrived.
  template <class HasArrived>
  Arrival stores(const HasArrived& has_arrived) const {
    Arrival arrival;
    for_open([&](const Contents&, std::size_t, const Values& values) {
      std::size_t count = values.size();
      while (count != 0 && !has_arrived(values[count - 1].store)) --count;
      arrival.push_back(count);
    });
    return arrival;
  }
  Arrival numbered(std::uint64_t number) const {
    Arrival arrival;
    for_open([&](const Contents&, std::size_t, const Values& values) {
      arrival.push_back(number % (values.size() + 1));
      number /= values.size() + 1;
    });
    return arrival;
  }

  std::uint64_t num_stores_ = 0;
  std::map<std::string, Contents> files_;
};

}  // namespace holdfast
