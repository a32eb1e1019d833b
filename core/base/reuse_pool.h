// Objects that are handed out again when nobody holds them any more: their vectors keep their memory. Thread-safe.
#pragma once

#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace holdfast {

template <class T>
class ReusePool : public std::enable_shared_from_this<ReusePool<T>> {
 public:
  std::shared_ptr<T> take() {
    std::unique_ptr<T> object;
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        object = std::move(idle_.back());
        idle_.pop_back();
      }
    }
    if (!object) object = std::make_unique<T>();
    return {object.release(), [pool = this->weak_from_this()](T* used) {
              std::unique_ptr<T> owned(used);
              if (const auto alive = pool.lock()) alive->keep(std::move(owned));
            }};
  }

 private:
  void keep(std::unique_ptr<T> object) noexcept {
    try {
      const std::lock_guard lock(mutex_);
      idle_.push_back(std::move(object));
    } catch (const std::bad_alloc&) {
      // The object's own memory is what is wanted now.
    }
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<T>> idle_;
};

}  // namespace holdfast
