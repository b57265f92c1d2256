// What a request asks of its logits before a token is drawn: penalties, added numbers, what may not come.
//
// All in doubles and in one order: repetition, presence and frequency, bias, the tokens allowed, n-grams, bad words,
// end tokens before the least length, the grammar's mask. What may not come is minus infinity. A function of the row,
// the rules and the text alone.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tilewise::kernels {

/// The tokens of a growing text, and how often each was written. One thread at a time.
class TokenHistory {
 public:
  struct Seen {
    int64_t id;
    int64_t written;  ///< times, behind the prompt
  };

  explicit TokenHistory(std::vector<int64_t> prompt);
  /// One more token was written.
  void append(int64_t token);

  std::span<const int64_t> ids() const { return ids_; }
  int64_t num_new() const { return static_cast<int64_t>(ids_.size() - num_prompt_); }
  /// Every token of prompt and text, once.
  std::span<const Seen> seen() const { return seen_; }

 private:
  Seen& place_of(int64_t token);

  std::vector<int64_t> ids_;
  size_t num_prompt_;
  std::vector<Seen> seen_;
  std::unordered_map<int64_t, size_t> places_;  // in seen_
};

/// Ids lie below the row's size where the caller has checked them: bias, allowed and bad words; others are passed by.
struct Rules {
  double repetition = 1;  ///< divides logits of tokens seen, or multiplies negative ones
  double presence = 0;    ///< taken from logits of tokens written
  double frequency = 0;   ///< the same, for every time
  int64_t no_repeat_ngram_size = 0;
  int64_t min_tokens = 0;
  std::vector<std::pair<int64_t, double>> bias;
  std::vector<int64_t> allowed;  ///< ascending; empty: all
  std::vector<std::vector<int64_t>> bad_words;  ///< none empty
  std::vector<int64_t> ends;

  /// The largest id that must lie in the row, -1 for none.
  int64_t largest_id() const;
};

/// What is done to one row. May be all null.
struct Adjustment {
  const Rules* rules = nullptr;
  const TokenHistory* history = nullptr;  ///< with rules
  const uint8_t* mask = nullptr;          ///< 0: may not come; tokens behind its end may not
  int64_t mask_size = 0;

  bool is_none() const { return rules == nullptr && mask == nullptr; }
};

/// Changes n scores, all finite.
void adjust(const Adjustment& how, double* scores, int64_t n);

}  // namespace tilewise::kernels
