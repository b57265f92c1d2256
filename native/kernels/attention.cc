// Attention over granules of 64 absolute KV positions: forward (dense and paged) in one core, and backward.
//
// A query row walks the granules from position 0 upwards; which other rows share its block changes no bit of it.
// Masked scores are -inf, and +0 is added to the output after each granule, so masked lanes leave no trace.
#include "kernels/math.h"
#include "kernels/attention.h"
#include "kernels/registry.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

/// Shapes of one call.
struct Heads {
  int64_t heads, kv_heads, dim;
  bool causal;
  float scale;
};

/// KV rows of one sequence: contiguous, or blocks looked up in a table.
template <class T>
struct KvRows {
  const T* k;
  const T* v;
  int64_t k_stride, v_stride;
  const int32_t* blocks;  // nullptr: position p is row p
  int64_t block_size;

  int64_t row(int64_t position) const {
    if (!blocks) return position;
    return blocks[position / block_size] * block_size + position % block_size;
  }
};

/// A run of queries of one sequence.
struct QueryRun {
  int64_t first_row, count;
  const int32_t* positions;  // per row; nullptr: row i of the run is position i
  int64_t position_stride;
  int64_t length;  // positions of a sequence that is not causal

  int64_t last_position(int64_t i, bool causal) const {
    if (!causal) return length - 1;
    return positions ? positions[i * position_stride] : i;
  }
};

template <class D>
class Forward {
 public:
  using T = typename D::T;
  static constexpr int64_t kMaxRun = 1024;  // rows of state per pass

  Forward(const Heads& heads, const Scratch& scratch) : h_(heads) {
    Carver carver(scratch);
    shape_ = GranuleShape<D>(heads.dim);
    sums_ = carver.take<float>(kMaxRun * shape_.dim_pad);
    top_ = carver.take<float>(kMaxRun);
    total_ = carver.take<float>(kMaxRun);
    q_ = carver.take<uint32_t>(kMaxRows * kRowStride * shape_.dim_blocks);
    k_panels_ = carver.take<uint32_t>(2 * kPanel * shape_.dim_steps);
    v_panels_ = carver.take<uint32_t>(shape_.dim_panels * kPanel * shape_.granule_steps);
    p_ = carver.take<uint32_t>(kMaxRows * kRowStride);
    scores_ = carver.take<float>(2 * kMaxRows * kPanel);
    block_ = carver.take<float>(kMaxRows * kPanel);
  }

  void run(const TileView& out, const TileView& lse, const TileView& q, const KvRows<T>& kv, const QueryRun& run) {
    const int64_t group = h_.heads / h_.kv_heads;
    const int64_t step = larger(int64_t{1}, kMaxRun / group);
    for (int64_t first = 0; first < run.count; first += step)
      for (int64_t head = 0; head < h_.kv_heads; ++head)
        run_head(out, lse, q, kv, run, head, first, smaller(step, run.count - first));
  }

 private:
  void run_head(const TileView& out, const TileView& lse, const TileView& q, const KvRows<T>& kv,
                const QueryRun& run, int64_t kv_head, int64_t first, int64_t count) {
    const int64_t group = h_.heads / h_.kv_heads, rows = group * count;
    int64_t last = 0;
    for (int64_t i = 0; i < count; ++i) last = larger(last, run.last_position(first + i, h_.causal));
    for (int64_t i = 0; i < rows; ++i) {
      top_[i] = -kInfinity;
      total_[i] = 0.0f;
      for (int64_t c = 0; c < shape_.dim_pad; c += kLanes) store(sums_ + i * shape_.dim_pad + c, set(0.0f));
    }
    for (int64_t granule = 0; granule <= last; granule += kGranule) {
      pack_granule(kv, kv_head, granule, smaller(kGranule, last + 1 - granule));
      for (int64_t g = 0; g < group; ++g)
        for (int64_t at = 0; at < count;) {
          const int64_t height = smaller(kMaxRows, count - at);
          run_block(q, run, kv_head * group + g, first + at, height, granule, g * count + at);
          at += height;
        }
    }
    for (int64_t g = 0; g < group; ++g)
      for (int64_t i = 0; i < count; ++i) write(out, lse, run.first_row + first + i, kv_head * group + g, g * count + i);
  }

  void pack_granule(const KvRows<T>& kv, int64_t kv_head, int64_t granule, int64_t count) {
    const int64_t row = kv.row(granule), column = kv_head * h_.dim;
    const T* k = kv.k + row * kv.k_stride + column;
    for (int64_t half = 0; half < 2; ++half)
      pack_panel_across<D>(k_panels_ + half * kPanel * shape_.dim_steps, k + (count > half * kPanel ? half * kPanel * kv.k_stride : 0),
                           kv.k_stride, count - half * kPanel, 0, h_.dim);
    shape_.pack_along(v_panels_, kv.v + row * kv.v_stride + column, kv.v_stride, h_.dim, count);
  }

  void run_block(const TileView& q, const QueryRun& run, int64_t head, int64_t first, int64_t rows, int64_t granule,
                 int64_t state_row) {
    int64_t furthest = 0;
    for (int64_t r = 0; r < rows; ++r) furthest = larger(furthest, run.last_position(first + r, h_.causal));
    if (furthest < granule) return;
    for (int64_t r = 0; r < rows; ++r)
      shape_.pack_row_blocks(q_ + r * kRowStride, row_of<const T>(q, run.first_row + first + r) + head * h_.dim, h_.dim);
    for (int64_t half = 0; half < 2; ++half)
      shape_.across_dim(rows, q_, k_panels_ + half * kPanel * shape_.dim_steps, scores_ + half * kMaxRows * kPanel);
    for (int64_t r = 0; r < rows; ++r)
      soften(r, run.last_position(first + r, h_.causal) - granule, state_row + r);
    const MicroFn micro = micro_for<typename D::Dot, ALayout::kRows>(rows);
    const Segment segment = {0, 0, -1, 0, static_cast<int32_t>(shape_.granule_steps), 0, 0, 0};
    for (int64_t panel = 0; panel < shape_.dim_panels; ++panel) {
      float* to = sums_ + state_row * shape_.dim_pad + panel * kPanel;
      for (int64_t r = 0; r < rows; ++r)
        for (int c = 0; c < kPanel; c += kLanes)
          store(block_ + r * kPanel + c, load(to + r * shape_.dim_pad + c) * set(correction_[r]));
      const uint32_t* base = v_panels_ + panel * kPanel * shape_.granule_steps;
      micro({&segment, 1, p_, &base, nullptr, block_, nullptr, block_});
      for (int64_t r = 0; r < rows; ++r)
        for (int c = 0; c < kPanel; c += kLanes)
          store(to + r * shape_.dim_pad + c, load(block_ + r * kPanel + c) + set(0.0f));
    }
  }

  /// One row of the granule: scores to probabilities, of which the first `limit` + 1 positions are visible.
  void soften(int64_t r, int64_t limit, int64_t state_row) {
    Lanes s[4];
    for (int i = 0; i < 4; ++i) {
      const float* from = scores_ + i / 2 * kMaxRows * kPanel + r * kPanel + i % 2 * kLanes;
      s[i] = mask_scores(load(from) * set(h_.scale), limit - i * kLanes, -kInfinity);
    }
    const float before = top_[state_row];
    const float here = max_lanes(maximum(maximum(s[0], s[1]), maximum(s[2], s[3])));
    const float top = larger(before, here);
    // Rows that see nothing yet keep exp(-inf) = 0 instead of exp(-inf + inf).
    const float shift = top == -kInfinity ? 0.0f : top;
    correction_[r] = exponential(before - shift);
    for (int i = 0; i < 4; ++i) s[i] = exponential(s[i] - set(shift));
    top_[state_row] = top;
    total_[state_row] =
        fused(total_[state_row], correction_[r], sum_lanes((s[0] + s[1]) + (s[2] + s[3])));
    auto* p = reinterpret_cast<T*>(p_ + r * kRowStride);
    for (int i = 0; i < 4; ++i) store(p + i * kLanes, s[i]);
  }

  void write(const TileView& out, const TileView& lse, int64_t row, int64_t head, int64_t state_row) {
    const float total = total_[state_row];
    const float* from = sums_ + state_row * shape_.dim_pad;
    T* to = row_of<T>(out, row) + head * h_.dim;
    for (int64_t c = 0; c < h_.dim; c += kLanes) store(to + c, load(from + c) / set(total), h_.dim - c);
    if (lse.data) row_of<float>(lse, row)[head] = top_[state_row] + logarithm(total);
  }

  Heads h_;
  GranuleShape<D> shape_;
  float *sums_, *top_, *total_;  // per row (query head of the group, query): output, maximum, sum of exp
  uint32_t *q_, *k_panels_, *v_panels_, *p_;
  float *scores_, *block_;
  float correction_[kMaxRows];
};

template <class D>
void attention(const KernelArgs& args) {
  using T = typename D::T;
  const TileView &out = args.tiles[0], &q = args.tiles[2], &k = args.tiles[3], &v = args.tiles[4];
  const int64_t seq = args.ints[0];
  const Heads heads = {args.ints[1], args.ints[2], args.ints[3], args.ints[4] != 0, static_cast<float>(args.floats[0])};
  if (out.rows == 0) return;
  Forward<D> forward(heads, args.scratch);
  for (int64_t row = 0; row < out.rows; row += seq) {
    const KvRows<T> kv = {row_of<const T>(k, row), row_of<const T>(v, row), k.stride, v.stride, nullptr, 0};
    forward.run(out, args.tiles[1], q, kv, {row, seq, nullptr, 0, seq});
  }
}

template <class D>
void attention_paged(const KernelArgs& args) {
  using T = typename D::T;
  const TileView &out = args.tiles[0], &q = args.tiles[1], &k = args.tiles[2], &v = args.tiles[3];
  const TileView &positions = args.tiles[4], &sequence = args.tiles[5], &table = args.tiles[6];
  const Heads heads = {args.ints[1], args.ints[2], args.ints[3], true, static_cast<float>(args.floats[0])};
  if (out.rows == 0) return;
  Forward<D> forward(heads, args.scratch);
  for (int64_t row = 0; row < out.rows;) {
    const int32_t own = *row_of<const int32_t>(sequence, row);
    int64_t end = row + 1;
    while (end < out.rows && *row_of<const int32_t>(sequence, end) == own) ++end;
    const KvRows<T> kv = {static_cast<const T*>(k.data), static_cast<const T*>(v.data), k.stride, v.stride,
                          row_of<const int32_t>(table, own), args.ints[0]};
    forward.run(out, {nullptr, 0, 0, 0}, q, kv,
                {row, end - row, row_of<const int32_t>(positions, row), positions.stride, 0});
    row = end;
  }
}

constexpr Entry kEntries[] = {
    {"attention_f32", attention<F32>},
    {"attention_bf16", attention<BF16>},
    {"attention_paged_f32", attention_paged<F32>},
    {"attention_paged_bf16", attention_paged<BF16>},
};

}  // namespace

EntryList attention_entries() { return {kEntries, sizeof kEntries / sizeof kEntries[0]}; }

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
