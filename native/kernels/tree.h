// The fixed binary tree over chunk slots (docs/numerics.md, rule 2) as a stack machine, and the carving of scratch.
//
// After each non-empty slot its sum is in hand; `pops` says how many finished subtrees to fold in (v = top + v) before
// v goes on the stack or, at the root, leaves. Empty slots add nothing: the newest sum simply moves up.
#pragma once
#include "kernels/kernel.h"
#include "kernels/simd.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

class ChunkTree {
 public:
  /// The slot's sum is in hand, and slots up to `next` (the next non-empty one, or the count of slots) are empty.
  int add(int64_t slot, int64_t next) {
    int pops = carry(slot, 1);
    for (int64_t empty = slot + 1; empty < next; ++empty) pops += carry(empty, 0);
    return pops;
  }
  /// Folds left over at the root when the count of slots is no power of two.
  int finish() const { return __builtin_popcountll(levels_) - 1; }
  int depth() const { return __builtin_popcountll(levels_); }

 private:
  int carry(int64_t slot, int held) {
    int pops = 0, level = 0;
    for (; (slot >> level) & 1; ++level) {
      if (!((levels_ >> level) & 1)) continue;
      levels_ &= ~(uint64_t{1} << level);
      pops += held;  // a sum that only moves up meets nothing at its own level
      held = 1;
    }
    if (held) levels_ |= uint64_t{1} << level;
    return pops;
  }

  uint64_t levels_ = 0;  // occupied levels of the binary counter
};

/// Hands out 64-byte aligned pieces of the worker's scratch; kernels bound their loops so that it never runs out.
class Carver {
 public:
  explicit Carver(const Scratch& scratch) : next_(scratch.data), end_(scratch.data + scratch.bytes) {}
  template <class T>
  T* take(int64_t count) {
    auto* piece = reinterpret_cast<T*>(next_);
    next_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    if (next_ > end_) scratch_exhausted();
    return piece;
  }
  int64_t left() const { return end_ - next_; }

 private:
  std::byte* next_;
  std::byte* end_;
};

template <class T>
TILEWISE_INLINE T* row_of(const TileView& tile, int64_t row) {
  return static_cast<T*>(tile.data) + row * tile.stride;
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
