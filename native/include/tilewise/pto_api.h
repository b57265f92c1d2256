/* The task runtime for C and C++: submit tasks on buffers, and the runtime orders, runs and frees them.
 *
 * A program opens a runtime, registers buffers (or lets the runtime own them), adds kernels, and submits tasks whose
 * parameters say what each reads and writes. Whatever must wait for something waits; the rest runs in parallel.
 *
 *   PTORuntime* rt;
 *   pto_runtime_open(NULL, &rt);
 *   pto_kernel add = pto_kernel_add(rt, "add", add_fn, 0);
 *   pto_handle x = pto_register(rt, data, bytes);
 *   pto_param params[] = {{.mode = PTO_INOUT, .handle = x}};
 *   pto_submit_task(rt, add, PTO_VECTOR, params, 1);
 *   pto_wait_all(rt, PTO_FOREVER);
 *   pto_runtime_close(rt);
 *
 * Who may call: any thread, unless a call says otherwise; each submitting thread gets its own lane. Calls that return
 * `int` return a status, 0 for success; calls that return an id return 0 (pto_kernel: a negative status) on failure.
 * pto_last_error() then has the sentence. docs/runtime.md explains the model. */
#ifndef TILEWISE_PTO_API_H
#define TILEWISE_PTO_API_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define PTO_CALL
#else
#define PTO_CALL __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct PTORuntime PTORuntime;
typedef uint64_t pto_task;   /* a submitted task; never reused; 0: none */
typedef uint64_t pto_handle; /* a buffer; carries a generation, so that stale use is an error; 0: none */
typedef uint64_t pto_event;  /* a counter that tasks can wait for; 0: none */
typedef uint64_t pto_recording;
typedef int32_t pto_kernel;

typedef enum pto_status {
  PTO_OK = 0,
  PTO_BAD_ARGUMENT = -1, /* nothing was submitted */
  PTO_TASK_FAILED = -2,  /* a kernel failed, or a task before it did */
  PTO_CANCELLED = -3,
  PTO_TIMEOUT = -4,
  PTO_DEADLOCK = -5,  /* proven: no task can ever free what the caller needs */
  PTO_NO_MEMORY = -6, /* larger than the resource itself, or the system has none */
  PTO_PEER_LOST = -7, /* the workers' process died; the runtime can only be closed */
  PTO_CLOSED = -8,
  PTO_INTERRUPTED =
      -9, /* pto_set_hooks: the host asked for an end of waiting; of a kernel: and the wait that ran it asks */
  PTO_LATER = 1 /* returned by a kernel: somebody will call pto_task_complete */
} pto_status;

typedef enum pto_worker_type { PTO_CUBE = 0, PTO_VECTOR = 1, PTO_AI_CPU = 2, PTO_ACCELERATOR = 3 } pto_worker_type;

typedef enum pto_mode {
  PTO_INPUT = 0,   /* reads; runs beside other readers */
  PTO_OUTPUT = 1,  /* overwrites all of it; handle 0: the runtime allocates `bytes` and writes the new handle */
  PTO_INOUT = 2,   /* reads and writes */
  PTO_COMMUTE = 3, /* reads and writes; commuting tasks run one at a time in any order */
  PTO_REDUCE = 4,  /* overwrites a partial of its own; `combine` adds the partials in order of submission */
  PTO_NO_DEP = 5   /* only the address; the caller answers for the order */
} pto_mode;

#define PTO_MAX_PARAMS 24
#define PTO_MAX_SCALARS 16
#define PTO_MAX_DIMS 4
#define PTO_MAX_SCOPES 64
#define PTO_FOREVER (-1.0)

/* A strided box inside a buffer. The last dimension is contiguous: size[ndim - 1] bytes, stride 1.
 * Example: a 32 x 32 tile at (r, c) of a float matrix with row length n:
 *   {.offset = (r * n + c) * 4, .ndim = 2, .size = {32, 128}, .stride = {n * 4, 1}} */
typedef struct pto_region {
  uint64_t offset; /* bytes from the start of the buffer */
  uint32_t ndim;   /* 1 to PTO_MAX_DIMS */
  uint64_t size[PTO_MAX_DIMS];
  uint64_t stride[PTO_MAX_DIMS]; /* bytes, from the largest to 1 */
} pto_region;

/* One buffer of a task. Kernels get its address: of the region's first byte if there is one. */
typedef struct pto_param {
  pto_mode mode;
  pto_kernel combine;       /* PTO_REDUCE: kernel(buffers = {target, partial}, scalars = {bytes}); else ignored */
  pto_handle handle;        /* see PTO_OUTPUT; with PTO_NO_DEP it may be 0 and `address` is passed */
  uint64_t bytes;           /* of a runtime-owned output; else ignored */
  const pto_region* region; /* NULL: the whole buffer */
  void* address;            /* PTO_NO_DEP without a handle; else ignored */
} pto_param;

/* A kernel: one address per parameter, then the scalars. Returns PTO_OK, PTO_LATER or any other value: it failed.
 * A C++ exception or a failing status fails the task. Must not block on other tasks unless it was added with
 * PTO_SUBMITS. */
typedef int (*pto_kernel_fn)(void* const* buffers, const uint64_t* scalars);

enum {
  PTO_SUBMITS = 1 /* the kernel submits tasks or waits for some: only workers run it, never a helping submitter */
};

typedef struct pto_wait_for {
  pto_event event;
  uint64_t value; /* the task waits until the event has reached it; no worker is held */
} pto_wait_for;

/* Everything a task can say; zero is a good default for every field. */
typedef struct pto_task_spec {
  pto_kernel kernel; /* PTO_NO_KERNEL: an empty task, for its order alone */
  pto_worker_type worker_type;
  pto_param* params;
  uint32_t num_params;
  uint32_t num_scalars;
  const uint64_t* scalars; /* copied */
  const pto_task* after;   /* explicit edges; completed tasks are fine */
  uint32_t num_after;
  uint32_t num_waits;
  const pto_wait_for* waits;
  int32_t priority;        /* higher first; 0 is the fast path */
  int32_t target_worker;   /* 1 + worker that must run it; 0: any of its type */
  pto_handle predicate;    /* a uint32_t read (INPUT) before the kernel: 0 skips the kernel, the task succeeds */
  uint32_t flags;          /* PTO_KEEP */
  uint32_t reserved;
} pto_task_spec;

enum {
  PTO_KEEP = 1 /* keep the task's error until pto_task_release */
};
#define PTO_NO_KERNEL (-1)

typedef struct pto_config {
  uint32_t num_workers; /* threads; default: processors - 1, at least 1 (the submitter helps); PTO_NO_WORKERS: none */
  uint32_t window; /* tasks of one lane between submission and completion; default 1024 */
  uint32_t max_lanes; /* threads that submit; default 16 */
  uint32_t max_handles; /* buffers known at once; default 8192 */
  uint32_t max_regions; /* distinct boxes in use at once; default 4096 */
  uint32_t max_events; /* default 1024 */
  uint64_t heap_bytes; /* runtime-owned outputs; default 64 MiB; pages cost nothing until used */
  const uint8_t* worker_types; /* per worker a mask of 1 << pto_worker_type; NULL: every worker runs every type */
  uint32_t flags; /* PTO_PIN */
  const char* shared_path; /* NULL: one process. A file to make: the region is shared with pto_workers_run */
  double peer_timeout_s; /* shared: how long to wait for the workers' process to attach; default 10 */
} pto_config;

enum {
  PTO_PIN = 1 /* worker w stays on processor w + 1 */
};
#define PTO_NO_WORKERS 0xFFFFFFFFu /* waiting threads run everything */

/* Runtime. */
PTO_CALL void pto_config_init(pto_config* config);
PTO_CALL int pto_runtime_open(const pto_config* config, PTORuntime** runtime);
PTO_CALL int pto_runtime_close(PTORuntime* runtime); /* waits for every task; not from inside a task */
PTO_CALL const char* pto_last_error(void); /* of this thread's last failed call */
PTO_CALL int pto_last_status(void);

/* Kernels. Names: see pto_kernel_find. */
PTO_CALL pto_kernel pto_kernel_add(PTORuntime* runtime, const char* name, pto_kernel_fn function, uint32_t flags);
/* A built-in ("copy", "fill", "sum_f32", "sum_f64", "sum_i64", "max_f32", "min_f32": target, source, bytes), or a
 * symbol of a library that pto_library_load loaded. */
PTO_CALL pto_kernel pto_kernel_find(PTORuntime* runtime, const char* name);
PTO_CALL int pto_library_load(PTORuntime* runtime, const char* path);

/* Buffers. */
PTO_CALL pto_handle pto_register(PTORuntime* runtime, void* address, uint64_t bytes);
/* Waits for the buffer's tasks, then forgets the handle: the memory may be freed. After PTO_TIMEOUT it stays. */
PTO_CALL int pto_unregister(PTORuntime* runtime, pto_handle handle, double timeout_s);
PTO_CALL int pto_freeze(PTORuntime* runtime, pto_handle handle, int frozen); /* frozen: readers are not tracked */
PTO_CALL pto_handle pto_alloc(PTORuntime* runtime, uint64_t bytes); /* heap; lives as long as the scope */
PTO_CALL void* pto_address(PTORuntime* runtime, pto_handle handle); /* NULL when stale; does not wait */
PTO_CALL uint64_t pto_bytes(PTORuntime* runtime, pto_handle handle);
/* Waits for the buffer's writers and returns its address: for data-dependent control flow. */
PTO_CALL const void* pto_read(PTORuntime* runtime, pto_handle handle, double timeout_s);
/* Waits for readers and writers; then the caller may write until its next submission on the buffer. What it writes
 * counts as all of the buffer: a failure of earlier writers ends here. */
PTO_CALL void* pto_write(PTORuntime* runtime, pto_handle handle, double timeout_s);

/* Tasks. */
PTO_CALL void pto_scope_begin(PTORuntime* runtime);
PTO_CALL int pto_scope_end(PTORuntime* runtime);
PTO_CALL pto_task pto_submit_task(PTORuntime* runtime, pto_kernel kernel, pto_worker_type worker_type,
                                  pto_param* params, uint32_t num_params);
PTO_CALL pto_task pto_submit(PTORuntime* runtime, const pto_task_spec* spec);
/* Ends a task whose kernel returned PTO_LATER; status PTO_OK or anything else: it failed. Once, from any thread. */
PTO_CALL int pto_task_complete(PTORuntime* runtime, pto_task task, int status);
/* Inside a kernel: the task it runs as, to be handed to whoever will end it; replays have no other way. Elsewhere 0. */
PTO_CALL pto_task pto_this_task(void);

/* Waiting. A timeout in seconds; PTO_FOREVER; 0 asks. Waiting without a deadline helps to run tasks. */
PTO_CALL int pto_is_complete(PTORuntime* runtime, pto_task task);
PTO_CALL int pto_wait(PTORuntime* runtime, pto_task task, double timeout_s);
PTO_CALL int pto_wait_any(PTORuntime* runtime, const pto_task* tasks, uint32_t num_tasks, double timeout_s,
                          uint32_t* first);
/* For every task that this thread submitted (inside a task: its children). Returns the first failure since the last
 * wait_all, once. */
PTO_CALL int pto_wait_all(PTORuntime* runtime, double timeout_s);
/* Calls back once, from whichever thread completes the task, at once if it is complete. The callback must be short. */
PTO_CALL int pto_notify(PTORuntime* runtime, pto_task task, void (*callback)(void*), void* context);

/* Failure. */
PTO_CALL int pto_task_status(PTORuntime* runtime, pto_task task); /* PTO_OK also while it runs or when forgotten */
PTO_CALL int pto_task_error(PTORuntime* runtime, pto_task task, char* text, uint64_t text_bytes);
PTO_CALL void pto_task_release(PTORuntime* runtime, pto_task task);
PTO_CALL void pto_fail(const char* reason); /* inside a kernel: the reason for the status it is about to return */
/* Skips it if it has not started; it waits for no event any more. */
PTO_CALL int pto_cancel(PTORuntime* runtime, pto_task task);
PTO_CALL int pto_cancel_all(PTORuntime* runtime); /* everything submitted so far and not started */

/* Events: counters that rise. */
PTO_CALL pto_event pto_event_open(PTORuntime* runtime);
PTO_CALL int pto_event_raise(PTORuntime* runtime, pto_event event, uint64_t add);
PTO_CALL uint64_t pto_event_value(PTORuntime* runtime, pto_event event);

/* Record and replay. Between begin and end this thread's tasks run and are recorded; a replay submits them again, each
 * handle of `from` replaced by its neighbour in `to`. Two recorded handles must stay two, and sizes must be equal. */
PTO_CALL int pto_record_begin(PTORuntime* runtime);
PTO_CALL pto_recording pto_record_end(PTORuntime* runtime);
PTO_CALL int pto_replay(PTORuntime* runtime, pto_recording recording, const pto_handle* from, const pto_handle* to,
                        uint32_t num_handles);
PTO_CALL int pto_recording_free(PTORuntime* runtime, pto_recording recording);

/* An orchestration function in a shared library of the user: int name(PTORuntime*, const uint64_t* args). Runs in this
 * thread, inside a scope of its own, and waits for its tasks. */
typedef int (*pto_orchestration_fn)(PTORuntime* runtime, const uint64_t* args);
PTO_CALL int pto_run_orchestration(PTORuntime* runtime, const char* library_path, const char* name,
                                   const uint64_t* args);

/* Two processes: the caller's threads become the workers of the region that another process opened at this path.
 * Returns when that process closes the runtime (0) or dies (PTO_PEER_LOST). Kernels are found by name in the
 * libraries that both sides load; operands must lie in the region (pto_alloc, runtime-owned outputs). */
PTO_CALL int pto_workers_run(const char* shared_path, const char* const* library_paths, uint32_t num_libraries);

/* Seeing inside. */
typedef struct pto_stats {
  uint64_t num_submitted, num_completed, num_failed, num_helped; /* helped: run by submitters */
  uint64_t stall_ns; /* submitters waited for window, heap, handles */
  uint64_t num_stalls;
  uint64_t window, window_high, heap_bytes, heap_high_bytes, handles, handles_high, regions, regions_high;
  /* window_high: the most live tasks at every 256th submission, and the window once it has been full; without what was
   * submitted after a recording. The others: the most seen. */
  uint64_t metadata_bytes; /* of the region, heap apart */
} pto_stats;
PTO_CALL int pto_get_stats(PTORuntime* runtime, pto_stats* stats);
/* 1: no task runs and none is ready to, at this moment; those that are left wait for events, or for who ends them. */
PTO_CALL int pto_is_idle(PTORuntime* runtime);

/* One record per task; times in ns of CLOCK_MONOTONIC. */
typedef struct pto_trace_task {
  pto_task task;
  int32_t kernel;
  int32_t worker; /* -1 - lane: a submitter that helped */
  int32_t lane;
  int32_t scope_depth;
  int32_t status;
  int32_t priority;
  int64_t submit_ns, ready_ns, start_ns, end_ns;
} pto_trace_task;

typedef struct pto_trace_stall {
  int32_t lane;
  int32_t cause; /* 0 window, 1 heap, 2 handles, 3 regions */
  int64_t begin_ns, end_ns;
  uint64_t live_tasks, heap_used_bytes; /* at its begin */
} pto_trace_stall;

PTO_CALL int pto_trace_enable(PTORuntime* runtime, uint32_t max_records_per_thread); /* 0: off. While nothing runs */
/* Copies up to `capacity` records; returns how many there are. While nothing runs. */
PTO_CALL uint64_t pto_trace_tasks(PTORuntime* runtime, pto_trace_task* records, uint64_t capacity);
PTO_CALL uint64_t pto_trace_stalls(PTORuntime* runtime, pto_trace_stall* records, uint64_t capacity);
PTO_CALL const char* pto_kernel_name(PTORuntime* runtime, pto_kernel kernel);

/* The dependency graph of what this runtime submits between the calls, as JSON (docs/runtime.md has the format). */
PTO_CALL int pto_graph_begin(PTORuntime* runtime);
PTO_CALL int pto_graph_end(PTORuntime* runtime, const char* json_path);

/* For hosts with an interpreter, once per process, before any wait. enter is called before a call blocks or helps (it
 * lets other threads run and returns a token, or NULL), leave with that token afterwards; interrupted, called about
 * every 50 ms of waiting, returns non-zero to make the call return PTO_INTERRUPTED. */
PTO_CALL void pto_set_hooks(void* (*enter)(void), void (*leave)(void*), int (*interrupted)(void));

#ifdef __cplusplus
}
#endif

#endif /* TILEWISE_PTO_API_H */
