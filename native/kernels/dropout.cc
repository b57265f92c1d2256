// Dropout with a counter-based generator: whether an element is dropped depends only on keys and on its index in the
// whole tensor, so the mask is the same on every mesh, for every tiling, and in the backward pass.
#include "kernels/declared/dropout.h"

#include "kernels/kernel.h"
#include "kernels/transfer.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

inline constexpr int kMaxDims = 16;

struct Four {
  uint32_t at[4];
};

/// Philox4x32-10: four random words of a counter and a key (Salmon et al., Parallel random numbers: as easy as 1, 2,
/// 3).
TILEWISE_INLINE Four philox(Four counter, uint32_t key, uint32_t other) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter.at[0], b = uint64_t{0xCD9E8D57} * counter.at[2];
    counter = {{static_cast<uint32_t>(b >> 32) ^ counter.at[1] ^ key, static_cast<uint32_t>(b),
                static_cast<uint32_t>(a >> 32) ^ counter.at[3] ^ other, static_cast<uint32_t>(a)}};
    key += 0x9E3779B9;
    other += 0xBB67AE85;
  }
  return counter;
}

// kernel dropout  f32 bf16
//   out out[m d]
//   in x[m d], key:i32[_ _]
//   int rank, size...(rank), first...(rank), stride...(rank)
//   float p
//   internal its sizes describe items of many dims, and a tile has rows and columns
//   flops 10 * m * d
//   bytes 2 * item * m * d
/// x / (1 - p), or 0 with probability p. A row of the key belongs to an item (see dims.cc): its number in the batch,
/// two keys, and the step, which is negative if nothing is dropped. Element (i_0, i_1, ...) of an item has the index Σ
/// (first_d + i_d) stride_d in the whole item; the last stride is 1.
template <class T>
void DropoutKernel<T>::run() const {
  if (out.rows * out.cols == 0 || rank > kMaxDims || rank < 1) return;
  const int64_t last = rank - 1, width = size[last];
  int64_t rows = 1;
  for (int64_t d = 0; d < last; ++d) rows *= size[d];
  const float factor = 1.0f / (1.0f - p);
  const auto limit = static_cast<uint64_t>(static_cast<double>(p) * 4294967296.0);
  const int64_t items = out.rows * out.cols / (rows * width);
  const T* from = x.elements();
  T* to = out.elements();
  for (int64_t item = 0; item < items; ++item) {
    const int32_t* numbers = key.elements() + item * 4;
    const auto element = static_cast<uint32_t>(numbers[0]), step = static_cast<uint32_t>(numbers[3]);
    int64_t index[kMaxDims] = {};
    for (int64_t r = 0; r < rows; ++r, from += width, to += width) {
      if (numbers[3] < 0) {
        __builtin_memcpy(to, from, static_cast<size_t>(width) * sizeof(T));
        continue;
      }
      int64_t at = first[last];
      for (int64_t d = 0; d < last; ++d) at += (first[d] + index[d]) * stride[d];
      Four words = {};
      for (int64_t c = 0; c < width; ++c, ++at) {
        if (c == 0 || at % 4 == 0)
          words = philox({{static_cast<uint32_t>(at / 4), static_cast<uint32_t>(at / 4 >> 32), element, step}},
                         static_cast<uint32_t>(numbers[1]), static_cast<uint32_t>(numbers[2]));
        const bool is_kept = words.at[at % 4] >= limit;
        store(to + c, set(is_kept ? widen(from[c]) * factor : 0.0f), 1);
      }
      for (int64_t d = last - 1; d >= 0 && ++index[d] == size[d]; --d) index[d] = 0;
    }
  }
}

}  // namespace
}  // namespace tilewise::kernels::TILEWISE_ISA_NS

#include "kernels/declared/dropout_entries.h"
