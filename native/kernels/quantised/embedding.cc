// embedding_quantised: rows of a table in blocks.
#include "kernels/declared/quantised/embedding.h"

#include "kernels/kernel.h"
#include "kernels/quantised/formats.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

// kernel embedding_quantised  bf16
//   out out[m d]
//   in ids:i32[m 1], table:i32![_ _]
//   int format, vocab_begin
//   each m
//   internal its table is in blocks, which only loading makes
//   flops 0
//   bytes 2 * item * m * d
void EmbeddingQuantisedKernel::run() const {
  for (int64_t r = 0; r < out.rows; ++r) {
    const int64_t n = *ids.row(r) - vocab_begin;
    if (n >= 0 && n < table.rows) {
      const auto* panel = reinterpret_cast<const uint8_t*>(table.row(n - n % kPanel));
      kFormats[format].read_row(panel, kFormats[format].block, n % kPanel, out.cols, out.row(r));
    } else {
      for (int64_t c = 0; c < out.cols; ++c) out.row(r)[c] = 0;
    }
  }
}

}  // namespace
}  // namespace tilewise::kernels::TILEWISE_ISA_NS

#include "kernels/declared/quantised/embedding_entries.h"
