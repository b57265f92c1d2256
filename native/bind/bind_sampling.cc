// Python's view of native/kernels/sampling: one call draws a token for each of many rows, on several threads, without
// the GIL. Which thread draws a row changes nothing.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <optional>
#include <ranges>
#include <thread>
#include <vector>

#include "base/check.h"
#include "bind/bind.h"
#include "bind/fields.h"
#include "kernels/sampling/draw.h"

namespace nb = nanobind;

namespace tilewise::bind {
namespace {

using kernels::Adjustment;
using kernels::LogitsType;
using kernels::Rules;
using kernels::TokenHistory;
using Logits = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Settings = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Keys = nb::ndarray<const uint64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Scores = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr size_t kSettings = 5, kKeys = 3;
constexpr size_t kRowsPerThread = 4;  // to be drawn; below that a thread costs more than it saves
constexpr double kMostTopK = 0x1p53;

/// What a row is adjusted by, as Python holds it: none, or rules with their text, a mask, or both.
struct Wanted {
  const Rules* rules = nullptr;
  const TokenHistory* history = nullptr;
  std::optional<Mask> mask;

  Adjustment of_row(int64_t n) const {
    check<ArgumentError>((rules == nullptr) == (history == nullptr),
                         "[sampling.draw] rules go with the text that they look at; got one of them; pass both");
    check<ArgumentError>(rules == nullptr || rules->largest_id() < n,
                         "[sampling.draw] rules must name tokens of the row; got one beyond ", n, "; correct them");
    return {rules, history, mask ? mask->data() : nullptr, mask ? static_cast<int64_t>(mask->shape(0)) : 0};
  }
};

LogitsType type_of(const Logits& logits) {
  const bool is_f32 = logits.dtype() == nb::dtype<float>(), is_f64 = logits.dtype() == nb::dtype<double>();
  check<ArgumentError>((is_f32 || is_f64 || logits.dtype() == nb::dtype<uint16_t>()) && logits.shape(1) > 0,
                       "[sampling.draw] logits must be float32, float64 or uint16 that stand for bf16, and a row hold ",
                       "one; convert them");
  return is_f32 ? LogitsType::kF32 : is_f64 ? LogitsType::kF64 : LogitsType::kBF16;
}

kernels::LogitsRow row_of(const Logits& logits, LogitsType type, int64_t row) {
  const auto count = static_cast<int64_t>(logits.shape(0)), n = static_cast<int64_t>(logits.shape(1));
  check<ArgumentError>(row >= 0 && row < count, "[sampling.draw] a row must be one of ", count, "; got ", row,
                       "; correct it");
  return {static_cast<const std::byte*>(logits.data()) + row * n * static_cast<int64_t>(logits.itemsize()), n, type};
}

kernels::DrawSettings settings_of(const double* given) {
  const bool is_right = given[0] >= 0 && given[1] >= 0 && given[1] <= kMostTopK && given[2] > 0 && given[2] <= 1 &&
                        given[3] >= 0 && given[3] <= 1 && given[4] > 0 && given[4] <= 1;
  check<ArgumentError>(is_right, "[sampling.draw] settings must lie in their ranges; got temperature ", given[0],
                       ", top_k ", given[1], ", top_p ", given[2], ", min_p ", given[3], ", typical_p ", given[4],
                       "; correct them");
  return {given[0], static_cast<int64_t>(given[1]), given[2], given[3], given[4]};
}

Wanted wanted_of(nb::handle given) {
  if (given.is_none()) return {};
  check<ArgumentError>(nb::isinstance<nb::tuple>(given) && nb::len(given) == 3,
                       "[sampling.draw] a row is adjusted by rules, text and mask; got something else; pass the three");
  const auto three = nb::borrow<nb::tuple>(given);
  Wanted wanted;
  if (!three[0].is_none()) wanted.rules = nb::cast<const Rules*>(three[0]);
  if (!three[1].is_none()) wanted.history = nb::cast<const TokenHistory*>(three[1]);
  if (!three[2].is_none()) wanted.mask = nb::cast<Mask>(three[2]);
  return wanted;
}

/// The caller keeps logits and adjustments for as long as the call lasts, and no text grows meanwhile.
std::vector<int64_t> draw(const Logits& given, const Rows& rows, const Settings& settings, const Keys& keys,
                          size_t threads, const nb::list& adjustments) {
  const size_t count = rows.shape(0), num_adjusted = nb::len(adjustments);
  const LogitsType type = type_of(given);
  check<ArgumentError>(
      settings.shape(0) == count && settings.shape(1) == kSettings && keys.shape(0) == count && keys.shape(1) == kKeys,
      "[sampling.draw] every row needs its settings and its key; got ", settings.shape(0), " and ", keys.shape(0),
      " for ", count, "; pass arrays of that many rows");
  check<ArgumentError>(num_adjusted == 0 || num_adjusted == count,
                       "[sampling.draw] rows are adjusted each or none; got ", num_adjusted, " for ", count,
                       "; pass None for a row that is not");
  std::vector<kernels::LogitsRow> logits;
  std::vector<kernels::DrawSettings> how;
  std::vector<Wanted> wanted(num_adjusted);
  std::vector<Adjustment> adjusted(count);
  size_t num_costly = 0;  // others take their likeliest token in a few microseconds
  for (size_t i = 0; i < count; ++i) {
    logits.push_back(row_of(given, type, rows.data()[i]));
    how.push_back(settings_of(settings.data() + i * kSettings));
    if (num_adjusted != 0) {
      wanted[i] = wanted_of(adjustments[i]);
      adjusted[i] = wanted[i].of_row(logits[i].n);
    }
    num_costly += how[i].temperature > 0 || !adjusted[i].is_none();
  }
  std::vector<int64_t> tokens(count);
  std::atomic<size_t> next{0};
  std::atomic<bool> lacks_memory{false};
  const auto work = [&]() noexcept {
    try {
      kernels::Drawer drawer;
      for (size_t i = next++; i < count; i = next++) {
        const uint64_t* key = keys.data() + i * kKeys;
        tokens[i] = drawer.draw(logits[i], how[i], {key[0], key[1], key[2]}, adjusted[i]);
      }
    } catch (const std::bad_alloc&) {
      lacks_memory = true;
    }
  };
  nb::gil_scoped_release unlocked;
  std::vector<std::jthread> helpers;
  const size_t useful = std::min(std::max<size_t>(threads, 1), num_costly / kRowsPerThread);
  for (size_t i = 1; i < useful; ++i) helpers.emplace_back(work);
  work();
  helpers.clear();  // waits for them
  check<ResourceError>(!lacks_memory, "[sampling.draw] memory must hold a few copies of a row; free some");
  return tokens;
}

void adjust_scores(const Scores& scores, const nb::object& adjustment) {
  const auto n = static_cast<int64_t>(scores.shape(0));
  const Wanted wanted = wanted_of(adjustment);
  kernels::adjust(wanted.of_row(n), scores.data(), n);
}

void check_rules(const Rules& rules) {
  const auto is_id = [](int64_t id) { return id >= 0; };
  const bool holds = rules.repetition > 0 && rules.no_repeat_ngram_size >= 0 && rules.min_tokens >= 0 &&
                     std::ranges::all_of(rules.bias, is_id, &std::pair<int64_t, double>::first) &&
                     std::ranges::all_of(rules.allowed, is_id) && std::ranges::is_sorted(rules.allowed) &&
                     std::ranges::all_of(rules.ends, is_id) &&
                     std::ranges::all_of(rules.bad_words, [&](const auto& word) {
                       return !word.empty() && std::ranges::all_of(word, is_id);
                     });
  check<ArgumentError>(holds, "[sampling.Rules] rules must lie in their ranges and ids ascend; correct them");
}

void make_rules(Rules* self, const nb::kwargs& given) {
  Rules rules;
  Keywords(given)
      .set<"repetition">(rules.repetition)
      .set<"presence">(rules.presence)
      .set<"frequency">(rules.frequency)
      .set<"no_repeat_ngram_size">(rules.no_repeat_ngram_size)
      .set<"min_tokens">(rules.min_tokens)
      .set<"bias">(rules.bias)
      .set<"allowed">(rules.allowed)
      .set<"bad_words">(rules.bad_words)
      .set<"ends">(rules.ends)
      .done();
  check_rules(rules);
  new (self) Rules(std::move(rules));
}

}  // namespace

void bind_sampling(nb::module_& m) {
  nb::module_ sub = m.def_submodule("sampling", "Tokens drawn from rows of logits.");
  sub.attr("NOT_FINITE") = kernels::kNotFinite;
  sub.attr("NOTHING_LEFT") = kernels::kNothingLeft;
  nb::class_<TokenHistory>(sub, "TokenHistory", "The tokens of a growing text, and how often each was written.")
      .def(nb::init<std::vector<int64_t>>(), nb::arg("prompt"))
      .def("append", &TokenHistory::append, nb::arg("token"), "One more token was written.");
  nb::class_<Rules>(sub, "Rules", "What a request asks of its logits: penalties, added numbers, what may not come.")
      .def("__init__", &make_rules, nb::arg("rules"),
           "Keyword arguments: repetition, presence, frequency, no_repeat_ngram_size, min_tokens, bias (pairs of id "
           "and number), allowed (ids, ascending), bad_words (lists of ids), ends (ids).")
      .def_prop_ro("largest_id", &Rules::largest_id, "The largest id that a row must have; -1 for none.");
  sub.def(
      "draw", &draw, nb::arg("logits"), nb::arg("rows"), nb::arg("settings"), nb::arg("keys"), nb::arg("threads") = 1,
      nb::arg("adjustments") = nb::list(),
      "A token for each of `rows` (int64) of the logits (float32, float64, or uint16 that stand for bf16): settings "
      "[rows, 5] are temperature, top_k, "
      "top_p, min_p, typical_p; keys [rows, 3] seed, position, choice; adjustments, where there are any, of each row "
      "None or its Rules, TokenHistory and mask (uint8, 0 forbids; or None). NOT_FINITE and NOTHING_LEFT instead of a "
      "token say why there is none.");
  sub.def("adjust", &adjust_scores, nb::arg("scores"), nb::arg("adjustment"),
          "What such an adjustment does to a row of finite float64, in place; what may not come is minus infinity.");
}

}  // namespace tilewise::bind
