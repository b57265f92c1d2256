// What drawing a token does to whole rows, compiled for every level; the same bits at each, since nothing is fused or
// summed in another order.
#pragma once
#include <cstdint>

namespace tilewise::kernels {

constexpr int64_t kBlock = 256;
constexpr int32_t kBuckets = 2048;

/// What is returned instead of a token.
constexpr int64_t kNotFinite = -1;
constexpr int64_t kNothingLeft = -2;

enum class LogitsType : uint8_t { kF32, kF64, kBF16 };

/// A row of n logits.
struct LogitsRow {
  const void* data;
  int64_t n;
  LogitsType type;
};

struct WeighFns {
  /// The first of the largest, or kNotFinite where one of them is not finite. Not for double.
  int64_t (*likeliest)(const LogitsRow& row);
  /// Writes n doubles; returns the largest, or NaN where one is not finite.
  double (*widen)(const LogitsRow& row, double* scores);
  /// The largest of n, minus infinities among them.
  double (*largest)(const double* scores, int64_t n);
  /// weights[i] = exp((scores[i] - largest) * (1 / temperature)); below exp(-700) it is 0.
  void (*weigh)(const double* scores, int64_t n, double largest, double temperature, double* weights);
  /// The sums of runs of kBlock weights, the last of fewer: of every 16th first, then of these.
  void (*sum_blocks)(const double* weights, int64_t n, double* sums);
  /// buckets[i] = the whole part of (largest - scores[i]) * per_unit, kBuckets - 1 at most; kBuckets without weight.
  void (*sort_into)(const double* scores, const double* weights, int64_t n, double largest, double per_unit,
                    int32_t* buckets);
  /// Those behind a bucket have no weight any more.
  void (*cut_behind)(const int32_t* buckets, int64_t n, int32_t bucket, double* weights);
};

/// Of the level in use.
const WeighFns& find_weigh();

}  // namespace tilewise::kernels
