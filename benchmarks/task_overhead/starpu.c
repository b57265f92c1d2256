/* StarPU: THREADS workers run, the main thread submits next to them and then sleeps; one worker fewer is slower.
 * Data are registered before the clock starts. STARPU_HOME should be a folder that may be thrown away.
 * Build: gcc -O2 starpu.c $(pkg-config --cflags --libs starpu-1.3)     Run: ./starpu THREADS REPETITIONS PATTERN */
#include <starpu.h>

#include "workload.h"

static void kernel_count(void* buffers[], void* arguments) {
  (void)buffers;
  (void)arguments;
  count_task();
}

static void kernel_touch(void* buffers[], void* arguments) {
  (void)arguments;
  run_touch((uint64_t*)STARPU_VARIABLE_GET_PTR(buffers[0]));
}

static void kernel_fold(void* buffers[], void* arguments) {
  (void)arguments;
  run_fold((const uint64_t*)STARPU_VARIABLE_GET_PTR(buffers[0]), (const uint64_t*)STARPU_VARIABLE_GET_PTR(buffers[1]),
           (uint64_t*)STARPU_VARIABLE_GET_PTR(buffers[2]));
}

static struct starpu_codelet count_codelet = {.cpu_funcs = {kernel_count}, .nbuffers = 0};
static struct starpu_codelet touch_codelet = {.cpu_funcs = {kernel_touch}, .nbuffers = 1, .modes = {STARPU_RW}};
static struct starpu_codelet fold_codelet = {
    .cpu_funcs = {kernel_fold}, .nbuffers = 3, .modes = {STARPU_R, STARPU_R, STARPU_RW}};

static void submit(struct starpu_task* task) {
  if (starpu_task_submit(task) != 0) {
    fprintf(stderr, "starpu refused a task\n");
    exit(1);
  }
}

/* starpu_task_create rather than starpu_task_insert: it has no list of arguments to decode. */
static void run(const Workload* workload, void* context) {
  starpu_data_handle_t* const handles = (starpu_data_handle_t*)context;
  for (int i = 0; i < workload->num_tasks; ++i) {
    const Access* const access = &workload->tasks[i];
    struct starpu_task* const task = starpu_task_create();
    if (workload->cells_per_task == 3) {
      task->cl = &fold_codelet;
      task->handles[0] = handles[access->first];
      task->handles[1] = handles[access->second];
      task->handles[2] = handles[access->target];
    } else if (workload->cells_per_task == 1) {
      task->cl = &touch_codelet;
      task->handles[0] = handles[access->target];
    } else {
      task->cl = &count_codelet;
    }
    submit(task);
  }
  starpu_task_wait_for_all();
}

int main(int argc, char** argv) {
  const Arguments arguments = parse_arguments(argc, argv);
  struct starpu_conf conf;
  starpu_conf_init(&conf);
  conf.ncpus = arguments.threads;
  conf.ncuda = 0;
  conf.nopencl = 0;
  if (starpu_init(&conf) != 0) return 77;
  Workload workload = make_pattern(arguments.pattern);
  starpu_data_handle_t* handles = (starpu_data_handle_t*)calloc((size_t)workload.num_cells, sizeof *handles);
  for (int i = 0; i < workload.num_cells; ++i)
    starpu_variable_data_register(&handles[i], STARPU_MAIN_RAM, (uintptr_t)&cells[i], sizeof(uint64_t));
  measure(&workload, "submit", arguments.repetitions, NULL, run, handles);
  for (int i = 0; i < workload.num_cells; ++i) starpu_data_unregister(handles[i]);
  free(handles);
  free_workload(&workload);
  starpu_shutdown();
  return 0;
}
