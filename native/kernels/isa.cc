// The table of levels and the look-up by name. Compiled once, without special instructions.
#include "kernels/isa.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <string>
#include <unordered_map>

#include "base/check.h"
#include "kernels/kernel.h"
#include "kernels/loading/weights.h"
#include "kernels/sampling/weigh.h"

#define TILEWISE_DECLARE_STORE \
  bool store_weights(const StoredBlock& block, const WeightPart& part, int64_t row, int64_t col, bool transposed);
#define TILEWISE_DECLARE_WEIGH WeighFns weigh_fns();
#define TILEWISE_DECLARE_LEVEL(ns)        \
  namespace tilewise::kernels::ns {       \
  EntryList matmul_entries();             \
  EntryList weight_gradient_entries();    \
  EntryList attention_entries();          \
  EntryList attention_backward_entries(); \
  EntryList rows_entries();               \
  EntryList elementwise_entries();        \
  EntryList reductions_entries();         \
  EntryList update_entries();             \
  TILEWISE_DECLARE_STORE                  \
  TILEWISE_DECLARE_WEIGH                  \
  }
#if defined(__aarch64__)
TILEWISE_DECLARE_LEVEL(neon)
#else
TILEWISE_DECLARE_LEVEL(baseline)
#endif
#if defined(__x86_64__)
TILEWISE_DECLARE_LEVEL(avx2)
TILEWISE_DECLARE_LEVEL(avx512)
TILEWISE_DECLARE_LEVEL(avx512_bf16)
TILEWISE_DECLARE_LEVEL(amx_bf16)
#endif

namespace tilewise::kernels {
namespace {

using Table = std::unordered_map<std::string_view, KernelFn>;

struct Level {
  std::string_view name;
  bool available;
  StoreFn store;
  WeighFns weigh;
  Table table;
};

#define TILEWISE_LEVEL_TABLE(ns)                                                                                       \
  table_of({ns::matmul_entries(), ns::weight_gradient_entries(), ns::attention_entries(),                              \
            ns::attention_backward_entries(), ns::rows_entries(), ns::elementwise_entries(), ns::reductions_entries(), \
            ns::update_entries()})

Table table_of(std::initializer_list<EntryList> lists) {
  Table table;
  for (const EntryList& list : lists)
    for (int64_t i = 0; i < list.count; ++i) table.emplace(list.entries[i].name, list.entries[i].fn);
  return table;
}

#if defined(__x86_64__)
/// The kernel gives tile registers to a process that asks: all its threads may use them then.
bool may_use_amx() {
  if (!__builtin_cpu_supports("amx-tile") || !__builtin_cpu_supports("amx-bf16")) return false;
  constexpr long kRequestFeature = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestFeature, kTileData) == 0;
}
#endif

std::vector<Level> make_levels() {
  std::vector<Level> levels;
#if defined(__aarch64__)
  levels.push_back(
      {"neon", true, neon::store_weights, neon::weigh_fns(), TILEWISE_LEVEL_TABLE(neon)});  // part of every aarch64
#else
  levels.push_back({"baseline", true, baseline::store_weights, baseline::weigh_fns(), TILEWISE_LEVEL_TABLE(baseline)});
#endif
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool dot = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  levels.push_back({"avx2", avx2, avx2::store_weights, avx2::weigh_fns(), TILEWISE_LEVEL_TABLE(avx2)});
  levels.push_back({"avx512", avx512, avx512::store_weights, avx512::weigh_fns(), TILEWISE_LEVEL_TABLE(avx512)});
  levels.push_back(
      {"avx512_bf16", dot, avx512_bf16::store_weights, avx512_bf16::weigh_fns(), TILEWISE_LEVEL_TABLE(avx512_bf16)});
  levels.push_back({"amx_bf16", dot && may_use_amx(), amx_bf16::store_weights, amx_bf16::weigh_fns(),
                    TILEWISE_LEVEL_TABLE(amx_bf16)});
#endif
  return levels;
}

const std::vector<Level>& levels() {
  static const std::vector<Level> all = make_levels();
  return all;
}

std::string join_available() {
  std::string text;
  for (const std::string_view name : available_levels()) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

const Level& level_named(std::string_view name, const char* source) {
  for (const Level& level : levels())
    if (level.name == name && level.available) return level;
  check<ArgumentError>(false, "[kernels.isa] ", source, " must name a level that this machine has; got '", name,
                       "'; choose one of ", join_available(), ".");
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

KernelFn find_in(const Level& level, std::string_view name) {
  const auto found = level.table.find(name);
  return found == level.table.end() ? nullptr : found->second;
}

}  // namespace

std::vector<std::string_view> available_levels() {
  std::vector<std::string_view> names;
  for (const Level& level : levels())
    if (level.available) names.push_back(level.name);
  return names;
}

std::string_view level_in_use() { return level_of_process().name; }

void scratch_exhausted() {
  throw ResourceError(
      "[kernels.scratch] a kernel's working memory must fit its worker's scratch; this shape needs more; please report "
      "the "
      "plan, which counts it (tilewise/kernels/scratch.py)");
}

KernelFn find_kernel(std::string_view name) { return find_in(level_of_process(), name); }

KernelFn find_kernel_at(std::string_view level, std::string_view name) {
  return find_in(level_named(level, "isa"), name);
}

StoreFn find_store() { return level_of_process().store; }

const WeighFns& find_weigh() { return level_of_process().weigh; }

StoreFn find_store_at(std::string_view level) { return level_named(level, "isa").store; }

std::vector<std::string_view> kernel_names() {
  std::vector<std::string_view> names;
  for (const auto& [name, fn] : levels().front().table) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace tilewise::kernels
