// A number of a program whose value is determined later: a constant plus a multiple of a value of a run, a device or a
// call.
//
// Devices of one class share their templates, so differences between them are numbers of the device. Differences
// between uses of one template are numbers of the call. Values that change from run to run are symbols. Each field says
// which of them it accepts (program.h), and Program::finish checks it.
#pragma once
#include <cstdint>
#include <vector>

namespace tilewise::programs {

enum class Source : int32_t { kNothing = 0, kSymbol = 1, kDevice = 2, kCall = 3, kPosition = 4 };

/// The values that numbers refer to. Values to which no number refers may be absent.
struct Values {
  const int64_t* symbols = nullptr;
  const int64_t* device = nullptr;  // the device's numbers
  const int64_t* call = nullptr;  // the call's numbers
  int64_t position = 0;  // of the call in its list
};

/// constant + multiple * value, where source and which select the value.
struct Number {
  int64_t constant = 0;
  int64_t multiple = 0;
  Source source = Source::kNothing;
  int32_t which = 0;

  Number(int64_t constant = 0, int64_t multiple = 0, Source source = Source::kNothing, int32_t which = 0)
      : constant(constant), multiple(multiple), source(source), which(which) {}  // NOLINT(google-explicit-constructor)

  bool operator==(const Number&) const = default;
  bool is_constant() const { return source == Source::kNothing; }
  int64_t at(const Values& values) const { return is_constant() ? constant : constant + multiple * taken(values); }
  /// The number with the device's value inserted.
  Number on(const std::vector<int64_t>& device_numbers) const {
    return source == Source::kDevice ? Number(constant + multiple * device_numbers[which]) : *this;
  }

 private:
  int64_t taken(const Values& values) const {
    switch (source) {
      case Source::kSymbol:
        return values.symbols[which];
      case Source::kDevice:
        return values.device[which];
      case Source::kCall:
        return values.call[which];
      case Source::kPosition:
        return values.position;
      case Source::kNothing:
        break;
    }
    return 0;
  }
};

}  // namespace tilewise::programs
