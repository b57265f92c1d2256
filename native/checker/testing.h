// Test macros: HOLDS(Scenario) and HOLDS_WITH(options, Scenario) for "no execution fails", FOUND(Scenario) for "the
// planted mistake is found", DEEP_HOLDS(Scenario) for checks that take minutes.
#pragma once
#include <cstdio>
#include <cstring>

#include "base/testing.h"
#include "checker/memory.h"

namespace tilewise::checker {

/// compare_exchange_weak may fail spuriously.
inline Options weak_compares() {
  Options options;
  options.weak_compares_fail = true;
  return options;
}

inline void report(const Result& result, bool should_hold, const char* scenario, const char* file, int line) {
  std::printf("     %s: %lld executions, %lld cut short, %.3f s\n", scenario,
              static_cast<long long>(result.num_executions), static_cast<long long>(result.num_abandoned),
              result.seconds);
  if (should_hold ? result.holds() : !result.failure.empty()) return;
  std::fprintf(stderr, "%s:%d: %s %s; got %s\n%s", file, line, scenario,
               should_hold ? "must hold in every execution" : "has a planted mistake that must be found",
               !result.failure.empty() ? result.failure.c_str()
               : !result.is_complete   ? "more executions than may be explored"
                                       : "no failure",
               result.trace.c_str());
  ++testing::failures();
}

}  // namespace tilewise::checker

namespace tilewise::checker {

/// Set by `NAME_checked_test deep`, which also explores what takes minutes (make soak).
inline bool is_deep = false;

inline int run(int argc, char** argv) {
  is_deep = argc > 1 && std::strcmp(argv[1], "deep") == 0;
  return is_deep ? testing::run(argc - 1, argv + 1) : testing::run(argc, argv);
}

inline Options without_limit() {
  Options options;
  options.max_executions = INT64_MAX;
  return options;
}

}  // namespace tilewise::checker

#define CHECKED_TEST_MAIN \
  int main(int argc, char** argv) { return ::tilewise::checker::run(argc, argv); }
#define HOLDS(...) \
  ::tilewise::checker::report(::tilewise::checker::explore<__VA_ARGS__>(), true, #__VA_ARGS__, __FILE__, __LINE__)
#define HOLDS_WITH(options, ...)                                                                                \
  ::tilewise::checker::report(::tilewise::checker::explore<__VA_ARGS__>(options), true, #__VA_ARGS__, __FILE__, \
                              __LINE__)
#define DEEP_HOLDS(...) \
  if (::tilewise::checker::is_deep) HOLDS_WITH(::tilewise::checker::without_limit(), __VA_ARGS__)
#define FOUND(...) \
  ::tilewise::checker::report(::tilewise::checker::explore<__VA_ARGS__>(), false, #__VA_ARGS__, __FILE__, __LINE__)
