// The log store against a model that keeps every version: random appends, fetches, syncs, merges and roll-backs on
// small rings, crashes at any write or sync, and everything that a crash may have left of the writes since the last
// sync.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "check.h"
#include "log_store_model.h"

namespace holdfast {
namespace {

void live_at_random(Subject& subject, std::size_t most_rows) {
  for (int i = 0; i < 40; ++i) {
    switch (subject.random() % 9) {
      case 0:
      case 1:
      case 2: subject.append_with_room(most_rows); break;
      case 3: subject.sync(); break;
      case 4: {
        // Beyond what is durable, too: only that is merged.
        const std::uint64_t newest = subject.random() % 2 == 0 ? subject.durable : subject.last_attempted;
        const std::uint64_t limit =
            subject.floor + subject.random() % (std::max(newest, subject.floor) - subject.floor + 1);
        const std::uint64_t way = subject.random() % 3;
        if (way == 0) {
          subject.merge(limit);
        } else if (way == 1 && limit > subject.store->merged_step()) {
          subject.give_up_merge(limit, 1 + subject.random() % 40, most_rows);
        } else {
          subject.merge_beside_appends(limit, most_rows);
        }
        break;
      }
      case 5: subject.list_touched(); break;
      default: subject.fetch_some(); break;
    }
  }
}

// Lives that end in crashes, at random or at the n-th write or sync, and begin where the last one's durable steps
// ended.
void random_lives_agree_with_the_model(std::uint64_t seed, std::uint64_t ring_bytes, std::size_t most_rows, int lives,
                                       const LogStoreOptions& options, TemporaryDirectory::Place place) {
  Subject subject(tables_of_every_shape(either_order(seed)), ring_bytes, options, seed, place);
  for (int life = 0; life < lives; ++life) {
    check::context = "ring of " + std::to_string(ring_bytes) + ", life " + std::to_string(life);
    if (subject.random() % 4 != 0) subject.disk.crash_in = 1 + subject.random() % 60;
    try {
      live_at_random(subject, most_rows);
      subject.fetch_all();
      if (subject.random() % 3 == 0) {
        subject.disk.crash_in = 1 + subject.random() % 60;
        subject.merge(std::max(subject.last_attempted, subject.floor));
        subject.fetch_all();
      }
    } catch (const Crash&) {
    }
    subject.crash();
    if (subject.random() % 3 == 0) subject.look();
    const bool limited = subject.random() % 3 == 0;
    // As often as not exactly to where the last merge was allowed to.
    const std::uint64_t span =
        subject.random() % 2 * (std::max(subject.last_attempted, subject.floor) - subject.floor) + 1;
    if (subject.random() % 4 == 0) {  // recovery may crash too
      subject.disk.crash_in = 1 + subject.random() % 4;
      try {
        subject.open(every_step);
      } catch (const Crash&) {
        subject.crash();
        subject.open(every_step);
      }
      subject.disk.crash_in = 0;
    } else {
      subject.open(limited ? subject.floor + subject.random() % span : every_step);
    }
    subject.fetch_all();
    if (subject.random() % 3 == 0 && subject.store->last().step > subject.floor) {
      const std::uint64_t steps = subject.random() % 2 * (subject.store->last().step - subject.floor - 1) + 1;
      const std::uint64_t step = subject.floor + subject.random() % steps;
      subject.store->roll_back(step);
      CHECK(subject.store->last().step <= step);
      CHECK(subject.store->last() == mark_of(subject.store->last().step));
      subject.went_back_to(subject.store->last().step);
      subject.fetch_all();
    }
  }
}

}  // namespace
}  // namespace holdfast

// Arguments: the seed, and one in how many of the lives is lived.
int main(int argc, char** argv) {
  using namespace holdfast;
  const std::uint64_t seed = check::seed_from(argc, argv);
  const int share = argc > 2 ? std::atoi(argv[2]) : 1;
  CHECK(share > 0);
  check::replay_command += " " + std::to_string(share);
  using Place = TemporaryDirectory::Place;
  random_lives_agree_with_the_model(seed, 192 << 10, 20, 60 / share, buffered(), Place::memory);
  LogStoreOptions in_small_parts = buffered();
  in_small_parts.merge_bytes = 2000;
  random_lives_agree_with_the_model(seed + 1, 1 << 20, 40, 40 / share, in_small_parts, Place::memory);
  random_lives_agree_with_the_model(seed + 2, 192 << 10, 20, 20 / share, buffered(BlockQueue::Way::threads),
                                    Place::memory);
  LogStoreOptions by_blocks = buffered();
  by_blocks.caching = Caching::buffered_blocks;  // of a device whose sectors have 4096 bytes
  random_lives_agree_with_the_model(seed + 3, 192 << 10, 20, 60 / share, by_blocks, Place::memory);
  random_lives_agree_with_the_model(seed + 4, 192 << 10, 20, 4, LogStoreOptions{}, Place::disk);
  return check::passed();
}
