/* Tile kernels as tasks, for C: each kernel of the package on tiles of registered buffers.
 *
 *   pto_tile x = pto_tile_of(handle_of_x, PTO_F32, 32, 64), y = pto_tile_of(handle_of_y, PTO_F32, 32, 64);
 *   pto_tile_gelu(rt, &x, &y);                             waits for this task only
 *   pto_task task = pto_tile_gelu_async(rt, &x, &y, NULL); ordered by its data, like every task
 *
 * The functions of the single kernels are in tilewise/tile/kernels.h, which the build makes from the kernels'
 * declarations. A call is checked against its kernel's declaration: dtypes, sizes, operands that may be absent, numbers
 * of attributes. Values of operands that a kernel reads as indices, and the steps of update, are not checked. Link with
 * -ltilewise_tile -ltilewise_pto. Failures and threads: tilewise/pto_api.h. */
#ifndef TILEWISE_TILE_H
#define TILEWISE_TILE_H

#include "tilewise/pto_api.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PTO_MAX_TILES 64     /* operands of a call, present or absent */
#define PTO_MAX_TILE_INTS 512 /* integers of a call, and as many floats */

/* An operand: rows x cols elements of a registered buffer. All zero: the operand is absent. */
typedef struct pto_tile {
  pto_handle buffer;
  uint64_t offset;  /* bytes from the buffer's start to element (0, 0) */
  int64_t rows, cols;
  int64_t stride;   /* elements from row to row; ignored in panels */
  pto_type type;    /* PTO_F32, PTO_BF16, PTO_F64 or PTO_I32 */
  int32_t is_packed; /* 1: a weight in panels, pto_tile_packed_elements(rows, cols) elements long */
} pto_tile;

/* A kernel for all its dtypes; the operands of a call determine the dtype. */
typedef int32_t pto_tile_kernel;

typedef struct pto_tile_call {
  pto_tile_kernel kernel;
  uint32_t num_tiles;
  const pto_tile* tiles; /* in the order of the kernel's declaration; adjacent lists alternate */
  uint32_t num_ints;
  uint32_t num_floats;
  const int64_t* ints; /* without those that the declaration computes */
  const double* floats;
  /* NULL, or the task's attributes: worker_type, after, waits, priority, target_worker, predicate, deadline_s, name.
   * The call itself sets kernel, parameters and scalars. */
  const pto_task_spec* options;
} pto_tile_call;

/* The kernel of a name without dtype, such as "gelu"; a negative status for any other name. */
PTO_CALL pto_tile_kernel pto_tile_kernel_find(const char* name);
/* Submits the call as a task. Its error is kept until pto_task_release if options->flags has PTO_KEEP. */
PTO_CALL pto_task pto_tile_submit(PTORuntime* runtime, const pto_tile_call* call);
/* Submits the call, and waits for this task only. The caller runs it if it waits for no other task. */
PTO_CALL int pto_tile_run(PTORuntime* runtime, const pto_tile_call* call);

/* The number of elements of a weight of rows x cols in panels; 0 if it is too large. */
PTO_CALL uint64_t pto_tile_packed_elements(int64_t rows, int64_t cols);
/* Writes a weight of PTO_F32 or PTO_BF16 from rows into panels. `stride`: elements from row to row. */
PTO_CALL int pto_tile_pack(pto_type type, const void* from, int64_t stride, int64_t rows, int64_t cols, void* panels);

/* The whole buffer as one tile. */
static inline pto_tile pto_tile_of(pto_handle buffer, pto_type type, int64_t rows, int64_t cols) {
  pto_tile tile = {buffer, 0, rows, cols, cols, type, 0};
  return tile;
}

#ifdef __cplusplus
}
#endif

#include "tilewise/tile/kernels.h"

#endif /* TILEWISE_TILE_H */
