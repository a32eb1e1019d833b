#include "media/spare_buffers.h"

#include <algorithm>
#include <new>

namespace holdfast {

SpareBuffers::Borrowed::~Borrowed() {
  if (!stock_) return;
  try {
    const std::lock_guard lock(stock_->mutex);
    stock_->spare.push_back(std::move(buffer_));
  } catch (const std::bad_alloc&) {
    // The buffer's own memory is what is wanted now.
  }
}

// The smallest that is large enough. Where none is, the largest makes room for a new one, which has some to spare: the
// next wish is often a little larger.
SpareBuffers::Borrowed SpareBuffers::borrow(std::size_t bytes) const {
  {
    const std::lock_guard lock(stock_->mutex);
    std::vector<SectorBuffer>& spare = stock_->spare;
    const auto smaller = [](const SectorBuffer& a, const SectorBuffer& b) { return a.size() < b.size(); };
    std::sort(spare.begin(), spare.end(), smaller);
    const auto found =
        std::find_if(spare.begin(), spare.end(), [&](const SectorBuffer& buffer) { return buffer.size() >= bytes; });
    if (found != spare.end()) {
      SectorBuffer buffer = std::move(*found);
      spare.erase(found);
      return {stock_, std::move(buffer)};
    }
    if (!spare.empty()) spare.pop_back();
  }
  return {stock_, SectorBuffer(bytes + bytes / 8)};
}

}  // namespace holdfast
