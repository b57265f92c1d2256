// The C interface of tile calls (tilewise/tile.h), and the kernels of the task runtime that run them.
//
// Each runtime gets an id per tile kernel at the kernel's first call, so traces name the kernel. All ids have one
// function, which makes the operands again from the task's scalars. Who may call: any thread. Blocks: as pto_submit;
// run also waits. Memory: per runtime the ids, and the words of calls that do not fit into a task's scalars: each
// distinct call once, until the runtime is closed, because recorded tasks may run at any time.
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/check.h"
#include "tiles/prepare.h"
#include "tiles/task_words.h"
#include "tilewise/tile.h"

namespace tilewise::tiles {

namespace {

using Words = std::vector<uint64_t>;

/// The data of one runtime.
struct RuntimeTiles {
  std::unique_ptr<std::atomic<pto_kernel>[]> ids{new std::atomic<pto_kernel>[rules().size() * kNumDtypes]};
  std::mutex lock;  // for `calls`, and for adding ids
  std::set<Words> calls;

  RuntimeTiles() {
    for (size_t i = 0; i < rules().size() * kNumDtypes; ++i) ids[i] = PTO_NO_KERNEL;
  }
};

void* make_tiles() { return new RuntimeTiles; }
void drop_tiles(void* data) { delete static_cast<RuntimeTiles*>(data); }

/// The working memory of kernels on this thread. Pages that no kernel touches use no memory.
class ThreadScratch {
 public:
  ThreadScratch() {
    void* memory = mmap(nullptr, kernels::kScratchBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check<ResourceError>(memory != MAP_FAILED, "[tile] working memory of a kernel must be available; got none; ",
                         "free some memory");
    data_ = static_cast<std::byte*>(memory);
  }
  ~ThreadScratch() { munmap(data_, kernels::kScratchBytes); }
  ThreadScratch(const ThreadScratch&) = delete;
  ThreadScratch& operator=(const ThreadScratch&) = delete;
  kernels::Scratch get() const { return {data_, kernels::kScratchBytes}; }

 private:
  std::byte* data_;
};

kernels::Scratch thread_scratch() {
  thread_local const ThreadScratch scratch;
  return scratch.get();
}

template <bool kHasScratch>
int run_kernel(void* const* buffers, const uint64_t* scalars) {
  const kernels::Scratch scratch = kHasScratch ? thread_scratch() : kernels::Scratch{nullptr, 0};
  read_words(scalars, buffers, scratch,
             [](uint32_t number, const kernels::KernelArgs& args) { entry_at(number).fn(args); });
  return PTO_OK;
}

/// Adds a kernel to the runtime. Returns a negative status after an error, which pto_last_error() has.
[[gnu::noinline]] pto_kernel add_id(RuntimeTiles& tiles, PTORuntime* runtime, const PreparedCall& call) {
  const std::lock_guard guard(tiles.lock);
  if (tiles.ids[call.number] >= 0) return tiles.ids[call.number];
  const pto_kernel id =
      pto_kernel_add(runtime, call.entry->name, call.rule->has_scratch ? run_kernel<true> : run_kernel<false>, 0);
  if (id >= 0) tiles.ids[call.number] = id;
  return id;
}

[[gnu::noinline]] const Words& keep_words(RuntimeTiles& tiles, const uint64_t* words, uint32_t count) {
  const std::lock_guard guard(tiles.lock);
  return *tiles.calls.emplace(words, words + count).first;
}

/// Returns 0 after an error of the task runtime, which pto_last_error() has; throws for errors of the call.
pto_task submit(PTORuntime* runtime, const pto_tile_call& tile_call, uint32_t flags) {
  void* const data = pto_runtime_data(runtime, make_tiles, drop_tiles);
  if (data == nullptr) return 0;
  auto& tiles = *static_cast<RuntimeTiles*>(data);
  PreparedCall call;
  prepare(runtime, tile_call, call);
  pto_task_spec spec;
  if (tile_call.options != nullptr) {
    spec = *tile_call.options;
  } else {
    std::memset(&spec, 0, sizeof(spec));
    spec.worker_type = PTO_VECTOR;
  }
  const pto_kernel id = tiles.ids[call.number].load(std::memory_order_acquire);
  spec.kernel = id >= 0 ? id : add_id(tiles, runtime, call);
  if (spec.kernel < 0) return 0;
  spec.params = call.params;
  spec.num_params = call.num_params;
  spec.flags |= flags;
  uint64_t words[kMaxWords];
  const uint32_t count = write_words(call, words);
  uint64_t apart[2];
  spec.scalars = words;
  spec.num_scalars = count;
  if (count > PTO_MAX_SCALARS) [[unlikely]] {
    Header header{};
    header.is_apart = 1;
    apart[0] = std::bit_cast<uint64_t>(header);
    apart[1] = reinterpret_cast<uintptr_t>(keep_words(tiles, words, count).data());
    spec.scalars = apart;
    spec.num_scalars = 2;
  }
  return pto_submit(runtime, &spec);
}

template <class Result, class Body>
Result guarded(Body&& body) {
  const auto failed = [](int status) { return static_cast<Result>(std::is_same_v<Result, pto_task> ? 0 : status); };
  try {
    return body();
  } catch (const ArgumentError& error) {
    return failed(pto_set_error(PTO_BAD_ARGUMENT, error.what()));
  } catch (const std::exception& error) {
    return failed(pto_set_error(PTO_NO_MEMORY, error.what()));
  }
}

void need(const void* pointer, const char* what) {
  check<ArgumentError>(pointer != nullptr, "[tile] ", what, " must not be NULL; got NULL; pass its address");
}

/// Fetches the error of a task that has failed.
[[gnu::noinline]] int failure_of(PTORuntime* runtime, pto_task task, int status) {
  char text[1024];
  pto_task_error(runtime, task, text, sizeof(text));
  return pto_set_error(status, text);
}

template <class Item>
void pack(const Item* from, int64_t stride, int64_t rows, int64_t cols, Item* to) {
  constexpr int64_t kPanel = 32, kStep = sizeof(Item) == 2 ? 2 : 1;
  const int64_t k_pad = (cols + 1) / 2 * 2;
  for (int64_t first = 0; first < rows; first += kPanel) {
    for (int64_t k = 0; k < k_pad; k += kStep) {
      for (int64_t r = first; r < first + kPanel; ++r) {
        for (int64_t s = k; s < k + kStep; ++s) *to++ = r < rows && s < cols ? from[r * stride + s] : Item{0};
      }
    }
  }
}

}  // namespace

}  // namespace tilewise::tiles

using namespace tilewise::tiles;

extern "C" {

pto_tile_kernel pto_tile_kernel_find(const char* name) {
  return guarded<int>([&] {
    need(name, "a kernel's name");
    for (size_t kernel = 0; kernel < rules().size(); ++kernel) {
      if (std::strcmp(rules()[kernel].base, name) == 0) return static_cast<int>(kernel);
    }
    tilewise::check<tilewise::ArgumentError>(
        false, "[tile] a tile call must name a kernel without its dtype, such as gelu; got '", name,
        "'; see tilewise/tile/kernels.h");
    return PTO_BAD_ARGUMENT + 0;
  });
}

pto_task pto_tile_submit(PTORuntime* runtime, const pto_tile_call* call) {
  return guarded<pto_task>([&] {
    need(call, "a call");
    return submit(runtime, *call, 0);
  });
}

int pto_tile_run(PTORuntime* runtime, const pto_tile_call* call) {
  return guarded<int>([&] {
    need(call, "a call");
    const pto_task task = submit(runtime, *call, PTO_KEEP | PTO_RUN_HERE);
    if (task == 0) return pto_last_status();
    const int status = pto_wait(runtime, task, PTO_FOREVER);
    if (status == PTO_TASK_FAILED || status == PTO_CANCELLED) [[unlikely]]
      failure_of(runtime, task, status);
    pto_task_release(runtime, task);
    return status;
  });
}

uint64_t pto_tile_packed_elements(int64_t rows, int64_t cols) { return packed_elements(rows, cols); }

int pto_tile_pack(pto_type type, const void* from, int64_t stride, int64_t rows, int64_t cols, void* panels) {
  return guarded<int>([&] {
    need(from, "a weight");
    need(panels, "the panels");
    tilewise::check<tilewise::ArgumentError>(
        (type == PTO_F32 || type == PTO_BF16) && packed_elements(rows, cols) != 0 && stride >= cols,
        "[tile.pack] a weight must be f32 or bf16 with at least one row and column; got type ", static_cast<int>(type),
        ", ", rows, " x ", cols, ", stride ", stride, "; correct it");
    if (type == PTO_F32) {
      pack(static_cast<const uint32_t*>(from), stride, rows, cols, static_cast<uint32_t*>(panels));
    } else {
      pack(static_cast<const uint16_t*>(from), stride, rows, cols, static_cast<uint16_t*>(panels));
    }
    return int{PTO_OK};
  });
}

}  // extern "C"
