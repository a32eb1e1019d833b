#include "step/put_rows.h"

#include <algorithm>
#include <functional>
#include <string>

#include "base/error.h"

namespace holdfast {
namespace {

void check_fits(const std::vector<RowTable>& tables, const RowsPart& part) {
  const Plan& plan = *part.capture->plan;
  const auto& of_collection = plan.spec->tables;
  const bool ascends = std::ranges::adjacent_find(part.tables, std::greater_equal<>()) == part.tables.end();
  if (!ascends || (!part.tables.empty() && part.tables.back() >= of_collection.size())) {
    throw Error(ErrorKind::config, "the tables of a part of new rows must ascend and be of the collection's " +
                                       std::to_string(of_collection.size()));
  }
  std::size_t weight_bytes = 0;
  std::size_t state_floats = 0;
  std::string names;
  for (const std::uint32_t t : part.tables) {
    const RowTable& table = tables[of_collection[t].number];
    weight_bytes += plan.tables[t].num_unique() * table.weight_bytes();
    state_floats += plan.tables[t].num_unique() * table.spec.state_floats;
    names += (names.empty() ? "'" : ", '") + table.name + "'";
  }
  if (part.weights.size() == weight_bytes && part.state.size() == state_floats) return;
  throw Error(ErrorKind::config, "new rows of " + names + " take " + std::to_string(weight_bytes) +
                                     " bytes of weights and " + std::to_string(state_floats) +
                                     " floats of state in this batch; " + std::to_string(part.weights.size()) +
                                     " and " + std::to_string(part.state.size()) + " were given");
}

}  // namespace

std::vector<ReadyCapture> ready_captures(const std::vector<RowTable>& tables, const std::vector<RowsPart>& parts) {
  if (parts.empty()) throw Error(ErrorKind::step, "there are no new rows to put");
  struct Gathered {
    ReadyCapture ready;
    std::vector<std::uint32_t> times;  // that each table was given
  };
  std::vector<Gathered> gathered;
  for (const RowsPart& part : parts) {
    check_fits(tables, part);
    const Plan& plan = *part.capture->plan;
    auto of_capture = std::ranges::find(gathered, part.capture, [](const Gathered& g) { return g.ready.capture; });
    if (of_capture == gathered.end()) {
      const std::size_t num_tables = plan.tables.size();
      gathered.push_back({{part.capture, std::vector<ReadyRows>(num_tables)}, std::vector<std::uint32_t>(num_tables)});
      of_capture = gathered.end() - 1;
    }
    const std::byte* weights = part.weights.data();
    const float* state = part.state.data();
    for (const std::uint32_t t : part.tables) {
      const RowTable& table = tables[plan.spec->tables[t].number];
      of_capture->ready.tables[t] = {weights, state};
      ++of_capture->times[t];
      weights += plan.tables[t].num_unique() * table.weight_bytes();
      state += plan.tables[t].num_unique() * table.spec.state_floats;
    }
  }
  std::vector<ReadyCapture> ready;
  for (Gathered& of_capture : gathered) {
    const auto& spec = *of_capture.ready.capture->plan->spec;
    for (std::size_t t = 0; t < spec.tables.size(); ++t) {
      if (of_capture.times[t] == 1) continue;
      throw Error(ErrorKind::step, "new rows of table '" + tables[spec.tables[t].number].name + "' were given " +
                                       std::to_string(of_capture.times[t]) + " times; once is needed");
    }
    ready.push_back(std::move(of_capture.ready));
  }
  return ready;
}

}  // namespace holdfast
