// See logits_processors.h.
#include "kernels/sampling/logits_processors.h"

#include <algorithm>
#include <limits>

namespace tilewise::kernels {
namespace {

constexpr double kForbidden = -std::numeric_limits<double>::infinity();
constexpr double kLargest = std::numeric_limits<double>::max();  // minus infinity is for forbidden tokens

void apply_penalties(const Rules& rules, const TokenHistory& history, double* scores, int64_t n) {
  if (rules.repetition != 1) {
    for (const TokenHistory::Seen& token : history.seen()) {
      if (token.id >= n) continue;
      double& score = scores[token.id];
      score = std::clamp(score < 0 ? score * rules.repetition : score / rules.repetition, -kLargest, kLargest);
    }
  }
  if (rules.presence == 0 && rules.frequency == 0) return;
  for (const TokenHistory::Seen& token : history.seen()) {
    if (token.num_generated == 0 || token.id >= n) continue;
    scores[token.id] -= rules.frequency * static_cast<double>(token.num_generated) + rules.presence;
  }
}

void allow_only(const std::vector<int64_t>& allowed, double* scores, int64_t n) {
  int64_t next = 0;  // ids ascend
  for (const int64_t id : allowed) {
    std::fill(scores + next, scores + id, kForbidden);
    next = id + 1;
  }
  std::fill(scores + next, scores + n, kForbidden);
}

bool ends_with(std::span<const int64_t> ids, std::span<const int64_t> tail) {
  return tail.size() <= ids.size() &&
         std::equal(tail.begin(), tail.end(), ids.end() - static_cast<int64_t>(tail.size()));
}

/// Forbids each token that would complete an n-gram of this size a second time.
void forbid_ngrams(std::span<const int64_t> ids, size_t size, double* scores, int64_t n) {
  if (size == 0 || size > ids.size()) return;
  const std::span<const int64_t> tail = ids.last(size - 1);
  for (size_t next = size - 1; next < ids.size(); ++next)
    if (ids[next] < n && ends_with(ids.first(next), tail)) scores[ids[next]] = kForbidden;
}

void forbid_words(const Rules& rules, std::span<const int64_t> ids, double* scores) {
  for (const std::vector<int64_t>& word : rules.bad_words) {
    const bool is_end = word.size() == 1 && std::ranges::find(rules.ends, word.front()) != rules.ends.end();
    const std::span<const int64_t> before = std::span(word).first(word.size() - 1);
    if (!is_end && ends_with(ids, before)) scores[word.back()] = kForbidden;
  }
}

}  // namespace

TokenHistory::TokenHistory(std::vector<int64_t> prompt) : ids_(std::move(prompt)), num_prompt_(ids_.size()) {
  for (const int64_t token : ids_) entry_of(token);
}

void TokenHistory::append(int64_t token) {
  ++entry_of(token).num_generated;
  ids_.push_back(token);
}

TokenHistory::Seen& TokenHistory::entry_of(int64_t token) {
  const auto [place, is_new] = places_.try_emplace(token, seen_.size());
  if (is_new) seen_.push_back({token, 0});
  return seen_[place->second];
}

int64_t Rules::largest_id() const {
  int64_t largest = allowed.empty() ? -1 : allowed.back();
  for (const auto& [id, added] : bias) largest = std::max(largest, id);
  for (const std::vector<int64_t>& word : bad_words) largest = std::max(largest, *std::ranges::max_element(word));
  return largest;
}

void apply_logits_processors(const LogitsProcessors& processors, double* scores, int64_t n) {
  if (processors.rules != nullptr) {
    const Rules& rules = *processors.rules;
    const TokenHistory& history = *processors.history;
    apply_penalties(rules, history, scores, n);
    for (const auto& [id, added] : rules.bias) scores[id] += added;
    if (!rules.allowed.empty()) allow_only(rules.allowed, scores, n);
    forbid_ngrams(history.ids(), static_cast<size_t>(rules.no_repeat_ngram_size), scores, n);
    forbid_words(rules, history.ids(), scores);
    if (history.num_new() < rules.min_tokens)
      for (const int64_t id : rules.ends)
        if (id < n) scores[id] = kForbidden;
  }
  if (processors.mask == nullptr) return;
  const int64_t num_masked = std::min(n, processors.mask_size);
  for (int64_t i = 0; i < num_masked; ++i) scores[i] = processors.mask[i] != 0 ? scores[i] : kForbidden;
  std::fill(scores + num_masked, scores + n, kForbidden);
}

}  // namespace tilewise::kernels
