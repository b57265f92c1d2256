// Formats of quantised weights: their blocks in files, and their panels in memory.
//
// A format's name, block and arithmetic are those of src/tilewise/formats/. In memory a weight is stored in panels of
// 32 rows, like any weight. A panel is a sequence of blocks of all its rows; a block has
//   the scales        f16 or bf16 numbers, each for 32 rows, then bytes, each for 32 rows
//   groups of 32 k    the codes of 32 rows and 32 elements along k, in planes
// so it has as many bytes as the 32 blocks of the file. A step is a pair of elements along k, as in microkernel.h, and
// lane l of 64 is element l % 2 of row l / 2. So 64 lanes of one step are the 32 words that a product reads. A plane
// has 8, 4, 2 or 1 bits of every code. With b bits it is uint16[b][64]: 64 places, one for each lane, whose i-th number
// has the bits of 16 / b steps, the first in the lowest bits. `place_of_lane` states the order of the places.
#pragma once
#include "kernels/microkernel.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

inline constexpr int kGroup = 32;  // elements along k of a group
inline constexpr int kGroupLanes = 2 * kPanel;
inline constexpr int kGroupSteps = kGroup / 2;
inline constexpr int kMostBlock = 512;  // elements

/// What a code from 0 on means: (code - offset) * d, a table's number * d, code * d + m, (code - m) * d, or the number
/// of 8 bits (sign, 4 bits of exponent, 3 of mantissa) * d.
enum class Meaning { kCentred, kTable, kAffine, kZeroPoint, kFloat8 };

/// What formats have in common. A block has `Block` elements; 0: any multiple of a group, which is known at run time.
/// `Halves` numbers of 16 bits and `Bytes` bytes per row and block determine the scales,
/// which hold for `Span` elements.
template <int Block, int FileBytes, int Halves, int Bytes, int Bits, int Span, Meaning M, int Offset = 0>
struct Format {
  static constexpr int kBlock = Block, kHalves = Halves, kBytes = Bytes, kBits = Bits;
  static constexpr int kSpan = Span, kOffset = Offset;
  static constexpr Meaning kMeaning = M;
  static constexpr bool kHasBf16Scales = false, kHasF32Scales = false;
  static constexpr int kHeadBytes = kPanel * (2 * Halves + Bytes);
  static constexpr int kGroupBytes = kPanel * kGroup * Bits / 8;
  static_assert(Block == 0 || kHeadBytes + Block / kGroup * kGroupBytes == kPanel * FileBytes);
  static constexpr bool kHas4 = Bits == 4 || Bits == 5 || Bits == 6, kHas2 = Bits == 2 || Bits == 3 || Bits == 6;
  static constexpr bool kHas1 = Bits == 3 || Bits == 5;
  static constexpr int kShift2 = kHas4 ? 4 : 0, kShift1 = kHas4 ? 4 : 2;  // of the plane's bits in a code
};

// 16 rows of a block at a time. Half(i) are the rows' i-th half in fp32, byte(i) their i-th byte.
typedef float Rows16 __attribute__((vector_size(64)));
typedef int32_t IntRows16 __attribute__((vector_size(64)));

TILEWISE_INLINE Rows16 as_numbers(const IntRows16& x) { return __builtin_convertvector(x, Rows16); }

/// 16 bytes with two codes of 4 bits each: low halves first, then high ones.
TILEWISE_INLINE void unpack_nibbles(const uint8_t* from, int count, uint8_t* codes) {
  for (int i = 0; i < count; ++i) {
    codes[i] = from[i] & 15;
    codes[count + i] = from[i] >> 4;
  }
}

TILEWISE_INLINE void copy_bytes(uint8_t* to, const uint8_t* from, int count) { __builtin_memcpy(to, from, count); }

/// The scale of every row is a half.
template <class F>
struct WithOneScale : F {
  template <class Half, class Byte>
  TILEWISE_INLINE void scales(const Half& half, const Byte&, int, Rows16& d, Rows16&) {
    d = half(0);
  }
};
/// Scale and minimum are halves.
template <class F>
struct WithMinimum : F {
  template <class Half, class Byte>
  TILEWISE_INLINE void scales(const Half& half, const Byte&, int, Rows16& d, Rows16& m) {
    d = half(0);
    m = half(1);
  }
};

// Each format unpacks a block of a file into codes, 2 kHalves bytes of halves, and kBytes bytes.

struct Q8_0 : WithOneScale<Format<32, 34, 1, 0, 8, 32, Meaning::kCentred, 128>> {
  TILEWISE_INLINE void unpack(const uint8_t* block, uint8_t* codes, uint8_t* halves, uint8_t*, int) {
    copy_bytes(halves, block, 2);
    for (int i = 0; i < 32; ++i) codes[i] = block[2 + i] ^ 0x80;
  }
};

struct Q4_0 : WithOneScale<Format<32, 18, 1, 0, 4, 32, Meaning::kCentred, 8>> {
  TILEWISE_INLINE void unpack(const uint8_t* block, uint8_t* codes, uint8_t* halves, uint8_t*, int) {
    copy_bytes(halves, block, 2);
    unpack_nibbles(block + 2, 16, codes);
  }
};

struct Q4_1 : WithMinimum<Format<32, 20, 2, 0, 4, 32, Meaning::kAffine>> {
  TILEWISE_INLINE void unpack(const uint8_t* block, uint8_t* codes, uint8_t* halves, uint8_t*, int) {
    copy_bytes(halves, block, 4);
    unpack_nibbles(block + 4, 16, codes);
  }
};

TILEWISE_INLINE void add_fifth_bits(const uint8_t* bits, uint8_t* codes) {
  for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(codes[i] | ((bits[i / 8] >> i % 8 & 1) << 4));
}

struct Q5_0 : WithOneScale<Format<32, 22, 1, 0, 5, 32, Meaning::kCentred, 16>> {
  TILEWISE_INLINE void unpack(const uint8_t* block, uint8_t* codes, uint8_t* halves, uint8_t*, int) {
    copy_bytes(halves, block, 2);
    unpack_nibbles(block + 6, 16, codes);
    add_fifth_bits(block + 2, codes);
  }
};

struct Q5_1 : WithMinimum<Format<32, 24, 2, 0, 5, 32, Meaning::kAffine>> {
  TILEWISE_INLINE void unpack(const uint8_t* block, uint8_t* codes, uint8_t* halves, uint8_t*, int) {
    copy_bytes(halves, block, 4);
    unpack_nibbles(block + 8, 16, codes);
    add_fifth_bits(block + 4, codes);
  }
};

struct Q2K : Format<256, 84, 2, 16, 2, 16, Meaning::kAffine> {
  TILEWISE_INLINE void unpack(const uint8_t* block, uint8_t* codes, uint8_t* halves, uint8_t* bytes, int) {
    copy_bytes(bytes, block, 16);
    copy_bytes(halves, block + 80, 4);
    for (int e = 0; e < 256; ++e) codes[e] = block[16 + e / 128 * 32 + e % 32] >> 2 * (e % 128 / 32) & 3;
  }
  template <class Half, class Byte>
  TILEWISE_INLINE void scales(const Half& half, const Byte& byte, int span, Rows16& d, Rows16& m) {
    d = half(0) * as_numbers(byte(span) & 15);
    m = -(half(1) * as_numbers(byte(span) >> 4));
  }
};

struct Q3K : Format<256, 110, 1, 12, 3, 16, Meaning::kCentred, 4> {
  TILEWISE_INLINE void unpack(const uint8_t* block, uint8_t* codes, uint8_t* halves, uint8_t* bytes, int) {
    copy_bytes(bytes, block + 96, 12);
    copy_bytes(halves, block + 108, 2);
    for (int e = 0; e < 256; ++e) {
      const int low = block[32 + e / 128 * 32 + e % 32] >> 2 * (e % 128 / 32) & 3;
      codes[e] = static_cast<uint8_t>(low | (block[e % 32] >> e / 32 & 1) << 2);
    }
  }
  template <class Half, class Byte>
  TILEWISE_INLINE void scales(const Half& half, const Byte& byte, int span, Rows16& d, Rows16&) {
    const IntRows16 low = byte(span % 8) >> (span < 8 ? 0 : 4) & 15;
    const IntRows16 high = byte(8 + span % 4) >> 2 * (span / 4) & 3;
    d = half(0) * as_numbers((low | high << 4) - 32);
  }
};

/// The scales and minima of 6 bits that Q4_K and Q5_K pack into 12 bytes.
template <class F>
struct WithSixBits : F {
  template <class Half, class Byte>
  TILEWISE_INLINE void scales(const Half& half, const Byte& byte, int span, Rows16& d, Rows16& m) {
    const bool is_early = span < 4;
    const IntRows16 own = byte(is_early ? span : span + 4), other = byte(is_early ? span + 4 : span - 4);
    d = half(0) * as_numbers(is_early ? own & 63 : (own & 15) | (other >> 6) << 4);
    m = -(half(1) * as_numbers(is_early ? other & 63 : own >> 4 | (byte(span) >> 6) << 4));
  }
};

struct Q4K : WithSixBits<Format<256, 144, 2, 12, 4, 32, Meaning::kAffine>> {
  TILEWISE_INLINE void unpack(const uint8_t* block, uint8_t* codes, uint8_t* halves, uint8_t* bytes, int) {
    copy_bytes(halves, block, 4);
    copy_bytes(bytes, block + 4, 12);
    for (int c = 0; c < 4; ++c) unpack_nibbles(block + 16 + 32 * c, 32, codes + 64 * c);
  }
};

struct Q5K : WithSixBits<Format<256, 176, 2, 12, 5, 32, Meaning::kAffine>> {
  TILEWISE_INLINE void unpack(const uint8_t* block, uint8_t* codes, uint8_t* halves, uint8_t* bytes, int) {
    copy_bytes(halves, block, 4);
    copy_bytes(bytes, block + 4, 12);
    for (int c = 0; c < 4; ++c) unpack_nibbles(block + 48 + 32 * c, 32, codes + 64 * c);
    for (int e = 0; e < 256; ++e) codes[e] = static_cast<uint8_t>(codes[e] | (block[16 + e % 32] >> e / 32 & 1) << 4);
  }
};

struct Q6K : Format<256, 210, 1, 16, 6, 16, Meaning::kCentred, 32> {
  TILEWISE_INLINE void unpack(const uint8_t* block, uint8_t* codes, uint8_t* halves, uint8_t* bytes, int) {
    copy_bytes(bytes, block + 192, 16);
    copy_bytes(halves, block + 208, 2);
    for (int n = 0; n < 2; ++n, codes += 128) {
      unpack_nibbles(block + 64 * n, 64, codes);
      for (int e = 0; e < 128; ++e)
        codes[e] = static_cast<uint8_t>(codes[e] | (block[128 + 32 * n + e % 32] >> 2 * (e / 32) & 3) << 4);
    }
  }
  template <class Half, class Byte>
  TILEWISE_INLINE void scales(const Half& half, const Byte& byte, int span, Rows16& d, Rows16&) {
    d = half(0) * as_numbers(byte(span) << 24 >> 24);
  }
};

alignas(16) inline constexpr int8_t kIq4Numbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                       1,    13,   25,  38,  53,  69,  89,  113};
alignas(16) inline constexpr int8_t kMxfp4Numbers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct IQ4NL : WithOneScale<Format<32, 18, 1, 0, 4, 32, Meaning::kTable>> {
  static constexpr const int8_t* kTable = kIq4Numbers;
  TILEWISE_INLINE void unpack(const uint8_t* block, uint8_t* codes, uint8_t* halves, uint8_t*, int) {
    copy_bytes(halves, block, 2);
    unpack_nibbles(block + 2, 16, codes);
  }
};

struct IQ4XS : Format<256, 136, 1, 6, 4, 32, Meaning::kTable> {
  static constexpr const int8_t* kTable = kIq4Numbers;
  TILEWISE_INLINE void unpack(const uint8_t* block, uint8_t* codes, uint8_t* halves, uint8_t* bytes, int) {
    copy_bytes(halves, block, 2);
    copy_bytes(bytes, block + 2, 6);
    for (int g = 0; g < 8; ++g) unpack_nibbles(block + 8 + 16 * g, 16, codes + 32 * g);
  }
  template <class Half, class Byte>
  TILEWISE_INLINE void scales(const Half& half, const Byte& byte, int span, Rows16& d, Rows16&) {
    const IntRows16 low = byte(2 + span / 2) >> 4 * (span % 2) & 15, high = byte(span / 4) >> 2 * (span % 4) & 3;
    d = half(0) * as_numbers((low | high << 4) - 32);
  }
};

struct MXFP4 : Format<32, 17, 0, 1, 4, 32, Meaning::kTable> {
  static constexpr const int8_t* kTable = kMxfp4Numbers;
  TILEWISE_INLINE void unpack(const uint8_t* block, uint8_t* codes, uint8_t*, uint8_t* bytes, int) {
    bytes[0] = block[0];
    unpack_nibbles(block + 1, 16, codes);
  }
  /// Half of 2^(e - 127).
  template <class Half, class Byte>
  TILEWISE_INLINE void scales(const Half&, const Byte& byte, int, Rows16& d, Rows16&) {
    const IntRows16 e = byte(0);
    d = (Rows16)(e == 0 ? 0 * e + 0x00200000 : e == 1 ? 0 * e + 0x00400000 : (e - 1) << 23);
  }
};

// Formats of src/tilewise/formats/group_blocks.py: one scale per block of any size.

template <int Bits, bool IsBf16>
struct Integers : Format<0, 0, 1, 1, Bits, kMostBlock, Meaning::kZeroPoint> {
  static constexpr bool kHasBf16Scales = IsBf16;
  TILEWISE_INLINE void unpack(const uint8_t* block, uint8_t* codes, uint8_t* halves, uint8_t* bytes, int size) {
    copy_bytes(halves, block, 2);
    bytes[0] = block[2];
    if constexpr (Bits == 8) {
      copy_bytes(codes, block + 3, size);
    } else {
      for (int i = 0; i < size / kGroup; ++i) unpack_nibbles(block + 3 + 16 * i, 16, codes + kGroup * i);
    }
  }
  template <class Half, class Byte>
  TILEWISE_INLINE void scales(const Half& half, const Byte& byte, int, Rows16& d, Rows16& m) {
    d = half(0);
    m = as_numbers(byte(0));
  }
};

/// A scale in bf16, or in fp32 as four bytes.
template <bool IsF32>
struct Float8 : Format<0, 0, IsF32 ? 0 : 1, IsF32 ? 4 : 0, 8, kMostBlock, Meaning::kFloat8> {
  static constexpr bool kHasBf16Scales = !IsF32, kHasF32Scales = IsF32;
  TILEWISE_INLINE void unpack(const uint8_t* block, uint8_t* codes, uint8_t* halves, uint8_t* bytes, int size) {
    copy_bytes(IsF32 ? bytes : halves, block, IsF32 ? 4 : 2);
    copy_bytes(codes, block + (IsF32 ? 4 : 2), size);
  }
  template <class Half, class Byte>
  TILEWISE_INLINE void scales(const Half& half, const Byte& byte, int, Rows16& d, Rows16&) {
    if constexpr (IsF32) {
      d = (Rows16)(byte(0) | byte(1) << 8 | byte(2) << 16 | byte(3) << 24);
    } else {
      d = half(0);
    }
  }
};

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
