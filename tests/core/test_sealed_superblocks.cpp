// A superblock whose checksums hold and whose contents make no sense: each field is refused, by whoever opens the pool and
// by whoever only reads it, with the right class of error, and nothing is changed.
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "base/error.h"
#include "check.h"
#include "layout/superblock.h"
#include "pool/pool.h"
#include "readers/reader.h"
#include "scripted_run.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

using Bytes = std::vector<char>;

Bytes bytes_at(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_at(const std::string& path, const Bytes& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

template <format::Persistent T>
T taken(const Bytes& image, std::size_t offset) {
  T value;
  std::memcpy(&value, image.data() + offset, sizeof(T));
  return value;
}

template <format::Persistent T>
void put_sealed(Bytes& image, std::size_t offset, T value, std::uint32_t seed) {
  value.crc = crc_of(value, seed);
  std::memcpy(image.data() + offset, &value, sizeof(T));
}

// A pool with a superblock that tests change, always from the one that it was made with.
class Tampered {
 public:
  explicit Tampered(bool has_shards) {
    PoolOptions options{1, 64 << 10};
    auto tables = Script{}.tables;
    if (has_shards) {
      options.sharding = Sharding{4, {0, 1, 2, 3}, {7}};
      for (auto& table : tables) table.table_shards = 4;
    }
    std::filesystem::create_directories(pool_);
    Pool::create(pool_, options, tables);
    image_ = bytes_at(path());
    header_ = taken<format::PoolHeader>(image_, format::header_offset);
    seed_ = Superblock::identity_of(header_).seed();
  }

  void header(const char* what, ErrorKind kind, const std::function<void(format::PoolHeader&)>& change) {
    Bytes image = image_;
    format::PoolHeader changed = header_;
    change(changed);
    put_sealed(image, format::header_offset, changed, 0);
    refused(what, kind, image);
  }
  // because: words of the error, where others are of that kind, too.
  void table(const char* what, ErrorKind kind, const std::function<void(format::TableRecord&)>& change,
             const char* because = "") {
    record<format::TableRecord>(what, kind, format::tables_offset + sizeof(format::TableRecord), change, because);
  }
  void shards(const char* what, ErrorKind kind, const std::function<void(format::ShardsRecord&)>& change) {
    record<format::ShardsRecord>(what, kind, format::shards_offset(header_.num_tables), change);
  }
  void bytes(const char* what, ErrorKind kind, const std::function<void(Bytes&)>& change) {
    Bytes image = image_;
    change(image);
    refused(what, kind, image);
  }

 private:
  std::string path() const { return pool_ + "/pool.holdfast"; }

  template <format::Persistent T>
  void record(const char* what, ErrorKind kind, std::size_t offset, const std::function<void(T&)>& change,
              const char* because = "") {
    Bytes image = image_;
    T changed = taken<T>(image_, offset);
    change(changed);
    put_sealed(image, offset, changed, seed_);
    refused(what, kind, image, because);
  }

  void refused(const char* what, ErrorKind kind, const Bytes& image, const char* because = "") {
    check::context = what;
    write_at(path(), image);
    CHECK(kind_thrown_by([&] { Reader reader(pool_); }) == kind);
    try {
      Reader reader(pool_);
    } catch (const Error& error) {
      CHECK(std::string(error.what()).find(because) != std::string::npos);
    }
    CHECK(kind_thrown_by([&] { Pool pool(pool_, {}); }) == kind);
    CHECK(bytes_at(path()) == image);
  }

  TemporaryDirectory directory_;
  const std::string pool_ = directory_.path() + "/writers-0001/0000";  // whose shards lie two directories above
  Bytes image_;
  format::PoolHeader header_;
  std::uint32_t seed_;
};

void headers_that_make_no_sense_are_refused() {
  using Header = format::PoolHeader;
  Tampered pool(false);
  pool.header("another magic", ErrorKind::format_mismatch, [](Header& h) { h.magic ^= 1; });
  pool.header("version 0", ErrorKind::format_mismatch, [](Header& h) { h.version = 0; });
  pool.header("a version to come", ErrorKind::format_mismatch, [](Header& h) { h.version = format::version + 1; });
  pool.header("more tables than fit", ErrorKind::corrupted, [](Header& h) { h.num_tables = 1000; });
  pool.header("several writers", ErrorKind::format_mismatch, [](Header& h) { h.num_writers = 2; });
  pool.header("shards without their record", ErrorKind::format_mismatch, [](Header& h) { h.num_shards = 2; });
  pool.header("a record of shards that is not there", ErrorKind::corrupted, [](Header& h) { h.has_shards = 1; });
  pool.header("row checksums to come", ErrorKind::format_mismatch, [](Header& h) { h.row_checksums = 2; });
  pool.header("another store", ErrorKind::corrupted, [](Header& h) { h.store = 9; });
  pool.header("another level", ErrorKind::corrupted, [](Header& h) { h.level = 9; });
  pool.bytes("a header that does not hold", ErrorKind::corrupted, [](Bytes& image) { image[40] ^= 1; });
  pool.bytes("a file without a header", ErrorKind::format_mismatch, [](Bytes& image) { image.resize(100); });
  Tampered cut(true);
  cut.header("shards that are no power of two", ErrorKind::corrupted, [](Header& h) { h.num_shards = 3; });
  cut.header("too many shards", ErrorKind::corrupted, [](Header& h) { h.num_shards = 1 << 20; });
}

void tables_that_make_no_sense_are_refused() {
  using Table = format::TableRecord;
  Tampered pool(false);
  pool.table("no rows", ErrorKind::corrupted, [](Table& t) { t.num_embeddings = 0; });
  pool.table("too many rows", ErrorKind::corrupted, [](Table& t) { t.num_embeddings = ~std::uint64_t{0}; });
  pool.table("no width", ErrorKind::corrupted, [](Table& t) { t.embedding_dim = 0; });
  pool.table("too wide", ErrorKind::corrupted, [](Table& t) { t.embedding_dim = 5000; });
  pool.table("another dtype", ErrorKind::corrupted, [](Table& t) { t.dtype = 9; });
  pool.table("another optimizer", ErrorKind::corrupted, [](Table& t) { t.optimizer = 99; });
  pool.table("another optimizer's state", ErrorKind::corrupted, [](Table& t) { ++t.state_floats; });
  pool.table("another pooling", ErrorKind::corrupted, [](Table& t) { t.pooling = 2; });
  pool.table("an id map to come", ErrorKind::format_mismatch, [](Table& t) { t.id_map = 1; });
  pool.table("a name without end", ErrorKind::corrupted, [](Table& t) { std::memset(t.name, 'a', sizeof(t.name)); });
  pool.table("shards in a pool without", ErrorKind::corrupted, [](Table& t) { t.table_shards = 1; });
  pool.table("another table's number", ErrorKind::corrupted, [](Table& t) { t.number = 1; });
  Tampered cut(true);
  cut.table("whole, in a shard beyond all", ErrorKind::corrupted, [](Table& t) {
    t.table_shards = 1;
    t.first_shard = 4;
  });
  cut.table("split over others", ErrorKind::corrupted, [](Table& t) { t.table_shards = 2; });
  cut.table("turned by more than there are", ErrorKind::corrupted, [](Table& t) { t.first_shard = 4; });
  const auto gets_keys = [](Table& t) {
    t.id_map = static_cast<std::uint32_t>(format::IdMap::dynamic);
    t.keys = static_cast<std::uint32_t>(format::KeyKind::int64);
    t.state_floats += key_record_floats;
  };
  cut.table(
      "keys in more places than 32 bits number", ErrorKind::corrupted,
      [&](Table& t) {
        gets_keys(t);
        t.num_embeddings = format::max_keyed_rows;
      },
      "impossible number of rows for a table with keys");
  const auto with_keys = [&](const char* what, const char* words, const std::function<void(Table&)>& change) {
    const auto changed = [&](Table& t) {
      gets_keys(t);
      change(t);
    };
    cut.table(what, ErrorKind::corrupted, changed, words);
  };
  with_keys("fewer keys than shards", "fewer keys than shards", [](Table& t) { t.max_keys = 3; });
  with_keys("a key is never admitted", "a table that never admits a key",
            [](Table& t) { t.turned_away[format::num_admission_chances - 1] = 0xffffffff; });
  with_keys("keys stay for ages", "impossible steps for keys to stay",
            [](Table& t) { t.stay[format::num_stay_levels - 1] = format::max_stay_steps + 1; });
  with_keys("keys that are updated get older", "impossible steps for keys to stay", [](Table& t) { t.stay[0] = 1; });
}

void records_that_make_no_sense_are_refused() {
  using Shards = format::ShardsRecord;
  Tampered cut(true);
  cut.shards("shards that the pool does not have", ErrorKind::corrupted, [](Shards& s) { s.owned[0] = 0xff; });
  cut.shards("another group's shards", ErrorKind::corrupted, [](Shards& s) { s.group_uuid[0] ^= 1; });
  cut.shards("no record of shards", ErrorKind::corrupted, [](Shards& s) { s.magic = 0; });
  Tampered pool(false);
  const auto clear = [](Bytes& image, const std::size_t (&offsets)[2]) {
    for (const std::size_t offset : offsets) image[offset] ^= 1;
  };
  pool.bytes("no commit record", ErrorKind::corrupted, [&](Bytes& image) { clear(image, format::commit_offset); });
  pool.bytes("no epoch record", ErrorKind::corrupted, [&](Bytes& image) { clear(image, format::epoch_offset); });
}

}  // namespace
}  // namespace holdfast

int main() {
  holdfast::headers_that_make_no_sense_are_refused();
  holdfast::tables_that_make_no_sense_are_refused();
  holdfast::records_that_make_no_sense_are_refused();
  return check::passed();
}
