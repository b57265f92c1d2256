// See softmax.h. Compiled once per level. Templates of the standard library are avoided: the linker would keep one
// level's instances of them for all levels.
#include "kernels/sampling/softmax.h"

#include <bit>

#include "kernels/simd.h"
#include "kernels/transfer.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
namespace {

constexpr double kInfinity = __builtin_inf();
constexpr double kMost = 0x1.fffffffffffffp1023;
constexpr double kLeast = -700.0;  // exp of it is still a normal number
constexpr int64_t kRun = 1024;

/// exp(x) for x in [-700, 0] within 1.5 ulp: 2^k times a polynomial in the remainder.
inline double exponential(double x) {
  constexpr double kShift = 0x1.8p52;  // adding it leaves the nearest integer in the low bits
  const double shifted = x * 0x1.71547652b82fep0 + kShift;
  const double k = shifted - kShift;
  const double r = (x - k * 0x1.62e42fefa0000p-1) - k * 0x1.cf79abc9e3b3ap-40;
  constexpr double kTerms[] = {
      1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
      1.0 / 720,        1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0};
  double sum = kTerms[0];
  for (int i = 1; i < 14; ++i) sum = sum * r + kTerms[i];
  return std::bit_cast<double>(std::bit_cast<int64_t>(sum) + (std::bit_cast<int64_t>(shifted) << 52));
}

inline double value_of(float x) { return x; }
inline double value_of(double x) { return x; }
inline double value_of(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

/// The first largest logit. It is searched in runs: few runs have a larger number than all runs before.
template <class T>
int64_t argmax_of(const T* row, int64_t n) {
  constexpr int64_t kChains = 4, kStep = kChains * kLanes;
  float most = -__builtin_inff(), bad = 0;  // stays 0 while all are finite
  Lanes wrong[kChains];
  for (Lanes& chain : wrong) chain = set(0.0f);
  int64_t begin = 0;
  for (int64_t first = 0; first < n; first += kRun) {
    const int64_t end = first + (n - first < kRun ? n - first : kRun);
    float largest = -__builtin_inff();
    int64_t i = first;
    if (end - first >= kStep) {
      Lanes best[kChains];
      for (Lanes& chain : best) chain = set(-__builtin_inff());
      for (; i + kStep <= end; i += kStep)
        for (int64_t c = 0; c < kChains; ++c) {
          const Lanes scores = load(row + i + c * kLanes);
          best[c] = maximum(best[c], scores);
          wrong[c] = fused(scores, set(0.0f), wrong[c]);
        }
      for (int64_t c = 1; c < kChains; ++c) best[0] = maximum(best[0], best[c]);
      largest = max_lanes(best[0]);
    }
    for (; i < end; ++i) {
      const float score = static_cast<float>(value_of(row[i]));
      largest = score > largest ? score : largest;
      bad += score * 0.0f;
    }
    if (largest > most) most = largest, begin = first;
  }
  for (const Lanes& chain : wrong) bad += sum_lanes(chain);
  if (bad != 0.0f) return kNotFinite;  // NaN
  while (value_of(row[begin]) != most) ++begin;
  return begin;
}

int64_t argmax(const LogitsRow& row) {
  if (row.type == LogitsType::kBF16) return argmax_of(static_cast<const bf16*>(row.data), row.n);
  return argmax_of(static_cast<const float*>(row.data), row.n);
}

template <class T>
double to_double_of(const T* row, int64_t n, double* scores) {
  double largest[kLanes];
  double bad[kLanes];  // stays 0 while all are finite: infinity and NaN times 0 are NaN
  for (int64_t lane = 0; lane < kLanes; ++lane) largest[lane] = -kInfinity, bad[lane] = 0;
  const int64_t whole = n / kLanes * kLanes;
  const auto take = [&](int64_t i, int64_t lane) {
    const double score = value_of(row[i]);
    scores[i] = score;
    largest[lane] = score > largest[lane] ? score : largest[lane];
    bad[lane] += score * 0.0;
  };
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) take(i + lane, lane);
  for (int64_t i = whole; i < n; ++i) take(i, i - whole);
  for (int64_t lane = 1; lane < kLanes; ++lane) {
    largest[0] = largest[lane] > largest[0] ? largest[lane] : largest[0];
    bad[0] += bad[lane];
  }
  return largest[0] + bad[0];
}

double to_double(const LogitsRow& row, double* scores) {
  switch (row.type) {
    case LogitsType::kF64:
      return to_double_of(static_cast<const double*>(row.data), row.n, scores);
    case LogitsType::kBF16:
      return to_double_of(static_cast<const bf16*>(row.data), row.n, scores);
    case LogitsType::kF32:
      break;
  }
  return to_double_of(static_cast<const float*>(row.data), row.n, scores);
}

double largest(const double* scores, int64_t n) {
  double lanes[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = -kInfinity;
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane)
      lanes[lane] = scores[i + lane] > lanes[lane] ? scores[i + lane] : lanes[lane];
  for (int64_t i = whole; i < n; ++i) lanes[0] = scores[i] > lanes[0] ? scores[i] : lanes[0];
  for (int64_t lane = 1; lane < kLanes; ++lane) lanes[0] = lanes[lane] > lanes[0] ? lanes[lane] : lanes[0];
  return lanes[0];
}

void softmax(const double* scores, int64_t n, double largest, double temperature, double* weights) {
  const double inverse = 1 / temperature;
  const double factor = inverse <= kMost ? inverse : kMost;
  for (int64_t i = 0; i < n; ++i) {
    const double scaled = (scores[i] - largest) * factor;
    const double weight = exponential(scaled >= kLeast ? scaled : kLeast);
    weights[i] = scaled >= kLeast ? weight : 0.0;
  }
}

void sum_blocks(const double* weights, int64_t n, double* sums) {
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock, whole = count / kLanes * kLanes;
    double lanes[kLanes] = {};
    for (int64_t i = 0; i < whole; i += kLanes)
      for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += weights[begin + i + lane];
    for (int64_t i = whole; i < count; ++i) lanes[i - whole] += weights[begin + i];
    for (int64_t lane = 1; lane < kLanes; ++lane) lanes[0] += lanes[lane];
    sums[begin / kBlock] = lanes[0];
  }
}

void assign_buckets(const double* scores, const double* weights, int64_t n, double largest, double per_unit,
                    int32_t* buckets) {
  for (int64_t i = 0; i < n; ++i) {
    const double place = (largest - scores[i]) * per_unit;
    const int32_t bucket = static_cast<int32_t>(place < kBuckets - 1 ? place : kBuckets - 1);
    buckets[i] = weights[i] > 0 ? bucket : kBuckets;
  }
}

void zero_after_bucket(const int32_t* buckets, int64_t n, int32_t bucket, double* weights) {
  for (int64_t i = 0; i < n; ++i) weights[i] = buckets[i] > bucket ? 0.0 : weights[i];
}

}  // namespace

SoftmaxFns softmax_fns() {
  return {argmax, to_double, largest, softmax, sum_blocks, assign_buckets, zero_after_bucket};
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
