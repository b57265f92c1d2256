/* OpenMP tasks with `depend`, for GNU and LLVM: one thread submits, the device group runs.
 * With one thread GNU OpenMP runs each task at once instead of queueing it.
 * Build: gcc|clang -O2 -fopenmp omp.c     Run: ./omp THREADS REPETITIONS PATTERN */
#include <omp.h>

#include "workload.h"

static void submit_all(const Workload* workload) {
  const Access* const tasks = workload->tasks;
  const int num_tasks = workload->num_tasks;
  if (workload->cells_per_task == 0) {
    for (int i = 0; i < num_tasks; ++i) {
#pragma omp task
      count_task();
    }
  } else if (workload->cells_per_task == 1) {
    for (int i = 0; i < num_tasks; ++i) {
      uint64_t* const target = &cells[tasks[i].target];
#pragma omp task firstprivate(target) depend(inout : *target)
      run_touch(target);
    }
  } else {
    for (int i = 0; i < num_tasks; ++i) {
      uint64_t* const first = &cells[tasks[i].first];
      uint64_t* const second = &cells[tasks[i].second];
      uint64_t* const target = &cells[tasks[i].target];
#pragma omp task firstprivate(first, second, target) depend(in : *first, *second) depend(inout : *target)
      run_fold(first, second, target);
    }
  }
}

static void run(const Workload* workload, void* context) {
  (void)context;
#pragma omp parallel
#pragma omp single
  {
    submit_all(workload);
#pragma omp taskwait
  }
}

int main(int argc, char** argv) {
  const Arguments arguments = parse_arguments(argc, argv);
  omp_set_num_threads(arguments.threads);
  Workload workload = make_pattern(arguments.pattern);
  measure(&workload, "submit", arguments.repetitions, NULL, run, NULL);
  free_workload(&workload);
  return 0;
}
