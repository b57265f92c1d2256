// See weights.h. A panel is written a few columns at a time, so that converted rows stay in L1 until they are packed.
#include "kernels/loading/weights.h"

#include "kernels/pack.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
struct Half {
  uint16_t bits;
};

/// Exact. Denormals are computed by a subtraction of normal numbers, so that flush-to-zero modes do not affect them.
TILEWISE_INLINE float widen(Half x) {
  const uint32_t magnitude = x.bits & 0x7fffu, shifted = magnitude << 13;
  const float small = bits_of<float>(shifted + 0x38800000u) - bits_of<float>(0x38800000u);
  const uint32_t normal = shifted + 0x38000000u, huge = shifted | 0x7f800000u;
  const uint32_t value = magnitude < 0x400u ? bits_of<uint32_t>(small) : magnitude < 0x7c00u ? normal : huge;
  return bits_of<float>(value | static_cast<uint32_t>(x.bits & 0x8000u) << 16);
}
TILEWISE_INLINE float widen(double x) { return static_cast<float>(x); }

namespace {

constexpr int64_t kColumns = 256;  // columns of a panel at a time: even, and 32 rows of them fit L1

template <class S, class T>
constexpr bool kSame = false;
template <class T>
constexpr bool kSame<T, T> = true;

template <class S, class T>
TILEWISE_INLINE void convert(const S* from, T* to, int64_t n) {
  if constexpr (kSame<S, T>) {
    if (static_cast<const void*>(from) != to) __builtin_memcpy(to, from, n * sizeof(T));
  } else {
    for (int64_t i = 0; i < n; ++i) narrow(widen(from[i]), to + i);
  }
}

/// Not zero if any number is infinite or NaN: only an exponent of all ones overflows into the sign bit.
TILEWISE_INLINE uint32_t overflows(const float* x, int64_t n) {
  uint32_t overflow = 0;
  for (int64_t i = 0; i < n; ++i) overflow |= (bits_of<uint32_t>(x[i]) & 0x7f800000u) + 0x00800000u;
  return overflow & 0x80000000u;
}
TILEWISE_INLINE uint32_t overflows(const bf16* x, int64_t n) {
  uint16_t overflow = 0;
  for (int64_t i = 0; i < n; ++i) overflow = static_cast<uint16_t>(overflow | ((x[i] & 0x7f80u) + 0x0080u));
  return overflow & 0x8000u;
}

template <class S>
TILEWISE_INLINE const S* element(const StoredBlock& block, int64_t row, int64_t col) {
  return reinterpret_cast<const S*>(block.data + row * block.stride) + col;
}

/// The address of column `col` in the panel that starts at `row`.
template <class D>
TILEWISE_INLINE uint32_t* step_of(const WeightPart& part, int64_t row, int64_t col) {
  const int64_t k_pad = round_up(part.cols, 2);
  return reinterpret_cast<uint32_t*>(part.data) + (row * k_pad + col * kPanel) / D::kPerStep;
}

/// Clears the padding after an odd last column: fp32 panels have a step of zeros there; bf16 panels pair the column
/// with zero.
template <class D>
TILEWISE_INLINE void pad_steps(const WeightPart& part, int64_t row, int64_t end_col) {
  if (D::kPerStep == 1 && end_col == part.cols && part.cols % 2 == 1)
    __builtin_memset(step_of<D>(part, row, end_col), 0, kPanel * 4);
}

template <class S, class D>
uint32_t pack_rows(const StoredBlock& block, const WeightPart& part, int64_t row, int64_t col) {
  using T = typename D::T;
  alignas(64) T converted[kSame<S, T> ? 1 : kPanel * kColumns];
  uint32_t overflow = 0;
  for (int64_t first = 0; first < block.rows; first += kPanel) {
    const int64_t rows = smaller(kPanel, block.rows - first);
    for (int64_t c = 0; c < block.cols; c += kColumns) {
      const int64_t columns = smaller(kColumns, block.cols - c);
      const T* tile = converted;
      int64_t stride = kColumns;
      if constexpr (kSame<S, T>) {
        tile = element<T>(block, first, c);
        stride = block.stride / static_cast<int64_t>(sizeof(T));
      } else {
        for (int64_t r = 0; r < rows; ++r) convert(element<S>(block, first + r, c), converted + r * kColumns, columns);
      }
      for (int64_t r = 0; r < rows; ++r) overflow |= overflows(tile + r * stride, columns);
      pack_panel_across<D>(step_of<D>(part, row + first, col + c), tile, stride, rows, 0, columns);
    }
    pad_steps<D>(part, row + first, col + block.cols);
  }
  return overflow;
}

/// For transposed blocks: a step is one row of the block, or two interleaved.
template <class S, class D>
uint32_t pack_columns(const StoredBlock& block, const WeightPart& part, int64_t row, int64_t col) {
  using T = typename D::T;
  alignas(64) T steps[D::kPerStep][kPanel];
  uint32_t overflow = 0;
  for (int64_t first = 0; first < block.cols; first += kPanel) {
    const int64_t lanes = smaller(kPanel, block.cols - first);
    for (int64_t k = 0; k < block.rows; k += D::kPerStep) {
      const int64_t count = smaller(D::kPerStep, block.rows - k);
      for (int64_t j = 0; j < count; ++j) {
        convert(element<S>(block, k + j, first), steps[j], lanes);
        overflow |= overflows(steps[j], lanes);
      }
      partial_step<kPanel>(step_of<D>(part, row + first, col + k), steps[0], count > 1 ? steps[1] : nullptr, lanes);
    }
    pad_steps<D>(part, row + first, col + block.rows);
  }
  return overflow;
}

template <class S, class T>
uint32_t copy_block(const StoredBlock& block, const WeightPart& part, int64_t row, int64_t col, bool transposed) {
  T* const to = reinterpret_cast<T*>(part.data) + row * part.cols + col;
  uint32_t overflow = 0;
  for (int64_t r = 0; r < block.rows; ++r) {
    const S* from = element<S>(block, r, 0);
    if (!transposed) {
      convert(from, to + r * part.cols, block.cols);
      overflow |= overflows(to + r * part.cols, block.cols);
      continue;
    }
    for (int64_t c = 0; c < block.cols; ++c) {
      convert(from + c, to + c * part.cols + r, 1);
      overflow |= overflows(to + c * part.cols + r, 1);
    }
  }
  return overflow;
}

template <class S, class D>
uint32_t store_as(const StoredBlock& block, const WeightPart& part, int64_t row, int64_t col, bool transposed) {
  if (!part.packed) return copy_block<S, typename D::T>(block, part, row, col, transposed);
  return transposed ? pack_columns<S, D>(block, part, row, col) : pack_rows<S, D>(block, part, row, col);
}

template <class S>
uint32_t store_from(const StoredBlock& block, const WeightPart& part, int64_t row, int64_t col, bool transposed) {
  return part.dtype == DType::kBF16 ? store_as<S, BF16>(block, part, row, col, transposed)
                                    : store_as<S, F32>(block, part, row, col, transposed);
}

}  // namespace

bool store_weights(const StoredBlock& block, const WeightPart& part, int64_t row, int64_t col, bool transposed) {
  switch (block.dtype) {
    case Stored::kF32:
      return store_from<float>(block, part, row, col, transposed) == 0;
    case Stored::kBF16:
      return store_from<bf16>(block, part, row, col, transposed) == 0;
    case Stored::kF16:
      return store_from<Half>(block, part, row, col, transposed) == 0;
    case Stored::kF64:
      return store_from<double>(block, part, row, col, transposed) == 0;
  }
  return false;
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
