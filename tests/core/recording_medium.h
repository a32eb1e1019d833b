// A double of a medium, in memory: it takes down in a journal what is stored to the files of a directory and what is
// flushed. With units of a word it is byte-addressable memory; with units of a sector, mapped files that are made
// durable by msync. At level `process` flushes mean nothing: only a file's sync guarantees something.
//
// Values are seen at flushes and fences, so one that was there only between two of them is not. Stores by one thread at
// a time, and none while another one flushes: the run waits for the background after each verb.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/format.h"
#include "check.h"
#include "media/medium.h"
#include "recording.h"

namespace holdfast {

// One file, as programs see it, and as it was when it was last looked at.
class MappedContents {
 public:
  MappedContents(std::string name, const Bytes& bytes) : name_(std::move(name)), size_(bytes.size()) {
    CHECK(bytes.size() <= most_bytes);
    std::memcpy(data(), bytes.data(), bytes.size());
    seen_.assign(data(), data() + most_bytes);
  }

  const std::string& name() const { return name_; }
  std::size_t size() const { return size_; }
  std::byte* data() { return reinterpret_cast<std::byte*>(memory_.data()); }
  std::span<const std::byte> bytes() { return {data(), size_}; }
  bool contains(const void* at) {
    return static_cast<const std::byte*>(at) >= data() && static_cast<const std::byte*>(at) < data() + most_bytes;
  }
  void resize(std::size_t bytes) {
    CHECK(bytes <= most_bytes);
    size_ = bytes;
  }

  std::optional<std::size_t> written() const { return written_; }
  // Takes down a store of whole units, which may be of the bytes that were there.
  void put(std::size_t offset, const void* from, std::size_t bytes, Journal* journal) {
    if (bytes == 0) return;
    std::memcpy(data() + offset, from, bytes);
    if (journal == nullptr) return;
    journal->add(Store{name_, offset, {data() + offset, data() + offset + bytes}});
    if (std::memcmp(seen_.data() + offset, data() + offset, bytes) != 0) written_ = offset;
    std::memcpy(seen_.data() + offset, data() + offset, bytes);
  }
  // Takes down what was stored since the last look.
  void look(std::size_t unit_bytes, Journal& journal) {
    for (std::size_t at = 0; at < size_;) {
      std::size_t end = at;
      while (end < size_ && std::memcmp(data() + end, seen_.data() + end, unit_bytes) != 0) end += unit_bytes;
      if (end != at) {
        journal.add(Store{name_, at, {data() + at, data() + end}});
        written_ = at;
        std::memcpy(seen_.data() + at, data() + at, end - at);
      }
      at = std::max(end, at + unit_bytes);
    }
  }

 private:
  static constexpr std::size_t most_bytes = std::size_t{80} << 10;
  struct alignas(format::block_bytes) Page {
    std::array<std::byte, format::block_bytes> bytes;
  };

  std::string name_;
  std::size_t size_;
  std::vector<Page> memory_ = std::vector<Page>(most_bytes / format::block_bytes);
  Bytes seen_;
  std::optional<std::size_t> written_;  // where last
};

class RecordingMedium final : public Medium {
 public:
  // Of the files of `directory`. Without a journal nothing is taken down.
  RecordingMedium(std::string directory, std::size_t unit_bytes, Journal* journal,
                  format::Level level = format::Level::power)
      : directory_(std::move(directory)), unit_bytes_(unit_bytes), journal_(journal), level_(level) {}

  format::Level level() const override { return level_; }
  std::string description() const override { return "recorded"; }
  bool exists(const std::string& name) const override { return std::filesystem::exists(path(name)); }
  std::unique_ptr<File> create(const std::string& name, std::size_t, Access) override {
    check::fail(__FILE__, __LINE__, ("a run creates no file, but " + name).c_str());
  }
  std::unique_ptr<File> open(const std::string& name, bool, Access) override {
    auto& contents = files_[name];
    if (!contents) contents = std::make_unique<MappedContents>(name, bytes_of_file(path(name)));
    return std::make_unique<RecordedFile>(*this, *contents);
  }
  Tail read_tail(const std::string& name, std::size_t, std::size_t) const override {
    check::fail(__FILE__, __LINE__, ("a run reads no end of a file, but of " + name).c_str());
  }
  std::unique_ptr<File> open_joined(const std::vector<JoinedPiece>&, std::size_t, bool, Access) override {
    check::fail(__FILE__, __LINE__, "a run joins no files");
  }
  void rename(const std::string& from, const std::string&) override {
    check::fail(__FILE__, __LINE__, ("a run renames no file, but " + from).c_str());
  }
  void flush(const void* data, std::size_t bytes) override {
    if (level_ == format::Level::power) take_down_flush(data, bytes);
  }
  void fence() override {
    if (journal_ == nullptr) return;
    for (auto& [name, contents] : files_) contents->look(unit_bytes_, *journal_);
    journal_->point();
    journal_->add(Fence{});
  }

  // What programs see becomes the files of the directory.
  void save() {
    for (auto& [name, contents] : files_) write_file(path(name), contents->bytes());
  }

 private:
  void take_down_flush(const void* data, std::size_t bytes) {
    if (bytes == 0 || journal_ == nullptr) return;
    for (auto& [name, contents] : files_) {
      if (!contents->contains(data)) continue;
      contents->look(unit_bytes_, *journal_);
      const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(data) - contents->data());
      std::uint64_t first_word;
      std::memcpy(&first_word, data, sizeof(first_word));
      journal_->add(Flush{
          .file = name, .offset = offset, .bytes = bytes, .first_word = first_word, .written = contents->written()});
    }
  }

  class RecordedFile final : public File {
   public:
    RecordedFile(RecordingMedium& medium, MappedContents& contents)
        : File(contents.name()), medium_(medium), contents_(contents) {
      data_ = contents.data();
      size_ = contents.size();
    }
    void allocate(std::size_t, std::size_t) override {}
    std::size_t next_data(std::size_t offset) const override { return std::min(offset, size_); }
    void resize(std::size_t bytes) override {
      contents_.resize(bytes);
      size_ = bytes;
      if (medium_.journal_ != nullptr) medium_.journal_->add(Resize{name_, bytes});
    }
    void write(std::size_t offset, const void* from, std::size_t bytes) override {
      contents_.put(offset, from, bytes, medium_.journal_);
    }
    void sync() override {
      medium_.take_down_flush(data_, size_);
      medium_.fence();
    }

   private:
    RecordingMedium& medium_;
    MappedContents& contents_;
  };

  std::filesystem::path path(const std::string& name) const { return std::filesystem::path(directory_) / name; }

  std::string directory_;
  std::size_t unit_bytes_;
  Journal* journal_;
  format::Level level_;
  std::map<std::string, std::unique_ptr<MappedContents>> files_;
};

}  // namespace holdfast
