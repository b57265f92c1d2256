// The fixed binary tree over k splits (docs/numerics.md, rule 2) as a stack machine, and the division of scratch
// memory.
//
// After each non-empty k split, `pops` says how many finished subtrees to add (v = top + v) before v is pushed or, at
// the root, stored. Empty k splits add nothing: the newest sum moves up unchanged.
#pragma once
#include "kernels/kernel.h"
#include "kernels/simd.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

class SplitTree {
 public:
  /// Adds the sum of a slot; slots up to `next` (the next non-empty one, or the number of slots) are empty. Returns the
  /// pops.
  int add(int64_t slot, int64_t next) {
    int pops = carry(slot, 1);
    for (int64_t empty = slot + 1; empty < next; ++empty) pops += carry(empty, 0);
    return pops;
  }
  /// Remaining pops at the root if the number of slots is not a power of two.
  int finish() const { return __builtin_popcountll(levels_) - 1; }
  int depth() const { return __builtin_popcountll(levels_); }

 private:
  int carry(int64_t slot, int has_sum) {
    int pops = 0, level = 0;
    for (; (slot >> level) & 1; ++level) {
      if (!((levels_ >> level) & 1)) continue;
      levels_ &= ~(uint64_t{1} << level);
      pops += has_sum;  // an empty slot adds no sum: the one below only moves up
      has_sum = 1;
    }
    if (has_sum) levels_ |= uint64_t{1} << level;
    return pops;
  }

  uint64_t levels_ = 0;  // occupied levels of the binary counter
};

/// A SplitTree with its stack, for one block of lanes.
class TreeStack {
 public:
  /// Adds the sum of a slot and returns the folded sum. `next` is the next non-empty slot; 0 after the last one, when
  /// the root is returned.
  Lanes add(Lanes sum, int64_t slot, int64_t next) {
    int pops = tree_.add(slot, next ? next : slot + 1);
    if (!next) pops += tree_.finish();
    for (; pops > 0; --pops) sum = stack_[--depth_] + sum;
    return stack_[depth_++] = sum;
  }

 private:
  Lanes stack_[64];
  int depth_ = 0;
  SplitTree tree_;
};

/// Divides the positions of a sequence (docs/numerics.md, rule 5) into A atoms of 64; k split c of C has atoms ⌊cA/C⌋
/// to ⌊(c+1)A/C⌋. Memory has only the non-empty k splits: the smaller of A and C.
struct SequenceSplits {
  int64_t length, k_splits;

  int64_t atoms() const { return (length + 63) / 64; }
  int64_t num_stored() const { return smaller(atoms(), k_splits); }
  /// The k split that holds an atom.
  int64_t split_of(int64_t atom) const { return ((atom + 1) * k_splits - 1) / atoms(); }
  /// The index among all k splits of a stored one.
  int64_t slot(int64_t place) const { return atoms() < k_splits ? split_of(place) : place; }
  /// The index among the stored k splits of a position's k split.
  int64_t place_of(int64_t position) const { return atoms() < k_splits ? position / 64 : split_of(position / 64); }
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

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
