// A pool of a group tells the others what it can go back to, and once all are ready each writes on the strength of that:
// so what a process left that died, and a power cut may still take back, is durable before the pool is ready.
#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <variant>

#include "check.h"
#include "recording.h"
#include "recording_medium.h"
#include "recording_watcher.h"
#include "scripted_run.h"
#include "temporary_directory.h"

namespace holdfast {
namespace {

// What was made durable, by file, when the pool was ready; and which files had got other bytes than they had.
struct Ready {
  std::set<std::string> flushed;
  std::set<std::string> changed;
};

bool changes(const Store& store, const Bytes& file) {
  const auto there = file.begin() + static_cast<std::ptrdiff_t>(store.offset);
  return !std::equal(store.bytes.begin(), store.bytes.end(), there);
}

Ready opened(format::Store store) {
  const TemporaryDirectory directory;
  const std::string pool = directory.path() + "/pool";
  const std::string image = directory.path() + "/image";
  std::filesystem::create_directory(pool);
  make_pool(pool, 60 << 10, store);
  {
    Run run(pool, {});
    run.write_dense();
    for (int i = 0; i < 3; ++i) run.step(false);
    run.pool.flush();
    std::filesystem::copy(pool, image, std::filesystem::copy_options::recursive);
    run.pool.close();
  }
  std::map<std::string, Bytes> before;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(image)) {
    if (!entry.is_regular_file()) continue;
    before[std::filesystem::relative(entry.path(), image).string()] = bytes_of_file(entry.path());
  }
  Journal journal;
  RecordingWatcher watcher(image, journal);
  Ready found;
  OpenOptions options;
  options.group = InGroup{[](const Survey& survey) { return survey.rows; },
                          [&] {
                            for (const Event& event : journal.events()) {
                              if (const auto* flush = std::get_if<Flush>(&event)) found.flushed.insert(flush->file);
                              const auto* put = std::get_if<Store>(&event);
                              if (put != nullptr && changes(*put, before.at(put->file)))
                                found.changed.insert(put->file);
                            }
                          }};
  Pool again(image, options,
             std::make_unique<RecordingMedium>(
                 image, store == format::Store::in_place ? word_bytes : format::sector_bytes, &journal),
             &watcher);
  again.close();
  return found;
}

void what_a_group_is_told_is_durable_before_it_is_ready() {
  for (const auto store : {format::Store::in_place, format::Store::log}) {
    const Ready ready = opened(store);
    for (const char* file : {"pool.holdfast", "dense-0", "dense-1"}) CHECK(ready.flushed.contains(file));
    if (store == format::Store::log) CHECK(ready.flushed.contains("row-log-0000"));
    CHECK(ready.changed.empty());
  }
}

}  // namespace
}  // namespace holdfast

int main() {
  holdfast::what_a_group_is_told_is_durable_before_it_is_ready();
  return check::passed();
}
