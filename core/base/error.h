// What the core throws. Each kind has its Python class in holdfast.errors; binding/module.cpp maps them by `kind`.
#pragma once

#include <stdexcept>
#include <string>

namespace holdfast {

enum class ErrorKind {
  not_found,
  exists,
  busy,
  read_only,
  full,
  batch_too_large,
  window_too_large,
  corrupted,
  overtaken,
  format_mismatch,
  untrusted,
  failed,
  step,
  non_finite,
  config,
  data,
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace holdfast
