// Row image: a row as a block device keeps it, weights, then state, then a tag, the same at home and in the row log.
//
// Invariants
// - Images lie one behind another, whatever sectors they begin and end in: nothing rests on an image being written whole.
//   What is written home is in the log until home is durable, and a record is believed as a whole or not at all; and
//   whoever writes a sector writes the other images' part of it as it was.
// - In pools before version 5 no image straddles a sector where it fits in one: floor(512 / image) images begin every
//   sector, the rest of it is zeros. A larger image begins a sector and takes whole ones.
// - The tag is 0 where nothing was ever written (a hole reads as zeros), else the row's (row_tag.h): so an image says
//   whose it is, and whether it is whole. It does not say of which step: what recovery believes is settled by the log's
//   records, which checksum their images once more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/kernels.h"

namespace holdfast {

enum class Packing { dense, sectors };  // sectors: of pools before version 5

class RowLayout {
 public:
  RowLayout(const RowSpec& spec, Packing packing);

  std::size_t weight_bytes() const { return weight_bytes_; }
  std::size_t state_bytes() const { return state_bytes_; }
  std::uint32_t tag_seed() const { return tag_seed_; }
  std::size_t image_bytes() const { return weight_bytes_ + state_bytes_ + sizeof(std::uint32_t); }
  // Images and bytes of the smallest whole piece: one image, or one sector of them.
  std::size_t unit_rows() const { return unit_rows_; }
  std::size_t unit_bytes() const { return unit_bytes_; }

  // Where image k begins, and how many bytes k images take, whole pieces.
  std::uint64_t offset_of(std::uint64_t k) const {
    return k / unit_rows_ * unit_bytes_ + k % unit_rows_ * image_bytes();
  }
  std::uint64_t bytes_for(std::uint64_t count) const { return (count + unit_rows_ - 1) / unit_rows_ * unit_bytes_; }

 private:
  std::size_t weight_bytes_;
  std::size_t state_bytes_;
  std::size_t unit_rows_;
  std::size_t unit_bytes_;
  std::uint32_t tag_seed_;
};

// Writes the image of `row` from weights and state; `state` may be null where there is none.
void write_image(const RowLayout& layout, std::uint64_t table, std::uint64_t row, const std::byte* weights,
                 const float* state, std::byte* image);

// Gives the image of `row`, whose weights and state are there, its tag.
void tag_image(const RowLayout& layout, std::uint64_t table, std::uint64_t row, std::byte* image);

// The same of several rows, whose images lie one behind another.
void tag_images(const RowLayout& layout, std::uint64_t table, std::span<const std::uint64_t> rows, std::byte* images);

// Whether anything was ever written there: all that its tag says.
bool has_tag(const RowLayout& layout, const std::byte* image);

enum class ImageState { untouched, whole, damaged };
// How many of the images, which are the rows', are whole, from the first one on.
std::size_t count_whole(const RowLayout& layout, std::uint64_t table, std::span<const std::uint64_t> rows,
                        std::span<const std::byte* const> images);
ImageState check_image(const RowLayout& layout, std::uint64_t table, std::uint64_t row, const std::byte* image);

// Writes the images of the first `count` of `working` to `images`, where a unit begins; the gaps too, in bytes_for(count)
// bytes.
void pack_images(const RowLayout& layout, std::uint64_t table, const WorkingRows& working, std::size_t count,
                 std::byte* images);

}  // namespace holdfast
