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

/// The same columns of rows of a file that are `row_bytes` apart.
struct Rectangle {
  int file;  // a descriptor, open for reading
  int64_t begin;  // of the first element, from the file's start
  int64_t row_bytes;
  int64_t rows;
  int64_t cols;
  kernels::Stored dtype;
};

/// Columns [first, first + count) of a rectangle's rows are stored in a part from [row][col] on.
struct Destination {
  kernels::WeightPart part;
  int64_t row;
  int64_t col;
  int64_t first;
  int64_t count;
};

/// The result of a read. After the first fault reading stops, and the parts are invalid.
struct Outcome {
  int64_t bytes_read = 0;
  bool is_finite = true;  // every converted number is finite
  bool is_whole = true;   // the file does not end before the rectangle
  int system_error = 0;  // errno of a failed read
};

/// Reads a rectangle for all its destinations (a weight and its master, the columns of several devices); transposed:
/// the file's rows are the parts' columns. Stops at the first fault.
Outcome read_weights(const Rectangle& from, bool transposed, std::span<const Destination> into, kernels::StoreFn store);

/// The same with rows in memory; returns whether all numbers are finite as the parts have them.
bool store_block(const kernels::StoredBlock& from, bool transposed, std::span<const Destination> into,
                 kernels::StoreFn store);

}  // namespace tilewise::weights
