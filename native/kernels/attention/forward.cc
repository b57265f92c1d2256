// Attention over KV blocks of 64 absolute positions: the forward pass, dense and paged, in one core.
//
// A query row visits the KV blocks from position 0 upwards; the other rows in its block do not change its bits. Masked
// scores are -inf, and +0 is added to the output before each KV block and at the end. So masked lanes have no effect,
// whether they are computed or skipped: positions after a row, before its window, or beyond its sequence's length.
#include "kernels/declared/attention/forward.h"

#include "kernels/attention/few_rows.h"
#include "kernels/attention/int8_cache.h"
#include "kernels/attention/kv_blocks.h"
#include "kernels/kernel.h"
#include "kernels/math.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

/// Shapes of one call.
struct Heads {
  int64_t heads, kv_heads, dim;
  bool causal;
  float scale;
  int64_t window = 0;    // maximum number of positions that a causal row sees; 0: all before it
  float softcap = 0.0f;  // scores become softcap tanh(score / softcap); 0: no cap
};

/// Where the rows of a sequence are in a paged cache.
struct Pages {
  const int32_t* blocks;  // nullptr: position p is row p
  int64_t block_size, block_elements;
  int64_t head_stride;

  int64_t head(int64_t position, int64_t head) const {
    return blocks[position / block_size] * block_elements + head * head_stride;
  }
};

/// Some rows of keys or values of a head, `stride` elements apart.
template <class T>
struct HeadRows {
  const T* first;
  int64_t stride;
};

/// KV rows of one sequence: contiguous, or in blocks looked up in a table. Within a block the rows of a head are
/// contiguous.
template <class T>
struct KvRows {
  static constexpr bool kExpands = false;
  const T* k;
  const T* v;
  int64_t k_stride, v_stride;  // between positions
  Pages pages;

  HeadRows<T> keys(int64_t position, int64_t head, int64_t, int64_t, T*) const {
    return {k + place(position, head, k_stride), k_stride};
  }
  HeadRows<T> values(int64_t position, int64_t head, int64_t, int64_t, T*) const {
    return {v + place(position, head, v_stride), v_stride};
  }
  /// The memory of `count` positions whose rows are contiguous.
  Upcoming upcoming(int64_t position, int64_t head, int64_t count, int64_t dim) const {
    return Upcoming::of(k + place(position, head, k_stride), v + place(position, head, v_stride), count * dim);
  }
  /// Prefetches rows: a few lines of each of many, which the hardware prefetcher misses.
  void prefetch(int64_t position, int64_t head, int64_t count, int64_t dim) const {
    const auto *key = k + place(position, head, k_stride), *value = v + place(position, head, v_stride);
    const auto bytes = dim * static_cast<int64_t>(sizeof(T));
    for (int64_t r = 0; r < count; ++r, key += k_stride, value += v_stride) {
      for (int64_t b = 0; b < bytes; b += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(key) + b, 0, 2);
        __builtin_prefetch(reinterpret_cast<const char*>(value) + b, 0, 2);
      }
    }
  }

 private:
  int64_t place(int64_t position, int64_t head, int64_t stride) const {
    if (!pages.blocks) return position * stride + head * pages.head_stride;
    return pages.head(position, head) + position % pages.block_size * stride;
  }
};

/// KV rows of one sequence in a cache of int8, which are expanded before they are used.
template <class T>
struct Int8Rows {
  static constexpr bool kExpands = true;
  const int32_t* k;
  const int32_t* v;
  Pages pages;

  HeadRows<T> keys(int64_t position, int64_t head, int64_t count, int64_t dim, T* scratch) const {
    return expanded(k, position, head, count, dim, scratch);
  }
  HeadRows<T> values(int64_t position, int64_t head, int64_t count, int64_t dim, T* scratch) const {
    return expanded(v, position, head, count, dim, scratch);
  }
  Upcoming upcoming(int64_t position, int64_t head, int64_t count, int64_t dim) const {
    return Upcoming::of(codes(k, position, head, dim), codes(v, position, head, dim), count * dim);
  }
  void prefetch(int64_t position, int64_t head, int64_t count, int64_t dim) const {
    upcoming(position, head, count, dim).prefetch_all();
  }

 private:
  Int8Head<const float, const int8_t> part(const int32_t* cache, int64_t position, int64_t head, int64_t dim) const {
    return {reinterpret_cast<const float*>(cache + pages.head(position, head)), pages.block_size, dim};
  }
  const int8_t* codes(const int32_t* cache, int64_t position, int64_t head, int64_t dim) const {
    return part(cache, position, head, dim).codes + position % pages.block_size * dim;
  }
  HeadRows<T> expanded(const int32_t* cache, int64_t position, int64_t head, int64_t count, int64_t dim,
                       T* scratch) const {
    const int64_t first = position % pages.block_size;
    const auto from = part(cache, position, head, dim);
    expand_int8(from.codes + first * dim, from.scales + first, count, dim, scratch);
    return {scratch, dim};
  }
};

/// A run of queries of one sequence.
struct QueryRun {
  int64_t first_row, count;
  const int32_t* positions;  // per row; nullptr: row i of the run is position i
  int64_t position_stride;
  int64_t length;  // number of positions if not causal
  Tile<const int32_t> first = {};  // per row: the first position that it sees; empty: 0

  int64_t first_position(int64_t i) const { return first.data ? *first.row(first_row + i) : 0; }
  int64_t last_position(int64_t i, bool causal) const {
    if (!causal) return length - 1;
    return positions ? positions[i * position_stride] : i;
  }
};

/// The positions that the rows of a block see.
struct RowSight {
  int64_t window;                           // as in Heads
  int64_t first[kLanes] = {}, last[kLanes] = {};  // visible positions of each row
  int64_t lowest = 0, furthest = 0;         // over all rows; lowest is rounded down to a KV block
  int64_t latest_first = 0, earliest_last = 0;

  /// The first position that a row sees if its last is `end` and its document begins at `begin`.
  int64_t first_of(int64_t begin, int64_t end) const {
    begin = smaller(begin, end);
    return window > 0 ? larger(end - window + 1, begin) : begin;
  }

  template <class FirstOf, class LastOf>
  void look(int64_t rows, const FirstOf& begin_of, const LastOf& last_of) {
    furthest = 0;
    lowest = earliest_last = INT64_MAX;
    latest_first = 0;
    for (int64_t r = 0; r < rows; ++r) {
      last[r] = last_of(r);
      first[r] = first_of(begin_of(r), last[r]);
      furthest = larger(furthest, last[r]);
      lowest = smaller(lowest, first[r]);
      latest_first = larger(latest_first, first[r]);
      earliest_last = smaller(earliest_last, last[r]);
    }
    lowest -= lowest % kKvBlock;
  }
};

template <class D, template <class> class RowsOf = KvRows>
class Forward {
 public:
  using T = typename D::T;
  using Kv = RowsOf<T>;
  static constexpr int64_t kMaxRun = 1024;  // rows of state per pass
  /// Positions packed at a time; their panels stay in L2.
  static constexpr int64_t kSpan = (kMaxRows > 6 ? 16 : 4) * kKvBlock;
  /// KV blocks whose values are summed in one pass over the accumulators; tile registers cannot be scaled.
  static constexpr int64_t kTogether = kGroupOf<typename D::Dot> == 1 ? 2 : 1;

  Forward(const Heads& heads, const Scratch& scratch) : h_(heads), shape_(heads.dim), sight_{heads.window} {
    Carver carver(scratch);
    const int64_t run = larger(kMaxRun, h_.heads / h_.kv_heads);
    num_blocks_ = divide_up(run, kAttentionRows<D>);
    block_floats_ = kAttentionRows<D> * shape_.dim_pad;
    sums_ = carver.take<float>(num_blocks_ * block_floats_);
    top_ = carver.take<float>(num_blocks_ * kLanes);
    total_ = carver.take<float>(num_blocks_ * kLanes);
    q_ = carver.take<uint32_t>(kAttentionRows<D> * kRowWords<D> * shape_.dim_blocks);
    k_words_ = 2 * kPanel * shape_.dim_steps;
    v_words_ = shape_.dim_panels * kPanel * shape_.kv_block_steps;
    k_panels_ = carver.take<uint32_t>(kSpan / kKvBlock * k_words_);
    v_panels_ = carver.take<uint32_t>(kSpan / kKvBlock * v_words_);
    p_ = carver.take<uint32_t>(kAttentionRows<D> * kRowWords<D>);
    scores_ = carver.take<float>(2 * kAttentionRows<D> * kPanel);
    if constexpr (Kv::kExpands)
      for (T*& rows : expanded_) rows = carver.take<T>(kKvBlock * heads.dim);
  }

  /// `following`: memory that is read after this call.
  void run(const Tile<T>& out, const Tile<float>& lse, const Tile<const T>& q, const Kv& kv, const QueryRun& run,
           Upcoming following = {}) {
    if constexpr (kFewQueries<D> > 0)
      if (run.count * h_.heads <= kFewQueries<D> * h_.kv_heads && h_.dim % kPanel == 0 && h_.kv_heads <= num_blocks_) {
        run_few({out, lse, q, run, 0, 0, run.count}, kv, following);
        return;
      }
    following.prefetch_all();
    const int64_t step = larger(int64_t{1}, kMaxRun / (h_.heads / h_.kv_heads));
    for (int64_t first = 0; first < run.count; first += step)
      for (int64_t head = 0; head < h_.kv_heads; ++head)
        run_head({out, lse, q, run, head, first, smaller(step, run.count - first)}, kv);
  }

 private:
  /// The rows of one KV head in one pass: row r is query r / group, head r % group of the group. So neighbouring rows
  /// see nearly the same positions.
  struct Pass {
    const Tile<T>& out;
    const Tile<float>& lse;
    const Tile<const T>& q;
    const QueryRun& run;
    int64_t kv_head, first, count;
  };

  void run_head(const Pass& pass, const Kv& kv) {
    const int64_t group = h_.heads / h_.kv_heads, rows = group * pass.count,
                  blocks = divide_up(rows, kAttentionRows<D>);
    const auto start = [&](int64_t b) { return rows / blocks * b + smaller(b, rows % blocks); };
    int64_t last = 0, lowest = 0;
    for (int64_t i = 0; i < pass.count; ++i) last = larger(last, pass.run.last_position(pass.first + i, h_.causal));
    if (h_.window > 0 || pass.run.first.data) {
      lowest = last;
      for (int64_t i = pass.first; i < pass.first + pass.count; ++i)
        lowest = smaller(lowest, sight_.first_of(pass.run.first_position(i), pass.run.last_position(i, h_.causal)));
      lowest -= lowest % kKvBlock;
    }
    clear_blocks(blocks);
    for (int64_t span = lowest - lowest % kSpan; span <= last; span += kSpan) {
      const int64_t end = smaller(span + kSpan, last + 1);
      for (int64_t kv_block = larger(span, lowest); kv_block < end; kv_block += kKvBlock) {
        const int64_t next = kv_block + kKvBlock;
        // The KV block that is packed next.
        if (next <= last) {
          kv.prefetch(next, pass.kv_head, smaller(kKvBlock, last + 1 - next), h_.dim);
        } else if (pass.kv_head + 1 < h_.kv_heads && kv_block > lowest) {
          kv.prefetch(lowest, pass.kv_head + 1, kKvBlock, h_.dim);
        }
        pack_kv_block(kv, pass.kv_head, kv_block, smaller(kKvBlock, end - kv_block));
      }
      for (int64_t b = 0; b < blocks; ++b) run_block(pass, b, start(b), start(b + 1) - start(b), span, end);
    }
    for (int64_t b = 0; b < blocks; ++b) write(pass, b, start(b), start(b + 1) - start(b));
  }

  /// For few rows. Visits all heads of a KV block before the next block, the order in which they are stored, so that
  /// memory is read in runs; the next head is prefetched. Head h uses the state of block h.
  void run_few(Pass pass, const Kv& kv, const Upcoming& following) {
#if defined(__AVX512BW__)
    const int64_t group = h_.heads / h_.kv_heads, rows = group * pass.count, width = sizeof(T);
    look(pass, 0, rows);
    const int64_t last = sight_.furthest;
    clear_blocks(h_.kv_heads);
    for (int64_t kv_block = sight_.lowest; kv_block <= last; kv_block += kKvBlock) {
      const int64_t count = smaller(kKvBlock, last + 1 - kv_block), next = kv_block + kKvBlock;
      for (pass.kv_head = 0; pass.kv_head < h_.kv_heads; ++pass.kv_head) {
        Upcoming upcoming = following;
        if (pass.kv_head + 1 < h_.kv_heads) {
          upcoming = kv.upcoming(kv_block, pass.kv_head + 1, count, h_.dim);
        } else if (next <= last) {
          upcoming = kv.upcoming(next, 0, smaller(kKvBlock, last + 1 - next), h_.dim);
        }
        pack_queries(pass, 0, rows);
        const HeadRows<T> k = kv.keys(kv_block, pass.kv_head, count, h_.dim, expanded_[0]);
        const HeadRows<T> v = kv.values(kv_block, pass.kv_head, count, h_.dim, expanded_[1]);
        if constexpr (kGroupOf<typename D::Dot> > 1) {
          const int64_t slot = kv_block % kSpan / kKvBlock;
          pack_few(shape_, k_panels_ + slot * k_words_, v_panels_ + slot * v_words_, k.first, k.stride, v.first,
                   v.stride, count, upcoming);
          run_kv_blocks(pass.kv_head, rows, kv_block, count);
        } else {
          Few<D>::kScore[rows - 1](q_, k.first, k.stride, count, shape_.dim_steps, scores_, upcoming.k);
          softmax_kv_block(pass.kv_head, rows, kv_block, count, 0);
          Few<D>::kAdd[rows - 1](p_, v.first, v.stride, count, count, shape_.dim_panels, correction_,
                                 sums_ + pass.kv_head * block_floats_, upcoming.v);
        }
      }
    }
    for (pass.kv_head = 0; pass.kv_head < h_.kv_heads; ++pass.kv_head) write(pass, pass.kv_head, 0, rows);
#else
    (void)pass, (void)kv, (void)following;
#endif
  }

  void clear_blocks(int64_t count) {
    for (int64_t b = 0; b < count; ++b) {
      store(top_ + b * kLanes, set(-kInfinity));
      store(total_ + b * kLanes, set(0.0f));
      for (int64_t c = 0; c < block_floats_; c += kLanes) store(sums_ + b * block_floats_ + c, set(0.0f));
    }
  }

  /// Packs rows [first, first + rows) of a pass.
  void pack_queries(const Pass& pass, int64_t first, int64_t rows) {
    const int64_t group = h_.heads / h_.kv_heads;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t query = pass.first + (first + r) / group, head = pass.kv_head * group + (first + r) % group;
      shape_.pack_row_blocks(q_ + r * kRowWords<D>, pass.q.row(pass.run.first_row + query) + head * h_.dim, h_.dim);
    }
  }

  /// Sets sight_ to the positions that rows [first, first + rows) of a pass see.
  void look(const Pass& pass, int64_t first, int64_t rows) {
    const int64_t group = h_.heads / h_.kv_heads;
    const auto query = [&](int64_t r) { return pass.first + (first + r) / group; };
    sight_.look(
        rows, [&](int64_t r) { return pass.run.first_position(query(r)); },
        [&](int64_t r) { return pass.run.last_position(query(r), h_.causal); });
  }

  /// Packs only positions that some row sees. The scores of the others are masked, and products stop before them.
  void pack_kv_block(const Kv& kv, int64_t kv_head, int64_t kv_block, int64_t count) {
    const int64_t slot = kv_block % kSpan / kKvBlock;
    const HeadRows<T> k = kv.keys(kv_block, kv_head, count, h_.dim, expanded_[0]);
    const HeadRows<T> v = kv.values(kv_block, kv_head, count, h_.dim, expanded_[1]);
    for (int64_t half = 0; half * kPanel < count; ++half)
      pack_panel_across<D, false>(k_panels_ + slot * k_words_ + half * kPanel * shape_.dim_steps,
                                  k.first + half * kPanel * k.stride, k.stride, count - half * kPanel, 0, h_.dim);
    shape_.template pack_along<false>(v_panels_ + slot * v_words_, v.first, v.stride, h_.dim, count);
  }

  /// Runs one block of rows over the packed KV blocks of positions [span, end).
  void run_block(const Pass& pass, int64_t block, int64_t first, int64_t rows, int64_t span, int64_t end) {
    look(pass, first, rows);
    if (sight_.furthest < span || sight_.lowest >= end) return;
    pack_queries(pass, first, rows);
    const int64_t last = smaller(end, sight_.furthest + 1);
    for (int64_t kv_block = larger(span, sight_.lowest); kv_block < last; kv_block += kTogether * kKvBlock)
      run_kv_blocks(block, rows, kv_block, smaller(kTogether * kKvBlock, last - kv_block));
  }

  /// Runs up to kTogether KV blocks from `kv_block` on. `visible`: number of their positions that some row of the block
  /// sees; the others would add nothing.
  void run_kv_blocks(int64_t block, int64_t rows, int64_t kv_block, int64_t visible) {
    Segment segments[kTogether];
    int64_t count = 0;
    for (; count * kKvBlock < visible; ++count) {
      const int64_t first = kv_block + count * kKvBlock, positions = smaller(kKvBlock, visible - count * kKvBlock);
      const int64_t slot = first % kSpan / kKvBlock;
      for (int64_t half = 0; half * kPanel < positions; ++half)
        each_run<D>(rows, [&](int64_t run, int64_t run_rows) {
          shape_.across_dim(run_rows, q_ + run * kRowWords<D>,
                            k_panels_ + slot * k_words_ + half * kPanel * shape_.dim_steps,
                            scores_ + (half * kAttentionRows<D> + run) * kPanel);
        });
      softmax_kv_block(block, rows, first, positions, count);
      segments[count] = {count * shape_.kv_block_steps,
                         count * v_words_,
                         -1,
                         0,
                         static_cast<int32_t>(divide_up(positions, D::kPerStep)),
                         0,
                         0,
                         0};
    }
    const uint32_t* values = v_panels_ + kv_block % kSpan / kKvBlock * v_words_;
    for (int64_t panel = 0; panel < shape_.dim_panels; ++panel, values += kPanel * shape_.kv_block_steps)
      each_run<D>(rows, [&](int64_t run, int64_t run_rows) {
        float* sums = sums_ + block * block_floats_ + (panel * kAttentionRows<D> + run) * kPanel;
        MicroArgs call = {segments, count, p_ + run * kRowWords<D>, &values, nullptr, sums, correction_ + run,
                          nullptr,  sums};
        call.rows = run_rows;
        micro_for<typename D::Dot, ALayout::kScaledRows>(run_rows)(call);
      });
  }

  /// Vector i of a row's scores.
  float* score(int64_t r, int i) { return scores_ + (i / 2 * kAttentionRows<D> + r) * kPanel + i % 2 * kLanes; }

  /// Scales and caps the scores of a block's rows, and sets those before the rows' windows to -inf. Returns 1, the
  /// remaining scale.
  template <int Halves>
  __attribute__((noinline)) float shape(int64_t rows, int64_t kv_block) {
    constexpr int kVectors = 2 * Halves;
    using V = RegisterBlock<kVectors>;
    for (int64_t r = 0; r < rows; ++r) {
      V s;
      for (int i = 0; i < kVectors; ++i) s.at[i] = load(score(r, i)) * set(h_.scale);
      if (h_.softcap > 0.0f) s = splat<V>(h_.softcap) * tanh(s / splat<V>(h_.softcap));
      for (int i = 0; i < kVectors; ++i)
        store(score(r, i), mask_before(s.at[i], sight_.first[r] - kv_block - i * kLanes, -kInfinity));
    }
    return 1.0f;
  }

  /// Turns the scores of a KV block with `visible` visible positions into probabilities. `place` is the block's index
  /// among the kTogether.
  void softmax_kv_block(int64_t block, int64_t rows, int64_t kv_block, int64_t visible, int64_t place) {
    if (visible > kPanel) {
      softmax_panels<2>(block, rows, kv_block, place);
    } else {
      softmax_panels<1>(block, rows, kv_block, place);
    }
  }
  template <int Halves>
  void softmax_panels(int64_t block, int64_t rows, int64_t kv_block, int64_t place) {
    const bool is_plain = h_.softcap == 0.0f && sight_.latest_first <= kv_block && h_.scale > 0.0f;
    const float scale = is_plain ? h_.scale : shape<Halves>(rows, kv_block);
    if (kv_block + Halves * kPanel - 1 > sight_.earliest_last) mask_after_last<Halves>(rows, kv_block);
    exponentiate<Halves>(block, rows, scale, place);
  }

  /// Sets scores of positions after the rows' last to -inf.
  template <int Halves>
  __attribute__((noinline)) void mask_after_last(int64_t rows, int64_t kv_block) {
    for (int64_t r = 0; r < rows; ++r)
      for (int i = 0; i < 2 * Halves; ++i)
        store(score(r, i), mask_scores(load(score(r, i)), sight_.last[r] - kv_block - i * kLanes, -kInfinity));
  }

  /// Turns scores into probabilities in p_, over `Halves` panels of positions; updates maxima and totals.
  template <int Halves>
  void exponentiate(int64_t block, int64_t rows, float scale, int64_t place) {
    constexpr int kVectors = 2 * Halves;
    constexpr int kTogetherVectors = kParts == 1 ? kVectors : 2;  // as the registers of the level allow
    Lanes of_row[kLanes];
    for (int64_t r = 0; r < rows; ++r) {
      of_row[r] = maximum(load(score(r, 0)) * set(scale), load(score(r, 1)) * set(scale));
      if constexpr (Halves == 2)
        of_row[r] = maximum(of_row[r], maximum(load(score(r, 2)) * set(scale), load(score(r, 3)) * set(scale)));
    }
    for (int64_t r = rows; r < kLanes; ++r) of_row[r] = set(0.0f);
    const Lanes before = load(top_ + block * kLanes), top = maximum(before, reduce_rows<MaxOfLanes>(of_row, rows));
    // Rows that have seen no position yet get exp(-inf) = 0 instead of exp(-inf + inf).
    const Lanes shift = select(greater(top, set(-kInfinity)), top, set(0.0f));
    const Lanes correction = decay(before - shift);
    store(shift_, shift);
    for (int64_t r = 0; r < rows; ++r) {
      uint32_t* p = p_ + r * kRowWords<D> + place * shape_.kv_block_steps * kWordsOf<typename D::Dot>;
      Lanes pairs[Halves];
      for (int i = 0; i < kVectors; i += kTogetherVectors) {
        RegisterBlock<kTogetherVectors> e;
        for (int j = 0; j < kTogetherVectors; ++j) e.at[j] = load(score(r, i + j)) * set(scale) - set(shift_[r]);
        e = decay(e);
        for (int j = 0; j < kTogetherVectors; j += 2) {
          pairs[(i + j) / 2] = e.at[j] + e.at[j + 1];
          store_row_factors<D>(p, (i + j) * kLanes, e.at[j], e.at[j + 1]);
        }
      }
      of_row[r] = pairs[0];
      if constexpr (Halves == 2) of_row[r] = of_row[r] + pairs[1];
    }
    store(top_ + block * kLanes, top);
    store(correction_ + place * kLanes, correction);
    float* total = total_ + block * kLanes;
    store(total, fused(load(total), correction, reduce_rows<SumOfLanes>(of_row, rows)));
  }

  void write(const Pass& pass, int64_t block, int64_t first, int64_t rows) {
    const int64_t group = h_.heads / h_.kv_heads;
    const float* total = total_ + block * kLanes;
    float log_sum[kLanes];
    if (pass.lse.data) store(log_sum, load(top_ + block * kLanes) + logarithm(load(total)));
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = pass.run.first_row + pass.first + (first + r) / group;
      const int64_t head = pass.kv_head * group + (first + r) % group;
      T* to = pass.out.row(row) + head * h_.dim;
      for (int64_t c = 0; c < h_.dim; c += kLanes) {
        const float* sums = sums_ + block * block_floats_ + (c / kPanel * kAttentionRows<D> + r) * kPanel + c % kPanel;
        store(to + c, (load(sums) + set(0.0f)) / set(total[r]), h_.dim - c);
      }
      if (pass.lse.data) pass.lse.row(row)[head] = log_sum[r];
    }
  }

  Heads h_;
  KvBlockShape<D> shape_;
  int64_t num_blocks_, block_floats_, k_words_, v_words_;
  float *sums_, *top_, *total_;  // per block: outputs [panel][kAttentionRows<D>][32], maxima [16], sums of exp [16]
  uint32_t *q_, *k_panels_, *v_panels_, *p_;
  float* scores_;
  T* expanded_[2] = {};  // keys and values of one head and KV block, if they are not used in place
  float shift_[kLanes], correction_[kTogether * kLanes];  // the latter a row per KV block
  RowSight sight_;
};

// Scratch memory: the state of a pass in blocks of 12 to 16 rows, the KV blocks that are packed together (16 on the
// levels with most), a block of query rows, one of probabilities (12 rows of two words per step, or 16 of one) and one
// of scores. 16 KB are for pieces that begin at cache lines.
// define state_words(rows, dim) = rows * head_panels(dim) * 32 + 2 * (rows // 12 + 1) * 16
// define span_words(dim) = 16 * (2 * 32 * dim + head_panels(dim) * 32 * 64)
// define forward_words(rows, dim) = state_words(rows, dim) + span_words(dim) + row_block_words(dim, 16)
// define attention_scratch(rows, dim) = 4 * (forward_words(rows, dim) + 24 * 144 + 2 * 16 * 32) + (1 << 14)

// kernel attention  f32=F32 bf16=ProductBF16
//   out out[m q], lse:f32[m _]
//   in q[m q], k[m kv], v[m kv], lengths:i32?[_ 1], first:i32?[_ 1]
//   int seq_len, heads, kv_heads, head_dim
//   flag causal
//   int window
//   float scale, softcap
//   require head_dim > 0 and kv_heads > 0 and heads % kv_heads == 0
//   require q == heads * head_dim and kv == kv_heads * head_dim
//   require seq_len > 0 and m % seq_len == 0 and lse.cols >= heads
//   require lengths.rows == 0 or lengths.rows == m // seq_len
//   require first.rows == 0 or first.rows == m
//   let span = min(window or seq, seq)
//   let pairs = seq * span - span * (span - 1) // 2 if causal else seq ** 2
//   flops m // seq * pairs * heads * (4 * head_dim + 4)
//   bytes 2 * m * head_dim * item * (heads + kv_heads)
//   scratch attention_scratch(max(1024, heads // kv_heads) + 16, head_dim)
template <class D>
void AttentionKernel<D>::run() const {
  using T = typename D::T;
  if (out.rows == 0) return;
  [[maybe_unused]] const typename ScopeOf<typename D::Dot>::Type scope;
  Forward<D> forward({heads, kv_heads, head_dim, causal, scale, window, softcap}, scratch);
  for (int64_t row = 0; row < out.rows; row += seq_len) {
    const KvRows<T> kv = {k.row(row), v.row(row), k.stride, v.stride, {nullptr, 0, 0, head_dim}};
    const int64_t length = lengths.data ? *lengths.row(row / seq_len) : seq_len;
    forward.run(out, lse, q, kv, {row, length, nullptr, 0, length, first});
    clear_rows(out, row + length, row + seq_len, 0, out.cols);
    clear_rows(lse, row + length, row + seq_len, 0, heads);
  }
}

/// The queries of a call over a paged cache. `width`: elements of the cache per position and head; `rows_of` gives a
/// sequence's rows from its pages and the first element of the call's heads.
template <class D, template <class> class RowsOf, class Kernel, class MakeRows>
void run_paged(const Kernel& call, int64_t width, const MakeRows& rows_of) {
  using T = typename D::T;
  if (call.out.rows == 0) return;
  [[maybe_unused]] const typename ScopeOf<typename D::Dot>::Type scope;
  Forward<D, RowsOf> forward({call.heads, call.kv_heads, call.head_dim, true, call.scale, call.window, call.softcap},
                             call.scratch);
  // A task for some of the heads gets their columns of q and the whole caches.
  const int64_t head_elements = call.block_size * width;
  const bool is_share = call.kv_heads * width < call.k_cache.cols;
  const int64_t first_head = is_share ? call.row_begin / (call.heads * call.head_dim) * call.kv_heads : 0;
  const auto rows_of_sequence = [&](int32_t number) {
    return rows_of(
        Pages{call.block_table.row(number), call.block_size, call.block_size * call.k_cache.stride, head_elements},
        first_head * head_elements);
  };
  for (int64_t row = 0; row < call.out.rows;) {
    const int32_t own = *call.sequence.row(row);
    int64_t end = row + 1;
    while (end < call.out.rows && *call.sequence.row(end) == own) ++end;
    const RowsOf<T> kv = rows_of_sequence(own);
    Upcoming following;  // the next sequence's first KV block, which the hardware prefetcher misses
    if (end < call.out.rows) {
      const int64_t last = *call.positions.row(end);
      int64_t kv_block = call.window > 0 ? larger(int64_t{0}, last + 1 - call.window) : 0;
      kv_block -= kv_block % kKvBlock;
      following = rows_of_sequence(*call.sequence.row(end))
                      .upcoming(kv_block, 0, smaller(kKvBlock, last + 1 - kv_block), call.head_dim);
    }
    forward.run(call.out, {}, call.q, kv, {row, end - row, call.positions.row(row), call.positions.stride, 0},
                following);
    row = end;
  }
}

// kernel attention_paged  f32=F32 bf16=ProductBF16
//   out out[m q]
//   in q[m q], k_cache[c kv], v_cache[c kv], positions:i32[m 1], sequence:i32[m 1], block_table:i32[_ _]
//   int block_size, heads, kv_heads, head_dim, window
//   float scale, softcap
//   require head_dim > 0 and kv_heads > 0 and heads % kv_heads == 0
//   require q == heads * head_dim and kv == kv_heads * head_dim
//   require block_size > 0 and c % block_size == 0
//   let visible = min(length, window or length)
//   flops m * visible * heads * (4 * head_dim + 4)
//   bytes 2 * item * m * head_dim * (heads + visible * kv_heads)
//   scratch attention_scratch(max(1024, heads // kv_heads) + 16, head_dim)
template <class D>
void AttentionPagedKernel<D>::run() const {
  using T = typename D::T;
  run_paged<D, KvRows>(*this, head_dim, [this](const Pages& pages, int64_t first) {
    return KvRows<T>{k_cache.elements() + first, v_cache.elements() + first, head_dim, head_dim, pages};
  });
}

// kernel attention_paged_int8  f32=F32 bf16=ProductBF16
//   out out[m q]
//   in q[m q], k_cache:i32[c kv], v_cache:i32[c kv], positions:i32[m 1], sequence:i32[m 1], block_table:i32[_ _]
//   int block_size, heads, kv_heads, head_dim, window
//   float scale, softcap
//   require head_dim > 0 and head_dim % 4 == 0 and kv_heads > 0 and heads % kv_heads == 0
//   require q == heads * head_dim and kv == kv_heads * (head_dim // 4 + 1)
//   require block_size > 0 and c % block_size == 0
//   let visible = min(length, window or length)
//   flops m * visible * heads * (4 * head_dim + 4)
//   bytes 2 * m * (item * head_dim * heads + visible * kv_heads * (head_dim + 4))
//   scratch attention_scratch(max(1024, heads // kv_heads) + 16, head_dim) + 8 * 64 * head_dim + (1 << 10)
/// `attention_paged` with the numbers of a cache of int8 (int8_cache.h).
template <class D>
void AttentionPagedInt8Kernel<D>::run() const {
  using T = typename D::T;
  run_paged<D, Int8Rows>(*this, int8_words(head_dim), [this](const Pages& pages, int64_t first) {
    return Int8Rows<T>{k_cache.elements() + first, v_cache.elements() + first, pages};
  });
}

// kernel kv_write_int8  f32 bf16
//   inout cache:i32[_ c]
//   in x[m d], slots:i32[m 1]
//   int block_size, head_dim
//   require block_size > 0 and cache.rows % block_size == 0 and head_dim > 0 and head_dim % 4 == 0
//   require d % head_dim == 0 and c == d // head_dim * (head_dim // 4 + 1)
//   flops 0
//   bytes m * d * (item + 1)
/// `kv_write` for a cache of int8.
template <class T>
void KvWriteInt8Kernel<T>::run() const {
  for (int64_t r = 0; r < x.rows; ++r) {
    const int64_t slot = *slots.row(r), place = slot % block_size;
    if (slot < 0) continue;
    int32_t* head = cache.row(slot - place);
    for (int64_t c = 0; c < x.cols; c += head_dim, head += block_size * int8_words(head_dim)) {
      const Int8Head<float, int8_t> to(reinterpret_cast<float*>(head), block_size, head_dim);
      store_int8(x.row(r) + c, head_dim, to.codes + place * head_dim, to.scales + place);
    }
  }
}

}  // namespace
}  // namespace tilewise::kernels::TILEWISE_ISA_NS

#include "kernels/declared/attention/forward_entries.h"
