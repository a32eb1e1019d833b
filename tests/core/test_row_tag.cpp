// What a checksum over images says of the rows in them.
#include <cstddef>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "checksum.h"
#include "row_image.h"

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
                          .init_high = 0});
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

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  a_checksum_over_images_tells_versions_of_a_row_apart(check::seed_from(argc, argv));
  return check::passed();
}
