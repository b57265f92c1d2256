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
inline constexpr int kBlockSteps = 128;  // a row-major A pack is cut into blocks of so many steps
inline constexpr int kRowStride = 144;  // words between its rows; 9 cache lines spread rows over the L1 sets
inline constexpr int kBlockWords = kMaxRows * kRowStride;
inline constexpr int kStepWords = kMaxRows <= 8 ? 8 : 16;  // a step of a step-major A pack
inline constexpr int kFewRows = 4;  // so few are done with a panel sooner than it comes from L2
#if defined(__AVX2__) && !defined(__AVX512F__)
// Steps between two looks at what is to be asked for. A step is 12 products, which leave the processor room for 36
// instructions, or for half of them where another thread runs on the core: 20 are products and loads.
inline constexpr int kStride = 16;
inline constexpr int kTailSteps = 0, kTailRows = kMaxRows;  // it can hold back 12 stores
inline constexpr int kWideRows = 2;  // so few rows take a whole panel at a time
#else
inline constexpr int kStride = 1;
// The last steps of a k split run a few rows at a time, where accumulators are more than the processor can hold back.
inline constexpr int kTailSteps = 4, kTailRows = 2;
inline constexpr int kWideRows = 0;
#endif

/// Rows of a block at most, by what multiplies (Dot).
template <class Dot>
inline constexpr int kRowsOf = kMaxRows;
/// So many steps are added up before they reach an accumulator; a sum may be cut between them, not inside.
template <class Dot>
inline constexpr int kGroupOf = 1;
/// Row blocks packed together: they stay in L2, of 1 MiB at least where registers are many, and half of that elsewhere.
template <class Dot>
inline constexpr int64_t kRowBatchBytes = 256 << 10;
/// Steps packed at a time where both operands are: of a longer contraction, and of one that is packed at once.
template <class Dot>
inline constexpr int64_t kPackedSteps = kMaxRows > 6 ? 2304 : 512;
template <class Dot>
inline constexpr int64_t kUndividedSteps = kMaxRows > 6 ? 2304 : 1024;
/// What must live while micro-kernels run.
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

/// Rows that lie `pitch` bytes apart, of at most two cache lines.
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
  const float* scales;  // per segment (kLanes apart) and row: what was added up before is multiplied with first,
                        // where the micro-kernel is one for scaled sums
  const float* addend;
  float* out;  // R rows of 32; nullptr: nothing is left outside the stack
  int64_t out_pitch = kPanel;  // floats between its rows; tiles of registers (amx.h) know no other
  const char* ahead = nullptr;  // what is read later: in every step i with i & every_ahead = 0 a cache line is asked
                                // for, and the one `beside` bytes behind it; the next time, those `pace` bytes further
  int64_t beside = 0, pace = 64;
  int32_t every_ahead = INT32_MAX;
  int32_t every_piece = INT32_MAX;
  const char* const* pieces = nullptr;  // the same, a piece per segment
  Rows expected[2] = {};  // what is read and written after this call: asked for in its last segment
  int64_t rows = 0;  // R, for micro-kernels that are not made for one
};
using MicroFn = void (*)(const MicroArgs&);

TILEWISE_INLINE void expect(const Rows (&expected)[2]) {
  for (const Rows& rows : expected)
    for (int64_t r = 0; r < rows.count; ++r) {
      __builtin_prefetch(rows.data + r * rows.pitch, 1);
      __builtin_prefetch(rows.data + r * rows.pitch + rows.bytes - 1, 1);
    }
}

/// A element (row r, step s) lies at a + r * RowWords + s * StepWords. Where a step is two words, the second is
/// StepWords behind the first, and all distances are twice as large but those between rows that are neighbours.
///
/// At the end of a k split many registers are stored at once, as many as the processor's store buffer holds. So the
/// last steps run a few rows at a time: the stores of these rows overlap with the products of the next ones.
template <class Dot, int R, int RowWords, int StepWords, bool kScales = false>
void micro(const MicroArgs& x) {
  constexpr int kInto = R <= kFewRows ? 3 : 2;  // L1, L2
  constexpr int kVectors = R <= kWideRows ? 4 : 2;  // of a row at a time
  constexpr int kWords = kWordsOf<Dot>, kRow = RowWords == 1 ? 1 : RowWords * kWords, kStep = StepWords * kWords;
  for (int lane = 0; lane < kPanel; lane += kVectors * kNativeLanes) {
    // All is asked for in the first pass.
    const int32_t every_ahead = lane == 0 ? x.every_ahead : INT32_MAX;
    const int32_t every_piece = lane == 0 ? x.every_piece : INT32_MAX;
    NativeF acc[R][kVectors];
    const auto at = [lane](auto* block, int r, int j) { return block + r * kPanel + lane + j * kNativeLanes; };
    if (x.init) {
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r)
        for (int j = 0; j < kVectors; ++j) acc[r][j] = native_load(at(x.init, r, j));
    } else {
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r)
        for (int j = 0; j < kVectors; ++j) acc[r][j] = NativeF{};
    }
    float* stack = x.stack;
    const char* ahead = x.ahead;
    for (const Segment* s = x.segments; s != x.segments + x.num_segments; ++s) {
      const uint32_t* a = x.a + s->a * kWords;
      const char* piece = x.pieces ? x.pieces[s - x.segments] : nullptr;
      const bool is_last = s + 1 == x.segments + x.num_segments;
      if (is_last) expect(x.expected);
      if constexpr (kScales) {
        const float* scales = x.scales + (s - x.segments) * kLanes;
        NativeF zero = {};
        hold_here(zero);
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r)  // + 0: a product of -0 leaves no trace
          for (int j = 0; j < kVectors; ++j) acc[r][j] = fused(native_set(scales[r]), acc[r][j], zero);
      }
      const float* b = reinterpret_cast<const float*>(x.b[s->term] + s->b) + lane;
      const bool is_stored = s->ends || (is_last && x.out);
      const int32_t tail = is_stored ? static_cast<int32_t>(smaller(s->steps, kTailSteps)) : 0;
      const auto ask_ahead = [&]() __attribute__((always_inline)) {
        __builtin_prefetch(ahead, 0, kInto);
        __builtin_prefetch(ahead + x.beside, 0, kInto);
        ahead += x.pace;
      };
      const auto ask_piece = [&]() __attribute__((always_inline)) {
        __builtin_prefetch(piece, 0, 2);
        piece += 64;
      };
      const auto ask = [&](int32_t i, int32_t of_ahead, int32_t of_piece) __attribute__((always_inline)) {
        if (__builtin_expect((i & of_ahead) == 0, 0)) ask_ahead();
        if (__builtin_expect((i & of_piece) == 0, 0)) ask_piece();
      };
      const auto step = [&](int i) __attribute__((always_inline)) {
        Dot::block(
            acc,
            [&](int r, int word) __attribute__((always_inline)) { return a[r * kRow + i * kStep + word * StepWords]; },
            [&](int j) __attribute__((always_inline)) { return native_load(b + i * kPanel + j * kNativeLanes); });
      };
      int32_t i = s->steps;
      if constexpr (kStride > 1) {
        for (; i >= kStride; i -= kStride) {
          ask(i, every_ahead & -kStride, every_piece & -kStride);
          for (int32_t j = every_ahead; j < kStride - 1; j += every_ahead + 1) ask_ahead();
          for (int32_t j = every_piece; j < kStride - 1; j += every_piece + 1) ask_piece();
#pragma GCC unroll 16
          for (int j = 0; j < kStride; ++j) {
            step(j);
            hold_all(acc);
          }
          a += kStride * kStep;
          b += kStride * kPanel;
        }
      }
      for (; i > tail; --i) {
        ask(i, every_ahead, every_piece);
        step(0);
        a += kStep;
        b += kPanel;
      }
      if (!is_stored) continue;
      const float* addend = s->ends && s->addend >= 0 ? x.addend + s->addend : nullptr;
      const int pops = s->ends ? s->pops : 0;
      const bool pushes = s->ends && s->push;
      const float* const top = stack;
      stack -= pops * R * kPanel;
      float* const to = pushes ? stack : is_last ? x.out : nullptr;
      const int64_t pitch = pushes ? kPanel : x.out_pitch;
#pragma GCC unroll 7
      for (int first = 0; first < R; first += kTailRows) {
        const int end = first + kTailRows < R ? first + kTailRows : R;
#pragma GCC unroll 1
        for (int32_t i = 0; i < tail; ++i) {
          if (first == 0) ask(tail - i, every_ahead, every_piece);
          NativeF panel[kVectors];
          for (int j = 0; j < kVectors; ++j) {
            panel[j] = native_load(b + i * kPanel + j * kNativeLanes);
            hold(panel[j]);
          }
#pragma GCC unroll 14
          for (int r = first; r < end; ++r) Dot::step(acc[r], a[r * kRow + i * kStep], panel);
        }
        const auto each = [&](const auto& f) __attribute__((always_inline)) {
#pragma GCC unroll 14
          for (int r = first; r < end; ++r)
            for (int j = 0; j < kVectors; ++j) f(acc[r][j], r, j);
        };
        if (addend) each([&](NativeF& v, int r, int j) { v = v + native_load(at(addend, r, j)); });
        for (int pop = 1; pop <= pops; ++pop)
          each([&](NativeF& v, int r, int j) { v = native_load(at(top - pop * R * kPanel, r, j)) + v; });
        if (to) each([&](NativeF& v, int r, int j) { native_store(to + r * pitch + lane + j * kNativeLanes, v); });
        if (pushes) each([&](NativeF& v, int, int) { v = NativeF{}; });
      }
      if (pushes) stack += R * kPanel;
    }
    if (x.num_segments > 0 || !x.out) continue;
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < kVectors; ++j) native_store(x.out + r * x.out_pitch + lane + j * kNativeLanes, acc[r][j]);
  }
}

/// Row-major A (kRowStride), the same for scaled sums, step-major A in blocks of kStepWords columns, and of 64 columns.
enum class ALayout { kRows, kScaledRows, kSteps, kSteps64 };

template <class Dot, ALayout L, int R>
constexpr MicroFn micro_of() {
  if constexpr (L == ALayout::kRows) return micro<Dot, R, kRowStride, 1>;
  if constexpr (L == ALayout::kScaledRows) return micro<Dot, R, kRowStride, 1, true>;
  if constexpr (L == ALayout::kSteps) return micro<Dot, R, 1, kStepWords>;
  return micro<Dot, R, 1, 64>;
}

template <class Dot, ALayout L, int... R>
struct MicroTable {
  static constexpr MicroFn kFns[] = {micro_of<Dot, L, R + 1>()...};
};
#if defined(__AVX512BW__)
template <class Dot, ALayout L>
using Micro = MicroTable<Dot, L, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13>;
#elif defined(__aarch64__)
template <class Dot, ALayout L>
using Micro = MicroTable<Dot, L, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11>;
#else
template <class Dot, ALayout L>
using Micro = MicroTable<Dot, L, 0, 1, 2, 3, 4, 5>;
#endif

template <class Dot, ALayout L>
struct MicroOf {
  static MicroFn of(int64_t rows) { return Micro<Dot, L>::kFns[rows - 1]; }
};

/// The micro-kernel for `rows` rows, 1 to kRowsOf<Dot>.
template <class Dot, ALayout L>
TILEWISE_INLINE MicroFn micro_for(int64_t rows) {
  return MicroOf<Dot, L>::of(rows);
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
