// Rows that are imported into a log store, and what a crash leaves of them.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "log_store_model.h"
#include "thrown.h"

namespace holdfast {
namespace {

void imported_rows_are_home(std::uint64_t seed) {
  const std::vector<RowTable> tables = tables_of_every_shape();
  Subject subject(tables, 1 << 20, buffered(), seed);
  subject.append_with_room(50);  // rows that the import's edges keep
  CHECK(kind_thrown_by([&] { subject.import_rows(0, {}, {}, {}); }) == ErrorKind::step);
  subject.sync();
  subject.merge(subject.durable);
  for (int i = 0; i < 40; ++i) {
    const auto t = static_cast<std::uint32_t>(subject.random() % tables.size());
    const std::uint64_t first = subject.random() % tables[t].num_rows;
    std::vector<std::uint64_t> rows = rows_from(first, 1 + subject.random() % (tables[t].num_rows - first));
    std::vector<OwnedRows> imported;
    imported.emplace_back(t, tables[t], std::move(rows));
    OwnedRows& of_table = imported.front();
    for (std::byte& byte : of_table.weights) byte = static_cast<std::byte>(subject.random());
    const bool with_state = subject.random() % 2 == 0;
    for (float& value : of_table.state) value = with_state ? static_cast<float>(subject.random() % 1000) : 0.0f;
    subject.import_rows(t, of_table.rows, of_table.weights,
                        with_state ? std::span<const float>(of_table.state) : std::span<const float>());
    subject.model.update(subject.store->last().step, imported);
  }
  subject.fetch_all();
  subject.list_touched();
  subject.store->sync_home();
  subject.crash();
  subject.open(every_step);
  subject.fetch_all();
}

// Whatever a crash leaves of an import, each row is whole: as it was when homes were synced last, or as it was imported
// since. And one who trains sees the rows that one who reads beside the store sees.
void an_import_that_a_crash_ends_leaves_rows_old_or_new(std::uint64_t seed) {
  const std::vector<RowTable> tables = one_table();
  const std::vector<std::uint64_t> all = every_row_of(tables[0]);
  std::size_t written_over = 0;
  for (int life = 0; life < 60; ++life) {
    Subject subject(tables, 64 << 10, buffered(), seed + static_cast<std::uint64_t>(life));
    std::vector<std::vector<Bytes>> possible(all.size());  // weights by row; none: only its initial value
    std::vector<bool> may_be_untouched(all.size(), true);
    subject.disk.crash_in = 1 + subject.random() % 40;
    try {
      for (;;) {
        Bytes weights((1 + subject.random() % 100) * tables[0].weight_bytes());
        for (std::byte& byte : weights) byte = static_cast<std::byte>(subject.random());
        const std::uint64_t first = subject.random() % 100;
        for (std::size_t i = 0; i < weights.size() / tables[0].weight_bytes(); ++i) {
          const auto begin = weights.begin() + static_cast<std::ptrdiff_t>(i * tables[0].weight_bytes());
          possible[first + i].emplace_back(begin, begin + static_cast<std::ptrdiff_t>(tables[0].weight_bytes()));
        }
        subject.import_rows(0, rows_from(first, weights.size() / tables[0].weight_bytes()), weights, {});
        if (subject.random() % 4 != 0) continue;
        subject.store->sync_home();
        for (const std::uint64_t row : all) {
          if (possible[row].empty()) continue;
          written_over += possible[row].size() > 1 ? 1 : 0;
          possible[row].erase(possible[row].begin(), possible[row].end() - 1);
          may_be_untouched[row] = false;
        }
      }
    } catch (const Crash&) {
    }
    subject.crash();
    const auto check_rows = [&](LogStore& store) {
      for (const std::uint64_t row : all) {
        std::vector<OwnedRows> one;
        one.emplace_back(0, tables[0], std::vector{row});
        store.fetch(views(one));
        if ((one[0].rows[0] & fresh_bit) != 0) {
          CHECK(may_be_untouched[row]);
        } else {
          CHECK(std::ranges::count(possible[row], one[0].weights) != 0);
        }
      }
    };
    LogStoreOptions reading = buffered();
    reading.writable = false;
    LogStore view(subject.directory(), tables, reading);
    view.scan();
    view.view();
    CHECK(view.verify(every_step).empty());
    check_rows(view);
    subject.open(every_step);
    check_rows(*subject.store);
    for (const std::uint64_t row : all) {
      std::vector<OwnedRows> beside;
      std::vector<OwnedRows> here;
      beside.emplace_back(0, tables[0], std::vector{row});
      here.emplace_back(0, tables[0], std::vector{row});
      view.fetch(views(beside));
      subject.store->fetch(views(here));
      CHECK(beside[0].rows == here[0].rows && beside[0].weights == here[0].weights);
    }
  }
  CHECK(written_over > 0);
}

void a_long_import_is_written_in_pieces(std::uint64_t seed) {
  const std::vector<RowTable> tables = {table_of(0, 100000, 32, RowDtype::f32, RowOptimizer::rowwise_adagrad)};
  Subject subject(tables, 64 << 10, buffered(), seed);
  std::vector<std::uint64_t> rows = rows_from(5, 99990);
  std::vector<OwnedRows> imported;
  imported.emplace_back(0, tables[0], std::move(rows));
  for (std::byte& byte : imported[0].weights) byte = static_cast<std::byte>(subject.random());
  subject.import_rows(0, imported[0].rows, imported[0].weights, {});
  subject.model.update(0, imported);
  subject.fetch_all();
  subject.list_touched();
}

void arrays_that_do_not_fit_are_not_imported(std::uint64_t seed) {
  Subject subject(one_table(), 64 << 10, buffered(), seed);  // rows of 64 bytes and one float, 200 of them
  const Bytes weights(3 * 64);
  const std::vector<float> state(3);
  const auto import = [&](std::uint64_t first, std::size_t weight_bytes, std::size_t floats) {
    return kind_thrown_by([&] {
      subject.import_rows(0, rows_from(first, 3), std::span(weights).first(weight_bytes),
                          std::span(state).first(floats));
    });
  };
  CHECK(import(0, 3 * 64 - 1, 3) == ErrorKind::config);
  CHECK(import(0, 3 * 64, 2) == ErrorKind::config);
  CHECK(import(198, 3 * 64, 3) == ErrorKind::config);
  CHECK(import(every_step - 3, 3 * 64, 3) == ErrorKind::config);
  CHECK(subject.store->touched_rows(0, 0, 200).empty());
  subject.import_rows(0, {}, {}, {});
  subject.import_rows(0, rows_from(197, 3), weights, state);
  CHECK((subject.store->touched_rows(0, 0, 200) == std::vector<std::uint64_t>{197, 198, 199}));
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  const std::uint64_t seed = check::seed_from(argc, argv);
  const auto run = [&](const char* name, const std::function<void(std::uint64_t)>& test) {
    check::context = name;
    test(seed);
  };
  run("imported rows", imported_rows_are_home);
  run("an import that a crash ends", an_import_that_a_crash_ends_leaves_rows_old_or_new);
  run("a long import", a_long_import_is_written_in_pieces);
  run("imports that do not fit", arrays_that_do_not_fit_are_not_imported);
  return check::passed();
}
