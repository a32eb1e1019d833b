// Every persistent structure of a pool. docs/FORMAT.md explains them; a test compares its tables with this file.
//
// Invariants
// - Little-endian, naturally aligned, no implicit padding: each struct's size and last field are asserted.
// - Each struct ends in a CRC-32C of all its bytes before `crc`. A struct whose magic or crc does not hold was
//   never written, or torn: it is not there. Since version 4 the CRC begins with the pool's identity (identity.h), but
//   for those that say whose they are: PoolHeader and FileLabel.
// - Positions in the log are logical: they only grow; offset in the ring = position % log_bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace holdfast::format {

inline constexpr std::uint32_t version = 5;  // the newest, of all new pools but the parts of an older group
inline constexpr std::uint32_t oldest_version = 1;
inline constexpr std::uint32_t log_store_version = 2;  // the oldest with a log store
inline constexpr std::uint32_t shards_version = 3;     // all of these are of pools of several writers
inline constexpr std::uint32_t identity_version = 4;   // the oldest whose files say whose they are
inline constexpr std::uint32_t first_touch_version = 5;  // the oldest whose log stores lay rows by first touch, densely
inline constexpr std::uint32_t max_shards = 4096;
inline constexpr std::uint64_t max_keyed_rows = 0xfffffffe;  // of a table with keys
inline constexpr std::size_t num_admission_chances = 16;
inline constexpr std::size_t num_stay_levels = 24;
inline constexpr std::uint32_t max_stay_steps = 1 << 24;
inline constexpr std::size_t block_bytes = 4096;  // nothing that is rewritten shares a block with anything else
inline constexpr std::size_t line_bytes = 64;  // log records and dense tensors are aligned to this
inline constexpr std::size_t sector_bytes = 512;  // what a block device writes atomically
inline constexpr std::uint64_t no_position = ~std::uint64_t{0};

inline constexpr std::uint64_t magic_of(const char (&text)[9]) {
  std::uint64_t magic = 0;
  for (int i = 0; i < 8; ++i) {
    magic |= static_cast<std::uint64_t>(static_cast<unsigned char>(text[i])) << (8 * i);
  }
  return magic;
}

inline constexpr std::uint64_t pool_magic = magic_of("HOLDFAST");
inline constexpr std::uint64_t table_magic = magic_of("HFTABLE\n");
inline constexpr std::uint64_t epoch_magic = magic_of("HFEPOCH\n");
inline constexpr std::uint64_t commit_magic = magic_of("HFCOMMIT");
inline constexpr std::uint64_t record_magic = magic_of("HFRECORD");
inline constexpr std::uint64_t dense_magic = magic_of("HFDENSE\n");
inline constexpr std::uint64_t row_log_checkpoint_magic = magic_of("HFCHECKP");
inline constexpr std::uint64_t row_log_record_magic = magic_of("HFROWLOG");
inline constexpr std::uint64_t shards_magic = magic_of("HFSHARDS");
inline constexpr std::uint64_t home_addresses_magic = magic_of("HFADDRES");
inline constexpr std::uint64_t label_magic = magic_of("HFLABEL\n");

enum class Level : std::uint32_t { process = 0, power = 1 };
enum class Store : std::uint32_t { in_place = 0, log = 1 };  // log: since version 2
enum class IdMap : std::uint32_t { identity = 0, hashed = 1, dynamic = 2 };  // hashed is not written so far
enum class KeyKind : std::uint32_t { none = 0, int64 = 1 };
enum class FileKind : std::uint32_t {
  log = 0,
  row_log = 1,
  weights = 2,
  state = 3,
  touched = 4,
  checksums = 5,
  home = 6,  // in pools before version 5
  packed_home = 7,
  home_addresses = 8,
};

// pool.holdfast, offset 0. Written at creation, in a new file that is renamed over the old one; never changed in place.
struct PoolHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t level;  // Level
  std::uint8_t uuid[16];
  std::uint64_t seed;  // rows' initial values are a function of (seed, table, row)
  std::uint64_t log_bytes;  // the log's size at creation; it may have grown since
  std::uint32_t num_tables;
  std::uint32_t num_shards;
  std::uint32_t num_writers;
  std::uint32_t row_checksums;  // 0: rows rest on the medium's own checksums
  std::uint64_t created_unix_ns;
  std::uint32_t store;  // Store
  std::uint32_t has_shards;  // since version 4: there is a ShardsRecord
  std::uint8_t group_uuid[16];  // since version 4: of the group of which this pool is a part; zeros: of none
  std::uint8_t reserved[156];
  std::uint32_t crc;
};
static_assert(sizeof(PoolHeader) == 256 && offsetof(PoolHeader, crc) == 252);

// Since version 4, in a block of its own: the first of log-NNNN, which grows, the last of the other files of rows and
// records, which keep their size. Written once, at creation.
struct FileLabel {
  std::uint64_t magic;
  std::uint8_t uuid[16];  // of the pool; of rows in shards: of the group
  std::uint32_t kind;  // FileKind
  std::uint32_t table;
  std::uint32_t shard;
  std::uint8_t reserved[24];
  std::uint32_t crc;
};
static_assert(sizeof(FileLabel) == 64 && offsetof(FileLabel, crc) == 60);

inline constexpr std::uint8_t boot_id_byte_of_failed_sync = 0xff;  // all 16 of them

// pool.holdfast, blocks 1 and 2 by turns: the newer valid one counts.
struct EpochRecord {
  std::uint64_t magic;
  std::uint64_t epoch;
  std::uint8_t boot_id[16];  // of the machine when the pool was opened; of no machine: a sync failed
  std::uint32_t clean;  // 1: closed and synced
  std::uint32_t has_steps;  // 1: it says the steps that follow
  std::uint64_t step;  // clean: of the newest commit record; else: that this life went back to, before it did
  std::uint64_t dense_step;  // clean: of the newest dense slot, or no_position; else 0
  std::uint32_t process_id;
  std::uint32_t crc;
};
static_assert(sizeof(EpochRecord) == 64 && offsetof(EpochRecord, crc) == 60);

// pool.holdfast, blocks 3 and 4 by turns: the one with the greater (epoch, step) counts.
struct CommitRecord {
  std::uint64_t magic;
  std::uint64_t epoch;
  std::uint64_t step;  // rows are at the end of this step
  std::uint64_t cursor;  // samples consumed by committed steps
  std::uint64_t row_updates;  // the row optimizer's step
  std::uint64_t log_head;  // where the record after this step's last begins
  std::uint64_t log_tail;  // nothing before this position is needed
  std::uint64_t last_record;  // position of the newest record at or before this step, or no_position
  std::uint64_t last_record_step;  // with no_position: the step at whose end this life began
  std::uint32_t last_record_crc;  // the chain: 0 with no_position
  std::uint8_t reserved[44];
  std::uint32_t padding;
  std::uint32_t crc;
};
static_assert(sizeof(CommitRecord) == 128 && offsetof(CommitRecord, crc) == 124);

// pool.holdfast, from block 5: one for each table, in order.
struct TableRecord {
  std::uint64_t magic;
  std::uint64_t num_embeddings;
  std::uint32_t embedding_dim;
  std::uint32_t dtype;  // RowDtype
  std::uint32_t optimizer;  // RowOptimizer
  std::uint32_t state_floats;  // of the optimizer, and 4 of the row's key
  std::uint32_t id_map;  // IdMap; dynamic: rows have keys, and are told apart by them
  std::uint32_t pooling;  // Pooling
  float init_low;
  float init_high;
  char name[256];  // UTF-8, filled with zeros
  std::uint32_t number;  // 1 + the table's; 0 in pools that were made before it was written
  std::uint32_t first_shard;  // of a whole table: the one with its rows; of a split one: what it is turned by
  std::uint32_t table_shards;  // 0: of a pool without shards; 1: whole; else num_shards: split over all of them
  std::uint32_t keys;  // KeyKind: what the rows of a table with id_map dynamic are found by
  std::uint64_t ttl_steps;  // of a table with keys: see KeyPolicy
  std::uint64_t max_keys;
  std::uint32_t admit_after;
  std::uint32_t turned_away[num_admission_chances];  // see KeyAdmission; zeros: every occurrence admits
  std::uint32_t stay[num_stay_levels];  // see KeyStay
  std::uint8_t reserved[8];
  std::uint32_t crc;
};
static_assert(sizeof(TableRecord) == 512 && offsetof(TableRecord, crc) == 508);

// pool.holdfast, in the block after the table records, since version 3: which shards this writer owns.
struct ShardsRecord {
  std::uint64_t magic;
  std::uint8_t group_uuid[16];  // of the pool that the shards are of
  std::uint8_t owned[512];  // bit s % 8 of byte s / 8
  std::uint8_t reserved[484];
  std::uint32_t crc;
};
static_assert(sizeof(ShardsRecord) == 1024 && offsetof(ShardsRecord, crc) == 1020);
static_assert(sizeof(ShardsRecord::owned) * 8 == max_shards);

// log-NNNN, at record positions: the before-images of one capture. `crc` is the flag: it is written after the
// payload is durable.
struct RecordHeader {
  std::uint64_t magic;
  std::uint64_t epoch;
  std::uint64_t step;  // the step that is going to overwrite these rows
  std::uint64_t position;  // of this record
  std::uint64_t bytes;  // header, sections and payload, a multiple of line_bytes
  std::uint64_t previous;  // position of the record before this one in the chain, or no_position
  std::uint64_t previous_step;
  std::uint32_t previous_crc;
  std::uint32_t num_sections;
  std::uint32_t payload_crc;  // of the bytes after the header
  std::uint8_t reserved[52];
  std::uint32_t padding;
  std::uint32_t crc;
};
static_assert(sizeof(RecordHeader) == 128 && offsetof(RecordHeader, crc) == 124);

// After a RecordHeader: where one table's rows lie in the record. Offsets count from the record's first byte.
struct RecordSection {
  std::uint32_t table;
  std::uint32_t shard;
  std::uint64_t num_rows;
  std::uint64_t rows_offset;  // uint64 per row: the row number; bit 63: the row was untouched
  std::uint64_t weights_offset;  // num_rows × embedding_dim × element size
  std::uint64_t state_offset;  // num_rows × state_floats × 4
  std::uint8_t reserved[24];
};
static_assert(sizeof(RecordSection) == 64);

// dense-0 and dense-1, offset 0; the payload begins at block 1: the structure (JSON), then, aligned to line_bytes,
// the tensors' bytes. `crc` is the flag, as in the log.
struct DenseHeader {
  std::uint64_t magic;
  std::uint64_t epoch;
  std::uint64_t step;
  std::uint64_t cursor;
  std::uint64_t row_updates;
  std::uint64_t structure_bytes;
  std::uint64_t tensors_bytes;
  std::uint32_t payload_crc;
  std::uint8_t uuid[16];  // of the pool, since version 4
  std::uint8_t reserved[44];
  std::uint32_t padding;
  std::uint32_t crc;
};
static_assert(sizeof(DenseHeader) == 128 && offsetof(DenseHeader, crc) == 124);

// row-log-NNNN, blocks 0 and 1 by turns: the valid one with the greater sequence counts.
struct RowLogCheckpoint {
  std::uint64_t magic;
  std::uint64_t epoch;
  std::uint64_t sequence;  // of this checkpoint, over all lives
  std::uint64_t tail;  // records before this position are home, or dropped
  std::uint64_t head;  // where the first record after `last_record` is looked for
  std::uint64_t merged_step;  // no recovery goes back before it: see LogStore
  std::uint64_t last_record;  // position of the newest record that was durable, or no_position; may be before tail
  std::uint64_t last_record_step;
  std::uint32_t last_record_crc;
  std::uint32_t padding;
  std::uint64_t last_record_cursor;
  std::uint64_t last_record_row_updates;
  std::uint64_t home_rows;  // 1 + how many rows are home, at least, as home-bits-0000 or .addresses say; 0: unknown
  std::uint8_t reserved[28];
  std::uint32_t crc;
};
static_assert(sizeof(RowLogCheckpoint) == 128 && offsetof(RowLogCheckpoint, crc) == 124);

// row-log-NNNN, at record positions: the new versions of the rows that one step updated.
struct RowLogHeader {
  std::uint64_t magic;
  std::uint64_t epoch;
  std::uint64_t step;
  std::uint64_t position;  // of this record
  std::uint64_t bytes;  // header, sections, row numbers and images, a multiple of block_bytes
  std::uint64_t durable;  // everything before this position was durable when the record was written
  std::uint64_t previous;  // position of the record before this one in the chain, or no_position
  std::uint64_t previous_step;
  std::uint32_t previous_crc;
  std::uint32_t num_sections;
  std::uint32_t rows_crc;  // of sections and row numbers: of the bytes from the header's end up to images_offset
  std::uint32_t images_crc;  // of the bytes from images_offset to the end
  std::uint64_t images_offset;  // of the first image, a multiple of sector_bytes
  std::uint64_t cursor;  // samples consumed by committed steps
  std::uint64_t row_updates;  // the row optimizer's step
  std::uint64_t previous_cursor;
  std::uint64_t previous_row_updates;
  std::uint8_t reserved[4];
  std::uint32_t crc;
};
static_assert(sizeof(RowLogHeader) == 128 && offsetof(RowLogHeader, crc) == 124);

// After a RowLogHeader: where one table's rows lie in the record. Offsets count from the record's first byte.
struct RowLogSection {
  std::uint32_t table;
  std::uint32_t shard;
  std::uint64_t num_rows;
  std::uint64_t rows_offset;  // uint64 per row: the row number, ascending
  std::uint64_t images_offset;  // row images, packed in sectors
  std::uint8_t reserved[32];
};
static_assert(sizeof(RowLogSection) == 64);

// table-NNNN.addresses, offset 0, since version 5 in a log store: how many of the rows that it names count.
struct HomeAddressesHeader {
  std::uint64_t magic;
  std::uint64_t count;
  std::uint32_t own_seed;  // 1: checksums go on from a seed of the file's own; 0: from the pool's, as they did at first
  std::uint8_t reserved[40];
  std::uint32_t crc;
};
static_assert(sizeof(HomeAddressesHeader) == 64 && offsetof(HomeAddressesHeader, crc) == 60);

// Blocks of pool.holdfast.
inline constexpr std::size_t header_offset = 0;
inline constexpr std::size_t epoch_offset[2] = {1 * block_bytes, 2 * block_bytes};
inline constexpr std::size_t commit_offset[2] = {3 * block_bytes, 4 * block_bytes};
inline constexpr std::size_t tables_offset = 5 * block_bytes;
inline constexpr std::size_t dense_payload_offset = block_bytes;

inline constexpr std::size_t label_bytes = block_bytes;

// Blocks of row-log-NNNN.
inline constexpr std::size_t row_log_checkpoint_offset[2] = {0, block_bytes};
inline constexpr std::size_t row_log_ring_offset = 2 * block_bytes;

constexpr std::size_t align_up(std::size_t bytes, std::size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}
constexpr std::size_t line_up(std::size_t bytes) { return align_up(bytes, line_bytes); }
// Of the ShardsRecord, where there is one.
constexpr std::size_t shards_offset(std::size_t num_tables) {
  return align_up(tables_offset + num_tables * sizeof(TableRecord), block_bytes);
}
constexpr std::size_t pool_file_bytes(std::size_t num_tables, bool has_shards) {
  return shards_offset(num_tables) + (has_shards ? block_bytes : 0);
}
inline bool has_shards(const PoolHeader& header) {
  return header.version >= identity_version ? header.has_shards != 0 : header.version >= shards_version;
}

template <class T>
concept Persistent = std::is_trivially_copyable_v<T> && std::is_standard_layout_v<T>;

}  // namespace holdfast::format
