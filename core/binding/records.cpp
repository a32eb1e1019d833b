#include "binding/records.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "binding/module.h"
#include "kernels/kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

// A rule of a table with keys by numbers, which are all zeros where nothing is said.
template <std::size_t num>
std::vector<std::uint32_t> given_in(const std::uint32_t (&numbers)[num]) {
  if (std::ranges::count(numbers, 0U) == static_cast<std::ptrdiff_t>(num)) return {};
  return {std::begin(numbers), std::end(numbers)};
}

template <std::size_t num>
void give(const std::vector<std::uint32_t>& given, std::uint32_t (&numbers)[num], const TableSpec& spec,
          const char* what) {
  if (!given.empty() && given.size() != num) {
    throw Error(ErrorKind::config, "table '" + spec.name + "': " + what + " has " + std::to_string(given.size()) +
                                       " numbers, not " + std::to_string(num));
  }
  std::ranges::copy(given, numbers);
}

TableSpec spec_of(const format::TableRecord& record) {
  return {record.name,          record.num_embeddings, record.embedding_dim,
          record.dtype,         record.optimizer,      record.pooling,
          record.init_low,      record.init_high,      record.first_shard,
          record.table_shards,  record.keys,           record.ttl_steps,
          record.max_keys,      record.admit_after,    given_in(record.turned_away),
          given_in(record.stay)};
}

}  // namespace

format::TableRecord record_of(const TableSpec& spec) {
  format::TableRecord record{};
  if (spec.name.size() >= sizeof(record.name)) {
    throw Error(ErrorKind::config,
                "table name '" + spec.name + "' is longer than " + std::to_string(sizeof(record.name) - 1) + " bytes");
  }
  record.num_embeddings = spec.num_embeddings;
  record.embedding_dim = spec.embedding_dim;
  record.dtype = spec.dtype;
  record.optimizer = spec.optimizer;
  record.state_floats = state_floats_of(static_cast<RowOptimizer>(spec.optimizer), spec.embedding_dim);
  record.pooling = spec.pooling;
  record.init_low = spec.init_low;
  record.init_high = spec.init_high;
  record.first_shard = spec.first_shard;
  record.table_shards = spec.table_shards;
  record.keys = spec.keys;
  record.ttl_steps = spec.ttl_steps;
  record.max_keys = spec.max_keys;
  record.admit_after = spec.admit_after;
  give(spec.turned_away, record.turned_away, spec, "turned_away");
  give(spec.stay, record.stay, spec, "stay");
  if (spec.keys != static_cast<std::uint32_t>(format::KeyKind::none)) {
    record.id_map = static_cast<std::uint32_t>(format::IdMap::dynamic);
    record.state_floats += key_record_floats;
  }
  std::memcpy(record.name, spec.name.data(), spec.name.size());
  return record;
}

std::vector<TableSpec> specs_of(const std::vector<format::TableRecord>& records) {
  std::vector<TableSpec> specs;
  for (const auto& record : records) specs.push_back(spec_of(record));
  return specs;
}

nb::bytes to_bytes(std::span<const std::byte> data) { return nb::bytes(data.data(), data.size()); }

nb::dict to_dict(const format::PoolHeader& header, format::Level level) {
  nb::dict out;
  out["format_version"] = header.version;
  const auto name = [](format::Level of) { return of == format::Level::power ? "power" : "process"; };
  out["level"] = name(level);
  out["level_at_creation"] = name(static_cast<format::Level>(header.level));
  out["uuid"] = to_bytes({reinterpret_cast<const std::byte*>(header.uuid), sizeof(header.uuid)});
  out["group_uuid"] = to_bytes({reinterpret_cast<const std::byte*>(header.group_uuid), sizeof(header.group_uuid)});
  out["seed"] = header.seed;
  out["log_bytes"] = header.log_bytes;
  out["store"] = header.store == 0 ? "in place" : "log";
  out["num_tables"] = header.num_tables;
  out["num_shards"] = header.num_shards;
  out["num_writers"] = header.num_writers;
  out["row_checksums"] = header.row_checksums != 0;
  out["created_unix_ns"] = header.created_unix_ns;
  return out;
}

nb::dict to_dict(const format::CommitRecord& commit) {
  nb::dict out;
  out["epoch"] = commit.epoch;
  out["step"] = commit.step;
  out["cursor"] = commit.cursor;
  out["row_updates"] = commit.row_updates;
  out["log_head"] = commit.log_head;
  out["log_tail"] = commit.log_tail;
  return out;
}

nb::dict to_dict(const Traffic& traffic) {
  nb::dict out;
  out["rows_hit"] = traffic.rows_hit;
  out["rows_missed"] = traffic.rows_missed;
  out["demand_fetches"] = traffic.demand_fetches;
  out["window_shrunk"] = traffic.window_shrunk;
  out["stall_seconds"] = traffic.stall_seconds;
  out["log_stall_seconds"] = traffic.log_stall_seconds;
  out["rows_fetched"] = traffic.rows_fetched;
  out["rows_from_log"] = traffic.rows_from_log;
  out["rows_from_victims"] = traffic.rows_from_victims;
  out["victim_rows"] = traffic.victim_rows;
  out["rows_initial"] = traffic.rows_initial;
  out["fetched_bytes"] = traffic.fetched_bytes;
  out["fetch_reads"] = traffic.fetch_reads;
  out["updated_rows"] = traffic.updated_rows;
  out["updated_row_bytes"] = traffic.updated_row_bytes;
  out["appended_bytes"] = traffic.appended_bytes;
  out["merges"] = traffic.merges;
  out["merged_bytes"] = traffic.merged_bytes;
  out["standing_bytes"] = traffic.standing_bytes;
  out["log_bytes_read"] = traffic.log_bytes_read;
  out["home_bytes_read"] = traffic.home_bytes_read;
  out["home_bytes_written"] = traffic.home_bytes_written;
  out["merge_log_reads"] = traffic.merge_log_reads;
  out["merge_reads"] = traffic.merge_reads;
  out["merge_writes"] = traffic.merge_writes;
  out["index_entries"] = traffic.index_entries;
  out["index_bytes"] = traffic.index_bytes;
  out["scratchpad_rows"] = traffic.scratchpad_rows;
  out["rows_warmed"] = traffic.rows_warmed;
  out["is_warming"] = traffic.is_warming ? 1 : 0;
  return out;
}

nb::dict to_dict(const Dial::Counts& counts) {
  nb::dict out;
  out["read_requests"] = counts.work.read_requests;
  out["read_granules"] = counts.work.read_granules;
  out["write_requests"] = counts.work.write_requests;
  out["written_granules"] = counts.work.written_granules;
  out["stream_read_bytes"] = counts.work.stream_read_bytes;
  out["stream_written_bytes"] = counts.work.stream_written_bytes;
  out["syncs"] = counts.work.syncs;
  out["declared_s"] = counts.declared_s;
  out["waited_s"] = counts.waited_s;
  out["late_s"] = counts.late_s;
  return out;
}

void bind_records(nb::module_& m) {
  nb::class_<TableSpec>(m, "TableSpec", "One table as the pool keeps it; dtype, optimizer and pooling by number.")
      .def(
          "__init__",
          [](TableSpec* self, std::string name, std::uint64_t num_embeddings, std::uint32_t embedding_dim,
             std::uint32_t dtype, std::uint32_t optimizer, std::uint32_t pooling, float init_low, float init_high,
             std::uint32_t first_shard, std::uint32_t table_shards, std::uint32_t keys, std::uint64_t ttl_steps,
             std::uint64_t max_keys, std::uint32_t admit_after, std::vector<std::uint32_t> turned_away,
             std::vector<std::uint32_t> stay) {
            new (self) TableSpec{std::move(name), num_embeddings, embedding_dim,
                                 dtype,           optimizer,      pooling,
                                 init_low,        init_high,      first_shard,
                                 table_shards,    keys,           ttl_steps,
                                 max_keys,        admit_after,    std::move(turned_away),
                                 std::move(stay)};
          },
          nb::kw_only(), "name"_a, "num_embeddings"_a, "embedding_dim"_a, "dtype"_a, "optimizer"_a, "pooling"_a,
          "init_low"_a, "init_high"_a, "first_shard"_a = 0, "table_shards"_a = 0, "keys"_a = 0, "ttl_steps"_a = 0,
          "max_keys"_a = 0, "admit_after"_a = 0, "turned_away"_a = std::vector<std::uint32_t>(),
          "stay"_a = std::vector<std::uint32_t>(),
          "table_shards: 0 in a pool without shards, 1 for a whole table in first_shard, else all of the pool's. "
          "keys: 0 where ids are row numbers, 1 where they are keys of 64 bits. turned_away: of a key's occurrences 1 "
          "to "
          "16, the chance that it is not admitted, in units of 2^-32, or none: it is. stay: the "
          "steps that a key of 2^i updates or more stays longer, i from 0 to 23, or none.")
      .def_ro("name", &TableSpec::name)
      .def_ro("num_embeddings", &TableSpec::num_embeddings)
      .def_ro("embedding_dim", &TableSpec::embedding_dim)
      .def_ro("dtype", &TableSpec::dtype)
      .def_ro("optimizer", &TableSpec::optimizer)
      .def_ro("pooling", &TableSpec::pooling)
      .def_ro("init_low", &TableSpec::init_low)
      .def_ro("init_high", &TableSpec::init_high)
      .def_ro("first_shard", &TableSpec::first_shard)
      .def_ro("table_shards", &TableSpec::table_shards)
      .def_ro("keys", &TableSpec::keys)
      .def_ro("ttl_steps", &TableSpec::ttl_steps)
      .def_ro("max_keys", &TableSpec::max_keys)
      .def_ro("admit_after", &TableSpec::admit_after)
      .def_ro("turned_away", &TableSpec::turned_away)
      .def_ro("stay", &TableSpec::stay);
}

}  // namespace holdfast
