// Recording, and binding a recording to buffers. See recording.h; replay.cc submits it again.
#include "tasks/replay/recording.h"

#include <algorithm>

#include "tasks/engine/handles.h"
#include "tasks/order/boxes.h"
#include "tasks/replay/instantiated_graph.h"
#include "tasks/store/status.h"

namespace tilewise::tasks {

namespace {

constexpr uint32_t kRecordedBoxes = 1 << 14;

}  // namespace

Recording::Recording(const Store& store) {
  for (uint32_t e = 0; e < store.header->max_events; ++e) {
    event_values.push_back(store.events[e].counter.load());
  }
}

Recording::~Recording() = default;

uint32_t Recording::buffer_of(const Store& store, uint32_t index, bool is_new) {
  const Handle& handle = store.handles[index];
  const uint64_t name = handle_name(handle, index);
  const auto [entry, is_first] = buffer_by_name_.try_emplace(name, static_cast<uint32_t>(buffers.size()));
  if (is_first) {
    Buffer buffer{};
    buffer.handle = is_new ? 0 : name;
    buffer.index = index;
    buffer.address = handle.address;
    buffer.bytes = handle.bytes;
    buffer.is_frozen = (handle.flags & kFrozen) != 0;
    buffers.push_back(std::move(buffer));
  }
  return entry->second;
}

/// The number of a buffer that existed before the recording, or kNone.
uint32_t Recording::find_buffer(pto_handle handle) const {
  const auto entry = buffer_by_name_.find(handle);
  return entry == buffer_by_name_.end() || buffers[entry->second].handle == 0 ? kNone : entry->second;
}

void Recording::add(const Store& store, uint32_t slot, const pto_task_spec& spec, uint32_t fresh) {
  const Slot& live = store.slots[slot];
  const SlotArgs& args = store.args[slot];
  const auto number = static_cast<uint32_t>(tasks.size());
  if (number == 1u << kSlotBits) {
    throw_error(PTO_NO_MEMORY, "[runtime.record] a recording must have at most ", 1u << kSlotBits, " tasks; got more; ",
                "record a smaller part");
  }
  const TaskRef self = make_ref(1, number);
  task_by_name_[store.name_at(slot)] = number;
  Task task{};
  task.kernel = spec.kernel;
  task.priority = spec.priority;
  task.type_class = live.type_class;
  task.flags = static_cast<uint16_t>(live.flags & (kUsesMutexes | kIsParent | kHasTarget));
  task.num_params = live.num_params;
  task.num_scalars = live.num_scalars;
  task.target_worker = static_cast<uint32_t>(spec.target_worker);
  task.first_param = static_cast<uint32_t>(accesses.size());
  task.first_scalar = static_cast<uint32_t>(scalars.size());
  task.first_producer = static_cast<uint32_t>(producers.size());
  task.first_wait = static_cast<uint32_t>(waits.size());
  const uint64_t* const first = args.scalars(live.num_params);
  scalars.insert(scalars.end(), first, first + live.num_scalars);
  for (uint32_t w = 0; w < spec.num_waits; ++w) {
    const uint64_t event = spec.waits[w].event & 0xFFFFFFFF;
    waits.push_back({event, spec.waits[w].value - event_values[event]});
  }
  task.num_waits = spec.num_waits;
  if ((live.flags & kHasName) != 0) {
    names.emplace_back(spec.name);
    task.name = static_cast<uint32_t>(names.size());
  }
  if ((live.flags & kHasViews) != 0) {
    task.first_view = static_cast<uint32_t>(views.size()) + 1;
    const pto_view* seen = store.notes[slot].views;
    views.insert(views.end(), seen, seen + live.num_params);
  }
  task.deadline_s = spec.deadline_s;
  std::vector<uint64_t> task_producers;
  for (uint32_t a = 0; a < spec.num_after; ++a) {
    const auto earlier = task_by_name_.find(spec.after[a]);
    if (earlier != task_by_name_.end())
      task_producers.push_back(uint64_t{earlier->second} << kFlagBits | kCarriesPoison);
  }
  std::vector<std::pair<uint32_t, Access>> touched;
  const auto touch = [&](uint32_t index, int mode, const pto_region* box, bool is_new) {
    const uint32_t buffer = buffer_of(store, index, is_new);
    // A buffer that each replay allocates has no handle for the mutex: its tasks keep their order instead.
    if (mode == PTO_COMMUTE && buffers[buffer].handle == 0) mode = PTO_INOUT;
    const auto number = static_cast<uint32_t>(boxes.size());
    if (box != nullptr) boxes.push_back(*box);
    const uint64_t offset = box != nullptr ? box->offset : 0;
    touched.push_back({buffer, {buffer, static_cast<uint8_t>(mode), box != nullptr, false, number, offset}});
    return buffer;
  };
  std::vector<const pto_region*> touched_boxes;
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    const Param& param = args.params[p];
    touched_boxes.push_back(spec.params[p].region);
    if (param.handle == kNone) {
      touched.push_back({kNone, {kNone, static_cast<uint8_t>(param.mode), false, false, 0, param.address}});
    } else {
      touch(param.handle, param.mode, spec.params[p].region, (fresh >> p & 1) != 0);
    }
  }
  if (spec.predicate != 0) {
    task.predicate = touch(static_cast<uint32_t>(spec.predicate & 0xFFFFFFFF) - 1, PTO_INPUT, nullptr, false) + 1;
    touched_boxes.push_back(nullptr);
  }
  for (size_t t = 0; t < touched.size(); ++t) {
    auto& [buffer, access] = touched[t];
    if (buffer != kNone && access.mode != PTO_NO_DEP && !buffers[buffer].is_frozen) {
      analyse(buffer, access, touched_boxes[t], self, task_producers);
    }
    accesses.push_back(access);
  }
  std::sort(task_producers.begin(), task_producers.end(), std::greater<>());
  task_producers.erase(std::unique(task_producers.begin(), task_producers.end()), task_producers.end());
  // If a producer occurs with and without the flag, the one with it comes first.
  task_producers.erase(std::unique(task_producers.begin(), task_producers.end(),
                                   [](uint64_t a, uint64_t b) { return a >> kFlagBits == b >> kFlagBits; }),
                       task_producers.end());
  std::reverse(task_producers.begin(), task_producers.end());
  producers.insert(producers.end(), task_producers.begin(), task_producers.end());
  task.num_producers = static_cast<uint32_t>(task_producers.size());
  task.is_plain =
      spec.num_waits == 0 && spec.predicate == 0 && task.flags == 0 && (live.flags & (kHasDeadline | kHasViews)) == 0 &&
      std::all_of(touched.begin(), touched.end(), [&](const auto& touch) {
        const auto& [buffer, access] = touch;
        return buffer != kNone && buffers[buffer].handle != 0 && !access.is_region && access.mode <= PTO_INOUT;
      });
  tasks.push_back(task);
}

// Finds the recorded producers of one access, and whether it also depends on tasks before the recording.
void Recording::analyse(uint32_t number, Access& access, const pto_region* region, TaskRef self,
                        std::vector<uint64_t>& task_producers) {
  Buffer& buffer = buffers[number];
  const auto sink = [&](TaskRef ref) {
    if (without_flags(ref) != self) task_producers.push_back(uint64_t{slot_of(ref)} << kFlagBits | (ref & kFlagMask));
  };
  const bool writes = kind_of(access.mode) != Kind::kRead;
  if (region == nullptr && !buffer.has_regions) {
    // Accesses after a write are ordered after everything older; others are not.
    access.meets_entry = buffer.handle != 0 && !buffer.is_written;
    if (buffer.state.kind == Kind::kCommute && access.mode == PTO_COMMUTE) access.meets_entry = buffer.handle != 0;
    collect(buffer.state, pool, access.mode, sink);
    record(buffer.state, pool, access.mode, self);
    buffer.is_written |= writes;
    return;
  }
  if (boxes_ == nullptr) {
    box_memory_.resize(RegionIndex::bytes_needed(kRecordedBoxes) + 64);
    auto* memory =
        reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(box_memory_.data()) + 63) & ~uintptr_t{63});
    boxes_ = std::make_unique<RegionIndex>(memory, kRecordedBoxes, true);
  }
  Handle shadow{};
  shadow.bytes = buffer.bytes;
  shadow.tree = buffer.tree;
  shadow.flags = buffer.has_regions ? uint32_t{kHasRegions} : 0u;
  shadow.state = buffer.state;
  if (!begin_boxes(*boxes_, number, shadow) || !ensure_box(*boxes_, number, shadow, box_of(shadow, region))) {
    throw_error(PTO_NO_MEMORY, "[runtime.record] a recording must use at most ", kRecordedBoxes,
                " boxes at once; got more; ", "record a smaller part");
  }
  buffer.has_regions = true;
  access.meets_entry = buffer.handle != 0;
  collect_boxes(*boxes_, number, shadow, region, access.mode, pool, sink);
  record_box(*boxes_, number, shadow, region, access.mode, pool, self);
  buffer.tree = shadow.tree;
  buffer.state = {};
  buffer.is_written |= writes;
  buffer.users.push_back(slot_of(self));
}

}  // namespace tilewise::tasks
