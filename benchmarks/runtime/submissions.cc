// A number of submissions of one kind, for an instruction counter. The window is wider than the number, so that nothing
// is run or reclaimed inside a submission. Run under valgrind by run.py: ./submissions none|one|three TASKS
#include <cstdlib>
#include <cstring>
#include <vector>

#include "tilewise/pto_api.h"

static int nothing(void* const*, const uint64_t*) { return PTO_OK; }

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const uint32_t count = std::strcmp(argv[1], "three") == 0 ? 3 : std::strcmp(argv[1], "one") == 0 ? 1 : 0;
  const int tasks = std::atoi(argv[2]);
  pto_config config;
  pto_config_init(&config);
  config.num_workers = PTO_NO_WORKERS;
  PTORuntime* runtime = nullptr;
  if (pto_runtime_open(&config, &runtime) != PTO_OK) return 1;
  const pto_kernel kernel = pto_kernel_add(runtime, "nothing", nothing, 0);
  std::vector<uint64_t> cells(3000);
  std::vector<pto_handle> handles;
  for (uint64_t& cell : cells) handles.push_back(pto_register(runtime, &cell, sizeof(cell)));
  for (int i = 0; i < tasks; ++i) {
    pto_param params[3] = {};
    for (uint32_t p = 0; p < count; ++p) {
      params[p] = {p < 2 ? PTO_INPUT : PTO_INOUT, 0, handles[3 * i + p], 0, nullptr, nullptr};
    }
    if (pto_submit_task(runtime, kernel, PTO_VECTOR, params, count) == 0) return 1;
  }
  return pto_wait_all(runtime, PTO_FOREVER) == PTO_OK && pto_runtime_close(runtime) == PTO_OK ? 0 : 1;
}
