// Kernels of tensors with any number of dims: they move, reduce, gather and scatter elements.
//
// A task has the same whole number of items of every operand. An item is what one index of the leading dims selects,
// such as an element of the batch; its elements are contiguous. Sizes and strides are those of an item.
#include "kernels/declared/dims.h"

#include "kernels/kernel.h"
#include "kernels/register_block.h"
#include "kernels/tree.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

inline constexpr int kMaxDims = 16;

/// Steps through the indices of some dims, the last one fastest, and keeps an offset into each of kTensors tensors.
template <int kTensors>
struct Odometer {
  int rank = 0;
  int64_t size[kMaxDims], index[kMaxDims], stride[kTensors][kMaxDims];
  int64_t at[kTensors] = {};

  void add(int64_t dim_size, const int64_t (&strides)[kTensors]) {
    size[rank] = dim_size;
    index[rank] = 0;
    for (int t = 0; t < kTensors; ++t) stride[t][rank] = strides[t];
    ++rank;
  }
  int64_t count() const {
    int64_t total = 1;
    for (int d = 0; d < rank; ++d) total *= size[d];
    return total;
  }
  void step() {
    for (int d = rank - 1; d >= 0; --d) {
      for (int t = 0; t < kTensors; ++t) at[t] += stride[t][d];
      if (++index[d] < size[d]) return;
      for (int t = 0; t < kTensors; ++t) at[t] -= stride[t][d] * size[d];
      index[d] = 0;
    }
  }
};

TILEWISE_INLINE int64_t elements_of(const TileView& tile) { return tile.rows * tile.cols; }

template <class T>
TILEWISE_INLINE void copy_elements(T* to, const T* from, int64_t n) {
  __builtin_memcpy(to, from, static_cast<size_t>(n) * sizeof(T));
}

/// A dim whose elements are adjacent in the source, if it is not the last one and no dim is cut; else -1.
template <class Kernel>
TILEWISE_INLINE int64_t contiguous_dim(const Kernel& call) {
  int64_t adjacent = -1;
  for (int64_t d = 0; d < call.rank; ++d) {
    if (call.begin[d] > 0 || call.end[d] < call.size[d]) return -1;
    if (call.stride[d] == 1 && call.size[d] > 1) adjacent = d;
  }
  return adjacent;
}

/// Exchanges the last dim and another one, in blocks that stay in the first cache.
template <class Kernel>
TILEWISE_INLINE void transpose_items(const Kernel& call, int64_t across, int64_t items, int64_t count) {
  constexpr int64_t kBlock = 32;
  const int64_t last = call.rank - 1, width = call.size[last], step = call.stride[last], height = call.size[across];
  Odometer<2> others;
  int64_t out_strides[kMaxDims], run = 1;
  for (int64_t d = last; d >= 0; --d) {
    out_strides[d] = run;
    run *= call.size[d];
  }
  for (int64_t d = 0; d < last; ++d) {
    if (d != across) others.add(call.size[d], {call.stride[d], out_strides[d]});
  }
  const int64_t pitch = out_strides[across], planes = others.count();
  for (int64_t item = 0; item < items; ++item)
    for (int64_t plane = 0; plane < planes; ++plane, others.step()) {
      const auto* from = call.x.elements() + item * call.source_elements + call.first + others.at[0];
      auto* to = call.out.elements() + item * count + others.at[1];
      for (int64_t c = 0; c < width; c += kBlock)
        for (int64_t r = 0; r < height; r += kBlock) {
          const int64_t right = smaller(c + kBlock, width), down = smaller(r + kBlock, height);
          for (int64_t i = r; i < down; ++i)
            for (int64_t j = c; j < right; ++j) to[i * pitch + j] = from[i + j * step];
        }
    }
}

// kernel rearrange  f32=uint32_t bf16=uint16_t i32=uint32_t
//   out out[m d]
//   in x[_ _]
//   int rank, source_elements, first, fill, size...(rank), stride...(rank), begin...(rank), end...(rank)
//   internal its sizes describe items of many dims, and a tile has rows and columns
//   flops 0
//   bytes 2 * item * m * d
/// Element (i_0, i_1, ...) of an item of `out` is element first + Σ i_d stride_d of the item of x, which has
/// `source_elements` elements, if every i_d lies in [begin_d, end_d). Elsewhere it has the bits `fill`.
template <class T>
void RearrangeKernel<T>::run() const {
  if (elements_of(out) == 0 || rank > kMaxDims) return;
  const int64_t last = rank - 1, width = size[last], step = stride[last];
  const int64_t low = smaller(larger(begin[last], int64_t{0}), width);
  const int64_t high = larger(smaller(end[last], width), low);
  int64_t count = 1;
  for (int64_t d = 0; d < rank; ++d) count *= size[d];
  const int64_t items = elements_of(out) / count;
  const int64_t across = step == 1 || low > 0 || high < width ? -1 : contiguous_dim(*this);
  if (across >= 0) return transpose_items(*this, across, items, count);
  Odometer<1> rows;
  for (int64_t d = 0; d < last; ++d) rows.add(size[d], {stride[d]});
  const int64_t per_item = rows.count();
  const T empty = static_cast<T>(fill);
  T* to = out.elements();
  for (int64_t item = 0; item < items; ++item) {
    const T* from = x.elements() + item * source_elements + first;
    for (int64_t r = 0; r < per_item; ++r, to += width, rows.step()) {
      bool is_inside = true;
      for (int d = 0; d < rows.rank; ++d) is_inside &= rows.index[d] >= begin[d] && rows.index[d] < end[d];
      const int64_t left = is_inside ? low : width, right = is_inside ? high : width;
      const T* row = from + rows.at[0];
      for (int64_t c = 0; c < left; ++c) to[c] = empty;
      if (step == 1) {
        copy_elements(to + left, row + left, right - left);
      } else {
        for (int64_t c = left; c < right; ++c) to[c] = row[c * step];
      }
      for (int64_t c = right; c < width; ++c) to[c] = empty;
    }
  }
}

// kernel concat  f32=uint32_t bf16=uint16_t i32=uint32_t
//   out out[m d]
//   in x...[_ _]
//   int num_parts=count(x), length...(num_parts)
//   internal its sizes describe items of many dims, and a tile has rows and columns
//   flops 0
//   bytes 2 * item * m * d
/// Runs of `length` elements of each operand in turn.
template <class T>
void ConcatKernel<T>::run() const {
  int64_t whole = 0;
  for (int64_t i = 0; i < num_parts; ++i) whole += length[i];
  if (whole == 0) return;
  T* to = out.elements();
  for (int64_t r = 0; r < elements_of(out) / whole; ++r)
    for (int64_t i = 0; i < num_parts; to += length[i], ++i)
      copy_elements(to, x[i].elements() + r * length[i], length[i]);
}

/// Adds or compares, from the neutral element on.
struct Adding {
  static constexpr float kStart = 0.0f;
  static TILEWISE_MEMBER Lanes join(const Lanes& a, const Lanes& b) { return a + b; }
  static TILEWISE_MEMBER float of_lanes(const Lanes& x) { return sum_lanes(x); }
};
/// A NaN stays.
struct Largest {
  static constexpr float kStart = -__builtin_inff();
  static TILEWISE_MEMBER Lanes join(Lanes a, const Lanes& b) {
    TILEWISE_EACH_PART {
      const NativeF most = native_max(b.part[p], a.part[p]);
      a.part[p] = b.part[p] == b.part[p] ? most : b.part[p];
    }
    return a;
  }
  static TILEWISE_MEMBER float of_lanes(const Lanes& x) {
    float most = kStart;
    for (int i = 0; i < kLanes; ++i) {
      const float lane = x.part[i / kNativeLanes][i % kNativeLanes];
      most = most == most && !(lane <= most) ? lane : most;
    }
    return most;
  }
};

/// Reduces the dims of an item that do not stay, in ascending order of their indices. If the last dim is reduced, 16
/// lanes share it and are joined at the end.
template <class Join, class Kernel>
TILEWISE_INLINE void reduce_dims(const Kernel& call, float factor) {
  const int64_t last = call.rank - 1, width = call.size[last];
  Odometer<2> rows;  // of the dims that stay: offsets in x and out
  Odometer<1> reduced;
  int64_t strides[kMaxDims], out_strides[kMaxDims], count = 1, out_count = 1;
  for (int64_t d = last; d >= 0; --d) {
    strides[d] = count;
    out_strides[d] = out_count;
    count *= call.size[d];
    if (call.stays[d]) out_count *= call.size[d];
  }
  for (int64_t d = 0; d < last; ++d) {
    if (call.stays[d]) {
      rows.add(call.size[d], {strides[d], out_strides[d]});
    } else {
      reduced.add(call.size[d], {strides[d]});
    }
  }
  const int64_t num_rows = rows.count(), depth = reduced.count(), items = elements_of(call.out) / out_count;
  const bool keeps_last = call.stays[last] != 0;
  for (int64_t item = 0; item < items; ++item)
    for (int64_t r = 0; r < num_rows; ++r, rows.step()) {
      const auto* from = call.x.elements() + item * count + rows.at[0];
      auto* to = call.out.elements() + item * out_count + rows.at[1];
      if (!keeps_last) {
        Lanes sum = set(Join::kStart);
        for (int64_t k = 0; k < depth; ++k, reduced.step())
          for (int64_t c = 0; c < width; c += kLanes)
            sum = Join::join(sum, load(from + reduced.at[0] + c, width - c, Join::kStart));
        store(to, set(Join::of_lanes(sum) * factor), 1);
        continue;
      }
      each_column(width, [&](auto at) TILEWISE_INLINED {
        auto sum = at.set(Join::kStart);
        for (int64_t k = 0; k < depth; ++k, reduced.step()) {
          const auto row = at.load(from + reduced.at[0]);
          for (int i = 0; i < at.kCount; ++i) sum.at[i] = Join::join(sum.at[i], row.at[i]);
        }
        at.store(to, sum * at.set(factor));
      });
    }
}

// kernel reduce_sum  f32 bf16
//   out out[_ _]
//   in x[m d]
//   int rank, size...(rank), stays...(rank)
//   float factor
//   internal its sizes describe items of many dims, and a tile has rows and columns
//   flops m * d
//   bytes item * m * d
/// Sums over dims that do not stay, times a factor, in fp32 and rounded once.
template <class T>
void ReduceSumKernel<T>::run() const {
  if (elements_of(out) > 0 && rank <= kMaxDims) reduce_dims<Adding>(*this, factor);
}

// kernel reduce_max  f32 bf16
//   out out[_ _]
//   in x[m d]
//   int rank, size...(rank), stays...(rank)
//   internal its sizes describe items of many dims, and a tile has rows and columns
//   flops m * d
//   bytes item * m * d
template <class T>
void ReduceMaxKernel<T>::run() const {
  if (elements_of(out) > 0 && rank <= kMaxDims) reduce_dims<Largest>(*this, 1.0f);
}

// kernel repeat_row  f32 bf16
//   out out[m d]
//   in x[1 d]
//   flops 0
//   bytes item * m * d
template <class T>
void RepeatRowKernel<T>::run() const {
  for (int64_t r = 0; r < out.rows; ++r) copy_elements(out.row(r), x.elements(), out.cols);
}

// kernel gather_elements  f32=uint32_t bf16=uint16_t i32=uint32_t
//   out out[m d]
//   in x[_ _], index:i32[_ _]
//   int outer, size, inner, count, index_outer, index_step, index_inner, index_item
//   internal its sizes describe items of many dims, and a tile has rows and columns
//   flops 0
//   bytes 2 * item * m * d
/// Items of x are [outer, size, inner], items of `out` [outer, count, inner]: out[o, i, c] = x[o, n, c] with
/// n = index[o index_outer + i index_step + c index_inner]; items of the index have index_item elements.
template <class T>
void GatherElementsKernel<T>::run() const {
  if (elements_of(out) == 0) return;
  const int64_t items = elements_of(out) / (outer * count * inner);
  T* to = out.elements();
  for (int64_t item = 0; item < items; ++item)
    for (int64_t o = 0; o < outer; ++o) {
      const T* from = x.elements() + (item * outer + o) * size * inner;
      const int32_t* numbers = index.elements() + item * index_item + o * index_outer;
      for (int64_t i = 0; i < count; ++i, to += inner, numbers += index_step) {
        if (index_inner == 0) {
          copy_elements(to, from + *numbers * inner, inner);
        } else {
          for (int64_t c = 0; c < inner; ++c) to[c] = from[numbers[c * index_inner] * inner + c];
        }
      }
    }
}

// kernel scatter_add  f32 bf16
//   out out[m d]
//   in x?[_ _], src[_ _], index:i32[_ _]
//   int outer, size, inner, count, index_outer, index_step, index_inner, index_item
//   internal its sizes describe items of many dims, and a tile has rows and columns
//   flops m * d
//   bytes 3 * item * m * d
//   scratch 4 * size * inner + 64
/// The reverse of gather_elements: adds src[o, i, c] to x[o, n, c], for ascending i. An absent x is 0. Sums are in fp32
/// and rounded once.
template <class T>
void ScatterAddKernel<T>::run() const {
  if (elements_of(out) == 0) return;
  const int64_t block = size * inner, items = elements_of(out) / (outer * block);
  Carver carver(scratch);
  auto* sums = carver.take<float>(block);
  for (int64_t item = 0; item < items; ++item)
    for (int64_t o = 0; o < outer; ++o) {
      const int64_t place = item * outer + o;
      for (int64_t c = 0; c < block; c += kLanes)
        store(sums + c, x.data ? load(x.elements() + place * block + c, block - c) : set(0.0f), block - c);
      const T* from = src.elements() + place * count * inner;
      const int32_t* numbers = index.elements() + item * index_item + o * index_outer;
      for (int64_t i = 0; i < count; ++i, from += inner, numbers += index_step) {
        if (index_inner == 0) {
          float* to = sums + *numbers * inner;
          for (int64_t c = 0; c < inner; c += kLanes)
            store(to + c, load(to + c, inner - c) + load(from + c, inner - c), inner - c);
        } else {
          for (int64_t c = 0; c < inner; ++c) sums[numbers[c * index_inner] * inner + c] += widen(from[c]);
        }
      }
      for (int64_t c = 0; c < block; c += kLanes)
        store(out.elements() + place * block + c, load(sums + c, block - c), block - c);
    }
}

// kernel one_hot  f32 bf16
//   out out[m d]
//   in ids:i32[_ _]
//   int first
//   internal its sizes describe items of many dims, and a tile has rows and columns
//   flops 0
//   bytes item * m * d
/// A row per id: 1 in column id - first, else 0.
template <class T>
void OneHotKernel<T>::run() const {
  T one[kLanes];
  store(one, set(1.0f));
  for (int64_t r = 0; r < out.rows; ++r) {
    __builtin_memset(out.row(r), 0, static_cast<size_t>(out.cols) * sizeof(T));
    const int64_t column = ids.elements()[r] - first;
    if (column >= 0 && column < out.cols) out.row(r)[column] = one[0];
  }
}

// ---- windows of images ----------------------------------------------------------------------------------------------

// kernel unfold  f32=uint32_t bf16=uint16_t
//   out out[m d]
//   in x[_ _]
//   int channels, height, width, out_height, out_width, window_height, window_width
//   int stride_height, stride_width, pad_height, pad_width, dilation_height, dilation_width
//   internal its sizes describe items of many dims, and a tile has rows and columns
//   flops 0
//   bytes 2 * item * m * d
/// Items of x are images [channels, height, width]. A row of `out` has the elements of one window of an image, channel
/// by channel; those in the padding are 0.
template <class T>
void UnfoldKernel<T>::run() const {
  const int64_t window = window_height * window_width, plane = height * width;
  if (elements_of(out) == 0) return;
  const int64_t places = out_height * out_width, items = elements_of(out) / (places * channels * window);
  T* to = out.elements();
  for (int64_t item = 0; item < items; ++item)
    for (int64_t row = 0; row < out_height; ++row)
      for (int64_t column = 0; column < out_width; ++column)
        for (int64_t c = 0; c < channels; ++c) {
          const T* from = x.elements() + (item * channels + c) * plane;
          for (int64_t i = 0; i < window_height; ++i) {
            const int64_t y = row * stride_height + i * dilation_height - pad_height;
            if (dilation_width == 1 && y >= 0 && y < height) {  // a run of elements
              const int64_t at = column * stride_width - pad_width;
              const int64_t left = smaller(larger(-at, int64_t{0}), window_width);
              const int64_t right = larger(smaller(width - at, window_width), left);
              for (int64_t j = 0; j < left; ++j) to[j] = T{};
              copy_elements(to + left, from + y * width + at + left, right - left);
              for (int64_t j = right; j < window_width; ++j) to[j] = T{};
              to += window_width;
              continue;
            }
            for (int64_t j = 0; j < window_width; ++j, ++to) {
              const int64_t at = column * stride_width + j * dilation_width - pad_width;
              *to = y >= 0 && y < height && at >= 0 && at < width ? from[y * width + at] : T{};
            }
          }
        }
}

// kernel fold  f32 bf16
//   out out[m d]
//   in x[_ _]
//   int channels, height, width, out_height, out_width, window_height, window_width
//   int stride_height, stride_width, pad_height, pad_width, dilation_height, dilation_width
//   internal its sizes describe items of many dims, and a tile has rows and columns
//   flops m * d
//   bytes 2 * item * m * d
/// The gradient of unfold: an element of an image is the sum, in fp32, of the elements of all windows that have it, for
/// ascending places in the window.
template <class T>
void FoldKernel<T>::run() const {
  const int64_t window = window_height * window_width, plane = height * width, row_length = channels * window;
  if (elements_of(out) == 0) return;
  const int64_t items = elements_of(out) / (channels * plane);
  T* to = out.elements();
  for (int64_t item = 0; item < items; ++item) {
    const T* from = x.elements() + item * out_height * out_width * row_length;
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t y = 0; y < height; ++y)
        for (int64_t at = 0; at < width; ++at, ++to) {
          float sum = 0.0f;
          // Without dilation, the places whose windows have this element are stride apart.
          const bool is_dense = dilation_height == 1 && dilation_width == 1;
          const int64_t first_i = is_dense ? (y + pad_height) % stride_height : 0;
          const int64_t first_j = is_dense ? (at + pad_width) % stride_width : 0;
          for (int64_t i = first_i; i < window_height; i += is_dense ? stride_height : 1) {
            const int64_t down = y + pad_height - i * dilation_height;
            if (down < 0 || down % stride_height != 0 || down / stride_height >= out_height) continue;
            for (int64_t j = first_j; j < window_width; j += is_dense ? stride_width : 1) {
              const int64_t right = at + pad_width - j * dilation_width;
              if (right < 0 || right % stride_width != 0 || right / stride_width >= out_width) continue;
              const int64_t place = down / stride_height * out_width + right / stride_width;
              sum += widen(from[place * row_length + c * window + i * window_width + j]);
            }
          }
          store(to, set(sum), 1);
        }
  }
}

}  // namespace
}  // namespace tilewise::kernels::TILEWISE_ISA_NS

#include "kernels/declared/dims_entries.h"
