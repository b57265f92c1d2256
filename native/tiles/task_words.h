// A tile call as the scalars of its task, from which its kernel makes the operands again.
//
// Word 0 is a header. Then each operand has a word with rows and columns; a word with two strides per two operands,
// unless all operands are contiguous; then integers and floats. A call that needs more than a task's scalars has its
// words in memory, and the task has their address.
#pragma once
#include <bit>
#include <cstring>

#include "tiles/prepare.h"

namespace tilewise::tiles {

inline constexpr uint32_t kMaxWords = 1 + PTO_MAX_TILES + PTO_MAX_TILES / 2 + 2 * PTO_MAX_TILE_INTS;

struct Header {
  uint16_t kernel;
  uint8_t num_tiles;
  uint8_t is_contiguous : 1;
  uint8_t is_apart : 1;  // word 1 is the address of the words
  uint16_t num_ints, num_floats;
};
static_assert(sizeof(Header) == 8);

/// Writes the words of a call; returns their number.
inline uint32_t write_words(const PreparedCall& call, uint64_t* words) {
  Header header{};
  header.kernel = static_cast<uint16_t>(call.number);
  header.num_tiles = static_cast<uint8_t>(call.num_tiles);
  header.num_ints = static_cast<uint16_t>(call.num_ints);
  header.num_floats = static_cast<uint16_t>(call.num_floats);
  bool is_contiguous = true;
  uint32_t at = 1;
  for (uint32_t t = 0; t < call.num_tiles; ++t) {
    const kernels::TileView& view = call.views[t];
    is_contiguous &= view.stride == view.cols;
    words[at++] = static_cast<uint64_t>(view.rows) << 32 | static_cast<uint64_t>(view.cols);
  }
  header.is_contiguous = is_contiguous ? 1 : 0;
  for (uint32_t t = 0; !is_contiguous && t < call.num_tiles; t += 2) {
    const uint64_t next = t + 1 < call.num_tiles ? static_cast<uint64_t>(call.views[t + 1].stride) : 0;
    words[at++] = next << 32 | static_cast<uint64_t>(call.views[t].stride);
  }
  for (uint32_t i = 0; i < call.num_ints; ++i) words[at++] = static_cast<uint64_t>(call.ints[i]);
  for (uint32_t f = 0; f < call.num_floats; ++f) words[at++] = std::bit_cast<uint64_t>(call.floats[f]);
  words[0] = std::bit_cast<uint64_t>(header);
  return at;
}

/// Calls the kernel on operands at these addresses; absent operands have none.
template <class Call>
void read_words(const uint64_t* words, void* const* addresses, const kernels::Scratch& scratch, Call&& call) {
  auto header = std::bit_cast<Header>(words[0]);
  if (header.is_apart != 0) {
    words = reinterpret_cast<const uint64_t*>(static_cast<uintptr_t>(words[1]));
    header = std::bit_cast<Header>(words[0]);
  }
  kernels::TileView views[PTO_MAX_TILES];
  const uint64_t* const strides = words + 1 + header.num_tiles;
  for (uint32_t t = 0; t < header.num_tiles; ++t) {
    const auto rows = static_cast<int64_t>(words[1 + t] >> 32), cols = static_cast<int64_t>(words[1 + t] & UINT32_MAX);
    const int64_t stride =
        header.is_contiguous != 0 ? cols : static_cast<int64_t>(strides[t / 2] >> (t % 2 * 32) & UINT32_MAX);
    views[t] = {rows == 0 ? nullptr : *addresses++, rows, cols, stride};
  }
  const uint64_t* const ints = strides + (header.is_contiguous != 0 ? 0 : (header.num_tiles + 1) / 2);
  const uint64_t* const floats = ints + header.num_ints;
  call(header.kernel,
       kernels::KernelArgs{views, header.num_tiles, reinterpret_cast<const int64_t*>(ints), header.num_ints,
                           reinterpret_cast<const double*>(floats), header.num_floats, 0, scratch});
}

}  // namespace tilewise::tiles
