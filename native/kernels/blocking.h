// How a contraction is divided: into segments and k splits for the micro-kernel, and into windows that are packed at a
// time.
//
// A window is the part of the contraction that is packed at a time. Between windows, a block's accumulators and stack
// are stored in scratch without rounding, so windows change no bit.
#pragma once
#include "kernels/amx.h"
#include "kernels/pack.h"
#include "kernels/tree.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

/// Elements [begin, end) of one term, packed at word `a` of a row block and word `b` of a panel.
struct Copy {
  int64_t begin, end, a, b;
  int32_t term;
};

struct Window {
  int64_t first_segment, num_segments, first_copy, num_copies;
  int64_t steps;
  int depth;     // entries on the stack when it starts
  bool resumes;  // starts within a k split: accumulators are loaded from the state
};

/// The layout of steps in a pack of A.
struct StepLayout {
  ALayout layout;
  int per_step;  // elements
  int group;     // in steps: ranges are cut at multiples of it, counted from their begin
  int64_t block_words;  // of kBlockSteps steps of row-major A
  int64_t panel_step = kPanel;  // words of a step of a packed panel
  // Multiples of `group` steps are counted along k instead. A group in a pack has elements of one range only.
  bool keeps_groups = false;

  template <class D>
  static constexpr StepLayout of(ALayout layout) {
    return {layout, D::kPerStep, kGroupOf<typename D::Dot>, kRowsOf<typename D::Dot> * kRowStride};
  }
  /// The step of its group that an element is in.
  int64_t step_in_group(int64_t element) const { return keeps_groups ? element / per_step % group : 0; }
};

/// Segments, copies and windows of one contraction, in scratch.
class Blocking {
 public:
  /// Windows have at most `most_steps` steps and, up to whole blocks of steps, the same length.
  Blocking(Carver& carver, const StepLayout& layout, int64_t most_steps, bool direct, int64_t total_steps,
           int64_t num_ranges)
      : layout_(layout), direct_(direct) {
    total_steps += (layout.keeps_groups ? 2 : 1) * (layout.group - 1) * num_ranges;
    const int64_t least = larger(int64_t{1}, divide_up(total_steps, most_steps));
    window_steps_ = larger(kBlockSteps, round_up(divide_up(total_steps, least), kBlockSteps));
    const int64_t cuts = total_steps / kBlockSteps + 1;
    segments = carver.take<Segment>(2 * cuts + 4 * num_ranges + 8);
    copies = carver.take<Copy>(2 * cuts + 4 * num_ranges + 8);
    windows = carver.take<Window>(total_steps / window_steps_ + num_ranges + 2);
    open_window(false);
  }

  /// Adds elements [begin, end) of a term to the current k split.
  void add(int32_t term, int64_t begin, int64_t end) {
    if (begin >= end) return;
    position_ = round_up(position_, layout_.group);
    if (position_ == window_steps_) open_window(true);
    position_ += layout_.step_in_group(begin);
    while (begin < end) {
      if (position_ == window_steps_) open_window(true);
      int64_t steps = smaller(divide_up(end - begin, layout_.per_step), window_steps_ - position_);
      if (layout_.layout == ALayout::kRows) steps = smaller(steps, kBlockSteps - position_ % kBlockSteps);
      const int64_t next = smaller(end, begin + steps * layout_.per_step);
      const int64_t a = word_of(position_);
      const int64_t packed = position_ * layout_.panel_step;
      add_copy({begin, next, a, packed, term});
      const int64_t b = direct_ ? begin / layout_.per_step * kPanel : packed;
      segments[num_segments_++] = {a, b, -1, term, static_cast<int32_t>(steps), 0, 0, 0};
      position_ += steps;
      begin = next;
    }
  }

  /// Ends the current k split. Its sum is folded `pops` times and, unless it is the root, pushed on the stack.
  void end_split(int pops, bool root, int64_t addend = -1) {
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
    if (layout_.layout == ALayout::kSteps) return step * kStepWords;
    return step / kBlockSteps * layout_.block_words + step % kBlockSteps;
  }
  void add_copy(const Copy& c) {
    if (num_copies_ > windows[num_windows - 1].first_copy) {
      Copy& last = copies[num_copies_ - 1];
      const bool whole =
          (last.end - last.begin) % (layout_.per_step * layout_.group) == 0 && layout_.step_in_group(last.begin) == 0;
      const bool joined = layout_.layout != ALayout::kRows || position_ % kBlockSteps != 0;
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

  StepLayout layout_;
  int64_t window_steps_;
  bool direct_;
  int64_t num_segments_ = 0, num_copies_ = 0, position_ = 0;
  int depth_ = 0;
};

/// Adds the k splits that `range(k_split, term) -> Copy{begin, end}` describes; empty ones are skipped.
template <class Ranges>
void add_splits(Blocking& blocking, int64_t num_k_splits, int64_t num_terms, const Ranges& range) {
  SplitTree tree;
  const auto is_empty = [&](int64_t c) {
    for (int64_t t = 0; t < num_terms; ++t)
      if (range(c, t).begin < range(c, t).end) return false;
    return true;
  };
  int64_t k_split = 0;
  while (k_split < num_k_splits && is_empty(k_split)) ++k_split;
  while (k_split < num_k_splits) {
    int64_t next = k_split + 1;
    while (next < num_k_splits && is_empty(next)) ++next;
    for (int64_t t = 0; t < num_terms; ++t)
      blocking.add(static_cast<int32_t>(t), range(k_split, t).begin, range(k_split, t).end);
    int pops = tree.add(k_split, next);
    if (next == num_k_splits) pops += tree.finish();
    blocking.end_split(pops, next == num_k_splits);
    k_split = next;
  }
  blocking.close();
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
