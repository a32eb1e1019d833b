#include "rows/row_image.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/format.h"
#include "rows/row_tag.h"

namespace holdfast {
namespace {

std::uint32_t tag_of(const RowLayout& layout, std::uint64_t table, std::uint64_t row, const std::byte* image) {
  return row_tag(layout.tag_seed(), table, row, image, layout.weight_bytes(), image + layout.weight_bytes(),
                 layout.state_bytes());
}

std::uint32_t tag_at(const RowLayout& layout, const std::byte* image) {
  std::uint32_t tag;
  std::memcpy(&tag, image + layout.weight_bytes() + layout.state_bytes(), sizeof(tag));
  return tag;
}

// Tags some images, one at least, as many as have their tags made at once at most.
using Images = std::array<std::byte*, checksums_at_once>;
void tag_some(const RowLayout& layout, std::uint64_t table, RowNumbers rows, Images image, std::size_t count) {
  const std::size_t value_bytes = layout.weight_bytes() + layout.state_bytes();
  for (std::size_t i = count; i < checksums_at_once; ++i) {  // the last once more: nobody wants its tag
    rows[i] = rows[count - 1];
    image[i] = image[count - 1];
  }
  const RowTags tags = row_tags(layout.tag_seed(), table, rows, {image[0], image[1], image[2], image[3]}, value_bytes);
  for (std::size_t i = 0; i < count; ++i) std::memcpy(image[i] + value_bytes, &tags[i], sizeof(tags[i]));
}

}  // namespace

RowLayout::RowLayout(const RowSpec& spec, Packing packing)
    : weight_bytes_(std::size_t{spec.dim} * bytes_of(spec.dtype)),
      state_bytes_(std::size_t{spec.state_floats} * 4),
      tag_seed_(spec.tag_seed) {
  if (packing == Packing::dense) {
    unit_rows_ = 1;
    unit_bytes_ = image_bytes();
    return;
  }
  const bool fits = image_bytes() <= format::sector_bytes;
  unit_rows_ = fits ? format::sector_bytes / image_bytes() : 1;
  unit_bytes_ = fits ? format::sector_bytes : format::align_up(image_bytes(), format::sector_bytes);
}

void write_image(const RowLayout& layout, std::uint64_t table, std::uint64_t row, const std::byte* weights,
                 const float* state, std::byte* image) {
  std::memcpy(image, weights, layout.weight_bytes());
  if (layout.state_bytes() != 0) std::memcpy(image + layout.weight_bytes(), state, layout.state_bytes());
  tag_image(layout, table, row, image);
}

void tag_image(const RowLayout& layout, std::uint64_t table, std::uint64_t row, std::byte* image) {
  const std::uint32_t tag = tag_of(layout, table, row, image);
  std::memcpy(image + layout.weight_bytes() + layout.state_bytes(), &tag, sizeof(tag));
}

void tag_images(const RowLayout& layout, std::uint64_t table, std::span<const std::uint64_t> rows, std::byte* images) {
  for (std::size_t first = 0; first < rows.size(); first += checksums_at_once) {
    const std::size_t some = std::min(checksums_at_once, rows.size() - first);
    RowNumbers numbers;
    Images image;
    for (std::size_t i = 0; i < some; ++i) {
      numbers[i] = rows[first + i];
      image[i] = images + (first + i) * layout.image_bytes();
    }
    tag_some(layout, table, numbers, image, some);
  }
}

bool has_tag(const RowLayout& layout, const std::byte* image) { return tag_at(layout, image) != 0; }

ImageState check_image(const RowLayout& layout, std::uint64_t table, std::uint64_t row, const std::byte* image) {
  const std::uint32_t tag = tag_at(layout, image);
  if (tag != 0) return tag == tag_of(layout, table, row, image) ? ImageState::whole : ImageState::damaged;
  const bool zeros = std::all_of(image, image + layout.image_bytes(), [](std::byte b) { return b == std::byte{0}; });
  return zeros ? ImageState::untouched : ImageState::damaged;
}

std::size_t count_whole(const RowLayout& layout, std::uint64_t table, std::span<const std::uint64_t> rows,
                        std::span<const std::byte* const> images) {
  const std::size_t value_bytes = layout.weight_bytes() + layout.state_bytes();
  std::size_t whole = 0;
  for (; whole + checksums_at_once <= rows.size(); whole += checksums_at_once) {
    const std::byte* const* image = images.data() + whole;
    RowNumbers numbers;
    std::copy_n(rows.data() + whole, checksums_at_once, numbers.begin());
    const RowTags tags =
        row_tags(layout.tag_seed(), table, numbers, {image[0], image[1], image[2], image[3]}, value_bytes);
    bool hold = true;
    for (std::size_t i = 0; i < checksums_at_once; ++i) hold = hold && tags[i] == tag_at(layout, image[i]);
    if (!hold) break;
  }
  while (whole < rows.size() && check_image(layout, table, rows[whole], images[whole]) == ImageState::whole) ++whole;
  return whole;
}

void pack_images(const RowLayout& layout, std::uint64_t table, const WorkingRows& working, std::size_t count,
                 std::byte* images) {
  const std::size_t state_floats = layout.state_bytes() / sizeof(float);
  std::byte* unit = images;
  std::size_t in_unit = 0;
  const auto end_unit = [&] {
    const std::size_t written = in_unit * layout.image_bytes();
    std::memset(unit + written, 0, layout.unit_bytes() - written);
    unit += layout.unit_bytes();
    in_unit = 0;
  };
  // So many as have their tags made at once; a unit may hold fewer.
  for (std::size_t first = 0; first < count; first += checksums_at_once) {
    const std::size_t some = std::min(checksums_at_once, count - first);
    RowNumbers rows;
    Images image;
    for (std::size_t i = 0; i < some; ++i) {
      const std::size_t u = first + i;
      rows[i] = working.rows[u] & ~fresh_bit;
      image[i] = unit + in_unit * layout.image_bytes();
      std::memcpy(image[i], working.weights + u * layout.weight_bytes(), layout.weight_bytes());
      if (state_floats != 0) {
        std::memcpy(image[i] + layout.weight_bytes(), working.state + u * state_floats, layout.state_bytes());
      }
      if (++in_unit == layout.unit_rows()) end_unit();
    }
    tag_some(layout, table, rows, image, some);
  }
  if (in_unit != 0) end_unit();
}

}  // namespace holdfast
