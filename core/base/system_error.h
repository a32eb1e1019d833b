// What the system refuses, as an error of the core: one place says of which kind it is, and what to do.
#pragma once

#include <string>

namespace holdfast {

// what: what was being done, to which file. error: an errno.
[[noreturn]] void throw_errno(const std::string& what, int error);

}  // namespace holdfast
