// What a checksum over images says of the rows in them, and that images which are packed together are the same.
#include <cstddef>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "base/identity.h"
#include "check.h"
#include "rows/row_image.h"

namespace holdfast {
namespace {

// A torn record may have images of an earlier turn of the ring in place of its own: of the same rows, each with a tag
// that holds.
void a_checksum_over_images_tells_versions_of_a_row_apart(std::uint64_t seed) {
  std::mt19937 random(static_cast<std::mt19937::result_type>(seed));
  const RowLayout layout({.dim = 150,
                          .dtype = RowDtype::f32,
                          .optimizer = RowOptimizer::rowwise_adagrad,
                          .state_floats = 1,
                          .seed = 1,
                          .table = 2,
                          .init_low = 0,
                          .init_high = 0},
                         Packing::dense);
  constexpr std::size_t versions = 2000;
  std::set<std::uint32_t> checksums;
  std::vector<std::uint32_t> weights(layout.weight_bytes() / 4);
  std::vector<std::byte> image(layout.image_bytes());
  for (std::size_t i = 0; i < versions; ++i) {
    for (std::uint32_t& word : weights) word = static_cast<std::uint32_t>(random());
    const float state = static_cast<float>(i);
    write_image(layout, 2, 3, reinterpret_cast<const std::byte*>(weights.data()), &state, image.data());
    CHECK(check_image(layout, 2, 3, image.data()) == ImageState::whole);
    checksums.insert(crc32c(0, image.data(), image.size()));
  }
  CHECK(checksums.size() + 2 >= versions);  // as random as 32 bits are
}

// However alike two pools are, neither takes the other's rows for its own.
void a_row_of_another_pool_does_not_hold(std::uint64_t seed) {
  std::mt19937 random(static_cast<std::mt19937::result_type>(seed));
  const auto layout_of = [](const Identity& identity) {
    return RowLayout({.dim = 4,
                      .dtype = RowDtype::f32,
                      .optimizer = RowOptimizer::sgd,
                      .state_floats = 0,
                      .seed = 1,
                      .table = 2,
                      .init_low = 0,
                      .init_high = 0,
                      .tag_seed = identity.seed()},
                     Packing::dense);
  };
  const RowLayout ours = layout_of(Identity(Uuid{1}));
  for (const RowLayout& theirs : {layout_of(Identity(Uuid{2})), layout_of(Identity())}) {
    for (int i = 0; i < 1000; ++i) {
      std::vector<std::uint32_t> weights(4);
      for (std::uint32_t& word : weights) word = static_cast<std::uint32_t>(random());
      std::vector<std::byte> image(ours.image_bytes());
      write_image(theirs, 2, 3, reinterpret_cast<const std::byte*>(weights.data()), nullptr, image.data());
      CHECK(check_image(theirs, 2, 3, image.data()) == ImageState::whole);
      CHECK(check_image(ours, 2, 3, image.data()) == ImageState::damaged);
    }
  }
}

// In units of one row and of several, full ones and a last one that is not, over whatever was there before.
void packed_together_images_are_those_of_rows_alone(std::uint64_t seed) {
  std::mt19937 random(static_cast<std::mt19937::result_type>(seed));
  for (const std::uint32_t dim : {1u, 3u, 16u, 40u, 64u, 127u, 150u}) {
    for (const std::uint32_t state_floats : {0u, 1u, 5u}) {
      const Packing packing = random() % 2 == 0 ? Packing::dense : Packing::sectors;
      const RowLayout layout({.dim = dim,
                              .dtype = dim % 2 == 0 ? RowDtype::f32 : RowDtype::f16,
                              .optimizer = RowOptimizer::sgd,
                              .state_floats = state_floats,
                              .seed = 1,
                              .table = 2,
                              .init_low = 0,
                              .init_high = 0,
                              .tag_seed = static_cast<std::uint32_t>(random() % 2 * 0x5eed)},
                             packing);
      const std::size_t count = random() % (3 * layout.unit_rows() + 6);
      check::context = std::to_string(count) + " rows of dim " + std::to_string(dim);
      std::vector<std::uint64_t> rows(count);
      std::vector<std::byte> weights(count * layout.weight_bytes());
      std::vector<float> state(count * state_floats);
      for (std::byte& byte : weights) byte = static_cast<std::byte>(random());
      for (float& value : state) value = static_cast<float>(random() % 1000);
      std::vector<std::byte> expected(layout.bytes_for(count));
      for (std::size_t u = 0; u < count; ++u) {
        const std::uint64_t row = random();
        rows[u] = row | (u % 2 == 0 ? fresh_bit : 0);
        write_image(layout, 2, row, weights.data() + u * layout.weight_bytes(), state.data() + u * state_floats,
                    expected.data() + layout.offset_of(u));
      }
      std::vector<std::byte> packed(layout.bytes_for(count) + 1, std::byte{0xa5});
      pack_images(layout, 2, {rows.data(), weights.data(), state.data()}, count, packed.data());
      CHECK(packed.back() == std::byte{0xa5});
      packed.pop_back();
      CHECK(packed == expected);
    }
  }
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  a_checksum_over_images_tells_versions_of_a_row_apart(check::seed_from(argc, argv));
  a_row_of_another_pool_does_not_hold(check::seed_from(argc, argv));
  packed_together_images_are_those_of_rows_alone(check::seed_from(argc, argv));
  return check::passed();
}
