// Which occurrence admits a key, against the chances that were asked for.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "keys/key_admission.h"

namespace holdfast {
namespace {

constexpr double unit = 4294967296.0;

KeyAdmission::Chances all(double admits) {
  KeyAdmission::Chances chances;
  chances.fill(static_cast<std::uint32_t>(unit * (1 - admits)));
  return chances;
}

// Of occurrence n, those that it admits among those that it could.
std::vector<double> found_chances(const KeyAdmission& admission, std::size_t last, std::uint64_t num_keys) {
  std::vector<double> found;
  std::vector<std::uint64_t> left(num_keys);
  for (std::uint64_t key = 0; key < num_keys; ++key) left[key] = key * 0x9e3779b97f4a7c15u;
  for (std::size_t n = 1; n <= last; ++n) {
    const std::size_t could = left.size();
    std::erase_if(left, [&](std::uint64_t key) { return admission.admits(key, n); });
    found.push_back(could == 0 ? 0 : static_cast<double>(could - left.size()) / static_cast<double>(could));
  }
  return found;
}

void every_occurrence_admits_as_often_as_was_asked_for(std::uint64_t seed) {
  constexpr std::uint64_t num_keys = 400'000;
  KeyAdmission::Chances chances = all(0.05);
  chances[0] = KeyAdmission::never;
  chances[1] = static_cast<std::uint32_t>(unit * 0.5);
  chances[4] = KeyAdmission::never;
  const std::vector<double> found = found_chances(KeyAdmission(seed, 2, 0, chances), 40, num_keys);
  double left = num_keys;
  for (std::size_t n = 1; n <= found.size(); ++n) {
    const double asked = n == 1 || n == 5 ? 0 : n == 2 ? 0.5 : 0.05;
    CHECK(std::abs(found[n - 1] - asked) <= 6 * std::sqrt(asked * (1 - asked) / left));
    left *= 1 - asked;
  }
}

void the_first_occurrence_is_the_first_that_admits(std::mt19937_64& random) {
  for (int round = 0; round < 300; ++round) {
    KeyAdmission::Chances chances;
    for (std::uint32_t& chance : chances) {
      const std::uint64_t kind = random() % 4;
      chance = kind == 0 ? KeyAdmission::never : kind == 1 ? 0 : static_cast<std::uint32_t>(random());
      if (random() % 2 == 0) chance = static_cast<std::uint32_t>(unit * 0.9);
    }
    chances.back() = std::min(chances.back(), static_cast<std::uint32_t>(unit * 0.99));
    const auto after = static_cast<std::uint32_t>(random() % 40);
    const KeyAdmission admission(random(), random() % 5, after, chances);
    for (int i = 0; i < 100; ++i) {
      const std::uint64_t key = random();
      const std::uint32_t first = admission.first_occurrence(key);
      CHECK(first >= std::max(after, 1u));
      CHECK(admission.admits(key, first) && !admission.admits(key, first - 1));
      for (std::uint64_t n = 0; n < 60; ++n) CHECK(admission.admits(key, n) == (n >= first));
      CHECK(admission.admits(key, std::uint64_t{first} * 3 / 2));
    }
  }
}

void small_chances_admit_after_as_many_occurrences() {
  for (const double chance : {1e-3, 1e-6}) {
    const KeyAdmission admission(3, 0, 0, all(chance));
    double sum = 0;
    constexpr std::uint64_t num_keys = 20'000;
    for (std::uint64_t key = 0; key < num_keys; ++key) sum += admission.first_occurrence(key);
    CHECK(std::abs(sum / num_keys * chance - 1) < 0.05);
  }
}

void what_is_no_rule_admits_at_once_and_a_number_of_occurrences_is_exact() {
  CHECK(KeyAdmission().admits_all() && KeyAdmission(1, 2, 1, {}).admits_all());
  const KeyAdmission third(1, 2, 3, {});
  CHECK(!third.admits_all());
  for (std::uint64_t key = 0; key < 100; ++key) {
    CHECK(!third.admits(key, 2) && third.admits(key, 3) && third.first_occurrence(key) == 3);
    CHECK(KeyAdmission().first_occurrence(key) == 1 && KeyAdmission().admits(key, 1));
  }
}

// A pool of today is read by what comes, and by other machines.
void admissions_stay_what_they_are() {
  const KeyAdmission admission(7, 3, 2, all(0.125));
  std::array<std::uint32_t, 8> found;
  for (std::uint64_t key = 0; key < found.size(); ++key) found[key] = admission.first_occurrence(key);
  CHECK((found == std::array<std::uint32_t, 8>{42, 4, 2, 15, 6, 3, 3, 5}));
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  const std::uint64_t seed = check::seed_from(argc, argv);
  std::mt19937_64 random(seed);
  every_occurrence_admits_as_often_as_was_asked_for(seed);
  the_first_occurrence_is_the_first_that_admits(random);
  small_chances_admit_after_as_many_occurrences();
  what_is_no_rule_admits_at_once_and_a_number_of_occurrences_is_exact();
  admissions_stay_what_they_are();
  return check::passed();
}
