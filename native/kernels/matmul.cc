// matmul, matmul_dx, gemm, and loops that measure the peak speed.
//
// matmul reads packed weights in place; matmul_dx transposes them per task, or the other operand and the result; both
// make the words of quantised weights first; gemm packs both plain operands.
#include "kernels/declared/matmul.h"

#include "kernels/kernel.h"
#include "kernels/product.h"
#include "kernels/quantised/formats.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

// The window of a forward product with several row blocks: up to kDirectSteps steps one window, otherwise windows of
// kWindowSteps.
inline constexpr int64_t kDirectSteps = kMaxRows > 6 ? 3072 : 1024, kWindowSteps = kMaxRows > 6 ? 1024 : 512;
inline constexpr int64_t kMostDirectSteps = 8192;
inline constexpr int64_t kPanelsAtATime = 4;  // of quantised weights
// Prefetch distance in rows while A is packed; 0 where prefetching is slower.
inline constexpr int64_t kRowsAhead = kMaxRows > 6 ? 0 : 4;

/// Writes finished blocks: cast(block + residual), in dt or fp32. A residual of one row is added to every row.
template <class D>
class Output {
 public:
  using T = typename D::T;
  Output() = default;
  Output(const TileView& to, const Tile<const T>& extra, bool wide) : out(to), residual(extra), out_is_f32(wide) {
    if (residual.rows == 1) residual.stride = 0;
  }

  TileView out;
  Tile<const T> residual;
  bool out_is_f32;

  /// The memory that `write` will touch.
  void expect(int64_t row, int64_t rows, int64_t column, int64_t columns, Rows (&expected)[2]) const {
    const int64_t item = out_is_f32 ? 4 : sizeof(T), width = smaller(columns, out.cols - column);
    const int64_t height = smaller(rows, out.rows - row);
    expected[0] = {static_cast<const char*>(out.data) + (row * out.stride + column) * item, height, out.stride * item,
                   width * item};
    if (!residual.data) return;
    expected[1] = {reinterpret_cast<const char*>(residual.row(row) + column), height,
                   static_cast<int64_t>(residual.stride * sizeof(T)), static_cast<int64_t>(width * sizeof(T))};
  }
  /// The address where the micro-kernel can store a block directly: whole rows of fp32 without residual. nullptr if it
  /// cannot.
  float* place(int64_t row, int64_t panel) const {
    const bool whole = (panel + 1) * kPanel <= out.cols && (out_is_f32 || sizeof(T) == 4);
    return whole && !residual.data ? row_of<float>(out, row) + panel * kPanel : nullptr;
  }
  void write(int64_t row, int64_t rows, int64_t panel, const float* block) const {
    if (out_is_f32) {
      write_as<float>(row, rows, panel, block);
    } else {
      write_as<T>(row, rows, panel, block);
    }
  }
  /// The same for a block of `count` columns whose lanes are rows.
  void write_transposed(int64_t row, int64_t column, int64_t count, const float* block) const {
    for (; count > 0; column += kLanes, count -= kLanes, block += kLanes * kPanel)
      if (out_is_f32) {
        write_transposed_as<float>(row, column, smaller(kLanes, count), block);
      } else {
        write_transposed_as<T>(row, column, smaller(kLanes, count), block);
      }
  }

 private:
  template <class To>
  void write_transposed_as(int64_t row, int64_t column, int64_t count, const float* block) const {
    To* to = row_of<To>(out, row) + column;
    const T* extra = residual.data ? residual.row(row) + column : nullptr;
    Lanes transposed[kLanes];
    for (int64_t half = 0; half < smaller(kPanel, out.rows - row); half += kLanes) {
      transpose_rows(transposed, block + half, kPanel, count);
      const int64_t rows = smaller(kLanes, out.rows - row - half);
#pragma GCC unroll 16
      for (int64_t r = 0; r < kLanes; ++r, to += out.stride) {
        if (r == rows) break;
        Lanes v = transposed[r];
        if (extra) {
          v = v + load(extra, count);
          extra += residual.stride;
        }
        store(to, v, count);
      }
    }
  }
  template <class To>
  void write_as(int64_t row, int64_t rows, int64_t panel, const float* block) const {
    const int64_t column = panel * kPanel, width = smaller(kPanel, out.cols - column);
    To* to = row_of<To>(out, row) + column;
    const T* extra = residual.data ? residual.row(row) + column : nullptr;
    if (width == kPanel) return write_whole(to, extra, rows, block);
    for (int64_t r = 0; r < rows; ++r, block += kPanel, to += out.stride) {
      Lanes v[2] = {load(block), load(block + kLanes)};
      if (extra) {
        v[0] = v[0] + load(extra, width);
        if (width > kLanes) v[1] = v[1] + load(extra + kLanes, width - kLanes);
        extra += residual.stride;
      }
      store(to, v[0], width);
      if (width > kLanes) store(to + kLanes, v[1], width - kLanes);
    }
  }
  template <class To>
  void write_whole(To* to, const T* extra, int64_t rows, const float* block) const {
    for (int64_t r = 0; r < rows; ++r, block += kPanel, to += out.stride) {
      Lanes low = load(block), high = load(block + kLanes);
      if (extra) {
        low = low + load(extra);
        high = high + load(extra + kLanes);
        extra += residual.stride;
      }
      store_pair(to, low, high);
    }
  }
};

/// A product of weights: sums begin with zero and stay in scratch until a block is finished.
template <class D>
struct WeightProduct {
  using T = typename D::T;
  using Dot = typename D::Dot;
  static constexpr ALayout kLayout = ALayout::kRows;
  Output<D> output;
  Tiles<const T, 2> factors, weights;
  int64_t rows, lanes, num_terms;
  int64_t max_group = int64_t{1} << 30;

  void begin_group(int64_t, int64_t) {}
  const float* initial(int64_t, int64_t, int64_t, float*) { return nullptr; }
  const float* addend(int64_t, int64_t) { return nullptr; }
  float* target(int64_t, int64_t, float* block) const { return block; }
  static int64_t pitch() { return kPanel; }
  Tile<const T> factor(int64_t term) const { return factors[term]; }
  Tile<const T> weight(int64_t term) const { return weights[term]; }
};

/// Rows of a block are rows of A and of the result.
template <class D>
struct RowProduct : WeightProduct<D> {
  using T = typename D::T;
  template <class Start>
  void pack_blocks(uint32_t* to, int64_t words, int64_t block, int64_t end, const Start& start, const Copy& c) {
    const Tile<const T> from = this->factor(c.term);
    for (const int64_t after = start(end); block < end; ++block, to += words)
      for (int64_t row = start(block), r = 0; row + r < start(block + 1); ++r) {
        if (kRowsAhead > 0 && row + r + kRowsAhead < after)
          for (int64_t i = c.begin; i < c.end; i += 64 / static_cast<int64_t>(sizeof(T)))
            __builtin_prefetch(from.row(row + r + kRowsAhead) + i);
        pack_row<D>(to + r * kRowStride, from.row(row + r), c.begin, c.end);
      }
  }
  template <class Start>
  int64_t num_sources(const Copy&, int64_t block, int64_t end, const Start& start) const {
    return start(end) - start(block);
  }
  template <class Start>
  Run source(const Copy& c, int64_t block, int64_t, const Start& start, int64_t i) const {
    const T* row = this->factor(c.term).row(start(block) + i);
    return {reinterpret_cast<const char*>(row + c.begin), static_cast<int64_t>((c.end - c.begin) * sizeof(T))};
  }
  void expect(int64_t row, int64_t count, int64_t panel, Rows (&expected)[2]) const {
    this->output.expect(row, count, panel * kPanel, kPanel, expected);
  }
  /// In place if possible. Tile registers (kGroupOf > 1) can store a block only with contiguous rows.
  float* target(int64_t row, int64_t panel, float* block) const {
    float* const place = kGroupOf<typename D::Dot> == 1 ? this->output.place(row, panel) : nullptr;
    return place ? place : block;
  }
  int64_t pitch() const { return this->output.out.stride; }
  void finish(int64_t row, int64_t count, int64_t panel, const float* block) {
    if (block != this->output.place(row, panel)) this->output.write(row, count, panel, block);
  }
};

template <class D>
struct Forward : RowProduct<D> {
  static constexpr bool kPacksPanels = false;
  /// A single row block reads each panel once. Several row blocks read it again, so then a window must fit L2.
  static int64_t most_steps(int64_t rows, int64_t steps) {
    return rows > kRowsOf<typename D::Dot> && steps > kDirectSteps ? kWindowSteps : kMostDirectSteps;
  }
  const uint32_t* panel_base(int64_t term, int64_t panel) const {
    const auto w = this->weight(term);
    return reinterpret_cast<const uint32_t*>(w.row(panel * kPanel));
  }
};

template <class Dot>
int64_t most_packed_steps(int64_t steps) {
  return steps <= kUndividedSteps<Dot> ? kUndividedSteps<Dot> : kPackedSteps<Dot>;
}

/// Transposes panels of W: lanes are its columns.
template <class D>
struct InputGradient : RowProduct<D> {
  static constexpr bool kPacksPanels = true;
  static int64_t most_steps(int64_t, int64_t steps) { return most_packed_steps<typename D::Dot>(steps); }
  void pack_panels(uint32_t* to, int64_t words, int64_t first, int64_t count, const Copy& c) {
    const auto w = this->weight(c.term);
    for (int64_t p = 0; p < count; ++p)
      transpose_panels<kPanel>(to + p * words, w.elements(), w.stride, (first + p) * kPanel, c.begin, c.end);
  }
};

/// The same product for large W: rows of a block are columns of W, which its panels already have in this order, and
/// lanes are rows of dY. Only dY and the result are transposed.
template <class D>
struct TransposedInputGradient : WeightProduct<D> {
  using T = typename D::T;
  static constexpr bool kPacksPanels = true;
  static int64_t most_steps(int64_t, int64_t steps) { return most_packed_steps<typename D::Dot>(steps); }

  template <class Start>
  void pack_blocks(uint32_t* to, int64_t words, int64_t block, int64_t end, const Start& start, const Copy& c) {
    const auto w = this->weight(c.term);
    for (int64_t n = c.begin; n < c.end;) {  // one panel of W for all blocks before the next panel: long runs of memory
      const int64_t next = smaller(c.end, n - n % kPanel + kPanel);
      uint32_t* step = to + (n - c.begin) / D::kPerStep;
      for (int64_t b = block; b < end; ++b, step += words)
        pack_weight_columns(step, w.elements(), w.stride, start(b), start(b + 1) - start(b), n, next);
      n = next;
    }
  }
  template <class Start>
  int64_t num_sources(const Copy& c, int64_t, int64_t, const Start&) const {
    return divide_up(c.end, kPanel) - c.begin / kPanel;
  }
  template <class Start>
  Run source(const Copy& c, int64_t block, int64_t end, const Start& start, int64_t i) const {
    const auto w = this->weight(c.term);
    const T* panel = w.row((c.begin / kPanel + i) * kPanel);
    return {reinterpret_cast<const char*>(panel + start(block) * kPanel),
            static_cast<int64_t>((start(end) - start(block)) * kPanel * sizeof(T))};
  }
  void pack_panels(uint32_t* to, int64_t words, int64_t first, int64_t count, const Copy& c) {
    const Tile<const T> dy = this->factor(c.term);
    for (int64_t p = 0; p < count; ++p) {
      const int64_t row = (first + p) * kPanel;
      pack_panel_across<D>(to + p * words, dy.row(row), dy.stride, smaller(kPanel, this->lanes - row), c.begin, c.end);
    }
  }
  void expect(int64_t column, int64_t count, int64_t panel, Rows (&expected)[2]) const {
    this->output.expect(panel * kPanel, kPanel, column, count, expected);
  }
  void finish(int64_t column, int64_t count, int64_t panel, const float* block) {
    this->output.write_transposed(panel * kPanel, column, count, block);
  }
};

/// What products of quantised weights have in common.
template <class D>
struct QuantisedBlocks : RowProduct<D> {
  Tiles<const int32_t, 2> blocks;

  const uint8_t* panel(int64_t term, int64_t number) const {
    return reinterpret_cast<const uint8_t*>(blocks[term].row(number * kPanel));
  }
};

/// The same of forward products.
template <class D>
struct QuantisedProduct : QuantisedBlocks<D> {
  const QuantisedFormat* format;

  using Element = D;

  void prepare(const MatmulQuantisedKernel& call) {
    format = &kFormats[call.format];
    this->blocks = call.w;
  }
};

/// What grouped products (quantised/grouped.h) have in common.
template <class Base>
struct GroupedProduct : Base {
  static constexpr StepLayout layout() {
    StepLayout layout = StepLayout::of<typename Base::Element>(Base::kLayout);
    layout.group = kGroupSteps;
    layout.panel_step = panel_step_of<Base>();
    layout.keeps_groups = true;
    return layout;
  }
  /// Copies are never longer than the 128 steps after which a packed row has sums.
  template <class Start>
  void pack_blocks(uint32_t* to, int64_t words, int64_t block, int64_t end, const Start& start, const Copy& c) {
    Base::pack_blocks(to, words, block, end, start, c);
    if (!this->format->grouped.has_minimum) return;
    const int64_t first = c.a % kRowStride, last = first + divide_up(c.end - c.begin, 2);
    for (; block < end; ++block, to += words)
      for (int64_t r = 0; r < start(block + 1) - start(block); ++r) {
        uint32_t* row = to - first + r * kRowStride;
        for (int64_t group = first - first % kGroupSteps; group < last; group += kGroupSteps)
          row[word_of_group(group)] = bits_of<uint32_t>(sum_of_group(row + group, first - group, last - group));
      }
  }
};

/// Words of a few panels at a time are made in L2, for many row blocks.
template <class D>
struct QuantisedForward : QuantisedProduct<D> {
  static constexpr bool kPacksPanels = true;
  QuantisedForward() { this->max_group = kPanelsAtATime; }
  static int64_t most_steps(int64_t, int64_t) { return kWindowSteps; }
  void pack_panels(uint32_t* to, int64_t words, int64_t first, int64_t count, const Copy& c) {
    for (int64_t p = 0; p < count; ++p)
      this->format->expand(this->panel(c.term, first + p), this->format->block, c.begin, c.end, to + p * words);
  }
};

/// Rows that fit registers next to the words of a panel.
struct DotInRegisters : DotBf16 {};
struct BF16InRegisters {
  using T = bf16;
  using Dot = DotInRegisters;
  static constexpr int kPerStep = 2;
};

}  // namespace

template <>
inline constexpr int kRowsOf<DotInRegisters> = kGroupedRows > 0 ? kGroupedRows : 1;

namespace {

/// For one row block: panels are read once, block by block, so words need not stay in L2.
template <class D>
struct QuantisedOnce : QuantisedProduct<D> {
  static constexpr bool kPacksPanels = false;
  static int64_t most_steps(int64_t, int64_t) { return kMostDirectSteps; }
  const uint32_t* panel_base(int64_t term, int64_t number) const {
    return reinterpret_cast<const uint32_t*>(this->panel(term, number));
  }
};

/// The input gradient: words of a few panels of the result's columns, transposed as those of plain weights are.
template <class D>
struct QuantisedInputGradient : QuantisedBlocks<D> {
  using T = typename D::T;
  static constexpr bool kPacksPanels = true;
  const int64_t* formats;  // of the terms

  QuantisedInputGradient() { this->max_group = kPanelsAtATime; }
  void prepare(const MatmulDxQuantisedKernel& call) {
    formats = &call.format[0];
    this->blocks = call.w;
  }
  static int64_t most_steps(int64_t, int64_t steps) { return most_packed_steps<typename D::Dot>(steps); }
  void pack_panels(uint32_t* to, int64_t words, int64_t first, int64_t count, const Copy& c) {
    alignas(64) uint32_t expanded[kPanelsAtATime * kPanel / 2 * kPanel];
    const QuantisedFormat& format = kFormats[formats[c.term]];
    const int64_t column = first * kPanel, columns = smaller(this->lanes - column, count * kPanel);
    for (int64_t n = c.begin; n < c.end;) {
      const int64_t row = n % kPanel, next = smaller(c.end, n - row + kPanel);
      format.expand(this->panel(c.term, n / kPanel), format.block, column, column + columns, expanded);
      for (int64_t p = 0; p < count; ++p)
        transpose_panels<kPanel>(to + p * words + (n - c.begin) / 2 * kPanel, reinterpret_cast<const T*>(expanded),
                                 columns, p * kPanel, row, row + next - n);
      n = next;
    }
  }
};

/// For few rows: words stay in registers.
template <class D>
struct QuantisedRows : QuantisedOnce<D> {
  void multiply(int64_t rows, const MicroArgs& call) const { this->format->few[rows - 1](call, this->format->block); }
};

/// For one row block: words stay in L1.
template <class D>
struct QuantisedBlock : QuantisedOnce<D> {
  using Dot = typename D::Dot;

  void multiply(int64_t rows, const MicroArgs& call) const {
    alignas(64) uint32_t words[kBlockSteps * kPanel];
    alignas(64) float sums[kRowsOf<Dot> * kPanel];
    MicroArgs part = call;
    if (call.num_segments == 0) return micro_for<Dot, ALayout::kRows>(rows)(call);
    part.num_segments = 1;
    part.every_ahead = part.every_piece = INT32_MAX;  // expanding prefetches the panel
    part.pieces = nullptr;
    for (const Segment* s = call.segments; s != call.segments + call.num_segments; ++s) {
      const bool is_last = s + 1 == call.segments + call.num_segments;
      const int64_t begin = s->b / kPanel * D::kPerStep;
      this->format->expand(reinterpret_cast<const uint8_t*>(call.b[s->term]), this->format->block, begin,
                           begin + s->steps * D::kPerStep, words);
      Segment moved = *s;
      moved.b = 0;
      moved.term = 0;
      const uint32_t* const base = words;
      part.segments = &moved;
      part.b = &base;
      part.out = is_last ? call.out : s->ends ? nullptr : sums;
      part.out_pitch = is_last ? call.out_pitch : kPanel;
      for (int i = 0; i < 2; ++i) part.expected[i] = is_last ? call.expected[i] : Rows{};
      micro_for<Dot, ALayout::kRows>(rows)(part);
      part.init = s->ends ? nullptr : sums;
      part.stack += (s->push - s->pops) * rows * kPanel;
    }
  }
};

/// Codes of a few panels at a time, and their scales, are in L2.
template <class D>
struct GroupedPanels : QuantisedProduct<D> {
  using Dot = typename D::Dot;
  static constexpr bool kPacksPanels = true;
  static constexpr int64_t kPanelStep = kGroupedStep;
  GroupedPanels() { this->max_group = 2 * kPanelsAtATime; }
  static int64_t most_steps(int64_t, int64_t) { return kWindowSteps / 2; }

  void pack_panels(uint32_t* to, int64_t words, int64_t first, int64_t count, const Copy& c) {
    to -= c.begin / 2 % kGroupSteps * kPanelStep;
    for (int64_t p = 0; p < count; ++p)
      this->format->grouped.expand_codes(this->panel(c.term, first + p), this->format->block, c.begin, c.end,
                                         to + p * words);
  }

  void multiply(int64_t rows, const MicroArgs& call) const {
    const MicroFn micro = micro_for<Dot, ALayout::kRows>(rows);
    if (call.num_segments == 0) return micro(call);
    const auto& grouped = this->format->grouped;
    const AddGroups add_groups = find_add_groups(grouped.has_minimum, grouped.is_zero_point, rows);
    alignas(64) float totals[kRowsOf<Dot> * kPanel];
    restart(totals, call.init, rows);
    MicroArgs fold = call;
    fold.init = totals;
    fold.num_segments = 1;
    fold.every_ahead = fold.every_piece = INT32_MAX;
    for (const Segment* s = call.segments; s != call.segments + call.num_segments; ++s) {
      const bool is_last = s + 1 == call.segments + call.num_segments;
      add_groups({call.a, s->a, call.b[s->term], s->b / kPanelStep, s->steps, totals});
      if (!s->ends && !is_last) continue;
      Segment end = *s;
      end.steps = 0;
      fold.segments = &end;
      fold.out = is_last ? call.out : nullptr;
      for (int i = 0; i < 2; ++i) fold.expected[i] = is_last ? call.expected[i] : Rows{};
      micro(fold);
      fold.stack += (s->push - s->pops) * rows * kPanel;
      restart(totals, nullptr, rows);
    }
  }

 private:
  static void restart(float* totals, const float* from, int64_t rows) {
    for (int64_t i = 0; i < rows * kPanel; i += kLanes) store(totals + i, from ? load(from + i) : set(0.0f));
  }
};
template <class D>
struct GroupedForward : GroupedProduct<GroupedPanels<D>> {};

/// For few rows: codes stay in registers.
template <class D>
struct GroupedRows : GroupedProduct<QuantisedOnce<D>> {
  void multiply(int64_t rows, const MicroArgs& call) const {
    this->format->grouped.few[rows - 1](call, this->format->block);
  }
};

template <template <class> class Op, class D, class Kernel>
void run_weight_product(const Kernel& call, bool transposed = false) {
  const int64_t num_terms = call.num_terms, num_k_splits = call.num_k_splits;
  const Span<int64_t> ranges = call.range;
  const TileView& out = call.out;
  if (out.rows == 0 || out.cols == 0) return;
  Op<D> op;
  op.output = {out, call.residual, call.out_is_f32};
  op.factors = call.a;
  if constexpr (requires { op.prepare(call); }) {
    op.prepare(call);
  } else {
    op.weights = call.w;
  }
  op.rows = transposed ? out.cols : out.rows;
  op.lanes = transposed ? out.rows : out.cols;
  op.num_terms = num_terms;
  const auto range = [&](int64_t k_split, int64_t term) {
    const int64_t* r = &ranges[2 * (k_split * num_terms + term)];
    return Copy{r[0], r[1], 0, 0, 0};
  };
  int64_t total = 0;
  for (int64_t i = 0; i < num_k_splits * num_terms; ++i)
    total += divide_up(larger(int64_t{0}, ranges[2 * i + 1] - ranges[2 * i]), D::kPerStep);
  Carver carver(call.scratch);
  StepLayout layout = StepLayout::of<D>(Op<D>::kLayout);
  if constexpr (requires { Op<D>::layout(); }) layout = Op<D>::layout();
  Blocking blocking(carver, layout, Op<D>::most_steps(op.rows, total), !Op<D>::kPacksPanels, total,
                    num_k_splits * num_terms);
  add_splits(blocking, num_k_splits, num_terms, range);
  run_product(op, blocking, carver);
}

// kernel matmul  f32=F32 bf16=ProductBF16
//   out out:dt|f32[m n]
//   in residual?[_ n], a...[m k*], w!...[n k*]
//   int out_is_f32=f32(out), num_terms=count(a), num_k_splits, range...(2*num_k_splits*num_terms)
//   require residual.rows == 0 or residual.rows >= m
//   within range a even
//   flops 2 * m * n * k
//   bytes item * (m * (n + k) + n * k)
//   let steps = sum(max(0, end - begin) for begin, end in zip(range[::2], range[1::2]))
//   scratch product_scratch(steps, len(range) // 2)
template <class D>
void MatmulKernel<D>::run() const {
  run_weight_product<Forward, D>(*this);
}

template <class D>
void run_in_registers(const MatmulQuantisedKernel& call) {
  if constexpr (kRegisterRows > 0) run_weight_product<QuantisedRows, D>(call);
}

template <class InRegisters>
void run_grouped(const MatmulQuantisedKernel& call) {
  if constexpr (kGroupedRows > 0)
    if (call.out.rows <= kGroupedRows) return run_weight_product<GroupedRows, InRegisters>(call);
  run_weight_product<GroupedForward, BF16>(call);
}

// kernel matmul_quantised  bf16
//   out out:dt|f32[m n]
//   in residual?[_ n], a...[m k*], w:i32!...[n _]
//   int format
//   flag is_grouped
//   int out_is_f32=f32(out), num_terms=count(a), num_k_splits, range...(2*num_k_splits*num_terms)
//   require residual.rows == 0 or residual.rows >= m
//   within range a even
//   internal its weights are in blocks, which only loading makes
//   flops 2 * m * n * k
//   bytes 2 * m * (n + k) + 4 * n * k / 8
//   let steps = sum(max(0, end - begin) for begin, end in zip(range[::2], range[1::2]))
//   scratch product_scratch(steps, len(range) // 2)
/// `matmul` with the numbers that the blocks mean, rounded to bf16; `is_grouped`: with a grouped product, for formats
/// of 4 bits (docs/numerics.md, rule 12). `format` is the number of the weights' format.
void MatmulQuantisedKernel::run() const {
  if (is_grouped && kFormats[format].grouped.expand_codes) {
    run_grouped<BF16InRegisters>(*this);
  } else if (out.rows <= kRegisterRows) {
    run_in_registers<BF16InRegisters>(*this);
  } else if (out.rows <= kRowsOf<ProductBF16::Dot>) {
    run_weight_product<QuantisedBlock, ProductBF16>(*this);
  } else {
    run_weight_product<QuantisedForward, ProductBF16>(*this);
  }
}

// kernel matmul_dx  f32=F32 bf16=ProductBF16
//   out out:dt|f32[m n]
//   in residual?[_ n], a...[m k*], w!...[k* n]
//   int out_is_f32=f32(out), num_terms=count(a), num_k_splits, range...(2*num_k_splits*num_terms)
//   require residual.rows == 0 or residual.rows >= m
//   within range a even
//   flops 2 * m * n * k
//   bytes item * (m * (n + k) + n * k)
//   let steps = sum(max(0, end - begin) for begin, end in zip(range[::2], range[1::2]))
//   scratch product_scratch(steps, len(range) // 2)
template <class D>
void MatmulDxKernel<D>::run() const {
  const int64_t rows = out.rows, columns = out.cols;
  int64_t contracted = 0;
  for (int64_t term = 0; term < num_terms; ++term) contracted += w[term].rows;
  // Transpose either the weights, or dY and the result (fp32): whichever is fewer words.
  if (contracted * columns < rows * (contracted + columns * D::kPerStep)) {
    run_weight_product<InputGradient, D>(*this);
  } else {
    run_weight_product<TransposedInputGradient, D>(*this, true);
  }
}

// kernel matmul_dx_quantised  bf16
//   out out:dt|f32[m n]
//   in residual?[_ n], a...[m k*], w:i32!...[k* _]
//   int out_is_f32=f32(out), num_terms=count(a), num_k_splits, format...(num_terms)
//   int range...(2*num_k_splits*num_terms)
//   require residual.rows == 0 or residual.rows >= m
//   internal its weights are in blocks, which only loading makes
//   flops 2 * m * n * k
//   bytes 2 * m * (n + k) + 4 * n * k / 8
//   let steps = sum(max(0, end - begin) for begin, end in zip(range[::2], range[1::2]))
//   scratch product_scratch(steps, len(range) // 2)
/// `matmul_dx` with the numbers that the blocks mean, rounded to bf16. The weights may have different formats.
void MatmulDxQuantisedKernel::run() const { run_weight_product<QuantisedInputGradient, ProductBF16>(*this); }

template <class D, ALayout L>
struct Gemm {
  using T = typename D::T;
  using Dot = typename D::Dot;
  static constexpr ALayout kLayout = L;
  static constexpr bool kPacksPanels = true;
  Output<D> output;
  Tile<const T> a, b;
  bool trans_b, accumulate;
  int64_t rows, lanes;
  int64_t num_terms = 1;
  int64_t max_group = int64_t{1} << 30;

  void begin_group(int64_t, int64_t) {}
  const float* addend(int64_t, int64_t) { return nullptr; }
  float* target(int64_t, int64_t, float* block) const { return block; }
  static int64_t pitch() { return kPanel; }
  const float* initial(int64_t row, int64_t count, int64_t panel, float* block) {
    if (!accumulate) return nullptr;
    const int64_t column = panel * kPanel, width = smaller(kPanel, lanes - column);
    for (int64_t r = 0; r < count; ++r)
      for (int64_t c = 0; c < kPanel; ++c)
        block[r * kPanel + c] = c < width ? row_of<const float>(output.out, row + r)[column + c] : 0.0f;
    return block;
  }
  template <class Start>
  void pack_blocks(uint32_t* to, int64_t words, int64_t block, int64_t end, const Start& start, const Copy& c) {
    if constexpr (L == ALayout::kSteps) {
      pack_columns<D>(to, words, block, end, start, a, c.begin, c.end);
    } else {
      for (; block < end; ++block, to += words)
        for (int64_t row = start(block), r = 0; row + r < start(block + 1); ++r)
          pack_row<D>(to + r * kRowStride, a.row(row + r), c.begin, c.end);
    }
  }
  template <class Start>
  int64_t num_sources(const Copy&, int64_t, int64_t, const Start&) const {
    return 0;
  }
  template <class Start>
  Run source(const Copy&, int64_t, int64_t, const Start&, int64_t) const {
    return {};
  }
  void pack_panels(uint32_t* to, int64_t words, int64_t first, int64_t count, const Copy& c) {
    for (int64_t p = 0; p < count; ++p) pack_panel(to + p * words, first + p, c);
  }
  void pack_panel(uint32_t* to, int64_t panel, const Copy& c) {
    const int64_t column = panel * kPanel, width = smaller(kPanel, lanes - column);
    if (trans_b) {
      pack_panel_across<D>(to, b.row(column), b.stride, width, c.begin, c.end);
    } else {
      pack_panel_along<D, kPanel>(to, b.elements() + column, b.stride, width, c.begin, c.end);
    }
  }
  void expect(int64_t row, int64_t count, int64_t panel, Rows (&expected)[2]) const {
    output.expect(row, count, panel * kPanel, kPanel, expected);
  }
  void finish(int64_t row, int64_t count, int64_t panel, const float* block) { output.write(row, count, panel, block); }
};

/// out = op(a) op(b), or out + op(a) op(b).
template <ALayout L, class D>
void run_gemm(const TileView& out, const TileView& a, const TileView& b, bool trans_b, bool accumulate, bool out_is_f32,
              const Scratch& scratch) {
  const int64_t k = L == ALayout::kSteps ? a.rows : a.cols;
  Gemm<D, L> op;
  op.output = {out, {}, out_is_f32};
  op.a = Tile<const typename D::T>(a);
  op.b = Tile<const typename D::T>(b);
  op.trans_b = trans_b;
  op.accumulate = accumulate;
  op.rows = out.rows;
  op.lanes = out.cols;
  Carver carver(scratch);
  Blocking blocking(carver, StepLayout::of<D>(L), L == ALayout::kRows ? 512 : 256, false, divide_up(k, D::kPerStep), 1);
  add_splits(blocking, 1, 1, [k](int64_t, int64_t) { return Copy{0, k, 0, 0, 0}; });
  run_product(op, blocking, carver);
}

// kernel gemm  f32=F32 bf16=BF16
//   inout out:dt|f32[m n]
//   in a, b
//   flag trans_a, trans_b, out_is_f32=f32(out), accumulate
//   require out_is_f32 or not accumulate
//   require (a.cols if trans_a else a.rows) == m and (b.rows if trans_b else b.cols) == n
//   require (a.rows if trans_a else a.cols) == (b.cols if trans_b else b.rows)
//   flops 2 * m * n * k
//   bytes item * (m * (n + k) + n * k)
//   scratch product_scratch(max(a.rows, a.cols, b.rows, b.cols), 1)
template <class D>
void GemmKernel<D>::run() const {
  if (out.rows == 0 || out.cols == 0) return;
  const auto run = trans_a ? run_gemm<ALayout::kSteps, D> : run_gemm<ALayout::kRows, D>;
  run(out, a, b, trans_b, accumulate, out_is_f32, scratch);
}

// kernel batched_gemm  f32=F32 bf16=BF16
//   out out[m n]
//   in a[_ _], b[_ _]
//   int rows, depth
//   flag trans_a, trans_b
//   require rows > 0 and depth > 0 and m % rows == 0
//   require a.cols == (rows if trans_a else depth) and b.cols == (depth if trans_b else n)
//   require a.rows * rows == m * (depth if trans_a else rows)
//   require b.rows * rows == m * (n if trans_b else depth)
//   flops 2 * m * n * depth
//   bytes item * (2 * m * depth + m * n)
//   scratch product_scratch(max(a.rows, a.cols, b.rows, b.cols), 1)
/// Products of corresponding matrices of a and b, which lie one after another. `out` has matrices of `rows` rows;
/// `depth` is the contracted size.
template <class D>
void BatchedGemmKernel<D>::run() const {
  if (out.rows == 0 || out.cols == 0) return;
  const auto multiply = trans_a ? run_gemm<ALayout::kSteps, D> : run_gemm<ALayout::kRows, D>;
  const int64_t a_rows = trans_a ? depth : rows, b_rows = trans_b ? out.cols : depth;
  for (int64_t i = 0; i < out.rows / rows; ++i) {
    const TileView to{out.row(i * rows), rows, out.cols, out.stride};
    const TileView left{const_cast<typename D::T*>(a.row(i * a_rows)), a_rows, a.cols, a.stride};
    const TileView right{const_cast<typename D::T*>(b.row(i * b_rows)), b_rows, b.cols, b.stride};
    multiply(to, left, right, trans_b, false, sizeof(typename D::T) == 4, scratch);
  }
}

// kernel peak  f32=F32 bf16=ProductBF16
//   out ops_per_step:f32
//   int steps
//   internal it measures the processor and needs no tile
//   flops 0
//   bytes 0
/// Measures peak speed: runs steps, or groups of steps, on accumulators that stay in registers. The output becomes the
/// number of operations of one step.
template <class D>
void PeakKernel<D>::run() const {
  constexpr int kRows = kMaxRows >= 12 ? 12 : 5;
  volatile float zero = 0.0f;  // volatile, so that the compiler cannot merge accumulators
  NativeF acc[kRows][2];
  for (auto& row : acc)
    for (NativeF& x : row) x = native_set(zero);
  const NativeF b[2] = {native_set(zero), native_set(zero)};
  const auto a = bits_of<uint32_t>(static_cast<float>(zero));
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 14
    for (int r = 0; r < kRows; ++r) D::Dot::step(acc[r], a, b);
  }
  float sum = 0.0f;
  for (auto& row : acc) sum += row[0][0] + row[1][0];
  ops_per_step.elements()[0] = sum + 2.0f * D::kPerStep * kRows * 2 * kNativeLanes;
}

#if defined(__AMX_BF16__)
/// Operands have varied bits and signs, because processors multiply zeros faster.
template <>
void PeakKernel<BF16Amx>::run() const {
  const AmxScope scope;
  alignas(64) uint32_t pairs[kRowsOf<DotAmx> * kAmxSteps];
  uint32_t bits_left = 1;
  for (uint32_t& pair : pairs) {
    bits_left = bits_left * 1664525 + 1013904223;
    pair = 0x3f803f80 | (bits_left & 0x807f807f);  // each in [1, 2) or (-2, -1]
  }
  AmxBlock<true>::clear();
  for (int64_t i = 0; i < steps; ++i) AmxBlock<true>::multiply(pairs, kAmxSteps, pairs);
  ops_per_step.elements()[0] = 2.0f * 2 * kAmxSteps * kRowsOf<DotAmx> * kPanel;
}
#endif

}  // namespace
}  // namespace tilewise::kernels::TILEWISE_ISA_NS

#include "kernels/declared/matmul_entries.h"
