// Python's view of native/kernels/sampling. One call samples a token for each of many rows, on several threads, without
// the GIL. The tokens do not depend on which thread samples a row.
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
#include "kernels/sampling/sample.h"

namespace nb = nanobind;

namespace tilewise::bind {
namespace {

using kernels::LogitsProcessors;
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
constexpr size_t kRowsPerThread = 4;  // a thread for fewer rows costs more than it saves
constexpr double kMaxTopK = 0x1p53;

/// The logits processors of a row as Python passes them: none, rules with a history, a mask, or both.
struct PythonProcessors {
  const Rules* rules = nullptr;
  const TokenHistory* history = nullptr;
  std::optional<Mask> mask;

  LogitsProcessors of_row(int64_t n) const {
    check<ArgumentError>((rules == nullptr) == (history == nullptr),
                         "[sampling.sample] rules need the history that they apply to; got one of them; pass both");
    check<ArgumentError>(rules == nullptr || rules->largest_id() < n,
                         "[sampling.sample] rules must name tokens of the row; got ",
                         rules == nullptr ? -1 : rules->largest_id(), " for a row of ", n, "; correct them");
    return {rules, history, mask ? mask->data() : nullptr, mask ? static_cast<int64_t>(mask->shape(0)) : 0};
  }
};

LogitsType type_of(const Logits& logits) {
  const bool is_f32 = logits.dtype() == nb::dtype<float>(), is_f64 = logits.dtype() == nb::dtype<double>();
  check<ArgumentError>(
      (is_f32 || is_f64 || logits.dtype() == nb::dtype<uint16_t>()) && logits.shape(1) > 0,
      "[sampling.sample] logits must be float32, float64 or uint16 (bf16 bits), and a row must not be ",
      "empty; convert them");
  return is_f32 ? LogitsType::kF32 : is_f64 ? LogitsType::kF64 : LogitsType::kBF16;
}

kernels::LogitsRow row_of(const Logits& logits, LogitsType type, int64_t row) {
  const auto count = static_cast<int64_t>(logits.shape(0)), n = static_cast<int64_t>(logits.shape(1));
  check<ArgumentError>(row >= 0 && row < count, "[sampling.sample] a row must be below ", count, "; got ", row,
                       "; correct it");
  return {static_cast<const std::byte*>(logits.data()) + row * n * static_cast<int64_t>(logits.itemsize()), n, type};
}

kernels::SamplingSettings settings_of(const double* values) {
  const double temperature = values[0], top_k = values[1], top_p = values[2], min_p = values[3], typical_p = values[4];
  const bool are_valid = temperature >= 0 && top_k >= 0 && top_k <= kMaxTopK && top_p > 0 && top_p <= 1 && min_p >= 0 &&
                         min_p <= 1 && typical_p > 0 && typical_p <= 1;
  check<ArgumentError>(are_valid, "[sampling.sample] settings must lie in their ranges; got temperature ", temperature,
                       ", top_k ", top_k, ", top_p ", top_p, ", min_p ", min_p, ", typical_p ", typical_p,
                       "; correct them");
  return {temperature, static_cast<int64_t>(top_k), top_p, min_p, typical_p};
}

PythonProcessors processors_of(nb::handle object) {
  if (object.is_none()) return {};
  check<ArgumentError>(nb::isinstance<nb::tuple>(object) && nb::len(object) == 3,
                       "[sampling.sample] logits processors must be a tuple (rules, history, mask); got ",
                       nb::type_name(object.type()).c_str(), "; pass these three");
  const auto three = nb::borrow<nb::tuple>(object);
  PythonProcessors processors;
  if (!three[0].is_none()) processors.rules = nb::cast<const Rules*>(three[0]);
  if (!three[1].is_none()) processors.history = nb::cast<const TokenHistory*>(three[1]);
  if (!three[2].is_none()) processors.mask = nb::cast<Mask>(three[2]);
  return processors;
}

/// The caller keeps logits and processors alive during the call, and appends to no history meanwhile.
std::vector<int64_t> sample(const Logits& logits, const Rows& rows, const Settings& settings, const Keys& keys,
                            size_t threads, const nb::list& processors) {
  const size_t count = rows.shape(0), num_processors = nb::len(processors);
  const LogitsType type = type_of(logits);
  check<ArgumentError>(
      settings.shape(0) == count && settings.shape(1) == kSettings && keys.shape(0) == count && keys.shape(1) == kKeys,
      "[sampling.sample] every row needs its settings and its key; got ", settings.shape(0), " and ", keys.shape(0),
      " for ", count, " rows; pass arrays [rows, 5] and [rows, 3]");
  check<ArgumentError>(num_processors == 0 || num_processors == count,
                       "[sampling.sample] processors must have one entry per row; got ", num_processors, " for ", count,
                       " rows; pass None for a row without");
  std::vector<kernels::LogitsRow> row_logits;
  std::vector<kernels::SamplingSettings> row_settings;
  std::vector<PythonProcessors> owners(num_processors);
  std::vector<LogitsProcessors> row_processors(count);
  size_t num_costly = 0;  // greedy rows without processors take a few microseconds
  for (size_t i = 0; i < count; ++i) {
    row_logits.push_back(row_of(logits, type, rows.data()[i]));
    row_settings.push_back(settings_of(settings.data() + i * kSettings));
    if (num_processors != 0) {
      owners[i] = processors_of(processors[i]);
      row_processors[i] = owners[i].of_row(row_logits[i].n);
    }
    num_costly += row_settings[i].temperature > 0 || !row_processors[i].is_empty();
  }
  std::vector<int64_t> tokens(count);
  std::atomic<size_t> next{0};
  std::atomic<bool> lacks_memory{false};
  const auto work = [&]() noexcept {
    try {
      kernels::RowSampler sampler;
      for (size_t i = next++; i < count; i = next++) {
        const uint64_t* key = keys.data() + i * kKeys;
        tokens[i] = sampler.sample(row_logits[i], row_settings[i], {key[0], key[1], key[2]}, row_processors[i]);
      }
    } catch (const std::bad_alloc&) {
      lacks_memory = true;
    }
  };
  nb::gil_scoped_release unlocked;
  std::vector<std::jthread> helpers;
  const size_t num_threads = std::min(std::max<size_t>(threads, 1), num_costly / kRowsPerThread);
  for (size_t i = 1; i < num_threads; ++i) helpers.emplace_back(work);
  work();
  helpers.clear();  // joins them
  check<ResourceError>(!lacks_memory,
                       "[sampling.sample] out of memory: sampling needs a few copies of a row; free some memory");
  return tokens;
}

void apply_logits_processors(const Scores& scores, const nb::object& processors) {
  const auto n = static_cast<int64_t>(scores.shape(0));
  const PythonProcessors owner = processors_of(processors);
  kernels::apply_logits_processors(owner.of_row(n), scores.data(), n);
}

void check_rules(const Rules& rules) {
  const auto is_id = [](int64_t id) { return id >= 0; };
  const bool are_valid = rules.repetition > 0 && rules.no_repeat_ngram_size >= 0 && rules.min_tokens >= 0 &&
                         std::ranges::all_of(rules.bias, is_id, &std::pair<int64_t, double>::first) &&
                         std::ranges::all_of(rules.allowed, is_id) && std::ranges::is_sorted(rules.allowed) &&
                         std::ranges::all_of(rules.ends, is_id) &&
                         std::ranges::all_of(rules.bad_words, [&](const auto& word) {
                           return !word.empty() && std::ranges::all_of(word, is_id);
                         });
  check<ArgumentError>(
      are_valid,
      "[sampling.Rules] repetition must be positive, counts and ids must be at least 0, allowed ids must ascend and "
      "bad words must not be empty; correct the rules");
}

void make_rules(Rules* self, const nb::kwargs& arguments) {
  Rules rules;
  Keywords(arguments)
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
  nb::module_ sub = m.def_submodule("sampling", "Samples tokens from rows of logits.");
  sub.attr("NOT_FINITE") = kernels::kNotFinite;
  sub.attr("NOTHING_LEFT") = kernels::kNothingLeft;
  nb::class_<TokenHistory>(sub, "TokenHistory", "The tokens of a growing text, and how often each was generated.")
      .def(nb::init<std::vector<int64_t>>(), nb::arg("prompt"))
      .def("append", &TokenHistory::append, nb::arg("token"), "Adds a generated token.");
  nb::class_<Rules>(sub, "Rules", "What a request asks of its logits: penalties, biases and forbidden tokens.")
      .def("__init__", &make_rules, nb::arg("rules"),
           "Keyword arguments: repetition, presence, frequency, no_repeat_ngram_size, min_tokens, bias (pairs of id "
           "and number), allowed (ids, ascending), bad_words (lists of ids), ends (ids).")
      .def_prop_ro("largest_id", &Rules::largest_id, "The largest id that a row must have; -1 for none.");
  sub.def(
      "sample", &sample, nb::arg("logits"), nb::arg("rows"), nb::arg("settings"), nb::arg("keys"),
      nb::arg("threads") = 1, nb::arg("processors") = nb::list(),
      "Samples a token for each of `rows` (int64) of the logits (float32, float64, or uint16 as bf16 bits). Settings "
      "[rows, 5] are temperature, top_k, top_p, min_p and typical_p. Keys [rows, 3] are seed, position and choice. "
      "Processors are empty, or have for each row None or (Rules, TokenHistory, mask). The mask has a uint8 for each "
      "token, 0 for forbidden, or is absent (None). Returns NOT_FINITE or NOTHING_LEFT for a row without a token.");
  sub.def("apply_logits_processors", &apply_logits_processors, nb::arg("scores"), nb::arg("processors"),
          "Applies (Rules, TokenHistory, mask) to a row of finite float64 in place; forbidden tokens become minus "
          "infinity.");
}

}  // namespace tilewise::bind
