#include "row_image.h"

#include <algorithm>
#include <cstring>

#include "format.h"
#include "row_tag.h"

namespace holdfast {
namespace {

std::uint32_t tag_of(const RowLayout& layout, std::uint64_t table, std::uint64_t row, const std::byte* image) {
  return row_tag(table, row, image, layout.weight_bytes(), image + layout.weight_bytes(), layout.state_bytes());
}

std::uint32_t tag_at(const RowLayout& layout, const std::byte* image) {
  std::uint32_t tag;
  std::memcpy(&tag, image + layout.weight_bytes() + layout.state_bytes(), sizeof(tag));
  return tag;
}

}  // namespace

RowLayout::RowLayout(const RowSpec& spec)
    : weight_bytes_(std::size_t{spec.dim} * bytes_of(spec.dtype)), state_bytes_(std::size_t{spec.state_floats} * 4) {
  const bool fits = image_bytes() <= format::sector_bytes;
  unit_rows_ = fits ? format::sector_bytes / image_bytes() : 1;
  unit_bytes_ = fits ? format::sector_bytes : format::align_up(image_bytes(), format::sector_bytes);
}

void write_image(const RowLayout& layout, std::uint64_t table, std::uint64_t row, const std::byte* weights,
                 const float* state, std::byte* image) {
  std::memcpy(image, weights, layout.weight_bytes());
  if (layout.state_bytes() != 0) std::memcpy(image + layout.weight_bytes(), state, layout.state_bytes());
  const std::uint32_t tag = tag_of(layout, table, row, image);
  std::memcpy(image + layout.weight_bytes() + layout.state_bytes(), &tag, sizeof(tag));
}

bool has_tag(const RowLayout& layout, const std::byte* image) { return tag_at(layout, image) != 0; }

ImageState check_image(const RowLayout& layout, std::uint64_t table, std::uint64_t row, const std::byte* image) {
  const std::uint32_t tag = tag_at(layout, image);
  if (tag != 0) return tag == tag_of(layout, table, row, image) ? ImageState::whole : ImageState::damaged;
  const bool zeros = std::all_of(image, image + layout.image_bytes(), [](std::byte b) { return b == std::byte{0}; });
  return zeros ? ImageState::untouched : ImageState::damaged;
}

std::size_t pack_images(const RowLayout& layout, std::uint64_t table, const WorkingRows& working, std::size_t begin,
                        std::size_t end, std::byte* images) {
  const std::size_t state_floats = layout.state_bytes() / sizeof(float);
  const std::size_t used_bytes = layout.unit_rows() * layout.image_bytes();
  for (std::size_t first = begin; first < end; first += layout.unit_rows()) {
    std::byte* unit = images + layout.offset_of(first);
    const std::size_t count = std::min(layout.unit_rows(), end - first);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t u = first + i;
      write_image(layout, table, working.rows[u] & ~fresh_bit, working.weights + u * layout.weight_bytes(),
                  working.state + u * state_floats, unit + i * layout.image_bytes());
    }
    const std::size_t written = count == layout.unit_rows() ? used_bytes : count * layout.image_bytes();
    std::memset(unit + written, 0, layout.unit_bytes() - written);
  }
  return layout.bytes_for(end - begin);
}

}  // namespace holdfast
