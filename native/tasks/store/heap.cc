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

// The first free run from the bottom: memory that was used a moment ago is still in the cache, and pages that are never
// reached cost nothing. segment_cursor: no free segment lies below it. Under heap_lock.
uint32_t find_run(const Region& region, uint32_t count) {
  const Header& header = *region.header;
  uint32_t length = 0;
  for (uint32_t at = header.segment_cursor; at < header.num_segments; ++at) {
    length = region.segments[at].is_used != 0 ? 0 : length + 1;
    if (length == count) return at + 1 - count;
  }
  return kNone;
}

uint32_t take_run(const Region& region, uint32_t count) {
  Header& header = *region.header;
  std::lock_guard guard(header.heap_lock);
  const uint32_t first = find_run(region, count);
  if (first == kNone) return kNone;
  for (uint32_t s = first; s < first + count; ++s) {
    region.segments[s].is_used = 1;
    region.segments[s].first = first;
  }
  region.segments[first].run = count;
  if (first == header.segment_cursor) header.segment_cursor = first + count;
  const uint32_t used = header.segments_used.load(std::memory_order_relaxed) + count;
  header.segments_used.store(used, std::memory_order_relaxed);
  if (used > header.segments_high.load(std::memory_order_relaxed)) {
    header.segments_high.store(used, std::memory_order_relaxed);
  }
  return first;
}

void give_run(const Region& region, uint32_t first) {
  Header& header = *region.header;
  std::lock_guard guard(header.heap_lock);
  const uint32_t count = region.segments[first].run;
  for (uint32_t s = first; s < first + count; ++s) region.segments[s].is_used = 0;
  header.segment_cursor = std::min(header.segment_cursor, first);
  header.segments_used.store(header.segments_used.load(std::memory_order_relaxed) - count, std::memory_order_relaxed);
}

}  // namespace

uint64_t heap_in_new_run(const Region& region, Scope& scope, uint32_t seat, uint64_t bytes) {
  const Header& header = *region.header;
  const uint32_t count = num_segments_for(bytes);
  if (count > header.num_segments) {
    raise(PTO_NO_MEMORY, "[runtime.submit] one task's outputs must fit the heap; got ", bytes, " bytes against ",
          uint64_t{header.num_segments} * kSegmentBytes, "; raise heap_bytes");
  }
  const uint32_t first = take_run(region, count);
  if (first == kNone) return 0;
  Segment& run = region.segments[first];
  run.loan.open();
  run.owner = seat;
  run.next = scope.first_segment;
  scope.first_segment = first + 1;
  const uint64_t left = uint64_t{count} * kSegmentBytes - bytes;
  const uint64_t old_left =
      scope.current == 0 ? 0 : uint64_t{region.segments[scope.current - 1].run} * kSegmentBytes - scope.offset;
  if (left >= old_left) {
    scope.current = first + 1;
    scope.offset = bytes;
  }
  return header.heap + uint64_t{first} * kSegmentBytes;
}

bool has_run(const Region& region, uint64_t bytes) {
  std::lock_guard guard(region.header->heap_lock);
  return find_run(region, num_segments_for(bytes)) != kNone;
}

void use_heap(const Region& region, uint64_t address, uint32_t seat) {
  const uint64_t segment = (address - region.header->heap) / kSegmentBytes;
  Segment& run = region.segments[region.segments[segment].first];
  if (run.owner == seat) {
    run.loan.use();
  } else {
    run.loan.use_of_another();
  }
}

bool release_heap(const Region& region, const Slot& slot, const SlotArgs& args) {
  bool is_free = false;
  uint32_t last = kNone;
  int64_t count = 0;
  const auto release = [&] {
    if (last == kNone || !region.segments[last].loan.give_back(count)) return;
    give_run(region, last);
    is_free = true;
  };
  for (uint32_t p = 0; p < slot.num_params; ++p) {
    if (!region.lies_in_heap(args.params[p].address)) continue;
    const uint32_t first = region.segments[(args.params[p].address - region.header->heap) / kSegmentBytes].first;
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

bool release_runs(const Region& region, const Scope& scope) {
  bool is_free = false;
  for (uint32_t s = scope.first_segment; s != 0;) {
    Segment& run = region.segments[s - 1];
    const uint32_t next = run.next;
    if (run.loan.close()) {
      give_run(region, s - 1);
      is_free = true;
    }
    s = next;
  }
  return is_free;
}

}  // namespace tilewise::tasks
