/* The task runtime for C and C++: submit tasks on buffers, and the runtime orders, runs and frees them.
 *
 * A program opens a runtime, registers buffers (or lets the runtime own them), adds kernels, and submits tasks whose
 * parameters say what each reads and writes. Tasks wait for the data that they need; all others run in parallel.
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
 * Who may call: any thread, unless a call says otherwise; each submitting thread has its own submission context.
 * Calls that return `int` return a status, 0 for success; calls that return an id return 0 (pto_kernel: a negative
 * status) on failure. pto_last_error() then returns the message. docs/runtime.md explains the model. */
#ifndef TILEWISE_PTO_API_H
#define TILEWISE_PTO_API_H

#include "tilewise/pto/types.h"

#if defined(_WIN32)
#define PTO_CALL
#else
#define PTO_CALL __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Runtime. */
PTO_CALL void pto_config_init(pto_config* config);
PTO_CALL int pto_runtime_open(const pto_config* config, PTORuntime** runtime);
PTO_CALL int pto_runtime_close(PTORuntime* runtime); /* waits for every task; not from inside a task */
PTO_CALL const char* pto_last_error(void); /* of this thread's last failed call */
PTO_CALL int pto_last_status(void);
/* For libraries that add calls to this interface: sets what the two calls above return. Returns the status. */
PTO_CALL int pto_set_error(int status, const char* text);
/* The same: data that such a library keeps with a runtime. The first call with a `make` calls it; closing the runtime
 * calls `drop`. NULL: an error. */
PTO_CALL void* pto_runtime_data(PTORuntime* runtime, void* (*make)(void), void (*drop)(void* data));

/* Kernels. Names: see pto_kernel_find. */
PTO_CALL pto_kernel pto_kernel_add(PTORuntime* runtime, const char* name, pto_kernel_fn function, uint32_t flags);
/* A built-in ("copy", "fill", "sum_f32", "sum_f64", "sum_i64", "max_f32", "min_f32": target, source, bytes), or a
 * symbol of a library that pto_library_load loaded. */
PTO_CALL pto_kernel pto_kernel_find(PTORuntime* runtime, const char* name);
/* The same for a symbol that needs PTO_SUBMITS, PTO_VIEWS or both. */
PTO_CALL pto_kernel pto_kernel_find_as(PTORuntime* runtime, const char* name, uint32_t flags);
PTO_CALL int pto_library_load(PTORuntime* runtime, const char* path);

/* Buffers. */
PTO_CALL pto_handle pto_register(PTORuntime* runtime, void* address, uint64_t bytes);
/* Waits for the buffer's tasks, then frees the handle: the memory may be freed. After PTO_TIMEOUT it stays registered.
 */
PTO_CALL int pto_unregister(PTORuntime* runtime, pto_handle handle, double timeout_s);
PTO_CALL int pto_freeze(PTORuntime* runtime, pto_handle handle, int frozen); /* frozen: readers are not tracked */
PTO_CALL pto_handle pto_alloc(PTORuntime* runtime, uint64_t bytes); /* heap; lives as long as the scope */
PTO_CALL void* pto_address(PTORuntime* runtime, pto_handle handle); /* NULL if stale; does not wait */
PTO_CALL uint64_t pto_bytes(PTORuntime* runtime, pto_handle handle);
/* Waits for the writers of the region (NULL: of the whole buffer) and returns the address of its first byte: for
 * data-dependent control flow. Ignores tasks that write none of these bytes, and their failures. */
PTO_CALL const void* pto_read(PTORuntime* runtime, pto_handle handle, const pto_region* region, double timeout_s);
/* Waits for readers and writers of the region (NULL: of the whole buffer); then the caller may write it until its next
 * submission on it. The write counts for the whole region: it clears failures of earlier writers, for readers of
 * bytes inside the region. */
PTO_CALL void* pto_write(PTORuntime* runtime, pto_handle handle, const pto_region* region, double timeout_s);

/* Tasks. */
PTO_CALL void pto_scope_begin(PTORuntime* runtime);
PTO_CALL int pto_scope_end(PTORuntime* runtime);
PTO_CALL pto_task pto_submit_task(PTORuntime* runtime, pto_kernel kernel, pto_worker_type worker_type,
                                  pto_param* params, uint32_t num_params);
PTO_CALL pto_task pto_submit(PTORuntime* runtime, const pto_task_spec* spec);
/* Ends a task whose kernel returned PTO_LATER; a status other than PTO_OK: it failed. Once, from any thread. */
PTO_CALL int pto_task_complete(PTORuntime* runtime, pto_task task, int status);
/* Inside a kernel: its task, for the thread that will end it; in replays the only way to get it. Elsewhere 0. */
PTO_CALL pto_task pto_this_task(void);
/* Inside a kernel: 1 if its result is no longer needed, because its task or one of its ancestors was cancelled or is
 * past its deadline. A long-running kernel may check it and return early. Elsewhere 0. */
PTO_CALL int pto_should_stop(void);

/* Waiting. A timeout is in seconds or PTO_FOREVER; 0 polls. Waiting without a deadline helps to run tasks. PTO_TIMEOUT:
 * the task has not ended. A task that has ended with that status counts as failed; pto_task_status has its status. */
PTO_CALL int pto_is_complete(PTORuntime* runtime, pto_task task);
PTO_CALL int pto_wait(PTORuntime* runtime, pto_task task, double timeout_s);
PTO_CALL int pto_wait_any(PTORuntime* runtime, const pto_task* tasks, uint32_t num_tasks, double timeout_s,
                          uint32_t* first);
/* Waits for every task that this thread submitted (inside a task: its children). Returns the first failure since the
 * last wait_all, once. */
PTO_CALL int pto_wait_all(PTORuntime* runtime, double timeout_s);
/* Calls back once, on the thread that completes the task; at once if it is complete. The callback must be short. */
PTO_CALL int pto_notify(PTORuntime* runtime, pto_task task, void (*callback)(void*), void* context);

/* Failure. */
PTO_CALL int pto_task_status(PTORuntime* runtime, pto_task task); /* PTO_OK also while it runs or after its release */
PTO_CALL int pto_task_error(PTORuntime* runtime, pto_task task, char* text, uint64_t text_bytes);
PTO_CALL void pto_task_release(PTORuntime* runtime, pto_task task);
PTO_CALL void pto_fail(const char* reason); /* inside a kernel: the reason for its failing status */
/* Skips the task if it has not started, also if it waits for an event. A running kernel can check pto_should_stop(). */
PTO_CALL int pto_cancel(PTORuntime* runtime, pto_task task);
PTO_CALL int pto_cancel_all(PTORuntime* runtime); /* all tasks submitted so far that have not started */

/* Events: counters that only rise. */
PTO_CALL pto_event pto_event_open(PTORuntime* runtime);
PTO_CALL int pto_event_post(PTORuntime* runtime, pto_event event, uint64_t add);
PTO_CALL uint64_t pto_event_value(PTORuntime* runtime, pto_event event);

/* Record and replay. Between begin and end this thread's tasks run and are recorded; a replay submits them again, with
 * each handle of `from` replaced by its counterpart in `to`. Distinct handles must stay distinct; sizes must be equal.
 */
PTO_CALL int pto_record_begin(PTORuntime* runtime);
PTO_CALL pto_recording pto_record_end(PTORuntime* runtime);
PTO_CALL int pto_replay(PTORuntime* runtime, pto_recording recording, const pto_handle* from, const pto_handle* to,
                        uint32_t num_handles);
PTO_CALL int pto_recording_free(PTORuntime* runtime, pto_recording recording);

/* An orchestration function in a shared library of the user: int name(PTORuntime*, const uint64_t* args). Runs in this
 * thread, inside its own scope, and waits for its tasks. */
typedef int (*pto_orchestration_fn)(PTORuntime* runtime, const uint64_t* args);
PTO_CALL int pto_run_orchestration(PTORuntime* runtime, const char* library_path, const char* name,
                                   const uint64_t* args);

/* Two processes: the caller's threads become the workers of the region that another process opened at this path.
 * Returns when that process closes the runtime (0) or dies (PTO_PEER_LOST). Kernels are found by name in the
 * libraries that both sides load; operands must lie in the shared file (pto_alloc, runtime-owned outputs). */
PTO_CALL int pto_workers_run(const char* shared_path, const char* const* library_paths, uint32_t num_libraries);

/* Inspection. */
PTO_CALL int pto_get_stats(PTORuntime* runtime, pto_stats* stats);
/* 1: at this moment no task runs or is ready; remaining tasks wait for events, or for threads that end them. */
PTO_CALL int pto_is_idle(PTORuntime* runtime);
/* 0: off; the records can still be read. One trace at a time, switched while nothing runs. */
PTO_CALL int pto_trace_enable(PTORuntime* runtime, uint32_t max_records_per_thread);
/* Copies up to `capacity` records; returns the number of records. Call it while nothing runs. */
PTO_CALL uint64_t pto_trace_tasks(PTORuntime* runtime, pto_trace_task* records, uint64_t capacity);
PTO_CALL uint64_t pto_trace_stalls(PTORuntime* runtime, pto_trace_stall* records, uint64_t capacity);
PTO_CALL const char* pto_kernel_name(PTORuntime* runtime, pto_kernel kernel);

/* The dependency graph of the tasks submitted between the calls, as JSON (docs/runtime_native.md has the format). */
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
