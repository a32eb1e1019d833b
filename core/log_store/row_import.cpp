#include "log_store/row_import.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/parallel.h"

namespace holdfast {
namespace {

constexpr std::size_t buffer_bytes = std::size_t{8} << 20;  // of blocks, written at once
constexpr std::size_t images_bytes = std::size_t{32} << 20;  // that are made at a time,
constexpr std::size_t chunk_bytes = std::size_t{64} << 10;  // and by one thread
constexpr std::size_t most_writes = 8 * BlockQueue::depth;

}  // namespace

void RowImport::check(std::uint32_t table, std::span<const std::uint64_t> rows, std::span<const std::byte> weights,
                      std::span<const float> state) const {
  const auto& [what, layout] = tables_.at(table);
  const bool are_there = std::ranges::all_of(rows, [&](std::uint64_t row) { return homes_.has(table, row); });
  if (!are_there || weights.size() != rows.size() * layout.weight_bytes() ||
      (!state.empty() && state.size() != rows.size() * what.spec.state_floats)) {
    throw Error(ErrorKind::config, "imported rows do not fit table '" + what.name + "'");
  }
}

void RowImport::write(std::uint32_t table, std::span<const std::uint64_t> rows, std::span<const std::byte> weights,
                      std::span<const float> state) const {
  const auto& [what, layout] = tables_[table];
  const std::size_t rows_at_once = std::max<std::size_t>(1, images_bytes / layout.image_bytes());
  for (std::size_t done = 0; done < rows.size();) {
    const std::size_t some = std::min(rows.size() - done, rows_at_once);
    write_some(table, {rows.subspan(done, some), weights.data() + done * layout.weight_bytes(),
                       state.empty() ? nullptr : state.data() + done * what.spec.state_floats});
    done += some;
  }
}

void RowImport::write_some(std::uint32_t table, const Imported& imported) const {
  std::vector<std::size_t> fresh;
  std::vector<std::size_t> known;
  for (std::size_t i = 0; i < imported.rows.size(); ++i) {
    const Home& home = homes_.of(table)[homes_.home_of(table, imported.rows[i])];
    (homes_.address_of(home, imported.rows[i]) ? known : fresh).push_back(i);
  }
  write_over(table, imported, std::move(known));
  write_fresh(table, imported, fresh);
}

void RowImport::write_fresh(std::uint32_t table, const Imported& imported, std::span<const std::size_t> which) const {
  if (which.empty()) return;
  const RowLayout& layout = tables_[table].layout;
  const std::vector<float> zeros(tables_[table].what.spec.state_floats);
  std::vector<std::byte> images(which.size() * layout.image_bytes());
  std::vector<HomeVersion> versions;  // the last of them first, as addresses are given
  versions.reserve(which.size());
  for (std::size_t k = which.size(); k-- > 0;) versions.push_back({imported.rows[which[k]], k * layout.image_bytes()});
  home_writer_.begin_import(table, versions);
  const std::size_t chunk_rows = std::max<std::size_t>(1, chunk_bytes / layout.image_bytes());
  parallel_for((which.size() + chunk_rows - 1) / chunk_rows, [&](std::size_t chunk) {
    for (std::size_t k = chunk * chunk_rows; k < std::min(which.size(), (chunk + 1) * chunk_rows); ++k) {
      const std::size_t i = which[k];
      const float* of_row = imported.state == nullptr ? zeros.data() : imported.state + i * zeros.size();
      write_image(layout, table, imported.rows[i], imported.weights + i * layout.weight_bytes(), of_row,
                  images.data() + k * layout.image_bytes());
    }
  });
  home_writer_.settle(table, versions);
  home_writer_.note_import(table, versions);
  const SpareBuffers::Borrowed buffer = io_.spare.borrow(buffer_bytes);
  for (std::size_t done = 0; done < versions.size();) {
    const auto some = std::span(versions).subspan(done);
    done += home_writer_.write(table, some, images.data(), buffer.buffer(), {buffer_bytes, most_writes}).versions;
  }
}

void RowImport::write_over(std::uint32_t table, const Imported& imported, std::vector<std::size_t> which) const {
  const RowLayout& layout = tables_[table].layout;
  const std::size_t state_floats = layout.state_bytes() / sizeof(float);
  std::ranges::sort(which, {}, [&](std::size_t i) { return imported.rows[i]; });
  const std::size_t record_rows =
      std::max<std::size_t>(1, (ring_bytes_ / 2 - format::block_bytes) / (layout.unit_bytes() + sizeof(std::uint64_t)));
  for (std::size_t done = 0; done < which.size();) {
    const auto some = std::span(which).subspan(done, std::min(which.size() - done, record_rows));
    std::vector<std::uint64_t> rows;
    std::vector<std::byte> weights(some.size() * layout.weight_bytes());
    std::vector<float> state(some.size() * state_floats);
    for (std::size_t k = 0; k < some.size(); ++k) {
      rows.push_back(imported.rows[some[k]]);
      std::memcpy(weights.data() + k * layout.weight_bytes(), imported.weights + some[k] * layout.weight_bytes(),
                  layout.weight_bytes());
      if (imported.state == nullptr) continue;
      std::copy_n(imported.state + some[k] * state_floats, state_floats, state.data() + k * state_floats);
    }
    through_log_({table, rows.size(), {rows.data(), weights.data(), state.data()}});
    done += some.size();
  }
}

}  // namespace holdfast
