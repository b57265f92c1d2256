// Python's view of native/kernels/sampling: one call draws a token for each of many rows, on several threads, without
// the GIL. Which thread draws a row changes nothing.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <thread>
#include <vector>

#include "base/check.h"
#include "bind/bind.h"
#include "kernels/sampling/draw.h"

namespace nb = nanobind;

namespace tilewise::bind {
namespace {

using Row = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Settings = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Keys = nb::ndarray<const uint64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr size_t kSettings = 5, kKeys = 3;
constexpr size_t kRowsPerThread = 4;  // below that a thread costs more than it saves
constexpr double kMostTopK = 0x1p53;

kernels::LogitsRow row_of(const Row& row) {
  const bool is_f32 = row.dtype() == nb::dtype<float>(), is_f64 = row.dtype() == nb::dtype<double>();
  check<ArgumentError>((is_f32 || is_f64) && row.shape(0) > 0,
                       "[sampling.draw] a row must be float32 or float64 and hold a logit; convert it");
  return {row.data(), static_cast<int64_t>(row.shape(0)), is_f64};
}

kernels::DrawSettings settings_of(const double* given) {
  const bool is_right = given[0] >= 0 && given[1] >= 0 && given[1] <= kMostTopK && given[2] > 0 && given[2] <= 1 &&
                        given[3] >= 0 && given[3] <= 1 && given[4] > 0 && given[4] <= 1;
  check<ArgumentError>(is_right, "[sampling.draw] settings must lie in their ranges; got temperature ", given[0],
                       ", top_k ", given[1], ", top_p ", given[2], ", min_p ", given[3], ", typical_p ", given[4],
                       "; correct them");
  return {given[0], static_cast<int64_t>(given[1]), given[2], given[3], given[4]};
}

std::vector<int64_t> draw(const std::vector<Row>& rows, const Settings& settings, const Keys& keys, size_t threads) {
  const size_t count = rows.size();
  check<ArgumentError>(
      settings.shape(0) == count && settings.shape(1) == kSettings && keys.shape(0) == count && keys.shape(1) == kKeys,
      "[sampling.draw] every row needs its settings and its key; got ", settings.shape(0), " and ", keys.shape(0),
      " for ", count, "; pass arrays of that many rows");
  std::vector<kernels::LogitsRow> logits;
  std::vector<kernels::DrawSettings> how;
  for (size_t i = 0; i < count; ++i) {
    logits.push_back(row_of(rows[i]));
    how.push_back(settings_of(settings.data() + i * kSettings));
  }
  std::vector<int64_t> tokens(count);
  std::atomic<size_t> next{0};
  std::atomic<bool> lacks_memory{false};
  const auto work = [&]() noexcept {
    try {
      kernels::Drawer drawer;
      for (size_t i = next++; i < count; i = next++) {
        const uint64_t* key = keys.data() + i * kKeys;
        tokens[i] = drawer.draw(logits[i], how[i], {key[0], key[1], key[2]});
      }
    } catch (const std::bad_alloc&) {
      lacks_memory = true;
    }
  };
  nb::gil_scoped_release unlocked;
  std::vector<std::jthread> helpers;
  const size_t useful = std::min(std::max<size_t>(threads, 1), count / kRowsPerThread);
  for (size_t i = 1; i < useful; ++i) helpers.emplace_back(work);
  work();
  helpers.clear();  // waits for them
  check<ResourceError>(!lacks_memory, "[sampling.draw] memory must hold a few copies of a row; free some");
  return tokens;
}

}  // namespace

void bind_sampling(nb::module_& m) {
  nb::module_ sub = m.def_submodule("sampling", "Tokens drawn from rows of logits.");
  sub.attr("NOT_FINITE") = kernels::kNotFinite;
  sub.attr("NOTHING_LEFT") = kernels::kNothingLeft;
  sub.def(
      "draw", &draw, nb::arg("rows"), nb::arg("settings"), nb::arg("keys"), nb::arg("threads") = 1,
      "A token for each row (float32, or float64 where minus infinity forbids): settings [rows, 5] are temperature, "
      "top_k, top_p, min_p, typical_p; keys [rows, 3] seed, position, choice. NOT_FINITE and NOTHING_LEFT instead of "
      "a token say why there is none.");
}

}  // namespace tilewise::bind
