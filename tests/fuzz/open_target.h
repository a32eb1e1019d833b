// What the fuzzer runs: damages one of a few tiny pools as its input says, and opens it every way there is.
//
// An input is: which pool; which checksums are made right again after the damage (flags); then edits of five bytes and
// more, until it ends: what to do, where (a structure's number, and an offset in it), how many bytes, the bytes. So the
// fuzzer gets behind the checksums, and a byte of its input is a byte of a field.
//
// Every Error is a right answer. Anything else that is thrown, a crash, a hang and memory without bound are findings.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "../core/scripted_run.h"
#include "base/checksum.h"
#include "base/error.h"
#include "readers/live_copy.h"
#include "readers/repair.h"

namespace holdfast::fuzz {

using Bytes = std::vector<unsigned char>;
using Files = std::map<std::string, Bytes>;

inline constexpr std::uint64_t log_bytes = 1 << 16;

inline Files read_files(const std::string& directory) {
  Files files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    const std::string name = std::filesystem::relative(entry.path(), directory).string();
    if (!entry.is_regular_file() || name == "lock") continue;
    std::ifstream in(entry.path(), std::ios::binary);
    files[name] = Bytes(std::istreambuf_iterator<char>(in), {});
  }
  return files;
}

inline void write_files(const std::string& directory, const Files& files) {
  std::filesystem::remove_all(directory);
  std::filesystem::create_directories(directory + "/shard-0000");
  for (const auto& [name, data] : files) {
    std::ofstream out(directory + "/" + name, std::ios::binary);
    out.write(reinterpret_cast<const char*>(data.data()), static_cast<std::streamsize>(data.size()));
  }
}

inline OpenOptions options() {
  OpenOptions options{};
  options.scratchpad_bytes = 1 << 20;
  return options;
}

// Both stores, each closed cleanly, in the middle of a step, and with a dense state that is older than the rows.
inline std::vector<Files> make_pools() {
  std::vector<Files> pools;
  for (const auto store : {format::Store::in_place, format::Store::log}) {
    for (const int way : {0, 1, 2}) {
      const TemporaryDirectory directory;
      make_pool(directory.path(), log_bytes, store);
      OpenOptions opening = options();
      opening.dense_interval = way == 2 ? 3 : 1;
      Run run(directory.path(), opening);
      run.write_dense();
      for (int step = 0; step < 5; ++step) run.step(false);
      if (way == 0) run.pool.close();
      if (way != 0) {
        run.pool.flush();
        run.step(false, false);
      }
      pools.push_back(read_files(directory.path()));
    }
  }
  return pools;
}

// Where a structure lies.
struct Spot {
  std::string file;
  std::size_t offset;
};

template <class T>
T load(const Bytes& data, std::size_t offset) {
  T value{};
  if (offset + sizeof(T) <= data.size()) std::memcpy(&value, data.data() + offset, sizeof(T));
  return value;
}

template <class T>
void store(Bytes& data, std::size_t offset, const T& value) {
  if (offset + sizeof(T) <= data.size()) std::memcpy(data.data() + offset, &value, sizeof(T));
}

template <class T>
void seal(Bytes& data, std::size_t offset, std::uint64_t magic, std::uint32_t seed) {
  auto value = load<T>(data, offset);
  if (value.magic != magic) return;
  value.crc = crc_of(value, seed);
  store(data, offset, value);
}

inline std::uint32_t crc_of_range(std::uint32_t seed, const Bytes& data, std::size_t begin, std::size_t end) {
  end = std::min(end, data.size());
  return begin < end ? crc32c(seed, data.data() + begin, end - begin) : seed;
}

// Headers of records by the step of their places, ascending.
inline std::vector<std::size_t> records_of(const Bytes& log, std::size_t begin, std::size_t step, std::uint64_t magic) {
  std::vector<std::size_t> found;
  for (std::size_t at = begin; at + 128 <= log.size(); at += step) {
    if (load<std::uint64_t>(log, at) == magic) found.push_back(at);
  }
  return found;
}

inline std::vector<Spot> spots_of(const Files& files) {
  std::vector<Spot> spots;
  const auto add = [&](const std::string& file, std::initializer_list<std::size_t> offsets) {
    for (const std::size_t offset : offsets) spots.push_back({file, offset});
  };
  add("pool.holdfast", {0, 4096, 8192, 12288, 16384, 20480, 20992});
  add("dense-0", {0, 4096, 4160});
  add("dense-1", {0, 4096, 4160});
  if (const auto log = files.find("log-0000"); log != files.end()) {
    add("log-0000", {0});
    for (const std::size_t at : records_of(log->second, 0, format::line_bytes, format::record_magic)) {
      add("log-0000", {at, at + 128, at + 192, at + 256});
    }
  }
  if (const auto log = files.find("row-log-0000"); log != files.end()) {
    add("row-log-0000", {0, 4096});
    for (const std::size_t at : records_of(log->second, 8192, format::block_bytes, format::row_log_record_magic)) {
      add("row-log-0000", {at, at + 128, at + 192, at + 256, at + 1024});
    }
  }
  for (const auto& [name, data] : files) {
    if (!name.starts_with("shard-")) continue;
    spots.push_back({name, 0});
    if (data.size() > format::label_bytes) spots.push_back({name, data.size() - format::label_bytes});
  }
  return spots;
}

// Makes the checksums of everything right, in the order in which one covers another; with `chain`, records name their
// predecessors by these again.
inline void seal_all(Files& files, bool chain) {
  const std::uint32_t seed = Superblock::identity_of(load<format::PoolHeader>(files["pool.holdfast"], 0)).seed();
  std::map<std::uint64_t, std::uint32_t> crc_at;  // of records, by position
  if (const auto found = files.find("log-0000"); found != files.end()) {
    Bytes& log = found->second;
    for (const std::size_t at : records_of(log, 0, format::line_bytes, format::record_magic)) {
      auto header = load<format::RecordHeader>(log, at);
      header.payload_crc =
          crc_of_range(seed, log, at + sizeof(header), at + std::min<std::uint64_t>(header.bytes, log.size()));
      if (chain && crc_at.contains(header.previous)) header.previous_crc = crc_at[header.previous];
      header.crc = crc_of(header, seed);
      store(log, at, header);
      crc_at[header.position] = header.crc;
    }
  }
  if (const auto found = files.find("row-log-0000"); found != files.end()) {
    Bytes& log = found->second;
    for (const std::size_t at : records_of(log, 8192, format::block_bytes, format::row_log_record_magic)) {
      auto header = load<format::RowLogHeader>(log, at);
      const std::uint64_t images = at + std::min<std::uint64_t>(header.images_offset, log.size());
      header.rows_crc = crc_of_range(seed, log, at + sizeof(header), images);
      header.images_crc = crc_of_range(seed, log, images, at + std::min<std::uint64_t>(header.bytes, log.size()));
      if (chain && crc_at.contains(header.previous)) header.previous_crc = crc_at[header.previous];
      header.crc = crc_of(header, seed);
      store(log, at, header);
      crc_at[header.position] = header.crc;
    }
    for (const std::size_t at : format::row_log_checkpoint_offset) {
      auto checkpoint = load<format::RowLogCheckpoint>(log, at);
      if (chain && crc_at.contains(checkpoint.last_record)) {
        checkpoint.last_record_crc = crc_at[checkpoint.last_record];
        store(log, at, checkpoint);
      }
      seal<format::RowLogCheckpoint>(log, at, format::row_log_checkpoint_magic, seed);
    }
  }
  Bytes& superblock = files["pool.holdfast"];
  for (const std::size_t at : format::commit_offset) {
    auto commit = load<format::CommitRecord>(superblock, at);
    if (chain && crc_at.contains(commit.last_record)) {
      commit.last_record_crc = crc_at[commit.last_record];
      store(superblock, at, commit);
    }
    seal<format::CommitRecord>(superblock, at, format::commit_magic, seed);
  }
  for (const std::size_t at : format::epoch_offset)
    seal<format::EpochRecord>(superblock, at, format::epoch_magic, seed);
  seal<format::PoolHeader>(superblock, 0, format::pool_magic, 0);
  for (std::size_t i = 0; i < 2; ++i) {
    seal<format::TableRecord>(superblock, format::tables_offset + i * sizeof(format::TableRecord), format::table_magic,
                              seed);
  }
  for (const char* name : {"dense-0", "dense-1"}) {
    Bytes& slot = files[name];
    auto header = load<format::DenseHeader>(slot, 0);
    if (header.magic != format::dense_magic) continue;
    const std::uint64_t bytes = format::line_up(header.structure_bytes) + header.tensors_bytes;
    header.payload_crc = crc_of_range(seed, slot, 4096, 4096 + std::min<std::uint64_t>(bytes, slot.size()));
    header.crc = crc_of(header, seed);
    store(slot, 0, header);
  }
}

// Takes numbers from the input; zeros when it has ended.
class Input {
 public:
  explicit Input(std::span<const std::uint8_t> data) : data_(data) {}
  bool has_more() const { return !data_.empty(); }
  std::uint8_t byte() {
    if (data_.empty()) return 0;
    const std::uint8_t value = data_.front();
    data_ = data_.subspan(1);
    return value;
  }

 private:
  std::span<const std::uint8_t> data_;
};

inline void edit(Files& files, const std::vector<Spot>& spots, Input& input) {
  const unsigned what = input.byte();
  const Spot& spot = spots[input.byte() % spots.size()];
  Bytes& data = files[spot.file];
  const std::size_t at = spot.offset + input.byte();
  const std::size_t count = 1 + input.byte() % 16;
  switch (what % 6) {
    case 0:
    case 1:
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint8_t value = input.byte();
        if (at + i < data.size())
          data[at + i] = what % 6 == 0 ? value : static_cast<std::uint8_t>(data[at + i] + value);
      }
      break;
    case 2: data.resize(std::min(data.size(), at * count)); break;
    case 3: data.resize(data.size() + count * 512); break;
    case 4: {  // the structure of another spot
      const Spot& other = spots[input.byte() % spots.size()];
      const Bytes& from = files[other.file];
      for (std::size_t i = 0; i < count * 32; ++i) {
        if (spot.offset + i < data.size() && other.offset + i < from.size())
          data[spot.offset + i] = from[other.offset + i];
      }
      break;
    }
    default:
      for (std::size_t i = 0; i < count * 32 && at + i < data.size(); ++i) data[at + i] = 0;
  }
}

template <class Work>
void allowing_errors(const Work& work) {
  try {
    work();
  } catch (const Error&) {
    // That is an answer.
  }
}

inline bool has_the_tables_of_the_run(const Pool& pool) {
  const auto& tables = pool.table_records();
  const auto is = [](const format::TableRecord& table, std::uint64_t rows, std::uint32_t dim, RowOptimizer optimizer) {
    return table.num_embeddings == rows && table.embedding_dim == dim && table.dtype == 0 &&
           table.optimizer == static_cast<std::uint32_t>(optimizer);
  };
  return tables.size() == 2 && is(tables[0], 300, 8, RowOptimizer::rowwise_adagrad) &&
         is(tables[1], 40, 4, RowOptimizer::adam);
}

inline void read_every_way(const std::string& path) {
  const Reader reader(path);
  allowing_errors([&] { reader.verify(); });
  allowing_errors([&] { reader.dense_state(); });
  for (std::size_t t = 0; t < reader.tables().size(); ++t) {
    const RowTable& table = reader.tables()[t];
    const std::uint64_t count = std::min<std::uint64_t>(table.num_rows, 500);
    std::vector<std::byte> weights(count * table.weight_bytes());
    std::vector<float> state(count * table.spec.state_floats);
    allowing_errors([&] { reader.touched_rows(t, 0, 1000); });
    allowing_errors([&] { reader.read_rows(t, 0, count, weights.data(), state.data()); });
  }
}

inline void copy(const std::string& path) {
  LiveCopy source(path);
  source.fix();
}

inline void train_a_step(const std::string& path) {
  OpenOptions opening = options();
  opening.trust_after_reboot = true;
  Run run(path, opening);
  if (has_the_tables_of_the_run(run.pool)) {
    run.step(false);
    run.pool.flush();
  }
  run.pool.close();
}

inline void open_damaged(std::span<const std::uint8_t> data) {
  static const TemporaryDirectory root;
  static const std::vector<Files> pools = make_pools();
  Input input(data);
  Files files = pools[input.byte() % pools.size()];
  const std::vector<Spot> spots = spots_of(files);
  const unsigned flags = input.byte();
  while (input.has_more()) edit(files, spots, input);
  if ((flags & 1) != 0) seal_all(files, (flags & 2) != 0);
  const std::string path = root.path() + "/pool";
  write_files(path, files);
  allowing_errors([&] { read_every_way(path); });
  allowing_errors([&] { copy(path); });
  allowing_errors([&] { plan_repair(path); });
  allowing_errors([&] { train_a_step(path); });
}

}  // namespace holdfast::fuzz
