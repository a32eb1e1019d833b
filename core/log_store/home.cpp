#include "log_store/home.h"

#include <utility>

#include "base/error.h"
#include "media/directory.h"
#include "media/medium.h"

namespace holdfast {
namespace {

bool is_by_first_touch(const RowTable& table) { return table.home_order == HomeOrder::by_first_touch; }

struct Shape {
  std::string name;
  std::uint64_t bytes;
  FileRole role;
};

Shape rows_of(const RowTable& table, std::size_t number, const RowPiece& piece) {
  const std::uint64_t bytes = layout_of(table).bytes_for(piece.num_rows);
  return {row_file_name(table, piece.shard, number, "home"),
          format::align_up(bytes, format::block_bytes),
          {is_by_first_touch(table) ? format::FileKind::packed_home : format::FileKind::home,
           static_cast<std::uint32_t>(number), piece.shard}};
}

Shape addresses_of(const RowTable& table, std::size_t number, const RowPiece& piece) {
  return {row_file_name(table, piece.shard, number, "addresses"),
          HomeAddresses::file_bytes(piece.num_rows),
          {format::FileKind::home_addresses, static_cast<std::uint32_t>(number), piece.shard}};
}

std::vector<Shape> shapes_of(const RowTable& table, std::size_t number, const RowPiece& piece) {
  std::vector<Shape> shapes = {rows_of(table, number, piece)};
  if (is_by_first_touch(table)) shapes.push_back(addresses_of(table, number, piece));
  return shapes;
}

}  // namespace

const std::string& existing(const std::string& path) {
  if (!has_name(path)) throw Error(ErrorKind::corrupted, path + " is missing; the store has lost a file");
  return path;
}

RowLayout layout_of(const RowTable& table) {
  return {table.spec, is_by_first_touch(table) ? Packing::dense : Packing::sectors};
}

std::vector<LabelledName> home_files(const RowTable& table, std::size_t number, const RowPiece& piece) {
  std::vector<LabelledName> files;
  for (const Shape& shape : shapes_of(table, number, piece)) files.push_back({shape.name, shape.role, table.identity});
  return files;
}

void create_home(const std::string& directory, const RowTable& table, std::size_t number, const RowPiece& piece) {
  for (const Shape& shape : shapes_of(table, number, piece)) {
    const std::string path = directory + "/" + shape.name;
    make_directories(directory_of(path));
    create_labelled_blocks(path, shape.bytes, table.identity, shape.role);
  }
}

Home open_home(const std::string& directory, const RowTable& table, std::size_t number, const RowPiece& piece,
               Caching caching, BlockWatcher* watcher, Opening opening, BlockQueue& queue) {
  std::vector<std::unique_ptr<BlockFile>> files;
  for (const Shape& shape : shapes_of(table, number, piece)) {
    const std::string path = directory + "/" + shape.name;
    auto file = std::make_unique<BlockFile>(existing(path), caching, watcher, opening);
    if (const std::uint64_t wanted = labelled_bytes(shape.bytes, table.identity); file->size() != wanted) {
      throw Error(ErrorKind::corrupted,
                  path + ": " + std::to_string(file->size()) + " bytes, the table needs " + std::to_string(wanted));
    }
    check_label_of(*file, queue, table.identity, shape.role);
    files.push_back(std::move(file));
  }
  Home home{piece.first, piece.end(), std::move(files[0]), nullptr, 0};
  if (files.size() == 2) {
    home.addresses = std::make_unique<HomeAddresses>(std::move(files[1]), queue, piece.num_rows,
                                                     addresses_of(table, number, piece).role, table.identity.seed());
  }
  return home;
}

}  // namespace holdfast
