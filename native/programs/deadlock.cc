// Proves that a tile program cannot deadlock, for any number of workers and any window, and that signals are paired
// correctly.
//
// In one legal schedule, every device runs its tasks strictly in submission order. If that schedule reaches the end, so
// does every greedy execution. Suppose one is stuck. Of its uncompleted tasks, take the first in the order in which the
// schedule completed them. All tasks before it are complete. These include all that were submitted before it on its
// device (so the window has room and it is submitted), all that it depends on, and all posters that it waits for. So it
// can run.
//
// With few devices there is a cursor per device. With many there is one per class, that of its first device, and a step
// of a class posts what the step posts on all its devices: a wait for a peer is a wait for the peer's class. This is
// the same proof if the devices of a class are in lockstep. That means that, except for the names of signals and peers,
// each has the waits of the first in every instruction, gets the posts that the first gets from every instruction of
// every class, and begins the loops that wait or post at the same iterations. Then a schedule of classes that ends is a
// schedule of devices: let all devices of a class take a step at once. Conversely, if the schedule of devices ends, so
// does that of classes: order the steps of classes by when the first device of each took them. It waited for devices
// that had taken theirs, so their classes come before it. If a class is not in lockstep, every device has a cursor,
// however many there are. Sharded state is such a case: each storage shard is copied by its own instruction, and its
// owner waits in another one than its peers.
//
// Signals only count. So the proof also pairs the n-th post of a signal with the n-th wait for it, and rejects a pair
// about different tensors or uses, or from another poster than the wait names.
#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "programs/bound.h"

namespace tilewise::programs {

namespace {

constexpr int64_t kMostCursors = 16;  // with more devices, one cursor per class if classes are in lockstep

/// A post from the view of the cursor that receives it.
struct Post {
  int64_t cursor;
  int64_t poster;
  BoundSignal signal;
  int64_t slot;
  Number use;
};

/// The devices that are simulated, and what each step posts to which cursor.
struct CursorSet {
  std::vector<int64_t> devices;  // per cursor
  std::vector<std::vector<std::vector<std::vector<Post>>>> posts;  // per cursor, template, instruction
};

int64_t member_of(const DeviceEntry& device, int64_t group, const Number& member) {
  return device.groups[group][member.on(device.numbers).constant];
}

void make_room(const Program& program, int64_t device, CursorSet& cursors) {
  cursors.devices.push_back(device);
  auto& of_cursor = cursors.posts.emplace_back();
  for (const Template& plan : program.class_of(device).templates) of_cursor.emplace_back(plan.instrs.size());
}

CursorSet cursors_of_devices(const Program& program) {
  CursorSet cursors;
  for (int64_t d = 0; d < program.num_devices(); ++d) {
    make_room(program, d, cursors);
    const Bound& templates = program.bound(d);
    for (size_t t = 0; t < templates.size(); ++t) {
      for (size_t i = 0; i < templates[t].instrs.size(); ++i) {
        for (const BoundNotify& n : templates[t].instrs[i].notifies) {
          cursors.posts[d][t][i].push_back({n.device, d, n.signal, n.slot, n.use});
        }
      }
    }
  }
  return cursors;
}

/// Maps the signals of a device to those of the first device of its class, and records the poster that each is waited
/// from.
class SignalMap {
 public:
  explicit SignalMap(int64_t num_signals) : image_(num_signals), origin_(num_signals), poster_(num_signals) {}

  void forget() {
    for (auto* of : {&image_, &origin_, &poster_}) std::fill(of->begin(), of->end(), kUnset);
  }

  /// Adds waits of `num` iterations; returns false if one of their signals is already mapped otherwise or has another
  /// poster.
  bool add_wait(int64_t signal_of_first, int64_t signal, int64_t num, int64_t poster) {
    for (int64_t i = 0; i < num; ++i) {
      const bool is_same = set(image_[signal_of_first + i], signal + i) &&
                           set(origin_[signal + i], signal_of_first + i) && set(poster_[signal + i], poster);
      if (!is_same) return false;
    }
    return true;
  }

  /// Maps a post to the first device: its first signal there, how many of its iterations are waited for, and how many
  /// of these by waits that name its poster or none. Returns false if its signals are not contiguous there.
  bool map_post(int64_t num, int64_t poster, int64_t& signal, int64_t& num_waited, int64_t& num_named) const {
    const int64_t own = signal;
    signal = num_waited = num_named = 0;
    for (int64_t i = 0; i < num; ++i) {
      if (origin_[own + i] == kUnset) continue;
      if (num_waited > 0 && signal != origin_[own + i] - i) return false;
      signal = origin_[own + i] - i;
      ++num_waited;
      num_named += poster_[own + i] < 0 || poster_[own + i] == poster;
    }
    return true;
  }

 private:
  static constexpr int64_t kUnset = -2;  // -1: a wait that names no poster

  static bool set(int64_t& entry, int64_t value) {
    if (entry == kUnset) entry = value;
    return entry == value;
  }

  std::vector<int64_t> image_;
  std::vector<int64_t> origin_;
  std::vector<int64_t> poster_;
};

/// Describes devices of one class that are not in lockstep.
struct Difference : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Classes with one cursor each; throws `Difference` if their devices are not in lockstep.
class Classes {
 public:
  explicit Classes(const Program& program)
      : program_(program), members_(program.num_classes()), received_(program.num_devices()) {
    for (int64_t d = 0; d < program.num_devices(); ++d) members_[program.device(d).class_id].push_back(d);
    for (int64_t c = 0; c < program.num_classes(); ++c) number_positions(c);
  }

  CursorSet cursors() {
    CursorSet cursors;
    for (const auto& members : members_) make_room(program_, members.front(), cursors);
    for (int64_t d = 0; d < program_.num_devices(); ++d) add_device(d, cursors);
    for (const auto& members : members_) {
      if (members.size() > 1) check_lockstep(members);
    }
    return cursors;
  }

 private:
  /// An instruction of a class.
  struct Position {
    int64_t label;
    int64_t num_iterations = 0;  // maximum
    std::vector<Notify> kinds = {};  // posts that differ in more than names
  };

  /// A post that a device gets from a peer.
  struct Received {
    int32_t position;
    int32_t kind;
    int64_t poster;
    int64_t signal;
  };

  /// A wait of a device for a peer.
  struct PeerWait {
    int64_t position;
    int64_t poster;
    int64_t signal;
    const Wait* wait;
  };

  /// A received post without its device's names.
  using Nameless = std::array<int64_t, 5>;

  void number_positions(int64_t class_id) {
    const DeviceClass& of = program_.class_at(class_id);
    auto& first_positions = first_positions_.emplace_back();
    for (const Template& plan : of.templates) {
      first_positions.push_back(std::ssize(positions_));
      for (const Instr& instr : plan.instrs) positions_.push_back({instr.label});
    }
    for (const CallList& list : of.lists) {
      for (int64_t n = 0; n < std::ssize(list.calls); ++n) {
        const Call& call = list.calls[n];
        const Values values{program_.symbols_max().data(), nullptr, call.numbers.data(), n};
        Position* position = &positions_[first_positions[call.template_id]];
        for (const Instr& instr : of.templates[call.template_id].instrs) {
          const int64_t iterations = num_iterations(instr.extent.at(values), instr.step_at(values));
          position->num_iterations = std::max(position->num_iterations, iterations);
          ++position;
        }
      }
    }
  }

  int64_t num_signals_of(int64_t position, bool per_index) const {
    return per_index ? positions_[position].num_iterations : std::min<int64_t>(positions_[position].num_iterations, 1);
  }

  void add_device(int64_t number, CursorSet& cursors) {
    const DeviceEntry& device = program_.device(number);
    const std::vector<Template>& templates = program_.class_of(number).templates;
    for (size_t t = 0; t < templates.size(); ++t) {
      for (size_t i = 0; i < templates[t].instrs.size(); ++i) {
        const int64_t position = first_positions_[device.class_id][t] + static_cast<int64_t>(i);
        for (const Notify& n : templates[t].instrs[i].notifies) {
          const int64_t target = member_of(device, n.group, n.member);
          if (target == number) continue;
          const BoundSignal signal{n.signal_base.on(device.numbers), n.per_index};
          const std::vector<int64_t>& alike = members_[program_.device(target).class_id];
          if (alike.size() > 1) {
            check_signal(signal.base, position);
            received_[target].push_back(
                {static_cast<int32_t>(position), kind_of(position, n), number, signal.base.constant});
          }
          if (alike.front() != target) continue;
          cursors.posts[device.class_id][t][i].push_back(
              {program_.device(target).class_id, number, signal, n.slot, n.use});
        }
      }
    }
  }

  void check_signal(const Number& signal, int64_t position) const {
    if (signal.is_constant()) return;
    throw Difference{"signals of a class of several devices must not change from call to call; got one that does in '" +
                     program_.labels()[positions_[position].label] + "'; give each device a class of its own"};
  }

  int32_t kind_of(int64_t position, const Notify& post) {
    std::vector<Notify>& kinds = positions_[position].kinds;
    const auto same = std::find_if(kinds.begin(), kinds.end(), [&](const Notify& kind) {
      return kind.per_index == post.per_index && kind.slot == post.slot && kind.use == post.use;
    });
    const auto kind = static_cast<int32_t>(same - kinds.begin());
    if (same == kinds.end()) kinds.push_back(post);
    return kind;
  }

  /// Compares every device's waits and posts with those of the first, mapped to its names.
  void check_lockstep(const std::vector<int64_t>& members) const {
    check_first_iterations(members);
    SignalMap names(program_.needs(members.front()).num_signals);
    const std::vector<PeerWait> expected = waits_of(members.front());
    std::vector<Nameless> posts;
    for (int64_t d : members) {
      names.forget();
      check_waits(waits_of(d), expected, d, names);
      std::vector<Nameless> own = posts_of(d, names);
      if (d == members.front()) posts = own;
      const auto [other, mine] = std::mismatch(posts.begin(), posts.end(), own.begin(), own.end());
      if (mine != own.end() || other != posts.end()) {
        invalid(d, "other posts from", mine != own.end() ? mine->front() : other->front());
      }
    }
  }

  /// Devices that begin a loop at different iterations post and wait in different orders.
  void check_first_iterations(const std::vector<int64_t>& members) const {
    const DeviceEntry& first = program_.device(members.front());
    const std::vector<Template>& templates = program_.class_of(members.front()).templates;
    for (size_t t = 0; t < templates.size(); ++t) {
      for (size_t i = 0; i < templates[t].instrs.size(); ++i) {
        const Instr& instr = templates[t].instrs[i];
        if (instr.first.is_constant() || (instr.waits.empty() && instr.notifies.empty())) continue;
        for (const int64_t d : members) {
          if (instr.first.on(program_.device(d).numbers) == instr.first.on(first.numbers)) continue;
          invalid(d, "another first iteration in", first_positions_[first.class_id][t] + static_cast<int64_t>(i));
        }
      }
    }
  }

  /// Waits in the order of instructions; within one instruction, in the order of the posters' classes.
  std::vector<PeerWait> waits_of(int64_t number) const {
    const DeviceEntry& device = program_.device(number);
    const std::vector<Template>& templates = program_.class_of(number).templates;
    std::vector<PeerWait> waits;
    for (size_t t = 0; t < templates.size(); ++t) {
      int64_t position = first_positions_[device.class_id][t];
      for (const Instr& instr : templates[t].instrs) {
        const int64_t begin = std::ssize(waits);
        for (const Wait& wait : instr.waits) {
          const int64_t poster = wait.group < 0 ? -1 : member_of(device, wait.group, wait.member);
          const Number signal = wait.signal_base.on(device.numbers);
          if (poster == number) continue;
          check_signal(signal, position);
          waits.push_back({position, poster, signal.constant, &wait});
        }
        std::stable_sort(waits.begin() + begin, waits.end(),
                         [&](const PeerWait& a, const PeerWait& b) { return class_of(a.poster) < class_of(b.poster); });
        ++position;
      }
    }
    return waits;
  }

  int64_t class_of(int64_t poster) const { return poster < 0 ? -1 : program_.device(poster).class_id; }

  void check_waits(const std::vector<PeerWait>& waits, const std::vector<PeerWait>& expected, int64_t device,
                   SignalMap& names) const {
    for (size_t w = 0; w < std::max(waits.size(), expected.size()); ++w) {
      if (w == waits.size() || w == expected.size()) {
        invalid(device, "other waits in", w == waits.size() ? expected[w].position : waits[w].position);
      }
      const PeerWait &mine = waits[w], &other = expected[w];
      const bool is_alike = mine.position == other.position && class_of(mine.poster) == class_of(other.poster) &&
                            mine.wait->per_index == other.wait->per_index &&
                            mine.wait->increment == other.wait->increment && mine.wait->slot == other.wait->slot &&
                            mine.wait->use == other.wait->use;
      if (!is_alike) invalid(device, "other waits in", mine.position);
      const int64_t num = num_signals_of(mine.position, mine.wait->per_index);
      if (!names.add_wait(other.signal, mine.signal, num, mine.poster))
        invalid(device, "other signals in", mine.position);
    }
  }

  /// Received posts, sorted.
  std::vector<Nameless> posts_of(int64_t device, const SignalMap& names) const {
    std::vector<Nameless> posts;
    for (const Received& post : received_[device]) {
      const int64_t num = num_signals_of(post.position, positions_[post.position].kinds[post.kind].per_index);
      int64_t signal = post.signal, num_waited = 0, num_named = 0;
      if (!names.map_post(num, post.poster, signal, num_waited, num_named)) {
        invalid(device, "other signals posted from", post.position);
      }
      posts.push_back({post.position, post.kind, signal, num_waited, num_named});
    }
    std::sort(posts.begin(), posts.end());
    return posts;
  }

  [[noreturn]] void invalid(int64_t device, const char* what, int64_t position) const {
    throw Difference{"devices of one class must wait for each other in lockstep; got device " + std::to_string(device) +
                     " with " + what + " '" + program_.labels()[positions_[position].label] + "' than device " +
                     std::to_string(members_[program_.device(device).class_id].front()) +
                     " of its class; correct its device groups, or make it another class"};
  }

  const Program& program_;
  std::vector<std::vector<int64_t>> members_;  // devices of each class
  std::vector<std::vector<int64_t>> first_positions_;  // per class and template
  std::vector<Position> positions_;
  std::vector<std::vector<Received>> received_;  // per device, if its class has several
};

/// What a post is about, and its source.
struct Mark {
  int64_t tensor;
  int64_t use;
  int64_t poster;
  int64_t label;
  int64_t index;
};

/// A signal in the simulation. Marks are dropped once all of them have been waited for.
struct Counter {
  std::vector<Mark> marks;
  uint64_t num_dropped = 0;
  uint64_t expected = 0;

  uint64_t value() const { return num_dropped + marks.size(); }
  const Mark& at(uint64_t post) const { return marks[post - num_dropped]; }
  void drop() {
    if (expected != value()) return;
    num_dropped = expected;
    marks.clear();
  }
};

/// A device's position in its submission order.
struct Cursor {
  int64_t device = 0;
  const Bound* templates = nullptr;
  const std::vector<Call>* calls = nullptr;
  size_t call = 0;
  size_t instr = 0;
  int64_t index = 0;  // number of steps of the instruction
  int64_t iteration = 0;  // of this step, set by current()
  bool armed = false;  // expected values are already raised for this iteration
  std::vector<Counter> signals;
  std::vector<uint64_t> thresholds;  // of this iteration's waits

  const Call& now() const { return (*calls)[call]; }
};

class Simulation {
 public:
  Simulation(const Program& program, const CursorSet& cursors, int64_t list)
      : program_(program), program_cursors_(cursors) {
    for (int64_t device : cursors.devices) {
      Cursor& at = cursors_.emplace_back();
      at.device = device;
      at.templates = &program.bound(device);
      at.calls = &program.list_of(device, list).calls;
      at.signals.resize(program.needs(device).num_signals);
    }
  }

  void run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int64_t c = 0; c < std::ssize(cursors_); ++c) {
        while (step(c)) moved = true;
      }
    }
    for (Cursor& at : cursors_) report_if_stuck(at);
    for (const Cursor& at : cursors_) report_leftover(at);
  }

 private:
  const BoundInstr* current(Cursor& at) const {
    while (at.call < at.calls->size()) {
      const BoundTemplate& plan = (*at.templates)[at.now().template_id];
      const Values values = values_of(at);
      for (; at.instr < plan.instrs.size(); ++at.instr, at.index = 0) {
        const BoundInstr& instr = plan.instrs[at.instr];
        if (instr.source->waits.empty() && instr.source->notifies.empty()) continue;
        const int64_t count = num_iterations(instr.source->extent.at(values), instr.source->step_at(values));
        if (at.index >= count) continue;
        at.iteration = iteration_at(at.index, instr.first, count);
        return &instr;
      }
      at.instr = 0;
      ++at.call;
    }
    return nullptr;
  }

  Values values_of(const Cursor& at) const {
    return {program_.symbols_max().data(), nullptr, at.now().numbers.data(), static_cast<int64_t>(at.call)};
  }

  bool step(int64_t cursor) {
    Cursor& at = cursors_[cursor];
    const BoundInstr* instr = current(at);
    if (instr == nullptr) return false;
    const Values values = values_of(at);
    if (!at.armed) {
      at.thresholds.clear();
      for (const BoundWait& wait : instr->waits) {
        uint64_t& expected = at.signals[wait.signal.at(values, at.iteration)].expected;
        expected += wait.increment.at(values);
        at.thresholds.push_back(expected);
      }
      at.armed = true;
    }
    if (unmet(at, *instr) >= 0) return false;
    for (size_t w = 0; w < instr->waits.size(); ++w) pair(at, *instr, w);
    for (const BoundWait& wait : instr->waits) at.signals[wait.signal.at(values, at.iteration)].drop();
    for (const Post& post : program_cursors_.posts[cursor][at.now().template_id][at.instr]) {
      cursors_[post.cursor].signals[post.signal.at(values, at.iteration)].marks.push_back(
          {tensor(at, post.slot), post.use.at(values), post.poster, instr->label, at.iteration});
    }
    at.armed = false;
    ++at.index;
    return true;
  }

  static int64_t tensor(const Cursor& at, int64_t slot) { return slot < 0 ? -1 : at.now().binding[slot]; }

  int64_t unmet(const Cursor& at, const BoundInstr& instr) const {
    const Values values = values_of(at);
    for (size_t w = 0; w < instr.waits.size(); ++w) {
      const Counter& signal = at.signals[instr.waits[w].signal.at(values, at.iteration)];
      if (signal.value() < at.thresholds[w]) return static_cast<int64_t>(w);
    }
    return -1;
  }

  /// Checks that the posts which a wait newly requires are about its tensor and use. A wait with increment 0 requires
  /// no new posts.
  void pair(const Cursor& at, const BoundInstr& instr, size_t which) const {
    const BoundWait& wait = instr.waits[which];
    const Values values = values_of(at);
    const int64_t number = wait.signal.at(values, at.iteration);
    const auto increment = static_cast<uint64_t>(wait.increment.at(values));
    for (uint64_t post = at.thresholds[which] - increment; post < at.thresholds[which]; ++post) {
      const Mark& mark = at.signals[number].at(post);
      const int64_t about = tensor(at, wait.slot);
      const int64_t use = wait.use.at(values);
      const bool is_poster = wait.poster < 0 || wait.poster == mark.poster;
      if (mark.tensor == about && mark.use == use && is_poster) continue;
      const auto place = [&](int64_t label, int64_t index) {
        return "'" + program_.labels()[label] + "'[" + std::to_string(index) + "]";
      };
      check<ArgumentError>(false, "[programs.Program.finish] a wait and its post must be about one use of one tensor, ",
                           "by the device that the wait names; got device ", at.device, " waiting in ",
                           place(instr.label, at.iteration), " for signal ", number, " about tensor ", about, ", use ",
                           use, poster_named(wait.poster), " and post ", post + 1, " in ",
                           place(mark.label, mark.index), " of device ", mark.poster, " about tensor ", mark.tensor,
                           ", use ", mark.use, "; correct the plan");
    }
  }

  static std::string poster_named(int64_t device) {
    return device < 0 ? "" : " of device " + std::to_string(device) + ",";
  }

  /// Rejects posts without a wait: they would count as posts of the next run.
  void report_leftover(const Cursor& at) const {
    for (int64_t signal = 0; signal < std::ssize(at.signals); ++signal) {
      const Counter& counter = at.signals[signal];
      if (counter.value() == counter.expected) continue;
      const Mark& mark = counter.at(counter.expected);
      check<ArgumentError>(false, "[programs.Program.finish] every post must be waited for; got ", counter.value(),
                           " of signal ", signal, " of device ", at.device, ", of which it waits for ",
                           counter.expected, ", the next in '", program_.labels()[mark.label], "'[", mark.index,
                           "] of device ", mark.poster, "; add the wait or drop the post");
    }
  }

  void report_if_stuck(Cursor& at) const {
    const BoundInstr* instr = current(at);
    if (instr == nullptr) return;
    const Values values = values_of(at);
    const int64_t w = unmet(at, *instr);
    const int64_t signal = instr->waits[w].signal.at(values, at.iteration);
    check<ArgumentError>(false, "[programs.Program.finish] the devices' orders must not block each other; got device ",
                         at.device, " waiting for ever in '", program_.labels()[instr->label], "'[", at.iteration,
                         "] for signal ", signal, " to reach ", at.thresholds[w], " (it stays at ",
                         at.signals[signal].value(), "); submit the posting task earlier or add it");
  }

  const Program& program_;
  const CursorSet& program_cursors_;
  std::vector<Cursor> cursors_;
};

void simulate(const Program& program, const CursorSet& cursors) {
  for (int64_t list = 0; list < program.num_lists(); ++list) Simulation(program, cursors, list).run();
}

}  // namespace

void check_signals_by_device(const Program& program) { simulate(program, cursors_of_devices(program)); }

void check_signals_by_class(const Program& program) {
  try {
    simulate(program, Classes(program).cursors());
  } catch (const Difference& difference) {
    check<ArgumentError>(false, "[programs.Program.finish] ", difference.what());
  }
}

void check_signals(const Program& program) {
  if (program.num_devices() <= kMostCursors) return check_signals_by_device(program);
  std::optional<CursorSet> cursors;
  try {
    cursors = Classes(program).cursors();
  } catch (const Difference&) {
    return check_signals_by_device(program);
  }
  simulate(program, *cursors);
}

}  // namespace tilewise::programs
