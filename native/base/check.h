// Errors of the native code and the one way to raise them: check<Error>(holds, parts...).
//
// Messages follow the project's form: `[package.function] the rule; got the values; what to do`.
// bind/ maps each class to its Python class once, in one table. Hot paths return status instead.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace tilewise {

/// A wrong argument: Python's ValueError.
struct ArgumentError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// Memory or another bounded resource is not enough: tilewise.core.ResourceError.
struct ResourceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class Error, class... Parts>
void check(bool holds, const Parts&... message) {
  if (holds) [[likely]]
    return;
  std::ostringstream text;
  (text << ... << message);
  throw Error(text.str());
}

}  // namespace tilewise
