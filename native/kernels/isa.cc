// The table of levels and the lookup by name. Compiled once, without special instructions.
#include "kernels/isa.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <unordered_map>

#include "base/check.h"
#include "kernels/built_levels.h"
#include "kernels/declared/families.h"
#include "kernels/kernel.h"
#include "kernels/loading/weights.h"
#include "kernels/machine_levels.h"
#include "kernels/quantised/blocks.h"
#include "kernels/sampling/softmax.h"

#define TILEWISE_DECLARE_ENTRIES(ns, entries) EntryList entries();
#define TILEWISE_DECLARE_STORE \
  bool store_weights(const StoredBlock& block, const WeightPart& part, int64_t row, int64_t col, bool transposed);
#define TILEWISE_DECLARE_LEVEL(ns)                   \
  namespace tilewise::kernels::ns {                  \
  TILEWISE_EACH_FAMILY(TILEWISE_DECLARE_ENTRIES, ns) \
  TILEWISE_DECLARE_STORE                             \
  QuantisedFns quantised_fns();                      \
  SoftmaxFns softmax_fns();                          \
  }
TILEWISE_EACH_BUILT_LEVEL(TILEWISE_DECLARE_LEVEL)

namespace tilewise::kernels {
namespace {

using Table = std::unordered_map<std::string_view, const Entry*>;

struct Level {
  std::string_view name;
  bool available;
  StoreFn store;
  QuantisedFns quantised;
  SoftmaxFns softmax;
  Table table;
};

#define TILEWISE_ENTRIES(ns, entries) ns::entries(),
#define TILEWISE_LEVEL_TABLE(ns) table_of({TILEWISE_EACH_FAMILY(TILEWISE_ENTRIES, ns)})

Table table_of(std::initializer_list<EntryList> lists) {
  Table table;
  for (const EntryList& list : lists)
    for (int64_t i = 0; i < list.count; ++i) table.emplace(list.entries[i].name, &list.entries[i]);
  return table;
}

bool can_run(std::string_view name) {
  for (const MachineLevel& level : machine_levels())
    if (level.name == name) return level.can_run;
  return false;
}

std::vector<Level> make_levels() {
  std::vector<Level> levels;
#define TILEWISE_ADD_LEVEL(ns) \
  levels.push_back(            \
      {#ns, can_run(#ns), ns::store_weights, ns::quantised_fns(), ns::softmax_fns(), TILEWISE_LEVEL_TABLE(ns)});
  TILEWISE_EACH_BUILT_LEVEL(TILEWISE_ADD_LEVEL)
  return levels;
}

/// Levels of this build, weakest first; every machine can run the first one.
const std::vector<Level>& levels() {
  static const std::vector<Level> built = make_levels();
  return built;
}

std::string joined(const std::vector<std::string_view>& names) {
  std::string text;
  for (const std::string_view name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

const Level& level_named(std::string_view name, const char* source) {
  for (const Level& level : levels())
    if (level.name == name && level.available) return level;
  check<ArgumentError>(!can_run(name), "[kernels.isa] ", source,
                       " must name an instruction-set level that this build has; got '", name,
                       "', which this machine can run; choose one of ", joined(available_levels()),
                       ", or build again with the CMake option TILEWISE_LEVELS=all.");
  check<ArgumentError>(false, "[kernels.isa] ", source, " must name a level that this machine has; got '", name,
                       "'; choose one of ", joined(available_levels()), ".");
  return levels().front();
}

const Level& choose_level() {
  const char* forced = std::getenv("TILEWISE_ISA");
  if (forced != nullptr && *forced != '\0') return level_named(forced, "TILEWISE_ISA");
  const Level* best = &levels().front();
  for (const Level& level : levels())
    if (level.available) best = &level;
  return *best;
}

const Level& level_of_process() {
  static const Level& chosen = choose_level();
  return chosen;
}

const Entry* find_in(const Level& level, std::string_view name) {
  const auto entry = level.table.find(name);
  return entry == level.table.end() ? nullptr : entry->second;
}

}  // namespace

std::vector<std::string_view> available_levels() {
  std::vector<std::string_view> names;
  for (const Level& level : levels())
    if (level.available) names.push_back(level.name);
  return names;
}

std::vector<std::string_view> missing_levels() {
  const std::string_view best = available_levels().back();
  std::vector<std::string_view> names;
  for (const MachineLevel& level : machine_levels()) {
    if (level.can_run) names.push_back(level.name);
    if (level.name == best) names.clear();
  }
  return names;
}

std::string_view level_in_use() { return level_of_process().name; }

void scratch_exhausted() {
  throw ResourceError(
      "[kernels.scratch] a kernel's working memory must fit its worker's scratch; this shape needs more; please report "
      "the plan, whose scratch size is computed from the kernel's declaration");
}

const Entry* find_kernel(std::string_view name) { return find_in(level_of_process(), name); }

const Entry* find_kernel_at(std::string_view level, std::string_view name) {
  return find_in(level_named(level, "isa"), name);
}

StoreFn find_store() { return level_of_process().store; }

QuantisedFns find_quantised() { return level_of_process().quantised; }

QuantisedFns find_quantised_at(std::string_view level) { return level_named(level, "isa").quantised; }

const SoftmaxFns& find_softmax() { return level_of_process().softmax; }

StoreFn find_store_at(std::string_view level) { return level_named(level, "isa").store; }

std::vector<std::string_view> kernel_names() {
  std::vector<std::string_view> names;
  for (const auto& [name, entry] : levels().front().table) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace tilewise::kernels
