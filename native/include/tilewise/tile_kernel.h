/* Kernels of users for tile programs, in C or C++.
 *
 * A task of a tile program calls its kernel with the tiles and attributes of its instruction:
 *
 *   int scale(const tilewise_kernel_args* args) {
 *     if (args->num_tiles != 1 || args->num_floats != 1) return 1;
 *     const tilewise_tile* y = &args->tiles[0];
 *     for (int64_t r = 0; r < y->rows; ++r)
 *       for (int64_t c = 0; c < y->cols; ++c) ((float*)y->data)[r * y->stride + c] *= (float)args->floats[0];
 *     return 0;
 *   }
 *
 * A kernel runs on one worker, next to other tasks. It writes only the tiles that its instruction says it writes. It
 * must not wait for other tasks. Nothing checks how many tiles and attributes an instruction gives it. */
#ifndef TILEWISE_TILE_KERNEL_H
#define TILEWISE_TILE_KERNEL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A tile. Element (r, c) is at data + (r * stride + c) * element size. */
typedef struct tilewise_tile {
  void* data; /* NULL: the operand is absent */
  int64_t rows;
  int64_t cols;
  int64_t stride; /* elements between rows */
} tilewise_tile;

typedef struct tilewise_kernel_args {
  const tilewise_tile* tiles; /* in the order of the instruction's operands */
  int64_t num_tiles;
  const int64_t* ints;
  int64_t num_ints;
  const double* floats;
  int64_t num_floats;
  int64_t row_begin; /* first row of the loop that this task covers */
  void* scratch;     /* working memory of the worker, 64-byte aligned; later tasks overwrite it */
  int64_t scratch_bytes;
} tilewise_kernel_args;

/* Returns 0 for success. Any other value fails the task, and the error names it. */
typedef int (*tilewise_tile_kernel)(const tilewise_kernel_args* args);

#ifdef __cplusplus
}
#endif

#endif
