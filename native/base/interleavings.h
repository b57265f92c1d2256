// Exhaustive interleavings of small cases: every order in which the steps of a few threads can happen.
//
// Purpose: model checks of protocols in native tests: each step is as atomic as in the code, and every planted wrong
// order must be found, so that the model is known to see what it is for. Who may call: tests. Memory: all states seen.
#pragma once
#include <cstdint>
#include <functional>
#include <set>
#include <utility>
#include <vector>

namespace tilewise::testing {

/// A thread: a step per call at its program counter; false means "blocked here". Returns after its last step.
template <class State>
struct Process {
  int num_steps;
  std::function<bool(State&, int step, int* next)> run;
};

/// Visits every reachable state; counts final and stuck states for which `good` does not hold.
template <class State>
class Explorer {
 public:
  Explorer(std::vector<Process<State>> processes, std::function<bool(const State&)> good)
      : processes_(std::move(processes)), good_(std::move(good)) {}

  int bad_ends(const State& start) {
    visit(start, std::vector<int>(processes_.size(), 0));
    return bad_;
  }
  int64_t num_states() const { return static_cast<int64_t>(seen_.size()); }

 private:
  void visit(const State& state, const std::vector<int>& at) {
    if (!seen_.insert({state.key(), at}).second) return;
    bool moved = false;
    for (size_t p = 0; p < processes_.size(); ++p) {
      if (at[p] >= processes_[p].num_steps) continue;
      State after = state;
      std::vector<int> then = at;
      int next = at[p] + 1;
      if (!processes_[p].run(after, at[p], &next)) continue;
      then[p] = next;
      moved = true;
      visit(after, then);
    }
    if (!moved && !good_(state)) ++bad_;
  }

  std::vector<Process<State>> processes_;
  std::function<bool(const State&)> good_;
  std::set<std::pair<std::vector<int>, std::vector<int>>> seen_;
  int bad_ = 0;
};

}  // namespace tilewise::testing
