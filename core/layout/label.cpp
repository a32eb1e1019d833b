#include "layout/label.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "base/checksum.h"
#include "base/error.h"

namespace holdfast {

using format::FileLabel;
using format::label_bytes;

namespace {

FileLabel label_of(const Identity& identity, const FileRole& role) {
  FileLabel label{};
  label.magic = format::label_magic;
  std::ranges::copy(*identity.uuid(), label.uuid);
  label.kind = static_cast<std::uint32_t>(role.kind);
  label.table = role.table;
  label.shard = role.shard;
  label.crc = crc_of(label, 0);
  return label;
}

bool holds(const FileLabel& label) { return label.magic == format::label_magic && label.crc == crc_of(label, 0); }

void check(const std::byte* found, const std::string& place, const Identity& identity, const FileRole& role) {
  FileLabel label;
  std::memcpy(&label, found, sizeof(label));
  const FileLabel expected = label_of(identity, role);
  if (std::memcmp(&label, &expected, sizeof(label)) == 0) return;
  const auto refuse = [&](const char* why) { throw Error(ErrorKind::corrupted, place + ": " + why); };
  if (!holds(label)) refuse("the file's label does not hold its checksum");
  if (!std::ranges::equal(label.uuid, expected.uuid)) {
    refuse("this file belongs to another pool: put this pool's own back");
  }
  refuse("another of this pool's files: put them back under the names that they had");
}

// What lies behind a label at the beginning, or before one at the end.
class LabelledFile final : public File {
 public:
  LabelledFile(std::unique_ptr<File> whole, std::size_t origin, std::size_t bytes)
      : File(whole->name()), whole_(std::move(whole)), origin_(origin) {
    data_ = whole_->data() + origin_;
    size_ = bytes;
  }

  std::string place(std::size_t offset) const override { return whole_->place(origin_ + offset); }
  std::size_t file_offset(std::size_t offset) const override { return origin_ + offset; }
  void allocate(std::size_t offset, std::size_t bytes) override { whole_->allocate(origin_ + offset, bytes); }
  std::size_t next_data(std::size_t offset) const override {
    return std::min(whole_->next_data(origin_ + offset) - origin_, size_);
  }
  std::size_t next_hole(std::size_t offset) const override {
    return std::min(whole_->next_hole(origin_ + offset) - origin_, size_);
  }
  bool may_lie_in_huge_pages() const override { return origin_ == 0 && whole_->may_lie_in_huge_pages(); }
  Moved move_to_huge_page(std::size_t offset) override { return whole_->move_to_huge_page(offset); }
  void resize(std::size_t bytes) override {
    if (origin_ == 0) throw Error(ErrorKind::config, name_ + ": a file whose label is its end keeps its size");
    whole_->resize(origin_ + bytes);
    data_ = whole_->data() + origin_;
    size_ = bytes;
  }
  void write(std::size_t offset, const void* from, std::size_t bytes) override {
    whole_->write(origin_ + offset, from, bytes);
  }
  void sync() override { whole_->sync(); }

 private:
  std::unique_ptr<File> whole_;
  std::size_t origin_;
};

std::unique_ptr<File> without_label(std::unique_ptr<File> whole, const FileRole& role, std::size_t bytes) {
  return std::make_unique<LabelledFile>(std::move(whole), role.grows() ? label_bytes : 0, bytes);
}

std::uint64_t label_offset(std::uint64_t whole_bytes, const FileRole& role) {
  return role.grows() ? 0 : whole_bytes - label_bytes;
}

[[noreturn]] void refuse_size(const std::string& name, std::uint64_t bytes) {
  throw Error(ErrorKind::corrupted,
              name + ": " + std::to_string(bytes) + " bytes, which have no room for the file's label");
}

}  // namespace

std::size_t labelled_bytes(std::size_t bytes, const Identity& identity) {
  return identity.uuid() ? format::align_up(bytes, format::block_bytes) + label_bytes : bytes;
}

std::unique_ptr<File> create_labelled(Medium& medium, const std::string& name, std::size_t bytes, Access access,
                                      const Identity& identity, const FileRole& role) {
  auto whole = medium.create(name, labelled_bytes(bytes, identity), access);
  // What is written from end to end has all of its blocks before anything is stored. Where it lies in huge pages, a store
  // to any byte may want room for 2 MiB (ext4 since Linux 6.16): SIGBUS, if there is none.
  if (access == Access::sequential) whole->allocate(0, whole->size());
  if (!identity.uuid()) return whole;
  const std::size_t offset = label_offset(whole->size(), role);
  whole->allocate(offset, label_bytes);
  const FileLabel label = label_of(identity, role);
  std::memcpy(whole->data() + offset, &label, sizeof(label));
  medium.persist(whole->data() + offset, sizeof(label));
  return without_label(std::move(whole), role, bytes);
}

std::unique_ptr<File> open_labelled(Medium& medium, const std::string& name, bool writable, Access access,
                                    const Identity& identity, const FileRole& role, std::optional<std::size_t> bytes) {
  auto whole = medium.open(name, writable, access);
  if (const std::size_t has = whole->size(); bytes && has != labelled_bytes(*bytes, identity)) {
    throw Error(ErrorKind::corrupted, whole->name() + ": " + std::to_string(has) + " bytes, it needs " +
                                          std::to_string(labelled_bytes(*bytes, identity)));
  }
  if (!identity.uuid()) return whole;
  if (whole->size() < label_bytes || whole->size() % format::block_bytes != 0) {
    refuse_size(whole->name(), whole->size());
  }
  const std::size_t offset = label_offset(whole->size(), role);
  check(whole->data() + offset, whole->place(offset), identity, role);
  const std::size_t beside = whole->size() - label_bytes;
  return without_label(std::move(whole), role, bytes.value_or(beside));
}

void check_label_of(Medium& medium, const std::string& name, const Identity& identity, const FileRole& role) {
  if (!identity.uuid()) return;
  const Medium::Tail tail = medium.read_tail(name, sizeof(FileLabel), label_bytes);
  check(tail.bytes.data(), tail.place, identity, role);
}

std::optional<DamagedLabel> damaged_label(const std::string& path, const Identity& identity, const FileRole& role) {
  if (!identity.uuid()) return std::nullopt;
  std::error_code missing;
  const std::uint64_t bytes = std::filesystem::file_size(path, missing);
  if (missing || bytes < label_bytes) return std::nullopt;
  const std::uint64_t offset = label_offset(bytes, role);
  std::array<char, sizeof(FileLabel)> block;
  std::ifstream file(path, std::ios::binary);
  if (!file.seekg(static_cast<std::streamoff>(offset)).read(block.data(), block.size())) return std::nullopt;
  FileLabel found;
  std::memcpy(&found, block.data(), sizeof(found));
  const FileLabel expected = label_of(identity, role);
  if (std::memcmp(&found, &expected, sizeof(found)) == 0) return std::nullopt;
  DamagedLabel damaged{offset, {}};
  const bool says_so = std::ranges::equal(found.uuid, expected.uuid) && found.kind == expected.kind &&
                       found.table == expected.table && found.shard == expected.shard;
  if (!holds(found) && (says_so || found.crc == expected.crc)) {
    damaged.bytes.emplace(sizeof(expected));
    std::memcpy(damaged.bytes->data(), &expected, sizeof(expected));
  }
  return damaged;
}

void create_labelled_blocks(const std::string& path, std::uint64_t bytes, const Identity& identity,
                            const FileRole& role) {
  if (!identity.uuid()) {
    BlockFile::create(path, bytes);
    return;
  }
  const FileLabel label = label_of(identity, role);
  const SectorBuffer block(label_bytes);
  std::memset(block.data(), 0, block.size());
  std::memcpy(block.data(), &label, sizeof(label));
  BlockFile::create(path, bytes, {block.data(), label_bytes});
}

void check_label_of(BlockFile& file, BlockQueue& queue, const Identity& identity, const FileRole& role) {
  if (!identity.uuid()) return;
  if (file.size() < label_bytes || file.size() % format::block_bytes != 0) refuse_size(file.name(), file.size());
  file.hide_tail(label_bytes);
  const SectorBuffer block(label_bytes);
  queue.read_range(file, file.size(), label_bytes, block.data());
  check(block.data(), file.place(file.size()), identity, role);
}

}  // namespace holdfast
