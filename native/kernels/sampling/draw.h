// Samples the next token from one row of logits, with settings and a uniform random number that depends only on seed,
// position and choice.
//
// Filters apply one after the other as in transformers: top-k, top-p, min-p, typical-p; tokens that tie at a cut are
// kept or dropped as there, and where only some can be kept, those with the lower ids are. The remaining tokens are
// then sampled by inverse CDF, in the order of their ids. All in doubles, in one order of additions: the same token at
// every level, alone or next to others, on any thread.
#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/sampling/adjust.h"
#include "kernels/sampling/weigh.h"

namespace tilewise::kernels {

struct DrawSettings {
  double temperature;  ///< 0 takes the likeliest
  int64_t top_k;       ///< 0: all
  double top_p, min_p, typical_p;
};

struct DrawKey {
  uint64_t seed, position, choice;
};

/// In [0, 1): what NumPy's Philox, keyed by seed and position and with the choice as the highest word of its counter,
/// gives first.
double uniform_of(const DrawKey& key);

/// Draws one row after the other; keeps its working memory. One thread at a time.
class Drawer {
 public:
  /// The token's id; kNotFinite or kNothingLeft (weigh.h) if there is none.
  int64_t draw(const LogitsRow& row, const DrawSettings& settings, const DrawKey& key, const Adjustment& how = {});

 private:
  struct Entry {
    double order;  // ascending is better
    int64_t id;
    auto operator<=>(const Entry&) const = default;
  };

  void keep_likeliest(int64_t k);
  void keep_nucleus(double top_p);
  void keep_typical(double mass);
  int64_t point_at(double uniform);

  double sum();
  void sort_into_buckets(double width);
  void collect(int32_t bucket);
  void cut(int32_t bucket, size_t kept);

  std::vector<double> scores_, weights_, block_sums_;
  std::vector<int32_t> buckets_;
  std::vector<Entry> few_;
  double largest_ = 0;
  double temperature_ = 1;
};

}  // namespace tilewise::kernels
