// Order between boxes of one buffer: every distinct box in use has a node with its own dependency state.
//
// owner: the index of the buffer's handle. Purpose: an access waits for the tasks that every overlapping node names,
// and is recorded in its own node. A write removes the nodes that it covers, because any box that overlaps them also
// overlaps the write. A later reader of a box that one write covers does not inherit failures of earlier writers: the
// write is newer and has already inherited those of its own inputs. Who may call: the submitter, with the submission
// lock. Blocks: never. Memory: nodes of the RegionIndex in the store.
#pragma once
#include <algorithm>
#include <array>

#include "tasks/order/dependencies.h"
#include "tasks/regions/region_index.h"
#include "tasks/store/layout.h"

namespace tilewise::tasks {

/// The box of a parameter; without one, the whole buffer.
inline Box box_of(const Handle& handle, const pto_region* region) {
  Box box{};
  if (region == nullptr) {
    box.ndim = 1;
    box.size[0] = handle.bytes;
    box.stride[0] = 1;
    return box;
  }
  box.offset = region->offset;
  box.ndim = region->ndim;
  for (uint32_t d = 0; d < region->ndim; ++d) {
    box.size[d] = region->size[d];
    box.stride[d] = region->stride[d];
  }
  return box;
}

/// Whether the box has no byte and so orders nothing.
inline bool is_empty(const Box& box) {
  return std::any_of(box.size, box.size + box.ndim, [](uint64_t size) { return size == 0; });
}

/// Whether `inner` is inside `outer`; may return false for boxes of other strides.
inline bool lies_in(const Box& inner, const Box& outer) {
  if (is_empty(inner)) return true;
  const uint32_t last = outer.ndim - 1;
  const bool is_run = inner.ndim == 1;
  if (!is_run && outer.ndim > 1 &&
      !std::equal(inner.stride, inner.stride + inner.ndim, outer.stride, outer.stride + outer.ndim)) {
    return false;
  }
  uint64_t inner_rest = inner.offset;
  uint64_t outer_rest = outer.offset;
  for (uint32_t d = 0; d < last; ++d) {
    const uint64_t stride = std::max<uint64_t>(outer.stride[d], 1);
    const uint64_t from = inner_rest / stride;
    const uint64_t begin = outer_rest / stride;
    if (from < begin || from + (is_run ? 1 : inner.size[d]) > begin + outer.size[d]) return false;
    inner_rest %= stride;
    outer_rest %= stride;
  }
  uint64_t bytes = inner.size[inner.ndim - 1];
  if (outer.ndim == 1) {  // all of it must be in the run
    for (uint32_t d = 0; d + 1 < inner.ndim; ++d) bytes += (inner.size[d] - 1) * inner.stride[d];
  }
  return inner_rest >= outer_rest && inner_rest + bytes <= outer_rest + outer.size[last];
}

/// Whether no task has to wait for this node any more, and no failure of its writers must be remembered.
template <class Pool>
bool is_stale(const AccessState& state, Pool& pool) {
  bool settled = true;
  const TaskRef flag = state.kind == Kind::kRead ? 0 : kCarriesPoison;
  for_each_now(state, pool, [&](TaskRef ref) { settled = settled && pool.is_settled(ref | flag); });
  for_each_before(state, pool, [&](TaskRef ref) { settled = settled && pool.is_settled(ref); });
  return settled;
}

template <class Pool>
void remove_box(RegionIndex& boxes, uint32_t owner, Handle& handle, uint32_t node, Pool& pool) {
  AccessState& state = boxes[node].state;
  give_chunks(pool, state.more_now);
  give_chunks(pool, state.more_before);
  boxes.remove(owner, handle.tree, node);
}

/// Makes the node of a box if it does not exist. Returns false if there is no room.
inline bool ensure_box(RegionIndex& boxes, uint32_t owner, Handle& handle, const Box& box) {
  return is_empty(box) || boxes.find(owner, box) != kNone || boxes.insert(owner, handle.tree, box) != kNone;
}

/// Called at the first access by a box: moves the buffer's dependency state to the node of the whole buffer.
inline bool begin_boxes(RegionIndex& boxes, uint32_t owner, Handle& handle) {
  if ((handle.flags & kHasRegions) != 0) return true;
  if (handle.state.kind != Kind::kNothing) {
    const Box whole = box_of(handle, nullptr);
    if (!ensure_box(boxes, owner, handle, whole)) return false;
    const uint32_t node = boxes.find(owner, whole);
    boxes[node].state = handle.state;
    boxes.note_write(node);
    handle.state = {};
  }
  handle.flags |= kHasRegions;
  return true;
}

template <class Pool, class Sink>
void collect_boxes(RegionIndex& boxes, uint32_t owner, Handle& handle, const pto_region* param, int mode, Pool& pool,
                   Sink&& sink) {
  const Box box = box_of(handle, param);
  if (is_empty(box)) return;
  const uint32_t own = boxes.find(owner, box);
  if (own != kNone && boxes.isolated(handle.tree, own)) {
    collect(boxes[own].state, pool, mode, sink);
    return;
  }
  std::array<uint32_t, 32> nodes;
  size_t num_found = 0;
  uint64_t healed_at = 0;  // the last write that covers all of the box
  boxes.overlapping(handle.tree, box, [&](uint32_t node, Overlap overlap) {
    if (overlap == Overlap::kEqual || overlap == Overlap::kInside) {
      healed_at = std::max(healed_at, boxes[node].written_at);
    }
    if (num_found < nodes.size()) {
      nodes[num_found++] = node;
    } else {
      collect(boxes[node].state, pool, mode, sink);
    }
  });
  for (size_t f = 0; f < num_found; ++f) {
    const RegionNode& node = boxes[nodes[f]];
    const TaskRef mask = node.written_at < healed_at ? ~kCarriesPoison : ~TaskRef{0};
    collect(node.state, pool, mode, [&](TaskRef ref) { sink(ref & mask); });
  }
}

template <class Pool>
void record_box(RegionIndex& boxes, uint32_t owner, Handle& handle, const pto_region* param, int mode, Pool& pool,
                TaskRef task) {
  const Box box = box_of(handle, param);
  if (is_empty(box)) return;
  uint32_t own = boxes.find(owner, box);
  // Another access of this task may have just removed the node as covered or stale; then there is room for it.
  if (own == kNone) own = boxes.insert(owner, handle.tree, box);
  if (!boxes.isolated(handle.tree, own)) {
    std::array<uint32_t, 64> gone;
    size_t num_gone = 0;
    boxes.overlapping(handle.tree, box, [&](uint32_t node, Overlap overlap) {
      if (node == own || num_gone == gone.size()) return;
      const bool is_covered =
          (overlap == Overlap::kEqual || overlap == Overlap::kCovered) && kind_of(mode) == Kind::kWrite;
      // The node of a write may be needed to keep earlier failures from its readers.
      const bool is_needed = boxes[node].written_at != 0 && pool.remembers_failures();
      if (is_covered || (!is_needed && is_stale(boxes[node].state, pool))) gone[num_gone++] = node;
    });
    for (size_t n = 0; n < num_gone; ++n) remove_box(boxes, owner, handle, gone[n], pool);
  }
  record(boxes[own].state, pool, mode, task);
  if (kind_of(mode) != Kind::kRead) boxes.note_write(own);
}

/// Removes all of a buffer's nodes (all = true) or the stale ones. Returns the number removed.
template <class Pool>
uint32_t sweep_boxes(RegionIndex& boxes, uint32_t owner, Handle& handle, Pool& pool, bool all) {
  uint32_t total = 0;
  while (true) {
    std::array<uint32_t, 64> gone;
    size_t num_gone = 0;
    boxes.for_each(handle.tree, [&](uint32_t node) {
      if (num_gone < gone.size() && (all || is_stale(boxes[node].state, pool))) gone[num_gone++] = node;
    });
    for (size_t n = 0; n < num_gone; ++n) remove_box(boxes, owner, handle, gone[n], pool);
    total += static_cast<uint32_t>(num_gone);
    if (num_gone < gone.size()) return total;
  }
}

}  // namespace tilewise::tasks
