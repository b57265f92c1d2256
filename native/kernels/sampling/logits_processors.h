// Logits processors: what changes one row of logits before a token is sampled.
//
// They apply in this order: repetition penalty, presence and frequency penalties, bias, allowed tokens, n-grams, bad
// words, end tokens before the minimum length, the grammar's mask. All arithmetic is in double. A forbidden token's
// score becomes minus infinity. The result depends on the row, the rules and the text alone.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tilewise::kernels {

/// The tokens of a growing text, and how often each was generated. One thread at a time.
class TokenHistory {
 public:
  struct Seen {
    int64_t id;
    int64_t num_generated;  ///< occurrences after the prompt
  };

  explicit TokenHistory(std::vector<int64_t> prompt);
  /// Adds a generated token.
  void append(int64_t token);

  std::span<const int64_t> ids() const { return ids_; }
  int64_t num_new() const { return static_cast<int64_t>(ids_.size() - num_prompt_); }
  /// Every distinct token of prompt and text.
  std::span<const Seen> seen() const { return seen_; }

 private:
  Seen& entry_of(int64_t token);

  std::vector<int64_t> ids_;
  size_t num_prompt_;
  std::vector<Seen> seen_;
  std::unordered_map<int64_t, size_t> places_;  // index in seen_ by token
};

/// What a request asks of its logits. The caller has checked that the ids of bias, allowed and bad_words lie in the
/// row; other ids beyond the row are ignored.
struct Rules {
  double repetition = 1;  ///< divides positive logits of seen tokens, multiplies negative ones
  double presence = 0;    ///< subtracted from logits of generated tokens
  double frequency = 0;   ///< subtracted once per occurrence
  int64_t no_repeat_ngram_size = 0;
  int64_t min_tokens = 0;
  std::vector<std::pair<int64_t, double>> bias;
  std::vector<int64_t> allowed;  ///< ascending; empty: all
  std::vector<std::vector<int64_t>> bad_words;  ///< each has an id
  std::vector<int64_t> ends;

  /// The largest id that must lie in the row, -1 for none.
  int64_t largest_id() const;
};

/// The processors of one row; all null: none.
struct LogitsProcessors {
  const Rules* rules = nullptr;
  const TokenHistory* history = nullptr;  ///< null if and only if rules are
  const uint8_t* mask = nullptr;          ///< 0: forbidden; so are tokens beyond its end
  int64_t mask_size = 0;

  bool is_empty() const { return rules == nullptr && mask == nullptr; }
};

/// Changes n finite scores in place.
void apply_logits_processors(const LogitsProcessors& processors, double* scores, int64_t n);

}  // namespace tilewise::kernels
