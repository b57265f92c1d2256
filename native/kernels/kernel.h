// The signature of tile kernels, and the table in which they are found by name.
//
// A kernel is a plain function on tiles: it does not allocate, lock, start threads or use Python. Its operands and
// attributes are in the order of its declaration, which stands above its code. declarations.py describes declarations.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tilewise::kernels {

/// One operand. Row-major: element (r, c) at data + (r * stride + c) * element size.
/// A packed weight (see microkernel.h) has rows = out features, cols = in features, and data at the start of a panel.
struct TileView {
  void* data;      // nullptr: the operand is absent
  int64_t rows;
  int64_t cols;
  int64_t stride;  // elements between rows
};

/// Working memory of one worker, reused by every kernel it runs. 64-byte aligned.
struct Scratch {
  std::byte* data;
  int64_t bytes;
};

struct KernelArgs {
  const TileView* tiles;
  int64_t num_tiles;
  const int64_t* ints;
  int64_t num_ints;
  const double* floats;
  int64_t num_floats;
  int64_t row_begin;  // first row (or column) of the loop's range that this task covers
  Scratch scratch;
};

using KernelFn = void (*)(const KernelArgs&);

/// Whether a call has as many operands and attributes as the kernel's declaration says. Reads no operand.
using FitsFn = bool (*)(const KernelArgs&);

/// An entry of the table. Each kernel source has one list per instruction-set level.
struct Entry {
  const char* name;
  KernelFn fn;
  FitsFn fits;
};
struct EntryList {
  const Entry* entries;
  int64_t count;
};

/// Bytes of a worker's scratch if no plan gives a size. Pages that no kernel touches use no memory. A kernel that needs
/// more throws.
inline constexpr int64_t kScratchBytes = 64 << 20;

/// Throws ResourceError: a kernel's working memory does not fit its worker's scratch. Not inline:
/// otherwise the linker would share one level's copy with the others.
[[noreturn]] void scratch_exhausted();

/// The kernel of that name for the instruction set in use; nullptr for an unknown name.
[[gnu::visibility("default")]] const Entry* find_kernel(std::string_view name);

}  // namespace tilewise::kernels
