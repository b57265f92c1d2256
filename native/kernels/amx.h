// The register block of bf16 products on processors with AMX: 32 rows times 32 lanes in four tile registers.
//
// One instruction processes 16 steps, which are pairs of bf16. Starting from +0, it sums the products of even elements
// and those of odd ones separately, each in the order of k, then adds both sums, and adds the result to the
// accumulator. So a k split is a sum over groups of 16 steps counted from its beginning, and segments are cut only
// between groups (Blocking). Missing steps of the last group are zeros. Adding +0 does not change such a sum, because a
// sum that begins with +0 is never -0.
#pragma once
#include "kernels/microkernel.h"
#include "kernels/register_block.h"

#if defined(__AMX_BF16__)

namespace tilewise::kernels::TILEWISE_ISA_NS {

/// Selects tile registers where other levels have a dot product of lanes.
struct DotAmx {};
struct BF16Amx {
  using T = bf16;
  using Dot = DotAmx;
  static constexpr int kPerStep = 2;
};

inline constexpr int kAmxRows = 16;  // rows of a tile register
inline constexpr int kAmxSteps = 16;  // steps of one instruction
template <>
inline constexpr int kRowsOf<DotAmx> = 2 * kAmxRows;
template <>
inline constexpr int kGroupOf<DotAmx> = kAmxSteps;
template <>
inline constexpr int64_t kRowBatchBytes<DotAmx> = 384 << 10;  // L2 has 2 MiB
template <>
inline constexpr int64_t kPackedSteps<DotAmx> = 1024;  // a block has more than twice the rows
template <>
inline constexpr int64_t kUndividedSteps<DotAmx> = 1024;

/// Configures tile registers of 16 rows of 64 bytes, and releases them when it ends: context switches of a thread with
/// configured tile registers are slower.
class AmxScope {
 public:
  AmxScope() {
    struct alignas(64) Shapes {
      uint8_t palette = 1, first_row = 0, none[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int i = 0; i < 8; ++i) {
      shapes.row_bytes[i] = 4 * kAmxSteps;
      shapes.rows[i] = kAmxRows;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~AmxScope() { __asm__ volatile("tilerelease" ::); }
  AmxScope(const AmxScope&) = delete;
  AmxScope& operator=(const AmxScope&) = delete;
};
template <>
struct ScopeOf<DotAmx> {
  using Type = AmxScope;
};

// Compilers do not track the content of tile registers. The "memory" clobber keeps the writes of packing before a tile
// load.
template <int kTile>
TILEWISE_INLINE void amx_load(const void* from, int64_t row_bytes) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(kTile) : "memory");
}
template <int kTile>
TILEWISE_INLINE void amx_store(void* to, int64_t row_bytes) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(kTile) : "memory");
}
template <int kTile>
TILEWISE_INLINE void amx_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kSum, int kA, int kB>
TILEWISE_INLINE void amx_dot() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}

/// Sums are tiles 0 and 1 (rows 0 to 15), 2 and 3 (rows 16 to 31); A 4 and 5; B 6 and 7. kTall: 32 rows, else 16.
template <bool kTall>
struct AmxBlock {
  static constexpr int64_t kPitch = kPanel * 4, kBelow = kAmxRows * kPanel;

  static TILEWISE_MEMBER void clear() {
    amx_zero<0>();
    amx_zero<1>();
    if constexpr (kTall) amx_zero<2>(), amx_zero<3>();
  }
  static TILEWISE_MEMBER void load(const float* from) {
    amx_load<0>(from, kPitch);
    amx_load<1>(from + kAmxSteps, kPitch);
    if constexpr (kTall) amx_load<2>(from + kBelow, kPitch), amx_load<3>(from + kBelow + kAmxSteps, kPitch);
  }
  static TILEWISE_MEMBER void store(float* to) {
    amx_store<0>(to, kPitch);
    amx_store<1>(to + kAmxSteps, kPitch);
    if constexpr (kTall) amx_store<2>(to + kBelow, kPitch), amx_store<3>(to + kBelow + kAmxSteps, kPitch);
  }
  static TILEWISE_MEMBER void multiply(const uint32_t* a, int64_t row_words, const uint32_t* b) {
    amx_load<6>(b, kPitch);
    amx_load<4>(a, row_words * 4);
    amx_dot<0, 4, 6>();
    amx_load<7>(b + kAmxSteps, kPitch);
    amx_dot<1, 4, 7>();
    if constexpr (kTall) {
      amx_load<5>(a + kAmxRows * row_words, row_words * 4);
      amx_dot<2, 5, 6>();
      amx_dot<3, 5, 7>();
    }
  }
};

/// Multiplies a last group that has only `steps` steps; the missing ones are zeros on both sides.
template <bool kTall>
TILEWISE_INLINE void amx_last_group(const uint32_t* a, const uint32_t* b, int64_t rows, int64_t steps) {
  alignas(64) uint32_t left[(1 + kTall) * kAmxRows * kAmxSteps];
  alignas(64) uint32_t right[kAmxSteps * kPanel];
  const auto there = static_cast<__mmask16>((1u << steps) - 1);
  for (int64_t r = 0; r < rows; ++r)
    _mm512_store_si512(left + r * kAmxSteps, _mm512_maskz_loadu_epi32(there, a + r * kRowStride));
  for (int64_t i = 0; i < kAmxSteps; ++i)
    for (int64_t j = 0; j < kPanel; j += kLanes)
      store_int(right + i * kPanel + j, i < steps ? load_int(b + i * kPanel + j) : set_int(0));
  AmxBlock<kTall>::multiply(left, kAmxSteps, right);
}

/// Finishes a k split: stores its sum plus addend and finished subtrees, in the order of the tree.
template <bool kTall>
TILEWISE_INLINE void amx_finish(float* to, int64_t rows, const float* addend, const float* top, int pops) {
  const bool is_whole = rows == (1 + kTall) * kAmxRows;
  if (is_whole && !addend && pops == 0) return AmxBlock<kTall>::store(to);
  alignas(64) float sums[(1 + kTall) * kAmxRows * kPanel];
  AmxBlock<kTall>::store(sums);
  for (int64_t i = 0; i < rows * kPanel; i += kLanes) {
    Lanes v = load(sums + i);
    if (addend) v = v + load(addend + i);
    for (int pop = 1; pop <= pops; ++pop) v = load(top - pop * rows * kPanel + i) + v;
    store(to + i, v);
  }
}

/// Calls f() for every step i of a group with i & mask = 0; steps count down from `left`.
template <class F>
TILEWISE_INLINE void each_prefetch(int32_t left, int32_t mask, const F& f) {
  const int32_t end = left > kAmxSteps ? left - kAmxSteps : 0;
  for (int32_t i = left & ~mask; i > end; i -= mask + 1) f();
}

/// Element (row r, step s) of A lies at a + r * kRowStride + s. Rows beyond x.rows are computed from
/// arbitrary memory content and never stored.
template <bool kTall>
void amx_micro(const MicroArgs& x) {
  using Block = AmxBlock<kTall>;
  const int64_t rows = x.rows;
  if (x.init && x.scales) {
    alignas(64) float scaled[(1 + kTall) * kAmxRows * kPanel];
    for (int64_t r = 0; r < rows; ++r)  // + 0 turns -0 into +0
      for (int64_t i = r * kPanel; i < (r + 1) * kPanel; i += kLanes)
        store(scaled + i, fused(set(x.scales[r]), load(x.init + i), set(0.0f)));
    Block::load(scaled);
  } else if (x.init) {
    Block::load(x.init);
  } else {
    Block::clear();
  }
  float* stack = x.stack;
  const char* ahead = x.ahead;
  for (const Segment* s = x.segments; s != x.segments + x.num_segments; ++s) {
    const uint32_t* a = x.a + s->a;
    const uint32_t* b = x.b[s->term] + s->b;
    const char* piece = x.pieces ? x.pieces[s - x.segments] : nullptr;
    const bool is_last = s + 1 == x.segments + x.num_segments;
    if (is_last) expect(x.expected);
    for (int32_t left = s->steps; left > 0; left -= kAmxSteps, a += kAmxSteps, b += kAmxSteps * kPanel) {
      each_prefetch(left, x.every_ahead, [&] {
        __builtin_prefetch(ahead, 0, 2);
        __builtin_prefetch(ahead + x.second, 0, 2);
        ahead += x.pace;
      });
      each_prefetch(left, x.every_piece, [&] {
        __builtin_prefetch(piece, 0, 2);
        piece += 64;
      });
      if (left >= kAmxSteps) {
        Block::multiply(a, kRowStride, b);
      } else {
        amx_last_group<kTall>(a, b, rows, left);
      }
    }
    if (s->ends) {
      const float* top = stack;
      stack -= s->pops * rows * kPanel;
      float* const to = s->push ? stack : x.out;
      amx_finish<kTall>(to, rows, s->addend >= 0 ? x.addend + s->addend : nullptr, top, s->pops);
      if (s->push) {
        stack += rows * kPanel;
        Block::clear();
      }
    } else if (is_last && x.out) {
      amx_finish<kTall>(x.out, rows, nullptr, nullptr, 0);
    }
  }
  if (x.num_segments == 0 && x.out) amx_finish<kTall>(x.out, rows, nullptr, nullptr, 0);
}

template <>
struct MicroOf<DotAmx, ALayout::kRows> {
  static MicroFn of(int64_t rows) { return rows <= kAmxRows ? amx_micro<false> : amx_micro<true>; }
};
template <>
struct MicroOf<DotAmx, ALayout::kScaledRows> : MicroOf<DotAmx, ALayout::kRows> {};  // used with one segment only

}  // namespace tilewise::kernels::TILEWISE_ISA_NS

#endif

namespace tilewise::kernels::TILEWISE_ISA_NS {

/// The element type of bf16 products of weights.
#if defined(__AMX_BF16__)
using ProductBF16 = BF16Amx;
#else
using ProductBF16 = BF16;
#endif

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
