// CRC-32C: every way gives the published values, and a message's parts give what the whole gives.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "base/parallel.h"
#include "check.h"
#include "draws.h"

namespace {

using namespace holdfast;

// Before main, and, as the linker lays things out, before the core's own objects are made.
const std::uint32_t early = crc32c(0, "123456789", 9);
const std::string long_message(20'000, 'x');
const std::uint32_t early_of_long = crc32c(0, long_message.data(), long_message.size());

void checksums_taken_before_main_are_right() {
  CHECK(early == 0xe3069283);
  CHECK(early_of_long == crc32c(0, long_message.data(), long_message.size()));
}

std::vector<unsigned char> random_bytes(Random& random, std::size_t count) {
  std::vector<unsigned char> bytes(count);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

template <class Body>
void with_every_way(const Body& body) {
  for (const ChecksumWay& way : checksum_ways) {
    if (!way.runs_here) continue;
    check::context = way.name;
    body(way);
  }
}

// RFC 3720, B.4, and the check value of the catalogues.
void published_values() {
  const auto crc = [](const ChecksumWay& way, const std::vector<unsigned char>& bytes) {
    return ~way.update(~0u, bytes.data(), bytes.size());
  };
  std::vector<unsigned char> ascending(32);
  for (std::size_t i = 0; i < 32; ++i) ascending[i] = static_cast<unsigned char>(i);
  const std::string digits = "123456789";
  with_every_way([&](const ChecksumWay& way) {
    CHECK(crc(way, {}) == 0);
    CHECK(crc(way, std::vector<unsigned char>(32, 0x00)) == 0x8a9136aa);
    CHECK(crc(way, std::vector<unsigned char>(32, 0xff)) == 0x62a8ab43);
    CHECK(crc(way, ascending) == 0x46dd794e);
    CHECK(crc(way, {digits.begin(), digits.end()}) == 0xe3069283);
  });
}

void all_ways_agree(Random& random) {
  const ChecksumWay& portable = checksum_ways[2];
  for (int i = 0; i < 2000; ++i) {
    const std::size_t offset = below(random, 64);
    const std::size_t size = i % 10 == 0 ? below(random, 40'000) : below(random, 1200);
    const auto bytes = random_bytes(random, offset + size);
    const auto state = static_cast<std::uint32_t>(random());
    const std::uint32_t expected = portable.update(state, bytes.data() + offset, size);
    with_every_way([&](const ChecksumWay& way) { CHECK(way.update(state, bytes.data() + offset, size) == expected); });
  }
}

void several_side_by_side_are_each_as_if_alone(Random& random) {
  const ChecksumWay& portable = checksum_ways[2];
  for (int i = 0; i < 2000; ++i) {
    const std::size_t size = below(random, i % 10 == 0 ? 5000 : 600);
    std::array<std::vector<unsigned char>, checksums_at_once> messages;
    Messages data;
    Crcs before;
    Crcs expected;
    for (std::size_t m = 0; m < messages.size(); ++m) {
      const std::size_t offset = below(random, 64);
      messages[m] = random_bytes(random, offset + size);
      data[m] = reinterpret_cast<const std::byte*>(messages[m].data() + offset);
      before[m] = static_cast<std::uint32_t>(random());
      expected[m] = ~portable.update(~before[m], messages[m].data() + offset, size);
    }
    CHECK(crc32c_of_each(before, data, size) == expected);
    with_every_way([&](const ChecksumWay& way) { CHECK(way.of_each(before, data, size) == expected); });
  }
}

void parts_in_any_order_give_the_whole(Random& random) {
  for (int i = 0; i < 300; ++i) {
    auto message = random_bytes(random, below(random, 70'000));
    std::vector<std::pair<std::size_t, std::size_t>> parts;
    for (std::size_t at = 0; at < message.size();) {
      const std::size_t size = std::min(message.size() - at, 1 + below(random, 4000));
      if (below(random, 4) == 0) {
        std::fill_n(message.begin() + static_cast<std::ptrdiff_t>(at), size, static_cast<unsigned char>(0));
      } else {
        parts.emplace_back(at, size);
      }
      at += size;
    }
    std::shuffle(parts.begin(), parts.end(), random);
    const std::uint32_t seed = parts.size() % 2 == 0 ? 0 : static_cast<std::uint32_t>(random());
    PartsChecksum checksum(message.size(), seed);
    parallel_for(parts.size(), [&](std::size_t p) {
      checksum.add(parts[p].first, message.data() + parts[p].first, parts[p].second);
    });
    check::context = std::to_string(message.size()) + " bytes, " + std::to_string(parts.size()) + " parts";
    CHECK(checksum.value() == crc32c(seed, message.data(), message.size()));
  }
}

}  // namespace

int main(int argc, char** argv) {
  Random random(check::seed_from(argc, argv));
  checksums_taken_before_main_are_right();
  published_values();
  all_ways_agree(random);
  several_side_by_side_are_each_as_if_alone(random);
  parts_in_any_order_give_the_whole(random);
  return check::passed();
}
