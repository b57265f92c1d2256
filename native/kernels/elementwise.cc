// Elementwise kernels, copies and look-ups, one pass over memory each.
#include "kernels/declared/elementwise.h"

#include "kernels/kernel.h"
#include "kernels/map_rows.h"
#include "kernels/math.h"
#include "kernels/tree.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

// kernel add  f32 bf16: out out, in a, in b, 1 flop per element
template <class T>
void AddKernel<T>::run() const {
  map_rows(out, [](const auto& a, const auto& b) TILEWISE_INLINED { return a + b; }, a, b);
}

// kernel multiply  f32 bf16: out out, in a, in b, 1 flop per element
template <class T>
void MultiplyKernel<T>::run() const {
  map_rows(out, [](const auto& a, const auto& b) TILEWISE_INLINED { return a * b; }, a, b);
}

// kernel relu  f32 bf16: out out, in x, 1 flop per element
template <class T>
void ReluKernel<T>::run() const {
  map_rows(out, [](const auto& x) TILEWISE_INLINED { return maximum(splat_like(x, 0.0f), x); }, x);
}

// kernel relu_backward  f32 bf16: out dx, in dy, in x, 1 flop per element
template <class T>
void ReluBackwardKernel<T>::run() const {
  map_rows(
      dx,
      [](const auto& dy, const auto& x) TILEWISE_INLINED { return select_above(x, 0.0f, dy, splat_like(dy, 0.0f)); },
      dy, x);
}

// kernel silu  f32 bf16: out out, in x, 4 flops per element
template <class T>
void SiluKernel<T>::run() const {
  map_rows<kPrefetchBytes>(out, [](const auto& x) TILEWISE_INLINED { return x * sigmoid(x); }, x);
}

// kernel silu_gate  f32 bf16: out h, in g, in u, 5 flops per element
template <class T>
void SiluGateKernel<T>::run() const {
  map_rows<kPrefetchBytes>(h, [](const auto& g, const auto& u) TILEWISE_INLINED { return g * sigmoid(g) * u; }, g, u);
}

// kernel exp  f32 bf16: out out, in x, 1 flop per element
template <class T>
void ExpKernel<T>::run() const {
  map_rows<kPrefetchBytes>(out, [](const auto& x) TILEWISE_INLINED { return exponential(x); }, x);
}

// kernel log  f32 bf16: out out, in x, 1 flop per element
template <class T>
void LogKernel<T>::run() const {
  map_rows<kPrefetchBytes>(out, [](const auto& x) TILEWISE_INLINED { return logarithm(x); }, x);
}

/// d silu(x) / dx = s (1 + x (1 - s)) with s = sigmoid(x).
template <class V>
TILEWISE_INLINE V silu_slope(const V& x, const V& s) {
  return s * fused(x, splat<V>(1.0f) - s, splat<V>(1.0f));
}
// kernel silu_backward  f32 bf16: out dx, in dy, in x, 8 flops per element
template <class T>
void SiluBackwardKernel<T>::run() const {
  map_rows<kPrefetchBytes>(
      dx, [](const auto& dy, const auto& x) TILEWISE_INLINED { return dy * silu_slope(x, sigmoid(x)); }, dy, x);
}

/// The normal distribution function at x: gelu(x) = x * normal_share(x).
template <class V>
TILEWISE_INLINE V normal_share(const V& x) {
  return fused(splat<V>(0.5f), erf(x * splat<V>(0.707106781186547524f)), splat<V>(0.5f));
}
/// gelu's slope: share + x * density.
template <class V>
TILEWISE_INLINE V gelu_slope(const V& x) {
  const V density = splat<V>(0.398942280401432678f) * decay(splat<V>(-0.5f) * (x * x));
  return fused(x, density, normal_share(x));
}

/// The tanh approximation of normal_share, (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), is sigmoid(2u).
/// For |x| > 16 it is 0 or 1, so x^2 is clamped there and no product of infinity and zero appears.
inline constexpr float kGeluLinear = 1.59576912160573071f, kGeluCubic = 0.0713548162726002527f;
template <class V>
TILEWISE_INLINE V gelu_square(const V& x) {
  return minimum(x * x, splat<V>(256.0f));
}
template <class V>
TILEWISE_INLINE V gelu_tanh_share(const V& x) {
  return sigmoid(x * fused(splat<V>(kGeluCubic), gelu_square(x), splat<V>(kGeluLinear)));
}

/// The factor by which gelu_tanh multiplies x, and gelu_tanh's slope.
template <class V>
struct Parts {
  V share, slope;
};
/// The slope is s + x s (1 - s) 2u'. With t = e^-|2u| neither s nor 1 - s cancels: they are 1 / (1 + t) and t / (1 +
/// t).
template <class V>
TILEWISE_INLINE Parts<V> gelu_tanh_parts(const V& x) {
  const V square = gelu_square(x), linear = splat<V>(kGeluLinear), one = splat<V>(1.0f);
  const V twice = x * fused(splat<V>(kGeluCubic), square, linear);
  const V t = decay(negate(magnitude(twice))), more = one / (one + t), less = t * more;
  const V s = select_above(twice, 0.0f, more, less);
  return {s, fused(x * (more * less), fused(splat<V>(3 * kGeluCubic), square, linear), s)};
}

// kernel gelu  f32 bf16: out out, in x, 4 flops per element
template <class T>
void GeluKernel<T>::run() const {
  map_rows<kPrefetchBytes>(out, [](const auto& x) TILEWISE_INLINED { return x * normal_share(x); }, x);
}

// kernel gelu_backward  f32 bf16: out dx, in dy, in x, 8 flops per element
template <class T>
void GeluBackwardKernel<T>::run() const {
  map_rows<kPrefetchBytes>(
      dx, [](const auto& dy, const auto& x) TILEWISE_INLINED { return dy * gelu_slope(x); }, dy, x);
}

// kernel gelu_tanh  f32 bf16: out out, in x, 8 flops per element
template <class T>
void GeluTanhKernel<T>::run() const {
  map_rows<kPrefetchBytes>(out, [](const auto& x) TILEWISE_INLINED { return x * gelu_tanh_share(x); }, x);
}

// kernel gelu_tanh_backward  f32 bf16: out dx, in dy, in x, 14 flops per element
template <class T>
void GeluTanhBackwardKernel<T>::run() const {
  map_rows<kPrefetchBytes>(
      dx, [](const auto& dy, const auto& x) TILEWISE_INLINED { return dy * gelu_tanh_parts(x).slope; }, dy, x);
}

// kernel gelu_tanh_gate  f32 bf16: out h, in g, in u, 9 flops per element
template <class T>
void GeluTanhGateKernel<T>::run() const {
  map_rows<kPrefetchBytes>(
      h, [](const auto& g, const auto& u) TILEWISE_INLINED { return g * gelu_tanh_share(g) * u; }, g, u);
}

// kernel tanh  f32 bf16: out out, in x, 1 flop per element
template <class T>
void TanhKernel<T>::run() const {
  map_rows<kPrefetchBytes>(out, [](const auto& x) TILEWISE_INLINED { return tanh(x); }, x);
}

// kernel tanh_backward  f32 bf16: out dx, in dy, in y, 3 flops per element
/// Computed from the result y: dy (1 - y^2).
template <class T>
void TanhBackwardKernel<T>::run() const {
  map_rows(
      dx, [](const auto& dy, const auto& y) TILEWISE_INLINED { return dy * fused(negate(y), y, splat_like(y, 1.0f)); },
      dy, y);
}

// kernel softcap  f32 bf16: out out, in x, float cap, 3 flops per element
/// cap tanh(x / cap).
template <class T>
void SoftcapKernel<T>::run() const {
  const auto capped = [cap = cap](const auto& x) TILEWISE_INLINED {
    const auto whole = splat_like(x, cap);
    return whole * tanh(x / whole);
  };
  map_rows<kPrefetchBytes>(out, capped, x);
}

// kernel softcap_backward  f32 bf16: out dx, in dy, in x, float cap, 5 flops per element
/// Computed from x: a result in bf16 near the cap is too coarse.
template <class T>
void SoftcapBackwardKernel<T>::run() const {
  const auto slope = [cap = cap](const auto& dy, const auto& x) TILEWISE_INLINED {
    const auto t = tanh(x / splat_like(x, cap));
    return dy * fused(negate(t), t, splat_like(t, 1.0f));
  };
  map_rows<kPrefetchBytes>(dx, slope, dy, x);
}

// kernel scale  f32 bf16: out out, in x, float factor, 1 flop per element
template <class T>
void ScaleKernel<T>::run() const {
  map_rows(out, [s = factor](const auto& x) TILEWISE_INLINED { return x * splat_like(x, s); }, x);
}

// kernel add_bias  f32 bf16
//   out out[m d]
//   in x[m d], bias[1 d]
//   each m d
//   flops m * d
//   bytes 2 * item * m * d
/// Adds the same vector to every row.
template <class T>
void AddBiasKernel<T>::run() const {
  const T* added = bias.elements();
  for (int64_t r = 0; r < out.rows; ++r) {
    const T* from = x.row(r);
    T* to = out.row(r);
    each_column(out.cols, [&](auto at) TILEWISE_INLINED { at.store(to, at.load(from) + at.load(added)); });
  }
}

// kernel silu_gate_backward  f32 bf16: out dg, out du, in dh, in g, in u, 10 flops per element
template <class T>
void SiluGateBackwardKernel<T>::run() const {
  for (int64_t r = 0; r < dg.rows; ++r) {
    T *to_dg = dg.row(r), *to_du = du.row(r);
    const T *from_dh = dh.row(r), *from_g = g.row(r), *from_u = u.row(r);
    each_column(dg.cols, [&](auto at) TILEWISE_INLINED {
      const auto gate = at.load(from_g), s = sigmoid(gate), dy = at.load(from_dh), up = at.load(from_u);
      at.store(to_dg, dy * up * silu_slope(gate, s));
      at.store(to_du, dy * (gate * s));
    });
  }
}

// kernel gelu_tanh_gate_backward  f32 bf16: out dg, out du, in dh, in g, in u, 16 flops per element
template <class T>
void GeluTanhGateBackwardKernel<T>::run() const {
  for (int64_t r = 0; r < dg.rows; ++r) {
    T *to_dg = dg.row(r), *to_du = du.row(r);
    const T *from_dh = dh.row(r), *from_g = g.row(r), *from_u = u.row(r);
    each_column(dg.cols, [&](auto at) TILEWISE_INLINED {
      const auto gate = at.load(from_g), dy = at.load(from_dh), up = at.load(from_u);
      const auto parts = gelu_tanh_parts(gate);
      at.store(to_dg, dy * up * parts.slope);
      at.store(to_du, dy * (gate * parts.share));
    });
  }
}

// kernel cast_f32_bf16
//   out out:bf16[m d]
//   in x:f32[m d]
//   each m d
//   flops 0
//   bytes 6 * m * d
void CastF32Bf16Kernel::run() const {
  map_rows(out, [](const auto& x) TILEWISE_INLINED { return x; }, x);
}

// kernel cast_bf16_f32
//   out out:f32[m d]
//   in x:bf16[m d]
//   each m d
//   flops 0
//   bytes 6 * m * d
void CastBf16F32Kernel::run() const {
  map_rows(out, [](const auto& x) TILEWISE_INLINED { return x; }, x);
}

template <class T>
TILEWISE_INLINE void copy_row(T* to, const T* from, int64_t n) {
  if (n > 0) __builtin_memmove(to, from, static_cast<size_t>(n) * sizeof(T));
}

/// Copies and sums of tiles of at least this many bytes are stored past the caches; they would evict half of L2.
/// Weights and gradients are read much later. Activations are read soon, but their tiles are rarely so large.
inline constexpr int64_t kLongCopy = int64_t{512} << 10;
inline constexpr int64_t kCopyAhead = 2048;  // its prefetch distance in bytes

/// Copies contiguous elements between runs that do not overlap.
template <class T>
TILEWISE_INLINE void copy_run(T* to, const T* from, int64_t n) {
  const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
  if (bytes < kLongCopy) return copy_row(to, from, n);
  auto* left = reinterpret_cast<char*>(to);
  const auto* right = reinterpret_cast<const char*>(from);
  const auto begin = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % 64);
  copy_row(left, right, begin);
  int64_t i = begin;
  for (; i + 64 <= bytes; i += 64) {
    __builtin_prefetch(right + i + kCopyAhead);
    stream(left + i, load_int(right + i));
  }
  copy_row(left + i, right + i, bytes - i);
  finish_streams();
}

template <class T>
TILEWISE_INLINE void copy_tile(const Tile<T>& to, const Tile<const T>& from) {
  if (to.stride == to.cols && from.stride == to.cols) return copy_run(to.row(0), from.row(0), to.rows * to.cols);
  for (int64_t r = 0; r < to.rows; ++r) copy_row(to.row(r), from.row(r), to.cols);
}

// kernel copy  f32=uint32_t bf16=uint16_t: out out, in x, 0 flops per element
template <class T>
void CopyKernel<T>::run() const {
  copy_tile(out, x);
}

// kernel fetch  f32=uint32_t bf16=uint16_t: out out, in x, 0 flops per element
//   internal the executor of tile programs moves the rows of files
/// From a device's file into its memory. For files, the executor moves the rows (programs/run/file_queue.h).
template <class T>
void FetchKernel<T>::run() const {
  copy_tile(out, x);
}

// kernel store  f32=uint32_t bf16=uint16_t: out out, in x, 0 flops per element
//   internal the executor of tile programs moves the rows of files
/// From a device's memory into its file, like fetch.
template <class T>
void StoreKernel<T>::run() const {
  copy_tile(out, x);
}

// kernel copy_pairs  f32=uint32_t bf16=uint16_t f64=uint64_t i32=uint32_t
//   out dst...[m* d*]
//   in src...[m* d*]
//   flops 0
//   bytes 2 * item * m * d
template <class T>
void CopyPairsKernel<T>::run() const {
  for (int64_t i = 0; i < dst.size; ++i) copy_tile(dst[i], src[i]);
}

// kernel kv_write  f32 bf16
//   inout cache[_ d]
//   in x[m d], slots:i32[m 1]
//   int block_size, head_dim
//   require block_size > 0 and cache.rows % block_size == 0 and head_dim > 0 and d % head_dim == 0
//   flops 0
//   bytes 2 * item * m * d
/// In a block of the KV cache the rows of a head are contiguous, so that its keys are read as one run.
template <class T>
void KvWriteKernel<T>::run() const {
  for (int64_t r = 0; r < x.rows; ++r) {
    const int64_t slot = *slots.row(r);
    if (slot < 0) continue;
    const T* from = x.row(r);
    T* to = cache.row(slot / block_size * block_size) + slot % block_size * head_dim;
    for (int64_t c = 0; c < x.cols; c += head_dim, to += block_size * head_dim) copy_row(to, from + c, head_dim);
  }
}

// kernel spread  f32 bf16
//   out out[m d]
//   in x:f32[1 1]
//   each m d
//   flops 0
//   bytes item * m * d
/// Fills a tile with one number.
template <class T>
void SpreadKernel<T>::run() const {
  const Lanes value = set(*x.elements());
  for (int64_t r = 0; r < out.rows; ++r)
    for (int64_t c = 0; c < out.cols; c += kLanes) store(out.row(r) + c, value, out.cols - c);
}

// kernel gather_rows  f32 bf16 i32
//   out out[m d]
//   in x[_ d], index:i32[m 1]
//   each m d
//   flops 0
//   bytes 2 * item * m * d
template <class T>
void GatherRowsKernel<T>::run() const {
  for (int64_t r = 0; r < out.rows; ++r) copy_row(out.row(r), x.row(*index.row(r)), out.cols);
}

/// Reads row `n` of a packed table, which is a column of its panel.
TILEWISE_INLINE void read_packed_row(float* to, const TileView& table, int64_t n, int64_t cols) {
  const float* from = static_cast<const float*>(table.data) + n / 32 * 32 * table.stride + n % 32;
  for (int64_t c = 0; c < cols; ++c) to[c] = from[c * 32];
}
TILEWISE_INLINE void read_packed_row(bf16* to, const TileView& table, int64_t n, int64_t cols) {
  const bf16* from = static_cast<const bf16*>(table.data) + n / 32 * 32 * table.stride + 2 * (n % 32);
  for (int64_t c = 0; c < cols; ++c) to[c] = from[c / 2 * 64 + c % 2];
}

// kernel unpack  f32 bf16
//   out out[m d]
//   in x:f32![m d]
//   flops 0
//   bytes 2 * item * m * d
/// The rows of a matrix in panels.
template <class T>
void UnpackKernel<T>::run() const {
  for (int64_t r = 0; r < out.rows; ++r) {
    const float* from = x.elements() + r / 32 * 32 * x.stride + r % 32;
    for (int64_t c = 0; c < out.cols; ++c) store(out.row(r) + c, set(from[c * 32]), 1);
  }
}

// kernel embedding  f32 bf16
//   out out[m d]
//   in ids:i32[m 1], table![_ d]
//   int vocab_begin
//   each m
//   flops 0
//   bytes 2 * item * m * d
template <class T>
void EmbeddingKernel<T>::run() const {
  for (int64_t r = 0; r < out.rows; ++r) {
    const int64_t n = *ids.row(r) - vocab_begin;
    T* to = out.row(r);
    if (n >= 0 && n < table.rows) {
      read_packed_row(to, table, n, out.cols);
    } else {
      for (int64_t c = 0; c < out.cols; ++c) to[c] = T{0};
    }
  }
}

/// Stores fp32 sums of a long tile past the caches if lanes fill a cache line.
template <class T>
TILEWISE_INLINE void put_sum(T* to, const Lanes& sum, int64_t n, bool is_long) {
  if constexpr (sizeof(T) == sizeof(float))
    if (is_long && n >= kLanes) return stream(to, as_int(sum));
  store(to, sum, n);
}

/// The loop over tiles of equal sizes: over their rows, or over one long row if no tile has gaps between its rows.
struct Loop {
  int64_t rows, cols;
};
template <class Out, class In>
TILEWISE_INLINE Loop loop_over(const Tile<Out>& out, const Tiles<In, 1>& x) {
  bool is_contiguous = out.stride == out.cols;
  for (int64_t i = 0; i < x.size; ++i) is_contiguous = is_contiguous && x[i].stride == out.cols;
  return is_contiguous ? Loop{1, out.rows * out.cols} : Loop{out.rows, out.cols};
}

/// out = cast(tree over the inputs x + residual). A residual of one row is added to all rows.
template <class T, class In>
TILEWISE_INLINE void add_along_tree(const Tile<T>& out, Tile<const T> extra, const Tiles<In, 1>& x) {
  const Loop loop = extra.data ? Loop{out.rows, out.cols} : loop_over(out, x);
  if (extra.rows == 1) extra.stride = 0;
  const int64_t inputs = x.size;
  const bool is_long = out.rows * out.cols * static_cast<int64_t>(sizeof(T)) >= kLongCopy;
  SplitTree tree;
  uint8_t pops[4096];
  for (int64_t i = 0; i < inputs; ++i)
    pops[i] = static_cast<uint8_t>(tree.add(i, i + 1) + (i + 1 == inputs ? tree.finish() : 0));
  const auto load_ahead = [](const auto* from, int64_t n) TILEWISE_INLINED {
    __builtin_prefetch(reinterpret_cast<const char*>(from) + kCopyAhead);
    return load(from, n);
  };
  const auto input = [&](int64_t i, int64_t r, int64_t c, int64_t n)
                         TILEWISE_INLINED { return load_ahead(x[i].row(r) + c, n); };
  const auto put = [&](Lanes sum, int64_t r, int64_t c, int64_t n) TILEWISE_INLINED {
    if (extra.data) sum = sum + load_ahead(extra.row(r) + c, n);
    put_sum(out.row(r) + c, sum, n, is_long);
  };
  for (int64_t r = 0; r < loop.rows; ++r) {
    if (inputs == 2) {  // the same tree without a stack, limited by memory only
      for (int64_t c = 0; c < loop.cols; c += kLanes) {
        const int64_t n = loop.cols - c;
        put(input(0, r, c, n) + input(1, r, c, n), r, c, n);
      }
      continue;
    }
    for (int64_t c = 0; c < loop.cols; c += kLanes) {
      const int64_t n = loop.cols - c;
      Lanes stack[16], sum = set(0.0f);
      int depth = 0;
      for (int64_t i = 0; i < inputs; ++i) {
        sum = input(i, r, c, n);
        for (int p = 0; p < pops[i]; ++p) sum = stack[--depth] + sum;
        stack[depth++] = sum;
      }
      put(sum, r, c, n);
    }
  }
  finish_streams();
}

// kernel tree_add  f32 bf16
//   out out[m d]
//   in residual?[_ d], x:f32...[m d]
//   require residual.rows == 0 or residual.rows >= m
//   flops m * d * inputs
//   bytes m * d * (4 * inputs + item)
template <class T>
void TreeAddKernel<T>::run() const {
  add_along_tree(out, residual, x);
}

// kernel tree_sum  bf16
//   out out[m d]
//   in x...[m d]
//   each m d
//   flops m * d * inputs
//   bytes item * m * d * (inputs + 1)
/// tree_add of rounded inputs. The sums of the tree are fp32.
void TreeSumKernel::run() const { add_along_tree(out, Tile<const bf16>(), x); }

template <class T, class Fn>
TILEWISE_INLINE void select_along_tree(const Tile<T>& out, const Tiles<const T, 1>& x, const Fn& fn) {
  const Loop loop = loop_over(out, x);
  for (int64_t r = 0; r < loop.rows; ++r)
    for (int64_t c = 0; c < loop.cols; c += kLanes) {
      const int64_t n = loop.cols - c;
      Lanes chosen = load(x[0].row(r) + c, n);
      for (int64_t i = 1; i < x.size; ++i) chosen = fn(chosen, load(x[i].row(r) + c, n));
      store(out.row(r) + c, chosen, n);
    }
}

// kernel tree_max  f32 bf16
//   out out[m d]
//   in none?[m d], x...[m d]
//   flops m * d * inputs
//   bytes item * m * d * (inputs + 1)
template <class T>
void TreeMaxKernel<T>::run() const {
  select_along_tree(out, x, [](const Lanes& a, const Lanes& b) TILEWISE_INLINED { return maximum(a, b); });
}

// kernel tree_min  f32 bf16
//   out out[m d]
//   in x...[m d]
//   each m d
//   flops m * d * inputs
//   bytes item * m * d * (inputs + 1)
template <class T>
void TreeMinKernel<T>::run() const {
  select_along_tree(out, x, [](const Lanes& a, const Lanes& b) TILEWISE_INLINED { return minimum(a, b); });
}

// kernel tree_or  f32=uint32_t bf16=uint16_t f64=uint64_t
//   out out[m d]
//   in none?[m d], x...[m d]
//   flops 0
//   bytes item * m * d * (inputs + 1)
template <class T>
void TreeOrKernel<T>::run() const {
  for (int64_t r = 0; r < out.rows; ++r)
    for (int64_t c = 0; c < out.cols; ++c) {
      T bits = 0;
      for (int64_t i = 0; i < x.size; ++i) bits |= x[i].row(r)[c];
      out.row(r)[c] = bits;
    }
}

}  // namespace
}  // namespace tilewise::kernels::TILEWISE_ISA_NS

#include "kernels/declared/elementwise_entries.h"
