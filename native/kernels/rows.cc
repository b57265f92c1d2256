// Kernels that reduce along rows: norms, softmax, row sums, cross-entropy; and RoPE.
//
// A row reduction has 16 virtual lanes and a fixed tree; unused lanes at the end hold the neutral element.
#include "kernels/declared/rows.h"

#include "kernels/kernel.h"
#include "kernels/math.h"
#include "kernels/tree.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

/// A row has as many groups as rstd has columns: the whole row, or its heads. Each has gamma's width and is normalised
/// alone. Without an offset nothing is added to gamma, so that a gain of -0 keeps its sign.
template <bool kHasOffset, class T>
TILEWISE_INLINE void norm_groups(const RmsNormKernel<T>& call) {
  const Tile<const T>& x = call.x;
  const T* gamma = call.gamma.elements();
  const int64_t d = call.gamma.cols, groups = smaller(call.rstd.cols, x.cols / d);
  const float eps = call.eps, offset = call.offset;
  for (int64_t r = 0; r < x.rows; ++r)
    for (int64_t group = 0; group < groups; ++group) {
      const T* from = x.row(r) + group * d;
      const T* next = group + 1 < groups ? from + d : x.next_row(r);
      T* to = call.y.row(r) + group * d;
      Lanes squares = set(0.0f);
      each_column(d, [&](auto at) TILEWISE_INLINED {
        for (const Lanes& v : at.load(from).at) squares = fused(v, v, squares);
      });
      const float mean = sum_lanes(squares) / static_cast<float>(d);
      const float scale = 1.0f / __builtin_sqrtf(mean + eps);
      call.rstd.row(r)[group] = scale;
      each_column(d, [&](auto at) TILEWISE_INLINED {
        at.template prefetch<false>(next);
        const auto gain = at.load(gamma);
        at.store(to, at.load(from) * at.set(scale) * (kHasOffset ? gain + at.set(offset) : gain));
      });
    }
}

// kernel rms_norm  f32 bf16
//   out y[m d], rstd:f32[m h]
//   in x[m d], gamma[1 g]
//   float eps, offset
//   each m
//   flops 4 * m * d
//   bytes 2 * item * m * d
template <class T>
void RmsNormKernel<T>::run() const {
  offset == 0.0f ? norm_groups<false>(*this) : norm_groups<true>(*this);
}

/// The accumulator of row `index` of a call: the `cols` columns of its sequence split in the row of its batch split. A
/// batch split's first token sets that row to zero. The kernel's integers say how many rows a batch split has, how long
/// a sequence is, how many k splits it has, and over which length these are counted.
template <class Kernel>
TILEWISE_INLINE float* split_row(const Kernel& call, const Tile<float>& split, int64_t index, int64_t cols) {
  const int64_t split_rows = call.split_rows, row = call.row_begin + index;
  float* to = split.row(row / split_rows - call.row_begin / split_rows);
  if (row % split_rows == 0)
    for (int64_t c = 0; c < split.cols; ++c) to[c] = 0.0f;
  return to + SequenceSplits{call.split_len, call.num_k_splits}.place_of(row % call.seq_len) * cols;
}

/// gamma, or gamma plus an offset; see norm_groups.
template <bool kHasOffset, class T>
TILEWISE_INLINE Lanes load_gain(const T* gamma, int64_t n, const Lanes& offset) {
  const Lanes gain = load(gamma, n);
  return kHasOffset ? gain + offset : gain;
}

/// One vector at a time: register blocks are slower here.
template <bool kHasOffset, class T>
TILEWISE_INLINE void norm_groups_backward(const RmsNormBackwardKernel<T>& call) {
  const auto &x = call.x, &residual = call.dresidual;
  const T* gamma = call.gamma.elements();
  const int64_t d = call.gamma.cols, groups = smaller(call.rstd.cols, x.cols / d);
  const Lanes offset = set(call.offset);
  for (int64_t r = 0; r < x.rows; ++r) {
    float* batch_splits = split_row(call, call.dgamma_split, r, x.cols);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = group * d;
      const T *gradient = call.dy.row(r) + first, *value = x.row(r) + first;
      const T* added = residual.data ? residual.row(r) + first : nullptr;
      T* to = call.dx.row(r) + first;
      float* split = batch_splits + first;
      const float scale = call.rstd.row(r)[group];
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

// kernel rms_norm_backward  f32 bf16
//   out dx[m d]
//   inout dgamma_split:f32[_ _]
//   in dy[m d], x[m d], rstd:f32[m h], gamma[1 g], dresidual?[m d]
//   int split_rows, seq_len, num_k_splits, split_len
//   float offset
//   require split_rows > 0 and num_k_splits > 0 and seq_len > 0 and seq_len <= split_len
//   require dgamma_split.rows * split_rows >= m and dgamma_split.cols >= num_k_splits * d
//   flops 11 * m * d
//   bytes 4 * item * m * d
template <class T>
void RmsNormBackwardKernel<T>::run() const {
  offset == 0.0f ? norm_groups_backward<false>(*this) : norm_groups_backward<true>(*this);
}

// kernel layer_norm  f32 bf16
//   out y[m d], stats:f32[m 2]
//   in x[m d], gamma[1 d], beta[1 d]
//   float eps
//   each m
//   flops 8 * m * d
//   bytes 2 * item * m * d
/// Computes the mean, then the squared differences from it; lanes beyond the row load the mean.
template <class T>
void LayerNormKernel<T>::run() const {
  const T *gain = gamma.elements(), *added = beta.elements();
  const int64_t d = x.cols;
  for (int64_t r = 0; r < x.rows; ++r) {
    const T* from = x.row(r);
    Lanes sum = set(0.0f), squares = set(0.0f);
    each_column(d, [&](auto at) TILEWISE_INLINED {
      for (const Lanes& v : at.load(from).at) sum = sum + v;
    });
    const float mean = sum_lanes(sum) / static_cast<float>(d);
    each_column(d, [&](auto at) TILEWISE_INLINED {
      for (const Lanes& v : (at.load(from, mean) - at.set(mean)).at) squares = fused(v, v, squares);
    });
    const float variance = sum_lanes(squares) / static_cast<float>(d);
    const float scale = 1.0f / __builtin_sqrtf(variance + eps);
    stats.row(r)[0] = mean;
    stats.row(r)[1] = scale;
    T* to = y.row(r);
    each_column(d, [&](auto at) TILEWISE_INLINED {
      at.store(to, fused((at.load(from) - at.set(mean)) * at.set(scale), at.load(gain), at.load(added)));
    });
  }
}

// kernel layer_norm_backward  f32 bf16
//   out dx[m d]
//   inout dgamma_split:f32[_ _], dbeta_split:f32[_ _]
//   in dy[m d], x[m d], stats:f32[m 2], gamma[1 d], dresidual?[m d]
//   int split_rows, seq_len, num_k_splits, split_len
//   require split_rows > 0 and num_k_splits > 0 and seq_len > 0 and seq_len <= split_len
//   require dgamma_split.rows * split_rows >= m and dgamma_split.cols >= num_k_splits * d
//   require dbeta_split.rows * split_rows >= m and dbeta_split.cols >= num_k_splits * d
//   flops 16 * m * d
//   bytes 4 * item * m * d
/// dx = scale (g - mean of g - normal * mean of g normal) with g = gamma dy; dgamma adds dy normal, dbeta adds dy.
template <class T>
void LayerNormBackwardKernel<T>::run() const {
  const T* gain = gamma.elements();
  const int64_t d = x.cols;
  for (int64_t r = 0; r < x.rows; ++r) {
    const T *gradient = dy.row(r), *value = x.row(r);
    float* dgamma = split_row(*this, dgamma_split, r, d);
    float* dbeta = split_row(*this, dbeta_split, r, d);
    const float mean = stats.row(r)[0], scale = stats.row(r)[1];
    Lanes sum = set(0.0f), dot = set(0.0f);
    each_column(d, [&](auto at) TILEWISE_INLINED {
      const auto g = at.load(gain) * at.load(gradient);
      const auto normal = (at.load(value, mean) - at.set(mean)) * at.set(scale);
      for (const Lanes& v : g.at) sum = sum + v;
      for (int i = 0; i < static_cast<int>(sizeof g.at / sizeof g.at[0]); ++i) dot = fused(g.at[i], normal.at[i], dot);
    });
    const float shift = sum_lanes(sum) / static_cast<float>(d), tilt = -sum_lanes(dot) / static_cast<float>(d);
    const T* added = dresidual.data ? dresidual.row(r) : nullptr;
    T* to = dx.row(r);
    each_column(d, [&](auto at) TILEWISE_INLINED {
      const auto g = at.load(gradient), normal = (at.load(value) - at.set(mean)) * at.set(scale);
      at.store(dgamma, fused(g, normal, at.load(dgamma)));
      at.store(dbeta, at.load(dbeta) + g);
      auto sum_dx = at.set(scale) * fused(normal, at.set(tilt), at.load(gain) * g - at.set(shift));
      if (added) sum_dx = sum_dx + at.load(added);
      at.store(to, sum_dx);
    });
  }
}

// kernel column_sum_split  f32 bf16
//   inout split:f32[_ _]
//   in x[m d]
//   int split_rows, seq_len, num_k_splits, split_len
//   require split_rows > 0 and num_k_splits > 0 and seq_len > 0 and seq_len <= split_len
//   require split.rows * split_rows >= m and split.cols >= num_k_splits * d
//   flops m * d
//   bytes item * m * d
/// Column sums: adds every element of a row to its column of the batch split.
template <class T>
void ColumnSumSplitKernel<T>::run() const {
  for (int64_t r = 0; r < x.rows; ++r) {
    const T* row = x.row(r);
    float* sums = split_row(*this, split, r, x.cols);
    each_column(x.cols, [&](auto at) TILEWISE_INLINED { at.store(sums, at.load(sums) + at.load(row)); });
  }
}

// kernel row_sum_split  f32
//   inout split:f32[_ _]
//   in x:f32[m 1]
//   int split_rows, seq_len, num_k_splits, split_len
//   require split_rows > 0 and num_k_splits > 0 and seq_len > 0 and seq_len <= split_len
//   require split.rows * split_rows >= m and split.cols >= num_k_splits
//   flops m
//   bytes 4 * m
void RowSumSplitKernel::run() const {
  for (int64_t r = 0; r < x.rows; ++r) {
    float* sum = split_row(*this, split, r, 1);
    *sum = *sum + *x.row(r);
  }
}

// kernel rope  f32 bf16
//   out out[m d]
//   in x[m d], positions:i32[m 1], table:f32[_ _]
//   int head_dim
//   flag inverse
//   each m
//   require head_dim > 0 and d % head_dim == 0 and table.cols % 2 == 0 and table.cols <= head_dim
//   flops 3 * m * d
//   bytes 2 * item * m * d
template <class T>
void RopeKernel<T>::run() const {
  // the table has a column per rotated element: the rest of a head is copied
  const int64_t half = table.cols / 2;
  const float sign = inverse ? -1.0f : 1.0f;
  for (int64_t r = 0; r < x.rows; ++r) {
    const float* cosine = table.row(*positions.row(r));
    const T* from = x.row(r);
    T* to = out.row(r);
    for (int64_t head = 0; head < x.cols; head += head_dim) {
      for (int64_t c = 0; c < half; c += kLanes) {
        const int64_t n = half - c;
        const Lanes a = load(from + head + c, n), b = load(from + head + half + c, n);
        const Lanes co = load(cosine + c, n), si = load(cosine + half + c, n) * set(sign);
        store(to + head + c, fused(a, co, negate(b * si)), n);
        store(to + head + half + c, fused(b, co, a * si), n);
      }
      for (int64_t c = head + 2 * half; c < head + head_dim; c += kLanes)
        store(to + c, load(from + c, head + head_dim - c), head + head_dim - c);
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

// kernel softmax  f32 bf16
//   out y[m d]
//   in x[m d]
//   each m
//   flops 5 * m * d
//   bytes 2 * item * m * d
//   scratch 4 * y.cols + (1 << 14)
template <class T>
void SoftmaxKernel<T>::run() const {
  auto* const powers = Carver(scratch).take<float>(x.cols);
  for (int64_t r = 0; r < x.rows; ++r) {
    const T* from = x.row(r);
    T* to = y.row(r);
    const float top = row_max(from, x.cols);
    const float total = sum_of_exp(from, x.cols, top, [&](auto at, const auto& e) TILEWISE_INLINED {
      at.store(powers, e);
      at.template prefetch<true>(to);
      at.template prefetch<false>(x.next_row(r));
    });
    const float inverse = 1.0f / total;
    each_column(x.cols, [&](auto at) TILEWISE_INLINED { at.store(to, at.load(powers) * at.set(inverse)); });
  }
}

// kernel softmax_backward  f32 bf16
//   out dx[m d]
//   in dy[m d], y[m d]
//   each m
//   flops 4 * m * d
//   bytes 3 * item * m * d
template <class T>
void SoftmaxBackwardKernel<T>::run() const {
  for (int64_t r = 0; r < y.rows; ++r) {
    const T *g = dy.row(r), *p = y.row(r);
    T* to = dx.row(r);
    Lanes dot = set(0.0f);
    each_column(y.cols, [&](auto at) TILEWISE_INLINED {
      const auto gradient = at.load(g), probability = at.load(p);
      for (int i = 0; i < at.kCount; ++i) dot = fused(gradient.at[i], probability.at[i], dot);
    });
    const float mean = sum_lanes(dot);
    each_column(y.cols, [&](auto at) TILEWISE_INLINED {
      at.template prefetch<false>(dy.next_row(r));
      at.template prefetch<false>(y.next_row(r));
      at.store(to, at.load(p) * (at.load(g) - at.set(mean)));
    });
  }
}

// kernel log_softmax  f32 bf16
//   out y[m d]
//   in x[m d]
//   each m
//   flops 5 * m * d
//   bytes 2 * item * m * d
template <class T>
void LogSoftmaxKernel<T>::run() const {
  for (int64_t r = 0; r < x.rows; ++r) {
    const T* from = x.row(r);
    T* to = y.row(r);
    const float top = row_max(from, x.cols);
    const float total = sum_of_exp(from, x.cols, top, [](auto, const auto&) TILEWISE_INLINED {});
    const float shift = logarithm(total);
    each_column(x.cols, [&](auto at) TILEWISE_INLINED { at.store(to, at.load(from) - at.set(top) - at.set(shift)); });
  }
}

// kernel log_softmax_backward  f32 bf16
//   out dx[m d]
//   in dy[m d], y[m d]
//   each m
//   flops 4 * m * d
//   bytes 3 * item * m * d
/// dy - e^y times the sum of dy.
template <class T>
void LogSoftmaxBackwardKernel<T>::run() const {
  for (int64_t r = 0; r < y.rows; ++r) {
    const T *g = dy.row(r), *p = y.row(r);
    T* to = dx.row(r);
    Lanes sum = set(0.0f);
    for (int64_t c = 0; c < y.cols; c += kLanes) sum = sum + load(g + c, y.cols - c);
    const float total = sum_lanes(sum);
    each_column(y.cols,
                [&](auto at) TILEWISE_INLINED { at.store(to, at.load(g) - exponential(at.load(p)) * at.set(total)); });
  }
}

// kernel row_sum  f32 bf16
//   out out:f32[m 1]
//   in x[m d]
//   each m
//   flops m * d
//   bytes item * m * d
template <class T>
void RowSumKernel<T>::run() const {
  for (int64_t r = 0; r < x.rows; ++r) {
    Lanes sum = set(0.0f);
    for (int64_t c = 0; c < x.cols; c += kLanes) sum = sum + load(x.row(r) + c, x.cols - c);
    *out.row(r) = sum_lanes(sum);
  }
}

/// The label's column in this shard of the vocabulary; -1: elsewhere or ignored.
template <class Kernel>
TILEWISE_INLINE int64_t local_label(const Kernel& call, int64_t row) {
  const int64_t label = *call.labels.row(row);
  if (label == call.ignore_index) return -1;
  const int64_t column = label - call.vocab_begin;
  return column >= 0 && column < call.logits.cols ? column : -1;
}

// kernel cross_entropy_max  f32 bf16
//   out stats:f32[m 2]
//   in logits[m v], labels:i32[m 1]
//   int vocab_begin, ignore_index
//   each m
//   flops m * d
//   bytes item * m * d
template <class T>
void CrossEntropyMaxKernel<T>::run() const {
  for (int64_t r = 0; r < logits.rows; ++r) {
    const T* row = logits.row(r);
    const int64_t label = local_label(*this, r);
    stats.row(r)[0] = row_max(row, logits.cols);
    stats.row(r)[1] = label < 0 ? -kInfinity : widen(row[label]);
  }
}

// kernel cross_entropy_sum  f32 bf16
//   out sums:f32[m 1]
//   in logits[m v], stats:f32[m 2]
//   int num_k_splits, range...(2*num_k_splits)
//   each m
//   within range logits
//   flops 3 * m * d
//   bytes item * m * d
template <class T>
void CrossEntropySumKernel<T>::run() const {
  for (int64_t r = 0; r < logits.rows; ++r) {
    const T* row = logits.row(r);
    const float top = *stats.row(r);
    float stack[64], sum = 0.0f;
    int depth = 0;
    SplitTree tree;
    for (int64_t c = 0; c < num_k_splits;) {
      int64_t next = c + 1;
      while (next < num_k_splits && range[2 * next] >= range[2 * next + 1]) ++next;
      if (range[2 * c] < range[2 * c + 1]) {
        sum = sum_of_exp(row + range[2 * c], range[2 * c + 1] - range[2 * c], top, [](auto...) {});
        int pops = tree.add(c, next);
        if (next == num_k_splits) pops += tree.finish();
        for (; pops > 0; --pops) sum = stack[--depth] + sum;
        stack[depth++] = sum;
      }
      c = next;
    }
    *sums.row(r) = sum;
  }
}

// kernel cross_entropy_grad  f32 bf16
//   out dlogits?[m v], loss_rows:f32[m 1]
//   in logits[m v], stats:f32[m 2], sums:f32[m 1], labels:i32[m 1], inv_count:f32[1 1]
//   int vocab_begin, ignore_index
//   each m
//   flops 4 * m * d
//   bytes 2 * item * m * d
template <class T>
void CrossEntropyGradKernel<T>::run() const {
  const float weight = *inv_count.elements();
  for (int64_t r = 0; r < logits.rows; ++r) {
    const bool ignored = *labels.row(r) == ignore_index;
    const float top = stats.row(r)[0], target = stats.row(r)[1];
    const float sum = *sums.row(r);
    *loss_rows.row(r) = ignored ? 0.0f : (logarithm(sum) + top - target) * weight;
    if (!dlogits.data) continue;
    const T* from = logits.row(r);
    T* to = dlogits.row(r);
    const int64_t n = logits.cols, label = local_label(*this, r);
    const float inverse = 1.0f / sum;
    const float at_label = label < 0 ? 0.0f : (exponential(widen(from[label]) - top) * inverse - 1.0f) * weight;
    each_column(n, [&](auto at) TILEWISE_INLINED {
      const auto p = decay(at.load(from) - at.set(top)) * at.set(inverse) * at.set(weight);
      at.store(to, ignored ? at.set(0.0f) : p);
    });
    if (label >= 0) narrow(at_label, to + label);
  }
}

}  // namespace
}  // namespace tilewise::kernels::TILEWISE_ISA_NS

#include "kernels/declared/rows_entries.h"
