#include "in_place/huge_pages.h"

#include <algorithm>
#include <bit>
#include <chrono>

#include "base/error.h"
#include "base/native_thread.h"

namespace holdfast {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t small_pages = huge_page_bytes / format::block_bytes;
constexpr std::size_t enough_pages = small_pages - small_pages / 8;
constexpr std::uint8_t most_tries = 5;
constexpr std::uint8_t settled = 255;
constexpr double rest_share = 15.0;  // of the time that moving one took: training would miss more
constexpr double first_pause_s = 1.0;
constexpr double longest_pause_s = 60.0;

std::size_t known_of(const AllocatedPages& pages, std::size_t huge_page) {
  std::size_t known = 0;
  for (std::size_t page = huge_page * small_pages; page < (huge_page + 1) * small_pages; page += 64) {
    known += static_cast<std::size_t>(std::popcount(pages.known_of_64(page)));
  }
  return known;
}

}  // namespace

HugePages::HugePages(const std::vector<Column>& columns) {
  for (const Column& column : columns) {
    const std::size_t num_huge = column.file->size() / huge_page_bytes;
    if (num_huge == 0 || !column.file->may_lie_in_huge_pages()) continue;
    parts_.push_back({column, std::vector<std::uint8_t>(num_huge)});
  }
  if (parts_.empty()) return;
  try {
    thread_ = start_thread("hf-huge-pages", [this] { run(); });
  } catch (const Error&) {
    parts_.clear();  // no thread is to be had: pages stay small
  }
}

HugePages::~HugePages() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stopping_changed_.notify_all();
  thread_.join();
}

void HugePages::run() {
  give_way();
  if (rest(first_pause_s)) return;  // whoever opens the pool comes first
  for (const Part& part : parts_) learn_pages(part.column);
  double pause = first_pause_s;
  for (;;) {
    const Pass found = pass();
    if (found == Pass::complete) return;
    pause = found == Pass::moved_some ? first_pause_s : std::min(2 * pause, longest_pause_s);
    if (rest(pause)) return;
  }
}

// What an earlier life has put into the file is there.
void HugePages::learn_pages(const Column& column) {
  const File& file = *column.file;
  for (std::size_t begin = file.next_data(0); begin < file.size();) {
    const std::size_t end = file.next_hole(begin);
    if (end <= begin || rest(0.0)) return;
    column.pages->note(begin / format::block_bytes, format::align_up(end, format::block_bytes) / format::block_bytes);
    begin = file.next_data(end);
  }
}

HugePages::Pass HugePages::pass() {
  bool is_complete = true;
  bool moved = false;
  for (Part& part : parts_) {
    for (std::size_t huge_page = 0; huge_page < part.tries.size(); ++huge_page) {
      std::uint8_t& tries = part.tries[huge_page];
      if (tries >= most_tries) continue;
      if (known_of(*part.column.pages, huge_page) < enough_pages) {
        is_complete = false;
        continue;
      }
      const Clock::time_point began = Clock::now();
      switch (part.column.file->move_to_huge_page(huge_page * huge_page_bytes)) {
        case File::Moved::yes:
          tries = settled;
          moved = true;
          break;
        case File::Moved::not_now:
          if (++tries < most_tries) is_complete = false;
          break;
        case File::Moved::no: tries = settled; break;
      }
      const double seconds = std::chrono::duration<double>(Clock::now() - began).count();
      if (rest(rest_share * seconds)) return Pass::complete;
    }
  }
  return is_complete ? Pass::complete : moved ? Pass::moved_some : Pass::moved_none;
}

bool HugePages::rest(double seconds) {
  std::unique_lock lock(mutex_);
  return stopping_changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return stopping_; });
}

}  // namespace holdfast
