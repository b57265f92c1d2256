// Classes of devices: one cursor per class compared with one per device, the tensors that signals are about, numbers
// that are determined later, tasks as tables.
#include <random>

#include "programs/run/inspect.h"
#include "programs/tests/testing_programs.h"

using namespace tilewise;
using namespace tilewise::programs;
using namespace tilewise::programs::testing;

namespace {

constexpr int64_t kTiles = 2;

/// Random classes that exchange over two device groups, one of all devices and one per class, with or without a
/// mistake.
class Exchanges {
 public:
  explicit Exchanges(uint64_t seed) : random_(seed) {}

  /// A program that is checked except for its signals; the caller checks these.
  std::unique_ptr<Program> make() {
    auto program = std::make_unique<Program>();
    num_classes_ = draw(1, 3);
    num_devices_ = draw(std::max<int64_t>(num_classes_, 2), 16);
    add_devices_of_classes(*program);
    const int64_t num_templates = draw(1, 3);
    int64_t first_signal = 0;
    for (int64_t t = 0; t < num_templates; ++t) add_template(*program, first_signal);
    std::vector<int64_t> calls(draw(1, 6));
    for (int64_t& t : calls) t = draw(0, num_templates - 1);
    const int64_t odd = draw(0, 7) == 0 ? draw(0, num_classes_ - 1) : -1;  // a class with a different order
    for (int64_t c = 0; c < num_classes_; ++c) {
      std::vector<int64_t> own = calls;
      if (c == odd) std::shuffle(own.begin(), own.end(), random_);
      for (size_t n = 0; n < own.size(); ++n) program->add_call(c, {own[n], {draw(0, 0)}, {static_cast<int64_t>(n)}});
    }
    message_of<ArgumentError>([&] { program->finish({}, resolve); });
    return program;
  }

 private:
  int64_t draw(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }

  void add_devices_of_classes(Program& program) {
    std::vector<int64_t> class_of(num_devices_);
    for (int64_t d = 0; d < num_devices_; ++d) class_of[d] = d < num_classes_ ? d : draw(0, num_classes_ - 1);
    std::shuffle(class_of.begin(), class_of.end(), random_);
    std::vector<int64_t> all(num_devices_);
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random_);
    std::vector<std::vector<int64_t>> own(num_classes_);
    for (int64_t c = 0; c < num_classes_; ++c) program.add_tensor(program.add_class(), tensor(0, kTiles, 1, 1, 0));
    for (int64_t d = 0; d < num_devices_; ++d) own[class_of[d]].push_back(d);
    for (int64_t d = 0; d < num_devices_; ++d) {
      const std::vector<int64_t>& mine = own[class_of[d]];
      const int64_t among_all = std::find(all.begin(), all.end(), d) - all.begin();
      const int64_t among_own = std::find(mine.begin(), mine.end(), d) - mine.begin();
      program.add_device({class_of[d], {among_all, among_own}, {all, mine}});
    }
    for (const auto& group : own) sizes_.push_back(std::ssize(group));
  }

  /// Instructions of one class that post and acknowledge, in a random order that mostly works.
  void add_template(Program& program, int64_t& first_signal) {
    struct Site {
      int64_t group, signal;
    };
    std::vector<Site> sites(draw(1, 3));
    for (Site& site : sites) {
      site = {draw(0, 1), first_signal};
      first_signal += num_devices_ * kTiles;
    }
    const bool is_chained = draw(0, 1) == 0;  // the next post is in the task of the previous wait
    const int64_t faulty = draw(0, 2) == 0 ? draw(0, num_classes_ - 1) : -1;
    const uint64_t fault = random_();
    for (int64_t c = 0; c < num_classes_; ++c) {
      std::vector<Instr> instrs{instr("", kTiles, 1, {})};
      for (const Site& site : sites) {
        const int64_t size = site.group == 0 ? num_devices_ : sizes_[c];
        if (!is_chained) instrs.push_back(instr("", kTiles, 1, {}));
        Instr wait = instr("", kTiles, 1, {});
        for (int64_t k = 0; k < size; ++k) {
          const Number base{site.signal, kTiles, Source::kDevice, static_cast<int32_t>(site.group)};
          instrs.back().notifies.push_back({site.group, k, base, true, 0});
          wait.waits.push_back({site.signal + k * kTiles, true, 1, site.group, k, 0});
        }
        instrs.push_back(wait);
      }
      if (c == faulty) spoil(instrs, fault);
      const int64_t plan = program.add_template(c, "t");
      for (const Instr& made : instrs) program.add_instr(c, plan, made, "exchange");
    }
  }

  static void spoil(std::vector<Instr>& instrs, uint64_t fault) {
    Instr& one = instrs[fault / 16 % instrs.size()];
    switch (fault % 11) {
      case 0:
        std::swap(instrs[fault / 16 % instrs.size()], instrs[fault / 64 % instrs.size()]);
        break;
      case 1:
        one.notifies.clear();
        break;
      case 2:
        for (Wait& wait : one.waits) wait.increment = 2;
        break;
      case 3:
        if (!one.notifies.empty()) one.notifies.pop_back();
        break;
      case 4:
        for (Wait& wait : one.waits) wait.use = {1, 1, Source::kPosition};
        break;
      case 5:
        for (Notify& notify : one.notifies) notify.slot = -1;
        break;
      case 6:
        one.notifies.insert(one.notifies.end(), one.notifies.begin(), one.notifies.end());
        break;
      case 7:
        for (Wait& wait : one.waits) wait.increment = 0;
        break;
      case 8:  // this case and the next may change one device of a class other than the first
        if (!one.notifies.empty()) one.notifies[fault / 64 % one.notifies.size()].per_index = false;
        break;
      case 9:
        if (!one.notifies.empty()) ++one.notifies[fault / 64 % one.notifies.size()].signal_base.constant;
        break;
      default:
        if (one.waits.size() > 1) std::swap(one.waits.front().member, one.waits.back().member);
    }
  }

  std::mt19937_64 random_;
  int64_t num_classes_ = 0;
  int64_t num_devices_ = 0;
  std::vector<int64_t> sizes_;  // per class
};

/// The error for a post about `use` of `slot` from device 0 and a wait of device 1 that names `poster`.
std::string pairing(int64_t slot, const Number& use, int64_t poster = 0) {
  Program program;
  add_devices(program, 3);
  for (int64_t d = 0; d < 3; ++d) {
    for (int64_t t = 0; t < 2; ++t) program.add_tensor(d, tensor(64 * t, 1, 1, 1, t));
    const int64_t plan = program.add_template(d, "t");
    if (d == 0) program.add_instr(d, plan, instr("", 1, 0, {}, {}, {}, {{0, 1, 4, false, 0}}), "post");
    if (d == 1) program.add_instr(d, plan, instr("", 1, 0, {}, {}, {{4, false, 1, 0, poster, slot, use}}), "wait");
    for (int64_t n = 0; n < 2; ++n) program.add_call(d, {plan, {0, 1}, {n}});
  }
  return message_of<ArgumentError>([&] { program.finish({}, resolve); });
}

}  // namespace

CASE("one cursor per class finds the same errors as one per device, and rejects classes not in lockstep") {
  int64_t sound = 0;
  int64_t blocked = 0;
  int64_t mixed_up = 0;
  int64_t apart = 0;
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    const auto program = Exchanges(seed).make();
    const std::string by_device = message_of<ArgumentError>([&] { check_signals_by_device(*program); });
    const std::string by_class = message_of<ArgumentError>([&] { check_signals_by_class(*program); });
    if (contains(by_class, "in lockstep")) {
      ++apart;
      continue;
    }
    EXPECT_EQ(by_class.empty(), by_device.empty());
    sound += by_device.empty() ? 1 : 0;
    blocked += contains(by_device, "waiting for ever") ? 1 : 0;
    mixed_up += contains(by_device, "must be about one use") ? 1 : 0;
  }
  EXPECT(sound > 500 && blocked > 100 && mixed_up > 100 && apart > 20);
}

CASE("a post and its wait must agree on tensor, use and poster") {
  EXPECT_EQ(pairing(0, {0, 1, Source::kPosition}), "");
  EXPECT_EQ(pairing(0, {0, 1, Source::kCall, 0}), "");
  const std::string other = pairing(1, {0, 1, Source::kPosition});
  EXPECT(contains(other, "device 1 waiting in 'wait'[0] for signal 4 about tensor 1, use 0 of device 0,"));
  EXPECT(contains(other, "post 1 in 'post'[0] of device 0 about tensor 0, use 0"));
  EXPECT(contains(pairing(0, {1, 1, Source::kCall, 0}), "about tensor 0, use 1 of device 0, and post 1"));
  EXPECT(contains(pairing(0, 0), "use 0 of device 0, and post 2 in 'post'[0] of device 0 about tensor 0, use 1"));
  EXPECT(contains(pairing(0, {0, 1, Source::kPosition}, 2), "of device 2, and post 1 in 'post'[0] of device 0"));
}

CASE("a credit pairs use u with use u - depth; the first uses need none, and the drain waits for the rest") {
  const auto ring = [](int64_t depth, int64_t lag, int64_t drained) {
    Program program;
    add_devices(program, 2);
    for (int64_t d = 0; d < 2; ++d) {
      program.add_tensor(d, tensor(0, 1, 1, 1, 0));
      const int64_t plan = program.add_template(d, "t");
      const Number use{0, 1, Source::kCall, 0};
      const Number signal{0, 1, Source::kCall, 2};  // one per slot of the ring
      const Wait credit{signal, false, {0, 1, Source::kCall, 1}, 0, 1, 0, {-lag, 1, Source::kCall, 0}};
      const Wait filled{signal, false, 1, 0, 0, 0, use};
      if (d == 0)
        program.add_instr(0, plan, instr("", 1, 0, {}, {}, {credit}, {{0, 1, signal, false, 0, use}}), "write");
      if (d == 1)
        program.add_instr(1, plan, instr("", 1, 0, {}, {}, {filled}, {{0, 0, signal, false, 0, use}}), "read");
      for (int64_t u = 0; u < 9; ++u) program.add_call(d, {plan, {0}, {u, u < depth ? 0 : 1, u % depth}});
      if (d == 1) continue;
      const int64_t drain = program.add_template(0, "drain");
      program.add_instr(0, drain, instr("", 1, 0, {}, {}, {{signal, false, 1, 0, 1, 0, use}}), "drain");
      for (int64_t u = 9 - drained; u < 9; ++u) program.add_call(0, {drain, {0}, {u, 1, u % depth}});
    }
    return message_of<ArgumentError>([&] { program.finish({}, resolve); });
  };
  EXPECT_EQ(ring(1, 1, 1), "");
  EXPECT_EQ(ring(3, 3, 3), "");
  EXPECT(contains(ring(3, 2, 3), "device 0 waiting in 'write'[0]"));
  EXPECT(contains(ring(3, 3, 0), "every post must be waited for; got 3 of signal 0 of device 0"));
}

CASE("numbers of device, call and symbol reach kernels; a list of calls runs by its name") {
  // Every call records (constant, number of the device, of the call, of the symbol); rows of a sequence are symbolic.
  auto program = std::make_shared<Program>();
  program->add_class();
  for (int64_t d = 0; d < 2; ++d) program->add_device({0, {10 + d, d}, {{0, 1}}});
  Tensor rows = tensor(0, {0, 2, Source::kSymbol, 0}, 1, 1, 0);
  rows.tile_rows = {0, 1, Source::kSymbol, 0};
  program->add_tensor(0, rows);
  const int64_t plan = program->add_template(0, "t");
  Instr note = instr("note", 0, 1, {by_row(0, kInOut)},
                     {7, {0, 1, Source::kDevice, 0}, {100, 1, Source::kCall, 0}, {0, 2, Source::kSymbol, 0}});
  note.extent = {0, 2, Source::kSymbol, 0};
  note.step = {0, 1, Source::kSymbol, 0};
  note.operands.push_back({0, Mode::kRows, kIn, -1, 0, 1, {0, 1, Source::kDevice, 1}, 1});
  program->add_instr(0, plan, note, "note");
  for (int64_t n = 0; n < 3; ++n) program->add_call(0, {plan, {0}, {n}}, "three");
  program->add_call(0, {plan, {0}, {9}}, "one");
  program->finish({6}, resolve);
  EXPECT_EQ(program->needs(0).num_handles, 2);
  auto executor = executor_for(*program);
  for (const int64_t symbol : {6, 1, 4}) {
    noted.clear();
    executor->run(program, {symbol}, "three");
    EXPECT_EQ(noted.size(), 12u);  // devices x calls x tiles
    for (int64_t d = 0; d < 2; ++d) {
      for (int64_t n = 0; n < 3; ++n) {
        const std::vector<int64_t> expected{7, 10 + d, 100 + n, 2 * symbol};
        EXPECT_EQ(std::count(noted.begin(), noted.end(), expected), 2);
      }
    }
  }
  noted.clear();
  executor->run(program, {0}, "one");  // nothing to do
  EXPECT_EQ(noted.size(), 0u);
  EXPECT(contains(message_of<ArgumentError>([&] { executor->run(program, {1}, "two"); }), "under the name 'two'"));
}

CASE("tasks as tables: views in bytes of their owner, accesses, waits and posts equal the instruction issuer's") {
  Program program;
  program.add_class();
  for (int64_t d = 0; d < 2; ++d) program.add_device({0, {d}, {{0, 1}}});
  program.add_tensor(0, tensor(64, 4, 2, 2, 0));
  program.add_tensor(0, tensor(128, 4, 2, 2, 2));
  const int64_t plan = program.add_template(0, "t");
  Operand peers{0, Mode::kRow, kIn, 0, {1, -1, Source::kDevice, 0}};
  Operand put{1, Mode::kRow, kOut, 0, {1, -1, Source::kDevice, 0}};
  Operand hidden{1, Mode::kRows, kNoAccess, -1, 0, 1, {0, 1, Source::kDevice, 0}, 1, false, kOut};
  program.add_instr(0, plan, instr("", 4, 2, {by_row(0, kOut)}, {}, {}, {{0, {1, -1, Source::kDevice, 0}, 0, true}}),
                    "a");
  program.add_instr(0, plan, instr("", 4, 2, {by_row(1, kInOut), peers, put, hidden}, {}, {{0, true, 1}}), "b");
  program.add_call(0, {plan, {0, 1}});
  program.finish({}, resolve);
  const TaskTables tables = list_tasks(program, 1, 0, {});
  EXPECT(tables.tasks == (Table<5>{{0, 0, 0, 0, 0}, {0, 0, 0, 1, 0}, {0, 0, 1, 0, 1}, {0, 0, 1, 1, 1}}));
  EXPECT(tables.accesses == (Table<3>{{0, 0, 1}, {0, 4, 1}, {1, 1, 1}, {1, 5, 1}, {2, 2, 1}, {3, 3, 1}}));
  EXPECT(tables.views == (Table<8>{{0, 0, 1, 64, 96, 2, 16, kOut},
                                   {1, 0, 1, 96, 128, 2, 16, kOut},
                                   {2, 0, 1, 128, 160, 2, 16, kInOut},
                                   {2, 1, 0, 64, 96, 2, 16, kIn},
                                   {2, 2, 0, 128, 160, 2, 16, kOut},
                                   {2, 3, 1, 144, 160, 1, 16, kOut},
                                   {3, 0, 1, 160, 192, 2, 16, kInOut},
                                   {3, 1, 0, 96, 128, 2, 16, kIn},
                                   {3, 2, 0, 160, 192, 2, 16, kOut},
                                   {3, 3, 1, 144, 160, 1, 16, kOut}}));
  EXPECT(tables.waits == (Table<4>{{2, 0, 1, -1}, {3, 1, 1, -1}}));
  EXPECT(tables.posts == (Table<3>{{0, 0, 0}, {1, 0, 1}}));
}

CASE("a loop is submitted from its first iteration on, with the tiles and signals of each iteration") {
  const auto iterations = [](const Number& first, int64_t device, int64_t rows, const Number& step = 1) {
    Program program;
    program.add_class();
    for (const int64_t number : {2, -1}) program.add_device({0, {number}, {{0, 1}}});
    program.add_tensor(0, tensor(0, 8, 1, 1, 0));
    const int64_t plan = program.add_template(0, "t");
    Instr made = instr("", rows, step, {by_row(0, kIn)}, {}, {{0, true, 0}});
    made.first = first;
    program.add_instr(0, plan, made, "a");
    program.add_call(0, {plan, {0}});
    program.finish({}, resolve);
    const TaskTables tables = list_tasks(program, device, 0, {});
    std::vector<int64_t> order;
    for (size_t t = 0; t < tables.tasks.size(); ++t) {
      order.push_back(tables.tasks[t][3]);
      EXPECT(tables.views[t][3] == order.back() * 8 && tables.waits[t][1] == order.back());
    }
    EXPECT_EQ(program.num_tasks(device, 0, {}), std::ssize(order));
    return order;
  };
  using Order = std::vector<int64_t>;
  const Number of_device(0, 1, Source::kDevice, 0);
  EXPECT(iterations(0, 0, 4) == (Order{0, 1, 2, 3}));
  EXPECT(iterations(3, 0, 4) == (Order{3, 0, 1, 2}));
  EXPECT(iterations(4, 0, 4) == (Order{0, 1, 2, 3}));
  EXPECT(iterations(INT64_MAX, 0, 4) == (Order{3, 0, 1, 2}));
  EXPECT(iterations(INT64_MIN + 1, 0, 4) == (Order{1, 2, 3, 0}));
  EXPECT(iterations(of_device, 0, 5) == (Order{2, 3, 4, 0, 1}));
  EXPECT(iterations(of_device, 1, 5) == (Order{4, 0, 1, 2, 3}));
  EXPECT(iterations(of_device, 0, 0).empty());
  EXPECT(iterations(of_device, 0, 6, 0) == (Order{0}));
}

CASE("the proof follows the order of submission: from some first iterations devices block each other") {
  // Iteration i waits for the other device's iteration i - 1; the first one waits for nothing, because its increment is
  // 0.
  const auto message = [](int64_t first) {
    Program program;
    add_devices(program, 2);
    for (int64_t d = 0; d < 2; ++d) {
      const int64_t plan = program.add_template(d, "t");
      const Number other = 1 - d;
      Instr begin = instr("", 1, 0, {}, {}, {}, {{0, other, 0}});
      Instr loop = instr("", 4, 1, {}, {}, {{0, true, 1, 0, other}}, {{0, other, 1, true}});
      loop.first = first;
      Instr end = instr("", 1, 0, {}, {}, {{4, false, 1, 0, other}});
      program.add_instr(d, plan, begin, "begin");
      program.add_instr(d, plan, loop, "loop");
      program.add_instr(d, plan, end, "end");
      program.add_call(d, {plan, {}});
    }
    return message_of<ArgumentError>([&] { program.finish({}, resolve); });
  };
  EXPECT_EQ(message(0), "");
  EXPECT_EQ(message(4), "");
  EXPECT(contains(message(1), "waiting for ever in 'loop'[1] for signal 1"));
  EXPECT(contains(message(-1), "waiting for ever in 'loop'[3] for signal 3"));
}

CASE("devices of a class that begin a loop of posts at different iterations have a cursor each") {
  const auto program_with = [](const Number& first, bool posts, int64_t num_devices) {
    auto program = std::make_unique<Program>();
    std::vector<int64_t> all(num_devices);
    std::iota(all.begin(), all.end(), 0);
    program->add_class();
    for (int64_t d = 0; d < num_devices; ++d) program->add_device({0, {d, (d + 1) % num_devices}, {all}});
    program->add_tensor(0, tensor(0, 4, 1, 1, 0));
    const int64_t plan = program->add_template(0, "t");
    Instr loop = instr("", 4, 1, {by_row(0, kInOut)});
    Instr end = loop;
    if (posts) loop.notifies = {{0, {0, 1, Source::kDevice, 1}, 0, true}};
    if (posts) end.waits = {{0, true, 1}};
    loop.first = first;
    program->add_instr(0, plan, loop, "loop");
    program->add_instr(0, plan, end, "end");
    program->add_call(0, {plan, {0}});
    return program;
  };
  const Number of_device(0, 1, Source::kDevice, 0);
  const auto by_class = [&](const Number& first, bool posts) {
    auto program = program_with(first, posts, 3);
    program->finish({}, resolve);
    return message_of<ArgumentError>([&] { check_signals_by_class(*program); });
  };
  EXPECT_EQ(by_class(2, true), "");
  EXPECT_EQ(by_class(of_device, false), "");
  EXPECT(contains(by_class(of_device, true), "got device 1 with another first iteration in 'loop' than device 0"));
  EXPECT_EQ(message_of<ArgumentError>([&] { program_with(of_device, true, 40)->finish({}, resolve); }), "");
}

CASE("finish rejects classes, devices and numbers that do not fit each other") {
  const auto refused = [](auto change) {
    Program program;
    program.add_class();
    change(program);
    return message_of<ArgumentError>([&] { program.finish({4}, resolve); });
  };
  const auto with = [&](const Instr& instruction, const Call& call = {0, {0}}) {
    return refused([&](Program& program) {
      program.add_device({0, {1}, {{0}}});
      program.add_tensor(0, tensor(0, 4, 1, 1, 0));
      program.add_instr(0, program.add_template(0, "t"), instruction, "op");
      program.add_call(0, call);
    });
  };
  EXPECT(contains(refused([](Program&) {}), "1 device or more"));
  EXPECT(contains(refused([](Program& p) { p.add_class(), p.add_device({0, {}, {}}); }), "none for class 1 of 2"));
  EXPECT(contains(refused([](Program& p) { p.add_device({0, {}, {{0, 1}}}); }),
                  "a device group must be different devices"));
  EXPECT(contains(refused([](Program& p) { p.add_device({0, {}, {{0, 0}}}); }),
                  "a device group must be different devices"));
  EXPECT(
      contains(refused([](Program& p) { p.add_device({0, {1}, {}}), p.add_device({0, {}, {}}); }), "as many numbers"));
  EXPECT(contains(refused([](Program& p) { p.add_device({0, {}, {{0}}}), p.add_device({0, {}, {{0, 1}}}); }),
                  "same sizes"));
  Instr plain = instr("", 4, 1, {});
  EXPECT_EQ(with(plain), "");
  Instr by_device = plain;
  by_device.extent = {0, 1, Source::kDevice, 0};
  EXPECT(contains(with(by_device), "an extent must have a source that fits it"));
  EXPECT(contains(with(instr("", 4, {0, 0, Source::kSymbol, 0}, {})), "a step that is not constant must be >= 1"));
  EXPECT(contains(with(instr("", 4, 1, {}, {{0, 1, Source::kSymbol, 1}})), "one of the 1 bounded ones; got 1"));
  EXPECT(contains(with(instr("", 4, 1, {}, {{0, 1, Source::kDevice, 1}})), "one of its class's 1; got 1"));
  EXPECT(contains(with(instr("", 4, 1, {}, {{0, 1, Source::kCall, 0}})), "got 0 of 1 for template 't'"));
  EXPECT(contains(with(instr("", 4, 1, {}, {{0, 1, Source::kPosition, 0}})), "an integer must have a source"));
  Instr by_call = plain;
  by_call.first = {0, 1, Source::kCall, 0};
  EXPECT(contains(with(by_call), "a first iteration must have a source that fits it"));
  EXPECT(contains(with(instr("", 4, 1, {}, {{0, 1, static_cast<Source>(7), 0}})), "an integer must have a source"));
  EXPECT_EQ(with(instr("", 4, 1, {{0, Mode::kRow, kOut, 0, 0}})), "");
  EXPECT(contains(with(instr("", 4, 1, {{0, Mode::kRow, kIn, 0, {0, 1, Source::kDevice, 0}}})), "member 1 of 1"));
  EXPECT(contains(with(instr("", 4, 1, {{0, Mode::kRows, kIn, -1, 0, 1, {-1, 1, Source::kCall, 0}}}), {0, {0}, {0}}),
                  "0 <= part < parts; got div 1, part -1"));
  EXPECT(contains(with(instr("", 4, 1, {}, {}, {{{-1, 1, Source::kCall, 0}, true, 1}}), {0, {0}, {0}}), "got -1, 1"));
  EXPECT(
      contains(with(instr("", 4, 1, {}, {}, {{0, true, 1, -1, 0, 1}})), "wait's slot must be bound; got slot 1 of 1"));
}

TILEWISE_TEST_MAIN
