/// Tile kernels as tasks, for C++20: each kernel of the package on tiles of registered buffers. Header only, over
/// tilewise/tile.h.
///
///   using namespace tilewise;
///   std::vector<float> data(32 * 64), result(32 * 64);
///   const pto::Buffer x = rt.buffer(data), y = rt.buffer(result);
///   const auto src = tile::Tile::of<float>(x, 32, 64), dst = tile::Tile::of<float>(y, 32, 64);
///   tile::gelu(src, dst);                                  // waits for this task only
///   pto::TaskHandle task = tile::gelu_async(src, dst);     // ordered by its data, like every task
///
/// The functions of the single kernels are in tilewise/tile/kernels.hpp, which the build makes from the kernels'
/// declarations. Each checks its call against the declaration; a failure is a tilewise::pto::Error. A blocking call
/// runs its kernel on the calling thread if its task waits for no other. Threads: as Runtime::submit. A call allocates
/// nothing.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "tilewise/pto.hpp"
#include "tilewise/tile.h"

namespace tilewise::tile {

using pto::List;
using pto::TaskHandle;

/// An element of 16 bits in bfloat16, to name the type of a tile.
struct Bf16 {
  uint16_t bits;
};

/// rows x cols elements of a registered buffer, as an operand of tile kernels; by default an absent operand. A plain
/// value that owns nothing. A wrong place or size is an Error of the first call.
class Tile {
 public:
  Tile() = default;
  /// In rows, from element `first` of the buffer on; `stride`: elements from row to row, 0 for `cols`.
  template <class T>
  static Tile of(const pto::BufferRef& buffer, int64_t rows, int64_t cols, int64_t stride = 0, uint64_t first = 0) {
    return Tile(buffer, {buffer.handle(), first * sizeof(T), rows, cols, stride != 0 ? stride : cols, type_of<T>(), 0});
  }
  /// A weight in panels: the whole buffer has pto_tile_packed_elements(rows, cols) elements, written by `pack`.
  template <class T>
  static Tile packed(const pto::BufferRef& buffer, int64_t rows, int64_t cols) {
    return Tile(buffer, {buffer.handle(), 0, rows, cols, cols, type_of<T>(), 1});
  }
  /// The part of a tile in rows that begins at (row, col).
  Tile part(int64_t row, int64_t col, int64_t num_rows, int64_t num_cols) const {
    if (raw_.is_packed != 0 || row < 0 || col < 0 || num_rows < 1 || num_cols < 1 || row > raw_.rows - num_rows ||
        col > raw_.cols - num_cols) {
      pto::detail::refuse(
          "[tile.Tile.part] a part must lie in a tile in rows, and have elements; got another; correct its sizes");
    }
    Tile made(*this);
    made.raw_.offset += static_cast<uint64_t>(row * raw_.stride + col) * (raw_.type == PTO_BF16  ? 2
                                                                          : raw_.type == PTO_F64 ? 8
                                                                                                 : 4);
    made.raw_.rows = num_rows;
    made.raw_.cols = num_cols;
    return made;
  }
  int64_t rows() const noexcept { return raw_.rows; }
  int64_t cols() const noexcept { return raw_.cols; }
  /// Whether there is an operand.
  explicit operator bool() const noexcept { return raw_.buffer != 0; }
  PTORuntime* runtime() const noexcept { return runtime_; }
  const pto_tile* raw() const noexcept { return &raw_; }

 private:
  Tile(const pto::BufferRef& buffer, const pto_tile& raw) : runtime_(buffer.runtime()), raw_(raw) {}
  template <class T>
  static constexpr pto_type type_of() {
    constexpr bool is_known =
        std::is_same_v<T, float> || std::is_same_v<T, double> || std::is_same_v<T, int32_t> || std::is_same_v<T, Bf16>;
    static_assert(is_known, "elements of tiles are float, double, int32_t or tilewise::tile::Bf16");
    if constexpr (std::is_same_v<T, Bf16>) {
      return PTO_BF16;
    } else {
      return pto::detail::type_of<T>();
    }
  }
  PTORuntime* runtime_ = nullptr;
  pto_tile raw_{};
};

/// Attributes of an asynchronous call's task.
struct Options {
  pto::TaskExecutionHints hints = {};
  pto::TaskOptions task = {};
};

/// Writes a weight from rows into panels. T: float or Bf16. `panels` has pto_tile_packed_elements(rows, cols) elements.
template <class T>
void pack(const T* from, int64_t rows, int64_t cols, T* panels, int64_t stride = 0) {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, Bf16>, "weights in panels are float or Bf16");
  const pto_type type = std::is_same_v<T, float> ? PTO_F32 : PTO_BF16;
  pto::detail::check(pto_tile_pack(type, from, stride != 0 ? stride : cols, rows, cols, panels));
}

namespace detail {

/// The operands of a list as the C interface takes them.
class Members {
 public:
  explicit Members(const List<Tile>& tiles) {
    const uint32_t count = std::min<uint32_t>(tiles.size(), PTO_MAX_TILES);  // the call rejects a longer list
    for (uint32_t t = 0; t < count; ++t) tiles_[t] = *tiles.begin()[t].raw();
  }
  const pto_tile* data() const { return tiles_; }

 private:
  pto_tile tiles_[PTO_MAX_TILES];
};

inline void add_runtime(PTORuntime*& runtime, const Tile& tile) {
  if (!tile) return;
  if (runtime == nullptr) runtime = tile.runtime();
  if (runtime != tile.runtime()) [[unlikely]] {
    pto::detail::refuse(
        "[tile] a call's tiles must belong to one runtime; got one of another; register its buffer here");
  }
}
inline void add_runtime(PTORuntime*& runtime, const List<Tile>& tiles) {
  for (const Tile& tile : tiles) add_runtime(runtime, tile);
}
template <class... Tiles>
PTORuntime* runtime_of(const Tiles&... tiles) {
  PTORuntime* runtime = nullptr;
  (add_runtime(runtime, tiles), ...);
  return runtime;
}

inline uint32_t length_of(std::initializer_list<uint32_t> lengths) {
  if (std::count(lengths.begin(), lengths.end(), *lengths.begin()) != static_cast<std::ptrdiff_t>(lengths.size())) {
    pto::detail::refuse("[tile] a call's lists of tiles must have equal lengths; got others; correct them");
  }
  return *lengths.begin();
}

inline void check_run(int status) {
  if (status != PTO_OK) [[unlikely]]
    throw pto::Error(status, pto_last_error());
}
inline pto_task_spec spec_of(PTORuntime* runtime, const Options& options) {
  pto::detail::check_hints(runtime, options.hints);
  return pto::detail::spec_of(options.hints, options.task);
}
inline TaskHandle handle_of(PTORuntime* runtime, pto_task task) { return {runtime, pto::detail::check_id(task)}; }

}  // namespace detail

}  // namespace tilewise::tile

#include "tilewise/tile/kernels.hpp"
