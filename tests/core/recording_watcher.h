// A watcher of block files that takes down in a journal what is written to them and what is synced, and holds a merge
// up where it is told to, so that steps are committed in the middle of it.
#pragma once

#include <pthread.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "check.h"
#include "media/block_file.h"
#include "recording.h"

namespace holdfast {

class RecordingWatcher final : public BlockWatcher {
 public:
  RecordingWatcher(const std::string& directory, Journal& journal)
      : prefix_bytes_(directory.size() + 1), journal_(journal) {}

  // The merge stands still before its `count`-th write or sync from now (0: nowhere), until it is released or gives
  // way.
  void hold_merge_in(std::uint64_t count, std::function<bool()> gives_way = nullptr) {
    const std::lock_guard lock(mutex_);
    hold_in_ = count;
    gives_way_ = std::move(gives_way);
  }
  bool holds_merge() const {
    const std::lock_guard lock(mutex_);
    return is_held_;
  }
  void release_merge() {
    {
      const std::lock_guard lock(mutex_);
      is_held_ = false;
    }
    released_.notify_all();
  }

  void before_read(const BlockFile&) override {}
  void before_write(const BlockFile& file, std::uint64_t offset, std::span<const std::byte> data) override {
    hold();
    if (changes(file, offset, data)) {
      const std::lock_guard lock(mutex_);
      written_[&file] = offset;
    }
    journal_.add(Store{name_of(file), offset, {data.begin(), data.end()}});
    journal_.point();
  }
  // What is written while the file is being synced, the sync does not guarantee.
  void before_sync(const BlockFile& file) override {
    hold();
    journal_.point();
    journal_.add(Flush{.file = name_of(file),
                       .offset = 0,
                       .bytes = file.size(),
                       .written = last_written(file),
                       .by_merge = is_merge_thread()});
  }
  void after_sync(const BlockFile& file) override { journal_.add(Fence{name_of(file)}); }

 private:
  static bool changes(const BlockFile& file, std::uint64_t offset, std::span<const std::byte> data) {
    std::ifstream stream(file.name(), std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(offset));
    std::vector<char> there(data.size());
    stream.read(there.data(), static_cast<std::streamsize>(there.size()));
    CHECK(stream.good());
    return std::memcmp(there.data(), data.data(), data.size()) != 0;
  }
  std::string name_of(const BlockFile& file) const { return file.name().substr(prefix_bytes_); }
  std::optional<std::size_t> last_written(const BlockFile& file) const {
    const std::lock_guard lock(mutex_);
    const auto found = written_.find(&file);
    return found == written_.end() ? std::nullopt : std::optional(found->second);
  }
  static bool is_merge_thread() {
    std::array<char, 16> name{};
    ::pthread_getname_np(::pthread_self(), name.data(), name.size());
    return std::string_view(name.data()) == "hf-merge";
  }
  void hold() {
    if (!is_merge_thread()) return;
    std::unique_lock lock(mutex_);
    if (hold_in_ == 0 || --hold_in_ != 0) return;
    is_held_ = true;
    // It may be told to hold no more just before it is released.
    while (is_held_ && !(gives_way_ && gives_way_())) released_.wait_for(lock, std::chrono::microseconds(20));
    is_held_ = false;
  }

  std::size_t prefix_bytes_;
  Journal& journal_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable released_;
  std::uint64_t hold_in_ = 0;
  bool is_held_ = false;
  std::function<bool()> gives_way_;
  std::map<const BlockFile*, std::size_t> written_;  // where last, other bytes than were there
};

}  // namespace holdfast
