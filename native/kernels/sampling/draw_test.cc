// Drawing at one level: the number that decides, every size of row, rows without a token, many threads.
#include "kernels/sampling/draw.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <thread>

#include "base/testing.h"

namespace tilewise::kernels {
namespace plain {
WeighFns weigh_fns();
}
const WeighFns& find_weigh() {
  static const WeighFns fns = plain::weigh_fns();
  return fns;
}

namespace {

constexpr DrawSettings kAll = {1.0, 0, 1.0, 0.0, 1.0};

std::vector<float> logits(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> row(static_cast<size_t>(n));
  for (float& value : row) value = static_cast<float>(random() % 1000) / 100;
  return row;
}

CASE("the number is NumPy's") { EXPECT_EQ(uniform_of({3, 4, 0}), 0.9854694359165987); }

CASE("every size and setting draws a token that may come") {
  const DrawSettings settings[] = {kAll,
                                   {0.0, 0, 1.0, 0.0, 1.0},
                                   {0.7, 5, 1.0, 0.0, 1.0},
                                   {1.0, 0, 0.5, 0.0, 1.0},
                                   {1.0, 0, 1.0, 0.3, 1.0},
                                   {1.0, 0, 1.0, 0.0, 0.4},
                                   {1e-300, 3, 0.9, 0.1, 0.9},
                                   {1e9, 400, 0.999, 0.0, 0.99}};
  Drawer drawer;
  for (const int64_t n : {1, 2, 15, 16, 17, 255, 256, 257, 5000})
    for (const DrawSettings& how : settings) {
      std::vector<uint8_t> mask(static_cast<size_t>(n), 0);
      mask[static_cast<size_t>(n / 2)] = 1;  // the only one that may come
      const std::vector<float> free = logits(n, 7);
      const LogitsRow row{free.data(), n, LogitsType::kF32};
      EXPECT_EQ(drawer.draw(row, how, {1, 2, 3}, {nullptr, nullptr, mask.data(), n}), n / 2);
      const int64_t token = drawer.draw(row, how, {1, 2, 3});
      EXPECT(token >= 0 && token < n);
    }
}

CASE("rows without a token say so") {
  Drawer drawer;
  for (const int64_t n : {1, 16, 40}) {
    std::vector<double> row(static_cast<size_t>(n), 1.0);
    const uint8_t none = 0;
    EXPECT_EQ(drawer.draw({row.data(), n, LogitsType::kF64}, kAll, {}, {nullptr, nullptr, &none, 1}), kNothingLeft);
    row.back() = std::nan("");
    EXPECT_EQ(drawer.draw({row.data(), n, LogitsType::kF64}, kAll, {}), kNotFinite);
    for (const double temperature : {0.0, 1.0}) {
      DrawSettings how = kAll;
      how.temperature = temperature;
      std::vector<float> single(static_cast<size_t>(n), 1.0f);
      single.back() = -std::numeric_limits<float>::infinity();
      EXPECT_EQ(drawer.draw({single.data(), n, LogitsType::kF32}, how, {}), kNotFinite);
      std::vector<uint16_t> half(static_cast<size_t>(n), 0x3f80);
      half.front() = 0x7fc0;  // NaN
      EXPECT_EQ(drawer.draw({half.data(), n, LogitsType::kBF16}, how, {}), kNotFinite);
    }
  }
}

CASE("the likeliest is the first of the largest, in every type") {
  Drawer drawer;
  const DrawSettings greedy = {0.0, 0, 1.0, 0.0, 1.0};
  for (const int64_t n : {1, 2, 63, 64, 65, 1023, 1024, 1025, 3000})
    for (uint32_t seed = 0; seed < 5; ++seed) {
      std::vector<float> row = logits(n, seed);
      std::vector<uint16_t> half;
      for (float& value : row) {
        value = std::round(value) - 5;  // many ties; exact in bf16
        half.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16));
      }
      const int64_t first = std::max_element(row.begin(), row.end()) - row.begin();
      EXPECT_EQ(drawer.draw({row.data(), n, LogitsType::kF32}, greedy, {}), first);
      EXPECT_EQ(drawer.draw({half.data(), n, LogitsType::kBF16}, greedy, {}), first);
      const std::vector<double> wide(row.begin(), row.end());
      EXPECT_EQ(drawer.draw({wide.data(), n, LogitsType::kF64}, greedy, {}), first);
      const DrawSettings drawn = {1.0, 40, 0.9, 0.0, 1.0};
      EXPECT_EQ(drawer.draw({half.data(), n, LogitsType::kBF16}, drawn, {seed, 1, 0}),
                drawer.draw({wide.data(), n, LogitsType::kF64}, drawn, {seed, 1, 0}));
    }
}

CASE("rules change what they name and nothing else") {
  TokenHistory text({4, 5, 4});
  for (const int64_t token : {5, 9, 4, 5}) text.append(token);
  EXPECT_EQ(text.num_new(), 4);
  const auto adjusted = [&](const Rules& rules) {
    std::vector<double> scores = {2, -2, 2, 2, 2, -2, 2, 2};
    adjust({&rules, &text}, scores.data(), 8);
    return scores;
  };
  constexpr double kNever = -std::numeric_limits<double>::infinity();
  Rules rules;
  rules.repetition = 2;
  EXPECT(adjusted(rules) == (std::vector<double>{2, -2, 2, 2, 1, -4, 2, 2}));  // 9 lies beyond the row
  rules = {};
  rules.presence = 1, rules.frequency = 0.5;
  EXPECT(adjusted(rules) == (std::vector<double>{2, -2, 2, 2, 0.5, -4, 2, 2}));
  rules = {};
  rules.allowed = {1, 4, 7}, rules.bias = {{4, 3.0}};
  EXPECT(adjusted(rules) == (std::vector<double>{kNever, -2, kNever, kNever, 5, kNever, kNever, 2}));
  rules = {};
  rules.no_repeat_ngram_size = 3;  // 4 5 was followed by 4
  EXPECT(adjusted(rules) == (std::vector<double>{2, -2, 2, 2, kNever, -2, 2, 2}));
  rules = {};
  rules.bad_words = {{5, 0}, {4, 1}, {6}, {3}}, rules.ends = {3, 9}, rules.min_tokens = 4;
  EXPECT(adjusted(rules) == (std::vector<double>{kNever, -2, 2, 2, 2, -2, kNever, 2}));  // an end is no bad word
  rules.min_tokens = 5;
  EXPECT(adjusted(rules) == (std::vector<double>{kNever, -2, 2, kNever, 2, -2, kNever, 2}));
  EXPECT_EQ(rules.largest_id(), 6);
}

CASE("threads draw what one draws") {
  constexpr size_t kRows = 40;
  std::vector<std::vector<float>> rows;
  for (size_t i = 0; i < kRows; ++i) rows.push_back(logits(700, static_cast<uint32_t>(i)));
  const auto draw = [&](size_t i, Drawer& drawer) {
    return drawer.draw({rows[i].data(), 700, LogitsType::kF32}, {0.8, 50, 0.9, 0.0, 1.0}, {i, 1, 0});
  };
  std::vector<int64_t> alone(kRows), together(kRows);
  Drawer drawer;
  for (size_t i = 0; i < kRows; ++i) alone[i] = draw(i, drawer);
  {
    std::vector<std::jthread> threads;
    for (size_t first = 0; first < 4; ++first)
      threads.emplace_back([&, first] {
        Drawer own;
        for (size_t i = first; i < kRows; i += 4) together[i] = draw(i, own);
      });
  }
  EXPECT(alone == together);
}

}  // namespace
}  // namespace tilewise::kernels

TILEWISE_TEST_MAIN
