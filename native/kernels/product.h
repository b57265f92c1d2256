// The driver of every contraction: packs one window at a time (Blocking), and runs register blocks.
//
// A product provides packing, panel addresses, the addresses that blocks are packed from, the target of a finished
// block (its own memory, or rows `pitch` apart) and what to do with it; see Forward in matmul.cc. While earlier calls
// of the micro-kernel compute, the data of later ones is prefetched into L2: the next panel, and the memory from which
// the next row blocks are packed. Each call prefetches its share of both.
#pragma once
#include "kernels/blocking.h"

// Scratch memory of a contraction over `steps` steps in `ranges` ranges: packs and the state of blocks between windows,
// which constants below limit, then segments, copies and windows.
// define product_scratch(steps, ranges) = (17 << 20) + 4 * steps + 1024 * ranges

namespace tilewise::kernels::TILEWISE_ISA_NS {

inline constexpr int64_t kPanelGroupBytes = 4352 << 10;  // panels packed together; L2 must have room for two at a time
// Row blocks per batch if panels are not in L2: three, or as many as a fast multiplier needs to cover a panel's load.
inline constexpr int64_t kMostBatchBytes = 640 << 10;
// Panels of a thin product have at most so many bytes. Each row block runs over all of them, so that results are
// written along rows.
inline constexpr int64_t kThinBytes = 128 << 10;
inline constexpr int64_t kStateBytes = 11 << 20;
inline constexpr int64_t kStreamAhead = 8 << 10;  // prefetch distance in bytes of a single row block
inline constexpr int64_t kSuperRows = 2016;  // rows that share one pass over the panels
inline constexpr int64_t kMaxTerms = 16;

/// Consecutive bytes in memory.
struct Run {
  const char* data;
  int64_t bytes;
};

/// Iterates over the memory that the row blocks [block, end) of a window are packed from.
template <class Op, class Start>
class Sources {
 public:
  Sources(const Op& op, const Copy* copies, int64_t num_copies, int64_t block, int64_t end, const Start& start)
      : op_(op), copy_(copies), last_(copies + num_copies), block_(block), end_(end), start_(start) {
    find();
  }
  /// The next piece, of at most `bytes` bytes; `otherwise` at the end.
  const char* take(int64_t bytes, const char* otherwise) {
    if (copy_ == last_) return otherwise;
    const char* piece = run_.data;
    run_ = {run_.data + bytes, run_.bytes - bytes};
    if (run_.bytes <= 0) {
      ++next_;
      find();
    }
    return piece;
  }

 private:
  void find() {
    for (; copy_ != last_; ++copy_, next_ = 0)
      if (next_ < op_.num_sources(*copy_, block_, end_, start_)) {
        run_ = op_.source(*copy_, block_, end_, start_, next_);
        return;
      }
  }

  const Op& op_;
  const Copy* copy_;
  const Copy* last_;
  int64_t block_, end_;
  Start start_;
  int64_t next_ = 0;
  Run run_ = {};
};

/// Words of a step of a packed panel.
template <class Op>
constexpr int64_t panel_step_of() {
  if constexpr (requires { Op::kPanelStep; }) return Op::kPanelStep;
  return kPanel;
}

/// A product over rows [0, op.rows) and lanes [0, op.lanes).
template <class Op>
class Product {
 public:
  Product(Op& op, const Blocking& blocking, Carver carver) : op_(op), blocking_(blocking) {
    const int64_t longest = larger(int64_t{1}, blocking.max_steps);
    panels_ = divide_up(op.lanes, kPanel);
    super_ = round_up(divide_up(op.rows, divide_up(op.rows, kSuperRows)), kMost);
    keeps_state_ = blocking.num_windows > 1;
    entries_ = 1 + blocking.max_depth;
    const int64_t state_per_panel = keeps_state_ ? super_ / kMost * entries_ * kEntry * 4 : 0;
    const int64_t panel_bytes = longest * kStepOfPanel * 4;
    group_ = panels_;
    if (Op::kPacksPanels) group_ = larger(int64_t{1}, kPanelGroupBytes / panel_bytes);
    if (keeps_state_) group_ = smaller(group_, larger(int64_t{1}, kStateBytes / state_per_panel));
    group_ = smaller(smaller(group_, panels_), op.max_group);
    a_words_ = words_of(blocking.max_steps) + (Op::kLayout == ALayout::kRows ? 0 : kStepWords);
    const int64_t block_bytes = a_words_ * kWords * 4;
    batch_ = kRowBatchBytes<typename Op::Dot> / (block_bytes + 1);
    const int64_t num_blocks = kGroupOf<typename Op::Dot> > 1 ? super_ / kMost : 3;
    if (!Op::kPacksPanels) batch_ = larger(batch_, smaller(num_blocks, kMostBatchBytes / (block_bytes + 1)));
    batch_ = larger(int64_t{1}, smaller(super_ / kMost, batch_));
    is_thin_ = Op::kLayout == ALayout::kRows && group_ * panel_bytes <= kThinBytes;
    if (is_thin_) batch_ = 1;
    a_pack_ = carver.take<uint32_t>(batch_ * a_words_ * kWords);
    packed_ = kWords > 1 ? carver.take<uint32_t>(batch_ * a_words_) : a_pack_;
    panel_words_ = blocking.max_steps * kStepOfPanel + kPaddingOfPanel;
    b_pack_ = carver.take<uint32_t>(Op::kPacksPanels ? group_ * panel_words_ : 0);
    state_ = carver.take<float>(keeps_state_ ? group_ * state_per_panel / 4 : entries_ * kEntry);
    int64_t most = 1;
    for (int64_t w = 0; w < blocking.num_windows; ++w) most = larger(most, blocking.windows[w].num_segments);
    pieces_ = carver.take<const char*>(most);
  }

  void run() {
    [[maybe_unused]] const typename ScopeOf<typename Op::Dot>::Type scope;
    for (row0_ = 0; row0_ < op_.rows; row0_ += super_) {
      const int64_t rows = smaller(op_.rows - row0_, super_);
      blocks_ = divide_up(rows, kMost);
      start_ = {row0_, rows / blocks_, rows % blocks_, row0_ + rows};
      if (kGroupOf<typename Op::Dot> > 1) start_ = {row0_, kMost, 0, row0_ + rows};
      for (first_ = 0; first_ < panels_; first_ += group_) {
        count_ = smaller(group_, panels_ - first_);
        op_.begin_group(first_, count_);
        for (int64_t w = 0; w < blocking_.num_windows; ++w) run_window(w);
      }
    }
  }

 private:
  static constexpr int64_t kMost = kRowsOf<typename Op::Dot>;
  static constexpr int64_t kEntry = kMost * kPanel;
  static constexpr int64_t kWords = kWordsOf<typename Op::Dot>;
  static constexpr int64_t kStepOfPanel = panel_step_of<Op>();
  static constexpr int64_t kPaddingOfPanel = kStepOfPanel == kPanel ? 32 : 16 * kStepOfPanel;  // up to a whole group

  /// The first row of a block. Heights differ by at most one. For tile registers, where a partial block takes as long
  /// as a full one, all blocks but the last are full.
  struct Start {
    int64_t row0, height, higher, end;
    int64_t operator()(int64_t block) const { return smaller(end, row0 + height * block + smaller(block, higher)); }
  };

  /// Words of a packed row block.
  static int64_t words_of(int64_t steps) {
    return Op::kLayout == ALayout::kRows ? divide_up(steps, kBlockSteps) * kMost * kRowStride : steps * kStepWords;
  }

  /// Widens the `height` rows of a packed block once, so that the loop need not.
  void widen(int64_t block, int64_t height, int64_t words) {
    const int64_t piece = Op::kLayout == ALayout::kRows ? kMost * kRowStride : words;
    const int64_t used = Op::kLayout == ALayout::kRows ? height * kRowStride : words;
    const uint32_t* from = packed_ + block * a_words_;
    uint32_t* to = a_pack_ + block * a_words_ * kWords;
    for (int64_t i = 0; i < words; i += piece) widen_words<Op::kLayout>(to + i * kWords, from + i, used);
  }

  void run_window(int64_t w) {
    const Window& window = blocking_.windows[w];
    const Copy* copies = blocking_.copies + window.first_copy;
    if constexpr (Op::kPacksPanels)
      for (int64_t c = 0; c < window.num_copies; ++c)
        op_.pack_panels(b_pack_ + copies[c].b, panel_words_, first_, count_, copies[c]);
    for (int64_t block = 0; block < blocks_; block += batch_) {
      const int64_t end = smaller(block + batch_, blocks_);
      for (int64_t c = 0; c < window.num_copies; ++c)
        op_.pack_blocks(packed_ + copies[c].a, a_words_, block, end, start_, copies[c]);
      if constexpr (kWords > 1)
        for (int64_t b = block; b < end; ++b) widen(b - block, start_(b + 1) - start_(b), words_of(window.steps));
      const bool is_last = end == blocks_;
      const Window& following = is_last && w + 1 < blocking_.num_windows ? blocking_.windows[w + 1] : window;
      const int64_t next = is_last && w + 1 < blocking_.num_windows ? 0 : end;
      Sources<Op, Start> sources(op_, blocking_.copies + following.first_copy,
                                 next == blocks_ ? 0 : following.num_copies, next, smaller(next + batch_, blocks_),
                                 start_);
      for (int64_t p = 0; p < count_; ++p) run_panel(w, p, block, end, sources);
    }
  }

  void run_panel(int64_t w, int64_t p, int64_t block, int64_t end, Sources<Op, Start>& sources) {
    const Window& window = blocking_.windows[w];
    const bool is_last = w + 1 == blocking_.num_windows;
    const bool keeps = is_last || blocking_.windows[w + 1].resumes;  // otherwise the whole state is on the stack
    const uint32_t* bases[kMaxTerms];
    for (int64_t t = 0; t < op_.num_terms; ++t) bases[t] = base(t, p);
    const bool has_next = p + 1 < count_ && window.steps > 0;
    const int64_t panel_lines = kPanel * 4 / 64;  // of a step
    const int32_t every_ahead = has_next ? mask_of((end - block) / panel_lines) : INT32_MAX;
    const int32_t every_piece = mask_of(count_ * 16 / kMost);
    const auto* ahead = reinterpret_cast<const char*>(bases[0]);
    if (has_next) ahead = reinterpret_cast<const char*>(base(0, p + 1) + blocking_.segments[window.first_segment].b);
    const bool is_stream =
        !Op::kPacksPanels && blocks_ == 1;  // each panel is read once, and the next one follows it in memory
    for (int64_t b = block; b < end; ++b) {
      const int64_t row = start_(b), height = start_(b + 1) - row;
      float* own = state_of(p, b);
      for (int64_t s = 0; s < window.num_segments; ++s)
        pieces_[s] =
            sources.take(divide_up(blocking_.segments[window.first_segment + s].steps, every_piece + 1) * 64, ahead);
      MicroArgs call = {};
      call.segments = blocking_.segments + window.first_segment;
      call.num_segments = window.num_segments;
      call.a = a_pack_ + (b - block) * a_words_ * kWords;
      call.b = bases;
      call.stack = own + kEntry + window.depth * height * kPanel;
      call.init = w == 0 ? op_.initial(row, height, first_ + p, own) : window.resumes ? own : nullptr;
      call.addend = op_.addend(row, p);
      float* const out = is_last ? op_.target(row, first_ + p, own) : own;
      call.out = keeps ? out : nullptr;
      if (out != own) call.out_pitch = op_.pitch();
      call.ahead = ahead + (b - block) * divide_up(window.steps, static_cast<int64_t>(every_ahead) + 1) * 64;
      call.every_ahead = every_ahead;
      if (is_stream) {
        const int64_t distance = height <= kFewRows ? kStreamAhead / 2 : kStreamAhead;
        call.ahead = reinterpret_cast<const char*>(bases[0] + blocking_.segments[window.first_segment].b) + distance;
        call.every_ahead = 0;
        call.second = 64;
        call.pace = kPanel * 4;
      }
      call.every_piece = every_piece;
      call.pieces = pieces_;
      call.rows = height;
      const bool is_short = is_thin_ && p + 1 < count_;  // too short to prefetch what it writes itself
      if (is_last) op_.expect(row, height, first_ + p + (is_short ? 1 : 0), call.expected);
      if (w > 0) prefetch_state(window, height, b + 1 < end ? state_of(p, b + 1) : state_of(p + 1, block));
      if constexpr (requires { op_.multiply(height, call); }) {
        op_.multiply(height, call);
      } else {
        micro_for<typename Op::Dot, Op::kLayout>(height, op_.lanes - (first_ + p) * kPanel)(call);
      }
      if (is_last) op_.finish(row, height, first_ + p, out);
    }
  }

  float* state_of(int64_t panel, int64_t block) const {
    return state_ + (keeps_state_ ? (panel * blocks_ + block) * entries_ * kEntry : 0);
  }
  /// Prefetches the state that the next call starts with into L2.
  static void prefetch_state(const Window& window, int64_t height, const float* state) {
    const int64_t begin = window.resumes ? 0 : kEntry, end = kEntry + window.depth * height * kPanel;
    for (int64_t i = begin; i < end; i += 64 / sizeof(float)) __builtin_prefetch(state + i, 1, 2);
  }

  /// The mask with which i & mask = 0 for one in `period` values of i, or slightly more.
  static int32_t mask_of(int64_t period) {
    int32_t mask = 0;
    while (2 * (mask + 1) <= period && mask < 1 << 20) mask = 2 * mask + 1;
    return mask;
  }

  const uint32_t* base(int64_t term, int64_t p) const {
    if constexpr (Op::kPacksPanels) {
      return b_pack_ + p * panel_words_;
    } else {
      return op_.panel_base(term, first_ + p);
    }
  }

  Op& op_;
  const Blocking& blocking_;
  int64_t panels_, group_, super_, batch_, entries_, a_words_, panel_words_;
  bool keeps_state_, is_thin_;
  uint32_t *a_pack_, *packed_;  // the same memory unless words are widened
  uint32_t* b_pack_;
  float* state_;
  const char** pieces_;
  int64_t row0_ = 0, blocks_ = 0, first_ = 0, count_ = 0;
  Start start_ = {};
};

template <class Op>
void run_product(Op& op, const Blocking& blocking, const Carver& carver) {
  Product<Op>(op, blocking, carver).run();
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
