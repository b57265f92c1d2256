// matmul_dw: packed weight gradients over token leaves, the embedding's scatter-add and earlier carries included.
//
// Lanes run along n, so finished blocks are panel rows as they stand. Rows of a block are columns of X. Where sequences
// may end in padding, whose rows of dY are zeros, every sequence begins a step of its own (a step of bf16 takes two
// tokens at once), and + 0 takes the sign of a zero away: then padding leaves no trace.
#include "kernels/product.h"
#include "kernels/registry.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

inline constexpr int64_t kWholeSteps = 512, kWindowSteps = 256;
inline constexpr int64_t kMaxColumns = 2016;  // columns of k per pass
inline constexpr int64_t kScatterBytes = 1 << 20;

template <class D>
struct WeightGradient {
  using T = typename D::T;
  using Dot = typename D::Dot;
  static constexpr ALayout kLayout = ALayout::kSteps16;
  static constexpr bool kPacksPanels = true;
  TileView out, dy, x, ids, de;
  const TileView* carries;
  int64_t num_carries, leaf_rows, num_leaves, first_id;
  int64_t column;  // first column of k in this pass
  int64_t columns;  // columns of a full pass
  float* scatter;  // [panel of the group][leaf][columns][32]
  bool clears_signs;  // + 0 is added at the end
  int64_t rows, lanes;
  int64_t num_terms = 1;
  int64_t max_group;

  int64_t scatter_floats() const { return num_leaves * columns * kPanel; }
  const float* initial(int64_t, int64_t, int64_t, float*) { return nullptr; }
  const float* addend(int64_t row, int64_t panel) {
    return ids.data ? scatter + panel * scatter_floats() + row * kPanel : nullptr;
  }
  /// E of every leaf for the rows of the group's panels, in token order from +0.
  void begin_group(int64_t first, int64_t count) {
    if (!ids.data) return;
    const int64_t floats = count * scatter_floats();
    for (int64_t i = 0; i < floats; i += kLanes) store(scatter + i, set(0.0f));
    const int64_t low = first_id + first * kPanel, high = smaller(low + count * kPanel, first_id + lanes);
    for (int64_t t = 0; t < ids.rows; ++t) {
      const int64_t id = *row_of<const int32_t>(ids, t);
      if (id < low || id >= high) continue;
      const int64_t n = id - low;
      float* to = scatter + n / kPanel * scatter_floats() + t / leaf_rows * columns * kPanel + n % kPanel;
      const T* from = row_of<const T>(de, t) + column;
      for (int64_t r = 0; r < rows; ++r) to[r * kPanel] += widen(from[r]);
    }
  }
  template <class Start>
  void pack_blocks(uint32_t* to, int64_t words, int64_t block, int64_t end, const Start& start, const Copy& c) {
    const TileView pass = {static_cast<T*>(x.data) + column, x.rows, x.cols - column, x.stride};
    pack_columns<D>(to, words, block, end, start, pass, c.begin, c.end);
  }
  /// All panels of a token before the next one: whole runs of dY's long rows, not a line from each.
  void pack_panels(uint32_t* to, int64_t words, int64_t first, int64_t count, const Copy& c) {
    const T* from = static_cast<const T*>(dy.data) + first * kPanel;
    const int64_t columns = lanes - first * kPanel, whole = smaller(count, columns / kPanel);
    const int64_t end = c.end - (c.end - c.begin) % D::kPerStep;
    uint32_t* step = to;
    for (int64_t t = c.begin; t < end; t += D::kPerStep, step += kPanel)
      for (int64_t p = 0; p < whole; ++p) {
        const T* row = from + t * dy.stride + p * kPanel;
        prefetch_step<D, 4>(row, dy.stride);
        whole_step<kPanel>(step + p * words, row, row + (D::kPerStep - 1) * dy.stride);
      }
    for (int64_t p = 0; p < count; ++p) {  // an odd last token, and the panel that ends with padding
      const int64_t begin = p < whole ? end : c.begin;
      pack_panel_along<D, kPanel>(to + p * words + (begin - c.begin) / D::kPerStep * kPanel, from + p * kPanel,
                                  dy.stride, columns - p * kPanel, begin, c.end);
    }
  }
  template <class Start>
  int64_t num_sources(const Copy& c, int64_t, int64_t, const Start&) const {
    return c.end - c.begin;
  }
  template <class Start>
  Run source(const Copy& c, int64_t block, int64_t end, const Start& start, int64_t i) const {
    const T* row = row_of<const T>(x, c.begin + i) + column;
    return {reinterpret_cast<const char*>(row + start(block)),
            static_cast<int64_t>((start(end) - start(block)) * sizeof(T))};
  }
  /// Packed weights lie as blocks do, so blocks are finished in place; but a carry may lie where the result goes.
  float* target(int64_t row, int64_t panel, float* block) const { return num_carries > 0 ? block : place(row, panel); }
  float* place(int64_t row, int64_t panel) const {
    return static_cast<float*>(out.data) + (panel * out.stride + column + row) * kPanel;
  }
  void expect(int64_t row, int64_t count, int64_t panel, Rows (&expected)[2]) const {
    expected[0] = {reinterpret_cast<const char*>(place(row, panel)), count, kPanel * 4, kPanel * 4};
  }
  void finish(int64_t row, int64_t count, int64_t panel, const float* block) {
    float* to = place(row, panel);
    const int64_t offset = to - static_cast<float*>(out.data);
    if (num_carries > 0 || clears_signs)
      for (int64_t i = 0; i < count * kPanel; i += kLanes) {
        Lanes v = load(block + i);
        for (int64_t c = 0; c < num_carries; ++c) v = load(static_cast<const float*>(carries[c].data) + offset + i) + v;
        store(to + i, clears_signs ? v + set(0.0f) : v);
      }
    const int64_t width = lanes - panel * kPanel;
    if (width < kPanel)
      for (int64_t r = 0; r < count; ++r)
        for (int64_t c = width; c < kPanel; ++c) to[r * kPanel + c] = 0.0f;
    if (column + row + count == out.cols && out.stride > out.cols)
      for (int64_t c = 0; c < kPanel; ++c) to[count * kPanel + c] = 0.0f;
  }
};

template <class D>
void matmul_dw(const KernelArgs& args) {
  WeightGradient<D> op = {};
  op.out = args.tiles[0];
  op.dy = args.tiles[1];
  op.x = args.tiles[2];
  op.ids = args.tiles[3];
  op.de = args.tiles[4];
  if (op.out.rows == 0 || op.out.cols == 0) return;
  op.carries = args.tiles + 5;
  op.leaf_rows = args.ints[0];
  op.num_carries = args.ints[1];
  op.first_id = args.ints[2] + args.row_begin;
  op.lanes = op.out.rows;
  const bool contracts = op.dy.data != nullptr;
  const int64_t tokens = contracts ? op.dy.rows : op.ids.data ? op.ids.rows : 0;
  op.num_leaves = divide_up(tokens, op.leaf_rows);
  op.clears_signs = args.ints[3] != 0;
  const int64_t run = args.ints[3] ? args.ints[3] : op.leaf_rows;  // tokens whose steps follow each other

  Carver carver(args.scratch);
  const int64_t steps = contracts ? divide_up(tokens, D::kPerStep) : 0;
  // At once if blocks of whole rows of X fit L2 so; else in windows so short that they do.
  const int64_t most = steps <= kWholeSteps ? kWholeSteps : kWindowSteps;
  Blocking blocking(carver, ALayout::kSteps16, D::kPerStep, most, false, steps,
                    (contracts ? divide_up(tokens, run) : op.num_leaves) + 1);
  const int64_t widest = smaller(op.out.cols, kMaxColumns);
  int64_t columns = widest;
  if (op.ids.data) {
    const int64_t per_column = op.num_leaves * kPanel * 4;
    columns = larger(int64_t{1}, smaller(widest, kScatterBytes / larger(int64_t{1}, per_column)));
  }
  ChunkTree tree;
  for (int64_t leaf = 0; leaf < op.num_leaves; ++leaf) {
    const bool last = leaf + 1 == op.num_leaves;
    const int64_t end = contracts ? smaller((leaf + 1) * op.leaf_rows, tokens) : 0;
    for (int64_t t = leaf * op.leaf_rows; t < end; t += run) blocking.add(0, t, smaller(t + run, end));
    const int pops = tree.add(leaf, leaf + 1) + (last ? tree.finish() : 0);
    blocking.end_chunk(pops, last, op.ids.data ? leaf * columns * kPanel : -1);
  }
  blocking.close();

  op.columns = columns;
  op.max_group = blocking.num_windows > 1 ? 8 : int64_t{1} << 30;
  const int64_t panel_floats = op.num_leaves * columns * kPanel;
  if (op.ids.data) {
    op.max_group = larger(int64_t{1}, smaller(8, kScatterBytes / (panel_floats * 4)));
    op.scatter = carver.take<float>(op.max_group * panel_floats);
  }
  for (op.column = 0; op.column < op.out.cols; op.column += columns) {
    op.rows = smaller(columns, op.out.cols - op.column);
    run_product(op, blocking, carver);
  }
}

constexpr Entry kEntries[] = {{"matmul_dw_f32", matmul_dw<F32>}, {"matmul_dw_bf16", matmul_dw<BF16>}};

}  // namespace

EntryList weight_gradient_entries() { return {kEntries, 2}; }

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
