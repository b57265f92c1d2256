// The register block of every contraction: R broadcast rows times 32 lanes, tree over k splits included.
//
// A step is one 32-bit word along the contraction: one fp32 value, or a pair of neighbouring bf16 values. Accumulators
// stay in registers over all segments of a k split; finished k splits wait on a stack in L1 and are folded in the order
// of the fixed tree, so one fp32 block leaves. Operands come packed (pack.h); the driver is product.h.
#pragma once
#include "kernels/dot.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

inline constexpr int kPanel = 32;  // lanes of a panel
#if defined(__AVX512BW__)
inline constexpr int kMaxRows = 14;  // 28 accumulators, two panel vectors, one broadcast: 31 of 32 registers
#elif defined(__aarch64__)
inline constexpr int kMaxRows = 12;  // 24 accumulators of 32 registers: bf16 needs six for its halves
#else
inline constexpr int kMaxRows = 6;  // 12 accumulators of 16 registers
#endif
inline constexpr int kBlockSteps = 128;  // a row-major A pack is cut into blocks of this many steps
inline constexpr int kRowStride = 144;  // words between its rows; 9 cache lines spread rows over the L1 sets
inline constexpr int kBlockWords = kMaxRows * kRowStride;
inline constexpr int kStepWords = kMaxRows <= 8 ? 8 : 16;  // a step of a step-major A pack
inline constexpr int kFewRows = 4;  // so few rows consume a panel faster than L2 delivers it
#if defined(__AVX2__) && !defined(__AVX512F__)
// Steps between two checks for prefetches. The processor can issue 36 instructions during the 12 products of a step, or
// half of them if another thread runs on the core; 20 are products and loads.
inline constexpr int kStride = 16;
inline constexpr int kTailSteps = 0, kTailRows = kMaxRows;  // the store buffer takes 12 stores
inline constexpr int kWideRows = 2;  // so few rows process a whole panel at a time
#else
inline constexpr int kStride = 1;
// The last steps of a k split run a few rows at a time if the store buffer cannot take all accumulators at once.
inline constexpr int kTailSteps = 4, kTailRows = 2;
inline constexpr int kWideRows = 0;
#endif

/// The maximum number of rows of a block, by multiplier (Dot).
template <class Dot>
inline constexpr int kRowsOf = kMaxRows;
/// Number of steps that are summed before they are added to an accumulator. Sums may be cut only between such groups.
template <class Dot>
inline constexpr int kGroupOf = 1;
/// Bytes of row blocks that are packed together. They must stay in L2, which has at least 1 MiB on processors with many
/// registers and half of that on others.
template <class Dot>
inline constexpr int64_t kRowBatchBytes = 256 << 10;
/// Steps packed at a time if both operands are packed: in windows of a longer contraction, and if packed at once.
template <class Dot>
inline constexpr int64_t kPackedSteps = kMaxRows > 6 ? 2304 : 512;
template <class Dot>
inline constexpr int64_t kUndividedSteps = kMaxRows > 6 ? 2304 : 1024;
/// The guard object that must exist while micro-kernels run.
template <class Dot>
struct ScopeOf {
  struct Type {};
};

/// A run of steps with one accumulator, and what happens to the accumulators after it.
struct Segment {
  int64_t a;  // words from the row block's pack
  int64_t b;  // words from the panel's base of this term
  int64_t addend;  // floats from MicroArgs::addend; -1: none
  int32_t term;
  int32_t steps;
  int16_t pops;  // finished subtrees to fold: v = top + v
  int8_t ends;  // the k split ends here
  int8_t push;  // the sum goes on the stack and accumulators restart from zero
};

/// Rows `pitch` bytes apart, each of at most two cache lines.
struct Rows {
  const char* data;
  int64_t count, pitch, bytes;
};

struct MicroArgs {
  const Segment* segments;
  int64_t num_segments;
  const uint32_t* a;
  const uint32_t* const* b;  // per term
  float* stack;  // top of the stack: the next free [R][32] entry
  const float* init;  // [R][32] to start from; nullptr: zero
  const float* scales;  // per segment (kLanes apart) and row: the factor of the previous sum; kScaledRows only
  const float* addend;
  float* out;  // R rows of 32; nullptr: results stay on the stack
  int64_t out_pitch = kPanel;  // floats between its rows; amx.h supports only kPanel
  // Data to prefetch. In every step i with i & every_ahead = 0 the cache line at `ahead` and the one `second` bytes
  // after it are prefetched, and `ahead` advances by `pace` bytes.
  const char* ahead = nullptr;
  int64_t second = 0, pace = 64;
  int32_t every_ahead = INT32_MAX;
  int32_t every_piece = INT32_MAX;
  const char* const* pieces = nullptr;  // the same with every_piece: one piece of memory per segment
  Rows expected[2] = {};  // read and written after this call; prefetched in its last segment
  int64_t rows = 0;  // R, for micro-kernels of any R
};
using MicroFn = void (*)(const MicroArgs&);

TILEWISE_INLINE void expect(const Rows (&expected)[2]) {
  for (const Rows& rows : expected)
    for (int64_t r = 0; r < rows.count; ++r) {
      __builtin_prefetch(rows.data + r * rows.pitch, 1);
      __builtin_prefetch(rows.data + r * rows.pitch + rows.bytes - 1, 1);
    }
}

/// Layout of A in a row block: row-major (kRowStride), the same for scaled sums, step-major in blocks of kStepWords
/// columns, and step-major in blocks of 64 columns (only for the block heights of attention's backward pass).
enum class ALayout { kRows, kScaledRows, kSteps, kSteps64 };

/// The micro-kernels of 1 to kMaxRows rows. Defined in microkernels.cc, so that each is compiled only once per
/// level.
template <class Dot, ALayout L>
struct MicroTable {
  static const MicroFn kFns[kMaxRows];
  static const MicroFn kHalfFns[3];  // of kMaxRows - 2 rows and more, for the first 16 lanes; may be nullptr
};

template <class Dot, ALayout L>
struct MicroOf {
  static MicroFn of(int64_t rows) { return MicroTable<Dot, L>::kFns[rows - 1]; }
  static MicroFn half_of(int64_t rows) {
    return rows < kMaxRows - 2 ? nullptr : MicroTable<Dot, L>::kHalfFns[rows - kMaxRows + 2];
  }
};

/// The micro-kernel for `rows` rows, 1 to kRowsOf<Dot>.
template <class Dot, ALayout L>
TILEWISE_INLINE MicroFn micro_for(int64_t rows) {
  return MicroOf<Dot, L>::of(rows);
}

/// The same for a panel of which `lanes` are used.
template <class Dot, ALayout L>
TILEWISE_INLINE MicroFn micro_for(int64_t rows, int64_t lanes) {
  MicroFn half = nullptr;
  if constexpr (requires { MicroOf<Dot, L>::half_of(rows); })
    if (lanes <= kPanel / 2) half = MicroOf<Dot, L>::half_of(rows);
  return half ? half : micro_for<Dot, L>(rows);
}

/// Element type of a kernel: how it is stored, paired into steps and multiplied.
struct F32 {
  using T = float;
  using Dot = DotF32;
  static constexpr int kPerStep = 1;
};
struct BF16 {
  using T = bf16;
  using Dot = DotBf16;
  static constexpr int kPerStep = 2;
};

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
