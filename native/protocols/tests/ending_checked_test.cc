// Ends from outside in every execution: the task completes once, behind its kernel, with the word of the one thread
// that was heard.
#include "checker/testing.h"
#include "protocols/ending.h"

using namespace tilewise::checker;
using tilewise::protocols::EndingOrders;
using tilewise::protocols::Endings;
using tilewise::protocols::Told;

namespace {

enum class State : uint8_t { kRunning, kExternal, kEnding, kEnded, kLeft };

/// A worker's kernel returns; kTellers threads end the task, each in its own way.
template <class Orders, int kTellers>
struct Ending {
  static constexpr int kNumThreads = 1 + kTellers;
  using Own = Endings<CheckedMemory, State, Orders>;
  typename Own::Word state{State::kRunning};
  Plain<int> written = 0;  // by the kernel
  Plain<int> status = 0;
  Plain<int> num_completed = 0;
  int heard = 0;
  int num_heard = 0;

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
    State found = State::kRunning;
    const Told told = Own::end(state, &found, [&] { status = thread; });
    if (told == Told::kRefused) return;
    heard = thread;
    ++num_heard;
    if (told == Told::kComplete) complete();
  }
  void end() {
    expect(num_completed == 1, "completed once");
    expect(num_heard == 1, "one end is heard");
    expect(status == heard, "the end that was heard");
  }
  static const char* thread_name(int thread) {
    static constexpr const char* kNames[] = {"worker", "teller", "second teller"};
    return kNames[thread];
  }
};

struct SeesToldRelaxed : EndingOrders {
  static constexpr auto kSeeTold = std::memory_order_relaxed;
};
struct LeavesRelaxed : EndingOrders {
  static constexpr auto kLeave = std::memory_order_relaxed;
};
struct ClaimsRelaxed : EndingOrders {
  static constexpr auto kClaim = std::memory_order_relaxed;
};
struct TellsRelaxed : EndingOrders {
  static constexpr auto kTell = std::memory_order_relaxed;
};
struct TellsBeforeItClaims : EndingOrders {
  static constexpr bool kClaimsFirst = false;
};

}  // namespace

CASE("a task that is ended from outside completes once, behind its kernel, with the one end that is heard") {
  HOLDS(Ending<EndingOrders, 1>);
  HOLDS(Ending<EndingOrders, 2>);
}

CASE("every order and step of an end from outside is needed") {
  FOUND(Ending<SeesToldRelaxed, 1>);
  FOUND(Ending<LeavesRelaxed, 1>);
  FOUND(Ending<ClaimsRelaxed, 1>);
  FOUND(Ending<TellsRelaxed, 1>);
  FOUND(Ending<TellsBeforeItClaims, 2>);
}

CHECKED_TEST_MAIN
