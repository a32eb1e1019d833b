// Every state that a power cut may leave of an in-place pool on byte-addressable memory: any subset of the words that
// no flush and fence has made durable. And that this finds the bug where the protocol leaves a flush out.
//
// Usage: test_crash_states [seed [states at each point [points from one further life to the next]]]
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "check.h"
#include "crash_states.h"
#include "layout/pool_files.h"
#include "layout/superblock.h"

namespace holdfast {
namespace {

Shape shape_of(std::uint32_t dense_interval, bool ahead) {
  const std::string what = "dense interval " + std::to_string(dense_interval) + (ahead ? ", captured ahead" : "");
  return {what, format::Store::in_place, word_bytes, {}, 8, 16 << 10, dense_interval, ahead};
}

constexpr std::size_t with_row_checksums = 3;  // of the shapes
constexpr std::size_t with_put_rows = 4;

std::vector<Shape> shapes() {
  std::vector<Shape> shapes = {shape_of(1, false), shape_of(1, true),  shape_of(3, true),
                               shape_of(2, true),  shape_of(1, false), shape_of(3, true)};
  shapes[with_row_checksums].what += ", row checksums";
  shapes[with_row_checksums].script.row_checksums = true;
  shapes[with_put_rows].what += ", rows put";
  shapes[with_put_rows].updates = Updates::elsewhere;
  shapes[5].what += ", rows read in place and put in odd steps";
  shapes[5].reads_in_place = true;
  shapes[5].updates = Updates::by_turns;
  // Which has room for a few of a step's forward passes at first.
  shapes.push_back(shape_of(1, false));
  shapes.back().what += ", eight forward passes a step, in a log that grows beneath them";
  shapes.back().script.num_passes = 8;
  shapes.back().script.num_bags = 2;
  shapes.back().num_steps = 4;
  shapes.back().log_bytes = 4 << 10;
  shapes.back().grows_log = true;
  return shapes;
}

// Epoch records of an open pool, as they were before they said which step it goes back to.
void forget_where_to_go_back(const std::string& directory) {
  std::fstream file(directory + "/" + superblock_name, std::ios::in | std::ios::out | std::ios::binary);
  const auto at = [&](std::size_t offset, auto& value, bool writes) {
    file.seekg(static_cast<std::streamoff>(offset));
    if (!writes) file.read(reinterpret_cast<char*>(&value), sizeof(value));
    file.seekp(static_cast<std::streamoff>(offset));
    if (writes) file.write(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  format::PoolHeader header;
  at(0, header, false);
  for (const std::size_t offset : format::epoch_offset) {
    format::EpochRecord epoch;
    at(offset, epoch, false);
    if (epoch.magic != format::epoch_magic || epoch.clean != 0) continue;
    epoch.has_steps = 0;
    epoch.step = 0;
    epoch.crc = crc_of(epoch, Superblock::identity_of(header).seed());
    at(offset, epoch, true);
  }
}

// Each is an ordering that the protocol rests on, or what a record must say.
std::vector<Omission> omissions() {
  return {
      {"flushing the payload of undo records",
       [](const Flush& f) { return f.file == log_name && f.bytes != sizeof(format::RecordHeader); }},
      {"flushing the headers of undo records",
       [](const Flush& f) { return f.file == log_name && f.bytes == sizeof(format::RecordHeader); }},
      {"flushing rows", [](const Flush& f) { return f.file.ends_with(".weights"); }},
      {"flushing rows that are put", [](const Flush& f) { return f.file.ends_with(".weights"); }, nullptr, "",
       with_put_rows},
      {"flushing the rows' optimizer states", [](const Flush& f) { return f.file.ends_with(".state"); }},
      {"flushing which rows are touched", [](const Flush& f) { return f.file.ends_with(".touched"); }},
      {"flushing the rows' checksums", [](const Flush& f) { return f.file.ends_with(".checksums"); }, nullptr, "",
       with_row_checksums},
      {"flushing undo records whose rows are put", [](const Flush& f) { return f.file == log_name; }, nullptr, "",
       with_put_rows},
      {"flushing the payload of dense states",
       [](const Flush& f) { return f.file.starts_with("dense") && f.offset != 0; }},
      {"flushing that a dense header is cleared, before its payload is stored",
       [](const Flush& f) { return f.file.starts_with("dense") && f.offset == 0 && f.first_word == 0; }},
      {"flushing the headers of dense states",
       [](const Flush& f) { return f.file.starts_with("dense") && f.offset == 0 && f.first_word != 0; }},
      {"flushing epoch records",
       [](const Flush& f) { return is_of(f, format::epoch_offset) || is_sync_of_superblock(f); }},
      {"flushing commit records", [](const Flush& f) { return is_of(f, format::commit_offset); }},
      {"flushing dense states when a life begins, before they are believed",
       [](const Flush& f) { return f.file.starts_with("dense") && !f.written; }, nullptr, "", 0, true},
      {"saying where rows go back to before the first does", nullptr, forget_where_to_go_back,
       "rows that are not those of step", 2, true},
      {"flushing the superblock's records when a life begins, before others are stored",
       [](const Flush& f) { return f.file == superblock_name && !f.written; }, nullptr, "", 0, true},
  };
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  return cut_power(argc, argv, shapes(), omissions());
}
