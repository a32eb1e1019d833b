// The slot directory against a map, whatever is admitted, released and forgotten in whatever order; and what it packs.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "check.h"
#include "device/device_plan.h"
#include "device/slot_directory.h"
#include "draws.h"
#include "thrown.h"

namespace holdfast {
namespace {

using Row = std::pair<std::uint32_t, std::uint64_t>;  // table and number
using AdmissionPtr = std::shared_ptr<Admission>;

// Four tables, of which the directory has all but the second.
const std::vector<std::uint32_t> tables_with_slots = {0, 2, 3};

std::shared_ptr<const CollectionSpec> spec_of(std::uint64_t num_rows) {
  auto spec = std::make_shared<CollectionSpec>();
  spec->tables = {{0, num_rows, 8, Pooling::sum},
                  {1, num_rows, 4, Pooling::sum},
                  {2, 1, 8, Pooling::sum},
                  {3, std::uint64_t{1} << 45, 8, Pooling::sum}};
  spec->features = {{0, 0, "a"}, {1, 8, "b"}, {2, 12, "c"}, {3, 20, "d"}};
  spec->output_width = 28;
  return spec;
}

// Of each row some occurrences, of which a directory counts the most.
std::shared_ptr<const Plan> plan_of(const std::shared_ptr<const CollectionSpec>& spec, const std::set<Row>& rows,
                                    Random& random) {
  auto plan = std::make_shared<Plan>();
  plan->spec = spec;
  plan->tables.resize(spec->tables.size());
  for (TablePlan& table : plan->tables) table.row_start = {0};
  for (const auto& [table, row] : rows) {
    TablePlan& of = plan->tables[table];
    of.rows.push_back(row);
    of.row_start.push_back(of.row_start.back() + 1 + static_cast<std::uint32_t>(below(random, 9)));
  }
  return plan;
}

std::set<Row> random_rows(const CollectionSpec& spec, std::size_t most, Random& random) {
  std::set<Row> rows;
  const std::size_t num_rows = below(random, 8) == 0 ? most : below(random, most + 1);
  const std::uint64_t hot = 1 + below(random, 2 * most);
  while (rows.size() < num_rows) {
    const std::uint32_t table = tables_with_slots[below(random, 3)];
    const std::uint64_t end = spec.tables[table].num_rows;
    const std::uint64_t row = below(random, std::min(end, below(random, 3) == 0 ? end : hot + rows.size()));
    rows.emplace(table, table == 3 ? end - 1 - row : row);
  }
  return rows;
}

// What a directory must do, told by what it is seen to do: which row it evicts is its own affair.
class Model {
 public:
  Model(std::shared_ptr<const CollectionSpec> spec, std::uint64_t num_slots, bool keep)
      : spec_(std::move(spec)),
        num_slots_(num_slots),
        keep_(keep),
        directory_(spec_, tables_with_slots, num_slots, keep) {}

  void admit(const std::set<Row>& rows, Random& random) {
    std::size_t newly_held = 0, num_new = 0;
    std::vector<std::uint32_t> missing;
    std::uint32_t u = 0;
    for (const Row& row : rows) {
      const auto known = slot_of_.find(row);
      newly_held += !holds_.contains(row);
      num_new += known == slot_of_.end();
      if (known == slot_of_.end() || awaited_in_vain_.contains(row)) missing.push_back(u);
      ++u;
    }
    auto plan = plan_of(spec_, rows, random);
    if (rows.size() > num_slots_) {
      CHECK(kind_thrown_by([&] { directory_.admit(plan); }) == ErrorKind::window_too_large);
      return check_counts();
    }
    const AdmissionPtr admission = directory_.admit(plan);
    CHECK((admission != nullptr) == (holds_.size() + newly_held <= num_slots_));
    if (!admission) return check_counts();

    CHECK(admission->plan() == plan);
    CHECK(admission->slots().size() == rows.size());
    CHECK(std::ranges::equal(admission->missing(), missing));
    std::uint32_t most = 0;
    for (const TablePlan& table : plan->tables) {
      for (std::size_t i = 0; i + 1 < table.row_start.size(); ++i) {
        most = std::max(most, table.row_start[i + 1] - table.row_start[i]);
      }
    }
    CHECK(admission->max_occurrences() == most);
    const std::size_t num_evicted = slot_of_.size() + num_new > num_slots_ ? slot_of_.size() + num_new - num_slots_ : 0;
    const std::size_t num_before = slot_of_.size();
    std::map<std::uint32_t, Row> row_in;
    for (const auto& [row, slot] : slot_of_) row_in.emplace(slot, row);
    u = 0;
    for (const Row& row : rows) {
      const std::uint32_t slot = admission->slots()[u++];
      CHECK(slot < num_slots_);
      const auto known = slot_of_.find(row);
      if (known != slot_of_.end()) {
        CHECK(known->second == slot);
      } else {
        if (const auto evicted = row_in.find(slot); evicted != row_in.end()) {
          CHECK(!holds_.contains(evicted->second) && !rows.contains(evicted->second));
          slot_of_.erase(evicted->second);
        }
        slot_of_[row] = slot;
        row_in[slot] = row;
      }
      ++holds_[row];
      awaited_in_vain_.erase(row);
    }
    CHECK(slot_of_.size() == num_before + num_new - num_evicted);
    hit_ += rows.size() - missing.size();
    missed_ += missing.size();
    live_.push_back({admission, {rows.begin(), rows.end()}, missing});
    const Plan of_missing = admission->missing_rows();
    auto next = missing.begin();
    for (std::size_t i = 0; i < tables_with_slots.size(); ++i) {
      CHECK(of_missing.spec->tables[i].number == tables_with_slots[i]);
      for (const std::uint64_t row : of_missing.tables[i].rows) {
        CHECK(live_.back().rows[*next++] == Row(tables_with_slots[i], row));
      }
    }
    CHECK(next == missing.end());
    check_counts();
  }

  enum class End { release, forget, drop };
  void end_one(End end, Random& random) {
    if (live_.empty()) return;
    const auto chosen = live_.begin() + static_cast<std::ptrdiff_t>(below(random, live_.size()));
    Live live = std::move(*chosen);
    live_.erase(chosen);
    if (end == End::forget) {
      for (const std::uint32_t u : live.missing) awaited_in_vain_.insert(live.rows[u]);
    }
    for (const Row& row : live.rows) {
      if (--holds_[row] != 0) continue;
      holds_.erase(row);
      if (keep_ && !awaited_in_vain_.contains(row)) continue;
      slot_of_.erase(row);
      awaited_in_vain_.erase(row);
    }
    if (end == End::drop) {
      live.admission.reset();
      return check_counts();
    }
    end == End::forget ? directory_.forget(*live.admission) : directory_.release(*live.admission);
    check_counts();
    directory_.release(*live.admission);
    directory_.forget(*live.admission);
    CHECK(kind_thrown_by([&] { live.admission->check_held(); }) == ErrorKind::step);
    check_counts();
  }

  void clear() {
    directory_.clear();
    std::erase_if(slot_of_, [&](const auto& entry) { return !holds_.contains(entry.first); });
    check_counts();
  }

  std::vector<std::uint32_t> newest_slots() const {
    if (live_.empty()) return {};
    return {live_.back().admission->slots().begin(), live_.back().admission->slots().end()};
  }

 private:
  struct Live {
    AdmissionPtr admission;
    std::vector<Row> rows;
    std::vector<std::uint32_t> missing;
  };

  void check_counts() const {
    const SlotDirectory::Counts counts = directory_.counts();
    CHECK(counts.resident == slot_of_.size());
    CHECK(counts.held == holds_.size());
    CHECK(counts.hit == hit_);
    CHECK(counts.missed == missed_);
  }

  std::shared_ptr<const CollectionSpec> spec_;
  std::uint64_t num_slots_;
  bool keep_;
  SlotDirectory directory_;
  std::map<Row, std::uint32_t> slot_of_;
  std::map<Row, int> holds_;
  std::set<Row> awaited_in_vain_;
  std::vector<Live> live_;
  std::uint64_t hit_ = 0;
  std::uint64_t missed_ = 0;
};

void random_calls_agree_with_a_map(Random& random) {
  for (int i = 0; i < 40; ++i) {
    const std::uint64_t num_slots = 1 + below(random, i % 4 == 0 ? 4 : 200);
    const bool keep = below(random, 3) != 0;
    check::context = std::to_string(num_slots) + " slots" + (keep ? "" : ", rows not kept");
    const auto spec = spec_of(1 + below(random, 1000));
    Model model(spec, num_slots, keep);
    const std::uint64_t most = below(random, 4) == 0 ? num_slots + 1 : 1 + num_slots / 3;
    for (int call = 0; call < 250; ++call) {
      const std::uint64_t what = below(random, 100);
      if (what < 50)
        model.admit(random_rows(*spec, most, random), random);
      else if (what < 85)
        model.end_one(Model::End::release, random);
      else if (what < 91)
        model.end_one(Model::End::forget, random);
      else if (what < 98)
        model.end_one(Model::End::drop, random);
      else
        model.clear();
    }
  }
}

void the_same_calls_give_the_same_slots_on_any_number_of_threads(Random& random) {
  const auto spec = spec_of(1000);
  const std::uint64_t seed = random();
  std::optional<std::vector<std::vector<std::uint32_t>>> expected;
  const int before = num_threads();
  for (const int threads : {1, 4}) {
    set_num_threads(threads);
    Random calls(seed);
    Model model(spec, 60000, true);
    std::vector<std::vector<std::uint32_t>> slots;
    for (int i = 0; i < 8; ++i) {
      model.admit(random_rows(*spec, 25000, calls), calls);
      slots.push_back(model.newest_slots());
      if (i % 2 == 1) model.end_one(Model::End::release, calls);
    }
    if (expected) CHECK(*expected == slots);
    expected = slots;
  }
  set_num_threads(before);
}

// Between two uses of the 300 rows come 1200 others, more than there are slots: a queue of releases never hit them.
void rows_that_come_once_do_not_push_out_those_that_come_again(Random& random) {
  const auto spec = spec_of(1);
  SlotDirectory directory(spec, tables_with_slots, 1000, true);
  std::uint64_t next = 1000;
  for (int i = 0; i < 60; ++i) {
    const bool with_the_300 = i < 10 || i % 2 == 0;
    std::set<Row> rows;
    for (std::uint64_t row = 0; with_the_300 && row < 300; ++row) rows.emplace(3, row);
    for (int once = 0; once < 600; ++once) rows.emplace(3, next++);
    const auto admission = directory.admit(plan_of(spec, rows, random));
    CHECK(admission != nullptr);
    CHECK(i == 0 || admission->missing().size() == 600);
  }
}

void a_row_whose_bytes_never_came_is_missing_again(Random& random) {
  const auto spec = spec_of(1);
  SlotDirectory directory(spec, tables_with_slots, 4, true);
  const auto both = plan_of(spec, {{3, 5}, {3, 6}}, random);
  const auto one = plan_of(spec, {{3, 6}}, random);
  const auto first = directory.admit(both);
  const auto second = directory.admit(one);
  CHECK(first->missing().size() == 2 && second->missing().empty());
  directory.forget(*first);
  CHECK(directory.counts().resident == 1);  // the one that the second holds
  const auto third = directory.admit(one);
  CHECK(third->missing().size() == 1 && third->slots()[0] == second->slots()[0]);
  const auto fourth = directory.admit(one);
  CHECK(fourth->missing().empty());
}

void what_makes_no_sense_is_refused(Random& random) {
  const auto spec = spec_of(10);
  const auto refuses = [&](const std::vector<std::uint32_t>& tables, std::uint64_t num_slots) {
    return kind_thrown_by([&] { SlotDirectory(spec, tables, num_slots, true); }) == ErrorKind::config;
  };
  CHECK(refuses({}, 1) && refuses({4}, 1) && refuses({2, 0}, 1) && refuses({0, 0}, 1) && refuses({0, 1}, 1));
  CHECK(refuses({0}, 0) && refuses({0}, std::uint64_t{1} << 31));

  SlotDirectory directory(spec, {0}, 1, true);
  SlotDirectory other(spec, {0}, 1, true);
  CHECK(kind_thrown_by([&] { directory.admit(plan_of(spec_of(10), {}, random)); }) == ErrorKind::config);
  const auto admission = directory.admit(plan_of(spec, {{0, 3}}, random));
  CHECK(kind_thrown_by([&] { other.release(*admission); }) == ErrorKind::config);
  CHECK(kind_thrown_by([&] { other.forget(*admission); }) == ErrorKind::config);
  CHECK(directory.counts().held == 1);
}

void an_admission_outlives_its_directory(Random& random) {
  const auto spec = spec_of(10);
  auto directory = std::make_unique<SlotDirectory>(spec, tables_with_slots, 10, true);
  const auto admission = directory->admit(plan_of(spec, {{0, 1}, {3, 2}}, random));
  directory.reset();
  CHECK(admission->slots().size() == 2);
  admission->check_held();
}

void threads_may_admit_and_release_at_once(Random& random) {
  const auto spec = spec_of(1);
  SlotDirectory directory(spec, tables_with_slots, 500, true);
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, own = Random(random())]() mutable {
      std::vector<AdmissionPtr> live;
      for (int call = 0; call < 300; ++call) {
        auto admission = directory.admit(plan_of(spec, random_rows(*spec, 150, own), own));
        if (!admission || call % 3 == 0) live.clear();
        if (admission) live.push_back(std::move(admission));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(directory.counts().held == 0 && directory.counts().resident <= 500 && directory.counts().hit != 0);
}

// A plan of real ids: 3 features of 2 tables, some bags empty, and one of a table without slots.
std::shared_ptr<Plan> large_plan(Random& random, bool weighted) {
  auto spec = std::make_shared<CollectionSpec>();
  spec->tables = {{5, 50000, 8, Pooling::mean}, {1, 9, 4, Pooling::sum}, {7, 30, 8, Pooling::mean}};
  spec->features = {{2, 0, "a"}, {1, 8, "b"}, {0, 12, "c"}, {2, 20, "d"}};
  spec->output_width = 28;
  const std::size_t num_bags = 20000;
  std::vector<std::int64_t> ids, offsets = {0};
  std::vector<float> weights;
  for (const auto& feature : spec->features) {
    for (std::size_t bag = 0; bag < num_bags; ++bag) {
      for (std::uint64_t i = below(random, 4); i > 0; --i) {
        ids.push_back(static_cast<std::int64_t>(below(random, spec->tables[feature.table].num_rows)));
        weights.push_back(static_cast<float>(below(random, 1000)));
      }
      offsets.push_back(static_cast<std::int64_t>(ids.size()));
    }
  }
  const std::vector<std::uint32_t> block_of = {0, 1, 2, 3};
  auto plan = std::make_shared<Plan>();
  plan->spec = spec;
  plan_batch({ids.data(), offsets.data(), true, weighted ? weights.data() : nullptr, num_bags, block_of}, false, *plan);
  return plan;
}

void threads_pack_what_one_packs(Random& random) {
  const int before = num_threads();
  for (const bool weighted : {false, true}) {
    const auto plan = large_plan(random, weighted);
    SlotDirectory directory(plan->spec, {0, 2}, 50030, true);
    const auto admission = directory.admit(plan);
    const DevicePlan layout = device_plan_of(*admission);
    CHECK(layout.lookup_scale.has_value() == weighted && layout.bytes % 128 == 0);
    std::vector<std::vector<std::uint64_t>> packed;
    for (const int threads : {1, 4}) {
      set_num_threads(threads);
      packed.emplace_back(layout.bytes / 8);
      pack(*admission, layout, reinterpret_cast<std::byte*>(packed.back().data()));
    }
    CHECK(packed[0] == packed[1]);
    const auto* const bytes = reinterpret_cast<const std::byte*>(packed[0].data());
    std::vector<std::int32_t> slot_of_lookup(layout.lookup_slot.count), bag_start(layout.bag_start.count);
    std::memcpy(slot_of_lookup.data(), bytes + layout.lookup_slot.offset, 4 * slot_of_lookup.size());
    std::memcpy(bag_start.data(), bytes + layout.bag_start.offset, 4 * bag_start.size());
    std::size_t j = 0, bag = 0;
    for (const std::size_t f : {0u, 2u, 3u}) {
      const TablePlan& table = plan->tables[plan->features[f].table];
      const std::size_t first_row = plan->features[f].table == 0 ? 0 : plan->tables[0].num_unique();
      for (std::size_t b = 0; b < plan->num_bags; ++b, ++bag) {
        CHECK(static_cast<std::size_t>(bag_start[bag]) == j);
        for (std::uint32_t p = plan->bag_start(f)[b]; p < plan->bag_start(f)[b + 1]; ++p, ++j) {
          CHECK(static_cast<std::uint32_t>(slot_of_lookup[j]) == admission->slots()[first_row + table.position[p]]);
        }
      }
    }
    CHECK(j == admission->num_lookups() && static_cast<std::size_t>(bag_start[bag]) == j);
    directory.release(*admission);
    CHECK(kind_thrown_by([&] { pack(*admission, layout, nullptr); }) == ErrorKind::step);
  }
  set_num_threads(before);
}

void an_output_whose_offsets_do_not_fit_is_refused() {
  auto spec = std::make_shared<CollectionSpec>();
  spec->tables = {{0, 10, 2048, Pooling::sum}};
  spec->output_width = 2048;
  auto plan = std::make_shared<Plan>();
  plan->spec = spec;
  plan->tables.resize(1);
  plan->tables[0].row_start = {0};
  plan->output_width = 2048;
  SlotDirectory directory(spec, {0}, 1, true);
  plan->num_bags = (std::size_t{1} << 20) - 1;
  CHECK(device_plan_of(*directory.admit(plan)).rows.count == 0);
  plan->num_bags += 1;
  CHECK(kind_thrown_by([&] { device_plan_of(*directory.admit(plan)); }) == ErrorKind::config);
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  std::mt19937_64 random(check::seed_from(argc, argv));
  holdfast::random_calls_agree_with_a_map(random);
  holdfast::the_same_calls_give_the_same_slots_on_any_number_of_threads(random);
  holdfast::rows_that_come_once_do_not_push_out_those_that_come_again(random);
  holdfast::a_row_whose_bytes_never_came_is_missing_again(random);
  holdfast::what_makes_no_sense_is_refused(random);
  holdfast::an_admission_outlives_its_directory(random);
  holdfast::threads_may_admit_and_release_at_once(random);
  holdfast::threads_pack_what_one_packs(random);
  holdfast::an_output_whose_offsets_do_not_fit_is_refused();
  return check::passed();
}
