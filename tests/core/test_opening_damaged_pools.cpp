// Inputs of the fuzzer: those that it has found something with, and a few hundred at random.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "../fuzz/open_target.h"
#include "check.h"

using namespace holdfast;

namespace {

void inputs_that_found_something_are_answered() {
  const auto inputs = std::filesystem::path(__FILE__).parent_path().parent_path() / "fuzz" / "found";
  for (const auto& entry : std::filesystem::directory_iterator(inputs)) {
    std::ifstream in(entry.path(), std::ios::binary);
    const std::vector<char> data(std::istreambuf_iterator<char>(in), {});
    fuzz::open_damaged({reinterpret_cast<const std::uint8_t*>(data.data()), data.size()});
  }
}

void random_damage_behind_right_checksums_is_answered() {
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    std::vector<std::uint8_t> input(2 + random() % 30);
    for (std::uint8_t& byte : input) byte = static_cast<std::uint8_t>(random());
    fuzz::open_damaged(input);
  }
}

}  // namespace

int main() {
  inputs_that_found_something_are_answered();
  random_damage_behind_right_checksums_is_answered();
}
