// See sample.h.
#include "kernels/sampling/sample.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace tilewise::kernels {
namespace {

// The buckets of top-p reach this many temperatures below the likeliest token. Lower tokens have negligible weight.
constexpr double kUsualWidth = 48;

struct Words {
  uint64_t word[4];
};

/// Salmon et al. 2011, ten rounds of Philox 4x64.
Words philox(Words counter, uint64_t key0, uint64_t key1) {
  for (int round = 0; round < 10; ++round) {
    const auto low = static_cast<unsigned __int128>(0xD2E7470EE14C6C93u) * counter.word[0];
    const auto high = static_cast<unsigned __int128>(0xCA5A826395121157u) * counter.word[2];
    counter = {{static_cast<uint64_t>(high >> 64) ^ counter.word[1] ^ key0, static_cast<uint64_t>(high),
                static_cast<uint64_t>(low >> 64) ^ counter.word[3] ^ key1, static_cast<uint64_t>(low)}};
    key0 += 0x9E3779B97F4A7C15u;
    key1 += 0xBB67AE8584CAA73Bu;
  }
  return counter;
}

}  // namespace

double uniform_of(const SamplingKey& key) {
  const Words counter = {{1, 0, 0, key.choice}};
  return static_cast<double>(philox(counter, key.seed, key.position).word[0] >> 11) * 0x1p-53;
}

int64_t RowSampler::sample(const LogitsRow& row, const SamplingSettings& settings, const SamplingKey& key,
                           const LogitsProcessors& processors) {
  const SoftmaxFns& fns = find_softmax();
  const bool is_greedy = settings.temperature == 0;
  if (is_greedy && processors.is_empty() && row.type != LogitsType::kF64) return fns.argmax(row);
  const size_t n = static_cast<size_t>(row.n);
  scores_.resize(n);
  largest_ = fns.to_double(row, scores_.data());
  if (std::isnan(largest_)) return kNotFinite;
  if (!processors.is_empty()) {
    apply_logits_processors(processors, scores_.data(), row.n);
    largest_ = fns.largest(scores_.data(), row.n);
    if (largest_ == -std::numeric_limits<double>::infinity()) return kNothingLeft;
  }
  if (is_greedy) return std::find(scores_.begin(), scores_.end(), largest_) - scores_.begin();
  temperature_ = settings.temperature;
  weights_.resize(n);
  fns.softmax(scores_.data(), row.n, largest_, temperature_, weights_.data());
  if (settings.top_k > 0 && settings.top_k < row.n) apply_top_k(settings.top_k);
  if (settings.top_p < 1) apply_top_p(settings.top_p);
  if (settings.min_p > 0)  // the likeliest token's weight is 1
    for (double& weight : weights_) weight = weight >= settings.min_p ? weight : 0;
  if (settings.typical_p < 1) apply_typical_p(settings.typical_p);
  return choose(uniform_of(key));
}

/// Assigns each token to a bucket by score. Buckets have equal width, from the likeliest token down; the last one has
/// all lower scores.
void RowSampler::assign_buckets(double width) {
  buckets_.resize(scores_.size());
  const double per_unit = width > 0 ? kBuckets / width : 0;
  find_softmax().assign_buckets(scores_.data(), weights_.data(), static_cast<int64_t>(scores_.size()), largest_,
                                per_unit, buckets_.data());
}

/// Collects the tokens of one bucket as candidates: likeliest first, of equal scores lower ids first.
void RowSampler::collect(int32_t bucket) {
  candidates_.clear();
  for (size_t i = 0; i < buckets_.size(); ++i)
    if (buckets_[i] == bucket) candidates_.push_back({largest_ - scores_[i], static_cast<int64_t>(i)});
  std::sort(candidates_.begin(), candidates_.end());
}

/// Removes the tokens of all later buckets, and this bucket's candidates except the first num_kept.
void RowSampler::cut(int32_t bucket, size_t num_kept) {
  find_softmax().zero_after_bucket(buckets_.data(), static_cast<int64_t>(buckets_.size()), bucket, weights_.data());
  for (size_t i = num_kept; i < candidates_.size(); ++i) weights_[static_cast<size_t>(candidates_[i].id)] = 0;
}

/// Keeps all tokens whose score is at least the k-th largest.
void RowSampler::apply_top_k(int64_t k) {
  double least = largest_;
  for (size_t i = 0; i < scores_.size(); ++i) least = weights_[i] > 0 && scores_[i] < least ? scores_[i] : least;
  assign_buckets(largest_ - least);
  std::array<int64_t, kBuckets + 1> counts{};
  for (const int32_t bucket : buckets_) ++counts[static_cast<size_t>(bucket)];
  int32_t bucket = 0;
  int64_t before = 0;
  while (bucket < kBuckets && before + counts[static_cast<size_t>(bucket)] < k)
    before += counts[static_cast<size_t>(bucket++)];
  if (bucket == kBuckets) return;  // fewer than k have weight
  collect(bucket);
  size_t num_kept = static_cast<size_t>(k - before);
  while (num_kept < candidates_.size() && candidates_[num_kept].order == candidates_[num_kept - 1].order) ++num_kept;
  cut(bucket, num_kept);
}

/// Keeps the likeliest tokens until their probabilities sum to top_p.
void RowSampler::apply_top_p(double top_p) {
  const double mass = top_p * sum();
  assign_buckets(kUsualWidth * temperature_);
  std::array<double, kBuckets + 1> masses{};
  for (size_t i = 0; i < buckets_.size(); ++i) masses[static_cast<size_t>(buckets_[i])] += weights_[i];
  int32_t bucket = 0;
  double before = 0;
  while (bucket < kBuckets && before + masses[static_cast<size_t>(bucket)] < mass)
    before += masses[static_cast<size_t>(bucket++)];
  if (bucket == kBuckets) return;
  collect(bucket);
  size_t num_kept = 0;
  while (num_kept < candidates_.size() && before < mass)
    before += weights_[static_cast<size_t>(candidates_[num_kept++].id)];
  cut(bucket, num_kept);
}

/// Keeps the tokens whose surprisal is nearest to the entropy until their probabilities sum to typical_p (Meister et
/// al. 2022).
void RowSampler::apply_typical_p(double typical_p) {
  const double total = sum(), log_total = std::log(total);
  double entropy = 0;
  const auto surprisal = [&](size_t i) { return log_total - (scores_[i] - largest_) / temperature_; };
  for (size_t i = 0; i < scores_.size(); ++i)
    if (weights_[i] > 0) entropy += weights_[i] / total * surprisal(i);
  candidates_.clear();
  for (size_t i = 0; i < scores_.size(); ++i)
    if (weights_[i] > 0) candidates_.push_back({std::abs(surprisal(i) - entropy), static_cast<int64_t>(i)});
  std::sort(candidates_.begin(), candidates_.end());
  size_t last = 0;
  double mass = 0;
  while (last + 1 < candidates_.size() &&
         (mass += weights_[static_cast<size_t>(candidates_[last].id)] / total) < typical_p)
    ++last;
  const double cut = candidates_[last].order;
  for (const Candidate& candidate : candidates_)
    if (candidate.order > cut) weights_[static_cast<size_t>(candidate.id)] = 0;
}

/// The sum of all weights. Leaves the sums of their blocks in block_sums_.
double RowSampler::sum() {
  const int64_t n = static_cast<int64_t>(weights_.size());
  block_sums_.resize(static_cast<size_t>((n + kBlock - 1) / kBlock));
  find_softmax().sum_blocks(weights_.data(), n, block_sums_.data());
  double total = 0;
  for (const double block : block_sums_) total += block;
  return total;
}

/// The token whose interval contains this fraction of the total weight.
int64_t RowSampler::choose(double uniform) {
  const double target = uniform * sum();
  size_t block = 0;
  double before = 0;
  while (block + 1 < block_sums_.size() && before + block_sums_[block] <= target) before += block_sums_[block++];
  const size_t end = std::min(weights_.size(), (block + 1) * kBlock);
  for (size_t i = block * kBlock; i < end; ++i)
    if (before += weights_[i]; before > target) return static_cast<int64_t>(i);
  size_t last = end;  // only rounding leads here: the last token before the end that has weight
  while (last > 1 && weights_[last - 1] == 0) --last;
  return static_cast<int64_t>(last - 1);
}

}  // namespace tilewise::kernels
