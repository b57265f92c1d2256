// The micro-kernels of microkernel.h: one function per number of rows, element type and layout of A.
//
// They take more than half of the compile time of matrix products, so they are instantiated only here. matmul,
// weight_gradient and attention look them up in MicroTable.
#include "kernels/microkernel.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

/// Element (row r, step s) of A is at a + r * RowWords + s * StepWords. If a step is two words, the second word is
/// StepWords after the first, and all distances double except the one between neighbouring rows.
///
/// Storing all accumulators at the end of a k split would fill the processor's store buffer. So the last steps run a
/// few rows at a time, and the stores of these rows overlap with the products of the next ones.
template <class Dot, int R, int RowWords, int StepWords, bool kScales = false, int Lanes = kPanel>
void micro(const MicroArgs& x) {
  constexpr int kLocality = R <= kFewRows ? 3 : 2;  // prefetch to L1 or L2
  constexpr int kMostVectors = R <= kWideRows ? 4 : 2, kFit = Lanes / kNativeLanes;
  constexpr int kVectors = kMostVectors < kFit ? kMostVectors : kFit;  // of a row at a time
  constexpr int kWords = kWordsOf<Dot>, kRow = RowWords == 1 ? 1 : RowWords * kWords, kStep = StepWords * kWords;
  for (int lane = 0; lane < Lanes; lane += kVectors * kNativeLanes) {
    // Only the first pass prefetches.
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
        for (int r = 0; r < R; ++r)  // + 0 turns -0 into +0
          for (int j = 0; j < kVectors; ++j) acc[r][j] = fused(native_set(scales[r]), acc[r][j], zero);
      }
      const float* b = reinterpret_cast<const float*>(x.b[s->term] + s->b) + lane;
      const bool is_stored = s->ends || (is_last && x.out);
      const int32_t tail = is_stored ? static_cast<int32_t>(smaller(s->steps, kTailSteps)) : 0;
      const auto prefetch_ahead = [&]() __attribute__((always_inline)) {
        __builtin_prefetch(ahead, 0, kLocality);
        __builtin_prefetch(ahead + x.second, 0, kLocality);
        ahead += x.pace;
      };
      const auto prefetch_piece = [&]() __attribute__((always_inline)) {
        __builtin_prefetch(piece, 0, 2);
        piece += 64;
      };
      const auto prefetch = [&](int32_t i, int32_t of_ahead, int32_t of_piece) __attribute__((always_inline)) {
        if (__builtin_expect((i & of_ahead) == 0, 0)) prefetch_ahead();
        if (__builtin_expect((i & of_piece) == 0, 0)) prefetch_piece();
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
          prefetch(i, every_ahead & -kStride, every_piece & -kStride);
          for (int32_t j = every_ahead; j < kStride - 1; j += every_ahead + 1) prefetch_ahead();
          for (int32_t j = every_piece; j < kStride - 1; j += every_piece + 1) prefetch_piece();
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
        prefetch(i, every_ahead, every_piece);
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
          if (first == 0) prefetch(tail - i, every_ahead, every_piece);
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

/// Attention's backward pass cuts 64 rows into nearly equal blocks, so its layout needs only two heights.
constexpr bool is_height_of_64(int rows) {
  const int low = 64 / ((64 + kMaxRows - 1) / kMaxRows);
  return rows == low || rows == low + 1;
}

template <class Dot, ALayout L, int R>
constexpr MicroFn micro_of() {
  if constexpr (L == ALayout::kRows) return micro<Dot, R, kRowStride, 1>;
  if constexpr (L == ALayout::kScaledRows) return micro<Dot, R, kRowStride, 1, true>;
  if constexpr (L == ALayout::kSteps) return micro<Dot, R, 1, kStepWords>;
  if constexpr (L == ALayout::kSteps64 && is_height_of_64(R)) return micro<Dot, R, 1, 64>;
  return nullptr;
}

/// The same for the first 16 lanes of a panel. Few heights suffice, because blocks of many rows are nearly full.
template <class Dot, ALayout L, int R>
constexpr MicroFn half_micro_of() {
  if constexpr (R < kMaxRows - 2) return nullptr;
  if constexpr (L == ALayout::kRows) return micro<Dot, R, kRowStride, 1, false, kPanel / 2>;
  if constexpr (L == ALayout::kSteps) return micro<Dot, R, 1, kStepWords, false, kPanel / 2>;
  return nullptr;
}

}  // namespace

#define TILEWISE_MICRO(rows) micro_of<Dot, L, rows>()
template <class Dot, ALayout L>
const MicroFn MicroTable<Dot, L>::kFns[] = {
    TILEWISE_MICRO(1),  TILEWISE_MICRO(2),  TILEWISE_MICRO(3),
    TILEWISE_MICRO(4),  TILEWISE_MICRO(5),  TILEWISE_MICRO(6),
#if defined(__AVX512BW__) || defined(__aarch64__)
    TILEWISE_MICRO(7),  TILEWISE_MICRO(8),  TILEWISE_MICRO(9),
    TILEWISE_MICRO(10), TILEWISE_MICRO(11), TILEWISE_MICRO(12),
#endif
#if defined(__AVX512BW__)
    TILEWISE_MICRO(13), TILEWISE_MICRO(14),
#endif
};

template <class Dot, ALayout L>
const MicroFn MicroTable<Dot, L>::kHalfFns[] = {
    half_micro_of<Dot, L, kMaxRows - 2>(), half_micro_of<Dot, L, kMaxRows - 1>(), half_micro_of<Dot, L, kMaxRows>()};

template struct MicroTable<DotF32, ALayout::kRows>;
template struct MicroTable<DotF32, ALayout::kScaledRows>;
template struct MicroTable<DotF32, ALayout::kSteps>;
template struct MicroTable<DotF32, ALayout::kSteps64>;
template struct MicroTable<DotBf16, ALayout::kRows>;
template struct MicroTable<DotBf16, ALayout::kSteps>;
#if !defined(__AMX_BF16__)  // with AMX, attention uses tile registers
template struct MicroTable<DotBf16, ALayout::kScaledRows>;
template struct MicroTable<DotBf16, ALayout::kSteps64>;
#endif

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
