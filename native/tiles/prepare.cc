// See prepare.h.
#include "tiles/prepare.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "tiles/rules_table.h"

namespace tilewise::tiles {

namespace {

constexpr const char* kDtypeNames[] = {"f32", "bf16", "f64", "i32"};
constexpr uint64_t kItemBytes[] = {4, 2, 8, 4};
constexpr int64_t kMaxSize = INT32_MAX;  // rows, columns and strides are passed in 32 bits
constexpr int64_t kUnset = -1;

int dtype_of(pto_type type) {
  return type == PTO_F32 ? kF32 : type == PTO_BF16 ? kBf16 : type == PTO_F64 ? kF64 : type == PTO_I32 ? kI32 : -1;
}

/// Errors of one call. Not inline: the code of messages must not slow down correct calls.
struct Reporter {
  const KernelRule& rule;

  template <class... Parts>
  [[noreturn]] [[gnu::noinline, gnu::cold]] void fail(const Parts&... message) const {
    check<ArgumentError>(false, "[tile.", rule.base, "] ", message...);
    __builtin_unreachable();
  }
  [[noreturn]] [[gnu::noinline, gnu::cold]] void fail_size(const OperandRule& operand, const pto_tile& tile,
                                                           int64_t expected) const {
    std::string declared;
    for (const OperandRule& other : rule.operands) declared += (declared.empty() ? "" : ", ") + std::string(other.text);
    fail("sizes of one name must be equal in ", declared, "; got ", tile.rows, " x ", tile.cols, " for '", operand.name,
         "', where ", expected, " is expected; pass tiles of matching sizes");
  }
};

/// Equally long runs of bytes, `step` apart.
struct Rows {
  uint64_t first, rows, run, step;
  uint64_t end() const { return first + (rows - 1) * step + run; }
  bool operator==(const Rows&) const = default;
};

Rows rows_of(const pto_region* region) {
  if (region == nullptr) return {0, 1, UINT64_MAX / 2, UINT64_MAX / 2};  // the whole buffer
  if (region->ndim == 1) return {region->offset, 1, region->size[0], region->size[0]};
  return {region->offset, region->size[0], region->size[1], region->stride[0]};
}

/// Whether a run of bytes has one of the rows' bytes.
bool meets(const Rows& rows, uint64_t first, uint64_t end) {
  if (end <= rows.first || first >= rows.end()) return false;
  const uint64_t row = first > rows.first ? std::min((first - rows.first) / rows.step, rows.rows - 1) : 0;
  const uint64_t begin = rows.first + row * rows.step;
  return first < begin + rows.run ? end > begin : row + 1 < rows.rows && end > begin + rows.step;
}

bool share_bytes(const Rows& a, const Rows& b) {
  if (a.end() <= b.first || b.end() <= a.first) return false;
  const Rows &few = a.rows < b.rows ? a : b, &many = a.rows < b.rows ? b : a;
  for (uint64_t row = 0; row < few.rows; ++row) {
    const uint64_t begin = few.first + row * few.step;
    if (meets(many, begin, begin + few.run)) return true;
  }
  return false;
}

class Checker {
 public:
  // Arrays stay as they are, because clearing them would take as long as the checks.
  Checker(const KernelRule& rule, PTORuntime* runtime_of_call, const pto_tile_call& to_check, PreparedCall& to_make)
      : report{rule}, runtime(runtime_of_call), call(to_check), made(to_make) {}

  void run() {
    std::fill(sizes, sizes + report.rule.sizes.size(), kUnset);
    if ((call.num_ints > 0 && call.ints == nullptr) || (call.num_floats > 0 && call.floats == nullptr) ||
        call.num_floats > PTO_MAX_TILE_INTS) {
      fail_numbers();
    }
    made.num_params = 0;
    members = num_members();
    find_dtype();
    check_operands();
    compute_ints();
    made.num_floats = call.num_floats;
    made.floats = call.floats;
    made.number = static_cast<uint32_t>(call.kernel) * kNumDtypes + static_cast<uint32_t>(std::max(dtype, 0));
    made.entry = &entry_at(made.number);
    const kernels::KernelArgs args = {made.views,  made.num_tiles,  made.ints, made.num_ints,
                                      call.floats, call.num_floats, 0,         {}};
    if (!made.entry->fits(args)) fail_numbers();
    if (report.rule.within >= 0) check_ranges();
    if (const char* condition = report.rule.broken_condition({sizes, made.ints, rows, cols})) [[unlikely]] {
      report.fail("a call must satisfy `", condition, "`; got other sizes or integers; correct them");
    }
    check_overlaps();
  }

 private:
  const Reporter report;
  PTORuntime* const runtime;
  const pto_tile_call& call;
  PreparedCall& made;
  int64_t sizes[16];  // by KernelRule::sizes
  int64_t rows[PTO_MAX_TILES], cols[PTO_MAX_TILES];  // by operand; 0 if absent, or for a list
  int64_t own_rows = kUnset, own_cols = kUnset;  // of the current members of lists
  int dtype = -1;        // the kernel's own; -1: a kernel without dtypes
  uint32_t members = 0;  // of every list

  /// The dtype of the first operand that has the kernel's own dtype. If all those are absent, every dtype computes the
  /// same.
  void find_dtype() {
    if (report.rule.only_dtype >= -1) {
      dtype = report.rule.only_dtype;
      return;
    }
    uint32_t at = 0;
    bool is_in_lists = false, is_told = false;
    for (const OperandRule& operand : report.rule.operands) {
      if (is_in_lists && !operand.is_list) {  // behind the lists
        const auto operands_left = static_cast<uint32_t>(&report.rule.operands.back() + 1 - &operand);
        at = call.num_tiles - operands_left;
      }
      is_in_lists = operand.is_list;
      if (operand.is_list && members == 0) continue;
      const pto_tile& tile = call.tiles[at++];
      if (operand.dtypes != kOwnDtype || tile.buffer == 0) continue;
      dtype = dtype_of(tile.type);
      is_told = true;
      break;
    }
    for (int d = 0; d < kNumDtypes && !is_told && dtype < 0; ++d) {
      if (report.rule.names[d] != nullptr) dtype = d;
    }
    if (dtype >= 0 && report.rule.names[dtype] != nullptr) [[likely]]
      return;
    std::string names;
    for (int d = 0; d < kNumDtypes; ++d) {
      if (report.rule.names[d] != nullptr) names += (names.empty() ? "" : " or ") + std::string(kDtypeNames[d]);
    }
    report.fail("the operands must be ", names, "; got ", dtype < 0 ? "another type" : kDtypeNames[dtype],
                "; convert them");
  }

  void agree(const OperandRule& operand, const pto_tile& tile, const SizeRule& size, int64_t value, int64_t& own) {
    if (size.number >= 0 && size.number != value) report.fail_size(operand, tile, size.number);
    if (size.name < 0) return;
    int64_t& common = size.is_own ? own : sizes[size.name];
    if (common == kUnset) {
      common = value;
    } else if (common != value) {
      report.fail_size(operand, tile, common);
    }
  }

  void check_type(const OperandRule& operand, const pto_tile& tile) {
    const int own = dtype_of(tile.type);
    if (own < 0) {
      report.fail("operands must be f32, bf16, f64 or i32; got type ", static_cast<int>(tile.type), " for '",
                  operand.name, "'; convert the elements, or register an array of that dtype");
    }
    const uint32_t permitted = operand.dtypes | ((operand.dtypes & kOwnDtype) != 0 ? 1U << dtype : 0U);
    if ((permitted >> own & 1) != 0) [[likely]]
      return;
    std::string names;
    for (int d = 0; d < kNumDtypes; ++d) {
      if ((permitted >> d & 1) != 0) names += (names.empty() ? "" : " or ") + std::string(kDtypeNames[d]);
    }
    report.fail("'", operand.name, "' must be ", names, "; got ", kDtypeNames[own], "; convert it, or pass operands ",
                "of one dtype");
  }

  /// The tile as a parameter of the task and as the kernel will see it.
  void place(const OperandRule& operand, const pto_tile& tile, kernels::TileView& view) {
    const bool is_packed = tile.is_packed != 0;
    if (operand.storage != Storage::kEither && is_packed != (operand.storage == Storage::kPanels)) {
      report.fail("'", operand.name, "' must be stored in ", is_packed ? "rows" : "panels", "; got a tile in ",
                  is_packed ? "panels" : "rows", "; ", is_packed ? "pass the plain weight" : "pack it first");
    }
    const int64_t stride = is_packed ? (tile.cols + 1) / 2 * 2 : tile.stride;
    if (tile.rows < 1 || tile.cols < 1 || tile.rows > kMaxSize || tile.cols > kMaxSize || stride > kMaxSize ||
        stride < tile.cols) {
      report.fail("a tile must have at least one row and column, rows that do not overlap, and less than 2**31 of ",
                  "each; got ", tile.rows, " x ", tile.cols, " with stride ", stride, " for '", operand.name,
                  "'; correct it");
    }
    view = {nullptr, tile.rows, tile.cols, stride};
    if (made.num_params == PTO_MAX_PARAMS) {
      report.fail("a call must have at most ", PTO_MAX_PARAMS, " operands; got more; divide the lists");
    }
    const uint64_t item = kItemBytes[dtype_of(tile.type)];
    const uint64_t run = static_cast<uint64_t>(tile.cols) * item, step = static_cast<uint64_t>(stride) * item;
    const uint64_t num_bytes =
        is_packed ? packed_elements(tile.rows, tile.cols) * item : static_cast<uint64_t>(tile.rows) * run;
    const bool is_contiguous = is_packed || stride == tile.cols || tile.rows == 1;
    const uint64_t available = pto_bytes(runtime, tile.buffer);
    if (available == 0) report.fail("'", operand.name, "' must lie in a registered buffer: ", pto_last_error());
    if (tile.offset % item != 0) {
      report.fail("a tile must begin at a whole element; got byte ", tile.offset, " for '", operand.name,
                  "'; correct the offset");
    }
    pto_param& param = made.params[made.num_params];
    param.mode = operand.role == Role::kIn ? PTO_INPUT : operand.role == Role::kOut ? PTO_OUTPUT : PTO_INOUT;
    param.combine = 0;
    param.handle = tile.buffer;
    param.bytes = 0;
    param.view = nullptr;
    param.region = nullptr;
    if (!is_contiguous || tile.offset != 0 || num_bytes != available) {
      pto_region& region = made.regions[made.num_params];
      param.region = &region;
      region.offset = tile.offset;
      if (is_contiguous) {
        region.ndim = 1;
        region.size[0] = num_bytes;
        region.stride[0] = 1;
      } else {
        region.ndim = 2;
        region.size[0] = static_cast<uint64_t>(tile.rows);
        region.stride[0] = step;
        region.size[1] = run;
        region.stride[1] = 1;
      }
      const uint64_t last = is_contiguous ? num_bytes : (region.size[0] - 1) * step + run;
      if (tile.offset > available || last > available - tile.offset) {
        report.fail("a tile must lie in its buffer of ", available, " bytes; got ", tile.rows, " x ", tile.cols,
                    is_packed ? " in panels" : "", " from byte ", tile.offset, " to ", tile.offset + last, " for '",
                    operand.name, "'; correct it");
      }
    }
    ++made.num_params;
  }

  void take(const OperandRule& operand, const pto_tile& tile, kernels::TileView& view) {
    if (tile.buffer == 0) {
      if (!operand.is_optional) {
        report.fail("'", operand.name, "' must be passed; got no buffer; only operands marked by ? may be absent");
      }
      view = {nullptr, 0, 0, 0};
      return;
    }
    check_type(operand, tile);
    agree(operand, tile, operand.rows, tile.rows, own_rows);
    agree(operand, tile, operand.cols, tile.cols, own_cols);
    place(operand, tile, view);
  }

  /// The length of the lists.
  uint32_t num_members() const {
    uint32_t num_lists = 0;
    for (const OperandRule& operand : report.rule.operands) num_lists += operand.is_list ? 1 : 0;
    const auto num_single = static_cast<uint32_t>(report.rule.operands.size()) - num_lists;
    const bool fits = num_lists == 0 ? call.num_tiles == num_single
                                     : call.num_tiles >= num_single && (call.num_tiles - num_single) % num_lists == 0;
    if (!fits || call.num_tiles > PTO_MAX_TILES || (call.num_tiles > 0 && call.tiles == nullptr)) {
      report.fail("a call must have an operand for each one declared, lists of equal lengths, and at most ",
                  PTO_MAX_TILES, "; got ", call.num_tiles, " for ", num_single, " and ", num_lists,
                  " lists; correct the call");
    }
    return num_lists == 0 ? 0 : (call.num_tiles - num_single) / num_lists;
  }

  void check_operands() {
    const std::span<const OperandRule> operands = report.rule.operands;
    uint32_t at = 0;
    for (size_t o = 0; o < operands.size();) {
      if (!operands[o].is_list) {
        const pto_tile& tile = call.tiles[at];
        rows[o] = tile.buffer != 0 ? tile.rows : 0;
        cols[o] = tile.buffer != 0 ? tile.cols : 0;
        take(operands[o], tile, made.views[at]);
        ++at;
        ++o;
        continue;
      }
      size_t end = o;
      for (; end < operands.size() && operands[end].is_list; ++end) rows[end] = cols[end] = 0;
      for (uint32_t member = 0; member < members; ++member) {
        own_rows = own_cols = kUnset;
        for (size_t list = o; list < end; ++list, ++at) take(operands[list], call.tiles[at], made.views[at]);
      }
      o = end;
    }
    made.num_tiles = at;
  }

  /// Outputs share no bytes with other operands, or all of them if the kernel works element by element.
  void check_overlaps() const {
    for (uint32_t out = 0; out < made.num_params; ++out) {
      const pto_param& written = made.params[out];
      if (written.mode == PTO_INPUT) continue;
      for (uint32_t i = 0; i < made.num_params; ++i) {
        const pto_param& other = made.params[i];
        if (i == out || other.handle != written.handle) [[likely]]
          continue;
        const Rows a = rows_of(written.region), b = rows_of(other.region);
        if (!share_bytes(a, b) || (report.rule.is_elementwise && a == b)) continue;
        report.fail("an output must share no bytes with another operand", report.rule.is_elementwise ? " in part" : "",
                    "; got operands ", out, " and ", i, " of one buffer, from byte ", a.first, " and ", b.first,
                    "; write to other memory");
      }
    }
  }

  /// The place of an operand that is no list.
  uint32_t place_of(size_t operand) const {
    const std::span<const OperandRule> operands = report.rule.operands;
    bool follows_lists = false;
    for (size_t o = 0; o < operand; ++o) follows_lists |= operands[o].is_list;
    const auto number = static_cast<uint32_t>(operand);
    return follows_lists ? made.num_tiles - static_cast<uint32_t>(operands.size()) + number : number;
  }

  void compute_ints() {
    uint32_t at = 0, from = 0;
    const auto push = [&](int64_t value) {
      if (at == PTO_MAX_TILE_INTS) report.fail("a call must have at most ", PTO_MAX_TILE_INTS, " integers; got more");
      made.ints[at++] = value;
    };
    for (const IntRule& rule : report.rule.ints) {
      if (rule.is_list) break;  // lists are last
      if (rule.source == Source::kCount) {
        push(members);
      } else if (rule.source == Source::kIsF32) {
        push(call.tiles[place_of(rule.operand)].type == PTO_F32 ? 1 : 0);
      } else if (rule.source == Source::kIsPacked) {
        push(call.tiles[place_of(rule.operand)].is_packed != 0 ? 1 : 0);
      } else {
        if (from == call.num_ints) fail_numbers();
        push(call.ints[from++]);
      }
    }
    for (; from < call.num_ints; ++from) push(call.ints[from]);
    made.num_ints = at;
  }

  /// The list of integers has begin and end of each k split, of each member of lists in turn.
  void check_ranges() const {
    const auto operand = static_cast<size_t>(report.rule.within);
    const OperandRule& rule = report.rule.operands[operand];
    uint32_t first = 0, step = 0, lists_before = 0;
    if (rule.is_list) {
      for (size_t o = 0; o < operand; ++o) (report.rule.operands[o].is_list ? lists_before : first) += 1;
      for (const OperandRule& other : report.rule.operands) step += other.is_list ? 1 : 0;
      first += lists_before;
    } else {
      first = place_of(operand);
    }
    const auto num_plain = static_cast<uint32_t>(
        std::count_if(report.rule.ints.begin(), report.rule.ints.end(), [](const IntRule& i) { return !i.is_list; }));
    for (uint32_t i = num_plain; i + 1 < made.num_ints; i += 2) {
      const uint32_t member = rule.is_list ? (i - num_plain) / 2 % members : 0;
      const int64_t begin = made.ints[i], end = made.ints[i + 1], width = made.views[first + member * step].cols;
      const bool is_even = !report.rule.begins_even || dtype != kBf16 || begin % 2 == 0 || begin == end;
      if (0 <= begin && begin <= end && end <= width && is_even) [[likely]]
        continue;
      report.fail("ranges of k splits must lie in the ", width, " columns of '", rule.name, "'",
                  report.rule.begins_even && dtype == kBf16 ? ", and those of bf16 begin at even ones" : "", "; got [",
                  begin, ", ", end, "); correct the list");
    }
  }

  [[noreturn]] void fail_numbers() const {
    report.fail("the attributes must be as declared (", report.rule.attributes, "); got ", call.num_ints,
                " integers and ", call.num_floats, " floats; pass each once, and lists of the declared length");
  }
};

}  // namespace

std::span<const KernelRule> rules() { return kRules; }

const kernels::Entry& entry_at(uint32_t number) {
  static const std::vector<const kernels::Entry*> entries = [] {
    std::vector<const kernels::Entry*> made;
    for (const KernelRule& rule : kRules) {
      for (const char* name : rule.names) {
        made.push_back(name != nullptr ? kernels::find_kernel(name) : nullptr);
      }
    }
    return made;
  }();
  return *entries[number];
}

uint64_t packed_elements(int64_t rows, int64_t cols) {
  if (rows < 1 || cols < 1 || rows > kMaxSize || cols > kMaxSize) return 0;
  const uint64_t panels = (static_cast<uint64_t>(rows) + 31) / 32, k_pad = (static_cast<uint64_t>(cols) + 1) / 2 * 2;
  return panels * 32 * k_pad;
}

void prepare(PTORuntime* runtime, const pto_tile_call& call, PreparedCall& made) {
  check<ArgumentError>(static_cast<uint32_t>(call.kernel) < rules().size(),
                       "[tile] a kernel must be one that pto_tile_kernel_find returns; got ", call.kernel,
                       "; find it by its name");
  made.rule = &rules()[static_cast<size_t>(call.kernel)];
  Checker(*made.rule, runtime, call, made).run();
}

}  // namespace tilewise::tiles
