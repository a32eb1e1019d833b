// Every state that a power cut may leave of an in-place pool on DAX memory, by what the built code really does: each
// store, each line that is written back and each fence is taken down as the processor meets it, instead of what a double
// of the medium is told. And that this finds a line that is not written back, and a fence that is not there.
//
// Usage: test_built_stores [seed [states at each point [points from one further life to the next [part parts]]]]
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

#if !defined(__x86_64__) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)

int main() {
  std::puts("left out: it wants x86-64, and faults of its own");
  return 0;
}

#else

#include "base/parallel.h"
#include "crash_states.h"
#include "media/medium.h"
#include "store_tracer.h"

// What the linker takes instead of the library's own.
extern "C" {

void* mmap(void* address, std::size_t bytes, int protection, int flags, int descriptor, off_t offset) noexcept {
  constexpr int map_sync = 0x80000;
  auto& tracer = holdfast::StoreTracer::instance();
  if (tracer.is_tracing() && (flags & map_sync) != 0) flags = MAP_SHARED;
  void* const got = reinterpret_cast<void*>(::syscall(SYS_mmap, address, bytes, protection, flags, descriptor, offset));
  if (got != MAP_FAILED && (flags & MAP_TYPE) == MAP_SHARED) tracer.mapped(got, bytes, protection, descriptor);
  return got;
}

int munmap(void* address, std::size_t bytes) noexcept {
  holdfast::StoreTracer::instance().unmapped(address);
  return static_cast<int>(::syscall(SYS_munmap, address, bytes));
}

int msync(void* address, std::size_t bytes, int flags) {
  holdfast::StoreTracer::instance().synced(address, bytes);
  return static_cast<int>(::syscall(SYS_msync, address, bytes, flags));
}

}  // extern "C"

namespace holdfast {
namespace {

// What a programmer could have got wrong in the medium.
enum class Defect { none, last_line_stays_behind, no_fence, first_line_only };

// The real medium of mapped files, on what it takes for DAX memory, traced.
class TracedMedium final : public Medium {
 public:
  TracedMedium(const std::string& directory, Journal& journal, Defect defect) : defect_(defect) {
    StoreTracer::instance().begin(directory, journal);
    real_ = open_mapped_medium(directory);
    CHECK(real_->level() == format::Level::power);
  }
  ~TracedMedium() override { StoreTracer::instance().end(); }

  format::Level level() const override { return real_->level(); }
  std::string description() const override { return real_->description(); }
  bool exists(const std::string& name) const override { return real_->exists(name); }
  std::unique_ptr<File> create(const std::string& name, std::size_t bytes, Access access) override {
    return real_->create(name, bytes, access);
  }
  std::unique_ptr<File> open(const std::string& name, bool writable, Access access) override {
    return real_->open(name, writable, access);
  }
  std::unique_ptr<File> open_joined(const std::vector<JoinedPiece>& pieces, std::size_t bytes, bool writable,
                                    Access access) override {
    return real_->open_joined(pieces, bytes, writable, access);
  }
  Tail read_tail(const std::string& name, std::size_t bytes, std::size_t from_end) const override {
    return real_->read_tail(name, bytes, from_end);
  }
  void rename(const std::string& from, const std::string& to) override { real_->rename(from, to); }

  void flush(const void* data, std::size_t bytes) override {
    if (bytes == 0) return;
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    const std::uintptr_t last_line = (begin + bytes - 1) / format::line_bytes * format::line_bytes;
    if (defect_ == Defect::last_line_stays_behind && last_line > begin) bytes = last_line - begin;
    if (defect_ == Defect::first_line_only) bytes = 1;
    real_->flush(data, bytes);
  }
  void fence() override {
    if (defect_ != Defect::no_fence) real_->fence();
  }

 private:
  Defect defect_;
  std::unique_ptr<Medium> real_;
};

Shape shape_of(const char* what, std::uint32_t dense_interval, bool ahead, Defect defect = Defect::none) {
  Shape shape{what, format::Store::in_place, word_bytes, {}, 5, 16 << 10, dense_interval, ahead};
  // Rows of whole lines are written past the caches, narrower ones are not.
  shape.script.tables = {table_record("a", 200, 16, RowOptimizer::rowwise_adagrad),
                         table_record("b", 40, 4, RowOptimizer::adam)};
  shape.script.num_bags = 8;
  shape.script.row_checksums = false;
  shape.medium = [defect](const std::string& directory, Journal& journal) {
    return std::make_unique<TracedMedium>(directory, journal, defect);
  };
  return shape;
}

std::string figures(const Found& found) {
  return std::to_string(found.states) + " states at " + std::to_string(found.points) + " points, of " +
         std::to_string(found.lives) + " further lives";
}

int cut_power_under_built_code(int argc, char** argv) {
  const std::uint64_t seed = check::seed_from(argc, argv);
  Effort effort{4, 1, 120};
  Share share(argc, argv, seed, effort);
  set_num_threads(1);
  const StoreTracer& tracer = StoreTracer::instance();
  const Expected expected(shape_of("", 1, false).script, shape_of("", 1, false).num_steps);

  std::vector<Shape> shapes = {shape_of("dense interval 1", 1, false),
                               shape_of("dense interval 2, captured ahead", 2, true),
                               shape_of("row checksums, rows put by turns", 1, false)};
  shapes.back().script.row_checksums = true;
  shapes.back().updates = Updates::by_turns;
  bool streams = false;  // whether a shape is among them whose updates the pool's kernels make, past the caches
  for (const Shape& shape : shapes) {
    if (!share.has_next()) continue;
    check::context = shape.what;
    streams |= shape.updates == Updates::by_pool;
    const Found found = PowerCuts(shape, expected, seed, effort).everywhere();
    if (!found.problem.empty()) check::fail(__FILE__, __LINE__, found.problem.c_str());
    std::printf("%s: %s\n", shape.what.c_str(), figures(found).c_str());
    std::fflush(stdout);
    CHECK(found.points > 50);
  }
  std::printf(
      "%llu words stored, %llu of them past the caches; %llu lines written back, %llu fences\n",
      static_cast<unsigned long long>(tracer.num_stores), static_cast<unsigned long long>(tracer.num_past_caches),
      static_cast<unsigned long long>(tracer.num_written_back), static_cast<unsigned long long>(tracer.num_fences));
  CHECK((tracer.num_past_caches != 0) == streams && tracer.num_past_caches < tracer.num_stores);

  for (const auto& [defect, what] : {std::pair{Defect::last_line_stays_behind, "the last line of a range stays behind"},
                                     std::pair{Defect::first_line_only, "only the first line is written back"},
                                     std::pair{Defect::no_fence, "nobody waits for what is written back"}}) {
    if (!share.has_next()) continue;
    check::context = what;
    const Found found = PowerCuts(shape_of(what, 1, false, defect), expected, seed, {8, 4, 60, true}).everywhere();
    std::printf("%s: %s: %s\n", what, figures(found).c_str(), found.problem.c_str());
    std::fflush(stdout);
    CHECK(!found.problem.empty());
  }
  return check::passed();
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) { return holdfast::cut_power_under_built_code(argc, argv); }

#endif
