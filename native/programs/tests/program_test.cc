// Tile programs: what finish() rejects, the rows that each mode views, symbols, aliases.
#include "programs/program.h"

#include "programs/tests/testing_programs.h"

using namespace tilewise;
using namespace tilewise::programs;
using namespace tilewise::programs::testing;

namespace {

/// One device, one 10 x 4 tensor with tiles of 4 rows, one instruction.
std::shared_ptr<Program> program_with(Instr instruction, std::vector<int64_t> symbols_max = {}) {
  auto program = program_of(1);
  program->add_tensor(0, tensor(0, 10, 4, 4, 0));
  const int64_t plan = program->add_template(0, "t");
  program->add_instr(0, plan, std::move(instruction), "op");
  program->add_call(0, {plan, {0}});
  program->finish(std::move(symbols_max), resolve);
  return program;
}

std::string refusal(Instr instruction) {
  return message_of<ArgumentError>([&] { program_with(std::move(instruction)); });
}

/// Expands task `index` of the only instruction, with its accesses.
void expand_at(const Program& program, const std::vector<int64_t>& symbols, std::byte* arena, int64_t index, Task& task,
               std::vector<tasks::Access>& accesses) {
  const std::vector<std::byte*> arenas{arena};
  const Call& call = program.list_of(0, 0).calls[0];
  const BoundInstr& made = program.bound(0)[0].instrs[0];
  const Values values{symbols.data(), nullptr, call.numbers.data()};
  expand({&program, 0, &symbols, &arenas},
         {call, made, made.ints.data(), index, made.source->extent.at(values), made.source->step_at(values)}, task,
         accesses);
}

/// One operand's views over all iterations, as text "begin+rows x cols".
std::string views(Operand operand, int64_t extent, int64_t step) {
  auto program = program_with(instr("recording", extent, step, {operand}));
  std::vector<std::byte> arena(program->needs(0).arena_bytes + 64);
  std::ostringstream text;
  for (int64_t i = 0; i < num_iterations(extent, step); ++i) {
    Task task;
    std::vector<tasks::Access> accesses;
    expand_at(*program, {}, arena.data(), i, task, accesses);
    const kernels::TileView view = task.views()[0];
    const int64_t element = (static_cast<std::byte*>(view.data) - arena.data()) / 8;
    text << element / 4 << "." << element % 4 << "+" << view.rows << "x" << view.cols << "@" << task.row_begin << " ";
  }
  return text.str();
}

std::string accesses_of(const Program& program, int64_t index) {
  Task task;
  std::vector<tasks::Access> accesses;
  expand_at(program, {}, nullptr, index, task, accesses);
  std::ostringstream text;
  for (const tasks::Access& access : accesses)
    text << access.object << ":" << "rwa"[static_cast<int>(access.use)] << " ";
  return text.str();
}

std::string handles(Operand operand, int64_t extent, int64_t step, int64_t index) {
  return accesses_of(*program_with(instr("recording", extent, step, {operand})), index);
}

}  // namespace

CASE("a loop has its shorter last iteration, however long a step is") {
  EXPECT_EQ(num_iterations(6, 3), 2);
  EXPECT_EQ(num_iterations(7, 3), 3);
  EXPECT_EQ(num_iterations(0, 3), 0);
  EXPECT_EQ(num_iterations(0, 0), 1);
  EXPECT_EQ(num_iterations(5, INT64_MAX), 1);
}

CASE("ROW views the iteration's rows, the last one smaller") {
  EXPECT_EQ(views({0, Mode::kRow}, 10, 4), "0.0+4x4@0 4.0+4x4@4 8.0+2x4@8 ");
}

CASE("ROW with div views rows [b / div, ceil(e / div)), clipped to the tensor") {
  EXPECT_EQ(views({0, Mode::kRow, 0, -1, 0, 2}, 20, 8), "0.0+4x4@0 4.0+4x4@8 8.0+2x4@16 ");
  EXPECT_EQ(views({0, Mode::kRow, 0, -1, 0, 8}, 20, 8), "0.0+1x4@0 1.0+1x4@8 2.0+1x4@16 ");
  EXPECT_EQ(views({0, Mode::kRow}, 16, 8), "0.0+8x4@0 8.0+2x4@8 ");
}

CASE("COL views all rows and the iteration's columns") {
  EXPECT_EQ(views({0, Mode::kCol}, 4, 3), "0.0+10x3@0 0.3+10x1@3 ");
  EXPECT_EQ(views({0, Mode::kCol, 0, -1, 0, 2}, 8, 4), "0.0+10x2@0 0.2+10x2@4 ");
  EXPECT_EQ(views({0, Mode::kCol, 0, -1, 0, 3}, 8, 4), "0.0+10x2@0 0.1+10x2@4 ");
  EXPECT_EQ(views({0, Mode::kRowCols, 0, -1, 0, 1, 1, 2}, 10, 5), "0.1+5x2@0 5.1+5x2@5 ");
  EXPECT_EQ(views({0, Mode::kRowCols, 0, -1, 0, 1, 3, 9}, 10, 5), "0.3+5x1@0 5.3+5x1@5 ");
}

CASE("PANELCOLS views the iteration's columns of all panels, at their address in the first one") {
  Instr read = instr("recording", 40, 32, {{0, Mode::kPanelCols}});
  auto program = std::make_shared<Program>();
  add_devices(*program, 1);
  program->add_tensor(0, tensor(0, 70, 40, 70, 0));  // panels of 32 x 40 words
  const int64_t plan = program->add_template(0, "call");
  program->add_instr(0, plan, read, "it");
  program->add_call(0, {plan, {0}, {}});
  program->finish({}, resolve);
  std::vector<std::byte> arena(program->needs(0).arena_bytes);
  for (const int64_t index : {0, 1}) {
    Task task;
    std::vector<tasks::Access> accesses;
    expand_at(*program, {}, arena.data(), index, task, accesses);
    const kernels::TileView view = task.views()[0];
    EXPECT_EQ((static_cast<std::byte*>(view.data) - arena.data()) / 8, index * 32 * 32);
    EXPECT_EQ(view.rows, 70);
    EXPECT_EQ(view.cols, index == 0 ? 32 : 8);
    EXPECT_EQ(view.stride, 40);
  }
}

CASE("ROWPART views a share of the iteration's rows") {
  EXPECT_EQ(views({0, Mode::kRowPart, 0, -1, 0, 1, 0, 3}, 10, 5), "0.0+1x4@0 5.0+1x4@5 ");
  EXPECT_EQ(views({0, Mode::kRowPart, 0, -1, 0, 1, 2, 3}, 10, 5), "3.0+2x4@0 8.0+2x4@5 ");
}

CASE("ROWPART with an offset skips rows, clipped to the tensor") {
  EXPECT_EQ(views({0, Mode::kRowPart, 0, -1, 0, 1, 0, 1, false, 0, 4}, 6, 3), "4.0+3x4@0 7.0+3x4@3 ");
  EXPECT_EQ(views({0, Mode::kRowPart, 0, -1, 0, 1, 1, 2, false, 0, 2}, 8, 4), "4.0+2x4@0 8.0+2x4@4 ");
  EXPECT_EQ(views({0, Mode::kRowPart, 0, -1, 0, 1, 0, 1, false, 0, 7}, 6, 3), "7.0+3x4@0 10.0+0x4@3 ");
}

CASE("WHOLE views everything; step 0 makes one iteration, an extent of 0 with another step none") {
  EXPECT_EQ(views({0, Mode::kWhole}, 10, 0), "0.0+10x4@0 ");
  EXPECT_EQ(views({0, Mode::kWhole}, 0, 4), "");
  EXPECT_EQ(views({0, Mode::kRow}, 0, 0), "0.0+0x4@0 ");
}

CASE("accesses name the tiles that the row range touches; parts name the whole iteration's tiles") {
  EXPECT_EQ(handles({0, Mode::kRow, kIn}, 10, 5, 0), "0:r 1:r ");
  EXPECT_EQ(handles({0, Mode::kRow, kIn}, 10, 5, 1), "1:r 2:r ");
  EXPECT_EQ(handles({0, Mode::kWhole, kOut}, 10, 5, 1), "0:w 1:w 2:w ");
  EXPECT_EQ(handles({0, Mode::kRowPart, kInOut, -1, 0, 1, 0, 8}, 10, 4, 1), "1:w ");
  EXPECT_EQ(handles({0, Mode::kRowPart, kIn, -1, 0, 1, 0, 8, false, 0, 3}, 8, 4, 0), "0:r 1:r ");
  EXPECT_EQ(handles({0, Mode::kRowPart, kIn, -1, 0, 1, 0, 1, false, 0, 4}, 4, 4, 0), "1:r ");
  EXPECT_EQ(handles({0, Mode::kCol, kIn}, 4, 2, 1), "0:r 1:r 2:r ");
}

CASE("a write adds reuse accesses on aliases whose bytes overlap, listed on either side") {
  Program program;
  add_devices(program, 1);
  Tensor second = tensor(64, 8, 4, 2, 10);  // bytes 64..320: rows 2..9 of the first
  second.aliases = {0};
  program.add_tensor(0, tensor(0, 8, 4, 4, 0));
  program.add_tensor(0, second);
  const int64_t plan = program.add_template(0, "t");
  program.add_instr(0, plan, instr("recording", 8, 4, {by_row(0, kOut)}), "op");
  program.add_call(0, {plan, {0}});
  program.finish({}, resolve);
  EXPECT_EQ(accesses_of(program, 0), "0:w 10:a ");
  EXPECT_EQ(accesses_of(program, 1), "1:w 11:a 12:a ");
}

CASE("tiles of some columns have their own handles, and rows use those of all their columns") {
  const auto accesses = [](Operand operand, int64_t extent, int64_t step, int64_t index) {
    Program program;
    add_devices(program, 1);
    Tensor cut = tensor(0, 10, 7, 4, 20);
    cut.tile_cols = 3;  // 3 tiles down, 3 across, the last of one column
    program.add_tensor(0, cut);
    const int64_t plan = program.add_template(0, "t");
    program.add_instr(0, plan, instr("recording", extent, step, {operand}), "op");
    program.add_call(0, {plan, {0}});
    program.finish({}, resolve);
    EXPECT_EQ(program.needs(0).num_handles, 29);
    return accesses_of(program, index);
  };
  EXPECT_EQ(accesses({0, Mode::kRow, kIn}, 10, 4, 1), "23:r 24:r 25:r ");
  EXPECT_EQ(accesses({0, Mode::kCol, kOut}, 7, 3, 0), "20:w 23:w 26:w ");
  EXPECT_EQ(accesses({0, Mode::kCol, kOut}, 7, 3, 2), "22:w 25:w 28:w ");
  EXPECT_EQ(accesses({0, Mode::kCol, kOut}, 7, 2, 1), "20:w 21:w 23:w 24:w 26:w 27:w ");
  EXPECT_EQ(accesses({0, Mode::kCol, kIn, -1, 0, 2}, 14, 7, 1), "21:r 22:r 24:r 25:r 27:r 28:r ");
  EXPECT_EQ(accesses({0, Mode::kRowCols, kIn, -1, 0, 1, 3, 3}, 10, 4, 2), "27:r ");
}

CASE("a write of some columns waits for all tasks that use its rows' bytes through other tensors") {
  Program program;
  add_devices(program, 1);
  Tensor first = tensor(0, 8, 4, 4, 0), second = tensor(0, 8, 4, 2, 10);
  first.tile_cols = second.tile_cols = 2;
  first.aliases = {1};
  program.add_tensor(0, first);
  program.add_tensor(0, second);
  const int64_t plan = program.add_template(0, "t");
  program.add_instr(0, plan, instr("recording", 8, 4, {{0, Mode::kRowCols, kOut, -1, 0, 1, 2, 2}}), "op");
  program.add_call(0, {plan, {0}});
  program.finish({}, resolve);
  EXPECT_EQ(accesses_of(program, 0), "1:w 10:a 11:a 12:a 13:a ");
  EXPECT_EQ(accesses_of(program, 1), "3:w 14:a 15:a 16:a 17:a ");
}

CASE("a packed weight's padding is reused like its rows") {
  const Tensor weight = tensor(0, 40, 4, 64, 0);  // 64 rows of 16 bytes in memory
  Tensor other = tensor(50 * 16, 4, 4, 4, 10);    // lies in the padding
  other.aliases = {0};
  const auto writes = [&](int64_t slot, int64_t extent, int64_t step) {
    Program program;
    add_devices(program, 1);
    program.add_tensor(0, weight);
    program.add_tensor(0, other);
    const int64_t plan = program.add_template(0, "t");
    program.add_instr(0, plan, instr("recording", extent, step, {by_row(slot, kOut)}), "op");
    program.add_call(0, {plan, {0, 1}});
    program.finish({}, resolve);
    return accesses_of(program, 0);
  };
  EXPECT_EQ(writes(0, 40, 64), "0:w 10:a ");
  EXPECT_EQ(writes(1, 4, 4), "10:w 0:a ");
}

CASE("operands beyond the inline ones go to side storage") {
  std::vector<Operand> many(40, {0, Mode::kRow});
  auto program = program_with(instr("recording", 10, 10, many));
  recorded.clear();
  auto executor = executor_for(*program);
  executor->run(std::move(program), {});
  EXPECT_EQ(recorded.size(), 1u);
  EXPECT_EQ(recorded[0].tiles.size(), 40u);
  for (const auto& view : recorded[0].tiles) EXPECT_EQ(view.rows, 10);
}

CASE("finish rejects instructions without the operands and attributes that their kernel declares") {
  const Operand row = {0, Mode::kRow};
  const auto refused = [&](std::vector<Operand> operands, std::vector<Number> ints, std::vector<double> floats) {
    Instr instruction = instr("two", 4, 4, std::move(operands));
    instruction.ints = std::move(ints);
    instruction.floats = std::move(floats);
    return refusal(std::move(instruction));
  };
  EXPECT_EQ(refused({row, row}, {3}, {}), "");
  EXPECT(contains(refused({row}, {3}, {}), "got 1 operands, 1 integers and 0 floats for 'two'"));
  EXPECT(contains(refused({row, row}, {}, {}), "got 2 operands, 0 integers and 0 floats for 'two'"));
  EXPECT(contains(refused({row, row}, {3}, {0.5}), "got 2 operands, 1 integers and 1 floats for 'two'"));
}

CASE("kernels of users need an address and a new name that means nothing else") {
  const auto refused = [](const std::string& name, tilewise_tile_kernel kernel, const std::string& used = "mine") {
    return message_of<ArgumentError>([&] {
      Program program;
      add_devices(program, 1);
      program.add_kernel("mine", [](const tilewise_kernel_args*) { return 0; });
      program.add_kernel(name, kernel);
      program.add_tensor(0, tensor(0, 4, 4, 4, 0));
      program.add_instr(0, program.add_template(0, "t"), instr(used, 4, 4, {by_row(0, kIn)}, {1, 2, 3}), "op");
      program.add_call(0, {0, {0}, {}});
      program.finish({}, resolve);
    });
  };
  const tilewise_tile_kernel kernel = [](const tilewise_kernel_args*) { return 0; };
  EXPECT_EQ(refused("other", kernel), "");
  EXPECT(contains(refused("other", nullptr), "must have an address"));
  for (const char* name : {"", "copy_pairs_of_mine", "fetch_f32", "store_me"}) {
    EXPECT(contains(refused(name, kernel), "a name that does not begin with"));
  }
  EXPECT(contains(refused("mine", kernel), "a kernel's name must be new"));
  EXPECT(contains(refused("two", kernel), "must not have a name of the kernel table; got 'two'"));
  EXPECT(contains(refused("other", kernel, "yours"), "got 'yours' in 'op'"));
}

CASE("finish rejects unknown kernels, modes, accesses, slots and peers") {
  EXPECT(contains(refusal(instr("nowhere", 4, 4, {})), "'nowhere'"));
  EXPECT(contains(message_of<ArgumentError>([] {
                    Program program;
                    add_devices(program, 1);
                    Tensor cut = tensor(0, 4, 4, 4, 0);
                    cut.tile_cols = -1;
                    program.add_tensor(0, cut);
                    program.finish({}, resolve);
                  }),
                  "tile_cols"));
  EXPECT(contains(refusal(instr("hash", 4, 4, {{0, static_cast<Mode>(7)}})), "mode"));
  EXPECT(contains(refusal(instr("hash", 4, 3, {{0, Mode::kPanelCols}})), "whole panels"));
  EXPECT(contains(refusal(instr("hash", 64, 32, {{0, Mode::kPanelCols, kOut}})), "whole panels"));
  EXPECT(contains(refusal(instr("hash", 64, 32, {{0, Mode::kPanelCols, kIn, -1, 0, 2}})), "whole panels"));
  EXPECT(contains(refusal(instr("hash", 4, 4, {{0, Mode::kRow, 4}})), "access"));
  EXPECT(contains(refusal(instr("hash", 4, 4, {{1, Mode::kRow}})), "slot 1 of 1"));
  EXPECT(contains(refusal(instr("hash", 4, 4, {{0, Mode::kRow, 0, 1}})), "peer"));
  EXPECT(contains(refusal(instr("hash", 4, 4, {{0, Mode::kRow, 0, -1, 0, 0}})), "div"));
  EXPECT(contains(refusal(instr("hash", 4, 4, {{0, Mode::kRowPart, 0, -1, 0, 1, 2, 2}})), "part"));
  EXPECT(contains(refusal(instr("hash", 4, 4, {{0, Mode::kRowPart, 0, -1, 0, 1, 0, 1, false, 0, -1}})), "offset"));
  EXPECT(contains(refusal(instr("hash", 4, 4, {{0, Mode::kRow, 0, -1, 0, 1, 0, 1, false, 0, 1}})), "offset"));
  EXPECT(contains(refusal(instr("", 4, 4, {}, {}, {{-1, false, 1}})), "signal"));
  EXPECT(contains(refusal(instr("", 4, 4, {}, {}, {}, {{0, 3, 0, false}})), "notify"));
}

CASE("finish rejects symbols without a bound, and run values above it") {
  Instr symbolic = instr("increment", 0, 4, {by_row(0, kInOut)});
  symbolic.extent = {0, 2, Source::kSymbol, 0};
  EXPECT(contains(refusal(symbolic), "symbol"));
  std::shared_ptr<Program> program = program_with(symbolic, {5});
  auto executor = executor_for(*program);
  EXPECT(contains(message_of<ArgumentError>([&] { executor->run(program, {6}); }), "[0, 5]"));
  EXPECT(contains(message_of<ArgumentError>([&] { executor->run(program, {}); }), "every symbol"));
  for (int64_t symbol : {0, 3, 5, 1}) executor->run(program, {symbol});
  EXPECT_EQ(words(*executor, 0)[0], 3u);       // row 0: in extents 6, 10, 2
  EXPECT_EQ(words(*executor, 0)[5 * 4], 2u);   // row 5: in 6 and 10
  EXPECT_EQ(words(*executor, 0)[9 * 4], 1u);   // row 9: in 10
  EXPECT_EQ(program->num_tasks(0, 0, {3}), 2);
}

CASE("finish rejects a program whose devices wait for each other, naming device, label, index, signal") {
  Program program;
  add_devices(program, 2);
  for (int64_t d = 0; d < 2; ++d) {
    const int64_t plan = program.add_template(d, "t");
    program.add_instr(d, plan, instr("", 3, 1, {}, {}, {{4, true, 1}}), "wait here");
    program.add_instr(d, plan, instr("", 3, 1, {}, {}, {}, {{0, 1 - d, 4, true}}), "post there");
    program.add_call(d, {plan, {}});
  }
  const std::string message = message_of<ArgumentError>([&] { program.finish({}, resolve); });
  EXPECT(contains(message, "device 0 waiting for ever in 'wait here'[0] for signal 4 to reach 1"));
}

CASE("finish accepts the same program once the post comes first") {
  Program program;
  add_devices(program, 2);
  for (int64_t d = 0; d < 2; ++d) {
    const int64_t plan = program.add_template(d, "t");
    program.add_instr(d, plan, instr("", 3, 1, {}, {}, {}, {{0, 1 - d, 4, true}}), "post there");
    program.add_instr(d, plan, instr("", 3, 1, {}, {}, {{4, true, 1}}), "wait here");
    program.add_call(d, {plan, {}});
  }
  program.finish({}, resolve);
  EXPECT_EQ(program.needs(0).num_signals, 7);
  EXPECT(program.posters(0, 5) == std::vector<int64_t>{1});
  EXPECT(program.posters(0, 3).empty());
}

CASE("a finished program is frozen; an unfinished one cannot run") {
  auto open = program_of(1);
  Executor executor({1, 1, {64}, 0, 0});
  EXPECT(contains(message_of<ArgumentError>([&] { executor.run(open, {}); }), "finish()"));
  open->finish({}, resolve);
  EXPECT(contains(message_of<ArgumentError>([&] { open->add_template(0, "x"); }), "frozen"));
  EXPECT(contains(message_of<ArgumentError>([&] { executor.run(open, {}); }), "under the name ''"));
}

CASE("a program larger than the executor is rejected") {
  std::shared_ptr<Program> program = program_with(instr("increment", 10, 4, {by_row(0, kInOut)}));
  Executor small({1, 1, {100}, 0, 3});
  EXPECT(contains(message_of<ArgumentError>([&] { small.run(program, {}); }), "must fit the executor"));
}

TILEWISE_TEST_MAIN
