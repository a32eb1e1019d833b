// Huge pages: of tables that lie in memory, what is there is put onto huge pages beside training.
//
// Rows are walked at random, so in pages of 4 KiB each of them costs a walk through the tables of addresses, in a virtual
// machine through two. The kernel does the moving (MADV_COLLAPSE, since Linux 6.1), whatever tmpfs was told when it was
// mounted.
//
// Invariants
// - It changes no byte, and a file grows by a seventh of what is in it at most: only where nearly all small pages of a
//   huge one are there are they moved.
// - Nothing waits for it, and what the kernel refuses stays as it is. It takes a sixteenth of a thread's time.
// - The files, and what is known of their pages, outlive it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "in_place/allocated_pages.h"
#include "media/medium.h"

namespace holdfast {

class HugePages {
 public:
  // Files that are mapped and written; those that cannot lie in huge pages are left out.
  struct Column {
    File* file;
    AllocatedPages* pages;
  };

  // Begins at once, in a thread of its own where there is something to do, and goes on while more is allocated.
  explicit HugePages(const std::vector<Column>& columns);
  ~HugePages();
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;

 private:
  struct Part {
    Column column;
    std::vector<std::uint8_t> tries;  // of each huge page, `settled` where there is nothing left to try
  };
  enum class Pass { complete, moved_some, moved_none };  // complete: nothing is left to do, or time is up

  void run();
  void learn_pages(const Column& column);
  Pass pass();
  // Returns whether time is up.
  bool rest(double seconds);

  std::vector<Part> parts_;
  std::mutex mutex_;
  std::condition_variable stopping_changed_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace holdfast
