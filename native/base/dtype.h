// Element types of tiles. Python uses their names, which bind/bind_programs.cc lists in the order of these numbers.
#pragma once
#include <cstdint>

namespace tilewise {

enum class DType : int { kF32 = 0, kBF16 = 1, kI32 = 2, kF64 = 3 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 4;
    case DType::kBF16:
      return 2;
    case DType::kI32:
      return 4;
    case DType::kF64:
      return 8;
  }
  return 0;
}

}  // namespace tilewise
