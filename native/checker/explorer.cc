// The search: runs the scenario once per execution, along a path of choices. See checker.h.
#include <algorithm>
#include <ctime>
#include <vector>

#include "checker/checker.h"
#include "checker/fiber.h"
#include "checker/trace.h"

namespace tilewise::checker {

namespace {

constexpr size_t kMaxSteps = 3000;
constexpr int kMaxIdlePauses = 1000;
constexpr int kMaxPlain = 100'000;  // plain accesses between two steps

/// Whether two steps of different threads, each with its outcome, cannot be swapped. Stores can be swapped with nearly
/// all steps: the value that a load or a read-modify-write reads is part of its outcome, and the modification order of
/// two stores does not depend on which is made first.
bool is_dependent(const Op& a, const Op& b) {
  if (a.is_sequential() && b.is_sequential()) {
    if (!a.is_access() || !b.is_access() || a.location == b.location) return true;
  }
  if ((a.kind == Kind::kLight && b.kind == Kind::kHeavy) || (a.kind == Kind::kHeavy && b.kind == Kind::kLight)) {
    return true;
  }
  if (a.location == kNoLocation || a.location != b.location) return false;
  const auto changes = [](const Op& op) { return op.kind == Kind::kChange || op.kind == Kind::kCompare; };
  return (changes(a) && changes(b)) || a.kind == Kind::kWake || b.kind == Kind::kWake;
}

bool reads(const Op& op) { return op.location != kNoLocation && op.kind != Kind::kStore && op.kind != Kind::kWake; }

/// Whether a read precedes a write after which it would have had one more outcome.
bool is_overtaken(const Op& earlier, const Op& later) {
  return reads(earlier) && later.is_write() && earlier.location == later.location;
}

struct Asleep {  // a step that need not be taken, because all that follows it has been explored
  int thread;
  Op op;
  Choice choice;
};

/// A state on the path, and which of its steps have been explored.
struct Frame {
  uint32_t enabled = 0;
  uint32_t to_explore = 0;  // bit mask of threads
  uint32_t done = 0;
  int thread = 0;
  size_t at = 0;
  std::vector<Choice> choices;  // of `thread`; empty: not computed yet
  std::vector<Asleep> asleep;
};

enum class Status { kReady, kFinished, kAsleep, kStuck, kPaused };

struct Look {
  int location;
  int message;
  bool only_looks;
  bool operator==(const Look&) const = default;
};

struct Thread {
  Status status = Status::kReady;
  Op* pending = nullptr;
  std::vector<Look> looks;   // reads since it last wrote or paused
  std::vector<Look> before;  // looks at the last pause
  Clock clock{};             // of dependence
  int num_idle_pauses = 0;
  bool has_failed = false;  // a weak compare has failed spuriously
};

class Explorer {
 public:
  Explorer(const Program& program, const Options& options) : program_(program), options_(options) {}
  Result explore();

  // On fibers, and for end() on the explorer's own stack.
  Model& model() { return model_; }
  bool is_in_thread() const { return running_ >= 0; }
  int running() const { return running_; }
  void take_step(Op& op);
  void apply_alone(Op& op);
  void relax();
  void fail(const std::string& what);
  void count_plain() {
    if (++num_plain_ > kMaxPlain) fail("a thread runs for ever without a step");
  }
  void name(int location, const std::string& name) { names_[location] = name; }
  void thread_main();

 private:
  void run_once();
  void resume(int thread);
  void look_again(int thread);
  uint32_t enabled() const;
  bool push_frame(uint32_t enabled, int last);
  std::vector<Choice> open_choices(const Frame& frame, int thread) const;
  void wake_stuck();
  void step(Frame& frame, size_t depth);
  void note_races(size_t which);
  void explore_before(size_t earlier, size_t later);
  void wake(const Op& op, const Choice& choice, const Clock& clock);
  void judge_end();
  bool backtrack();
  std::string trace() const;

  const Program& program_;
  const Options options_;
  Result result_;
  Model model_;
  std::vector<Frame> path_;
  std::vector<Event> events_;
  std::array<Thread, kMaxThreads> threads_;
  std::array<Fiber, kMaxThreads> fibers_;
  Fiber scheduler_;
  std::array<std::string, kMaxLocations> names_;
  void* scenario_ = nullptr;
  int running_ = -1;
  int num_plain_ = 0;
  bool is_abandoned_ = false;
};

Explorer* current = nullptr;

void Explorer::thread_main() {
  program_.run(scenario_, running_);
  threads_[running_].status = Status::kFinished;
  fibers_[running_].switch_to(scheduler_);
}

void Explorer::take_step(Op& op) {
  const int me = running_;
  op.may_fail = op.may_fail && options_.weak_compares_fail && !threads_[me].has_failed;
  threads_[me].pending = &op;
  fibers_[me].switch_to(scheduler_);
}

void Explorer::apply_alone(Op& op) {
  if (op.is_access()) op.value = model_.peek(op.location);
  op.has_succeeded = op.kind != Kind::kCompare || op.value == op.expected;
  if (op.kind == Kind::kStore || (op.kind == Kind::kCompare && op.has_succeeded)) model_.poke(op.location, op.operand);
  if (op.kind == Kind::kChange) model_.poke(op.location, op.change(op.value, op.operand));
}

void Explorer::relax() {
  const int me = running_;
  Thread& thread = threads_[me];
  if (thread.looks.empty()) {
    if (++thread.num_idle_pauses > kMaxIdlePauses) fail("a thread pauses for ever without reading anything");
    return;
  }
  const bool has_newer = std::any_of(thread.looks.begin(), thread.looks.end(),
                                     [&](const Look& look) { return model_.has_newer(look.location, look.message); });
  const bool only_looks =
      std::all_of(thread.looks.begin(), thread.looks.end(), [](const Look& look) { return look.only_looks; });
  // A failed poll changes nothing: the executions in which it comes later and succeeds suffice. It depends on the last
  // location; it may also depend on earlier ones, see wake_stuck().
  if (only_looks) {
    thread.status = Status::kStuck;
    is_abandoned_ |= model_.has_newer(thread.looks.back().location, thread.looks.back().message);
    is_abandoned_ |= has_newer && thread.looks == thread.before;  // it could have read something newer
  } else if (has_newer) {
    return look_again(me);
  } else {
    thread.status = Status::kPaused;
  }
  fibers_[me].switch_to(scheduler_);
}

void Explorer::look_again(int thread) {
  for (const Look& look : threads_[thread].looks) model_.see_newer(thread, look.location, look.message);
  threads_[thread].looks.clear();
}

void Explorer::fail(const std::string& what) {
  if (result_.failure.empty()) {
    result_.failure = what;
    result_.trace = trace();
  }
  if (running_ >= 0) fibers_[running_].switch_to(scheduler_);
}

void Explorer::resume(int thread) {
  running_ = thread;
  num_plain_ = 0;
  scheduler_.switch_to(fibers_[thread]);
  running_ = -1;
}

uint32_t Explorer::enabled() const {
  uint32_t mask = 0;
  for (int t = 0; t < program_.num_threads; ++t) mask |= (threads_[t].status == Status::kReady ? 1u : 0u) << t;
  return mask;
}

/// The outcomes of a thread's next step that have not been explored.
std::vector<Choice> Explorer::open_choices(const Frame& frame, int thread) const {
  const Op& op = *threads_[thread].pending;
  std::vector<Choice> choices = model_.choices(thread, op);
  if (op.kind == Kind::kWake) {  // one choice per sleeper, unless all are woken
    int num_asleep = 0;
    for (int t = 0; t < program_.num_threads; ++t) {
      num_asleep += threads_[t].status == Status::kAsleep && threads_[t].pending->location == op.location;
    }
    for (int s = 1; s < num_asleep && op.operand == 1; ++s) choices.push_back({s, false});
  }
  std::erase_if(choices, [&](const Choice& choice) {
    return std::any_of(frame.asleep.begin(), frame.asleep.end(), [&](const Asleep& asleep) {
      // All positions that a store could have had are explored; positions after later stores are among what follows.
      return asleep.thread == thread && (asleep.choice == choice || op.kind == Kind::kStore);
    });
  });
  return choices;
}

/// Returns false if every step from here has been explored.
bool Explorer::push_frame(uint32_t enabled, int last) {
  Frame frame;
  frame.enabled = enabled;
  if (!path_.empty() && options_.reduces) {
    const Frame& before = path_.back();
    const Op& taken = events_.back().op;
    for (const Asleep& asleep : before.asleep) {
      if (asleep.thread != before.thread && !is_dependent(asleep.op, taken)) frame.asleep.push_back(asleep);
    }
  }
  for (int n = 0; n < program_.num_threads; ++n) {
    const int thread = (last + n) % program_.num_threads;  // the last thread continues, if it can
    if ((enabled >> thread & 1) == 0) continue;
    frame.choices = open_choices(frame, thread);
    if (frame.choices.empty()) continue;
    frame.thread = thread;
    frame.to_explore = options_.reduces ? 1u << thread : enabled;
    path_.push_back(std::move(frame));
    return true;
  }
  return false;
}

void Explorer::run_once() {
  model_.reset(program_.num_threads);
  events_.clear();
  for (std::string& name : names_) name.clear();
  is_abandoned_ = false;
  scenario_ = program_.make();
  for (int t = 0; t < program_.num_threads; ++t) {
    threads_[t] = {};
    fibers_[t].begin([] { current->thread_main(); });
  }
  for (int t = 0; t < program_.num_threads && result_.failure.empty(); ++t) resume(t);
  int last = 0;
  for (size_t depth = 0; result_.failure.empty() && !is_abandoned_; ++depth) {
    if (enabled() == 0) wake_stuck();
    const uint32_t runnable = enabled();
    if (runnable == 0 || is_abandoned_) break;
    if (depth == kMaxSteps) {
      fail("the threads do not end (livelock)");
      break;
    }
    if (depth == path_.size() && !push_frame(runnable, last)) {
      is_abandoned_ = true;
      break;
    }
    Frame& frame = path_[depth];
    if (frame.choices.empty()) frame.choices = open_choices(frame, frame.thread);
    if (frame.choices.empty()) {
      is_abandoned_ = true;
      break;
    }
    last = frame.thread;
    step(frame, depth);
  }
  if (result_.failure.empty() && !is_abandoned_) judge_end();
  if (is_abandoned_) {
    ++result_.num_abandoned;
  } else {
    ++result_.num_executions;
  }
  program_.destroy(scenario_);
}

/// No other thread can run: threads whose polls could read a newer value poll again.
void Explorer::wake_stuck() {
  for (int t = 0; t < program_.num_threads; ++t) {
    Thread& thread = threads_[t];
    const bool has_newer = std::any_of(thread.looks.begin(), thread.looks.end(),
                                       [&](const Look& look) { return model_.has_newer(look.location, look.message); });
    if (thread.status != Status::kStuck || !has_newer) continue;
    thread.status = Status::kReady;
    thread.before.swap(thread.looks);
    thread.looks.clear();
    resume(t);
  }
}

void Explorer::step(Frame& frame, size_t depth) {
  const int me = frame.thread;
  Thread& thread = threads_[me];
  const Choice choice = frame.choices[frame.at];
  Op& op = *thread.pending;
  model_.execute(me, op, choice, static_cast<int>(depth));
  events_.push_back({me, 0, {}, op, choice});
  note_races(depth);
  if (model_.has_overtaken_pin()) return fail("a store that an earlier load might have read (load buffering)");
  const bool has_made_message = op.is_write() && !(op.kind == Kind::kCompare && choice.fails);
  const int own_message = has_made_message ? model_.last_message(op.location) : choice.message;
  // A read-modify-write that does not change the value counts as a poll: without it other threads read the same value.
  const bool has_written = has_made_message && (!reads(op) || model_.value(op.location, own_message) != op.value);
  if (has_written || op.kind == Kind::kFence || op.kind == Kind::kHeavy) thread.looks.clear();
  if (op.kind == Kind::kCompare && choice.fails && op.value == op.expected) thread.has_failed = true;
  if (reads(op)) thread.looks.push_back({op.location, own_message, !has_written});
  if (has_written) {
    for (int t = 0; t < program_.num_threads; ++t) {
      Thread& other = threads_[t];
      if (other.status != Status::kStuck && other.status != Status::kPaused) continue;
      const bool has_newer = std::any_of(other.looks.begin(), other.looks.end(), [&](const Look& look) {
        return look.location == op.location && model_.has_newer(look.location, look.message);
      });
      if (!has_newer) continue;
      if (other.status == Status::kStuck) {
        is_abandoned_ |= other.looks.back().location == op.location;
        continue;
      }
      other.status = Status::kReady;
      look_again(t);
      join(other.clock, events_.back().clock);
      resume(t);
    }
  }
  if (op.kind == Kind::kSleep && op.has_succeeded) {
    thread.status = Status::kAsleep;
    return;
  }
  if (op.kind == Kind::kWake) wake(op, choice, events_.back().clock);
  resume(me);
}

void Explorer::wake(const Op& op, const Choice& choice, const Clock& clock) {
  int number = 0;
  for (int t = 0; t < program_.num_threads; ++t) {
    Thread& other = threads_[t];
    if (other.status != Status::kAsleep || other.pending->location != op.location) continue;
    if (number++ != choice.message && op.operand == 1) continue;
    other.status = Status::kReady;
    join(other.clock, clock);
    resume(t);
  }
}

void Explorer::judge_end() {
  std::string waiting;
  for (int t = 0; t < program_.num_threads; ++t) {
    if (threads_[t].status == Status::kFinished) continue;
    waiting += waiting.empty() ? "" : ", ";
    waiting += program_.thread_name(scenario_, t);
    waiting += threads_[t].status == Status::kAsleep ? " sleeps" : " looks";
  }
  if (waiting.empty()) {
    program_.end(scenario_);
  } else {
    fail("deadlock: " + waiting + " for ever");
  }
}

/// Orders the event after those that it depends on, and schedules other possible orders.
void Explorer::note_races(size_t which) {
  Event& event = events_[which];
  Clock clock = threads_[event.thread].clock;
  event.number = ++clock[event.thread];
  const int writer = reads(event.op) ? model_.writer(event.op.location, event.choice.message) : -1;
  std::vector<size_t> races;
  for (size_t e = which; e-- > 0;) {
    const Event& earlier = events_[e];
    if (has_seen(clock, earlier.thread, earlier.number)) continue;
    const bool depends = is_dependent(earlier.op, event.op);
    const bool overtakes = is_overtaken(earlier.op, event.op);
    if (depends || overtakes) races.push_back(e);
    // The other values that the read could have read may be readable only before a step that it followed.
    for (size_t b = e; overtakes && b-- > 0;) {
      if (events_[b].thread != earlier.thread && is_dependent(events_[b].op, earlier.op)) races.push_back(b);
    }
    if (depends || static_cast<int>(e) == writer) join(clock, earlier.clock);
  }
  event.clock = threads_[event.thread].clock = clock;
  for (const size_t earlier : races) {
    if (options_.reduces && events_[earlier].thread != event.thread) explore_before(earlier, which);
  }
}

/// Schedules, from the state before `earlier`, an execution in which `later` comes first.
void Explorer::explore_before(size_t earlier, size_t later) {
  Frame& frame = path_[earlier];
  const Event& overtaken = events_[earlier];
  uint32_t met = 0;
  uint32_t firsts = 0;  // threads that may begin it
  std::vector<size_t> independent;
  for (size_t e = earlier + 1; e <= later; ++e) {
    const Event& event = events_[e];
    if (e != later && has_seen(event.clock, overtaken.thread, overtaken.number)) continue;
    // A read cannot begin it if a later write would have given the read another outcome.
    const bool is_first =
        (met >> event.thread & 1) == 0 && std::none_of(independent.begin(), independent.end(), [&](size_t k) {
          return has_seen(event.clock, events_[k].thread, events_[k].number) || is_overtaken(event.op, events_[k].op);
        });
    met |= 1u << event.thread;
    if (is_first) firsts |= 1u << event.thread;
    independent.push_back(e);
  }
  if ((firsts & frame.to_explore) != 0) return;
  const uint32_t own = 1u << events_[later].thread;
  const uint32_t added = (firsts & own) != 0 ? own : firsts & (~firsts + 1);
  frame.to_explore |= (added & frame.enabled) != 0 ? added : frame.enabled;
}

/// Moves to the next path. Returns false after the last path.
bool Explorer::backtrack() {
  while (!path_.empty()) {
    Frame& frame = path_.back();
    if (!frame.choices.empty()) {
      if (options_.reduces) {
        // The step with its outcome.
        Op op = events_.size() >= path_.size() ? events_[path_.size() - 1].op : Op{};
        frame.asleep.push_back({frame.thread, op, frame.choices[frame.at]});
      }
      if (++frame.at < frame.choices.size()) return true;
    }
    frame.done |= 1u << frame.thread;
    const uint32_t left = frame.to_explore & ~frame.done;
    if (left != 0) {
      frame.thread = __builtin_ctz(left);
      frame.choices.clear();
      frame.at = 0;
      return true;
    }
    path_.pop_back();
  }
  return false;
}

Result Explorer::explore() {
  const std::clock_t begin = std::clock();
  current = this;
  do {
    run_once();
    if (!result_.failure.empty()) break;
    result_.is_complete = !backtrack();
  } while (!result_.is_complete && result_.num_executions + result_.num_abandoned < options_.max_executions);
  current = nullptr;
  result_.seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  return result_;
}

std::string Explorer::trace() const {
  std::string text;
  for (const Event& event : events_) {
    const int location = event.op.location;
    const std::string name = location == kNoLocation    ? ""
                             : names_[location].empty() ? "atomic " + std::to_string(location)
                                                        : names_[location];
    text += std::string("  ") + program_.thread_name(scenario_, event.thread) + ": " + text_of(event.op, name) + "\n";
  }
  return text;
}

}  // namespace

Result explore(const Program& program, const Options& options) { return Explorer(program, options).explore(); }

void expect(bool condition, const char* what) {
  if (!condition) current->fail(std::string("expected ") + what);
}

uint64_t perform(Op& op) {
  if (current->is_in_thread()) {
    current->take_step(op);
  } else {
    current->apply_alone(op);
  }
  return op.value;
}

void relax() {
  if (current->is_in_thread()) current->relax();
}

void fence(std::memory_order order) {
  if (!current->is_in_thread()) return;
  if (order == std::memory_order_seq_cst) {
    Op op{.kind = Kind::kFence};
    perform(op);
    return;
  }
  if (order != std::memory_order_release) current->model().acquire_fence(current->running());
  if (order != std::memory_order_acquire) current->model().release_fence(current->running());
}

void heavy_fence() {
  Op op{.kind = Kind::kHeavy};
  perform(op);
}

void light_fence() {
  Op op{.kind = Kind::kLight, .order = std::memory_order_relaxed};
  perform(op);
}

void sleep_on(int location, uint64_t expected) {
  Op op{.kind = Kind::kSleep, .location = location, .order = std::memory_order_relaxed, .expected = expected};
  perform(op);
}

void wake(int location, int count) {
  Op op{.kind = Kind::kWake,
        .location = location,
        .order = std::memory_order_relaxed,
        .operand = static_cast<uint64_t>(count)};
  perform(op);
}

int add_location(uint64_t value) {
  if (current->is_in_thread()) current->fail("a thread has made an Atomic; only the scenario's constructor may");
  const int location = current->model().add_location(value);
  if (location == kNoLocation) current->fail("a scenario has too many Atomics");
  return std::max(location, 0);
}

void name_location(int location, const char* name, int index) {
  current->name(location, index < 0 ? name : std::string(name) + "[" + std::to_string(index) + "]");
}

void pin_location(int location) {
  if (!current->is_in_thread()) return;
  if (!current->model().pin(current->running(), location)) {
    current->fail("a store that an earlier load might have read (load buffering)");
  }
}

const Clock* own_clock(int* thread) {
  *thread = current->running();
  current->count_plain();
  return *thread < 0 ? nullptr : &current->model().clock(*thread);
}

void report_race(const char* what, const void*) { current->fail(std::string("data race: ") + what); }

}  // namespace tilewise::checker
