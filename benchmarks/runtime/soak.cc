// Many tasks, constant memory: every kind of task mixed, 10^8 of them by default.
//
// Independent tasks, chains, readers next to readers, boxes, runtime-owned outputs in nested scopes, priorities, a
// failing task now and then, a long-living one that must not hold anything up. Resident memory is read after the first
// tenth and may grow afterwards by 4 MiB: how many scopes are in flight is a matter of timing, and a leak of one byte
// in twenty tasks would show. Prints one line per tenth. Exit status 1 when something does not hold. Build: linked with
// libtilewise_pto (see run.py). Run: ./soak [TASKS]
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tilewise/pto_api.h"

namespace {

int count(void* const* buffers, const uint64_t*) {
  ++*static_cast<uint64_t*>(buffers[0]);
  return PTO_OK;
}
int nothing(void* const*, const uint64_t*) { return PTO_OK; }
int fail(void* const*, const uint64_t*) { return 7; }

double resident_mib() {
  FILE* file = std::fopen("/proc/self/statm", "r");
  long total = 0;
  long resident = 0;
  if (file == nullptr || std::fscanf(file, "%ld %ld", &total, &resident) != 2) std::exit(1);
  std::fclose(file);
  return static_cast<double>(resident) * static_cast<double>(sysconf(_SC_PAGESIZE)) / (1 << 20);
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "soak: %s does not hold (%s)\n", what, pto_last_error());
  std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t total = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 100'000'000;
  PTORuntime* runtime = nullptr;
  require(pto_runtime_open(nullptr, &runtime) == PTO_OK, "the runtime opens");
  const pto_kernel count_kernel = pto_kernel_add(runtime, "count", count, 0);
  const pto_kernel nothing_kernel = pto_kernel_add(runtime, "nothing", nothing, 0);
  const pto_kernel fail_kernel = pto_kernel_add(runtime, "fail", fail, 0);
  const pto_event gate = pto_event_open(runtime);
  std::vector<uint64_t> cells(256);
  std::vector<pto_handle> handles;
  for (uint64_t& cell : cells) handles.push_back(pto_register(runtime, &cell, sizeof(cell)));
  std::vector<uint64_t> board(64 * 64);
  const pto_handle whole = pto_register(runtime, board.data(), board.size() * 8);
  pto_param held_param = {PTO_INOUT, 0, handles[255], 0, nullptr, nullptr};
  const pto_wait_for wait = {gate, 1};
  pto_task_spec held = {};  // lives through the whole run
  held.kernel = nothing_kernel;
  held.params = &held_param;
  held.num_params = 1;
  held.waits = &wait;
  held.num_waits = 1;
  require(pto_submit(runtime, &held) != 0, "the long-living task is submitted");

  uint64_t state = 1;
  uint64_t submitted = 1;
  uint64_t counted = 0;
  uint64_t failures = 0;
  double first_mib = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (int tenth = 1; tenth <= 10; ++tenth) {
    while (submitted < total / 10 * static_cast<uint64_t>(tenth)) {
      pto_scope_begin(runtime);
      for (int i = 0; i < 64; ++i) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        const uint32_t a = (state >> 33) % 128;
        const uint32_t b = 128 + (state >> 41) % 120;
        const uint32_t kind = (state >> 50) % 16;
        pto_param params[3] = {};
        pto_region box = {((state >> 20) % 32) * 512 + ((state >> 26) % 32) * 8, 2, {32, 256}, {512, 1}};
        pto_task_spec spec = {};
        spec.kernel = nothing_kernel;
        spec.worker_type = PTO_VECTOR;
        spec.params = params;
        if (kind < 8) {  // counts: readers of b, one writer of a
          params[0] = {PTO_INOUT, 0, handles[a], 0, nullptr, nullptr};
          params[1] = {PTO_INPUT, 0, handles[b], 0, nullptr, nullptr};
          spec.kernel = count_kernel;
          spec.num_params = 2;
          ++counted;
        } else if (kind < 11) {
          spec.priority = static_cast<int32_t>(kind) - 9;
        } else if (kind < 13) {
          params[0] = {kind == 11 ? PTO_INOUT : PTO_INPUT, 0, whole, 0, &box, nullptr};
          spec.num_params = 1;
        } else if (kind < 15) {  // an output of the runtime's own, and its reader in an inner scope
          params[0] = {PTO_OUTPUT, 0, 0, 64 + (state >> 12) % 4096, nullptr, nullptr};
          spec.num_params = 1;
          pto_scope_begin(runtime);
          require(pto_submit(runtime, &spec) != 0, "an output is allocated");
          ++submitted;
          params[0].mode = PTO_INPUT;
        } else {  // fails, and is overwritten at once, so that nothing else is poisoned
          params[0] = {PTO_OUTPUT, 0, handles[248], 0, nullptr, nullptr};
          spec.kernel = fail_kernel;
          spec.num_params = 1;
          ++failures;
        }
        require(pto_submit(runtime, &spec) != 0, "a task is submitted");
        ++submitted;
        if (kind == 13 || kind == 14) pto_scope_end(runtime);
      }
      pto_scope_end(runtime);
    }
    const double mib = resident_mib();
    if (tenth == 1) first_mib = mib;
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    std::printf("%11llu tasks  %6.1f s  %7.2f MiB resident\n", static_cast<unsigned long long>(submitted), seconds,
                mib);
    std::fflush(stdout);
    require(mib <= first_mib + 4, "resident memory stays where it was");
  }
  pto_event_post(runtime, gate, 1);
  require(pto_wait_all(runtime, PTO_FOREVER) == PTO_TASK_FAILED, "the failures are reported");
  pto_stats stats;
  pto_get_stats(runtime, &stats);
  require(stats.num_completed == submitted && stats.num_failed == failures,
          "every task ended, and only the planned failed");
  uint64_t sum = 0;
  for (int c = 0; c < 128; ++c) sum += cells[c];
  require(sum == counted, "every count arrived");
  require(pto_runtime_close(runtime) == PTO_OK, "the runtime closes");
  std::printf("all held\n");
  return 0;
}
