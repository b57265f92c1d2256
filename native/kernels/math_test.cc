// The functions of math.h at every level of this machine: their error, their bits, their values at the edges.
//
// Compiled once per level with its TILEWISE_ISA_NS, which defines `apply`, and once without, which defines the program.
#if defined(TILEWISE_ISA_NS)
#include "kernels/math.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {

/// y = function of x, 16 at a time: e(xp), d(ecay), l(og), t(anh) or (er)f. With `many`, in RegisterBlocks.
void apply(char function, bool many, const float* x, float* y, int64_t n) {
  const auto each = [&](const auto& of) {
    if (many) {
      each_column(n, [&](auto at) { at.store(y, of(at.load(x))); });
    } else {
      for (int64_t i = 0; i < n; i += kLanes) store(y + i, of(load(x + i, n - i)), n - i);
    }
  };
  if (function == 'e') each([](const auto& v) { return exponential(v); });
  if (function == 'd') each([](const auto& v) { return decay(v); });
  if (function == 'l') each([](const auto& v) { return logarithm(v); });
  if (function == 't') each([](const auto& v) { return tanh(v); });
  if (function == 'f') each([](const auto& v) { return erf(v); });
}

}  // namespace tilewise::kernels::TILEWISE_ISA_NS
#else
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/testing.h"
#include "kernels/built_levels.h"
#include "kernels/machine_levels.h"

#define TILEWISE_DECLARE_APPLY(ns)                                           \
  namespace tilewise::kernels::ns {                                          \
  void apply(char function, bool many, const float* x, float* y, int64_t n); \
  }
TILEWISE_EACH_BUILT_LEVEL(TILEWISE_DECLARE_APPLY)

namespace {

namespace kernels = tilewise::kernels;
using Apply = void (*)(char, bool, const float*, float*, int64_t);

struct Level {
  Apply apply;
  bool has_fma;
};

std::vector<Level> levels() {
  std::vector<Level> runnable;
  for (const kernels::MachineLevel& level : kernels::machine_levels()) {
#define TILEWISE_ADD_APPLY(ns) \
  if (level.can_run && level.name == #ns) runnable.push_back({kernels::ns::apply, level.name != "baseline"});
    TILEWISE_EACH_BUILT_LEVEL(TILEWISE_ADD_APPLY)
  }
  return runnable;
}

struct Function {
  char name;
  double (*exact)(double);
  float begin, end;
};
const Function kFunctions[] = {{'e', std::exp, -87.0f, 88.7f},
                               {'d', std::exp, -87.0f, 0.0f},
                               {'l', std::log, 1e-6f, 40.0f},
                               {'t', std::tanh, -11.0f, 11.0f},
                               {'f', std::erf, -5.0f, 5.0f}};

/// Evenly spaced values of [begin, end] and values that approach 0.
std::vector<float> inputs(const Function& f) {
  std::vector<float> x;
  for (int i = 0; i <= 200000; ++i) x.push_back(f.begin + (f.end - f.begin) * (static_cast<float>(i) / 200000.0f));
  for (int i = 0; i < 2800; ++i) {
    const float tiny = std::pow(0.97f, static_cast<float>(i));
    x.push_back(tiny);
    if (f.begin < 0) x.push_back(-tiny);
  }
  return x;
}

std::vector<float> values(const Level& level, char function, bool many, const std::vector<float>& x) {
  std::vector<float> y(x.size());
  level.apply(function, many, x.data(), y.data(), static_cast<int64_t>(x.size()));
  return y;
}

/// The largest distance from the exact value in units of the last place of fp32.
double worst_ulps(const Function& f, const std::vector<float>& x, const std::vector<float>& y) {
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = f.exact(x[i]);
    const auto near = std::fabs(static_cast<float>(exact));
    const double place = std::nextafter(near, std::numeric_limits<float>::infinity()) - near;
    worst = std::fmax(worst, std::fabs(y[i] - exact) / place);
  }
  return worst;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

CASE("the error is at most 2 ulp at every level, for single vectors and RegisterBlocks") {
  for (const Level& level : levels())
    for (const Function& f : kFunctions) {
      const std::vector<float> x = inputs(f), y = values(level, f.name, false, x);
      const double worst = worst_ulps(f, x, y);
      EXPECT(worst <= (level.has_fma ? 2.0 : 3.0));
      if (worst > 2.0) std::printf("%c: %.3f ulp\n", f.name, worst);
      EXPECT(same_bits(y, values(level, f.name, true, x)));
    }
}

CASE("levels with fused multiply-add give the same bits") {
  const Level* first = nullptr;
  const std::vector<Level> all = levels();
  for (const Level& level : all) {
    if (!level.has_fma) continue;
    if (first == nullptr) first = &level;
    for (const Function& f : kFunctions) {
      const std::vector<float> x = inputs(f);
      EXPECT(same_bits(values(*first, f.name, true, x), values(level, f.name, true, x)));
    }
  }
}

CASE("a result does not depend on neighbouring values") {
  const float infinity = std::numeric_limits<float>::infinity();
  const float others[] = {infinity, std::nanf(""), -infinity, 88.5f, -104.0f};
  for (const Level& level : levels())
    for (const Function& f : kFunctions) {
      const std::vector<float> x = inputs(f);
      std::vector<float> mixed = x;  // every vector has a value outside the fast path of exp
      for (size_t i = 0; i < x.size(); i += 5) mixed[i] = others[i / 5 % 5];
      for (const bool many : {false, true}) {
        const std::vector<float> y = values(level, f.name, many, x);
        std::vector<float> mixed_y = values(level, f.name, many, mixed);
        for (size_t i = 0; i < x.size(); i += 5) mixed_y[i] = y[i];
        EXPECT(same_bits(y, mixed_y));
      }
    }
}

CASE("exp keeps NaN, and decay equals exp for values up to 0") {
  std::vector<float> x = {
      0.0f, -0.0f, -1e-45f, -87.5f, -103.2f, -103.9f, -105.0f, -3e38f, -std::numeric_limits<float>::infinity()};
  for (uint32_t bits = 0x80000000u; bits < 0xff800000u; bits += 104729) x.push_back(std::bit_cast<float>(bits));
  for (const uint32_t payload : {1u, 2u, 3u, 0x1000u, 0x3fffffu})
    for (const uint32_t sign : {0u, 0x80000000u}) x.push_back(std::bit_cast<float>(sign | 0x7fc00000u | payload));
  for (const Level& level : levels()) {
    const std::vector<float> full = values(level, 'e', false, x), falling = values(level, 'd', false, x);
    for (size_t i = 0; i < x.size(); ++i)
      EXPECT(std::isnan(x[i]) ? std::isnan(full[i]) && std::isnan(falling[i])
                              : std::bit_cast<uint32_t>(full[i]) == std::bit_cast<uint32_t>(falling[i]));
  }
}

CASE("tanh and erf are odd, keep the sign of zero, reach one and keep NaN") {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> x = {0.0f, 1e-45f, 0.3f, 2.0f, 20.0f, 1e20f, 3e38f, infinity};
  std::vector<float> negative = x;
  for (float& v : negative) v = -v;
  for (const Level& level : levels())
    for (const char name : {'t', 'f'}) {
      const std::vector<float> up = values(level, name, false, x), down = values(level, name, false, negative);
      for (size_t i = 0; i < x.size(); ++i) {
        EXPECT_EQ(up[i], -down[i]);
        EXPECT(std::signbit(down[i]) && !std::signbit(up[i]));
        if (x[i] >= 20.0f) EXPECT_EQ(up[i], 1.0f);
      }
      EXPECT(std::isnan(values(level, name, false, {std::nanf("")})[0]));
    }
}

}  // namespace

TILEWISE_TEST_MAIN
#endif
