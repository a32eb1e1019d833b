// The lock on a pool's directory: one process opens a pool for writing at a time.
#pragma once

#include <optional>
#include <string>

#include "base/forks.h"

namespace holdfast {

// Advisory, on the file `lock`: it goes with the process, however that ends, and whatever children it leaves.
class PoolLock {
 public:
  // Throws busy where another process has it, not_found, read_only or failed.
  explicit PoolLock(const std::string& directory);
  PoolLock(const PoolLock&) = delete;
  PoolLock& operator=(const PoolLock&) = delete;

  // Throws failed where the pool was removed.
  void check() const;

 private:
  std::string path_;
  std::optional<KeptHere> file_;
};

}  // namespace holdfast
