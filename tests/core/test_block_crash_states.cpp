// Every state that a power cut may leave of a pool with a log store: any subset of the sectors that no sync has made
// durable, of the row log, of homes that a merge was writing, of dense slots and of the superblock. And that this finds
// the bug where the protocol leaves a sync out.
//
// Usage: test_block_crash_states [seed [states at each point [points from one further life to the next [part parts]]]]
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "check.h"
#include "crash_states.h"
#include "layout/pool_files.h"

namespace holdfast {
namespace {

constexpr const char* row_log_name = "row-log-0000";

// Rows of which 12 and 9 share a sector, and rows of two sectors. Records take one block or two, so that now and then
// one does not fit before the end of the ring. The ring turns over three times in a run.
Shape shape_of(const std::string& what, std::uint32_t dense_interval) {
  const Script script{
      {table_record("a", 300, 8, RowOptimizer::rowwise_adagrad), table_record("b", 40, 4, RowOptimizer::adam),
       table_record("c", 4, 150, RowOptimizer::rowwise_adagrad)},
      2,
      2};
  return {what, format::Store::log, format::sector_bytes, script, 16, 48 << 10, dense_interval};
}

constexpr std::size_t late_merges = 1;  // of the shapes
constexpr std::size_t without_dense = 3;
constexpr std::size_t given_up = 5;

std::vector<Shape> shapes() {
  std::vector<Shape> shapes = {shape_of("dense interval 1", 1),
                               shape_of("dense interval 3, merges that somebody waits for", 3),
                               shape_of("dense interval 3, pages written back while they are stored to", 3),
                               shape_of("no dense states", 1),
                               shape_of("dense interval 3, rows put in odd steps", 3),
                               shape_of("dense interval 1, closed in the middle of a merge", 1)};
  shapes[late_merges].late_merges = true;
  shapes[2].unit_bytes = word_bytes;
  shapes[without_dense].script.has_dense = false;
  shapes[4].updates = Updates::by_turns;
  shapes[given_up].gives_up_merges = true;
  shapes[given_up].log_bytes = 32 << 10;  // so that one is wanted at the end
  return shapes;
}
bool is_of_checkpoint(const Flush& flush) {
  return flush.file == row_log_name && flush.written && *flush.written < format::row_log_ring_offset;
}
bool is_of_addresses(const Flush& flush) { return flush.file.ends_with(".addresses") && flush.written; }
bool is_of_dense_header(const Flush& flush) { return flush.file.starts_with("dense") && flush.offset == 0; }

// Gives torn records checksums that hold.
void seal_torn_records(const std::string& directory) {
  const std::string path = directory + "/" + row_log_name;
  Bytes log = bytes_of_file(path);
  const auto medium = open_mapped_medium(directory);
  const std::uint32_t seed = Superblock(*medium, false).identity().seed();
  for (std::size_t at = format::row_log_ring_offset; at < log.size(); at += format::block_bytes) {
    format::RowLogHeader header;
    std::memcpy(&header, &log[at], sizeof(header));
    if (header.magic != format::row_log_record_magic || header.bytes > log.size() - at) continue;
    header.rows_crc = crc32c(seed, &log[at + sizeof(header)], header.images_offset - sizeof(header));
    header.images_crc = crc32c(seed, &log[at + header.images_offset], header.bytes - header.images_offset);
    header.crc = crc_of(header, seed);
    std::memcpy(&log[at], &header, sizeof(header));
  }
  write_file(path, log);
}

// Each is an ordering that the protocol rests on.
std::vector<Omission> omissions() {
  return {
      {"syncing the log before a step is reported durable",
       [](const Flush& f) { return f.file == row_log_name && f.written && !is_of_checkpoint(f); }},
      {"syncing the log when a life begins, before it is believed",
       [](const Flush& f) { return f.file == row_log_name && !f.written; }, nullptr, "", without_dense, true},
      {"syncing dense states when a life begins, before they are believed",
       [](const Flush& f) { return f.file.starts_with("dense") && !f.written; }, nullptr, "", 0, true},
      {"syncing a life's first checkpoint, before its first record",
       [](const Flush& f) { return is_of_checkpoint(f) && !f.by_merge; }},
      {"syncing homes before the checkpoint that gives records up",
       [](const Flush& f) { return f.file.ends_with(".home"); }},
      {"syncing the names of rows before the header that counts them",
       [](const Flush& f) { return is_of_addresses(f) && *f.written != 0; }},
      {"syncing that header before the checkpoint that gives records up",
       [](const Flush& f) { return is_of_addresses(f) && *f.written == 0; }},
      {"syncing that checkpoint before the space is used again",
       [](const Flush& f) { return is_of_checkpoint(f) && f.by_merge; }, nullptr, "", late_merges},
      {"syncing that a dense header is cleared, before its payload is written",
       [](const Flush& f) { return is_of_dense_header(f) && f.first_word == 0; }},
      {"syncing a dense payload before its header",
       [](const Flush& f) { return f.file.starts_with("dense") && f.offset != 0; }},
      {"syncing a dense header before its step is reported durable",
       [](const Flush& f) { return is_of_dense_header(f) && f.first_word != 0; }},
      {"syncing a dense header before rows are merged up to its step",
       [](const Flush& f) { return is_of_dense_header(f) && f.first_word != 0 && f.file == dense_names[0]; }, nullptr,
       "rows are merged up to step"},
      {"syncing the epoch record before anything that carries the epoch",
       [](const Flush& f) { return is_of(f, format::epoch_offset) || is_sync_of_superblock(f); }},
      {"checksums of records", nullptr, seal_torn_records, "", without_dense},
  };
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  return cut_power(argc, argv, shapes(), omissions());
}
