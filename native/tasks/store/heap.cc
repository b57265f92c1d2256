// See heap.h.
#include "tasks/store/heap.h"

#include <algorithm>
#include <mutex>

#include "tasks/store/status.h"

namespace tilewise::tasks {

namespace {

uint32_t num_segments_for(uint64_t bytes) {
  return static_cast<uint32_t>(std::min<uint64_t>((bytes + kSegmentBytes - 1) / kSegmentBytes, 1u << 31));
}

// The first free run from the bottom: recently used memory is still in the cache, and untouched pages use no memory.
// Under the lock of HeapUse.
uint32_t find_run(const Store& store, uint32_t count) {
  const Header& header = *store.header;
  uint32_t length = 0;
  for (uint32_t at = header.heap_use.cursor; at < header.num_segments; ++at) {
    length = store.segments[at].is_used != 0 ? 0 : length + 1;
    if (length == count) return at + 1 - count;
  }
  return kNone;
}

uint32_t take_run(const Store& store, uint32_t count) {
  Header& header = *store.header;
  std::lock_guard guard(header.heap_use.lock);
  const uint32_t first = find_run(store, count);
  if (first == kNone) return kNone;
  for (uint32_t s = first; s < first + count; ++s) {
    store.segments[s].is_used = 1;
    store.segments[s].first = first;
  }
  store.segments[first].run = count;
  if (first == header.heap_use.cursor) header.heap_use.cursor = first + count;
  const uint32_t used = header.heap_use.used.load(std::memory_order_relaxed) + count;
  header.heap_use.used.store(used, std::memory_order_relaxed);
  if (used > header.heap_use.high.load(std::memory_order_relaxed)) {
    header.heap_use.high.store(used, std::memory_order_relaxed);
  }
  return first;
}

void give_run(const Store& store, uint32_t first) {
  Header& header = *store.header;
  std::lock_guard guard(header.heap_use.lock);
  const uint32_t count = store.segments[first].run;
  for (uint32_t s = first; s < first + count; ++s) store.segments[s].is_used = 0;
  header.heap_use.cursor = std::min(header.heap_use.cursor, first);
  header.heap_use.used.store(header.heap_use.used.load(std::memory_order_relaxed) - count, std::memory_order_relaxed);
}

}  // namespace

uint64_t heap_in_new_run(const Store& store, Scope& scope, uint32_t thread, uint64_t bytes) {
  const Header& header = *store.header;
  const uint32_t count = num_segments_for(bytes);
  if (count > header.num_segments) {
    throw_error(PTO_NO_MEMORY, "[runtime.submit] one task's outputs must fit the heap; got ", bytes, " bytes against ",
                uint64_t{header.num_segments} * kSegmentBytes, "; increase heap_bytes");
  }
  const uint32_t first = take_run(store, count);
  if (first == kNone) return 0;
  Segment& run = store.segments[first];
  run.loan.open();
  run.owner = thread;
  run.next = scope.first_segment;
  scope.first_segment = first + 1;
  const uint64_t left = uint64_t{count} * kSegmentBytes - bytes;
  const uint64_t old_left =
      scope.current == 0 ? 0 : uint64_t{store.segments[scope.current - 1].run} * kSegmentBytes - scope.offset;
  if (left >= old_left) {
    scope.current = first + 1;
    scope.offset = bytes;
  }
  return header.heap + uint64_t{first} * kSegmentBytes;
}

bool has_run(const Store& store, uint64_t bytes) {
  std::lock_guard guard(store.header->heap_use.lock);
  return find_run(store, num_segments_for(bytes)) != kNone;
}

void use_heap(const Store& store, uint64_t address, uint32_t thread) {
  const uint64_t segment = (address - store.header->heap) / kSegmentBytes;
  Segment& run = store.segments[store.segments[segment].first];
  if (run.owner == thread) {
    run.loan.use();
  } else {
    run.loan.use_of_another();
  }
}

bool release_heap(const Store& store, const Slot& slot, const SlotArgs& args) {
  bool is_free = false;
  uint32_t last = kNone;
  int64_t count = 0;
  const auto release = [&] {
    if (last == kNone || !store.segments[last].loan.give_back(count)) return;
    give_run(store, last);
    is_free = true;
  };
  for (uint32_t p = 0; p < slot.num_params; ++p) {
    if (!store.lies_in_heap(args.params[p].address)) continue;
    const uint32_t first = store.segments[(args.params[p].address - store.header->heap) / kSegmentBytes].first;
    if (first != last) {
      release();
      last = first;
      count = 0;
    }
    ++count;
  }
  release();
  return is_free;
}

bool release_runs(const Store& store, const Scope& scope) {
  bool is_free = false;
  for (uint32_t s = scope.first_segment; s != 0;) {
    Segment& run = store.segments[s - 1];
    const uint32_t next = run.next;
    if (run.loan.close()) {
      give_run(store, s - 1);
      is_free = true;
    }
    s = next;
  }
  return is_free;
}

}  // namespace tilewise::tasks
