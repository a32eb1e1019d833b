#include "checksum.h"

#include <array>
#include <cstring>

namespace holdfast {
namespace {

constexpr std::uint32_t polynomial = 0x82f63b78;  // reversed

// tables[k][b]: the checksum of byte b followed by k zero bytes.
constexpr std::array<std::array<std::uint32_t, 256>, 8> make_tables() {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? polynomial : 0);
    tables[0][b] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t b = 0; b < 256; ++b) {
      tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xff];
    }
  }
  return tables;
}
constexpr auto tables = make_tables();

std::uint32_t update_portable(std::uint32_t state, const unsigned char* data, std::size_t bytes) {
  while (bytes >= 8) {
    std::uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= state;
    state = 0;
    for (std::size_t k = 0; k < 8; ++k) state ^= tables[7 - k][(word >> (8 * k)) & 0xff];
    data += 8;
    bytes -= 8;
  }
  while (bytes-- > 0) state = (state >> 8) ^ tables[0][(state ^ *data++) & 0xff];
  return state;
}

#if defined(__x86_64__)

// The CRC instruction has a latency of three cycles and a throughput of one, so three blocks are summed side by side
// and joined: advancing a checksum over `block` zero bytes is linear, hence four table look-ups.
constexpr std::size_t block = 1024;

constexpr std::uint32_t advance_zeros(std::uint32_t state, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) state = (state >> 8) ^ tables[0][state & 0xff];
  return state;
}
std::array<std::array<std::uint32_t, 256>, 4> make_block_shift() {
  std::array<std::uint32_t, 32> of_bit{};
  for (std::size_t bit = 0; bit < 32; ++bit) of_bit[bit] = advance_zeros(std::uint32_t{1} << bit, block);
  std::array<std::array<std::uint32_t, 256>, 4> shift{};
  for (std::size_t byte = 0; byte < 4; ++byte) {
    for (std::size_t value = 0; value < 256; ++value) {
      for (std::size_t bit = 0; bit < 8; ++bit) {
        if ((value >> bit & 1) != 0) shift[byte][value] ^= of_bit[8 * byte + bit];
      }
    }
  }
  return shift;
}
const auto block_shift = make_block_shift();

std::uint32_t shift_block(std::uint32_t state) {
  return block_shift[0][state & 0xff] ^ block_shift[1][(state >> 8) & 0xff] ^ block_shift[2][(state >> 16) & 0xff] ^
         block_shift[3][state >> 24];
}

__attribute__((target("sse4.2"))) std::uint32_t update_sse42(std::uint32_t state, const unsigned char* data,
                                                             std::size_t bytes) {
  while (bytes >= 3 * block) {
    std::uint64_t a = state;
    std::uint64_t b = 0;
    std::uint64_t c = 0;
    for (std::size_t i = 0; i < block; i += 8) {
      std::uint64_t wa;
      std::uint64_t wb;
      std::uint64_t wc;
      std::memcpy(&wa, data + i, 8);
      std::memcpy(&wb, data + block + i, 8);
      std::memcpy(&wc, data + 2 * block + i, 8);
      a = __builtin_ia32_crc32di(a, wa);
      b = __builtin_ia32_crc32di(b, wb);
      c = __builtin_ia32_crc32di(c, wc);
    }
    state = shift_block(shift_block(static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b)) ^
            static_cast<std::uint32_t>(c);
    data += 3 * block;
    bytes -= 3 * block;
  }
  std::uint64_t wide = state;
  while (bytes >= 8) {
    std::uint64_t word;
    std::memcpy(&word, data, 8);
    wide = __builtin_ia32_crc32di(wide, word);
    data += 8;
    bytes -= 8;
  }
  state = static_cast<std::uint32_t>(wide);
  while (bytes-- > 0) state = __builtin_ia32_crc32qi(state, *data++);
  return state;
}

#endif

}  // namespace

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes) {
  const auto* first = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  static const bool has_sse42 = __builtin_cpu_supports("sse4.2") != 0;
  if (has_sse42) return ~update_sse42(~crc, first, bytes);
#endif
  return ~update_portable(~crc, first, bytes);
}

}  // namespace holdfast
