// Names are looked up for what they are: what is not there is told apart from what cannot be looked at, and every answer
// of the file system ends in an error of the pool's.
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "base/error.h"
#include "check.h"
#include "layout/superblock.h"
#include "media/directory.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

void a_name_is_there_or_it_is_not() {
  const TemporaryDirectory directory;
  std::ofstream(directory.path() + "/file") << "12345";
  CHECK(has_name(directory.path() + "/file"));
  CHECK(!has_name(directory.path() + "/none"));
  CHECK(!has_name(directory.path() + "/file/none"));
  CHECK(bytes_of_file_at(directory.path() + "/file") == 5);
  CHECK(kind_thrown_by([&] { bytes_of_file_at(directory.path() + "/none"); }) == ErrorKind::not_found);
}

void what_cannot_be_looked_at_is_not_missing() {
  const TemporaryDirectory directory;
  const std::string itself = directory.path() + "/itself";
  std::filesystem::create_symlink(itself, itself);
  CHECK(kind_thrown_by([&] { has_name(itself); }) == ErrorKind::failed);
  CHECK(kind_thrown_by([&] { open_pool_medium(itself); }) == ErrorKind::failed);
  CHECK(kind_thrown_by([&] { has_name(directory.path() + "/" + std::string(300, 'a')); }) == ErrorKind::failed);
}

void directories_are_made_or_it_says_why_not() {
  const TemporaryDirectory directory;
  make_directories(directory.path() + "/a/b/c");
  make_directories(directory.path() + "/a/b/c");
  CHECK(has_name(directory.path() + "/a/b/c"));
  std::ofstream(directory.path() + "/file") << "12345";
  CHECK(kind_thrown_by([&] { make_directories(directory.path() + "/file/a"); }) == ErrorKind::failed);
  CHECK(kind_thrown_by([&] { make_directories("/proc/self/none"); }) == ErrorKind::not_found);
}

void a_directory_is_synced_or_it_says_why_not() {
  const TemporaryDirectory directory;
  std::ofstream(directory.path() + "/file") << "12345";
  sync_directory(directory.path());
  CHECK(kind_thrown_by([&] { sync_directory(directory.path() + "/none"); }) == ErrorKind::not_found);
  CHECK(kind_thrown_by([&] { sync_directory(directory.path() + "/file"); }) == ErrorKind::failed);
  CHECK(directory_of("pool/shard-0000/table") == "pool/shard-0000");
  CHECK(directory_of("table") == ".");
}

void a_directory_without_permission_is_read_only() {
  if (::geteuid() == 0) return;  // root needs none
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory.path() + "/closed");
  std::filesystem::permissions(directory.path() + "/closed", std::filesystem::perms::none);
  CHECK(kind_thrown_by([&] { has_name(directory.path() + "/closed/pool"); }) == ErrorKind::read_only);
  CHECK(kind_thrown_by([&] { open_pool_medium(directory.path() + "/closed"); }) == ErrorKind::read_only);
  std::filesystem::permissions(directory.path() + "/closed", std::filesystem::perms::owner_all);
}

}  // namespace
}  // namespace holdfast

int main() {
  holdfast::a_name_is_there_or_it_is_not();
  holdfast::what_cannot_be_looked_at_is_not_missing();
  holdfast::directories_are_made_or_it_says_why_not();
  holdfast::a_directory_is_synced_or_it_says_why_not();
  holdfast::a_directory_without_permission_is_read_only();
  return check::passed();
}
