// The task runtime with two and three threads: throughput of patterns, start latency, memory.
//
// One worker and a helping submitter are two threads. Every pattern checks its number of tasks, and chain and wavefront
// their order (each task must find the sequence number its predecessors left). Prints one line per figure:
// name, median, p99 and minimum of the repetitions, in the unit that run.py knows.
// Build: linked with libtilewise_pto (see run.py). Run: ./threads WORKERS REPETITIONS
#include <x86intrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "tilewise/pto_api.h"

namespace {

constexpr int kSide = 300;
constexpr int kTasks = 200000;

double now_ns() {
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "threads: %s does not hold (%s); the figures would mean nothing\n", what, pto_last_error());
  std::exit(1);
}

void print(const char* name, std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const size_t n = samples.size();
  std::printf("%s|%.2f|%.2f|%.2f\n", name, samples[n / 2], samples[std::min(n - 1, n * 99 / 100)], samples[0]);
}

int empty(void* const*, const uint64_t*) { return PTO_OK; }

// One more than the largest of what the task reads; with a scalar, exactly that many.
int step(void* const* buffers, const uint64_t* scalars) {
  uint64_t most = 0;
  for (uint64_t b = 0; b < scalars[0]; ++b) most = std::max(most, *static_cast<uint64_t*>(buffers[b]));
  *static_cast<uint64_t*>(buffers[scalars[0] - 1]) = most + 1;
  return PTO_OK;
}

std::atomic<uint64_t> started_at{0};
int note_start(void* const*, const uint64_t*) {
  started_at.store(__rdtsc(), std::memory_order_release);
  return PTO_OK;
}

// The worker's half of a game of round trips with the submitter.
constexpr uint64_t kTrips = 2000;
alignas(64) std::atomic<uint64_t> ball{0};
int answer(void* const*, const uint64_t*) {
  for (uint64_t trip = 0; trip < kTrips; ++trip) {
    while (ball.load(std::memory_order_acquire) != 2 * trip + 1) {
    }
    ball.store(2 * trip + 2, std::memory_order_release);
  }
  return PTO_OK;
}

struct Bench {
  PTORuntime* runtime = nullptr;
  pto_kernel empty_kernel = 0;
  pto_kernel step_kernel = 0;
  std::vector<uint64_t> cells = std::vector<uint64_t>(kSide * kSide);
  std::vector<pto_handle> handles;

  explicit Bench(uint32_t workers) {
    pto_config config;
    pto_config_init(&config);
    config.num_workers = workers;
    config.max_handles = kSide * kSide + 100;
    require(pto_runtime_open(&config, &runtime) == PTO_OK, "the runtime opens");
    empty_kernel = pto_kernel_add(runtime, "empty", empty, 0);
    step_kernel = pto_kernel_add(runtime, "step", step, 0);
    for (uint64_t& cell : cells) handles.push_back(pto_register(runtime, &cell, sizeof(cell)));
  }
  ~Bench() { pto_runtime_close(runtime); }

  uint64_t completed() {
    pto_stats stats;
    pto_get_stats(runtime, &stats);
    return stats.num_completed;
  }

  template <class Submit>
  double time(int tasks, Submit&& submit) {
    const uint64_t before = completed();
    const double begin = now_ns();
    submit();
    require(pto_wait_all(runtime, PTO_FOREVER) == PTO_OK, "all tasks ended well");
    const double spent = now_ns() - begin;
    require(completed() - before == static_cast<uint64_t>(tasks), "every task ran");
    return spent / tasks;
  }

  double independent() {
    return time(kTasks, [&] {
      for (int i = 0; i < kTasks; ++i) pto_submit_task(runtime, empty_kernel, PTO_VECTOR, nullptr, 0);
    });
  }

  void submit_step(const pto_handle* reads, uint32_t num_reads, pto_handle own) {
    pto_param params[3] = {};
    for (uint32_t r = 0; r < num_reads; ++r) params[r] = {PTO_INPUT, 0, reads[r], 0, nullptr, nullptr};
    params[num_reads] = {PTO_INOUT, 0, own, 0, nullptr, nullptr};
    const uint64_t count = num_reads + 1;
    pto_task_spec spec = {};
    spec.kernel = step_kernel;
    spec.worker_type = PTO_VECTOR;
    spec.params = params;
    spec.num_params = num_reads + 1;
    spec.scalars = &count;
    spec.num_scalars = 1;
    pto_submit(runtime, &spec);
  }

  double chain() {
    std::fill(cells.begin(), cells.end(), 0);
    const double ns = time(kTasks, [&] {
      for (int i = 0; i < kTasks; ++i) submit_step(nullptr, 0, handles[0]);
    });
    require(cells[0] == kTasks, "the chain counted every task");
    return ns;
  }

  double wavefront() {
    std::fill(cells.begin(), cells.end(), 0);
    const double ns = time(kSide * kSide, [&] {
      for (int i = 0; i < kSide; ++i) {
        for (int j = 0; j < kSide; ++j) {
          pto_handle reads[2];
          uint32_t count = 0;
          if (i > 0) reads[count++] = handles[(i - 1) * kSide + j];
          if (j > 0) reads[count++] = handles[i * kSide + j - 1];
          submit_step(reads, count, handles[i * kSide + j]);
        }
      }
    });
    require(cells[kSide * kSide - 1] == 2 * kSide - 1, "the wavefront kept its order");
    return ns;
  }

  // Ticks of a cache line's way from this thread to the worker and back, now.
  double round_trip(pto_kernel kernel) {
    ball.store(0);
    pto_submit_task(runtime, kernel, PTO_VECTOR, nullptr, 0);
    uint64_t begin = 0;
    for (uint64_t trip = 0; trip < kTrips; ++trip) {
      if (trip == 1) begin = __rdtsc();  // the worker has come
      ball.store(2 * trip + 1, std::memory_order_release);
      while (ball.load(std::memory_order_acquire) != 2 * trip + 2) {
      }
    }
    const double spent = static_cast<double>(__rdtsc() - begin);
    pto_wait_all(runtime, PTO_FOREVER);
    return spent / (kTrips - 1);
  }

  // The worker spins: it had a task 50 us ago at most. Ticks from the call of submit to the kernel's first instruction;
  // and between them, by the same two threads, the round trips.
  std::vector<double> latencies(std::vector<double>& trips) {
    const pto_kernel kernel = pto_kernel_add(runtime, "note_start", note_start, 0);
    const pto_kernel partner = pto_kernel_add(runtime, "answer", answer, 0);
    std::vector<double> samples;
    for (int i = 0; i < 3000; ++i) {
      if (i % 30 == 0) trips.push_back(round_trip(partner));
      const double until = now_ns() + 30000;
      while (now_ns() < until) _mm_pause();
      started_at.store(0);
      const uint64_t begin = __rdtsc();
      pto_submit_task(runtime, kernel, PTO_VECTOR, nullptr, 0);
      while (started_at.load(std::memory_order_acquire) == 0) _mm_pause();
      samples.push_back(static_cast<double>(started_at.load()) - static_cast<double>(begin));
      pto_wait_all(runtime, PTO_FOREVER);
    }
    return samples;
  }
};

}  // namespace

int main(int argc, char** argv) {
  const int workers = argc > 1 ? std::atoi(argv[1]) : 1;
  const int repetitions = argc > 2 ? std::atoi(argv[2]) : 9;
  {
    pto_config config;
    pto_config_init(&config);
    config.num_workers = static_cast<uint32_t>(workers);
    PTORuntime* runtime = nullptr;
    require(pto_runtime_open(&config, &runtime) == PTO_OK, "the runtime opens");
    const pto_kernel kernel = pto_kernel_add(runtime, "empty", empty, 0);
    std::vector<uint64_t> cells(1000);
    std::vector<pto_handle> names;
    for (uint64_t& cell : cells) names.push_back(pto_register(runtime, &cell, 8));
    for (int i = 0; i < 100000; ++i) {
      pto_param params[2] = {{PTO_INPUT, 0, names[i % 1000], 0, nullptr, nullptr},
                             {PTO_INOUT, 0, names[(i + 7) % 1000], 0, nullptr, nullptr}};
      pto_submit_task(runtime, kernel, PTO_VECTOR, params, 2);
    }
    pto_wait_all(runtime, PTO_FOREVER);
    pto_stats stats;
    pto_get_stats(runtime, &stats);
    print("memory_bytes", {static_cast<double>(stats.metadata_bytes)});
    pto_runtime_close(runtime);
  }
  Bench bench(static_cast<uint32_t>(workers));
  std::vector<double> independent, chain, wavefront;
  for (int r = 0; r < repetitions; ++r) {
    independent.push_back(bench.independent());
    chain.push_back(bench.chain());
    wavefront.push_back(bench.wavefront());
  }
  print("independent_ns", independent);
  print("chain_ns", chain);
  print("wavefront_ns", wavefront);
  std::vector<double> trips;
  print("start_ticks", bench.latencies(trips));
  print("trip_ticks", trips);
  return 0;
}
