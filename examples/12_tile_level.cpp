// The five ways to use tile calls from C++: tilewise/tile.hpp on a task runtime.
//
// Patterns 1 to 5 are the usage patterns of the design plan (its section 3.7), for tilewise instead of nntile. A
// comment that begins with "C++:" says where a line differs from the plan, and why. Every result is compared; the exit
// code says whether all are right. Build: g++ -std=c++20 -O2 12_tile_level.cpp -I"$INCLUDE" -L"$LIBRARY"
// -ltilewise_tile -ltilewise_pto (docs/runtime_native.md).
#include <cmath>
#include <cstdio>
#include <vector>

#include "tilewise/tile.hpp"

namespace tile = tilewise::tile;
namespace pto = tilewise::pto;  // C++: the plan calls this namespace starpu
using Index = int64_t;

// C++: the plan leaves out what a tensor is. Here: the tiles of a matrix, one below the other.
template <typename T>
struct Tensor {
  struct {
    Index nelems;
  } grid;
  tile::Tile matrix;
  Index tile_rows;
  tile::Tile get_tile(Index i) const { return matrix.part(i * tile_rows, 0, tile_rows, matrix.cols()); }
};

// Pattern 5: Tensor-level collecting tasks (for future synchronization)
template <typename T>
pto::TaskGroup gelu_async(const Tensor<T>& src, const Tensor<T>& dst) {
  pto::TaskGroup tasks;
  for (Index i = 0; i < src.grid.nelems; ++i) {
    // C++: tile calls take the dtype from the tile, so that there is no submit<std::tuple<T>>
    auto task = tile::gelu_async(src.get_tile(i), dst.get_tile(i));
    tasks.add(std::move(task));
  }
  return tasks;  // C++: Caller can wait; the destructor does not, because the data orders the tasks
}

namespace {

constexpr Index kRows = 64, kCols = 48, n_tiles = 4;

float gelu(float x) { return 0.5f * x * (1 + std::erf(x / std::sqrt(2.0f))); }

// C++: the plan leaves out how memory becomes tiles. A matrix and its registration with the runtime:
struct Matrix {
  std::vector<float> data;
  pto::Buffer buffer;
  tile::Tile whole;
  explicit Matrix(pto::Runtime& rt)
      : data(kRows * kCols), buffer(rt.buffer(data)), whole(tile::Tile::of<float>(buffer, kRows, kCols)) {
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i % 17) / 4 - 2;
  }
  tile::Tile operator[](Index i) const { return whole.part(i * kRows / n_tiles, 0, kRows / n_tiles, kCols); }
  // The largest distance of an element from what gelu should have written.
  bool is_gelu_of(const std::vector<float>& source, bool then_relu = false) const {
    const auto values = buffer.read<float>();  // waits for the tasks that write it
    for (size_t i = 0; i < source.size(); ++i) {
      const float expected = then_relu ? std::fmax(gelu(source[i]), 0.0f) : gelu(source[i]);
      if (std::fabs(values[i] - expected) > 1e-5f) return false;
    }
    return true;
  }
};

}  // namespace

int main() {
  pto::Runtime rt;
  const Matrix input(rt), first(rt), second(rt), third(rt), b(rt), c(rt), fifth(rt);

  {
    // Pattern 1: Fire-and-forget (async)
    auto task = tile::gelu_async(input.whole, first.whole);
    task.detach();  // Don't wait
  }

  // Pattern 2: Wait immediately (blocking)
  tile::gelu(input.whole, second.whole);  // Blocks until THIS task completes

  // Pattern 3: Batch submission then wait
  pto::TaskGroup group;
  for (Index i = 0; i < n_tiles; ++i) {
    group.add(tile::gelu_async(input[i], third[i]));
  }
  group.wait_all();  // Wait for all tasks in this group

  // Pattern 4: Pipeline with dependencies
  auto task1 = tile::gelu_async(input.whole, b.whole);
  auto task2 = tile::relu_async(b.whole, c.whole);  // The runtime handles dependency via the data
  task2.wait();  // Waiting for task2 implicitly waits for task1 due to data dependency

  // Pattern 5: see gelu_async above
  const Tensor<float> src{{n_tiles}, input.whole, kRows / n_tiles}, dst{{n_tiles}, fifth.whole, kRows / n_tiles};
  pto::TaskGroup tasks = gelu_async(src, dst);
  tasks.wait_all();

  const bool is_right = first.is_gelu_of(input.data) && second.is_gelu_of(input.data) && third.is_gelu_of(input.data) &&
                        task1.is_complete() && c.is_gelu_of(input.data, true) && fifth.is_gelu_of(input.data);
  std::printf("%s\n", is_right ? "all five patterns computed gelu" : "a result is wrong");
  return is_right ? 0 : 1;
}
