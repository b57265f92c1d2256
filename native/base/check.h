// Errors of the native code, and the function that throws them: check<Error>(condition, parts...).
//
// Messages follow the project's form: `[package.function] the rule; got the values; what to do`.
// bind/ maps each class to its Python class once, in one table. Hot paths return status instead.
#pragma once
#include <cstdint>
#include <iomanip>
#include <sstream>
#include <stdexcept>
#include <string>

namespace tilewise {

/// An invalid argument: Python's ValueError.
struct ArgumentError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// Memory or another bounded resource is exhausted: tilewise.core.ResourceError.
struct ResourceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A byte count in the largest binary unit that it reaches, for messages: `208.58 GiB`, or `512 bytes`.
struct ByteCount {
  uint64_t bytes;
  explicit ByteCount(uint64_t count) : bytes(count) {}
  friend std::ostream& operator<<(std::ostream& out, const ByteCount& count) {
    static constexpr const char* kUnits[] = {"TiB", "GiB", "MiB", "KiB"};
    for (int unit = 0; unit < 4; ++unit) {
      const uint64_t size = uint64_t{1} << (40 - 10 * unit);
      if (count.bytes < size) continue;
      const double value = static_cast<double>(count.bytes) / static_cast<double>(size);
      return out << std::fixed << std::setprecision(2) << value << std::defaultfloat << ' ' << kUnits[unit];
    }
    return out << count.bytes << " bytes";
  }
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
