// Sampling at one instruction-set level: the random number, every size of row, rows without a token, many threads.
#include "kernels/sampling/sample.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <thread>

#include "base/testing.h"

namespace tilewise::kernels {
namespace plain {
SoftmaxFns softmax_fns();
}
const SoftmaxFns& find_softmax() {
  static const SoftmaxFns fns = plain::softmax_fns();
  return fns;
}

namespace {

constexpr SamplingSettings kAll = {1.0, 0, 1.0, 0.0, 1.0};

std::vector<float> logits(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> row(static_cast<size_t>(n));
  for (float& value : row) value = static_cast<float>(random() % 1000) / 100;
  return row;
}

CASE("the random number is NumPy's") { EXPECT_EQ(uniform_of({3, 4, 0}), 0.9854694359165987); }

CASE("every row size and setting samples an allowed token") {
  const SamplingSettings settings[] = {kAll,
                                       {0.0, 0, 1.0, 0.0, 1.0},
                                       {0.7, 5, 1.0, 0.0, 1.0},
                                       {1.0, 0, 0.5, 0.0, 1.0},
                                       {1.0, 0, 1.0, 0.3, 1.0},
                                       {1.0, 0, 1.0, 0.0, 0.4},
                                       {1e-300, 3, 0.9, 0.1, 0.9},
                                       {1e9, 400, 0.999, 0.0, 0.99}};
  RowSampler sampler;
  for (const int64_t n : {1, 2, 15, 16, 17, 255, 256, 257, 5000})
    for (const SamplingSettings& how : settings) {
      std::vector<uint8_t> mask(static_cast<size_t>(n), 0);
      mask[static_cast<size_t>(n / 2)] = 1;  // the only allowed token
      const std::vector<float> free = logits(n, 7);
      const LogitsRow row{free.data(), n, LogitsType::kF32};
      EXPECT_EQ(sampler.sample(row, how, {1, 2, 3}, {nullptr, nullptr, mask.data(), n}), n / 2);
      const int64_t token = sampler.sample(row, how, {1, 2, 3});
      EXPECT(token >= 0 && token < n);
    }
}

CASE("rows without a token return the reason") {
  RowSampler sampler;
  for (const int64_t n : {1, 16, 40}) {
    std::vector<double> row(static_cast<size_t>(n), 1.0);
    const uint8_t none = 0;
    EXPECT_EQ(sampler.sample({row.data(), n, LogitsType::kF64}, kAll, {}, {nullptr, nullptr, &none, 1}), kNothingLeft);
    row.back() = std::nan("");
    EXPECT_EQ(sampler.sample({row.data(), n, LogitsType::kF64}, kAll, {}), kNotFinite);
    for (const double temperature : {0.0, 1.0}) {
      SamplingSettings how = kAll;
      how.temperature = temperature;
      std::vector<float> single(static_cast<size_t>(n), 1.0f);
      single.back() = -std::numeric_limits<float>::infinity();
      EXPECT_EQ(sampler.sample({single.data(), n, LogitsType::kF32}, how, {}), kNotFinite);
      std::vector<uint16_t> half(static_cast<size_t>(n), 0x3f80);
      half.front() = 0x7fc0;  // NaN
      EXPECT_EQ(sampler.sample({half.data(), n, LogitsType::kBF16}, how, {}), kNotFinite);
    }
  }
}

CASE("greedy sampling returns the first largest logit of every type") {
  RowSampler sampler;
  const SamplingSettings greedy = {0.0, 0, 1.0, 0.0, 1.0};
  for (const int64_t n : {1, 2, 63, 64, 65, 1023, 1024, 1025, 3000})
    for (uint32_t seed = 0; seed < 5; ++seed) {
      std::vector<float> row = logits(n, seed);
      std::vector<uint16_t> half;
      for (float& value : row) {
        value = std::round(value) - 5;  // many ties; exact in bf16
        half.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16));
      }
      const int64_t first = std::max_element(row.begin(), row.end()) - row.begin();
      EXPECT_EQ(sampler.sample({row.data(), n, LogitsType::kF32}, greedy, {}), first);
      EXPECT_EQ(sampler.sample({half.data(), n, LogitsType::kBF16}, greedy, {}), first);
      const std::vector<double> wide(row.begin(), row.end());
      EXPECT_EQ(sampler.sample({wide.data(), n, LogitsType::kF64}, greedy, {}), first);
      const SamplingSettings random = {1.0, 40, 0.9, 0.0, 1.0};
      EXPECT_EQ(sampler.sample({half.data(), n, LogitsType::kBF16}, random, {seed, 1, 0}),
                sampler.sample({wide.data(), n, LogitsType::kF64}, random, {seed, 1, 0}));
    }
}

CASE("rules change only the tokens that they name") {
  TokenHistory text({4, 5, 4});
  for (const int64_t token : {5, 9, 4, 5}) text.append(token);
  EXPECT_EQ(text.num_new(), 4);
  const auto processed = [&](const Rules& rules) {
    std::vector<double> scores = {2, -2, 2, 2, 2, -2, 2, 2};
    apply_logits_processors({&rules, &text}, scores.data(), 8);
    return scores;
  };
  constexpr double kForbidden = -std::numeric_limits<double>::infinity();
  Rules rules;
  rules.repetition = 2;
  EXPECT(processed(rules) == (std::vector<double>{2, -2, 2, 2, 1, -4, 2, 2}));  // 9 lies beyond the row
  rules = {};
  rules.presence = 1, rules.frequency = 0.5;
  EXPECT(processed(rules) == (std::vector<double>{2, -2, 2, 2, 0.5, -4, 2, 2}));
  rules = {};
  rules.allowed = {1, 4, 7}, rules.bias = {{4, 3.0}};
  EXPECT(processed(rules) ==
         (std::vector<double>{kForbidden, -2, kForbidden, kForbidden, 5, kForbidden, kForbidden, 2}));
  rules = {};
  rules.no_repeat_ngram_size = 3;  // 4 5 was followed by 4
  EXPECT(processed(rules) == (std::vector<double>{2, -2, 2, 2, kForbidden, -2, 2, 2}));
  rules = {};
  rules.bad_words = {{5, 0}, {4, 1}, {6}, {3}}, rules.ends = {3, 9}, rules.min_tokens = 4;
  EXPECT(processed(rules) ==
         (std::vector<double>{kForbidden, -2, 2, 2, 2, -2, kForbidden, 2}));  // an end is no bad word
  rules.min_tokens = 5;
  EXPECT(processed(rules) == (std::vector<double>{kForbidden, -2, 2, kForbidden, 2, -2, kForbidden, 2}));
  EXPECT_EQ(rules.largest_id(), 6);
}

CASE("several threads sample the same tokens as one") {
  constexpr size_t kRows = 40;
  std::vector<std::vector<float>> rows;
  for (size_t i = 0; i < kRows; ++i) rows.push_back(logits(700, static_cast<uint32_t>(i)));
  const auto sample = [&](size_t i, RowSampler& sampler) {
    return sampler.sample({rows[i].data(), 700, LogitsType::kF32}, {0.8, 50, 0.9, 0.0, 1.0}, {i, 1, 0});
  };
  std::vector<int64_t> alone(kRows), together(kRows);
  RowSampler sampler;
  for (size_t i = 0; i < kRows; ++i) alone[i] = sample(i, sampler);
  {
    std::vector<std::jthread> threads;
    for (size_t first = 0; first < 4; ++first)
      threads.emplace_back([&, first] {
        RowSampler own;
        for (size_t i = first; i < kRows; i += 4) together[i] = sample(i, own);
      });
  }
  EXPECT(alone == together);
}

}  // namespace
}  // namespace tilewise::kernels

TILEWISE_TEST_MAIN
