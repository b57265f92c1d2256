// The rules of names that come from C: they are written to JSON, HTML and error messages as UTF-8.
#pragma once
#include <cstdint>
#include <string_view>

namespace tilewise::tasks {

/// UTF-8 without control characters, surrogates and longer forms than needed.
inline bool is_text(std::string_view bytes) {
  constexpr uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};  // by the number of bytes that follow the first
  for (size_t at = 0; at < bytes.size();) {
    const auto first = static_cast<uint8_t>(bytes[at++]);
    const uint32_t more = first < 0x80 ? 0 : first >> 5 == 6 ? 1 : first >> 4 == 14 ? 2 : first >> 3 == 30 ? 3 : 4;
    if (more == 4 || more > bytes.size() - at) return false;
    uint32_t code = more == 0 ? first : first & (0x3Fu >> more);
    for (uint32_t m = 0; m < more; ++m) {
      const auto next = static_cast<uint8_t>(bytes[at++]);
      if (next >> 6 != 2) return false;
      code = code << 6 | (next & 0x3Fu);
    }
    const bool is_surrogate = code >= 0xD800 && code < 0xE000;
    if (code < kLeast[more] || code > 0x10FFFF || is_surrogate || code < 32 || (code >= 127 && code < 160))
      return false;
  }
  return true;
}

}  // namespace tilewise::tasks
