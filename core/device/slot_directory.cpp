#include "device/slot_directory.h"

#include <algorithm>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

#include "base/counter_rng.h"
#include "base/error.h"
#include "base/huge_array.h"
#include "base/parallel.h"
#include "base/reuse_pool.h"

namespace holdfast {
namespace {

constexpr std::uint64_t end_slot = std::uint64_t{1} << 31;
constexpr std::uint64_t end_key = std::uint64_t{1} << 63;
// Of a row that is to be brought, in the place of its slot: this, or, where it has a slot, this bit beside it.
constexpr std::uint32_t no_slot = ~std::uint32_t{0};
constexpr std::uint32_t missing_bit = std::uint32_t{1} << 31;

// Of the slots, those whose row was not asked for again since it came in: one in so many.
constexpr std::size_t trial_share = 10;
constexpr std::uint32_t most_lives = 3;

constexpr std::size_t heads_per_slot = 4;     // of chains: a step along one is a miss of the processor's caches
constexpr std::size_t most_heads = std::size_t{1} << 32;
constexpr std::size_t rows_per_chunk = 8192;  // what one index of a parallel_for works on
constexpr std::size_t rows_per_block = 256;   // whose misses of the processor's caches overlap
constexpr std::size_t prefetch_distance = 12;

// A row's number among the rows of all tables. What a slot is to know of it takes 16 bytes.
using Key = std::uint64_t;

enum class Content : std::uint32_t {
  none,
  row,
  awaited_in_vain,  // a row whose bytes never came, and that somebody holds
};

struct Slot {
  Key key;
  std::uint32_t next_plus_one;  // of the slots whose keys have one hash
  std::uint32_t holds : 24;
  Content content : 2;
  std::uint32_t lives : 2;
  std::uint32_t is_proven : 1;  // it is for the main queue
  std::uint32_t is_queued : 1;
};
static_assert(sizeof(Slot) == 16);

// Slots, first in, first out: as many as there are, since none is in twice.
class SlotQueue {
 public:
  explicit SlotQueue(std::size_t num_slots) : ring_(num_slots) {}

  std::size_t size() const { return size_; }
  std::uint32_t operator[](std::size_t i) const {
    const std::size_t at = first_ + i;
    return ring_[at < ring_.size() ? at : at - ring_.size()];
  }
  void push(std::uint32_t slot) {
    const std::size_t at = first_ + size_++;
    ring_[at < ring_.size() ? at : at - ring_.size()] = slot;
  }
  std::uint32_t pop() {
    const std::uint32_t slot = ring_[first_];
    if (++first_ == ring_.size()) first_ = 0;
    --size_;
    return slot;
  }
  void clear() { size_ = 0; }

 private:
  HugeArray<std::uint32_t> ring_;
  std::size_t first_ = 0;
  std::size_t size_ = 0;
};

// Rows [begin, end) of a plan's table; they are rows [first, ...) of the admission, and their keys begin at `base`.
struct Chunk {
  const TablePlan* table;
  std::size_t begin;
  std::size_t end;
  std::size_t first;
  Key base;
  std::size_t num_new = 0;   // have no slot
  std::size_t num_void = 0;  // have one, without their bytes
  std::size_t num_idle = 0;  // have one, which nobody holds
  std::uint32_t max_occurrences = 0;
  std::size_t first_missing = 0;  // among the admission's
};

// Which slot has which row: the slots of keys with one hash are a chain, so an erased one leaves no gap to close, and
// a row that is not there costs, as a rule, one miss of the caches.
class SlotIndex {
 public:
  explicit SlotIndex(const HugeArray<Slot>& slots)
      : slots_(slots), heads_(std::min(heads_per_slot * slots.size(), most_heads)) {}

  void prefetch(Key key) const { __builtin_prefetch(heads_.data() + head_of(key), 1); }

  // The slots of `count` keys, or no_slot.
  template <class KeyOf>
  void find(std::size_t count, const KeyOf& key_of, std::uint32_t* slot_of) const {
    std::size_t heads[rows_per_block];
    for (std::size_t begin = 0; begin < count; begin += rows_per_block) {
      const std::size_t end = std::min(begin + rows_per_block, count);
      for (std::size_t i = begin; i < end; ++i) {
        heads[i - begin] = head_of(key_of(i));
        __builtin_prefetch(heads_.data() + heads[i - begin]);
      }
      for (std::size_t i = begin; i < end; ++i) {
        slot_of[i] = heads_[heads[i - begin]] - 1;
        if (slot_of[i] != no_slot) __builtin_prefetch(&slots_[slot_of[i]], 1);
      }
      for (std::size_t i = begin; i < end; ++i) {
        const Key key = key_of(i);
        while (slot_of[i] != no_slot && slots_[slot_of[i]].key != key)
          slot_of[i] = slots_[slot_of[i]].next_plus_one - 1;
      }
    }
  }
  // The slot's key is that of no other slot.
  void insert(std::uint32_t slot) {
    std::uint32_t& head = heads_[head_of(slots_[slot].key)];
    slots_[slot].next_plus_one = std::exchange(head, slot + 1);
  }
  void erase(std::uint32_t slot) {
    std::uint32_t* link = &heads_[head_of(slots_[slot].key)];
    while (*link != slot + 1) link = &slots_[*link - 1].next_plus_one;
    *link = slots_[slot].next_plus_one;
  }

 private:
  std::size_t head_of(Key key) const {
    return static_cast<std::size_t>((counter_rng::mix64(key + 1) >> 32) * heads_.size() >> 32);
  }

  const HugeArray<Slot>& slots_;
  HugeArray<std::uint32_t> heads_;  // plus one
};

// Rows are evicted in the manner of S3-FIFO (Yang et al., SOSP 2023), without its ghosts, as in the scratchpad of the
// log store. A row that nobody holds any more queues up, on trial at first; one that is held again stays where it is in
// the queue and is passed over when its turn comes, to queue up anew when it is released. So every row that nobody
// holds is in a queue, and a turn costs what a release or a use of a row has paid for.
class Slots {
 public:
  Slots(std::size_t num_slots, bool keep)
      : slots_(num_slots),
        index_(slots_),
        keep_(keep),
        free_(num_slots),
        trial_(keep ? num_slots : 0),
        main_(keep ? num_slots : 0) {}

  std::size_t size() const { return slots_.size(); }
  std::size_t num_resident() const { return num_resident_; }
  std::size_t num_held() const { return num_held_; }
  const SlotIndex& index() const { return index_; }
  Slot& operator[](std::size_t slot) const { return slots_[slot]; }

  // So many slots that nobody held are held now.
  void note_held(std::size_t count) { num_held_ += count; }
  void drop_hold(std::uint32_t slot) {
    Slot& of = slots_[slot];
    if (--of.holds != 0) return;
    --num_held_;
    if (!keep_ || of.content == Content::awaited_in_vain) {
      index_.erase(slot);
      of = {};
      free_.push(slot);
      --num_resident_;
    } else if (!of.is_queued) {
      of.is_queued = true;
      (of.is_proven ? main_ : trial_).push(slot);
    }
  }

  // A slot for the row, which has none, held once. There must be one that is free, or whose row nobody holds.
  std::uint32_t give(Key key) {
    const std::uint32_t slot = take();
    Slot& of = slots_[slot];
    of = {};
    of.key = key;
    of.holds = 1;
    of.content = Content::row;
    index_.insert(slot);
    ++num_resident_;
    ++num_held_;
    return slot;
  }

  void clear() {
    free_.clear();
    trial_.clear();
    main_.clear();
    for (std::uint32_t slot = 0; slot < num_used_; ++slot) {
      Slot& of = slots_[slot];
      of.is_queued = false;
      if (of.holds != 0) continue;
      if (of.content != Content::none) index_.erase(slot);
      of = {};
      free_.push(slot);
    }
    num_resident_ = num_held_;
  }

 private:
  std::uint32_t take() {
    if (free_.size() != 0) return free_.pop();
    if (num_used_ < slots_.size()) return static_cast<std::uint32_t>(num_used_++);
    for (;;) {
      const bool is_trial = main_.size() == 0 || trial_.size() > slots_.size() / trial_share;
      SlotQueue& queue = is_trial ? trial_ : main_;
      if (queue.size() > 2 * prefetch_distance) {
        __builtin_prefetch(&slots_[queue[2 * prefetch_distance]], 1);
        index_.prefetch(slots_[queue[prefetch_distance]].key);
      }
      const std::uint32_t slot = queue.pop();
      Slot& of = slots_[slot];
      if (of.lives == 0 && of.holds == 0) {
        index_.erase(slot);
        --num_resident_;
        return slot;
      }
      if (of.lives != 0) {
        if (is_trial) {
          of.lives = 0;
        } else {
          --of.lives;
        }
        of.is_proven = true;
      }
      of.is_queued = of.holds == 0;
      if (of.is_queued) main_.push(slot);
    }
  }

  const HugeArray<Slot> slots_;
  SlotIndex index_;
  const bool keep_;
  std::size_t num_resident_ = 0;
  std::size_t num_held_ = 0;
  std::size_t num_used_ = 0;  // slots from here on have never had a row
  SlotQueue free_;            // of those below, the ones without a row
  SlotQueue trial_;
  SlotQueue main_;
};

// Where the chunk's rows are, and what of them there is to do. Changes nothing.
void find(const Slots& slots, Chunk& chunk, std::uint32_t* slot_of) {
  const std::size_t num_rows = chunk.end - chunk.begin;
  const std::uint64_t* const rows = chunk.table->rows.data() + chunk.begin;
  const std::uint32_t* const row_start = chunk.table->row_start.data() + chunk.begin;
  slot_of += chunk.first;
  slots.index().find(num_rows, [&](std::size_t i) { return chunk.base + rows[i]; }, slot_of);
  for (std::size_t i = 0; i < num_rows; ++i) {
    chunk.max_occurrences = std::max(chunk.max_occurrences, row_start[i + 1] - row_start[i]);
    if (slot_of[i] == no_slot) {
      ++chunk.num_new;
    } else if (slots[slot_of[i]].content == Content::awaited_in_vain) {
      ++chunk.num_void;
      slot_of[i] |= missing_bit;
    } else if (slots[slot_of[i]].holds == 0) {
      ++chunk.num_idle;
    }
  }
}

// Holds what has a slot, and lists what is missing, with keys. Chunks have different rows, so different slots.
void hold(const Slots& slots, const Chunk& chunk, const std::uint32_t* slot_of, std::uint32_t* missing, Key* keys) {
  const std::size_t num_rows = chunk.end - chunk.begin;
  slot_of += chunk.first;
  for (std::size_t i = 0; i < num_rows; ++i) {
    if (i + prefetch_distance < num_rows && slot_of[i + prefetch_distance] != no_slot) {
      __builtin_prefetch(&slots[slot_of[i + prefetch_distance] & ~missing_bit], 1);
    }
    const std::uint32_t slot = slot_of[i];
    if ((slot & missing_bit) != 0) {
      *missing++ = static_cast<std::uint32_t>(chunk.first + i);
      *keys++ = chunk.base + chunk.table->rows[chunk.begin + i];
    }
    if (slot == no_slot) continue;
    Slot& of = slots[slot & ~missing_bit];
    ++of.holds;
    of.content = Content::row;
    if (of.lives < most_lives) ++of.lives;
  }
}

std::string names_of(const CollectionSpec& spec, std::span<const std::uint32_t> tables) {
  std::string names;
  for (const auto& feature : spec.features) {
    if (!std::ranges::binary_search(tables, feature.table)) continue;
    names += (names.empty() ? "'" : ", '") + feature.name + "'";
  }
  return names;
}

}  // namespace

struct Admission::Memory {
  std::vector<std::uint32_t> slots;
  std::vector<std::uint32_t> missing;
};

struct Admission::Directory {
  Directory(std::shared_ptr<const CollectionSpec> spec_, std::vector<std::uint32_t> tables_, std::size_t num_slots,
            bool keep)
      : spec(std::move(spec_)), tables(std::move(tables_)), slots(num_slots, keep) {}

  void release(Admission& admission, bool is_forgotten);

  const std::shared_ptr<const CollectionSpec> spec;
  const std::vector<std::uint32_t> tables;
  std::shared_ptr<const CollectionSpec> spec_of_missing;  // these tables alone
  std::vector<Key> first_key;                   // of each of them

  std::mutex mutex;  // guards what follows
  Slots slots;
  std::vector<Key> keys;  // of the rows that an admission misses
  std::vector<Chunk> chunks;
  std::uint64_t num_hit = 0;
  std::uint64_t num_missed = 0;
  const std::shared_ptr<ReusePool<Memory>> memories = std::make_shared<ReusePool<Memory>>();
};

// Admission.

Admission::Admission(std::shared_ptr<Directory> directory, std::shared_ptr<const Plan> plan,
                     std::shared_ptr<Memory> memory)
    : directory_(std::move(directory)), plan_(std::move(plan)), memory_(std::move(memory)) {}

Admission::~Admission() { directory_->release(*this, false); }

std::span<const std::uint32_t> Admission::tables() const { return directory_->tables; }
std::span<const std::uint32_t> Admission::slots() const { return memory_->slots; }
std::span<const std::uint32_t> Admission::missing() const { return memory_->missing; }

Plan Admission::missing_rows() const {
  Plan rows;
  rows.spec = directory_->spec_of_missing;
  rows.tables.resize(rows.spec->tables.size());
  auto next = memory_->missing.begin();
  std::size_t first = 0;
  for (std::size_t i = 0; i < rows.tables.size(); ++i) {
    const auto& unique = plan_->tables[directory_->tables[i]].rows;
    const auto end = std::lower_bound(next, memory_->missing.end(), first + unique.size());
    rows.tables[i].rows.reserve(static_cast<std::size_t>(end - next));
    for (; next != end; ++next) rows.tables[i].rows.push_back(unique[*next - first]);
    first += unique.size();
  }
  return rows;
}

void Admission::check_held() const {
  const std::lock_guard lock(directory_->mutex);
  if (!held_) throw Error(ErrorKind::step, "the admission was released: other rows may be in its slots");
}

void Admission::Directory::release(Admission& admission, bool is_forgotten) {
  const std::lock_guard lock(mutex);
  if (!std::exchange(admission.held_, false)) return;
  const auto held = admission.slots();
  if (is_forgotten) {
    for (const std::uint32_t u : admission.missing()) slots[held[u]].content = Content::awaited_in_vain;
  }
  for (std::size_t u = 0; u < held.size(); ++u) {
    if (u + prefetch_distance < held.size()) __builtin_prefetch(&slots[held[u + prefetch_distance]], 1);
    slots.drop_hold(held[u]);
  }
}

// Directory.

SlotDirectory::SlotDirectory(const std::shared_ptr<const CollectionSpec>& spec, std::vector<std::uint32_t> tables,
                             std::uint64_t num_slots, bool keep) {
  if (tables.empty() || tables.back() >= spec->tables.size() ||
      std::ranges::adjacent_find(tables, std::greater_equal<>()) != tables.end()) {
    throw Error(ErrorKind::config, "tables that share slots must ascend and be the collection's");
  }
  if (num_slots == 0 || num_slots >= end_slot) {
    throw Error(ErrorKind::config,
                "num_slots must be at least 1 and less than 2^31, and is " + std::to_string(num_slots));
  }
  auto spec_of_missing = std::make_shared<CollectionSpec>();
  std::vector<Key> first_key;
  std::uint64_t num_rows = 0;
  for (const std::uint32_t t : tables) {
    const auto& table = spec->tables[t];
    const auto& first = spec->tables[tables.front()];
    if (table.dim != first.dim || table.pooling != first.pooling) {
      throw Error(ErrorKind::config, "tables that share slots must have one embedding_dim and one pooling");
    }
    if ((table.keys == nullptr) != (first.keys == nullptr)) {
      throw Error(ErrorKind::config, "of tables that share slots, all have keys or none");
    }
    if (table.num_rows > end_key - num_rows) {
      throw Error(ErrorKind::config, "tables that share slots must have no more than 2^63 rows together");
    }
    first_key.push_back(num_rows);
    num_rows += table.num_rows;
    spec_of_missing->tables.push_back(table);
  }
  spec_of_missing->output_width = 0;
  directory_ = std::make_shared<Admission::Directory>(spec, std::move(tables), num_slots, keep);
  directory_->spec_of_missing = std::move(spec_of_missing);
  directory_->first_key = std::move(first_key);
}

std::shared_ptr<Admission> SlotDirectory::admit(std::shared_ptr<const Plan> plan) {
  Admission::Directory& directory = *directory_;
  if (plan->spec != directory.spec) throw Error(ErrorKind::config, "the plan is another collection's");
  std::size_t num_unique = 0, num_lookups = 0;
  for (const std::uint32_t t : directory.tables) {
    num_unique += plan->tables[t].num_unique();
    num_lookups += plan->tables[t].num_lookups();
  }
  Slots& slots = directory.slots;
  if (num_unique > slots.size()) {
    throw Error(ErrorKind::window_too_large,
                "one batch has " + std::to_string(num_unique) + " different rows of feature(s) " +
                    names_of(*directory.spec, directory.tables) + ", and the scratchpad has " +
                    std::to_string(slots.size()) + " slots for them: give it more bytes, or make the batch smaller");
  }
  const auto memory = directory.memories->take();
  memory->slots.resize(num_unique);
  std::shared_ptr<Admission> admission(new Admission(directory_, std::move(plan), memory));
  admission->num_lookups_ = num_lookups;

  const std::lock_guard lock(directory.mutex);
  std::vector<Chunk>& chunks = directory.chunks;
  chunks.clear();
  std::size_t first = 0;
  for (std::size_t i = 0; i < directory.tables.size(); ++i) {
    const TablePlan& table = admission->plan_->tables[directory.tables[i]];
    for (std::size_t begin = 0; begin < table.num_unique(); begin += rows_per_chunk) {
      const std::size_t end = std::min(begin + rows_per_chunk, table.num_unique());
      chunks.push_back({&table, begin, end, first, directory.first_key[i]});
      first += end - begin;
    }
  }
  std::uint32_t* const slot_of = memory->slots.data();
  parallel_for(chunks.size(), [&](std::size_t i) { find(slots, chunks[i], slot_of); });

  std::size_t num_new = 0, num_void = 0, num_idle = 0;
  for (Chunk& chunk : chunks) {
    chunk.first_missing = num_new + num_void;
    num_new += chunk.num_new;
    num_void += chunk.num_void;
    num_idle += chunk.num_idle;
    admission->max_occurrences_ = std::max(admission->max_occurrences_, chunk.max_occurrences);
  }
  if (num_new + num_idle + slots.num_held() > slots.size()) return nullptr;

  const std::size_t num_missing = num_new + num_void;
  memory->missing.resize(num_missing);
  if (directory.keys.size() < num_missing) directory.keys.resize(num_missing);
  std::uint32_t* const missing = memory->missing.data();
  Key* const keys = directory.keys.data();
  parallel_for(chunks.size(), [&](std::size_t i) {
    hold(slots, chunks[i], slot_of, missing + chunks[i].first_missing, keys + chunks[i].first_missing);
  });
  slots.note_held(num_idle);
  for (std::size_t i = 0; i < num_missing; ++i) {
    if (i + prefetch_distance < num_missing) slots.index().prefetch(keys[i + prefetch_distance]);
    std::uint32_t& slot = slot_of[missing[i]];
    slot = slot == no_slot ? slots.give(keys[i]) : slot & ~missing_bit;
  }
  directory.num_hit += num_unique - num_missing;
  directory.num_missed += num_missing;
  admission->held_ = true;
  return admission;
}

void SlotDirectory::release(Admission& admission) {
  if (admission.directory_ != directory_) throw Error(ErrorKind::config, "the admission is another directory's");
  directory_->release(admission, false);
}

void SlotDirectory::forget(Admission& admission) {
  if (admission.directory_ != directory_) throw Error(ErrorKind::config, "the admission is another directory's");
  directory_->release(admission, true);
}

void SlotDirectory::clear() {
  const std::lock_guard lock(directory_->mutex);
  directory_->slots.clear();
}

std::uint64_t SlotDirectory::num_slots() const { return directory_->slots.size(); }

SlotDirectory::Counts SlotDirectory::counts() const {
  const std::lock_guard lock(directory_->mutex);
  const Admission::Directory& directory = *directory_;
  return {directory.slots.num_resident(), directory.slots.num_held(), directory.num_hit, directory.num_missed};
}

}  // namespace holdfast
