/* Kernels of a user, for test_user_kernels.py. */
#include <tilewise/tile_kernel.h>

/* y = floats[0] * x + ints[0] + row. Status 3: the task is at row ints[1]. */
int affine(const tilewise_kernel_args* args) {
  if (args->num_tiles != 2 || args->num_ints != 2 || args->num_floats != 1) return 1;
  const tilewise_tile *y = &args->tiles[0], *x = &args->tiles[1];
  if (args->row_begin == args->ints[1]) return 3;
  for (int64_t r = 0; r < y->rows; ++r) {
    for (int64_t c = 0; c < y->cols; ++c) {
      const float value = (float)args->floats[0] * ((const float*)x->data)[r * x->stride + c];
      ((float*)y->data)[r * y->stride + c] = value + (float)(args->ints[0] + args->row_begin + r);
    }
  }
  return 0;
}
