// See notes.h.
#include "tasks/submit/notes.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tasks/order/boxes.h"
#include "tasks/store/text.h"
#include "tasks/wait/wait.h"

namespace tilewise::tasks {

namespace {

constexpr uint64_t kItemBytes[] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 8, 16, 1};  // by pto_type

uint64_t item_bytes_of(const pto_view& view) {
  return view.type == PTO_OTHER ? view.item_bytes : kItemBytes[view.type];
}

/// Removes dimensions of size 1 and merges contiguous ones, so that boxes of equal bytes are equal.
Box merged(const Box& box) {
  Box made{box.offset, 0, {}, {}};
  for (uint32_t d = 0; d < box.ndim; ++d) {
    if (box.size[d] == 1 && d + 1 < box.ndim) continue;
    const uint32_t last = made.ndim - 1;
    if (made.ndim > 0 && made.stride[last] == box.size[d] * box.stride[d]) {
      made.size[last] *= box.size[d];
      made.stride[last] = box.stride[d];
      continue;
    }
    made.size[made.ndim] = box.size[d];
    made.stride[made.ndim++] = box.stride[d];
  }
  return made;
}

/// The bytes of a view, from `offset` on. Returns false if they are not a box.
bool box_of_view(const pto_view& view, uint64_t offset, Box& box) {
  // One dimension more than the view has: the bytes of an element.
  uint64_t size[PTO_MAX_DIMS + 1], stride[PTO_MAX_DIMS + 1];
  uint32_t ndim = 0;
  for (uint32_t d = 0; d < view.ndim; ++d) {
    if (view.size[d] == 1) continue;
    size[ndim] = view.size[d];
    stride[ndim++] = view.stride[d];
  }
  const uint64_t item = item_bytes_of(view);
  if (ndim > 0 && stride[ndim - 1] == item) {
    if (__builtin_mul_overflow(size[ndim - 1], item, &size[ndim - 1])) return false;
    stride[ndim - 1] = 1;
  } else {
    size[ndim] = item;
    stride[ndim++] = 1;
  }
  if (ndim > PTO_MAX_DIMS) return false;
  box = {offset, ndim, {}, {}};
  for (uint32_t d = 0; d < ndim; ++d) {
    box.size[d] = size[d];
    box.stride[d] = stride[d];
    uint64_t bytes = 0;
    if (__builtin_mul_overflow(size[d], stride[d], &bytes) || bytes >> 62 != 0) return false;
  }
  return true;
}

/// Whether the whole view is inside the box.
bool view_lies_in(const pto_view& view, const Box& outer) {
  if (std::any_of(view.size, view.size + view.ndim, [](uint64_t size) { return size == 0; })) return true;
  Box inner;
  if (!box_of_view(view, outer.offset, inner)) return false;
  const Box one = merged(inner), other = merged(outer);
  const bool is_equal = one.ndim == other.ndim && std::equal(one.size, one.size + one.ndim, other.size) &&
                        std::equal(one.stride, one.stride + one.ndim, other.stride);
  if (is_equal) return true;
  if (other.ndim > 1) return lies_in(one, other);
  uint64_t end = 1;  // a contiguous run contains every box that ends inside it
  for (uint32_t d = 0; d < one.ndim; ++d) end += (one.size[d] - 1) * one.stride[d];
  return end <= other.size[0];
}

}  // namespace

void check_extras(const pto_task_spec& spec) {
  const char* where = "[runtime.submit] ";
  if (spec.name != nullptr && strnlen(spec.name, PTO_MAX_NAME) == PTO_MAX_NAME) {
    throw_error(PTO_BAD_ARGUMENT, where, "a task's name must have at most ", PTO_MAX_NAME - 1, " bytes; got '",
                std::string(spec.name, PTO_MAX_NAME - 1), "...'; shorten it");
  }
  if (spec.name != nullptr && !is_text(spec.name)) {
    throw_error(PTO_BAD_ARGUMENT, where,
                "a task's name must be UTF-8 without control characters; got other bytes; correct it");
  }
  if (!(spec.deadline_s >= 0)) {
    throw_error(PTO_BAD_ARGUMENT, where,
                "a deadline must be a positive number of seconds from now, or 0 for none; got ", spec.deadline_s,
                "; correct it");
  }
}

void check_views(const pto_task_spec& spec, Handle* const* handles) {
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    const pto_param& param = spec.params[p];
    if (param.view == nullptr) continue;
    const pto_view& view = *param.view;
    const bool is_known = view.ndim <= PTO_MAX_DIMS && static_cast<uint32_t>(view.type) <= PTO_OTHER &&
                          (view.type != PTO_OTHER || view.item_bytes > 0);
    if (!is_known) {
      throw_error(PTO_BAD_ARGUMENT, "[runtime.submit] a view must have at most ", PTO_MAX_DIMS,
                  " dimensions and elements of a pto_type; got ", view.ndim, " dimensions and type ",
                  static_cast<int>(view.type), " in parameter ", p, "; correct it");
    }
    if (handles[p] == nullptr && param.mode == PTO_NO_DEP) continue;  // an address: the caller is responsible
    Handle fresh{};
    fresh.bytes = param.bytes;
    if (view_lies_in(view, box_of(handles[p] != nullptr ? *handles[p] : fresh, param.region))) continue;
    throw_error(PTO_BAD_ARGUMENT, "[runtime.submit] a view must lie in its buffer or region; got one with other bytes",
                " in parameter ", p, "; correct its sizes and strides, in elements and bytes");
  }
}

void note_extras(Engine& engine, uint32_t slot, const pto_task_spec& spec) {
  Slot& task = engine.store.slots[slot];
  TaskNotes& notes = engine.store.notes[slot];
  if (spec.name != nullptr && spec.name[0] != 0) {
    std::strncpy(notes.name, spec.name, PTO_MAX_NAME - 1);
    notes.name[PTO_MAX_NAME - 1] = 0;
    task.flags |= kHasName;
  }
  if (spec.deadline_s > 0 && spec.deadline_s < kLongestWait) {
    notes.deadline_ns = now_ns() + static_cast<int64_t>(spec.deadline_s * 1e9);
    task.flags |= kHasDeadline;
  }
}

void note_view(Engine& engine, uint32_t slot, uint32_t param, const pto_param& parameter, uint64_t num_bytes) {
  pto_view& view = engine.store.notes[slot].views[param];
  if (parameter.view != nullptr) {
    view = *parameter.view;
    view.item_bytes = item_bytes_of(view);
    return;
  }
  view = {nullptr, 1, PTO_U8, 1, {num_bytes}, {1}};
  if (parameter.region == nullptr) return;
  view.ndim = parameter.region->ndim;
  std::copy_n(parameter.region->size, view.ndim, view.size);
  std::copy_n(parameter.region->stride, view.ndim, view.stride);
}

}  // namespace tilewise::tasks
