// The operations of the task runtime, one by one, in ticks of the time-stamp counter.
//
// Batches of 1,000 and more, timed with fenced reads of the counter, the empty pair subtracted; the result of every
// batch is checked. Prints one line per operation: name, state (warm or cold), median, p99 and minimum in ticks per
// operation. Compiled together with the sources of native/tasks by run.py, because most operations are not public.
// Run: ./operations PROCESSOR
#include <pthread.h>
#include <sched.h>
#include <x86intrin.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tasks/engine/pool.h"
#include "tasks/open.h"
#include "tasks/order/dependencies.h"
#include "tasks/replay/recordings.h"
#include "tasks/run/events.h"
#include "tasks/run/link.h"
#include "tasks/run/run.h"
#include "tasks/sched/thread_state.h"
#include "tasks/submit/buffers.h"
#include "tasks/submit/submit.h"
#include "tasks/wait/room.h"

namespace tilewise::tasks {

/// Single steps of one thread.
struct Probe {
  Engine& engine;
  uint32_t thread = current_thread(engine);

  uint32_t take_slot() { return tasks::take_slot(engine, thread); }
  void give_slot(uint32_t slot) {
    TaskWord::Word& word = engine.store.slots[slot].word;
    word.store(TaskWord::of_generation(TaskWord::generation_in(word.load(std::memory_order_relaxed)) + 1),
               std::memory_order_release);
  }
  uint64_t allocate(uint64_t bytes) { return allocate_heap(engine, thread, bytes); }
  ChunkPool pool() { return ChunkPool{engine, engine.thread_slot(thread)}; }
  void start(uint32_t slot) { engine.store.slots[slot].state.store(SlotState::kRunning); }
  uint32_t take() { return tasks::take(engine, thread, true); }
  uint32_t complete(uint32_t slot) { return tasks::complete(engine, slot, thread, PTO_OK, true); }
};

}  // namespace tilewise::tasks

using namespace tilewise::tasks;

namespace {

constexpr int kBatches = 60;

uint64_t begin_ticks() {
  _mm_lfence();
  return __rdtsc();
}

uint64_t end_ticks() {
  unsigned processor = 0;
  const uint64_t ticks = __rdtscp(&processor);
  _mm_lfence();
  return ticks;
}

double empty_pair() {
  std::vector<double> samples;
  for (int i = 0; i < 1001; ++i) {
    const uint64_t begin = begin_ticks();
    samples.push_back(static_cast<double>(end_ticks() - begin));
  }
  std::nth_element(samples.begin(), samples.begin() + 500, samples.end());
  return samples[500];
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "operations: %s does not hold; the figures would mean nothing\n", what);
  std::exit(1);
}

void print(const std::string& name, const char* state, std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const size_t n = samples.size();
  std::printf("%s|%s|%.1f|%.1f|%.1f\n", name.c_str(), state, samples[n / 2], samples[n * 99 / 100], samples[0]);
}

/// Times body(), which does `count` operations, once cold and kBatches times warm; between() restores, untimed.
template <class Body, class Between>
void measure(const std::string& name, int count, Body&& body, Between&& between) {
  const double overhead = empty_pair();
  std::vector<double> warm;
  for (int batch = 0; batch < kBatches + 3; ++batch) {
    const uint64_t begin = begin_ticks();
    body();
    const double ticks = (static_cast<double>(end_ticks() - begin) - overhead) / count;
    between();
    if (batch == 0) print(name, "cold", {ticks});
    if (batch >= 3) warm.push_back(ticks);
  }
  print(name, "warm", warm);
}

int count_kernel(void* const*, const uint64_t*) { return PTO_OK; }

/// The default window and no workers, so that nothing runs next to what is timed.
Options alone(uint32_t window = 1024) {
  Options options;
  options.num_workers = 0;
  options.window = window;
  options.max_handles = 32768;
  options.max_regions = 16384;
  return options;
}

void slots() {
  const auto engine = open_engine(alone());
  Probe probe{*engine};
  measure(
      "slot allocation and reclaim", 4000,
      [&] {
        for (int i = 0; i < 4000; ++i) {
          const uint32_t slot = probe.take_slot();
          probe.give_slot(slot);
        }
      },
      [] {});
}

void heap() {
  const auto engine = open_engine(alone());
  Probe probe{*engine};
  uint64_t sum = 0;
  measure(
      "heap allocation", 2000,
      [&] {
        begin_scope(*engine);
        for (int i = 0; i < 2000; ++i) sum += probe.allocate(256);
        end_scope(*engine);
      },
      [] {});
  require(sum != 0, "the heap gave addresses");
}

void handles() {
  const auto engine = open_engine(alone());
  Probe probe{*engine};
  std::vector<uint64_t> cells(4000);
  std::vector<pto_handle> names;
  for (uint64_t& cell : cells) names.push_back(register_buffer(*engine, &cell, 8));
  ChunkPool pool = probe.pool();
  uint64_t found = 0;
  measure(
      "handle insert", 4000,
      [&] {
        for (const pto_handle name : names)
          record(resolve(*engine, name, "bench").state, pool, PTO_INOUT, 1 << kFlagBits);
      },
      [] {});
  measure(
      "handle lookup", 4000,
      [&] {
        for (const pto_handle name : names) {
          collect(resolve(*engine, name, "bench").state, pool, PTO_INPUT, [&](TaskRef ref) { found += ref != 0; });
        }
      },
      [] {});
  require(found == 4000ull * (kBatches + 3), "every lookup found the writer");
}

void regions() {
  constexpr uint32_t kRows = 64;
  constexpr uint64_t kStride = 64 * 128 * 4;
  std::vector<std::byte> memory(RegionIndex::bytes_needed(16384) + 64);
  auto* aligned = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t{63});
  RegionIndex index(aligned, 16384, true);
  RegionTree tree;
  std::vector<Box> tiles;
  for (uint64_t r = 0; r < kRows; ++r) {
    for (uint64_t c = 0; c < 64; ++c) tiles.push_back({r * 32 * kStride + c * 512, 2, {32, 512}, {kStride, 1}});
  }
  std::vector<uint32_t> nodes(tiles.size());
  measure(
      "region insert", static_cast<int>(tiles.size()),
      [&] {
        for (size_t t = 0; t < tiles.size(); ++t) nodes[t] = index.insert(1, tree, tiles[t]);
      },
      [&] {
        require(index.num_live() == tiles.size(), "every tile has a node");
        for (const uint32_t node : nodes) index.remove(1, tree, node);
      });
  uint64_t met = 0;
  measure(
      "region insert, then one overlap query", static_cast<int>(tiles.size()),
      [&] {
        for (size_t t = 0; t < tiles.size(); ++t) nodes[t] = index.insert(1, tree, tiles[t]);
        index.overlapping(tree, tiles[7], [&](uint32_t, Overlap) { ++met; });  // files them all
      },
      [&] {
        for (const uint32_t node : nodes) index.remove(1, tree, node);
      });
  require(met == kBatches + 3, "each query met its own tile alone");
  for (size_t t = 0; t < tiles.size(); ++t) nodes[t] = index.insert(1, tree, tiles[t]);
  uint64_t sum = 0;
  measure(
      "region exact lookup", static_cast<int>(tiles.size()),
      [&] {
        for (const Box& tile : tiles) sum += index.find(1, tile);
      },
      [] {});
  require(sum > 0, "the tiles were found");
  RegionTree views;
  for (uint64_t v = 0; v < 120; ++v) {
    index.insert(2, views, {v * kStride, 2, {200, 4096 + v * 4}, {kStride, 1}});
  }
  uint64_t hits = 0;
  measure(
      "lookup among 120 overlapping views", 100,
      [&] {
        for (uint64_t v = 0; v < 100; ++v) {
          index.overlapping(views, {v * kStride, 2, {120, 2048}, {kStride, 1}}, [&](uint32_t, Overlap) { ++hits; });
        }
      },
      [] {});
  require(hits > 100ull * 100 * kBatches, "most of the 120 views overlap the query");
}

pto_task_spec plain(pto_kernel kernel, pto_param* params, uint32_t count) {
  pto_task_spec spec{};
  spec.kernel = kernel;
  spec.worker_type = PTO_VECTOR;
  spec.params = params;
  spec.num_params = count;
  return spec;
}

void submissions() {
  const auto engine = open_engine(alone());
  const pto_kernel kernel = engine->kernels.add("count", count_kernel, 0);
  std::vector<uint64_t> cells(3000);
  std::vector<pto_handle> names;
  for (uint64_t& cell : cells) names.push_back(register_buffer(*engine, &cell, 8));
  const auto drain = [&] { require(wait_all(*engine, PTO_FOREVER, true) == PTO_OK, "all tasks ended well"); };
  // Parameters are written before the submission is timed.
  std::vector<pto_param> params;
  for (int i = 0; i < 3000; ++i) params.push_back({i % 3 < 2 ? PTO_INPUT : PTO_INOUT, 0, names[i], 0, nullptr});
  measure(
      "submit, three parameters, no live producer", 1000,
      [&] {
        for (int i = 0; i < 1000; ++i) submit(*engine, plain(kernel, &params[3 * i], 3));
      },
      drain);
  const pto_event gate = open_event(*engine);
  uint64_t posted = 0;
  const auto hold = [&] {  // writers of the first cells, which cannot start
    for (int h = 0; h < 300; ++h) {
      pto_param param = {PTO_OUTPUT, 0, names[h], 0, nullptr, nullptr};
      const pto_wait_for wait{gate, posted + 1};
      pto_task_spec spec = plain(kernel, &param, 1);
      spec.waits = &wait;
      spec.num_waits = 1;
      submit(*engine, spec);
    }
  };
  hold();
  for (int i = 0; i < 2100; ++i) params[i] = {PTO_INPUT, 0, names[i % 300], 0, nullptr, nullptr};
  measure(
      "submit, three parameters, three live producers", 700,
      [&] {
        for (int i = 0; i < 700; ++i) submit(*engine, plain(kernel, &params[3 * i], 3));
      },
      [&] {
        post_event(*engine, gate, 1);
        ++posted;
        drain();
        hold();
      });
  post_event(*engine, gate, 1);
  drain();
}

void completions() {
  const auto engine = open_engine(alone(4096));
  Probe probe{*engine};
  const pto_kernel kernel = engine->kernels.add("count", count_kernel, 0);
  std::vector<uint64_t> cells(1000);
  std::vector<pto_handle> names;
  for (uint64_t& cell : cells) names.push_back(register_buffer(*engine, &cell, 8));
  std::vector<uint32_t> producers;
  const auto prepare = [&] {
    producers.clear();
    for (int i = 0; i < 1000; ++i) {
      pto_param write = {PTO_INOUT, 0, names[i], 0, nullptr, nullptr};
      submit(*engine, plain(kernel, &write, 1));
      producers.push_back(probe.take());
      require(producers.back() != kNone, "a producer is ready at once");
      for (int c = 0; c < 2; ++c) {
        pto_param read = {PTO_INPUT, 0, names[i], 0, nullptr, nullptr};
        submit(*engine, plain(kernel, &read, 1));
      }
    }
    for (const uint32_t slot : producers) probe.start(slot);
  };
  uint64_t next = 0;
  prepare();
  measure(
      "complete, two consumers", 1000,
      [&] {
        for (const uint32_t slot : producers) {
          const uint32_t successor = probe.complete(slot);
          next += successor != kNone;
          if (successor != kNone) producers.front() = slot;  // handed to this thread: run below
          probe.start(successor);
          probe.complete(successor);
        }
      },
      [&] {
        require(wait_all(*engine, PTO_FOREVER, true) == PTO_OK, "all tasks ended well");
        prepare();
      });
  require(next == 1000ull * (kBatches + 3), "each completion made its consumers ready");
  for (const uint32_t slot : producers) probe.complete(probe.complete(slot));
  wait_all(*engine, PTO_FOREVER, true);
}

void replays() {
  const auto engine = open_engine(alone());
  const pto_kernel kernel = engine->kernels.add("count", count_kernel, 0);
  constexpr int kSide = 32;
  std::vector<uint64_t> cells(kSide * kSide);
  std::vector<pto_handle> names;
  for (uint64_t& cell : cells) names.push_back(register_buffer(*engine, &cell, 8));
  recordings_of(*engine).begin();
  for (int i = 0; i < kSide; ++i) {
    for (int j = 0; j < kSide; ++j) {
      pto_param params[3] = {};
      uint32_t count = 0;
      if (i > 0) params[count++] = {PTO_INPUT, 0, names[(i - 1) * kSide + j], 0, nullptr, nullptr};
      if (j > 0) params[count++] = {PTO_INPUT, 0, names[i * kSide + j - 1], 0, nullptr, nullptr};
      params[count++] = {PTO_INOUT, 0, names[i * kSide + j], 0, nullptr, nullptr};
      submit(*engine, plain(kernel, params, count));
    }
  }
  const pto_recording recording = recordings_of(*engine).end();
  wait_all(*engine, PTO_FOREVER, true);
  const auto drain = [&] { require(wait_all(*engine, PTO_FOREVER, true) == PTO_OK, "all tasks ended well"); };
  measure(
      "replay of a wavefront, submission alone", kSide * kSide,
      [&] { recordings_of(*engine).replay(recording, nullptr, nullptr, 0); }, drain);
  measure(
      "replay of a wavefront, submission and running", kSide * kSide,
      [&] {
        recordings_of(*engine).replay(recording, nullptr, nullptr, 0);
        drain();
      },
      [] {});
}

}  // namespace

int main(int argc, char** argv) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(argc > 1 ? std::atoi(argv[1]) : 0, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
  slots();
  heap();
  handles();
  regions();
  submissions();
  completions();
  replays();
  return 0;
}
