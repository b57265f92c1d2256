// Elementwise kernels, copies and look-ups, one pass over memory each.
#include "kernels/kernel.h"
#include "kernels/math.h"
#include "kernels/tree.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

/// Prefetch distance in bytes of long chains of operations. Measured for vectors of 8 values; other levels do not
/// prefetch.
inline constexpr int64_t kPrefetchBytes = kParts == 2 ? 1024 : 0;

/// out = fn(in...) lane by lane; tiles: out, in_0 .. in_{N-1}. fn maps RegisterBlocks of any count.
template <class Out, class In, int N, int64_t kAhead = 0, class Fn>
TILEWISE_INLINE void map_rows(const TileView& out, const TileView* in, const Fn& fn) {
  const int64_t ahead = smaller(kAhead / static_cast<int64_t>(sizeof(In)), out.cols);
  for (int64_t r = 0; r < out.rows; ++r) {
    const In *from[N], *next[N];
    for (int i = 0; i < N; ++i) from[i] = row_of<const In>(in[i], r), next[i] = next_row<const In>(in[i], r);
    Out *to = row_of<Out>(out, r), *next_to = next_row<Out>(out, r);
    each_column(out.cols, [&](auto at) TILEWISE_INLINED {
      decltype(at.set(0.0f)) x[N];
      for (int i = 0; i < N; ++i) x[i] = at.load(from[i]);
      if constexpr (kAhead > 0) {
        for (int i = 0; i < N; ++i) at.template prefetch_ahead<false>(from[i], next[i], ahead);
        at.template prefetch_ahead<true>(to, next_to, ahead);
      }
      at.store(to, fn(x));
    });
  }
}

#define TILEWISE_MAP_AHEAD(name, inputs, ahead, expression)                                   \
  template <class T>                                                                          \
  void name(const KernelArgs& args) {                                                         \
    map_rows<T, T, inputs, ahead>(args.tiles[0], args.tiles + 1,                              \
                                  [](const auto* x) TILEWISE_INLINED { return expression; }); \
  }
#define TILEWISE_MAP(name, inputs, expression) TILEWISE_MAP_AHEAD(name, inputs, 0, expression)
/// For a chain of operations as long as an exponential.
#define TILEWISE_MAP_LONG(name, inputs, expression) TILEWISE_MAP_AHEAD(name, inputs, kPrefetchBytes, expression)
TILEWISE_MAP(add, 2, x[0] + x[1])
TILEWISE_MAP(multiply, 2, x[0] * x[1])
TILEWISE_MAP(relu, 1, maximum(splat_like(x[0], 0.0f), x[0]))
TILEWISE_MAP(relu_backward, 2, select_above(x[1], 0.0f, x[0], splat_like(x[0], 0.0f)))
TILEWISE_MAP_LONG(silu, 1, x[0] * sigmoid(x[0]))
TILEWISE_MAP_LONG(silu_gate, 2, x[0] * sigmoid(x[0]) * x[1])
TILEWISE_MAP_LONG(exponential_of, 1, exponential(x[0]))
TILEWISE_MAP_LONG(logarithm_of, 1, logarithm(x[0]))

/// d silu(x) / dx = s (1 + x (1 - s)) with s = sigmoid(x).
template <class V>
TILEWISE_INLINE V silu_slope(const V& x, const V& s) {
  return s * fused(x, splat<V>(1.0f) - s, splat<V>(1.0f));
}
TILEWISE_MAP_LONG(silu_backward, 2, x[0] * silu_slope(x[1], sigmoid(x[1])))

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
TILEWISE_MAP_LONG(gelu, 1, x[0] * normal_share(x[0]))
TILEWISE_MAP_LONG(gelu_backward, 2, x[0] * gelu_slope(x[1]))
TILEWISE_MAP_LONG(gelu_tanh, 1, x[0] * gelu_tanh_share(x[0]))
TILEWISE_MAP_LONG(gelu_tanh_backward, 2, x[0] * gelu_tanh_parts(x[1]).slope)
TILEWISE_MAP_LONG(gelu_tanh_gate, 2, x[0] * gelu_tanh_share(x[0]) * x[1])
TILEWISE_MAP_LONG(tanh_of, 1, tanh(x[0]))

/// Computed from the result y: dy (1 - y^2).
TILEWISE_MAP(tanh_backward, 2, x[0] * fused(negate(x[1]), x[1], splat_like(x[1], 1.0f)))

/// cap tanh(x / cap).
template <class T>
void softcap(const KernelArgs& args) {
  const auto cap = static_cast<float>(args.floats[0]);
  map_rows<T, T, 1, kPrefetchBytes>(args.tiles[0], args.tiles + 1, [cap](const auto* x) TILEWISE_INLINED {
    const auto whole = splat_like(x[0], cap);
    return whole * tanh(x[0] / whole);
  });
}

/// Computed from x: a result in bf16 near the cap is too coarse.
template <class T>
void softcap_backward(const KernelArgs& args) {
  const auto cap = static_cast<float>(args.floats[0]);
  map_rows<T, T, 2, kPrefetchBytes>(args.tiles[0], args.tiles + 1, [cap](const auto* x) TILEWISE_INLINED {
    const auto t = tanh(x[1] / splat_like(x[1], cap));
    return x[0] * fused(negate(t), t, splat_like(t, 1.0f));
  });
}

template <class T>
void scale(const KernelArgs& args) {
  const auto s = static_cast<float>(args.floats[0]);
  map_rows<T, T, 1>(args.tiles[0], args.tiles + 1,
                    [s](const auto* x) TILEWISE_INLINED { return x[0] * splat_like(x[0], s); });
}

/// Adds the same vector to every row.
template <class T>
void add_bias(const KernelArgs& args) {
  const TileView &out = args.tiles[0], &x = args.tiles[1];
  const T* bias = static_cast<const T*>(args.tiles[2].data);
  for (int64_t r = 0; r < out.rows; ++r) {
    const T* from = row_of<const T>(x, r);
    T* to = row_of<T>(out, r);
    each_column(out.cols, [&](auto at) TILEWISE_INLINED { at.store(to, at.load(from) + at.load(bias)); });
  }
}

template <class T>
void silu_gate_backward(const KernelArgs& args) {
  const TileView* t = args.tiles;
  for (int64_t r = 0; r < t[0].rows; ++r) {
    T *dg = row_of<T>(t[0], r), *du = row_of<T>(t[1], r);
    const T *dh_row = row_of<const T>(t[2], r), *g_row = row_of<const T>(t[3], r), *u_row = row_of<const T>(t[4], r);
    each_column(t[0].cols, [&](auto at) TILEWISE_INLINED {
      const auto g = at.load(g_row), s = sigmoid(g), dh = at.load(dh_row), u = at.load(u_row);
      at.store(dg, dh * u * silu_slope(g, s));
      at.store(du, dh * (g * s));
    });
  }
}

template <class T>
void gelu_tanh_gate_backward(const KernelArgs& args) {
  const TileView* t = args.tiles;
  for (int64_t r = 0; r < t[0].rows; ++r) {
    T *dg = row_of<T>(t[0], r), *du = row_of<T>(t[1], r);
    const T *dh_row = row_of<const T>(t[2], r), *g_row = row_of<const T>(t[3], r), *u_row = row_of<const T>(t[4], r);
    each_column(t[0].cols, [&](auto at) TILEWISE_INLINED {
      const auto g = at.load(g_row), dh = at.load(dh_row), u = at.load(u_row);
      const auto parts = gelu_tanh_parts(g);
      at.store(dg, dh * u * parts.slope);
      at.store(du, dh * (g * parts.share));
    });
  }
}

void cast_f32_bf16(const KernelArgs& args) {
  map_rows<bf16, float, 1>(args.tiles[0], args.tiles + 1, [](const auto* x) TILEWISE_INLINED { return x[0]; });
}
void cast_bf16_f32(const KernelArgs& args) {
  map_rows<float, bf16, 1>(args.tiles[0], args.tiles + 1, [](const auto* x) TILEWISE_INLINED { return x[0]; });
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
TILEWISE_INLINE void copy_tile(const TileView& to, const TileView& from) {
  if (to.stride == to.cols && from.stride == to.cols)
    return copy_run(row_of<T>(to, 0), row_of<const T>(from, 0), to.rows * to.cols);
  for (int64_t r = 0; r < to.rows; ++r) copy_row(row_of<T>(to, r), row_of<const T>(from, r), to.cols);
}

template <class T>
void copy_rows(const KernelArgs& args) {
  copy_tile<T>(args.tiles[0], args.tiles[1]);
}

template <class T>
void copy_pairs(const KernelArgs& args) {
  for (int64_t i = 0; i + 1 < args.num_tiles; i += 2) copy_tile<T>(args.tiles[i], args.tiles[i + 1]);
}

/// In a block of the KV cache the rows of a head are contiguous, so that its keys are read as one run.
template <class T>
void kv_write(const KernelArgs& args) {
  const TileView &cache = args.tiles[0], &x = args.tiles[1];
  const int64_t block_size = args.ints[0], dim = args.ints[1];
  for (int64_t r = 0; r < x.rows; ++r) {
    const int64_t slot = *row_of<const int32_t>(args.tiles[2], r);
    if (slot < 0) continue;
    const T* from = row_of<const T>(x, r);
    T* to = row_of<T>(cache, slot / block_size * block_size) + slot % block_size * dim;
    for (int64_t c = 0; c < x.cols; c += dim, to += block_size * dim) copy_row(to, from + c, dim);
  }
}

/// Fills a tile with one number.
template <class T>
void spread(const KernelArgs& args) {
  const TileView& out = args.tiles[0];
  const Lanes x = set(*row_of<const float>(args.tiles[1], 0));
  for (int64_t r = 0; r < out.rows; ++r)
    for (int64_t c = 0; c < out.cols; c += kLanes) store(row_of<T>(out, r) + c, x, out.cols - c);
}

template <class T>
void gather_rows(const KernelArgs& args) {
  const TileView &out = args.tiles[0], &x = args.tiles[1];
  for (int64_t r = 0; r < out.rows; ++r)
    copy_row(row_of<T>(out, r), row_of<const T>(x, *row_of<const int32_t>(args.tiles[2], r)), out.cols);
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

template <class T>
void embedding(const KernelArgs& args) {
  const TileView &out = args.tiles[0], &table = args.tiles[2];
  for (int64_t r = 0; r < out.rows; ++r) {
    const int64_t n = *row_of<const int32_t>(args.tiles[1], r) - args.ints[0];
    T* to = row_of<T>(out, r);
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

/// tiles: out, residual or null, in_0 ..; out = cast(tree over the inputs + residual). A residual of one row is added
/// to all rows.
template <class T>
void tree_add(const KernelArgs& args) {
  const TileView& out = args.tiles[0];
  TileView residual = args.tiles[1];
  if (residual.rows == 1) residual.stride = 0;
  const int64_t inputs = args.num_tiles - 2;
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
                         TILEWISE_INLINED { return load_ahead(row_of<const float>(args.tiles[2 + i], r) + c, n); };
  const auto put = [&](Lanes sum, int64_t r, int64_t c, int64_t n) TILEWISE_INLINED {
    if (residual.data) sum = sum + load_ahead(row_of<const T>(residual, r) + c, n);
    put_sum(row_of<T>(out, r) + c, sum, n, is_long);
  };
  for (int64_t r = 0; r < out.rows; ++r) {
    if (inputs == 2) {  // the same tree without a stack, limited by memory only
      for (int64_t c = 0; c < out.cols; c += kLanes) {
        const int64_t n = out.cols - c;
        put(input(0, r, c, n) + input(1, r, c, n), r, c, n);
      }
      continue;
    }
    for (int64_t c = 0; c < out.cols; c += kLanes) {
      const int64_t n = out.cols - c;
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

void tree_max(const KernelArgs& args) {
  const TileView& out = args.tiles[0];
  for (int64_t r = 0; r < out.rows; ++r)
    for (int64_t c = 0; c < out.cols; c += kLanes) {
      const int64_t n = out.cols - c;
      Lanes top = load(row_of<const float>(args.tiles[2], r) + c, n);
      for (int64_t i = 3; i < args.num_tiles; ++i)
        top = maximum(top, load(row_of<const float>(args.tiles[i], r) + c, n));
      store(row_of<float>(out, r) + c, top, n);
    }
}

template <class T>
void tree_or(const KernelArgs& args) {
  const TileView& out = args.tiles[0];
  for (int64_t r = 0; r < out.rows; ++r)
    for (int64_t c = 0; c < out.cols; ++c) {
      T bits = 0;
      for (int64_t i = 2; i < args.num_tiles; ++i) bits |= row_of<const T>(args.tiles[i], r)[c];
      row_of<T>(out, r)[c] = bits;
    }
}

constexpr Entry kEntries[] = {
    {"add_f32", add<float>},
    {"add_bf16", add<bf16>},
    {"add_bias_f32", add_bias<float>},
    {"add_bias_bf16", add_bias<bf16>},
    {"multiply_f32", multiply<float>},
    {"multiply_bf16", multiply<bf16>},
    {"scale_f32", scale<float>},
    {"scale_bf16", scale<bf16>},
    {"silu_f32", silu<float>},
    {"silu_bf16", silu<bf16>},
    {"silu_backward_f32", silu_backward<float>},
    {"silu_backward_bf16", silu_backward<bf16>},
    {"silu_gate_f32", silu_gate<float>},
    {"silu_gate_bf16", silu_gate<bf16>},
    {"silu_gate_backward_f32", silu_gate_backward<float>},
    {"silu_gate_backward_bf16", silu_gate_backward<bf16>},
    {"relu_f32", relu<float>},
    {"relu_bf16", relu<bf16>},
    {"relu_backward_f32", relu_backward<float>},
    {"relu_backward_bf16", relu_backward<bf16>},
    {"gelu_f32", gelu<float>},
    {"gelu_bf16", gelu<bf16>},
    {"gelu_backward_f32", gelu_backward<float>},
    {"gelu_backward_bf16", gelu_backward<bf16>},
    {"gelu_tanh_f32", gelu_tanh<float>},
    {"gelu_tanh_bf16", gelu_tanh<bf16>},
    {"gelu_tanh_backward_f32", gelu_tanh_backward<float>},
    {"gelu_tanh_backward_bf16", gelu_tanh_backward<bf16>},
    {"gelu_tanh_gate_f32", gelu_tanh_gate<float>},
    {"gelu_tanh_gate_bf16", gelu_tanh_gate<bf16>},
    {"gelu_tanh_gate_backward_f32", gelu_tanh_gate_backward<float>},
    {"gelu_tanh_gate_backward_bf16", gelu_tanh_gate_backward<bf16>},
    {"tanh_f32", tanh_of<float>},
    {"tanh_bf16", tanh_of<bf16>},
    {"tanh_backward_f32", tanh_backward<float>},
    {"tanh_backward_bf16", tanh_backward<bf16>},
    {"softcap_f32", softcap<float>},
    {"softcap_bf16", softcap<bf16>},
    {"softcap_backward_f32", softcap_backward<float>},
    {"softcap_backward_bf16", softcap_backward<bf16>},
    {"copy_f32", copy_rows<uint32_t>},
    {"copy_bf16", copy_rows<uint16_t>},
    {"fetch_f32", copy_rows<uint32_t>},  // for files, the executor moves the rows (programs/run/file_queue.h)
    {"fetch_bf16", copy_rows<uint16_t>},
    {"store_f32", copy_rows<uint32_t>},
    {"store_bf16", copy_rows<uint16_t>},
    {"exp_f32", exponential_of<float>},
    {"log_f32", logarithm_of<float>},
    {"cast_f32_bf16", cast_f32_bf16},
    {"cast_bf16_f32", cast_bf16_f32},
    {"embedding_f32", embedding<float>},
    {"embedding_bf16", embedding<bf16>},
    {"spread_f32", spread<float>},
    {"spread_bf16", spread<bf16>},
    {"gather_rows_f32", gather_rows<float>},
    {"gather_rows_bf16", gather_rows<bf16>},
    {"gather_rows_i32", gather_rows<int32_t>},
    {"kv_write_f32", kv_write<float>},
    {"kv_write_bf16", kv_write<bf16>},
    {"tree_add_f32", tree_add<float>},
    {"tree_add_bf16", tree_add<bf16>},
    {"tree_max_f32", tree_max},
    {"tree_or_f32", tree_or<uint32_t>},
    {"tree_or_f64", tree_or<uint64_t>},
    {"tree_or_bf16", tree_or<uint16_t>},
    {"copy_pairs_f32", copy_pairs<uint32_t>},
    {"copy_pairs_bf16", copy_pairs<uint16_t>},
    {"copy_pairs_f64", copy_pairs<uint64_t>},
    {"copy_pairs_i32", copy_pairs<uint32_t>},
};

}  // namespace

EntryList elementwise_entries() { return {kEntries, sizeof kEntries / sizeof kEntries[0]}; }

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
