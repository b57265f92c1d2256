// Kernels that reduce along rows: norms, softmax, row sums, cross-entropy; and RoPE.
//
// A row reduction has 16 virtual lanes and a fixed tree; unused lanes at the end hold the neutral element.
#include "kernels/kernel.h"
#include "kernels/math.h"
#include "kernels/tree.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

/// A row has as many groups as rstd has columns: the whole row, or its heads. Each has gamma's width and is normalised
/// alone. Without an offset nothing is added to gamma, so that a gain of -0 keeps its sign.
template <class T, bool kHasOffset>
TILEWISE_INLINE void norm_groups(const KernelArgs& args) {
  const TileView &y = args.tiles[0], &rstd = args.tiles[1], &x = args.tiles[2];
  const T* gamma = static_cast<const T*>(args.tiles[3].data);
  const int64_t d = args.tiles[3].cols, groups = smaller(rstd.cols, x.cols / d);
  const auto offset = static_cast<float>(args.floats[1]);
  for (int64_t r = 0; r < x.rows; ++r)
    for (int64_t group = 0; group < groups; ++group) {
      const T* from = row_of<const T>(x, r) + group * d;
      const T* next = group + 1 < groups ? from + d : next_row<const T>(x, r);
      T* to = row_of<T>(y, r) + group * d;
      Lanes squares = set(0.0f);
      each_column(d, [&](auto at) TILEWISE_INLINED {
        for (const Lanes& v : at.load(from).at) squares = fused(v, v, squares);
      });
      const float mean = sum_lanes(squares) / static_cast<float>(d);
      const float scale = 1.0f / __builtin_sqrtf(mean + static_cast<float>(args.floats[0]));
      row_of<float>(rstd, r)[group] = scale;
      each_column(d, [&](auto at) TILEWISE_INLINED {
        at.template prefetch<false>(next);
        const auto gain = at.load(gamma);
        at.store(to, at.load(from) * at.set(scale) * (kHasOffset ? gain + at.set(offset) : gain));
      });
    }
}

template <class T>
void rms_norm(const KernelArgs& args) {
  args.floats[1] == 0.0 ? norm_groups<T, false>(args) : norm_groups<T, true>(args);
}

/// The accumulator of token `row` (absolute): the `cols` columns of its sequence split in the row of its batch split. A
/// batch split's first token sets that row to zero. ints: rows per batch split, sequence length, C, the length that k
/// splits are counted over.
TILEWISE_INLINE float* split_row(const KernelArgs& args, const TileView& split, int64_t row, int64_t cols) {
  const int64_t split_rows = args.ints[0], length = args.ints[1];
  float* to = row_of<float>(split, row / split_rows - args.row_begin / split_rows);
  if (row % split_rows == 0)
    for (int64_t c = 0; c < split.cols; ++c) to[c] = 0.0f;
  return to + SequenceSplits{args.ints[3], args.ints[2]}.place_of(row % length) * cols;
}

/// gamma, or gamma plus an offset; see norm_groups.
template <bool kHasOffset, class T>
TILEWISE_INLINE Lanes load_gain(const T* gamma, int64_t n, const Lanes& offset) {
  const Lanes gain = load(gamma, n);
  return kHasOffset ? gain + offset : gain;
}

/// One vector at a time: register blocks are slower here.
template <class T, bool kHasOffset>
TILEWISE_INLINE void norm_groups_backward(const KernelArgs& args) {
  const TileView *t = args.tiles, &dy = t[2], &x = t[3], &rstd = t[4], &residual = t[6];
  const T* gamma = static_cast<const T*>(t[5].data);
  const int64_t d = t[5].cols, groups = smaller(rstd.cols, x.cols / d);
  const Lanes offset = set(static_cast<float>(args.floats[0]));
  for (int64_t r = 0; r < x.rows; ++r) {
    float* batch_splits = split_row(args, t[1], args.row_begin + r, x.cols);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = group * d;
      const T *gradient = row_of<const T>(dy, r) + first, *value = row_of<const T>(x, r) + first;
      const T* added = residual.data ? row_of<const T>(residual, r) + first : nullptr;
      T* to = row_of<T>(t[0], r) + first;
      float* split = batch_splits + first;
      const float scale = row_of<const float>(rstd, r)[group];
      Lanes dot = set(0.0f);
      for (int64_t c = 0; c < d; c += kLanes) {
        const int64_t n = d - c;
        dot = fused(load_gain<kHasOffset>(gamma + c, n, offset) * load(gradient + c, n), load(value + c, n), dot);
      }
      const float shrink = scale * scale * scale / static_cast<float>(d) * sum_lanes(dot);
      for (int64_t c = 0; c < d; c += kLanes) {
        const int64_t n = d - c;
        const Lanes g = load(gradient + c, n), v = load(value + c, n);
        store(split + c, fused(g, v * set(scale), load(split + c, n)), n);
        Lanes dx = fused(v, set(-shrink), set(scale) * (load_gain<kHasOffset>(gamma + c, n, offset) * g));
        if (added) dx = dx + load(added + c, n);
        store(to + c, dx, n);
      }
    }
  }
}

template <class T>
void rms_norm_backward(const KernelArgs& args) {
  args.floats[0] == 0.0 ? norm_groups_backward<T, false>(args) : norm_groups_backward<T, true>(args);
}

/// Computes the mean, then the squared differences from it; lanes beyond the row load the mean.
template <class T>
void layer_norm(const KernelArgs& args) {
  const TileView &y = args.tiles[0], &stats = args.tiles[1], &x = args.tiles[2];
  const T* gamma = static_cast<const T*>(args.tiles[3].data);
  const T* beta = static_cast<const T*>(args.tiles[4].data);
  const int64_t d = x.cols;
  for (int64_t r = 0; r < x.rows; ++r) {
    const T* from = row_of<const T>(x, r);
    Lanes sum = set(0.0f), squares = set(0.0f);
    each_column(d, [&](auto at) TILEWISE_INLINED {
      for (const Lanes& v : at.load(from).at) sum = sum + v;
    });
    const float mean = sum_lanes(sum) / static_cast<float>(d);
    each_column(d, [&](auto at) TILEWISE_INLINED {
      for (const Lanes& v : (at.load(from, mean) - at.set(mean)).at) squares = fused(v, v, squares);
    });
    const float variance = sum_lanes(squares) / static_cast<float>(d);
    const float scale = 1.0f / __builtin_sqrtf(variance + static_cast<float>(args.floats[0]));
    row_of<float>(stats, r)[0] = mean;
    row_of<float>(stats, r)[1] = scale;
    T* to = row_of<T>(y, r);
    each_column(d, [&](auto at) TILEWISE_INLINED {
      at.store(to, fused((at.load(from) - at.set(mean)) * at.set(scale), at.load(gamma), at.load(beta)));
    });
  }
}

/// dx = scale (g - mean of g - normal * mean of g normal) with g = gamma dy; dgamma adds dy normal, dbeta adds dy.
template <class T>
void layer_norm_backward(const KernelArgs& args) {
  const TileView *t = args.tiles, &dy = t[3], &x = t[4], &residual = t[7];
  const T* gamma = static_cast<const T*>(t[6].data);
  const int64_t d = x.cols;
  for (int64_t r = 0; r < x.rows; ++r) {
    const T *gradient = row_of<const T>(dy, r), *value = row_of<const T>(x, r);
    float* dgamma = split_row(args, t[1], args.row_begin + r, d);
    float* dbeta = split_row(args, t[2], args.row_begin + r, d);
    const float mean = row_of<const float>(t[5], r)[0], scale = row_of<const float>(t[5], r)[1];
    Lanes sum = set(0.0f), dot = set(0.0f);
    each_column(d, [&](auto at) TILEWISE_INLINED {
      const auto g = at.load(gamma) * at.load(gradient);
      const auto normal = (at.load(value, mean) - at.set(mean)) * at.set(scale);
      for (const Lanes& v : g.at) sum = sum + v;
      for (int i = 0; i < static_cast<int>(sizeof g.at / sizeof g.at[0]); ++i) dot = fused(g.at[i], normal.at[i], dot);
    });
    const float shift = sum_lanes(sum) / static_cast<float>(d), tilt = -sum_lanes(dot) / static_cast<float>(d);
    const T* added = residual.data ? row_of<const T>(residual, r) : nullptr;
    T* to = row_of<T>(t[0], r);
    each_column(d, [&](auto at) TILEWISE_INLINED {
      const auto g = at.load(gradient), normal = (at.load(value) - at.set(mean)) * at.set(scale);
      at.store(dgamma, fused(g, normal, at.load(dgamma)));
      at.store(dbeta, at.load(dbeta) + g);
      auto dx = at.set(scale) * fused(normal, at.set(tilt), at.load(gamma) * g - at.set(shift));
      if (added) dx = dx + at.load(added);
      at.store(to, dx);
    });
  }
}

/// Column sums: adds every element of a row to its column of the batch split.
template <class T>
void column_sum_split(const KernelArgs& args) {
  const TileView& x = args.tiles[1];
  for (int64_t r = 0; r < x.rows; ++r) {
    const T* row = row_of<const T>(x, r);
    float* split = split_row(args, args.tiles[0], args.row_begin + r, x.cols);
    each_column(x.cols, [&](auto at) TILEWISE_INLINED { at.store(split, at.load(split) + at.load(row)); });
  }
}

void row_sum_split(const KernelArgs& args) {
  const TileView& x = args.tiles[1];
  for (int64_t r = 0; r < x.rows; ++r) {
    float* split = split_row(args, args.tiles[0], args.row_begin + r, 1);
    *split = *split + *row_of<const float>(x, r);
  }
}

template <class T>
void rope(const KernelArgs& args) {
  const TileView &out = args.tiles[0], &x = args.tiles[1], &table = args.tiles[3];
  const int64_t dim = args.ints[0], half = dim / 2;
  const float sign = args.ints[1] ? -1.0f : 1.0f;
  for (int64_t r = 0; r < x.rows; ++r) {
    const float* cosine = row_of<const float>(table, *row_of<const int32_t>(args.tiles[2], r));
    const T* from = row_of<const T>(x, r);
    T* to = row_of<T>(out, r);
    for (int64_t head = 0; head < x.cols; head += dim)
      for (int64_t c = 0; c < half; c += kLanes) {
        const int64_t n = half - c;
        const Lanes a = load(from + head + c, n), b = load(from + head + half + c, n);
        const Lanes co = load(cosine + c, n), si = load(cosine + half + c, n) * set(sign);
        store(to + head + c, fused(a, co, negate(b * si)), n);
        store(to + head + half + c, fused(b, co, a * si), n);
      }
  }
}

template <class T>
TILEWISE_INLINE float row_max(const T* row, int64_t n) {
  RegisterBlock<kBlockRegisters> tops = splat<RegisterBlock<kBlockRegisters>>(-kInfinity);
  Lanes top = set(-kInfinity);
  each_column(n, [&](auto at) TILEWISE_INLINED {
    const auto x = at.load(row, -kInfinity);
    if constexpr (sizeof x == sizeof tops) {
      tops = maximum(tops, x);
    } else {
      top = maximum(top, x.at[0]);
    }
  });
  for (const Lanes& x : tops.at) top = maximum(top, x);
  return max_lanes(top);
}

/// Calls `keep(at, e)` with the exponentials.
template <class T, class Keep>
TILEWISE_INLINE float sum_of_exp(const T* row, int64_t n, float shift, const Keep& keep) {
  Lanes sum = set(0.0f);
  each_column(n, [&](auto at) TILEWISE_INLINED {
    const auto powers = decay(at.load(row, -kInfinity) - at.set(shift));
    for (const Lanes& e : powers.at) sum = sum + e;
    keep(at, powers);
  });
  return sum_lanes(sum);
}

template <class T>
void softmax(const KernelArgs& args) {
  const TileView &y = args.tiles[0], &x = args.tiles[1];
  auto* const powers = Carver(args.scratch).take<float>(x.cols);
  for (int64_t r = 0; r < x.rows; ++r) {
    const T* from = row_of<const T>(x, r);
    T* to = row_of<T>(y, r);
    const float top = row_max(from, x.cols);
    const float total = sum_of_exp(from, x.cols, top, [&](auto at, const auto& e) TILEWISE_INLINED {
      at.store(powers, e);
      at.template prefetch<true>(to);
      at.template prefetch<false>(next_row<const T>(x, r));
    });
    const float inverse = 1.0f / total;
    each_column(x.cols, [&](auto at) TILEWISE_INLINED { at.store(to, at.load(powers) * at.set(inverse)); });
  }
}

template <class T>
void softmax_backward(const KernelArgs& args) {
  const TileView &dx = args.tiles[0], &dy = args.tiles[1], &y = args.tiles[2];
  for (int64_t r = 0; r < y.rows; ++r) {
    const T *g = row_of<const T>(dy, r), *p = row_of<const T>(y, r);
    T* to = row_of<T>(dx, r);
    Lanes dot = set(0.0f);
    each_column(y.cols, [&](auto at) TILEWISE_INLINED {
      const auto gradient = at.load(g), probability = at.load(p);
      for (int i = 0; i < at.kCount; ++i) dot = fused(gradient.at[i], probability.at[i], dot);
    });
    const float mean = sum_lanes(dot);
    each_column(y.cols, [&](auto at) TILEWISE_INLINED {
      at.template prefetch<false>(next_row<const T>(dy, r));
      at.template prefetch<false>(next_row<const T>(y, r));
      at.store(to, at.load(p) * (at.load(g) - at.set(mean)));
    });
  }
}

template <class T>
void row_sum(const KernelArgs& args) {
  const TileView& x = args.tiles[1];
  for (int64_t r = 0; r < x.rows; ++r) {
    Lanes sum = set(0.0f);
    for (int64_t c = 0; c < x.cols; c += kLanes) sum = sum + load(row_of<const T>(x, r) + c, x.cols - c);
    *row_of<float>(args.tiles[0], r) = sum_lanes(sum);
  }
}

/// The label's column in this shard of the vocabulary; -1: elsewhere or ignored.
TILEWISE_INLINE int64_t local_label(const KernelArgs& args, const TileView& labels, int64_t row, int64_t columns) {
  const int64_t label = *row_of<const int32_t>(labels, row);
  if (label == args.ints[1]) return -1;
  const int64_t column = label - args.ints[0];
  return column >= 0 && column < columns ? column : -1;
}

template <class T>
void cross_entropy_max(const KernelArgs& args) {
  const TileView &stats = args.tiles[0], &logits = args.tiles[1];
  for (int64_t r = 0; r < logits.rows; ++r) {
    const T* row = row_of<const T>(logits, r);
    const int64_t label = local_label(args, args.tiles[2], r, logits.cols);
    row_of<float>(stats, r)[0] = row_max(row, logits.cols);
    row_of<float>(stats, r)[1] = label < 0 ? -kInfinity : widen(row[label]);
  }
}

template <class T>
void cross_entropy_sum(const KernelArgs& args) {
  const TileView &sums = args.tiles[0], &logits = args.tiles[1], &stats = args.tiles[2];
  const int64_t k_splits = args.ints[0];
  const int64_t* ranges = args.ints + 1;
  for (int64_t r = 0; r < logits.rows; ++r) {
    const T* row = row_of<const T>(logits, r);
    const float top = *row_of<const float>(stats, r);
    float stack[64], sum = 0.0f;
    int depth = 0;
    SplitTree tree;
    for (int64_t c = 0; c < k_splits;) {
      int64_t next = c + 1;
      while (next < k_splits && ranges[2 * next] >= ranges[2 * next + 1]) ++next;
      if (ranges[2 * c] < ranges[2 * c + 1]) {
        sum = sum_of_exp(row + ranges[2 * c], ranges[2 * c + 1] - ranges[2 * c], top, [](auto...) {});
        int pops = tree.add(c, next);
        if (next == k_splits) pops += tree.finish();
        for (; pops > 0; --pops) sum = stack[--depth] + sum;
        stack[depth++] = sum;
      }
      c = next;
    }
    *row_of<float>(sums, r) = sum;
  }
}

template <class T>
void cross_entropy_grad(const KernelArgs& args) {
  const TileView *t = args.tiles, &gradient = t[0], &logits = t[2];
  const float inv_count = *static_cast<const float*>(t[6].data);
  for (int64_t r = 0; r < logits.rows; ++r) {
    const bool ignored = *row_of<const int32_t>(t[5], r) == args.ints[1];
    const float top = row_of<const float>(t[3], r)[0], target = row_of<const float>(t[3], r)[1];
    const float sum = *row_of<const float>(t[4], r);
    *row_of<float>(t[1], r) = ignored ? 0.0f : (logarithm(sum) + top - target) * inv_count;
    if (!gradient.data) continue;
    const T* from = row_of<const T>(logits, r);
    T* to = row_of<T>(gradient, r);
    const int64_t n = logits.cols, label = local_label(args, t[5], r, n);
    const float inverse = 1.0f / sum;
    const float at_label = label < 0 ? 0.0f : (exponential(widen(from[label]) - top) * inverse - 1.0f) * inv_count;
    each_column(n, [&](auto at) TILEWISE_INLINED {
      const auto p = decay(at.load(from) - at.set(top)) * at.set(inverse) * at.set(inv_count);
      at.store(to, ignored ? at.set(0.0f) : p);
    });
    if (label >= 0) narrow(at_label, to + label);
  }
}

constexpr Entry kEntries[] = {
    {"rms_norm_f32", rms_norm<float>},
    {"rms_norm_bf16", rms_norm<bf16>},
    {"rms_norm_backward_f32", rms_norm_backward<float>},
    {"rms_norm_backward_bf16", rms_norm_backward<bf16>},
    {"layer_norm_f32", layer_norm<float>},
    {"layer_norm_bf16", layer_norm<bf16>},
    {"layer_norm_backward_f32", layer_norm_backward<float>},
    {"layer_norm_backward_bf16", layer_norm_backward<bf16>},
    {"column_sum_split_f32", column_sum_split<float>},
    {"column_sum_split_bf16", column_sum_split<bf16>},
    {"row_sum_split_f32", row_sum_split},
    {"rope_f32", rope<float>},
    {"rope_bf16", rope<bf16>},
    {"softmax_f32", softmax<float>},
    {"softmax_bf16", softmax<bf16>},
    {"softmax_backward_f32", softmax_backward<float>},
    {"softmax_backward_bf16", softmax_backward<bf16>},
    {"row_sum_f32", row_sum<float>},
    {"row_sum_bf16", row_sum<bf16>},
    {"cross_entropy_max_f32", cross_entropy_max<float>},
    {"cross_entropy_max_bf16", cross_entropy_max<bf16>},
    {"cross_entropy_sum_f32", cross_entropy_sum<float>},
    {"cross_entropy_sum_bf16", cross_entropy_sum<bf16>},
    {"cross_entropy_grad_f32", cross_entropy_grad<float>},
    {"cross_entropy_grad_bf16", cross_entropy_grad<bf16>},
};

}  // namespace

EntryList rows_entries() { return {kEntries, sizeof kEntries / sizeof kEntries[0]}; }

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
