// Spare buffers: the same memory again, never to two borrowers at once.
#include <optional>

#include "check.h"
#include "media/spare_buffers.h"

namespace holdfast {
namespace {

void memory_is_used_again() {
  const SpareBuffers spare;
  const std::byte* first = spare.borrow(100000).data();
  CHECK(spare.borrow(100000).data() == first);
  CHECK(spare.borrow(4096).data() == first);
}

void two_borrowers_have_two_buffers() {
  const SpareBuffers spare;
  SpareBuffers::Borrowed a = spare.borrow(4096);
  SpareBuffers::Borrowed b = spare.borrow(4096);
  const std::byte* of_a = a.data();
  CHECK(of_a != b.data());
  b = std::move(a);  // what b had returns with a
  CHECK(b.data() == of_a);
}

void the_smallest_that_is_large_enough_is_lent() {
  const SpareBuffers spare;
  std::optional<SpareBuffers::Borrowed> large = spare.borrow(1 << 20);
  std::optional<SpareBuffers::Borrowed> small = spare.borrow(4096);
  const std::byte* of_small = small->data();
  large.reset();
  small.reset();
  CHECK(spare.borrow(4000).data() == of_small);
  CHECK(spare.borrow(16384).buffer().size() >= (1 << 20));
  const SpareBuffers::Borrowed larger = spare.borrow(2 << 20);  // in place of the large one
  CHECK(larger.buffer().size() >= (2 << 20));
  CHECK(spare.borrow(4096).data() == of_small);
}

void a_buffer_may_outlive_the_stock() {
  std::optional<SpareBuffers> spare(std::in_place);
  const SpareBuffers::Borrowed buffer = spare->borrow(4096);
  spare.reset();
  buffer.data()[4095] = std::byte{1};
}

}  // namespace
}  // namespace holdfast

int main() {
  holdfast::memory_is_used_again();
  holdfast::two_borrowers_have_two_buffers();
  holdfast::the_smallest_that_is_large_enough_is_lent();
  holdfast::a_buffer_may_outlive_the_stock();
  return check::passed();
}
