// Elementwise functions over the rows of tiles.
#pragma once
#include "kernels/operands.h"
#include "kernels/register_block.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

/// Prefetch distance in bytes of long chains of operations. Measured for vectors of 8 values; other levels do not
/// prefetch.
inline constexpr int64_t kPrefetchBytes = kParts == 2 ? 1024 : 0;

/// out = fn(in...) lane by lane. fn maps RegisterBlocks of any count.
template <int64_t kAhead = 0, class Out, class Fn, class In, class... Ins>
TILEWISE_INLINE void map_rows(const Tile<Out>& out, const Fn& fn, const Tile<In>& first, const Tile<Ins>&... others) {
  constexpr int kInputs = 1 + sizeof...(Ins);
  const int64_t ahead = smaller(kAhead / static_cast<int64_t>(sizeof(In)), out.cols);
  for (int64_t r = 0; r < out.rows; ++r) {
    In* const from[kInputs] = {first.row(r), others.row(r)...};
    In* const next[kInputs] = {first.next_row(r), others.next_row(r)...};
    Out *to = out.row(r), *next_to = out.next_row(r);
    each_column(out.cols, [&](auto at) TILEWISE_INLINED {
      decltype(at.set(0.0f)) x[kInputs];
      for (int i = 0; i < kInputs; ++i) x[i] = at.load(from[i]);
      if constexpr (kAhead > 0) {
        for (int i = 0; i < kInputs; ++i) at.template prefetch_ahead<false>(from[i], next[i], ahead);
        at.template prefetch_ahead<true>(to, next_to, ahead);
      }
      if constexpr (kInputs == 1) {
        at.store(to, fn(x[0]));
      } else if constexpr (kInputs == 2) {
        at.store(to, fn(x[0], x[1]));
      } else {
        at.store(to, fn(x[0], x[1], x[2]));
      }
    });
  }
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
