// Drawing at one level: the number that decides, every size of row, rows without a token, many threads.
#include "kernels/sampling/draw.h"

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
      std::vector<double> row(static_cast<size_t>(n), -std::numeric_limits<double>::infinity());
      row[static_cast<size_t>(n / 2)] = 1;  // the only one that may come
      EXPECT_EQ(drawer.draw({row.data(), n, true}, how, {1, 2, 3}), n / 2);
      const std::vector<float> free = logits(n, 7);
      const int64_t token = drawer.draw({free.data(), n, false}, how, {1, 2, 3});
      EXPECT(token >= 0 && token < n);
    }
}

CASE("rows without a token say so") {
  Drawer drawer;
  for (const int64_t n : {1, 16, 40}) {
    std::vector<double> row(static_cast<size_t>(n), -std::numeric_limits<double>::infinity());
    EXPECT_EQ(drawer.draw({row.data(), n, true}, kAll, {}), kNothingLeft);
    row.back() = std::nan("");
    EXPECT_EQ(drawer.draw({row.data(), n, true}, kAll, {}), kNotFinite);
    std::vector<float> single(static_cast<size_t>(n), 1.0f);
    single.back() = -std::numeric_limits<float>::infinity();
    EXPECT_EQ(drawer.draw({single.data(), n, false}, kAll, {}), kNotFinite);
  }
}

CASE("threads draw what one draws") {
  constexpr size_t kRows = 40;
  std::vector<std::vector<float>> rows;
  for (size_t i = 0; i < kRows; ++i) rows.push_back(logits(700, static_cast<uint32_t>(i)));
  const auto draw = [&](size_t i, Drawer& drawer) {
    return drawer.draw({rows[i].data(), 700, false}, {0.8, 50, 0.9, 0.0, 1.0}, {i, 1, 0});
  };
  std::vector<int64_t> alone(kRows), beside(kRows);
  Drawer drawer;
  for (size_t i = 0; i < kRows; ++i) alone[i] = draw(i, drawer);
  {
    std::vector<std::jthread> threads;
    for (size_t first = 0; first < 4; ++first)
      threads.emplace_back([&, first] {
        Drawer own;
        for (size_t i = first; i < kRows; i += 4) beside[i] = draw(i, own);
      });
  }
  EXPECT(alone == beside);
}

}  // namespace
}  // namespace tilewise::kernels

TILEWISE_TEST_MAIN
