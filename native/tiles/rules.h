// What the declarations of kernels say about tile calls, as data. tile_functions.py makes the table from the
// declarations (generated/tiles/rules_table.h).
#pragma once
#include <cstdint>
#include <span>

namespace tilewise::tiles {

/// Bits of OperandRule::dtypes, and indices of KernelRule::names.
enum Dtype : uint8_t { kF32 = 0, kBf16 = 1, kF64 = 2, kI32 = 3, kNumDtypes = 4 };
inline constexpr uint8_t kOwnDtype = 1 << kNumDtypes;  // the kernel's own

enum class Role : uint8_t { kIn, kOut, kInout };
enum class Storage : uint8_t { kRows, kPanels, kEither };

/// A declared size of rows or columns.
struct SizeRule {
  int16_t name = -1;     // index of KernelRule::sizes; -1: no name
  bool is_own = false;   // a size of its own for every member of a list
  int64_t number = -1;   // exactly this; -1: any
};

struct OperandRule {
  const char* name;
  Role role;
  uint8_t dtypes;
  Storage storage;
  bool is_optional, is_list;
  SizeRule rows, cols;
  const char* text;  // as declared, for errors
};

/// One integer. `source`: how a computed one is computed, from operand number `operand`.
enum class Source : uint8_t { kPassed, kCount, kIsF32, kIsPacked };
struct IntRule {
  const char* name;
  Source source;
  uint16_t operand;
  bool is_list;
};

/// The values of a call, for conditions: sizes by index, integers and operands by number.
struct Values {
  const int64_t* sizes;
  const int64_t* ints;
  const int64_t* rows;
  const int64_t* cols;
};

struct KernelRule {
  const char* base;
  const char* names[kNumDtypes];  // full names; without dtypes only the first
  int only_dtype;  // -1: no dtype; -2: one of several
  bool has_scratch;
  bool is_elementwise;   // elements of outputs follow from the same elements of inputs
  std::span<const OperandRule> operands;
  std::span<const IntRule> ints;
  std::span<const char* const> sizes;
  int within;            // the operand in whose columns the ranges of the list of integers lie; -1: no such list
  bool begins_even;      // those of bf16 begin at even columns
  const char* attributes;  // as declared, for errors
  const char* (*broken_condition)(const Values& values);  // the first condition that does not hold, or nullptr
};

}  // namespace tilewise::tiles
