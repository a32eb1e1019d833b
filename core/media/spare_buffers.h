// Spare buffers: memory for direct I/O that is used again. The first touch of fresh memory costs more than most of what
// is done in it.
//
// Invariants
// - A buffer has one borrower at a time and returns when the borrower is destroyed, even after the stock itself.
// - There are never more buffers than were borrowed at once.
// - Thread-safe; a borrowed buffer is its borrower's.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "media/block_file.h"

namespace holdfast {

class SpareBuffers {
  struct Stock;

 public:
  class Borrowed {
   public:
    Borrowed() = default;
    ~Borrowed();
    Borrowed(Borrowed&& other) noexcept = default;
    Borrowed& operator=(Borrowed&& other) noexcept {
      std::swap(stock_, other.stock_);
      std::swap(buffer_, other.buffer_);
      return *this;
    }
    std::byte* data() const { return buffer_.data(); }
    const SectorBuffer& buffer() const { return buffer_; }

   private:
    friend class SpareBuffers;
    Borrowed(std::shared_ptr<Stock> stock, SectorBuffer buffer)
        : stock_(std::move(stock)), buffer_(std::move(buffer)) {}

    std::shared_ptr<Stock> stock_;
    SectorBuffer buffer_;
  };

  // At least `bytes`; contents are whatever they were.
  Borrowed borrow(std::size_t bytes) const;

 private:
  struct Stock {
    std::mutex mutex;
    std::vector<SectorBuffer> spare;
  };
  std::shared_ptr<Stock> stock_ = std::make_shared<Stock>();
};

}  // namespace holdfast
