// A directory that is gone when the test is: in memory where there is a tmpfs, or beside the test, on its disk.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "check.h"

class TemporaryDirectory {
 public:
  enum class Place { memory, disk };

  explicit TemporaryDirectory(Place place = Place::memory) {
    const bool in_memory = place == Place::memory && std::filesystem::exists("/dev/shm");
    std::string pattern = in_memory ? "/dev/shm/holdfast-core-XXXXXX"
                                    : (std::filesystem::current_path() / "holdfast-core-XXXXXX").string();
    CHECK(::mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};
