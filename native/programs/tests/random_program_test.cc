// Random programs compared with the sequential oracle: every task hashes what it reads, so one wrong order changes
// bytes. Devices, workers, windows, tile sizes, modes, aliases and delays are generated from a printed seed.
#include <array>
#include <random>

#include "programs/tests/testing_remote.h"

using namespace tilewise;
using namespace tilewise::programs;
using namespace tilewise::programs::testing;

namespace {

constexpr int64_t kRows = 12;
constexpr int64_t kCols = 3;
// Tensors 0 to 3 have their own bytes; 4 to 6 share some; 7 is read by peers; 8 is written by a peer; 9 orders its
// writes.
constexpr int64_t kPlain = 4;
constexpr int64_t kShared = 3;
constexpr int64_t kShown = kPlain + kShared;
constexpr int64_t kPut = kShown + 1;
constexpr int64_t kOrder = kShown + 2;
// Slots of a call: four plain tensors, one shared, the last three tensors.
constexpr int64_t kSharedSlot = 4;
constexpr int64_t kShownSlot = 5;
constexpr int64_t kPutSlot = 6;
constexpr int64_t kOrderSlot = 7;

/// One class per device, with numbers and peers as constants; or one class whose devices bind theirs.
enum class Form { kDevices, kOneClass };

class Generator {
 public:
  /// num_workers: of the executor; half of the programs then have hints for their tasks. 0: no hints.
  explicit Generator(uint64_t seed, Form form = Form::kDevices, bool is_faulty = false, int64_t num_workers = 0)
      : random_(seed), of_hints_(~seed), form_(form), is_faulty_(is_faulty), num_workers_(num_workers) {
    has_hints_ = num_workers > 0 && of_hints_() % 2 == 0;
  }

  int64_t draw(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }

  /// From numbers of their own, so that the rest of a program is the same without hints.
  TaskHints some_hints() {
    if (!has_hints_) return {};
    TaskHints hints{.is_preference = of_hints_() % 2 == 0};
    for (uint64_t count = of_hints_() % 4; count > 0; --count) {
      hints.workers.push_back(static_cast<int64_t>(of_hints_() % static_cast<uint64_t>(num_workers_)));
    }
    if (of_hints_() % 3 == 0) hints.priority = static_cast<int64_t>(of_hints_() % 5) - 2;
    return hints;
  }

  std::shared_ptr<Program> make(int64_t num_devices) {
    auto program = std::make_shared<Program>();
    if (form_ == Form::kDevices) add_devices(*program, num_devices);
    if (form_ == Form::kOneClass) {
      std::vector<int64_t> all(num_devices);
      std::iota(all.begin(), all.end(), 0);
      program->add_class();
      for (int64_t d = 0; d < num_devices; ++d) {
        program->add_device({0, {d, (d + 1) % num_devices, (d + num_devices - 1) % num_devices}, {all}});
      }
    }
    num_devices_ = num_devices;
    add_tensors(*program);
    const int64_t num_templates = draw(1, 3);
    for (int64_t t = 0; t < num_templates; ++t) add_template(*program);
    std::vector<int64_t> order(draw(3, 8));
    for (int64_t& t : order) t = draw(0, num_templates - 1);
    for (int64_t t : order) {
      std::vector<int64_t> binding;
      for (int64_t slot = 0; slot < kPlain; ++slot) binding.push_back(draw(0, kPlain - 1));
      binding.push_back(draw(kPlain, kShown - 1));
      for (const int64_t tensor : {kShown, kPut, kOrder}) binding.push_back(tensor);
      const int64_t number = draw(0, 1000);
      const TaskHints hints = some_hints();
      for (int64_t c = 0; c < program->num_classes(); ++c) program->add_call(c, {t, binding, {number}, hints});
    }
    program->finish({}, resolve);
    return program;
  }

 private:
  void add_tensors(Program& program) {
    constexpr int64_t kBytes = kRows * kCols * 8;
    std::vector<int64_t> tiles, columns;
    for (int64_t t = 0; t <= kOrder; ++t) {
      tiles.push_back(draw(0, 4));
      columns.push_back(draw(0, kCols));
    }
    for (int64_t c = 0; c < program.num_classes(); ++c) {
      int64_t handle = 0;
      for (int64_t t = 0; t <= kOrder; ++t) {
        Tensor made = tensor(t * kBytes, kRows, kCols, 1 + (tiles[t] + c) % 5, handle);
        if (t == kPlain + 1) {
          made.offset -= kBytes / 2;
          made.aliases = {kPlain, kPlain + 2};
        }
        if (t == kPlain + 2) {
          made.offset -= 2 * kBytes - kCols * 8;
          made.aliases = {kPlain};
        }
        made.tile_cols = columns[t];
        handle += num_iterations(kRows, made.tile_rows.constant) * made.tiles_across();
        program.add_tensor(c, made);
      }
    }
  }

  void add_template(Program& program) {
    const int64_t num_instrs = draw(2, 6);
    const bool exchanges = num_devices_ > 1 && draw(0, 3) > 0;
    const int64_t place = draw(0, num_instrs - 1);
    const int64_t step = draw(1, 6);
    const bool puts = num_devices_ > 1 && draw(0, 1) == 0;
    const bool is_copy = draw(0, 1) == 0;
    const std::array<int64_t, 2> first = {draw(-3, 8), draw(0, 3)};
    std::vector<Instr> common;
    for (int64_t n = 0; n < num_instrs; ++n) {
      if (draw(0, 2) == 0) {
        add_shared_use(common);
      } else {
        common.push_back(local_instr());
      }
    }
    for (int64_t c = 0; c < program.num_classes(); ++c) {
      const int64_t plan = program.add_template(c, "t");
      for (int64_t n = 0; n < static_cast<int64_t>(common.size()); ++n) {
        if (exchanges && n == place) add_exchange(program, c, plan, step, first);
        if (puts && n == place) add_put(program, c, plan, step, first, is_copy);
        program.add_instr(c, plan, common[n], "local");
      }
    }
  }

  // Shared memory is written as a whole, then read, before another tensor uses its bytes.
  void add_shared_use(std::vector<Instr>& into) {
    const int64_t seed = draw(0, 1000);
    into.push_back(instr("hash", kRows, draw(0, 5), {by_row(kSharedSlot, kOut), by_row(0, kIn)}, {1, seed, 1000}));
    for (int64_t reads = draw(1, 2); reads > 0; --reads) {
      into.push_back(
          instr("hash", kRows, draw(0, 5), {by_row(reads, kInOut), by_row(kSharedSlot, kIn)}, {1, seed, 4000}));
    }
  }

  Instr local_instr() {
    const int64_t num_outputs = draw(1, 2);
    const int64_t step = draw(0, 5);
    Instr made = instr("hash", kRows, step, {}, {num_outputs, draw(0, 1000), draw(0, 1) * 3000});
    for (int64_t o = 0; o < num_outputs + draw(0, 3); ++o) {
      const bool output = o < num_outputs;
      Operand operand = by_row(draw(0, kPlain - 1), output ? draw(2, 3) : static_cast<int64_t>(kIn));
      const int64_t kind = draw(0, 7);
      if (kind == 0) operand.mode = Mode::kWhole;
      if (kind == 1) operand.div = draw(1, 3);
      if (kind == 2) operand = {operand.slot, Mode::kRowPart, operand.access, -1, 0, 1, draw(0, 1), 2};
      if (kind == 2 && draw(0, 1) == 0) operand.offset = draw(0, kRows);
      if (kind > 5) operand = {operand.slot, Mode::kRowCols, operand.access, -1, 0, 1, draw(0, kCols - 1), draw(1, 2)};
      made.operands.push_back(operand);
    }
    if (draw(0, 2) == 0) made.operands.push_back({draw(0, kPlain - 1), Mode::kRows, kIn, -1, 0, 1, draw(0, kRows), 2});
    if (draw(0, 2) == 0) made.ints[1] = {made.ints[1].constant, 1, Source::kCall, 0};
    made.priority = draw(-1, 1);
    if (draw(0, 2) == 0) made.first = draw(-2, 9);
    if (is_faulty_) ++made.ints[1].constant;
    return made;
  }

  // Signals from each peer p: p * 2 * kRows + (0..): p's tile is ready; + kRows: p has read this
  // device's tile.
  void add_exchange(Program& program, int64_t class_id, int64_t plan, int64_t step,
                    const std::array<int64_t, 2>& first) {
    const bool is_written_out = form_ == Form::kDevices;
    const auto of_device = [&](int64_t constant, int64_t multiple) { return number_of(class_id, constant, multiple); };
    Instr show = instr("hash", kRows, step, {by_row(kShownSlot, kInOut), by_row(0, kIn)}, {1, of_device(0, 1), 1000});
    Instr look = instr("hash", kRows, step, {by_row(1, kInOut)}, {1, of_device(7, 1), 1000});
    Instr acknowledged = instr("", kRows, step, {by_row(kShownSlot, kIn)});
    for (int64_t p = 0; p < num_devices_; ++p) {
      if (is_written_out && p == class_id) {
        look.operands.push_back(by_row(kShownSlot, kIn));
        continue;
      }
      show.notifies.push_back({0, p, of_device(0, 2 * kRows), true, kShownSlot});
      look.waits.push_back({p * 2 * kRows, true, 1, 0, p, kShownSlot});
      look.operands.push_back({kShownSlot, Mode::kRow, kIn, 0, p});
      look.notifies.push_back({0, p, of_device(kRows, 2 * kRows), true, kShownSlot});
      acknowledged.waits.push_back({p * 2 * kRows + kRows, true, 1, 0, p, kShownSlot});
    }
    look.priority = 1;
    show.first = look.first = of_device(first[0], first[1]);
    program.add_instr(class_id, plan, show, "show");
    program.add_instr(class_id, plan, look, "look");
    program.add_instr(class_id, plan, acknowledged, "acknowledged");
  }

  // Each device writes a tile of the next one, which reads it and acknowledges. Signals follow those of the exchange.
  void add_put(Program& program, int64_t class_id, int64_t plan, int64_t step, const std::array<int64_t, 2>& first,
               bool is_copy) {
    const Number next = neighbour(class_id, 1);
    const Number before = neighbour(class_id, 2);
    const int64_t arrived = num_devices_ * 2 * kRows;
    const int64_t taken = arrived + kRows;
    Operand peers{kPutSlot, Mode::kRow, kNoAccess, 0, next};
    peers.role = is_copy ? kOut : kInOut;
    Instr put = instr(is_copy ? "copy_pairs" : "hash", kRows, step, {peers, by_row(kOrderSlot, kIn)}, {}, {},
                      {{0, next, arrived, true, kPutSlot}});
    if (!is_copy) put.ints = {1, number_of(class_id, 3, 1), 1000};
    put.first = number_of(class_id, first[0], first[1]);
    Instr look =
        instr("hash", kRows, step, {by_row(2, kInOut), by_row(kPutSlot, kIn)}, {1, number_of(class_id, 9, 1), 1000},
              {{arrived, true, 1, 0, before, kPutSlot}}, {{0, before, taken, true, kPutSlot}});
    look.first = number_of(class_id, first[1], first[0]);
    Instr order = instr("hash", kRows, step, {by_row(kOrderSlot, kInOut), by_row(1, kIn)},
                        {1, number_of(class_id, 5, 1), 1000}, {{taken, true, 1, 0, next, kPutSlot}});
    program.add_instr(class_id, plan, put, "put");
    program.add_instr(class_id, plan, look, "look at put");
    program.add_instr(class_id, plan, order, "taken");
  }

  /// constant + multiple * device. Of a class with one device, class_id is the device.
  Number number_of(int64_t class_id, int64_t constant, int64_t multiple) const {
    if (form_ == Form::kDevices) return constant + multiple * class_id;
    return {constant, multiple, Source::kDevice, 0};
  }

  /// The next device (1), or the one before (2).
  Number neighbour(int64_t class_id, int64_t which) const {
    if (form_ == Form::kOneClass) return {0, 1, Source::kDevice, static_cast<int32_t>(which)};
    return (class_id + (which == 1 ? 1 : num_devices_ - 1)) % num_devices_;
  }

  std::mt19937_64 random_;
  std::mt19937_64 of_hints_;
  Form form_;
  int64_t num_devices_ = 0;
  bool is_faulty_;
  int64_t num_workers_;
  bool has_hints_ = false;
};

/// Whether a program in this form gives the same memory as the oracle's run of the kDevices form. is_faulty: the
/// program that runs differs in the last number that a task hashes.
bool agrees(uint64_t seed, int64_t num_devices, int64_t workers, Form form = Form::kDevices, bool is_faulty = false,
            int64_t num_processes = 1) {
  Generator generator(seed, form, is_faulty, workers);
  auto program = generator.make(num_devices);
  const int64_t window = generator.draw(1, 24);
  std::unique_ptr<Executor> alone;
  std::unique_ptr<ForkedGroup> group;
  if (num_processes == 1) {
    alone = executor_for(*program, workers, window);
  } else {
    group = std::make_unique<ForkedGroup>(program, num_processes, workers, window);
  }
  Executor& executor = group != nullptr ? group->leader() : *alone;
  const auto reference = Generator(seed).make(num_devices);
  Oracle oracle(*reference);
  for (int round = 0; round < 3; ++round) {
    executor.run(program, {});
    oracle.run();
    if (!same_memory(executor, oracle, num_devices)) {
      if (is_faulty) return false;
      std::fprintf(stderr, "seed %llu, window %lld\n", static_cast<unsigned long long>(seed),
                   static_cast<long long>(window));
      return false;
    }
  }
  return true;
}

/// The same with a host per process, or two processes on one host.
bool agrees_on_hosts(uint64_t seed, int64_t num_devices, int64_t num_processes, bool is_faulty = false) {
  Generator generator(seed, Form::kOneClass, is_faulty);
  const std::shared_ptr<const Program> program = generator.make(num_devices);
  const int64_t window = generator.draw(1, 24);
  std::vector<int64_t> hosts;
  for (int64_t p = 0; p < num_processes; ++p) hosts.push_back(seed % 2 == 0 ? p : p / 2);
  if (hosts.back() == 0) hosts.back() = 1;
  RemoteGroup group(program, hosts, 1 + static_cast<int64_t>(seed % 2), window, seed);
  const auto reference = Generator(seed).make(num_devices);
  Oracle oracle(*reference);
  for (int round = 0; round < 3; ++round) {
    group.leader().run(program, {});
    oracle.run();
    if (!same_memory(group, oracle, num_devices)) {
      if (!is_faulty) std::fprintf(stderr, "seed %llu on hosts\n", static_cast<unsigned long long>(seed));
      return false;
    }
  }
  return true;
}

}  // namespace

CASE("one device, one to four workers") {
  for (uint64_t seed = 0; seed < 80; ++seed) EXPECT(agrees(seed, 1, 1 + static_cast<int64_t>(seed % 4)));
}

CASE("two devices") {
  for (uint64_t seed = 1000; seed < 1060; ++seed) EXPECT(agrees(seed, 2, 1 + static_cast<int64_t>(seed % 3)));
}

CASE("the comparison detects a program that hashes another number") {
  for (uint64_t seed = 3000; seed < 3010; ++seed) {
    EXPECT(!agrees(seed, 1 + static_cast<int64_t>(seed % 2), 2, Form::kDevices, true));
    EXPECT(!agrees(seed, 1 + static_cast<int64_t>(seed % 2), 2, Form::kOneClass, true));
    EXPECT(!agrees(seed, 2, 2, Form::kOneClass, true, 2));
  }
}

CASE("three and four devices") {
  for (uint64_t seed = 2000; seed < 2030; ++seed) EXPECT(agrees(seed, 3 + static_cast<int64_t>(seed % 2), 1));
}

CASE("two to four devices in two to four processes") {
  for (uint64_t seed = 5000; seed < 5040; ++seed) {
    const auto devices = 2 + static_cast<int64_t>(seed % 3);
    const int64_t processes = 2 + static_cast<int64_t>(seed / 3) % (devices - 1);
    EXPECT(agrees(seed, devices, 1 + static_cast<int64_t>(seed % 2), Form::kOneClass, false, processes));
  }
}

CASE("two to four devices on two to four hosts") {
  for (uint64_t seed = 6000; seed < 6020; ++seed) {
    const auto devices = 2 + static_cast<int64_t>(seed % 3);
    const int64_t processes = 2 + static_cast<int64_t>(seed / 3) % (devices - 1);
    EXPECT(agrees_on_hosts(seed, devices, processes));
  }
  for (uint64_t seed = 3000; seed < 3004; ++seed) EXPECT(!agrees_on_hosts(seed, 2, 2, true));
}

CASE("devices of one class, bound by numbers and device groups, equal devices with a class each") {
  for (uint64_t seed = 4000; seed < 4050; ++seed) {
    EXPECT(agrees(seed, 1 + static_cast<int64_t>(seed % 4), 1 + static_cast<int64_t>(seed % 2), Form::kOneClass));
  }
}

TILEWISE_TEST_MAIN
