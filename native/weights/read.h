// Reads rectangles of stored tensors from files or memory into the devices' parts: each byte is read once, converted,
// and packed while it is in the cache.
//
// Purpose: loading at the speed of the page cache, without mapping files. Who may call: any thread; several at once if
// they write different panels. Blocks: for the file. Memory: a buffer of a few MiB per thread, kept until the thread
// ends. Rejects rectangles that do not fit a part, or begin within a panel or pair (ArgumentError).
#pragma once
#include <span>

#include "kernels/loading/weights.h"

namespace tilewise::weights {

/// Rows of a file that lie `row_bytes` apart, of each the same columns.
struct Rectangle {
  int file;  // a descriptor, open for reading
  int64_t begin;  // of the first element, from the file's start
  int64_t row_bytes;
  int64_t rows;
  int64_t cols;
  kernels::Stored dtype;
};

/// Columns [first, first + count) of a rectangle's rows go to [row][col] of a part and on.
struct Destination {
  kernels::WeightPart part;
  int64_t row;
  int64_t col;
  int64_t first;
  int64_t count;
};

/// What became of it. Nothing is said of what lies behind the first fault; the parts are then of no use.
struct Outcome {
  int64_t bytes_read = 0;
  bool is_finite = true;  // every number, as the parts have it
  bool is_whole = true;  // the file went on to the rectangle's end
  int system_error = 0;  // errno of a failed read
};

/// Reads a rectangle for all its destinations (a weight and its master, the columns of several devices); transposed:
/// the file's rows are the parts' columns. Ends at the first fault.
Outcome read_weights(const Rectangle& from, bool transposed, std::span<const Destination> into, kernels::StoreFn store);

/// The same with rows in memory; returns whether all numbers are finite as the parts have them.
bool store_block(const kernels::StoredBlock& from, bool transposed, std::span<const Destination> into,
                 kernels::StoreFn store);

}  // namespace tilewise::weights
