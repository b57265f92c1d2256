// Checks a tile call against its kernel's declaration, and makes the task's parameters of it.
//
// Who may call: any thread. Blocks: never. Throws ArgumentError, before anything is submitted. Memory: on the caller's
// stack; a call allocates nothing.
#pragma once
#include <string_view>

#include "kernels/kernel.h"
#include "tiles/rules.h"
#include "tilewise/tile.h"

namespace tilewise::tiles {

struct PreparedCall {
  const KernelRule* rule;
  const kernels::Entry* entry;  // of the dtype
  uint32_t number;              // of the entry: kernel * kNumDtypes + dtype
  uint32_t num_tiles, num_ints, num_floats, num_params;
  kernels::TileView views[PTO_MAX_TILES];  // without addresses
  int64_t ints[PTO_MAX_TILE_INTS];         // with the computed ones
  const double* floats;
  pto_param params[PTO_MAX_PARAMS];        // of the operands that are present, in order
  pto_region regions[PTO_MAX_PARAMS];
};

/// All kernels that have tile calls.
std::span<const KernelRule> rules();
/// The kernel of an entry's number, at the instruction-set level in use.
const kernels::Entry& entry_at(uint32_t number);

void prepare(PTORuntime* runtime, const pto_tile_call& call, PreparedCall& made);

/// Elements of a weight in panels (kernels/microkernel.h); 0 if its sizes are not positive or too large.
uint64_t packed_elements(int64_t rows, int64_t cols);

}  // namespace tilewise::tiles
