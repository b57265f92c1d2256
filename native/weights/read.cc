// See read.h.
#include "weights/read.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>

#include "base/check.h"

namespace tilewise::weights {

namespace {

using kernels::Stored;
using kernels::WeightPart;

constexpr int64_t kPanelRows = 32;
constexpr int64_t kChunkBytes = 512 << 10;  // per read, so that data is still in the L2 cache when it is packed
constexpr int64_t kMostBytes = 4 << 20;     // the maximum, for panels with long rows

struct Free {
  void operator()(std::byte* p) const { std::free(p); }
};

std::byte* thread_buffer(int64_t bytes) {
  thread_local std::unique_ptr<std::byte, Free> memory;
  thread_local int64_t capacity = 0;
  if (bytes > capacity) {
    capacity = 0;
    const size_t rounded = (static_cast<size_t>(bytes) + 4095) / 4096 * 4096;
    memory.reset(static_cast<std::byte*>(std::aligned_alloc(4096, rounded)));
    check<ResourceError>(memory != nullptr, "[weights.read] a buffer must be allocatable; got no memory for ",
                         ByteCount(static_cast<uint64_t>(bytes)), "; free some memory");
    capacity = bytes;
  }
  return memory.get();
}

/// Fills `to`; returns false at the first fault.
bool read_fully(int file, std::byte* to, int64_t bytes, int64_t at, Outcome& outcome) {
  while (bytes > 0) {
    const ssize_t got = pread(file, to, bytes, at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) outcome.system_error = errno;
    if (got == 0) outcome.is_whole = false;
    if (got <= 0) return false;
    outcome.bytes_read += got;
    to += got;
    at += got;
    bytes -= got;
  }
  return true;
}

/// Rows and columns to read at a time: whole panels, or whole pairs of columns.
struct Chunk {
  int64_t rows;
  int64_t cols;
};

bool takes_all(const Rectangle& from, const Destination& into) { return into.first == 0 && into.count == from.cols; }

Chunk chunk_of(const Rectangle& from, bool transposed, std::span<const Destination> into) {
  const int64_t item = size_of(from.dtype);
  const int64_t row_unit = transposed ? 2 : kPanelRows, col_unit = transposed ? kPanelRows : 2;
  int64_t cols = std::min(from.cols, std::max(kMostBytes / row_unit / item / col_unit, int64_t{1}) * col_unit);
  for (const Destination& to : into)
    if (!takes_all(from, to)) cols = from.cols;  // columns may then begin anywhere
  const int64_t rows = std::max(kChunkBytes / std::max(cols * item, int64_t{1}) / row_unit, int64_t{1}) * row_unit;
  return {std::min(from.rows, rows), cols};
}

/// Whether [first, first + count) are whole units of `total`, the last of which may be incomplete.
bool covers_units(int64_t first, int64_t count, int64_t total, int64_t unit) {
  const int64_t end = first + count;
  return first >= 0 && count >= 0 && end <= total && first % unit == 0 && (end % unit == 0 || end == total);
}

void check_fit(const Rectangle& from, bool transposed, const Destination& into) {
  const auto& [part, row, col, first, count] = into;
  const int64_t rows = transposed ? count : from.rows, cols = transposed ? from.rows : count;
  const int64_t row_unit = part.packed ? kPanelRows : 1, col_unit = part.packed ? 2 : 1;
  check<ArgumentError>(
      covers_units(first, count, from.cols, 1) && covers_units(row, rows, part.rows, row_unit) &&
          covers_units(col, cols, part.cols, col_unit) && (part.dtype == DType::kF32 || part.dtype == DType::kBF16) &&
          from.row_bytes >= from.cols * size_of(from.dtype) && from.begin >= 0,
      "[weights.read] a rectangle must lie in its part and cover whole panels; got ", rows, " x ", cols, " at [", row,
      "][", col, "] of ", part.rows, " x ", part.cols, "; cut it at multiples of 32 rows and 2 columns");
}

/// The address of a chunk in the only part if the file's bytes need no conversion or packing; else nullptr.
std::byte* in_place(const Rectangle& from, bool transposed, std::span<const Destination> into, int64_t row) {
  const auto& [part, first_row, col, first, count] = into.front();
  const bool same = (from.dtype == Stored::kF32 && part.dtype == DType::kF32) ||
                    (from.dtype == Stored::kBF16 && part.dtype == DType::kBF16);
  if (into.size() != 1 || part.packed || transposed || !same || count != from.cols || count != part.cols)
    return nullptr;
  return part.data + ((first_row + row) * part.cols + col) * size_of(part.dtype);
}

bool read_chunk(const Rectangle& from, int64_t row, int64_t col, Chunk chunk, std::byte* to, Outcome& outcome) {
  const int64_t item = size_of(from.dtype), begin = from.begin + row * from.row_bytes + col * item;
  const int64_t row_bytes = chunk.cols * item;
  if (row_bytes == from.row_bytes) return read_fully(from.file, to, chunk.rows * row_bytes, begin, outcome);
  for (int64_t r = 0; r < chunk.rows; ++r)
    if (!read_fully(from.file, to + r * row_bytes, row_bytes, begin + r * from.row_bytes, outcome)) return false;
  return true;
}

/// Stores the columns of a chunk, at [row][col] of the rectangle, that a destination takes; returns whether all numbers
/// are finite.
bool store_chunk(const kernels::StoredBlock& chunk, const Destination& into, int64_t row, int64_t col, bool transposed,
                 kernels::StoreFn store) {
  const int64_t begin = std::max(into.first, col), end = std::min(into.first + into.count, col + chunk.cols);
  if (begin >= end) return true;
  kernels::StoredBlock block = chunk;
  block.data += (begin - col) * size_of(chunk.dtype);
  block.cols = end - begin;
  const int64_t along = begin - into.first;
  return store(block, into.part, into.row + (transposed ? along : row), into.col + (transposed ? row : along),
               transposed);
}

}  // namespace

Outcome read_weights(const Rectangle& from, bool transposed, std::span<const Destination> into,
                     kernels::StoreFn store) {
  check<ArgumentError>(!into.empty(), "[weights.read] a rectangle must have a part; got none; pass one");
  for (const Destination& to : into) check_fit(from, transposed, to);
  Outcome outcome;
  if (from.rows == 0 || from.cols == 0) return outcome;
  const Chunk most = chunk_of(from, transposed, into);
  const int64_t item = size_of(from.dtype);
  for (int64_t r = 0; r < from.rows; r += most.rows)
    for (int64_t c = 0; c < from.cols; c += most.cols) {
      const Chunk chunk = {std::min(most.rows, from.rows - r), std::min(most.cols, from.cols - c)};
      std::byte* memory = most.cols == from.cols ? in_place(from, transposed, into, r) : nullptr;
      if (memory == nullptr) memory = thread_buffer(most.rows * most.cols * item);
      if (!read_chunk(from, r, c, chunk, memory, outcome)) return outcome;
      const kernels::StoredBlock block = {memory, chunk.cols * item, chunk.rows, chunk.cols, from.dtype};
      for (const Destination& to : into)
        if (!store_chunk(block, to, r, c, transposed, store)) {
          outcome.is_finite = false;
          return outcome;
        }
    }
  return outcome;
}

bool store_block(const kernels::StoredBlock& from, bool transposed, std::span<const Destination> into,
                 kernels::StoreFn store) {
  const Rectangle all = {-1, 0, from.stride, from.rows, from.cols, from.dtype};
  for (const Destination& to : into) check_fit(all, transposed, to);
  bool is_finite = true;
  for (const Destination& to : into) is_finite &= store_chunk(from, to, 0, 0, transposed, store);
  return is_finite;
}

}  // namespace tilewise::weights
