// Tilewise: one thread submits and helps, THREADS - 1 workers run; with one thread the submitter runs all.
// Buffers are registered before the clock starts. `submit` times submitting and running; `replay` submits a recording
// of the pattern again.
// Build: g++ -O2 -std=c++20 -I<include> tilewise.cpp -L<library> -ltilewise_pto
// Run: ./tilewise THREADS REPETITIONS PATTERN
#include <vector>

#include "tilewise/pto_api.h"
#include "workload.h"

struct Program {
  PTORuntime* runtime = nullptr;
  pto_kernel count = 0, touch = 0, fold = 0;
  std::vector<pto_handle> handles;
  pto_recording recording = 0;
};

static void require(bool is_good, const char* call) {
  if (is_good) return;
  fprintf(stderr, "%s failed: %s\n", call, pto_last_error());
  exit(1);
}

static int count_kernel(void* const*, const uint64_t*) {
  count_task();
  return PTO_OK;
}

static int touch_kernel(void* const* buffers, const uint64_t*) {
  run_touch(static_cast<uint64_t*>(buffers[0]));
  return PTO_OK;
}

static int fold_kernel(void* const* buffers, const uint64_t*) {
  run_fold(static_cast<const uint64_t*>(buffers[0]), static_cast<const uint64_t*>(buffers[1]),
           static_cast<uint64_t*>(buffers[2]));
  return PTO_OK;
}

static void submit_all(const Workload* workload, Program& program) {
  const pto_handle* handles = program.handles.data();
  pto_param params[3] = {};
  bool is_good = true;
  if (workload->cells_per_task == 0) {
    for (int i = 0; i < workload->num_tasks; ++i)
      is_good &= pto_submit_task(program.runtime, program.count, PTO_VECTOR, nullptr, 0) != 0;
  } else if (workload->cells_per_task == 1) {
    params[0].mode = PTO_INOUT;
    for (int i = 0; i < workload->num_tasks; ++i) {
      params[0].handle = handles[workload->tasks[i].target];
      is_good &= pto_submit_task(program.runtime, program.touch, PTO_VECTOR, params, 1) != 0;
    }
  } else {
    params[0].mode = params[1].mode = PTO_INPUT;
    params[2].mode = PTO_INOUT;
    for (int i = 0; i < workload->num_tasks; ++i) {
      const Access& access = workload->tasks[i];
      params[0].handle = handles[access.first];
      params[1].handle = handles[access.second];
      params[2].handle = handles[access.target];
      is_good &= pto_submit_task(program.runtime, program.fold, PTO_VECTOR, params, 3) != 0;
    }
  }
  require(is_good, "pto_submit_task");
}

static void run(const Workload* workload, void* context) {
  Program& program = *static_cast<Program*>(context);
  submit_all(workload, program);
  require(pto_wait_all(program.runtime, PTO_FOREVER) == PTO_OK, "pto_wait_all");
}

static void replay(const Workload*, void* context) {
  Program& program = *static_cast<Program*>(context);
  require(pto_replay(program.runtime, program.recording, nullptr, nullptr, 0) == PTO_OK, "pto_replay");
  require(pto_wait_all(program.runtime, PTO_FOREVER) == PTO_OK, "pto_wait_all");
}

static Program open_program(const Workload& workload, int threads) {
  Program program;
  pto_config config;
  pto_config_init(&config);
  config.num_workers = threads > 1 ? static_cast<uint32_t>(threads - 1) : PTO_NO_WORKERS;
  config.max_handles = static_cast<uint32_t>(workload.num_cells) + 64;
  require(pto_runtime_open(&config, &program.runtime) == PTO_OK, "pto_runtime_open");
  program.count = pto_kernel_add(program.runtime, "count", count_kernel, 0);
  program.touch = pto_kernel_add(program.runtime, "touch", touch_kernel, 0);
  program.fold = pto_kernel_add(program.runtime, "fold", fold_kernel, 0);
  require(program.count >= 0 && program.touch >= 0 && program.fold >= 0, "pto_kernel_add");
  for (int i = 0; i < workload.num_cells; ++i) {
    program.handles.push_back(pto_register(program.runtime, &cells[i], sizeof(uint64_t)));
    require(program.handles.back() != 0, "pto_register");
  }
  return program;
}

static void record(const Workload& workload, Program& program) {
  require(pto_record_begin(program.runtime) == PTO_OK, "pto_record_begin");
  run(&workload, &program);
  program.recording = pto_record_end(program.runtime);
  require(program.recording != 0, "pto_record_end");
}

int main(int argc, char** argv) {
  const Arguments arguments = parse_arguments(argc, argv);
  Workload workload = make_pattern(arguments.pattern);
  Program program = open_program(workload, arguments.threads);
  measure(&workload, "submit", arguments.repetitions, nullptr, run, &program);
  record(workload, program);
  measure(&workload, "replay", arguments.repetitions, nullptr, replay, &program);
  require(pto_recording_free(program.runtime, program.recording) == PTO_OK, "pto_recording_free");
  require(pto_runtime_close(program.runtime) == PTO_OK, "pto_runtime_close");
  free_workload(&workload);
}
