// A double of byte-addressable memory at level `power`, or of mapped files at level `process`: it knows of every 8-byte word what would be there after a power
// cut, and makes files of any state that the cut could leave.
//
// What it models
// - A word that was stored to may have arrived with any value that it has had since it was last guaranteed: caches write
//   back when they like. Values are seen at flushes and fences, so one that was there only between two of them is not.
// - A flush guarantees nothing yet; the next fence of the same thread guarantees what the flushed lines held at the flush.
// - At level `process` flushes mean nothing: only a file's sync guarantees something.
// - Files grow at once and for good: that is the file system's journal, not the protocol's order.
//
// Stores by one thread at a time, and none while another one flushes: the run waits for the background after each verb.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "format.h"
#include "media/medium.h"

namespace holdfast {

using Word = std::uint64_t;

// One file: what programs see of it, and what is guaranteed.
class RecordedContents {
 public:
  static constexpr std::size_t words_per_line = format::line_bytes / sizeof(Word);

  RecordedContents(std::string name, const std::vector<char>& bytes)
      : name_(std::move(name)), bytes_(bytes.size()), seen_(most_bytes / sizeof(Word)), durable_(seen_) {
    CHECK(bytes.size() <= most_bytes);
    std::memcpy(memory(), bytes.data(), bytes.size());
    std::memcpy(seen_.data(), memory(), most_bytes);
    durable_ = seen_;
  }

  const std::string& name() const { return name_; }
  std::size_t size() const { return bytes_; }
  void resize(std::size_t bytes) {
    CHECK(bytes <= most_bytes);
    bytes_ = bytes;
  }
  std::byte* memory() { return reinterpret_cast<std::byte*>(memory_.data()); }
  bool contains(const void* data) {
    const auto* at = static_cast<const std::byte*>(data);
    return at >= memory() && at < memory() + most_bytes;
  }
  std::size_t offset_of(const void* data) {
    return static_cast<std::size_t>(static_cast<const std::byte*>(data) - memory());
  }

  // Takes notice of what was stored since the last look.
  void look() {
    const std::size_t num_words = (bytes_ + sizeof(Word) - 1) / sizeof(Word);
    for (std::size_t w = 0; w < num_words; ++w) {
      Word now;
      std::memcpy(&now, memory() + w * sizeof(Word), sizeof(now));
      if (now == seen_[w]) continue;
      seen_[w] = now;
      pending_[w].push_back(now);
    }
  }
  // The lines of these bytes, as they were when last looked at, are guaranteed by the next fence.
  void flush(std::size_t offset, std::size_t bytes) {
    const std::size_t begin = offset / format::line_bytes * words_per_line;
    const std::size_t end = format::line_up(offset + bytes) / sizeof(Word);
    for (auto word = pending_.lower_bound(begin); word != pending_.end() && word->first < end; ++word) {
      flushed_[word->first] = word->second.size();
    }
  }
  void fence() {
    for (const auto& [w, count] : flushed_) {
      auto& values = pending_.at(w);
      durable_[w] = values[count - 1];
      values.erase(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(count));
      if (values.empty()) pending_.erase(w);
    }
    flushed_.clear();
  }

  // Words that a power cut leaves open, and their values, oldest first.
  const std::map<std::size_t, std::vector<Word>>& pending() const { return pending_; }
  std::vector<Word> durable() const {
    return {durable_.begin(), durable_.begin() + static_cast<std::ptrdiff_t>((bytes_ + 7) / 8)};
  }

 private:
  static constexpr std::size_t most_bytes = std::size_t{64} << 10;
  struct alignas(format::line_bytes) Line {
    std::array<std::byte, format::line_bytes> bytes;
  };

  std::string name_;
  std::size_t bytes_;
  std::vector<Line> memory_ = std::vector<Line>(most_bytes / format::line_bytes);
  std::vector<Word> seen_;
  std::vector<Word> durable_;
  std::map<std::size_t, std::vector<Word>> pending_;
  std::map<std::size_t, std::size_t> flushed_;  // word → how many of its pending values were there at the flush
};

// A flush, as tests see it before it counts.
struct SeenFlush {
  const std::string& file;
  std::size_t offset;
  std::size_t bytes;
};

class Recording {
 public:
  // Of the files that are there.
  explicit Recording(const std::string& directory) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
      if (!entry.is_regular_file() || entry.path().filename() == "lock") continue;
      std::ifstream stream(entry.path(), std::ios::binary);
      const std::vector<char> bytes{std::istreambuf_iterator<char>(stream), {}};
      const std::string name = std::filesystem::relative(entry.path(), directory).string();
      files_.emplace(name, std::make_unique<RecordedContents>(name, bytes));
    }
  }

  // Before each fence counts: whatever was stored so far, a power cut may come now.
  std::function<void()> at_point;
  // Flushes of which that holds are forgotten, as if the protocol had not asked for them.
  std::function<bool(const SeenFlush&)> forgets = [](const SeenFlush&) { return false; };

  RecordedContents& file(const std::string& name) { return *files_.at(name); }
  bool exists(const std::string& name) const { return files_.contains(name); }

  void flush(const void* data, std::size_t bytes) {
    if (bytes == 0) return;
    for (auto& [name, contents] : files_) {
      if (!contents->contains(data)) continue;
      contents->look();
      const std::size_t offset = contents->offset_of(data);
      if (!forgets({name, offset, bytes})) contents->flush(offset, bytes);
    }
  }
  void fence() {
    for (auto& [name, contents] : files_) contents->look();
    if (at_point) at_point();
    for (auto& [name, contents] : files_) contents->fence();
  }

  // How many words are open now.
  std::size_t num_open() const {
    std::size_t count = 0;
    for (const auto& [name, contents] : files_) count += contents->pending().size();
    return count;
  }

  // A state that a power cut may leave now, as files of `directory`: all of the open words have arrived, or none, or it is
  // drawn in one of several ways which of them have, and with which of their values.
  enum class Arrived { all, none, drawn };
  void leave(const std::string& directory, Arrived arrived, std::mt19937_64& random) const {
    const std::uint64_t way = random() % 4;
    const std::uint64_t percent = std::array{5, 50, 95}[random() % 3];
    const std::size_t odd_one = random() % std::max<std::size_t>(1, num_open());
    std::size_t number = 0;
    for (const auto& [name, contents] : files_) {
      std::vector<Word> words = contents->durable();
      std::size_t line = ~std::size_t{0};
      bool line_arrived = false;
      for (const auto& [w, values] : contents->pending()) {
        if (w >= words.size()) continue;
        if (w / RecordedContents::words_per_line != line) {
          line = w / RecordedContents::words_per_line;
          line_arrived = random() % 100 < percent;
        }
        bool has_arrived = arrived == Arrived::all;
        if (arrived == Arrived::drawn) {
          const bool is_odd = number == odd_one;
          has_arrived = way == 0 ? line_arrived : way == 1 ? random() % 100 < percent : way == 2 ? is_odd : !is_odd;
        }
        if (has_arrived) words[w] = arrived == Arrived::drawn ? values[random() % values.size()] : values.back();
        ++number;
      }
      const std::filesystem::path path = std::filesystem::path(directory) / name;
      std::filesystem::create_directories(path.parent_path());
      std::ofstream stream(path, std::ios::binary | std::ios::trunc);
      stream.write(reinterpret_cast<const char*>(words.data()), static_cast<std::streamsize>(contents->size()));
      CHECK(stream.good());
    }
  }

 private:
  std::map<std::string, std::unique_ptr<RecordedContents>> files_;
};

class RecordedFile final : public File {
 public:
  RecordedFile(std::shared_ptr<Recording> recording, RecordedContents& contents)
      : File(contents.name()), recording_(std::move(recording)), contents_(contents) {
    data_ = contents.memory();
    size_ = contents.size();
  }
  void allocate(std::size_t, std::size_t) override {}
  std::size_t next_data(std::size_t offset) const override { return std::min(offset, size_); }
  void resize(std::size_t bytes) override {
    contents_.resize(bytes);
    size_ = bytes;
  }
  void write(std::size_t offset, const void* from, std::size_t bytes) override {
    if (bytes != 0) std::memcpy(data_ + offset, from, bytes);
  }
  void sync() override {
    recording_->flush(data_, size_);
    recording_->fence();
  }

 private:
  std::shared_ptr<Recording> recording_;
  RecordedContents& contents_;
};

class RecordingMedium final : public Medium {
 public:
  explicit RecordingMedium(std::shared_ptr<Recording> recording, format::Level level = format::Level::power)
      : recording_(std::move(recording)), level_(level) {}

  format::Level level() const override { return level_; }
  std::string description() const override { return "recorded"; }
  bool exists(const std::string& name) const override { return recording_->exists(name); }
  std::unique_ptr<File> create(const std::string& name, std::size_t, Access) override {
    check::fail(__FILE__, __LINE__, ("a run creates no file, but " + name).c_str());
  }
  std::unique_ptr<File> open(const std::string& name, bool, Access) override {
    return std::make_unique<RecordedFile>(recording_, recording_->file(name));
  }
  void rename(const std::string& from, const std::string&) override {
    check::fail(__FILE__, __LINE__, ("a run renames no file, but " + from).c_str());
  }
  void flush(const void* data, std::size_t bytes) override {
    if (level_ == format::Level::power) recording_->flush(data, bytes);
  }
  void fence() override { recording_->fence(); }

 private:
  std::shared_ptr<Recording> recording_;
  format::Level level_;
};

}  // namespace holdfast
