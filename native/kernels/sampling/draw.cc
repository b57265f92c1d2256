// See draw.h.
#include "kernels/sampling/draw.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace tilewise::kernels {
namespace {

constexpr double kUsualWidth = 48;  // temperatures below the likeliest; what is lower still has no weight to speak of

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

double uniform_of(const DrawKey& key) {
  const Words counter = {{1, 0, 0, key.choice}};
  return static_cast<double>(philox(counter, key.seed, key.position).word[0] >> 11) * 0x1p-53;
}

int64_t Drawer::draw(const LogitsRow& row, const DrawSettings& settings, const DrawKey& key, const Adjustment& how) {
  const bool is_greedy = settings.temperature == 0;
  if (is_greedy && how.is_none() && row.type != LogitsType::kF64) return find_weigh().likeliest(row);
  const size_t n = static_cast<size_t>(row.n);
  scores_.resize(n);
  largest_ = find_weigh().widen(row, scores_.data());
  if (std::isnan(largest_)) return kNotFinite;
  if (!how.is_none()) {
    adjust(how, scores_.data(), row.n);
    largest_ = find_weigh().largest(scores_.data(), row.n);
    if (largest_ == -std::numeric_limits<double>::infinity()) return kNothingLeft;
  }
  if (is_greedy) return std::find(scores_.begin(), scores_.end(), largest_) - scores_.begin();
  temperature_ = settings.temperature;
  weights_.resize(n);
  find_weigh().weigh(scores_.data(), row.n, largest_, temperature_, weights_.data());
  if (settings.top_k > 0 && settings.top_k < row.n) keep_likeliest(settings.top_k);
  if (settings.top_p < 1) keep_nucleus(settings.top_p);
  if (settings.min_p > 0)  // the likeliest token's weight is 1
    for (double& weight : weights_) weight = weight >= settings.min_p ? weight : 0;
  if (settings.typical_p < 1) keep_typical(settings.typical_p);
  return point_at(uniform_of(key));
}

/// Buckets of equal width, from the likeliest token down; the last one has all that is lower.
void Drawer::sort_into_buckets(double width) {
  buckets_.resize(scores_.size());
  const double per_unit = width > 0 ? kBuckets / width : 0;
  find_weigh().sort_into(scores_.data(), weights_.data(), static_cast<int64_t>(scores_.size()), largest_, per_unit,
                         buckets_.data());
}

/// The tokens of a bucket, likeliest first, lower ids before higher ones.
void Drawer::collect(int32_t bucket) {
  few_.clear();
  for (size_t i = 0; i < buckets_.size(); ++i)
    if (buckets_[i] == bucket) few_.push_back({largest_ - scores_[i], static_cast<int64_t>(i)});
  std::sort(few_.begin(), few_.end());
}

/// Tokens of the buckets behind this one, and those that were collected of it but for the first so many, may not come.
void Drawer::cut(int32_t bucket, size_t kept) {
  find_weigh().cut_behind(buckets_.data(), static_cast<int64_t>(buckets_.size()), bucket, weights_.data());
  for (size_t i = kept; i < few_.size(); ++i) weights_[static_cast<size_t>(few_[i].id)] = 0;
}

/// All that score no less than the k-th.
void Drawer::keep_likeliest(int64_t k) {
  double least = largest_;
  for (size_t i = 0; i < scores_.size(); ++i) least = weights_[i] > 0 && scores_[i] < least ? scores_[i] : least;
  sort_into_buckets(largest_ - least);
  std::array<int64_t, kBuckets + 1> counts{};
  for (const int32_t bucket : buckets_) ++counts[static_cast<size_t>(bucket)];
  int32_t bucket = 0;
  int64_t before = 0;
  while (bucket < kBuckets && before + counts[static_cast<size_t>(bucket)] < k)
    before += counts[static_cast<size_t>(bucket++)];
  if (bucket == kBuckets) return;  // fewer than k have weight
  collect(bucket);
  size_t kept = static_cast<size_t>(k - before);
  while (kept < few_.size() && few_[kept].order == few_[kept - 1].order) ++kept;
  cut(bucket, kept);
}

/// The likeliest, until they have the mass together.
void Drawer::keep_nucleus(double top_p) {
  const double mass = top_p * sum();
  sort_into_buckets(kUsualWidth * temperature_);
  std::array<double, kBuckets + 1> masses{};
  for (size_t i = 0; i < buckets_.size(); ++i) masses[static_cast<size_t>(buckets_[i])] += weights_[i];
  int32_t bucket = 0;
  double before = 0;
  while (bucket < kBuckets && before + masses[static_cast<size_t>(bucket)] < mass)
    before += masses[static_cast<size_t>(bucket++)];
  if (bucket == kBuckets) return;
  collect(bucket);
  size_t kept = 0;
  while (kept < few_.size() && before < mass) before += weights_[static_cast<size_t>(few_[kept++].id)];
  cut(bucket, kept);
}

/// Those whose surprise is nearest to the expected one, until they have the mass (Meister et al. 2022).
void Drawer::keep_typical(double mass) {
  const double total = sum(), log_total = std::log(total);
  double entropy = 0;
  const auto surprise = [&](size_t i) { return log_total - (scores_[i] - largest_) / temperature_; };
  for (size_t i = 0; i < scores_.size(); ++i)
    if (weights_[i] > 0) entropy += weights_[i] / total * surprise(i);
  few_.clear();
  for (size_t i = 0; i < scores_.size(); ++i)
    if (weights_[i] > 0) few_.push_back({std::abs(surprise(i) - entropy), static_cast<int64_t>(i)});
  std::sort(few_.begin(), few_.end());
  size_t last = 0;
  double seen = 0;
  while (last + 1 < few_.size() && (seen += weights_[static_cast<size_t>(few_[last].id)] / total) < mass) ++last;
  const double cut = few_[last].order;
  for (const Entry& entry : few_)
    if (entry.order > cut) weights_[static_cast<size_t>(entry.id)] = 0;
}

/// Of all weights; the sums of their blocks stay.
double Drawer::sum() {
  const int64_t n = static_cast<int64_t>(weights_.size());
  block_sums_.resize(static_cast<size_t>((n + kBlock - 1) / kBlock));
  find_weigh().sum_blocks(weights_.data(), n, block_sums_.data());
  double total = 0;
  for (const double block : block_sums_) total += block;
  return total;
}

/// The token whose interval holds that share of the whole.
int64_t Drawer::point_at(double uniform) {
  const double target = uniform * sum();
  size_t block = 0;
  double before = 0;
  while (block + 1 < block_sums_.size() && before + block_sums_[block] <= target) before += block_sums_[block++];
  const size_t end = std::min(weights_.size(), (block + 1) * kBlock);
  for (size_t i = block * kBlock; i < end; ++i)
    if (before += weights_[i]; before > target) return static_cast<int64_t>(i);
  size_t last = end;  // rounding alone comes here: the nearest token before that has weight
  while (last > 1 && weights_[last - 1] == 0) --last;
  return static_cast<int64_t>(last - 1);
}

}  // namespace tilewise::kernels
