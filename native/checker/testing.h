// HOLDS(Scenario), HOLDS_WITH(options, Scenario) and FOUND(Scenario): a test's words for "no execution fails" and "the
// planted mistake is seen".
#pragma once
#include <cstdio>

#include "base/testing.h"
#include "checker/memory.h"

namespace tilewise::checker {

/// compare_exchange_weak may fail for no reason.
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

#define HOLDS(...) \
  ::tilewise::checker::report(::tilewise::checker::explore<__VA_ARGS__>(), true, #__VA_ARGS__, __FILE__, __LINE__)
#define HOLDS_WITH(options, ...)                                                                                \
  ::tilewise::checker::report(::tilewise::checker::explore<__VA_ARGS__>(options), true, #__VA_ARGS__, __FILE__, \
                              __LINE__)
#define FOUND(...) \
  ::tilewise::checker::report(::tilewise::checker::explore<__VA_ARGS__>(), false, #__VA_ARGS__, __FILE__, __LINE__)
