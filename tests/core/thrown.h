// Which error a piece of work ends in; none fails the test.
#pragma once

#include "base/error.h"
#include "check.h"

template <class Work>
holdfast::ErrorKind kind_thrown_by(const Work& work) {
  try {
    work();
  } catch (const holdfast::Error& error) {
    return error.kind();
  }
  check::context += ": nothing was thrown";
  CHECK(false);
}
