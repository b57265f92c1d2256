// The driver of every contraction: cuts it into segments and windows (Blocking), packs, and runs register blocks.
//
// A product supplies packing, panel addresses and what to do with a finished block; see Matmul in matmul.cc. A window
// is the stretch of the contraction that is packed at a time; between windows a block's accumulators and stack wait in
// scratch unrounded, so windows change no bit.
#pragma once
#include "kernels/pack.h"
#include "kernels/tree.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

inline constexpr int64_t kPanelGroupBytes = 384 << 10;  // panels packed together, and row blocks packed together:
inline constexpr int64_t kRowBatchBytes = 384 << 10;    // both stay in a 1 MiB L2, one panel of them in L1
inline constexpr int64_t kStateBytes = 3 << 20;
inline constexpr int64_t kSuperRows = 2016;  // rows that share one pass over the panels

/// Elements [begin, end) of one term, packed at word `a` of a row block and word `b` of a panel.
struct Copy {
  int64_t begin, end, a, b;
  int32_t term;
};

struct Window {
  int64_t first_segment, num_segments, first_copy, num_copies;
  int64_t steps;
  int depth;     // entries on the stack when it starts
  bool resumes;  // starts within a chunk: accumulators come from the state
};

/// Segments, copies and windows of one contraction, in scratch.
class Blocking {
 public:
  Blocking(Carver& carver, ALayout layout, int per_step, int64_t window_steps, bool direct, int64_t total_steps,
           int64_t num_ranges)
      : layout_(layout), per_step_(per_step), window_steps_(window_steps), direct_(direct) {
    const int64_t cuts = total_steps / smaller(kBlockSteps, window_steps) + 1;
    segments = carver.take<Segment>(2 * cuts + 4 * num_ranges + 8);
    copies = carver.take<Copy>(2 * cuts + 4 * num_ranges + 8);
    windows = carver.take<Window>(total_steps / window_steps + num_ranges + 2);
    open_window(false);
  }

  /// Elements [begin, end) of a term, continuing the current chunk.
  void add(int32_t term, int64_t begin, int64_t end) {
    while (begin < end) {
      if (position_ == window_steps_) open_window(true);
      int64_t steps = smaller(divide_up(end - begin, per_step_), window_steps_ - position_);
      if (layout_ == ALayout::kRows) steps = smaller(steps, kBlockSteps - position_ % kBlockSteps);
      const int64_t next = smaller(end, begin + steps * per_step_);
      const int64_t a = word_of(position_);
      add_copy({begin, next, a, position_ * kPanel, term});
      const int64_t b = direct_ ? begin / per_step_ * kPanel : position_ * kPanel;
      segments[num_segments_++] = {a, b, -1, term, static_cast<int32_t>(steps), 0, 0, 0};
      position_ += steps;
      begin = next;
    }
  }

  /// The current chunk ends; its sum has `pops` folds and, unless it is the root, goes on the stack.
  void end_chunk(int pops, bool root, int64_t addend = -1) {
    if (num_segments_ == windows[num_windows - 1].first_segment || segments[num_segments_ - 1].ends)
      segments[num_segments_++] = {0, 0, -1, 0, 0, 0, 0, 0};
    Segment& last = segments[num_segments_ - 1];
    last.ends = 1;
    last.pops = static_cast<int16_t>(pops);
    last.push = root ? 0 : 1;
    last.addend = addend;
    depth_ += (root ? 0 : 1) - pops;
    if (depth_ > max_depth) max_depth = depth_;
  }

  void close() {
    Window& w = windows[num_windows - 1];
    w.num_segments = num_segments_ - w.first_segment;
    w.num_copies = num_copies_ - w.first_copy;
    w.steps = position_;
    if (position_ > max_steps) max_steps = position_;
  }

  Segment* segments;
  Copy* copies;
  Window* windows;
  int64_t num_windows = 0, max_steps = 0;
  int max_depth = 0;

 private:
  int64_t word_of(int64_t step) const {
    if (layout_ == ALayout::kSteps16) return step * 16;
    return step / kBlockSteps * kBlockWords + step % kBlockSteps;
  }
  void add_copy(const Copy& c) {
    if (num_copies_ > windows[num_windows - 1].first_copy) {
      Copy& last = copies[num_copies_ - 1];
      const bool whole = (last.end - last.begin) % per_step_ == 0;
      const bool joined = layout_ != ALayout::kRows || position_ % kBlockSteps != 0;
      if (last.term == c.term && last.end == c.begin && whole && joined) {
        last.end = c.end;
        return;
      }
    }
    copies[num_copies_++] = c;
  }
  void open_window(bool more) {
    if (more) close();
    const bool inside = more && num_segments_ > 0 && !segments[num_segments_ - 1].ends;
    windows[num_windows++] = {num_segments_, 0, num_copies_, 0, 0, depth_, inside};
    position_ = 0;
  }

  ALayout layout_;
  int per_step_;
  int64_t window_steps_;
  bool direct_;
  int64_t num_segments_ = 0, num_copies_ = 0, position_ = 0;
  int depth_ = 0;
};

/// Adds the chunks that `range(chunk, term) -> Copy{begin, end}` describes; empty ones are skipped.
template <class Ranges>
void add_chunks(Blocking& blocking, int64_t num_chunks, int64_t num_terms, const Ranges& range) {
  ChunkTree tree;
  const auto is_empty = [&](int64_t c) {
    for (int64_t t = 0; t < num_terms; ++t)
      if (range(c, t).begin < range(c, t).end) return false;
    return true;
  };
  int64_t chunk = 0;
  while (chunk < num_chunks && is_empty(chunk)) ++chunk;
  while (chunk < num_chunks) {
    int64_t next = chunk + 1;
    while (next < num_chunks && is_empty(next)) ++next;
    for (int64_t t = 0; t < num_terms; ++t)
      blocking.add(static_cast<int32_t>(t), range(chunk, t).begin, range(chunk, t).end);
    int pops = tree.add(chunk, next);
    if (next == num_chunks) pops += tree.finish();
    blocking.end_chunk(pops, next == num_chunks);
    chunk = next;
  }
  blocking.close();
}

inline constexpr int64_t kMaxTerms = 16;

/// Runs the product over rows [0, op.rows) and lanes [0, op.lanes).
template <class Op>
void run_product(Op& op, const Blocking& blocking, Carver carver) {
  constexpr int64_t kEntry = kMaxRows * kPanel;
  const int64_t panels = divide_up(op.lanes, kPanel);
  const bool kept = blocking.num_windows > 1;
  const int64_t entries = 1 + blocking.max_depth;
  const int64_t super = smaller(op.rows, kSuperRows);
  const int64_t state_per_panel = kept ? divide_up(super, kMaxRows) * entries * kEntry * 4 : 0;
  int64_t group = panels;
  if (Op::kPacksPanels)
    group = larger(int64_t{1}, kPanelGroupBytes / larger(int64_t{1}, blocking.max_steps * kPanel * 4));
  if (kept) group = smaller(group, larger(int64_t{1}, kStateBytes / state_per_panel));
  group = smaller(smaller(group, panels), op.max_group);
  const int64_t a_words = Op::kLayout == ALayout::kRows ? divide_up(blocking.max_steps, kBlockSteps) * kBlockWords
                                                        : blocking.max_steps * 16 + 16;
  const int64_t batch = larger(int64_t{1}, smaller(divide_up(super, kMaxRows), kRowBatchBytes / (a_words * 4 + 1)));
  uint32_t* a_pack = carver.take<uint32_t>(batch * a_words);
  const int64_t panel_words = blocking.max_steps * kPanel + 32;
  uint32_t* b_pack = carver.take<uint32_t>(Op::kPacksPanels ? group * panel_words : 0);
  float* state = carver.take<float>(kept ? group * state_per_panel / 4 : entries * kEntry);

  for (int64_t row0 = 0; row0 < op.rows; row0 += kSuperRows) {
    const int64_t rows = smaller(op.rows - row0, kSuperRows), blocks = divide_up(rows, kMaxRows);
    const int64_t height_of_all = rows / blocks, higher = rows % blocks;
    const auto start = [=](int64_t block) { return row0 + height_of_all * block + smaller(block, higher); };
    for (int64_t first = 0; first < panels; first += group) {
      const int64_t count = smaller(group, panels - first);
      op.begin_group(first, count);
      for (int64_t w = 0; w < blocking.num_windows; ++w) {
        const Window& window = blocking.windows[w];
        const bool keeps =
            w + 1 == blocking.num_windows || blocking.windows[w + 1].resumes;  // else all is on the stack
        const Copy* copies = blocking.copies + window.first_copy;
        if constexpr (Op::kPacksPanels)
          for (int64_t c = 0; c < window.num_copies; ++c)
            op.pack_panels(b_pack + copies[c].b, panel_words, first, count, copies[c]);
        for (int64_t block0 = 0; block0 < blocks; block0 += batch) {
          const int64_t end = smaller(block0 + batch, blocks);
          for (int64_t c = 0; c < window.num_copies; ++c)
            op.pack_blocks(a_pack + copies[c].a, a_words, block0, end, start, copies[c]);
          for (int64_t p = 0; p < count; ++p) {
            const uint32_t* bases[kMaxTerms];
            for (int64_t t = 0; t < op.num_terms; ++t) {
              if constexpr (Op::kPacksPanels) {
                bases[t] = b_pack + p * panel_words;
              } else {
                bases[t] = op.panel_base(t, first + p);
              }
            }
            for (int64_t b = block0; b < end; ++b) {
              const int64_t row = start(b), height = start(b + 1) - row;
              float* own = state + (kept ? (p * blocks + b) * entries * kEntry : 0);
              const float* init = w == 0 ? op.initial(row, height, first + p, own) : window.resumes ? own : nullptr;
              micro_for<typename Op::Dot, Op::kLayout>(height)(
                  {blocking.segments + window.first_segment, window.num_segments, a_pack + (b - block0) * a_words,
                   bases, own + kEntry + window.depth * height * kPanel, init, nullptr, op.addend(row, p),
                   keeps ? own : nullptr});
              if (w + 1 == blocking.num_windows) op.finish(row, height, first + p, own);
            }
          }
        }
      }
    }
  }
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
