/* The types of tilewise/pto_api.h: ids, statuses, parameters, specifications, records.
 *
 * Include tilewise/pto_api.h. Everything here is plain data; zero is a good default for every field unless a
 * comment says otherwise. */
#ifndef TILEWISE_PTO_TYPES_H
#define TILEWISE_PTO_TYPES_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

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
  PTO_TASK_FAILED = -2,  /* a kernel failed, or a task that it depends on did */
  PTO_CANCELLED = -3,
  PTO_TIMEOUT = -4,   /* of a task: it, or one that it depends on, had not started by its deadline */
  PTO_DEADLOCK = -5,  /* no task can ever free what the caller needs */
  PTO_NO_MEMORY = -6, /* larger than the resource itself, or the system has none */
  PTO_PEER_LOST = -7, /* the workers' process died; the runtime can only be closed */
  PTO_CLOSED = -8,
  PTO_INTERRUPTED = -9, /* pto_set_hooks: the host ends a wait; returned by a kernel: the wait that ran it checks */
  PTO_LATER = 1 /* returned by a kernel: pto_task_complete will end its task */
} pto_status;

typedef enum pto_worker_type { PTO_CUBE = 0, PTO_VECTOR = 1, PTO_AI_CPU = 2, PTO_ACCELERATOR = 3 } pto_worker_type;

typedef enum pto_mode {
  PTO_INPUT = 0,   /* reads; runs next to other readers */
  PTO_OUTPUT = 1,  /* overwrites all of it; handle 0: the runtime allocates `bytes` and writes the new handle */
  PTO_INOUT = 2,   /* reads and writes */
  PTO_COMMUTE = 3, /* reads and writes; commuting tasks run one at a time in any order */
  PTO_REDUCE = 4,  /* overwrites its own partial value; `combine` adds these in order of submission */
  PTO_NO_DEP = 5   /* only the address; the caller is responsible for the order */
} pto_mode;

#define PTO_MAX_PARAMS 24
#define PTO_MAX_SCALARS 16
#define PTO_MAX_DIMS 4
#define PTO_MAX_SCOPES 64
#define PTO_MAX_NAME 64 /* of a task, including the final zero */
#define PTO_FOREVER HUGE_VAL /* infinity; a negative timeout means 0, and NaN is rejected */

/* A strided box inside a buffer. The last dimension is contiguous: size[ndim - 1] bytes, stride 1.
 * Example: a 32 x 32 tile at (r, c) of a float matrix with row length n:
 *   {.offset = (r * n + c) * 4, .ndim = 2, .size = {32, 128}, .stride = {n * 4, 1}} */
typedef struct pto_region {
  uint64_t offset; /* bytes from the start of the buffer */
  uint32_t ndim;   /* 1 to PTO_MAX_DIMS */
  uint64_t size[PTO_MAX_DIMS];
  uint64_t stride[PTO_MAX_DIMS]; /* bytes, from the largest to 1 */
} pto_region;

typedef enum pto_type {
  PTO_U8 = 0,
  PTO_I8 = 1,
  PTO_U16 = 2,
  PTO_I16 = 3,
  PTO_U32 = 4,
  PTO_I32 = 5,
  PTO_U64 = 6,
  PTO_I64 = 7,
  PTO_F16 = 8,
  PTO_BF16 = 9,
  PTO_F32 = 10,
  PTO_F64 = 11,
  PTO_C64 = 12,  /* two PTO_F32 */
  PTO_C128 = 13, /* two PTO_F64 */
  PTO_BOOL = 14, /* one byte, 0 or 1 */
  PTO_OTHER = 15 /* of item_bytes bytes */
} pto_type;

/* The elements of one parameter, for a kernel with PTO_VIEWS. */
typedef struct pto_view {
  void* data;        /* the first element; set by the runtime */
  uint32_t ndim;     /* 0 to PTO_MAX_DIMS */
  pto_type type;
  uint64_t item_bytes; /* of an element; set by the runtime unless the type is PTO_OTHER */
  uint64_t size[PTO_MAX_DIMS];   /* elements */
  uint64_t stride[PTO_MAX_DIMS]; /* bytes from one to the next */
} pto_view;

/* One buffer of a task. Kernels get its address, or that of the region's first byte. */
typedef struct pto_param {
  pto_mode mode;
  pto_kernel combine;       /* PTO_REDUCE: kernel(buffers = {target, partial}, scalars = {bytes}); else ignored */
  pto_handle handle;        /* see PTO_OUTPUT; with PTO_NO_DEP it may be 0 and `address` is passed */
  union {
    uint64_t bytes; /* of a runtime-owned output */
    void* address;  /* PTO_NO_DEP without a handle; all others ignore both */
  };
  const pto_region* region; /* NULL: the whole buffer */
  const pto_view* view;     /* for a kernel with PTO_VIEWS: elements inside buffer or region; NULL: bytes */
} pto_param;

/* A kernel: one address per parameter, then the scalars. Returns PTO_OK or PTO_LATER; any other value: it failed.
 * A C++ exception or a failing status fails the task. Must not block on other tasks unless it was added with
 * PTO_SUBMITS. */
typedef int (*pto_kernel_fn)(void* const* buffers, const uint64_t* scalars);

enum {
  PTO_SUBMITS = 1, /* the kernel submits tasks or waits for some; only workers run it, never a helping submitter */
  PTO_VIEWS = 2    /* buffers[p] is the address of a const pto_view instead of the data's */
};

typedef struct pto_wait_for {
  pto_event event;
  uint64_t value; /* the task waits until the event has reached it, without occupying a worker */
} pto_wait_for;

/* All attributes of a task; zero is a good default for every field. */
typedef struct pto_task_spec {
  pto_kernel kernel; /* PTO_NO_KERNEL: an empty task, only for order */
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
  uint32_t flags;          /* PTO_KEEP, PTO_RUN_HERE */
  float deadline_s;        /* seconds from now; a task that has not started by then fails with PTO_TIMEOUT; 0: none */
  const char* name;        /* NULL: none. For traces, graphs and errors; copied; below PTO_MAX_NAME bytes */
} pto_task_spec;

enum {
  PTO_KEEP = 1, /* keep the task's error until pto_task_release */
  PTO_RUN_HERE = 2 /* if the task waits for no other, the caller runs it before pto_submit returns */
};
#define PTO_NO_KERNEL (-1)

typedef struct pto_config {
  uint32_t num_workers; /* threads; default: processors - 1, at least 1 (the submitter helps); PTO_NO_WORKERS: none */
  uint32_t window; /* tasks of one submitter between submission and completion; default 1024 */
  uint32_t max_submitters; /* threads that submit; default 16 */
  uint32_t max_handles; /* buffers at once; default 32768 */
  uint32_t max_regions; /* distinct boxes in use at once; default 4096 */
  uint32_t max_events; /* default 1024 */
  uint64_t heap_bytes; /* runtime-owned outputs; default 64 MiB; unused pages use no memory */
  const uint8_t* worker_types; /* per worker a mask of 1 << pto_worker_type; NULL: every worker runs every type */
  uint32_t flags; /* PTO_PIN */
  const char* shared_path; /* NULL: one process. A new file: its memory is shared with pto_workers_run */
  double peer_timeout_s; /* shared: how long to wait for the workers' process to attach; default 10 */
} pto_config;

enum {
  PTO_PIN = 1 /* worker w stays on processor w + 1 */
};
#define PTO_NO_WORKERS 0xFFFFFFFFu /* waiting threads run everything */

/* Inspection. */
typedef struct pto_stats {
  uint64_t num_submitted, num_completed, num_failed, num_helped; /* helped: run by submitters */
  uint64_t stall_ns; /* submitters waited for window, heap, handles */
  uint64_t num_stalls;
  uint64_t window, window_high, heap_bytes, heap_high_bytes, handles, handles_high, regions, regions_high;
  /* window_high: the maximum of live tasks at every 256th submission, and the window if it was ever full; not counted
   * after the first recording. The other *_high: the maximum so far. */
  uint64_t metadata_bytes; /* the runtime's memory without the heap */
} pto_stats;
/* One record per task; times in ns of CLOCK_MONOTONIC. */
typedef struct pto_trace_task {
  pto_task task;
  int32_t kernel;
  int32_t worker; /* -1 - submitter: a submitter that helped */
  int32_t submitter;
  int32_t scope_depth;
  int32_t status;
  int32_t priority;
  int64_t submit_ns, ready_ns, start_ns, end_ns;
  char name[PTO_MAX_NAME]; /* empty: none */
} pto_trace_task;

typedef struct pto_trace_stall {
  int32_t submitter;
  int32_t cause; /* 0 window, 1 heap, 2 handles, 3 regions */
  int64_t begin_ns, end_ns;
  uint64_t live_tasks, heap_used_bytes; /* at its begin */
} pto_trace_stall;

#ifdef __cplusplus
}
#endif

#endif /* TILEWISE_PTO_TYPES_H */
