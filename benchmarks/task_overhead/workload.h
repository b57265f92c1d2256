/* What every system of this folder runs: four patterns of tasks on cells, and the check that they ran in order.
 *
 * A task reads up to two cells and rewrites one: target = (target + first) * K + second, a few instructions. Running
 * a pattern one task after the other gives the values that every parallel run must reproduce, so a missed
 * dependency or a lost update shows; each thread counts its tasks, so a lost task shows too.
 * A system hands `measure` a function that runs the pattern once; `measure` times it, checks it and prints one line:
 *   <pattern> <mode> <tasks> <ns per task of repetition 1> <of repetition 2> ...
 * C11 and C++: the peers' programs are either. */
#ifndef TASK_OVERHEAD_WORKLOAD_H
#define TASK_OVERHEAD_WORKLOAD_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define NUM_INDEPENDENT 200000
#define NUM_CHAIN 200000
#define WAVEFRONT_SIDE 300
#define NUM_RANDOM 100000
#define NUM_RANDOM_CELLS 64
#define MAX_THREADS 64

/* The cells of one task, as indices; num_cells of the pattern says which count (0: none, 1: target, 3: all). */
typedef struct Access {
  int32_t first, second, target;
} Access;

typedef struct Workload {
  const char* name;
  int num_tasks;
  int cells_per_task;
  int num_cells;
  Access* tasks;
  uint64_t* initial;
  uint64_t* expected;
} Workload;

/* The cells of the pattern that is running: global, so that a task is described by one pointer everywhere. */
static uint64_t* cells;

/* One counter per thread, a cache line each. */
typedef struct Counter {
  uint64_t count, unused[7];
} Counter;
static Counter counters[MAX_THREADS];
static int num_counters;
static __thread Counter* own_counter;

static inline void count_task(void) {
  if (!own_counter) {
    int index = __atomic_fetch_add(&num_counters, 1, __ATOMIC_RELAXED);
    if (index >= MAX_THREADS) abort();
    own_counter = &counters[index];
  }
  ++own_counter->count;
}

static inline void run_touch(uint64_t* target) {
  *target = *target * 0x9E3779B97F4A7C15u + 1;
  count_task();
}

static inline void run_fold(const uint64_t* first, const uint64_t* second, uint64_t* target) {
  *target = (*target + *first) * 0x9E3779B97F4A7C15u + *second;
  count_task();
}

static inline void run_access(const Access* access, int cells_per_task) {
  if (cells_per_task == 3)
    run_fold(&cells[access->first], &cells[access->second], &cells[access->target]);
  else if (cells_per_task == 1)
    run_touch(&cells[access->target]);
  else
    count_task();
}

static inline uint32_t next_draw(uint64_t* state) { /* Knuth's linear congruential generator, high bits */
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(*state >> 33);
}

static inline void fill_wavefront(Workload* workload) {
  const int row = WAVEFRONT_SIDE + 1; /* a border that no task writes: every task has both neighbours */
  Access* task = workload->tasks;
  for (int i = 1; i <= WAVEFRONT_SIDE; ++i)
    for (int j = 1; j <= WAVEFRONT_SIDE; ++j, ++task) {
      task->first = (i - 1) * row + j;
      task->second = i * row + j - 1;
      task->target = i * row + j;
    }
}

static inline void fill_random(Workload* workload) {
  uint64_t state = 2024;
  for (int i = 0; i < workload->num_tasks; ++i) { /* three different cells: not every system takes one twice */
    Access* task = &workload->tasks[i];
    task->target = (int32_t)(next_draw(&state) % NUM_RANDOM_CELLS);
    do task->first = (int32_t)(next_draw(&state) % NUM_RANDOM_CELLS);
    while (task->first == task->target);
    do task->second = (int32_t)(next_draw(&state) % NUM_RANDOM_CELLS);
    while (task->second == task->target || task->second == task->first);
  }
}

static inline Workload make_workload(const char* name, int num_tasks, int cells_per_task, int num_cells) {
  Workload workload = {name, num_tasks, cells_per_task, num_cells, NULL, NULL, NULL};
  const size_t cell_bytes = ((size_t)num_cells * sizeof(uint64_t) + 63) & ~(size_t)63;
  workload.tasks = (Access*)calloc((size_t)num_tasks, sizeof(Access));
  workload.initial = (uint64_t*)aligned_alloc(64, cell_bytes);
  workload.expected = (uint64_t*)aligned_alloc(64, cell_bytes);
  if (!workload.tasks || !workload.initial || !workload.expected) abort();
  if (!strcmp(name, "wavefront")) fill_wavefront(&workload);
  if (!strcmp(name, "random")) fill_random(&workload);
  for (int i = 0; i < num_cells; ++i) workload.initial[i] = (uint64_t)i * 0xD1B54A32D192ED03u + 7;
  memcpy(workload.expected, workload.initial, (size_t)num_cells * sizeof(uint64_t));
  cells = workload.expected;
  for (int i = 0; i < num_tasks; ++i) run_access(&workload.tasks[i], cells_per_task);
  cells = (uint64_t*)aligned_alloc(64, cell_bytes);
  if (!cells) abort();
  return workload;
}

static inline void free_workload(Workload* workload) {
  free(workload->tasks);
  free(workload->initial);
  free(workload->expected);
  free(cells);
}

/* The programs take THREADS REPETITIONS PATTERN; a program runs one pattern, for `cells` holds one. */
typedef struct Arguments {
  int threads, repetitions;
  const char* pattern;
} Arguments;

static inline Arguments parse_arguments(int argc, char** argv) {
  if (argc != 4) {
    fprintf(stderr, "usage: %s THREADS REPETITIONS independent|chain|wavefront|random\n", argv[0]);
    exit(2);
  }
  const Arguments arguments = {atoi(argv[1]), atoi(argv[2]), argv[3]};
  return arguments;
}

static inline Workload make_pattern(const char* name) {
  const int side = WAVEFRONT_SIDE + 1;
  if (!strcmp(name, "independent")) return make_workload(name, NUM_INDEPENDENT, 0, 1);
  if (!strcmp(name, "chain")) return make_workload(name, NUM_CHAIN, 1, 1);
  if (!strcmp(name, "wavefront")) return make_workload(name, WAVEFRONT_SIDE * WAVEFRONT_SIDE, 3, side * side);
  if (!strcmp(name, "random")) return make_workload(name, NUM_RANDOM, 3, NUM_RANDOM_CELLS);
  fprintf(stderr, "no pattern is called %s\n", name);
  exit(2);
}

static inline double now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static inline void check_run(const Workload* workload, const char* mode) {
  uint64_t count = 0;
  for (int i = 0; i < MAX_THREADS; ++i) count += counters[i].count;
  if (count != (uint64_t)workload->num_tasks) {
    fprintf(stderr, "%s %s: every task must run once; %llu of %d ran\n", workload->name, mode,
            (unsigned long long)count, workload->num_tasks);
    exit(1);
  }
  for (int i = 0; i < workload->num_cells; ++i)
    if (cells[i] != workload->expected[i]) {
      fprintf(stderr, "%s %s: tasks must run in the order of their data; cell %d differs\n", workload->name, mode, i);
      exit(1);
    }
}

typedef void (*RunFunction)(const Workload* workload, void* context);

#define SLOW_NS 2e9

/* Runs the pattern once to warm up and `repetitions` times measured; `prepare` (may be NULL) is not timed. A run
 * longer than SLOW_NS counts at once and is the last: warming up is nothing next to it. */
static inline void measure(const Workload* workload, const char* mode, int repetitions, RunFunction prepare,
                           RunFunction run, void* context) {
  printf("%s %s %d", workload->name, mode, workload->num_tasks);
  for (int i = 0; i <= repetitions; ++i) {
    memcpy(cells, workload->initial, (size_t)workload->num_cells * sizeof(uint64_t));
    memset(counters, 0, sizeof counters);
    if (prepare) prepare(workload, context);
    const double begin = now_ns();
    run(workload, context);
    const double end = now_ns();
    check_run(workload, mode);
    const int is_slow = end - begin > SLOW_NS;
    if (i > 0 || is_slow) printf(" %.3f", (end - begin) / workload->num_tasks);
    if (is_slow) break;
  }
  printf("\n");
  fflush(stdout);
}

#endif
