#include "routing/router.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>
#include <stdexcept>
#include <utility>

#include "base/error.h"
#include "keys/key_shards.h"
#include "routing/numbered_ids.h"

namespace holdfast {
namespace {

constexpr std::uint64_t max_count = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint32_t no_bag = std::numeric_limits<std::uint32_t>::max();

// One owner's share of a feature, while it is counted.
struct Tally {
  std::uint32_t last_bag = no_bag;
  std::uint32_t bags = 0;
  std::uint32_t ids = 0;
};

// Where what one owner gets of a feature is written next.
struct Cursor {
  std::uint32_t* place;
  std::uint32_t* length;       // of the bag that was begun last
  std::uint32_t* next_length;
  std::size_t length_step;     // 0 where lengths are left out: next_length is then a word that nobody reads
  std::uint32_t* weight;
  std::uint32_t source;  // of the next id's gradient of its weight
  std::uint32_t* bag;
  std::uint32_t last_bag;

  void begin_bag(std::uint32_t bag_) {
    last_bag = bag_;
    *bag++ = bag_;
    length = next_length;
    next_length += length_step;
    *length = 0;
  }
};

void write_place(std::uint32_t*& to, std::uint64_t place, bool wide) {
  *to++ = static_cast<std::uint32_t>(place);
  if (wide) *to++ = static_cast<std::uint32_t>(place >> 32);
}

// Ids of a split table as they travel, and their shards: places of rows, or keys.
struct Places {
  const ShardLayout& layout;
  std::uint64_t place_of(std::uint64_t id) const { return layout.place_of(id); }
  std::uint64_t shard_of(std::uint64_t place) const { return place >> layout.stride_bits & (layout.num_shards() - 1); }
};
struct Keys {
  const RouterSpec::Table& table;
  std::uint64_t place_of(std::uint64_t key) const { return key; }
  std::uint64_t shard_of(std::uint64_t key) const { return key_shard(table.key_seed, key, table.layout.num_shards()); }
};

template <class Body>
auto with_shards(const RouterSpec::Table& table, const Body& body) {
  return table.has_keys ? body(Keys{table}) : body(Places{table.layout});
}

// What travels of a split table's feature, in order, and what each owner gets of it. Returns the largest id.
template <class Shards>
std::uint64_t count_split(const RouterSpec& spec, const Shards& shards, const JaggedIds& feature, std::uint64_t* place,
                          std::span<Tally> tallies) {
  const std::uint32_t* const owner_of = spec.owner_of_shard.data();
  std::uint64_t largest = 0;
  std::size_t num_ids = 0;
  with_offsets(feature, [&](auto offsets) {
    for (std::uint32_t bag = 0; bag < feature.num_bags; ++bag) {
      for (auto i = offsets[bag]; i < offsets[bag + 1]; ++i) {
        const std::uint64_t id = static_cast<std::uint64_t>(feature.ids[i]);  // a negative id becomes a huge one
        largest = std::max(largest, id);
        const std::uint64_t at = shards.place_of(id);
        place[num_ids++] = at;
        Tally& tally = tallies[owner_of[shards.shard_of(at)]];
        tally.bags += tally.last_bag != bag;
        tally.last_bag = bag;
        ++tally.ids;
      }
    }
  });
  return largest;
}

// The same of a whole table's feature, all of which one owner gets.
std::uint64_t count_whole(const JaggedIds& feature, Tally& tally) {
  std::uint64_t largest = 0;
  const auto ids = all_ids(feature);
  for (const std::int64_t id : ids) largest = std::max(largest, static_cast<std::uint64_t>(id));
  tally.ids = static_cast<std::uint32_t>(ids.size());
  with_offsets(feature, [&](auto offsets) {
    for (std::size_t bag = 0; bag < feature.num_bags; ++bag) tally.bags += offsets[bag + 1] != offsets[bag];
  });
  return largest;
}

// weights: of the batch's ids, where they are `weighted`. source: of the feature's.
template <bool weighted, class Shards>
void write_split(const RouterSpec& spec, const Shards& shards, const JaggedIds& feature, const std::uint64_t* place,
                 bool wide, std::span<Cursor> cursors, const float* weights, std::uint32_t* source) {
  const std::uint32_t* const owner_of = spec.owner_of_shard.data();
  with_offsets(feature, [&](auto offsets) {
    for (std::uint32_t bag = 0; bag < feature.num_bags; ++bag) {
      for (auto i = offsets[bag]; i < offsets[bag + 1]; ++i) {
        const std::uint64_t at = *place++;
        Cursor& cursor = cursors[owner_of[shards.shard_of(at)]];
        if (cursor.last_bag != bag) cursor.begin_bag(bag);
        ++*cursor.length;
        write_place(cursor.place, at, wide);
        if constexpr (weighted) {
          *cursor.weight++ = std::bit_cast<std::uint32_t>(weights[i]);
          *source++ = cursor.source++;
        }
      }
    }
  });
}

void write_whole(const JaggedIds& feature, bool wide, bool numbered, Cursor& cursor) {
  with_offsets(feature, [&](auto offsets) {
    for (std::uint32_t bag = 0; bag < feature.num_bags; ++bag) {
      if (offsets[bag + 1] == offsets[bag]) continue;
      cursor.begin_bag(bag);
      *cursor.length = static_cast<std::uint32_t>(offsets[bag + 1] - offsets[bag]);
    }
  });
  if (numbered) return;
  for (const std::int64_t id : all_ids(feature)) write_place(cursor.place, static_cast<std::uint64_t>(id), wide);
}

// 1 / length of the bags of which an owner has a part.
void write_factors(const JaggedIds& feature, std::span<const std::uint32_t> bags, std::uint32_t* to) {
  with_offsets(feature, [&](auto offsets) {
    for (const std::uint32_t bag : bags) {
      *to++ = std::bit_cast<std::uint32_t>(1.0f / static_cast<float>(offsets[bag + 1] - offsets[bag]));
    }
  });
}

[[noreturn]] void refuse(const std::string& what) { throw Error(ErrorKind::config, "router: " + what); }

void check(const RouterSpec& spec) {
  const std::size_t num_shards = spec.owner_of_shard.size();
  if (!std::has_single_bit(num_shards) || num_shards > max_shards) {
    refuse(std::to_string(num_shards) + " shards are no power of two up to " + std::to_string(max_shards));
  }
  for (const std::uint32_t owner : spec.owner_of_shard) {
    if (owner >= spec.num_owners) refuse("there is no owner " + std::to_string(owner));
  }
  for (const RouterSpec::Table& table : spec.tables) {
    if (table.layout.is_split() ? table.layout.num_shards() != num_shards : table.layout.first_shard >= num_shards) {
      refuse("a table is not laid out over " + std::to_string(num_shards) + " shards");
    }
  }
  for (const RouterSpec::Feature& feature : spec.features) {
    if (feature.table >= spec.tables.size()) refuse("feature '" + feature.name + "' reads no table");
  }
}

// Marks the vectors that are added to another one of their bag, and finds the bags that have none.
void mark_bags(Route& route, std::size_t f) {
  static thread_local std::vector<std::uint8_t> seen;
  seen.assign(route.num_bags, 0);
  const std::size_t num_features = route.spec->features.size();
  for (std::size_t o = 0; o < route.spec->num_owners; ++o) {
    std::uint32_t* const bag_of = route.bag_of.data() + route.first_vector[o * num_features + f];
    const std::size_t count = static_cast<std::size_t>(route.counts[o * num_features + f].bags);
    for (std::size_t v = 0; v < count; ++v) {
      std::uint8_t& had = seen[bag_of[v]];
      if (had != 0) bag_of[v] |= Route::adds_bit;
      had = 1;
    }
  }
  for (std::uint32_t bag = 0; bag < route.num_bags; ++bag) {
    if (seen[bag] == 0) route.empty_bags.push_back(bag);
  }
}

// Whether any bag is longer than one id: else its mean is its sum.
bool has_long_bags(const JaggedIds& feature) {
  return with_offsets(feature, [](auto offsets) {
    bool any = false;
    for (std::size_t bag = 0; bag + 1 < offsets.size(); ++bag) any |= offsets[bag + 1] - offsets[bag] > 1;
    return any;
  });
}

void add_scale(Route& route, const JaggedIds& feature) {
  with_offsets(feature, [&](auto offsets) {
    for (std::size_t bag = 0; bag < feature.num_bags; ++bag) {
      const auto length = offsets[bag + 1] - offsets[bag];
      route.scale.push_back(length == 0 ? 1.0f : 1.0f / static_cast<float>(length));
    }
  });
}

// Runs body; a BadId that it throws gets the feature's name.
template <class Body>
auto with_name(const RouterSpec& spec, std::size_t f, const Body& body) {
  try {
    return body();
  } catch (const BadId& bad) {
    throw BadId("feature '" + spec.features[f].name + "': " + bad.what(), f, bad.sample, bad.value);
  }
}

// Places of split tables' features into `places`, in order, and counts of everything. Throws BadId for ids that are no
// rows.
void count_ids(const std::vector<JaggedIds>& features, const std::vector<std::uint32_t>& number_in_table,
               std::uint64_t* places, Route& route) {
  const RouterSpec& spec = *route.spec;
  const std::size_t num_features = features.size();
  route.counts.assign(spec.num_owners * num_features, {0, 0, 0, 0});
  std::vector<Tally> tallies;
  for (std::size_t f = 0; f < num_features; ++f) {
    const RouterSpec::Table& table = spec.tables[spec.features[f].table];
    const ShardLayout& layout = table.layout;
    tallies.assign(spec.num_owners, {});
    const std::uint64_t largest =
        layout.is_split()
            ? with_shards(table, [&](auto shards) { return count_split(spec, shards, features[f], places, tallies); })
            : count_whole(features[f], tallies[spec.owner_of_shard[layout.first_shard]]);
    if (!table.has_keys && !all_ids(features[f]).empty() && largest >= layout.num_rows) {
      with_name(spec, f, [&] { throw_first_bad_id(features[f], number_in_table[f], layout.num_rows); });
    }
    if (layout.is_split()) places += all_ids(features[f]).size();
    for (std::size_t o = 0; o < spec.num_owners; ++o) {
      route.counts[o * num_features + f] = {tallies[o].bags, tallies[o].ids, route.weighted, 0};
    }
  }
}

// Numbers the ids of the parts whose messages do not get longer by it; `numbered` has these, by part. Ids of bags that
// have one each seldom come again, so they are not looked at.
void number_ids(const std::vector<JaggedIds>& features, const std::uint64_t* places, std::vector<NumberedIds>& numbered,
                Route& route) {
  const RouterSpec& spec = *route.spec;
  const std::size_t num_features = features.size();
  if (numbered.size() < route.counts.size()) numbered.resize(route.counts.size());
  static thread_local std::vector<std::int64_t> own;
  for (std::size_t f = 0; f < num_features; ++f) {
    const RouterSpec::Table& table = spec.tables[spec.features[f].table];
    const std::span<const std::int64_t> ids = all_ids(features[f]);
    const std::uint64_t* const of_feature = places;
    if (table.layout.is_split()) places += ids.size();
    if (table.has_keys) continue;
    for (std::size_t o = 0; o < spec.num_owners; ++o) {
      BagCounts& counts = route.counts[o * num_features + f];
      if (counts.ids == 0 || !counts.has_lengths()) continue;
      std::span<const std::int64_t> told = ids;
      if (table.layout.is_split()) {
        own.clear();
        for (std::size_t i = 0; i < ids.size(); ++i) {
          if (spec.owner_of_shard[table.layout.shard_of(of_feature[i])] != o) continue;
          own.push_back(static_cast<std::int64_t>(of_feature[i]));
        }
        told = own;
      }
      NumberedIds& of_part = numbered[o * num_features + f];
      of_part.number(told, table.end_id());
      if (of_part.num_distinct() > max_distinct) continue;
      BagCounts shorter = counts;
      shorter.distinct = of_part.num_distinct() & max_distinct;
      if (words_of_ids(shorter, table.end_id()) <= words_of_ids(counts, table.end_id())) counts = shorter;
    }
  }
}

// Of each part: the ids of those before it.
std::vector<std::uint32_t> ids_before(const std::vector<BagCounts>& counts) {
  std::vector<std::uint32_t> before(counts.size());
  std::uint32_t num_ids = 0;
  for (std::size_t part = 0; part < counts.size(); ++part) {
    before[part] = std::exchange(num_ids, num_ids + counts[part].ids);
  }
  return before;
}

// Where the parts of messages, blocks and bag_of begin. Returns each part's first word.
std::vector<std::size_t> lay_out(Route& route) {
  const RouterSpec& spec = *route.spec;
  const std::size_t num_features = spec.features.size();
  const std::size_t num_parts = route.counts.size();
  std::vector<std::size_t> first_word(num_parts);
  std::size_t num_words = 0;
  std::size_t num_vectors = 0;
  std::size_t num_floats = 0;
  route.first_vector.resize(num_parts);
  route.first_float.resize(num_parts);
  route.message_words.assign(spec.num_owners, 0);
  route.block_floats.assign(spec.num_owners, 0);
  for (std::size_t part = 0; part < num_parts; ++part) {
    const RouterSpec::Table& table = spec.tables[spec.features[part % num_features].table];
    const std::size_t vectors = static_cast<std::size_t>(route.counts[part].bags);
    const std::size_t words = message_words(route.counts[part], table.end_id(), spec.takes_mean(part % num_features));
    first_word[part] = std::exchange(num_words, num_words + words);
    route.first_vector[part] = std::exchange(num_vectors, num_vectors + vectors);
    route.first_float[part] = std::exchange(num_floats, num_floats + vectors * table.dim);
    route.message_words[part / num_features] += static_cast<std::int64_t>(words);
    route.block_floats[part / num_features] += static_cast<std::int64_t>(vectors * table.dim);
  }
  route.message.resize(num_words);
  route.bag_of.resize(num_vectors);
  return first_word;
}

// Messages, and bag_of without the marks.
void write_messages(const std::vector<JaggedIds>& features, const float* weights, const std::uint64_t* places,
                    const std::vector<NumberedIds>& numbered, const std::vector<std::size_t>& first_word,
                    Route& route) {
  const RouterSpec& spec = *route.spec;
  const std::size_t num_features = features.size();
  std::uint32_t* const message = reinterpret_cast<std::uint32_t*>(route.message.data());
  const std::vector<std::uint32_t> first_id = ids_before(route.counts);
  std::uint32_t* source = route.weight_source.data();
  std::uint32_t unread_length;
  static thread_local std::vector<std::uint32_t> unread_places;  // of split tables' parts that are numbered
  std::size_t most_ids = 0;
  for (const BagCounts& counts : route.counts) most_ids = std::max(most_ids, std::size_t{counts.ids});
  if (unread_places.size() < 2 * most_ids) unread_places.resize(2 * most_ids);
  std::vector<Cursor> cursors(spec.num_owners);
  for (std::size_t f = 0; f < num_features; ++f) {
    const RouterSpec::Table& table = spec.tables[spec.features[f].table];
    const ShardLayout& layout = table.layout;
    const bool wide = words_of_place(table.end_id()) == 2;
    for (std::size_t o = 0; o < spec.num_owners; ++o) {
      const std::size_t part = o * num_features + f;
      const BagCounts& counts = route.counts[part];
      std::uint32_t* const words = message + first_word[part];
      std::uint32_t* const ids = counts.has_lengths() ? words + counts.bags : words;
      std::uint32_t* place = ids;
      if (counts.distinct != 0) {
        numbered[part].write(counts, table.end_id(), ids);
        place = unread_places.data();
      }
      cursors[o] = {.place = place,
                    .length = nullptr,
                    .next_length = counts.has_lengths() ? words : &unread_length,
                    .length_step = counts.has_lengths(),
                    .weight = ids + words_of_ids(counts, table.end_id()),
                    .source = first_id[part],
                    .bag = route.bag_of.data() + route.first_vector[part],
                    .last_bag = no_bag};
    }
    const std::size_t num_ids = all_ids(features[f]).size();
    if (!layout.is_split()) {
      const std::uint32_t owner = spec.owner_of_shard[layout.first_shard];
      Cursor& cursor = cursors[owner];
      write_whole(features[f], wide, route.counts[owner * num_features + f].distinct != 0, cursor);
      if (route.weighted) {
        if (num_ids > 0) std::memcpy(cursor.weight, weights + route.spans[f].first, num_ids * sizeof(float));
        std::iota(source, source + num_ids, cursor.source);
      }
    } else {
      with_shards(table, [&](auto shards) {
        if (route.weighted) {
          write_split<true>(spec, shards, features[f], places, wide, cursors, weights, source);
        } else {
          write_split<false>(spec, shards, features[f], places, wide, cursors, weights, source);
        }
      });
    }
    if (layout.is_split()) places += num_ids;
    if (!route.weighted) continue;
    source += num_ids;
    if (!spec.takes_mean(f)) continue;
    for (std::size_t o = 0; o < spec.num_owners; ++o) {
      const std::size_t part = o * num_features + f;
      const std::size_t bags = static_cast<std::size_t>(route.counts[part].bags);
      write_factors(features[f], {route.bag_of.data() + route.first_vector[part], bags}, cursors[o].weight);
    }
  }
}

// Where the ids with weights are in the batch, and what belongs to the gradients of these.
void add_weights(Route& route, const std::vector<JaggedIds>& features) {
  route.weight_factor.clear();
  route.spans.clear();
  if (!route.weighted) return route.weight_source.clear();
  for (std::size_t f = 0; f < features.size(); ++f) {
    with_offsets(features[f], [&](auto offsets) {
      route.spans.emplace_back(static_cast<std::size_t>(offsets.front()), static_cast<std::size_t>(offsets.back()));
      for (std::size_t bag = 0; bag < features[f].num_bags; ++bag) {
        const std::size_t length = static_cast<std::size_t>(offsets[bag + 1] - offsets[bag]);
        const float factor = route.spec->takes_mean(f) ? 1.0f / static_cast<float>(length) : 1.0f;
        route.weight_factor.insert(route.weight_factor.end(), length, factor);
      }
    });
  }
  route.weight_source.resize(route.weight_factor.size());
}

}  // namespace

Router::Router(RouterSpec spec) {
  check(spec);
  std::vector<std::uint32_t> features_of(spec.tables.size());
  for (RouterSpec::Feature& feature : spec.features) {
    feature.column = static_cast<std::uint32_t>(spec.output_width);
    spec.output_width += spec.tables[feature.table].dim;
    number_in_table_.push_back(features_of[feature.table]++);
  }
  spec_ = std::make_shared<const RouterSpec>(std::move(spec));
}

std::shared_ptr<Route> Router::route(const BatchIds& batch, std::size_t first, std::size_t count) const {
  const RouterSpec& spec = *spec_;
  std::vector<JaggedIds> features;
  std::size_t num_ids = 0;
  std::size_t num_places = 0;
  for (std::size_t f = 0; f < spec.features.size(); ++f) {
    features.push_back(ids_of(batch, f, first, count));
    const std::size_t ids = with_name(spec, f, [&] { return checked_num_ids(features[f], number_in_table_[f]); });
    num_ids += ids;
    if (spec.tables[spec.features[f].table].layout.is_split()) num_places += ids;
  }
  if (num_ids > max_count || count > max_count / 2) {
    throw std::length_error("route: " + std::to_string(num_ids) + " ids in " + std::to_string(count) +
                            " samples are more than a route can number");
  }

  auto route = routes_->take();
  route->spec = spec_;
  route->num_bags = count;
  static thread_local std::vector<std::uint64_t> places;  // of split tables' features, in order
  if (places.size() < num_places) places.resize(num_places);
  route->weighted = batch.weights != nullptr;
  static thread_local std::vector<NumberedIds> numbered;
  count_ids(features, number_in_table_, places.data(), *route);
  add_weights(*route, features);
  if (spec.numbers_ids) number_ids(features, places.data(), numbered, *route);
  write_messages(features, batch.weights, places.data(), numbered, lay_out(*route), *route);

  route->empty_bags.clear();
  route->first_empty.assign(1, 0);
  route->scale.clear();
  route->first_scale.assign(features.size(), Route::no_scale);
  for (std::size_t f = 0; f < features.size(); ++f) {
    mark_bags(*route, f);
    route->first_empty.push_back(route->empty_bags.size());
    if (spec.takes_mean(f) && has_long_bags(features[f])) {
      route->first_scale[f] = route->scale.size();
      add_scale(*route, features[f]);
    }
  }
  return route;
}

std::uint64_t Router::words_of(const BagCounts* counts) const {
  std::uint64_t words = 0;
  for (std::size_t f = 0; f < spec_->features.size(); ++f) {
    words += message_words(counts[f], spec_->tables[spec_->features[f].table].end_id(), spec_->takes_mean(f));
  }
  return words;
}

}  // namespace holdfast
