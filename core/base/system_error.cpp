#include "base/system_error.h"

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace holdfast {
namespace {

ErrorKind kind_of(int error) {
  switch (error) {
    case ENOENT: return ErrorKind::not_found;
    case EEXIST: return ErrorKind::exists;
    case ENOSPC:
    case EDQUOT: return ErrorKind::full;
    case EROFS:
    case EACCES:
    case EPERM: return ErrorKind::read_only;
    default: return ErrorKind::failed;
  }
}

const char* advice_on(int error) {
  switch (error) {
    case ENOSPC: return "; free space there, or inodes (df -i)";
    case EDQUOT: return "; free space of this user there, or have the quota raised";
    case EROFS:
    case EACCES:
    case EPERM: return "; the pool needs write access";
    case EFBIG: return "; the limit on the size of files (ulimit -f), or the filesystem, allows no larger one";
    case EMFILE: return "; raise the limit on open files (ulimit -n)";
    case EIO: return "; the device failed: look at what the kernel says of it (dmesg)";
    default: return "";
  }
}

}  // namespace

void throw_errno(const std::string& what, int error) {
  throw Error(kind_of(error), what + ": " + std::strerror(error) + advice_on(error));
}

}  // namespace holdfast
