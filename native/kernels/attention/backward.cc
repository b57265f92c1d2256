// Attention backward over blocks of 64 positions. For each query head, query blocks are visited in ascending order, and
// within one the KV blocks.
//
// P and dS of one 64 x 64 pair of blocks are recomputed from lse. They are then used in three products: dV += P^T dO,
// dK += dS^T Q, dQ += dS K, each with one fp32 accumulator per element. dK and dV of a KV head are summed over its
// query heads along a tree. P and dS are +0 for positions that a query does not attend to; pairs of blocks with only
// such positions are skipped.
#include "kernels/declared/attention/backward.h"

#include "kernels/attention/kv_blocks.h"
#include "kernels/kernel.h"
#include "kernels/math.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

template <class D>
inline constexpr int64_t kRowBlocks = (kKvBlock + kRunRows<D> - 1) / kRunRows<D>;

/// The first row of block b in a KV block; blocks have nearly equal heights.
template <class D>
constexpr int64_t block_start(int64_t b) {
  return b * kKvBlock / kRowBlocks<D>;
}

/// Products over queries read P and dS step by step, or transposed, with the positions as rows.
template <class D>
inline constexpr bool kTransposes = kGroupOf<typename D::Dot> > 1;

/// Words of a step of P and dS.
template <class D>
inline constexpr int64_t kStepOf = kKvBlock * kWordsOf<typename D::Dot>;

/// The positions that queries of a sequence see, block by block.
struct Sight {
  int64_t length;
  int64_t window;  // maximum number of positions that a query sees; more than the length if unlimited
  bool causal;
  Tile<const int32_t> first = {};  // per row: the first position that it sees; empty: 0
  int64_t first_row = 0;  // the sequence's first row

  /// Rows of query block g.
  int64_t rows(int64_t g) const { return smaller(kKvBlock, length - g * kKvBlock); }
  /// Positions of KV block kv that the first `count` queries of query block g see together, ignoring windows.
  int64_t end(int64_t g, int64_t kv, int64_t count) const {
    return causal ? smaller(rows(kv), (g - kv) * kKvBlock + count) : rows(kv);
  }
  /// The first position that query r of query block g sees, relative to the start of KV block kv.
  int64_t begin(int64_t g, int64_t kv, int64_t r) const {
    const int64_t query = g * kKvBlock + r;
    int64_t begin = query - window + 1;
    if (first.data) begin = larger(begin, smaller(int64_t{*first.row(first_row + query)}, query));
    return begin - kv * kKvBlock;
  }
  int64_t first_kv_block(int64_t g) const {
    int64_t lowest = begin(g, 0, 0);
    for (int64_t r = 1; first.data && r < rows(g); ++r) lowest = smaller(lowest, begin(g, 0, r));
    return larger(lowest, int64_t{0}) / kKvBlock;
  }
  /// Whether all queries of a block see KV block kv from its start on.
  bool sees_start(int64_t g, int64_t kv) const {
    bool sees = begin(g, kv, rows(g) - 1) <= 0;
    for (int64_t r = 0; first.data && r < rows(g); ++r) sees = sees && begin(g, kv, r) <= 0;
    return sees;
  }
  int64_t last_kv_block(int64_t g) const { return causal ? g : (length - 1) / kKvBlock; }
};

/// Stores one step of P or dS in the layout that the products read.
template <class D>
void store_words(uint32_t* to, const Lanes* x) {
  if constexpr (D::kPerStep == 1) {
    store_int(to, as_int(x[0]));
  } else if constexpr (kWordsOf<typename D::Dot> > 1) {
    store_int(to, rounded_words(x[1]));
    store_int(to + kKvBlock, rounded_words(x[0]));
  } else {
    store_step(reinterpret_cast<bf16*>(to), x[0], x[1]);
  }
}

/// + 0 turns -0 into +0, so skipped zeros change no bit.
template <class Out>
void write_row(Out* to, const float* from, int64_t dim) {
  for (int64_t c = 0; c < dim; c += kLanes)
    store(to + c, load(from + c / kPanel * kKvBlock * kPanel + c % kPanel) + set(0.0f), dim - c);
}

/// Window and softcap are those of Heads in forward.cc.
template <class D>
class Backward {
 public:
  using T = typename D::T;
  static constexpr int kColumns = kParts == 1 ? 4 / D::kPerStep : 2;  // vectors of positions processed together
  static_assert(kColumns % 2 == 0);  // they are stored in pairs

  explicit Backward(const AttentionBackwardKernel<D>& call) : c_(call), shape_(call.head_dim) {
    Carver carver(call.scratch);
    kv_blocks_ = divide_up(c_.seq_len, kKvBlock);
    across_words_ = 2 * kPanel * shape_.dim_steps;
    along_words_ = shape_.dim_panels * shape_.kv_block_steps * kPanel;
    block_floats_ = kKvBlock * shape_.dim_pad;
    k_across_ = carver.take<uint32_t>(kv_blocks_ * across_words_);
    v_across_ = carver.take<uint32_t>(kv_blocks_ * across_words_);
    k_along_ = carver.take<uint32_t>(kv_blocks_ * along_words_);
    q_rows_ = carver.take<uint32_t>(shape_.dim_blocks * kKvBlock * kRowWords<D>);
    do_rows_ = carver.take<uint32_t>(shape_.dim_blocks * kKvBlock * kRowWords<D>);
    q_along_ = carver.take<uint32_t>(along_words_);
    do_along_ = carver.take<uint32_t>(along_words_);
    p_steps_ = carver.take<uint32_t>(shape_.kv_block_steps * kStepOf<D>);
    ds_steps_ = carver.take<uint32_t>(shape_.kv_block_steps * kStepOf<D>);
    ds_rows_ = carver.take<uint32_t>(kKvBlock * kRowWords<D>);
    transposed_ = carver.take<uint32_t>(kTransposes<D> ? kKvBlock * kRowStride : 0);
    s_ = carver.take<float>(kKvBlock * kKvBlock);
    dp_ = carver.take<float>(kKvBlock * kKvBlock);
    dq_ = carver.take<float>(block_floats_);
    int64_t entries = 2;
    for (int64_t group = c_.heads / c_.kv_heads; group > 1; group = (group + 1) / 2) ++entries;
    stack_ = carver.take<float>(entries * entry_floats());
  }

  void run(int64_t first_row, int64_t kv_head) {
    row0_ = first_row;
    const int64_t length = c_.lengths.data ? *c_.lengths.row(first_row / c_.seq_len) : c_.seq_len;
    sight_ = {length, c_.window > 0 ? c_.window : length + kKvBlock, c_.causal, c_.first, first_row};
    const int64_t column = kv_head * c_.head_dim;
    for (int64_t g = 0; g * kKvBlock < length; ++g) {
      const int64_t row = row0_ + g * kKvBlock, count = sight_.rows(g);
      pack_across(k_across_ + g * across_words_, c_.k, row, column, count);
      pack_across(v_across_ + g * across_words_, c_.v, row, column, count);
      shape_.pack_along(k_along_ + g * along_words_, c_.k.row(row) + column, c_.k.stride, c_.head_dim, count);
    }
    const int64_t group = c_.heads / c_.kv_heads;
    clear_rows(c_.dq, row0_ + length, row0_ + c_.seq_len, group * column, group * c_.head_dim);
    SplitTree tree;
    float* top = stack_;
    for (int64_t h = 0; h < group; ++h) {
      run_head(kv_head * group + h, top);
      int pops = tree.add(h, h + 1) + (h + 1 == group ? tree.finish() : 0);
      for (; pops > 0; --pops) {
        float* below = top - entry_floats();
        for (int64_t i = 0; i < entry_floats(); i += kLanes) store(below + i, load(below + i) + load(top + i));
        top = below;
      }
      top += entry_floats();
    }
    write_kv(c_.dk, stack_, column);
    write_kv(c_.dv, stack_ + entry_floats() / 2, column);
  }

 private:
  int64_t entry_floats() const { return 2 * kv_blocks_ * block_floats_; }  // dK, then dV

  void pack_across(uint32_t* to, const Tile<const T>& tile, int64_t row, int64_t column, int64_t count) {
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t skip = count > half * kPanel ? half * kPanel : 0;
      pack_panel_across<D>(to + half * kPanel * shape_.dim_steps, tile.row(row + skip) + column, tile.stride,
                           count - half * kPanel, 0, c_.head_dim);
    }
  }

  void run_head(int64_t head, float* sums) {
    for (int64_t i = 0; i < entry_floats(); i += kLanes) store(sums + i, set(0.0f));
    for (int64_t g = 0; g * kKvBlock < sight_.length; ++g) {
      const int64_t count = sight_.rows(g);
      load_queries(head, g, count);
      for (int64_t i = 0; i < block_floats_; i += kLanes) store(dq_ + i, set(0.0f));
      const int64_t first_of_next = (g + 1) * kKvBlock < sight_.length ? sight_.first_kv_block(g + 1) : 0;
      for (int64_t kv = sight_.first_kv_block(g); kv <= sight_.last_kv_block(g); ++kv) {
        next_ = kv < sight_.last_kv_block(g) ? kv + 1 : smaller(kv, first_of_next);
        rebuild(g, kv, count);
        float* dk = sums + kv * block_floats_;
        float* dv = dk + entry_floats() / 2;
        const int64_t to_next = (next_ - kv) * block_floats_;
        accumulate_kv(dk, ds_steps_, q_along_, c_.causal && kv == g, count, dk + to_next);
        accumulate_kv(dv, p_steps_, do_along_, c_.causal && kv == g, count, dv + to_next);
        accumulate_q(g, kv, count);
      }
      for (int64_t r = 0; r < count; ++r)
        write_row(c_.dq.row(row0_ + g * kKvBlock + r) + head * c_.head_dim, dq_ + r * kPanel, c_.head_dim);
    }
  }

  void load_queries(int64_t head, int64_t g, int64_t count) {
    const int64_t row = row0_ + g * kKvBlock, column = head * c_.head_dim;
    for (int64_t r = 0; r < count; ++r) {
      shape_.pack_row_blocks(q_rows_ + r * kRowWords<D>, c_.q.row(row + r) + column, c_.head_dim);
      shape_.pack_row_blocks(do_rows_ + r * kRowWords<D>, c_.dout.row(row + r) + column, c_.head_dim);
    }
    shape_.pack_along(q_along_, c_.q.row(row) + column, c_.q.stride, c_.head_dim, count);
    shape_.pack_along(do_along_, c_.dout.row(row) + column, c_.dout.stride, c_.head_dim, count);
    for (int64_t r = 0; r < count; ++r) {
      const T *g_out = c_.dout.row(row + r) + column, *y = c_.out.row(row + r) + column;
      Lanes dot = set(0.0f);
      for (int64_t i = 0; i < c_.head_dim; i += kLanes)
        dot = fused(load(g_out + i, c_.head_dim - i), load(y + i, c_.head_dim - i), dot);
      delta_[r] = sum_lanes(dot);
      lse_[r] = c_.lse.row(row + r)[head];
    }
  }

  /// Recomputes P and dS of query block g and KV block kv, in the layouts that the products read.
  void rebuild(int64_t g, int64_t kv, int64_t count) {
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t words = kPanel * shape_.dim_steps, panel = kv * across_words_ + half * words;
      const int64_t later = next_ * across_words_ + half * words;
      const auto across = [&](const uint32_t* rows_of, const uint32_t* panels, float* to) {
        for (int64_t b = 0; b < kRowBlocks<D> && block_start<D>(b) < count; ++b) {
          const int64_t first = block_start<D>(b), rows = smaller(count, block_start<D>(b + 1)) - first;
          if (half * kPanel < sight_.end(g, kv, first + rows))
            shape_.across_dim(rows, rows_of + first * kRowWords<D>, panels + panel,
                              to + (half * kKvBlock + first) * kPanel, {panels + later, words * 4, b, kRowBlocks<D>});
        }
      };
      across(q_rows_, k_across_, s_);
      across(do_rows_, v_across_, dp_);
    }
    const bool is_plain = c_.softcap == 0.0f && sight_.sees_start(g, kv);
    for (int64_t r = 0; r < count; r += D::kPerStep)
      for (int64_t i = 0; i < kKvBlock; i += kColumns * kLanes) {
        int64_t limits[D::kPerStep], begins[D::kPerStep] = {};
        for (int64_t j = 0; j < D::kPerStep; ++j) limits[j] = r + j < count ? sight_.end(g, kv, r + j + 1) - 1 - i : -1;
        if (is_plain) {
          elements<true>(r, i, limits, begins);
        } else {
          for (int64_t j = 0; j < D::kPerStep && r + j < count; ++j) begins[j] = sight_.begin(g, kv, r + j) - i;
          elements<false>(r, i, limits, begins);
        }
      }
  }

  /// P and dS of one step's queries and kColumns vectors of positions. Each query sees positions up to its `limits`.
  /// Unless kIsPlain, scores are capped and each query sees positions from its entry of `begins` on.
  template <bool kIsPlain>
  void elements(int64_t r, int64_t i, const int64_t* limits, const int64_t* begins) {
    constexpr int J = D::kPerStep;
    using V = RegisterBlock<kColumns * J>;
    V p = splat<V>(0.0f), ds = p;
    if (larger(limits[0], limits[J - 1]) >= 0) {
      V slope;
      for (int c = 0; c < kColumns; ++c)
        for (int j = 0; j < J; ++j) {
          const int64_t column = i + c * kLanes, at = (column / kPanel * kKvBlock + r + j) * kPanel + column % kPanel;
          p.at[c * J + j] = load(s_ + at) * set(c_.scale);
          slope.at[c * J + j] = load(dp_ + at) - set(delta_[r + j]);
        }
      if (!kIsPlain && c_.softcap > 0.0f) {
        const V t = tanh(p / splat<V>(c_.softcap));
        p = splat<V>(c_.softcap) * t;
        slope = slope * fused(negate(t), t, splat<V>(1.0f));
      }
      for (int c = 0; c < kColumns; ++c)
        for (int j = 0; j < J; ++j) p.at[c * J + j] = p.at[c * J + j] - set(lse_[r + j]);
      p = decay(p);
      ds = p * slope * splat<V>(c_.scale);
      for (int c = 0; c < kColumns; ++c)
        for (int j = 0; j < J; ++j) {
          p.at[c * J + j] = mask_scores(p.at[c * J + j], limits[j] - c * kLanes, 0.0f);
          ds.at[c * J + j] = mask_scores(ds.at[c * J + j], limits[j] - c * kLanes, 0.0f);
          if constexpr (!kIsPlain) {
            p.at[c * J + j] = mask_before(p.at[c * J + j], begins[j] - c * kLanes, 0.0f);
            ds.at[c * J + j] = mask_before(ds.at[c * J + j], begins[j] - c * kLanes, 0.0f);
          }
        }
    }
    for (int c = 0; c < kColumns; ++c) {
      const int64_t at = r / J * kStepOf<D> + i + c * kLanes;
      store_words<D>(p_steps_ + at, p.at + c * J);
      store_words<D>(ds_steps_ + at, ds.at + c * J);
    }
    for (int c = 0; c < kColumns; c += 2)
      for (int j = 0; j < J; ++j)
        store_row_factors<D>(ds_rows_ + (r + j) * kRowWords<D>, i + c * kLanes, ds.at[c * J + j],
                             ds.at[(c + 1) * J + j]);
  }

  /// dK or dV of a KV block: rows are its positions, contracted with the queries of a query block that see them.
  /// `later`: the sums of the next KV block, to prefetch.
  void accumulate_kv(float* sums, const uint32_t* steps, const uint32_t* along, bool diagonal, int64_t count,
                     const float* later) {
    const int64_t end = divide_up(count, D::kPerStep);
    if constexpr (kTransposes<D>)
      for (int64_t s = 0; s < end; s += kLanes)
        for (int64_t i = 0; i < kKvBlock; i += kLanes)
          transpose_words(transposed_ + i * kRowStride + s, kRowStride,
                          reinterpret_cast<const char*>(steps + s * kKvBlock + i), kKvBlock * 4,
                          smaller(kLanes, end - s), kLanes);
    constexpr int64_t kGroup = kGroupOf<typename D::Dot>;
    for (int64_t panel = 0; panel < shape_.dim_panels; ++panel)
      for (int64_t b = 0; b < kRowBlocks<D>; ++b) {
        const int64_t first = block_start<D>(b), unseen = diagonal ? first / D::kPerStep / kGroup * kGroup : 0;
        if (end <= unseen) continue;
        const uint32_t* words = along + panel * shape_.kv_block_steps * kPanel + unseen * kPanel;
        const Later next = {later + panel * kKvBlock * kPanel, kKvBlock * kPanel * 4, b, kRowBlocks<D>};
        if constexpr (kTransposes<D>) {
          accumulate<ALayout::kRows>(sums, b, panel, transposed_ + first * kRowStride + unseen, words, end - unseen,
                                     next);
        } else {
          accumulate<ALayout::kSteps64>(sums, b, panel, steps + unseen * kStepOf<D> + first, words, end - unseen, next);
        }
      }
  }

  /// dQ of query block g, contracted with the positions of KV block kv that the queries see.
  void accumulate_q(int64_t g, int64_t kv, int64_t count) {
    const int64_t words = shape_.kv_block_steps * kPanel;
    for (int64_t panel = 0; panel < shape_.dim_panels; ++panel)
      for (int64_t b = 0; b < kRowBlocks<D> && block_start<D>(b) < count; ++b) {
        const int64_t steps = divide_up(sight_.end(g, kv, smaller(count, block_start<D>(b + 1))), D::kPerStep);
        const Later next = {k_along_ + next_ * along_words_ + panel * words, words * 4, b, kRowBlocks<D>};
        accumulate<ALayout::kRows>(dq_, b, panel, ds_rows_ + block_start<D>(b) * kRowWords<D>,
                                   k_along_ + kv * along_words_ + panel * words, steps, next);
      }
  }

  /// One panel of sums[panel][64][32] += A B for the rows of block b.
  template <ALayout L>
  void accumulate(float* sums, int64_t b, int64_t panel, const uint32_t* a, const uint32_t* words, int64_t steps,
                  const Later& later) {
    const Segment segment = {0, 0, -1, 0, static_cast<int32_t>(steps), 0, 0, 0};
    const int64_t rows = block_start<D>(b + 1) - block_start<D>(b);
    float* block = sums + (panel * kKvBlock + block_start<D>(b)) * kPanel;
    MicroArgs call = {&segment, 1, a, &words, nullptr, block, nullptr, nullptr, block};
    call.rows = rows;
    later.prefetch(call, steps);
    micro_for<typename D::Dot, L>(rows)(call);
  }

  void write_kv(const TileView& tile, const float* sums, int64_t column) {
    for (int64_t i = 0; i < c_.seq_len; ++i) {
      const float* from = sums + i / kKvBlock * block_floats_ + i % kKvBlock * kPanel;
      if (c_.dkv_is_f32) {
        write_row(row_of<float>(tile, row0_ + i) + column, from, c_.head_dim);
      } else {
        write_row(row_of<T>(tile, row0_ + i) + column, from, c_.head_dim);
      }
    }
  }

  AttentionBackwardKernel<D> c_;
  KvBlockShape<D, kKvBlock> shape_;
  int64_t kv_blocks_, across_words_, along_words_, block_floats_, row0_ = 0;
  int64_t next_ = 0;  // the KV block after the current one
  Sight sight_ = {};
  uint32_t *k_across_, *v_across_, *k_along_, *q_rows_, *do_rows_, *q_along_, *do_along_;
  uint32_t *p_steps_, *ds_steps_, *ds_rows_, *transposed_;
  float *s_, *dp_, *dq_, *stack_;
  float delta_[kKvBlock] = {}, lse_[kKvBlock] = {};
};

// kernel attention_backward  f32=F32 bf16=ProductBF16
//   out dq[m q], dk:dt|f32[m kv], dv:dt|f32[m kv]
//   in dout[m q], out[m q], lse:f32[m _], q[m q], k[m kv], v[m kv], lengths:i32?[_ 1], first:i32?[_ 1]
//   int seq_len, heads, kv_heads, head_dim
//   flag causal, dkv_is_f32=f32(dk)
//   int window
//   float scale, softcap
//   require head_dim > 0 and kv_heads > 0 and heads % kv_heads == 0
//   require q == heads * head_dim and kv == kv_heads * head_dim
//   require seq_len > 0 and m % seq_len == 0 and lse.cols >= heads
//   require lengths.rows == 0 or lengths.rows == m // seq_len
//   require first.rows == 0 or first.rows == m
//   let span = min(window or seq, seq)
//   let pairs = seq * span - span * (span - 1) // 2 if causal else seq ** 2
//   flops m // seq * pairs * heads * (10 * head_dim + 8)
//   bytes 4 * m * head_dim * item * (heads + kv_heads)
//   let kv_blocks = -(-seq_len // 64)
//   let along = head_panels(head_dim) * 64 * 32
//   let block = 64 * head_panels(head_dim) * 32
//   let entries = 2 + bit_length(heads // kv_heads - 1)
//   let packs = 2 * (row_block_words(head_dim, 64) + along + 64 * 144)
//   let words_per_block = 2 * 2 * 32 * head_dim + along + 2 * entries * block
//   scratch 4 * (kv_blocks * words_per_block + packs + 4 * 64 * 64 + block) + (1 << 14)
template <class D>
void AttentionBackwardKernel<D>::run() const {
  if (dq.rows == 0) return;
  [[maybe_unused]] const typename ScopeOf<typename D::Dot>::Type scope;
  Backward<D> backward(*this);
  for (int64_t row = 0; row < dq.rows; row += seq_len)
    for (int64_t head = 0; head < kv_heads; ++head) backward.run(row, head);
}

}  // namespace
}  // namespace tilewise::kernels::TILEWISE_ISA_NS

#include "kernels/declared/attention/backward_entries.h"
