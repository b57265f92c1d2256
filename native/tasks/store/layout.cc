// See layout.h.
#include "tasks/store/layout.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/populate.h"
#include "tasks/regions/region_index.h"

namespace tilewise::tasks {

namespace {

constexpr uint64_t kMagic = 0x355f4f54505f5754;  // layouts of other versions have another value

/// Assigns consecutive page-aligned offsets, so that touching one part touches no page of another.
struct Cursor {
  uint64_t end = 0;
  uint64_t take(uint64_t bytes) {
    const uint64_t begin = end;
    end += (bytes + 4095) & ~uint64_t{4095};
    return begin;
  }
};

uint32_t set_classes(const Options& options, Header& header) {
  uint32_t served[kNumTypes] = {};  // per type: mask of its workers
  for (uint32_t type = 0; type < kNumTypes; ++type) {
    for (uint32_t w = 0; w < options.num_workers; ++w) {
      if ((options.worker_types[w] >> type & 1) != 0) served[type] |= 1u << std::min(w, 31u);
    }
  }
  uint32_t count = 0;
  for (uint32_t type = 0; type < kNumTypes; ++type) {
    uint32_t class_id = count;
    for (uint32_t other = 0; other < type && class_id == count; ++other) {
      const bool both_help = !options.has_types || ((type == PTO_AI_CPU) == (other == PTO_AI_CPU));
      const bool same_mask = std::all_of(options.worker_types, options.worker_types + options.num_workers,
                                         [&](uint8_t mask) { return (mask >> type & 1) == (mask >> other & 1); });
      if (both_help && same_mask) class_id = header.class_of_type[other];
    }
    header.class_of_type[type] = class_id;
    if (class_id == count) ++count;
  }
  header.helper_classes = options.has_types ? 1u << header.class_of_type[PTO_AI_CPU] : (1u << count) - 1;
  return count;
}

void lay_out(const Options& options, Header& header) {
  header.magic = kMagic;
  header.num_workers = options.num_workers;
  header.num_thread_slots = options.num_workers + options.max_submitters;
  header.window = options.window;
  header.num_classes = set_classes(options, header);
  header.max_handles = options.max_handles;
  header.max_regions = options.max_regions;
  header.max_events = options.max_events;
  header.num_segments = static_cast<uint32_t>((options.heap_bytes + kSegmentBytes - 1) / kSegmentBytes);
  header.is_shared = options.shared_path != nullptr ? 1 : 0;
  const uint64_t num_slots = uint64_t{header.num_thread_slots} * header.window;
  // Instantiated graphs contain addresses of this process.
  const uint64_t num_replayable =
      header.is_shared != 0 ? 0 : std::min<uint64_t>(options.max_replayable, (1u << kSlotBits) - num_slots);
  header.num_replayable = static_cast<uint32_t>(num_replayable);
  header.num_slots = static_cast<uint32_t>(num_slots + num_replayable);
  const uint64_t num_chunks = options.max_chunks != 0 ? options.max_chunks : 4 * num_slots + options.max_handles;
  header.max_chunks = static_cast<uint32_t>(std::min<uint64_t>(num_chunks, kNone - 1));
  header.failed_capacity = 1024;
  while (header.failed_capacity < 2 * (num_slots + options.max_handles)) header.failed_capacity *= 2;
  header.num_queues = kNumSharedQueues * header.num_classes + header.num_workers;
  Cursor cursor;
  cursor.take(sizeof(Header));
  header.at.thread_slots = cursor.take(header.num_thread_slots * sizeof(ThreadSlot));
  header.at.slots = cursor.take(header.num_slots * sizeof(Slot));
  header.at.args = cursor.take(num_slots * sizeof(SlotArgs));
  header.at.declared = cursor.take(num_slots * PTO_MAX_PARAMS * sizeof(pto_region));
  header.at.notes = cursor.take(num_slots * sizeof(TaskNotes));
  header.at.handles = cursor.take(uint64_t{header.max_handles} * sizeof(Handle));
  header.at.regions = cursor.take(RegionIndex::bytes_needed(header.max_regions));
  header.at.chunks = cursor.take(uint64_t{header.max_chunks} * sizeof(Chunk));
  header.at.rings = cursor.take(uint64_t{header.num_thread_slots} * header.num_classes * sizeof(Ring));
  header.at.queues = cursor.take(header.num_queues * sizeof(OrderedQueue));
  header.at.entries = cursor.take(uint64_t{header.num_queues} * header.num_slots * sizeof(OrderedEntry));
  header.at.events = cursor.take(uint64_t{header.max_events} * sizeof(Event));
  header.at.segments = cursor.take(uint64_t{header.num_segments} * sizeof(Segment));
  header.at.errors = cursor.take(kMaxErrors * sizeof(ErrorRecord));
  header.at.failed = cursor.take(uint64_t{header.failed_capacity} * sizeof(FailedTask));
  header.at.kernels = cursor.take(kMaxKernels * sizeof(KernelName));
  header.at.traces = cursor.take(header.is_shared != 0 ? header.num_workers * sizeof(SharedTrace) : 0);
  header.heap = cursor.take(uint64_t{header.num_segments} * kSegmentBytes);
  header.total_bytes = cursor.end;
}

Store locate(std::byte* base) {
  Store store;
  store.base = base;
  store.header = reinterpret_cast<Header*>(base);
  const Header& h = *store.header;
  store.thread_slots = reinterpret_cast<ThreadSlot*>(base + h.at.thread_slots);
  store.slots = reinterpret_cast<Slot*>(base + h.at.slots);
  store.args = reinterpret_cast<SlotArgs*>(base + h.at.args);
  store.declared = reinterpret_cast<pto_region*>(base + h.at.declared);
  store.notes = reinterpret_cast<TaskNotes*>(base + h.at.notes);
  store.handles = reinterpret_cast<Handle*>(base + h.at.handles);
  store.regions = base + h.at.regions;
  store.chunks = reinterpret_cast<Chunk*>(base + h.at.chunks);
  store.rings = reinterpret_cast<Ring*>(base + h.at.rings);
  store.queues = reinterpret_cast<OrderedQueue*>(base + h.at.queues);
  store.events = reinterpret_cast<Event*>(base + h.at.events);
  store.segments = reinterpret_cast<Segment*>(base + h.at.segments);
  store.errors = reinterpret_cast<ErrorRecord*>(base + h.at.errors);
  store.failed = reinterpret_cast<FailedTask*>(base + h.at.failed);
  store.kernels = reinterpret_cast<KernelName*>(base + h.at.kernels);
  store.traces = h.is_shared != 0 ? reinterpret_cast<SharedTrace*>(base + h.at.traces) : nullptr;
  store.heap = base + h.heap;
  return store;
}

std::byte* map(int file, uint64_t bytes) {
  const int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED | MAP_NORESERVE;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
}

void check_made(bool is_made, const char* path) {
  check<ArgumentError>(is_made, "[runtime.open] shared_path must be a new file in a writable directory; got '", path,
                       "' (", std::strerror(errno), "); remove it or choose another");
}

/// The file's temporary name until the store is complete.
std::string name_of_part(const char* path) { return std::string(path) + ".part-" + std::to_string(getpid()); }

std::byte* map_new_file(const char* path, uint64_t bytes) {
  const std::string part = name_of_part(path);
  const int file = open(part.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  check_made(file >= 0, path);
  std::byte* base = ftruncate(file, static_cast<off_t>(bytes)) == 0 ? map(file, bytes) : nullptr;
  close(file);
  if (base == nullptr) unlink(part.c_str());
  return base;
}

}  // namespace

uint64_t store_bytes(const Options& options) {
  Header header{};
  lay_out(options, header);
  return header.total_bytes;
}

Store make_store(const Options& options) {
  Header header{};
  lay_out(options, header);
  std::byte* base = options.shared_path != nullptr ? map_new_file(options.shared_path, header.total_bytes)
                                                   : map(-1, header.total_bytes);
  check<ResourceError>(base != nullptr, "[runtime.open] the system must map the runtime's memory; got no memory for ",
                       ByteCount(header.total_bytes), "; use a smaller heap, window or fewer submitters");
  std::memcpy(static_cast<void*>(base), &header, offsetof(Header, submit_lock));
  const Store store = locate(base);
  store.header->pools.reclaim_below = header.max_chunks / 2;
  for (uint64_t q = 0; q < header.num_queues; ++q) {
    store.queues[q].entries_offset = header.at.entries + q * header.num_slots * sizeof(OrderedEntry);
  }
  RegionIndex(store.regions, header.max_regions, true);
  return store;
}

void publish_store(const char* path) {
  const std::string part = name_of_part(path);
  const bool is_made = link(part.c_str(), path) == 0;  // an existing file may belong to a live runtime
  const int error = errno;
  drop_part(path);
  errno = error;
  check_made(is_made, path);
}

void drop_part(const char* path) { unlink(name_of_part(path).c_str()); }

Store attach_store(const char* path) {
  const int file = open(path, O_RDWR | O_CLOEXEC);
  check<ArgumentError>(file >= 0, "[runtime.workers_run] the path must be a runtime's shared file; got '", path, "' (",
                       std::strerror(errno), "); start the orchestrator first");
  struct stat info{};
  const bool is_large = fstat(file, &info) == 0 && info.st_size >= static_cast<off_t>(sizeof(Header));
  std::byte* base = is_large ? map(file, static_cast<uint64_t>(info.st_size)) : nullptr;
  close(file);
  const bool is_ours = base != nullptr && reinterpret_cast<Header*>(base)->magic == kMagic &&
                       reinterpret_cast<Header*>(base)->total_bytes == static_cast<uint64_t>(info.st_size);
  if (base != nullptr && !is_ours) munmap(base, static_cast<size_t>(info.st_size));
  check<ArgumentError>(is_ours, "[runtime.workers_run] the path must be a runtime's shared file; got '", path,
                       "', which another program or version wrote; use the orchestrator's shared_path");
  return locate(base);
}

void unmap_store(const Store& store) {
  if (store.base != nullptr) munmap(store.base, store.header->total_bytes);
}

void populate(const Store& store, uint32_t thread) {
  const uint64_t window = store.header->window;
  tilewise::populate(store.slots + thread * window, window * sizeof(Slot));
  tilewise::populate(store.args + thread * window, window * sizeof(SlotArgs));
}

uint64_t resident_bytes(const std::byte* base, uint64_t bytes) {
  constexpr uint64_t kPage = 4096;
  std::vector<unsigned char> pages((bytes + kPage - 1) / kPage);
  if (mincore(const_cast<std::byte*>(base), bytes, pages.data()) != 0) return bytes;
  return kPage * static_cast<uint64_t>(std::count_if(pages.begin(), pages.end(), [](auto page) { return page & 1; }));
}

}  // namespace tilewise::tasks
