// Samples a token from one row of logits.
//
// Filters apply in transformers' order: top-k, top-p, min-p, typical-p. Tied tokens are kept or dropped as there; where
// only some of them fit, lower ids win. The remaining tokens stand in the order of their ids, each as wide as its
// weight, and a random number in [0, 1) selects one. The number depends on seed, position and choice alone. All
// arithmetic is in double, in one order of additions: a row gives the same token at every instruction-set level, in
// every batch and on every thread.
#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/sampling/logits_processors.h"
#include "kernels/sampling/softmax.h"

namespace tilewise::kernels {

struct SamplingSettings {
  double temperature;  ///< 0: the likeliest token
  int64_t top_k;  ///< 0: all
  double top_p, min_p, typical_p;
};

struct SamplingKey {
  uint64_t seed, position, choice;
};

/// The first number in [0, 1) of NumPy's Philox with the key (seed, position) and choice as the highest counter word.
double uniform_of(const SamplingKey& key);

/// Samples from one row after the other and reuses its working memory. One thread at a time.
class RowSampler {
 public:
  /// The token's id, kNotFinite or kNothingLeft.
  int64_t sample(const LogitsRow& row, const SamplingSettings& settings, const SamplingKey& key,
                 const LogitsProcessors& processors = {});

 private:
  struct Candidate {
    double order;  // ascending: the best is first
    int64_t id;
    auto operator<=>(const Candidate&) const = default;
  };

  void apply_top_k(int64_t k);
  void apply_top_p(double top_p);
  void apply_typical_p(double typical_p);
  int64_t choose(double uniform);

  double sum();
  void assign_buckets(double width);
  void collect(int32_t bucket);
  void cut(int32_t bucket, size_t num_kept);

  std::vector<double> scores_, weights_, block_sums_;
  std::vector<int32_t> buckets_;
  std::vector<Candidate> candidates_;
  double largest_ = 0;
  double temperature_ = 1;
};

}  // namespace tilewise::kernels
