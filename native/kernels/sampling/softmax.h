// The passes of sampling over whole rows. They are compiled for every instruction-set level and give the same bits at
// each: no multiply-add is fused and sums have one order.
#pragma once
#include <cstdint>

namespace tilewise::kernels {

constexpr int64_t kBlock = 256;
constexpr int32_t kBuckets = 2048;

/// Returned in place of a token: a logit is NaN or infinite; every token is forbidden.
constexpr int64_t kNotFinite = -1;
constexpr int64_t kNothingLeft = -2;

enum class LogitsType : uint8_t { kF32, kF64, kBF16 };

/// A row of n logits.
struct LogitsRow {
  const void* data;
  int64_t n;
  LogitsType type;
};

struct SoftmaxFns {
  /// The index of the first largest logit, or kNotFinite if any logit is not finite. Not for kF64.
  int64_t (*argmax)(const LogitsRow& row);
  /// Writes n doubles; returns the largest, or NaN if any is not finite.
  double (*to_double)(const LogitsRow& row, double* scores);
  /// The largest of n scores, some of which may be minus infinity.
  double (*largest)(const double* scores, int64_t n);
  /// Softmax without its division: weights[i] = exp((scores[i] - largest) * (1 / temperature)), 0 below exp(-700).
  void (*softmax)(const double* scores, int64_t n, double largest, double temperature, double* weights);
  /// The sums of blocks of kBlock weights; the last block may be shorter. Each adds every 16th weight, then those sums.
  void (*sum_blocks)(const double* weights, int64_t n, double* sums);
  /// buckets[i] = floor((largest - scores[i]) * per_unit), at most kBuckets - 1; kBuckets for tokens without weight.
  void (*assign_buckets)(const double* scores, const double* weights, int64_t n, double largest, double per_unit,
                         int32_t* buckets);
  /// Sets the weights of all tokens in later buckets to 0.
  void (*zero_after_bucket)(const int32_t* buckets, int64_t n, int32_t bucket, double* weights);
};

/// The functions of the level in use.
[[gnu::visibility("default")]] const SoftmaxFns& find_softmax();

}  // namespace tilewise::kernels
