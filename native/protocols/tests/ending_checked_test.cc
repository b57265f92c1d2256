// Ends that another thread reports, in every execution: the task completes once, after its kernel, with the status of
// the one report that was accepted.
#include "checker/testing.h"
#include "protocols/ending.h"

using namespace tilewise::checker;
using tilewise::protocols::EndingOrders;
using tilewise::protocols::Endings;
using tilewise::protocols::EndResult;

namespace {

enum class State : uint8_t { kRunning, kExternal, kEnding, kEnded, kLeft };

template <class Orders = EndingOrders>
using Checked = Endings<CheckedMemory, State, Orders>;

/// A worker's kernel returns; kReporters threads end the task, each in its own way.
template <class Own, int kReporters>
struct Ending {
  static constexpr int kNumThreads = 1 + kReporters;
  typename Own::Word state{State::kRunning};
  Plain<int> written = 0;  // written by the kernel
  Plain<int> status = 0;
  Plain<int> num_completed = 0;
  int accepted = 0;
  int num_accepted = 0;

  Ending() { state.set_name("state"); }
  void complete() {
    ++num_completed;
    expect(written == 1, "what the kernel wrote");
    expect(status != 0, "how the task ended");
  }
  void run(int thread) {
    if (thread == 0) {
      written = 1;
      if (!Own::return_later(state)) complete();
      return;
    }
    State seen = State::kRunning;
    const EndResult result = Own::end(state, &seen, [&] { status = thread; });
    if (result == EndResult::kRejected) return;
    accepted = thread;
    ++num_accepted;
    if (result == EndResult::kCallerCompletes) complete();
  }
  void end() {
    expect(num_completed == 1, "completed once");
    expect(num_accepted == 1, "one report is accepted");
    expect(status == accepted, "the status of the accepted report");
  }
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"worker", "reporter", "second reporter"};
    return kNames[thread];
  }
};

struct SeesReportRelaxed : EndingOrders {
  static constexpr auto kSeeReport = std::memory_order_relaxed;
};
struct LeavesRelaxed : EndingOrders {
  static constexpr auto kLeave = std::memory_order_relaxed;
};
struct ClaimsRelaxed : EndingOrders {
  static constexpr auto kClaim = std::memory_order_relaxed;
};
struct ReportsRelaxed : EndingOrders {
  static constexpr auto kReport = std::memory_order_relaxed;
};
struct RecordsBeforeItClaims : Checked<> {
  template <class Record>
  static EndResult end(Word& word, State* seen, Record&& record) {
    record();
    return Checked<>::end(word, seen, [] {});
  }
};

}  // namespace

CASE("a task that is ended from outside completes once, after its kernel, with the one accepted report") {
  HOLDS(Ending<Checked<>, 1>);
  HOLDS(Ending<Checked<>, 2>);
}

CASE("every order and step of an end from outside is needed") {
  FOUND(Ending<Checked<SeesReportRelaxed>, 1>);
  FOUND(Ending<Checked<LeavesRelaxed>, 1>);
  FOUND(Ending<Checked<ClaimsRelaxed>, 1>);
  FOUND(Ending<Checked<ReportsRelaxed>, 1>);
  FOUND(Ending<RecordsBeforeItClaims, 2>);
}

CHECKED_TEST_MAIN
