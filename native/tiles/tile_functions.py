"""Writes what native/tiles, its C and C++ headers and `tilewise.tile` make of the kernels' declarations.

native/kernels/declarations.py reads the declarations. Kernels with an `internal` line have no tile call. The others
get, in the order of the operands that a caller expects (inputs, outputs, integers, floats, operands that may be
absent):

    tiles/rules_table.h      the rules against which native/tiles/prepare.cc checks a call
    tilewise/tile/kernels.h    C: `pto_tile_gelu(runtime, &x, &out)` and `pto_tile_gelu_async`
    tilewise/tile/kernels.hpp  C++: `tilewise::tile::gelu(x, out)` and `gelu_async`
    tile/functions.py          Python: `tilewise.tile.gelu(x, out)` and `gelu_async`
    tensor/functions.py        Python: `tilewise.tensor.gelu(x, out)`, for kernels with an `each` line

Usage: tile_functions.py NATIVE_FOLDER OUTPUT_FOLDER SOURCE...
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from declarations import (
    DeclarationError,
    Expression,
    Float,
    Integer,
    Kernel,
    Operand,
    fail,
    read_source,
    require_domain,
    write,
)

DTYPES = ("f32", "bf16", "f64", "i32")  # in the order of tiles::Dtype
SOURCES = {"count": "kCount", "f32": "kIsF32", "packed": "kIsPacked"}
GENERATED = "Generated from the declarations in native/kernels by native/tiles/tile_functions.py."


class Call:
    """The parts of a kernel's declaration in the order of a tile call."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.name = kernel.base
        needed = [operand for operand in kernel.operands if not operand.optional]
        self.inputs = [operand for operand in needed if operand.role == "in"]
        self.outputs = [operand for operand in needed if operand.role != "in"]
        self.optional = [operand for operand in kernel.operands if operand.optional]
        self.ints = [number for number in kernel.ints if number.source is None]
        self.lists = kernel.lists

    @property
    def operands(self) -> list[Operand]:
        """Operands that a call must have, inputs first."""
        return [*self.inputs, *self.outputs]

    def sentence(self) -> str:
        """The operands, their sizes and dtypes, in words."""
        dtypes = f"; {', '.join(self.kernel.types)}" if self.kernel.types else ""
        return ", ".join(text_of(operand) for operand in self.kernel.operands) + dtypes


def text_of(operand: Operand) -> str:
    """An operand as declared."""
    dtype = "" if operand.dtypes == ("dt",) else f":{'|'.join(operand.dtypes)}"
    packed = {True: "!", None: "~", False: ""}[operand.packed]
    sizes = f"[{' '.join(operand.sizes)}]" if operand.sizes else ""
    dots, mark = "..." if operand.is_list else "", "?" if operand.optional else ""
    return f"{operand.role} {operand.name}{dtype}{packed}{dots}{mark}{sizes}"


# ---- the rules ----


class _Conditions(ast.NodeVisitor):
    """Translates a condition from Python to C++."""

    OPERATORS: Mapping[type, str] = {
        ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "/", ast.Mod: "%", ast.Eq: "==", ast.NotEq: "!=",
        ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.And: "&&", ast.Or: "||", ast.Not: "!",
        ast.USub: "-",
    }  # fmt: skip

    def __init__(self, expression: Expression, names: Mapping[str, str]) -> None:
        self.expression, self.names = expression, names

    def generic_visit(self, node: ast.AST) -> str:
        fail(self.expression.place, "a condition must be comparisons of integers", ast.unparse(node))

    def operator(self, node: ast.AST) -> str:
        if type(node) not in self.OPERATORS:
            self.generic_visit(node)
        return self.OPERATORS[type(node)]

    def visit_Constant(self, node: ast.Constant) -> str:
        return f"int64_t{{{int(node.value)}}}"

    def visit_Name(self, node: ast.Name) -> str:
        return self.names[node.id]

    def visit_Attribute(self, node: ast.Attribute) -> str:
        return self.names[ast.unparse(node)]

    def visit_UnaryOp(self, node: ast.UnaryOp) -> str:
        return f"({self.operator(node.op)}{self.visit(node.operand)})"

    def visit_BinOp(self, node: ast.BinOp) -> str:
        return f"({self.visit(node.left)} {self.operator(node.op)} {self.visit(node.right)})"

    def visit_BoolOp(self, node: ast.BoolOp) -> str:
        return "(" + f" {self.operator(node.op)} ".join(self.visit(value) for value in node.values) + ")"

    def visit_IfExp(self, node: ast.IfExp) -> str:
        return f"({self.visit(node.test)} ? {self.visit(node.body)} : {self.visit(node.orelse)})"

    def visit_Compare(self, node: ast.Compare) -> str:
        values = [self.visit(value) for value in (node.left, *node.comparators)]
        pairs = zip(values, node.ops, values[1:])
        return "(" + " && ".join(f"{a} {self.operator(op)} {b}" for a, op, b in pairs) + ")"


def rules(calls: Iterable[Call]) -> str:
    """The table of rules."""
    parts, rows = [], []
    for call in calls:
        part, row = _rule(call)
        parts.append(part)
        rows.append(row)
    return (
        f"// {GENERATED}\n#pragma once\n#include <cstdint>\n\n"
        '#include "tiles/rules.h"\n\nnamespace tilewise::tiles {\nnamespace {\n\n'
        + "\n".join(parts)
        + f"\nconstexpr KernelRule kRules[] = {{\n{''.join(rows)}}};\n\n"
        + "}  // namespace\n}  // namespace tilewise::tiles\n"
    )


def _rule(call: Call) -> tuple[str, str]:
    kernel, name = call.kernel, call.name
    sizes = [size.rstrip("*") for operand in kernel.operands for size in operand.sizes]
    named = [size for size in dict.fromkeys(sizes) if size != "_" and not size.isdigit()]
    operands = "".join(f"    {_operand_rule(operand, named)},\n" for operand in kernel.operands)
    ints = "".join(f"    {_int_rule(kernel, number)},\n" for number in kernel.ints)
    lines = [f"constexpr OperandRule kOperands_{name}[] = {{\n{operands}}};\n"]
    if ints:
        lines.append(f"constexpr IntRule kInts_{name}[] = {{\n{ints}}};\n")
    if named:
        lines.append(f"constexpr const char* kSizes_{name}[] = {{{', '.join(map(_quoted, named))}}};\n")
    lines.append(_condition_function(kernel, named))
    names = dict(zip(kernel.types, kernel.names)) or {DTYPES[0]: kernel.base}
    full = ", ".join(_quoted(names[dtype]) if dtype in names else "nullptr" for dtype in DTYPES)
    only = -2 if len(kernel.types) > 1 else DTYPES.index(next(iter(kernel.types))) if kernel.types else -1
    attributes = [_attribute_text(number) for number in call.ints] + [
        number.name + ("..." if number.is_list else "") for number in kernel.floats
    ]
    within = -1
    if kernel.within is not None:
        within = next(i for i, operand in enumerate(kernel.operands) if operand.name == kernel.within[0])
    begins_even = _flag(kernel.within is not None and kernel.within[1])
    row = (
        f"    {{{_quoted(name)}, {{{full}}}, {only}, {_flag('scratch' in kernel.costs)}, "
        f"{_flag(kernel.each == ('m', 'd'))}, kOperands_{name}, "
        f"{f'kInts_{name}' if ints else 'std::span<const IntRule>()'}, "
        f"{f'kSizes_{name}' if named else 'std::span<const char* const>()'}, "
        f"{within}, {begins_even}, {_quoted(', '.join(attributes) or 'none')}, broken_{name}}},\n"
    )
    return "".join(lines), row


def _attribute_text(number: Integer) -> str:
    if not number.is_list:
        return number.name
    return number.name + "..." + (f"({'*'.join(number.length)})" if number.length else "")


def _operand_rule(operand: Operand, named: list[str]) -> str:
    role = {"in": "kIn", "out": "kOut", "inout": "kInout"}[operand.role]
    bits = sum(16 if dtype == "dt" else 1 << DTYPES.index(dtype) for dtype in operand.dtypes)
    storage = {True: "kPanels", None: "kEither", False: "kRows"}[operand.packed]
    rows, cols = operand.sizes or ("_", "_")
    return (
        f"{{{_quoted(operand.name)}, Role::{role}, {bits}, Storage::{storage}, {_flag(operand.optional)}, "
        f"{_flag(operand.is_list)}, {_size_rule(rows, named)}, {_size_rule(cols, named)}, {_quoted(text_of(operand))}}}"
    )


def _size_rule(size: str, named: list[str]) -> str:
    if size == "_":
        return "{}"
    if size.isdigit():
        return f"{{-1, false, {size}}}"
    return f"{{{named.index(size.rstrip('*'))}, {_flag(size.endswith('*'))}, -1}}"


def _int_rule(kernel: Kernel, number: Integer) -> str:
    source, of = "kPassed", 0
    if number.source is not None:
        source = SOURCES[number.source[0]]
        of = next(i for i, operand in enumerate(kernel.operands) if operand.name == number.source[1])
    return f"{{{_quoted(number.name)}, Source::{source}, {of}, {_flag(number.is_list)}}}"


def _condition_function(kernel: Kernel, named: list[str]) -> str:
    names = {}
    for name in require_domain(kernel):
        operand, _, extent = name.partition(".")
        if extent:
            place = next(i for i, o in enumerate(kernel.operands) if o.name == operand)
            names[name] = f"values.{extent}[{place}]"
        elif name in named:
            names[name] = f"values.sizes[{named.index(name)}]"
        else:
            names[name] = f"values.ints[{next(i for i, n in enumerate(kernel.ints) if n.name == name)}]"
    lines = []
    for condition in kernel.requires:
        tree = ast.parse(condition.text, mode="eval").body
        holds = _Conditions(condition, names).visit(tree)
        lines.append(f"  if (!{holds}) return {_quoted(condition.text)};\n")
    values = "values" if lines else ""
    head = f"constexpr const char* broken_{kernel.base}(const Values& {values}) {{\n"
    return head + "".join(lines) + "  return nullptr;\n}\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _flag(value: object) -> str:
    return "true" if value else "false"


# ---- C ----


def c_header(calls: Iterable[Call]) -> str:
    """The functions of single kernels in C."""
    return (
        f"/* {GENERATED} Include tilewise/tile.h.\n"
        " *\n"
        " * Each kernel has a function that waits for its task and returns a status, and one that returns the\n"
        " * task's id, or 0 after an error. `options` may be NULL; see pto_tile_call. Operands marked by ?\n"
        " * may be NULL. */\n"
        "#ifndef TILEWISE_TILE_KERNELS_H\n#define TILEWISE_TILE_KERNELS_H\n\n"
        '#include "tilewise/tile.h"\n\n#ifdef __cplusplus\nextern "C" {\n#endif\n\n'
        "/* Shared by all functions: finds the kernel once, and runs or submits the call. */\n"
        "static inline int pto_tile_call_(PTORuntime* runtime, pto_tile_kernel* kernel, const char* name,\n"
        "                                 pto_tile_call* call, pto_task* task) {\n"
        "  pto_tile_kernel number = __atomic_load_n(kernel, __ATOMIC_RELAXED);\n"
        "  if (number < 0) {\n"
        "    number = pto_tile_kernel_find(name);\n"
        "    if (number < 0) return number;\n"
        "    __atomic_store_n(kernel, number, __ATOMIC_RELAXED);\n"
        "  }\n"
        "  call->kernel = number;\n"
        "  if (task == NULL) return pto_tile_run(runtime, call);\n"
        "  *task = pto_tile_submit(runtime, call);\n"
        "  return *task != 0 ? PTO_OK : pto_last_status();\n}\n"
        "/* An operand of a call; absent if `tile` is NULL. */\n"
        "static inline void pto_tile_put_(pto_tile* to, const pto_tile* tile) {\n"
        "  static const pto_tile absent = {0, 0, 0, 0, 0, PTO_F32, 0};\n"
        "  *to = tile != NULL ? *tile : absent;\n}\n\n"
        + "\n".join(_c_functions(call) for call in calls)
        + "\n#ifdef __cplusplus\n}\n#endif\n\n#endif /* TILEWISE_TILE_KERNELS_H */\n"
    )


def _c_params(call: Call) -> list[tuple[str, str]]:
    """Type and name of each parameter."""
    params = [("const pto_tile*", operand.name) for operand in call.operands]
    if call.lists:
        params.append(("uint32_t", f"num_{call.lists[0].name}"))
    for number in call.ints:
        params.append(("const int64_t*" if number.is_list else "int64_t", number.name))
        if number.is_list:
            params.append(("uint32_t", f"num_{number.name}"))
    for real in call.kernel.floats:
        params.append(("const double*" if real.is_list else "double", real.name))
        if real.is_list:
            params.append(("uint32_t", f"num_{real.name}"))
    return params + [("const pto_tile*", operand.name) for operand in call.optional]


def _c_functions(call: Call) -> str:
    params = _c_params(call)
    declared = "".join(f", {type_} {name}" for type_, name in params)
    passed = "".join(f", {name}" for _, name in params)
    name = call.name
    return (
        f"/* {call.sentence()} */\n"
        f"static inline int pto_tile_{name}_call_(PTORuntime* runtime{declared}, const pto_task_spec* options,\n"
        f"    pto_task* task) {{\n  static pto_tile_kernel kernel = -1;\n{_c_body(call)}"
        f'  return pto_tile_call_(runtime, &kernel, "{name}", &call, task);\n}}\n'
        f"static inline int pto_tile_{name}(PTORuntime* runtime{declared}) {{\n"
        f"  return pto_tile_{name}_call_(runtime{passed}, NULL, NULL);\n}}\n"
        f"static inline pto_task pto_tile_{name}_async(PTORuntime* runtime{declared},\n"
        f"    const pto_task_spec* options) {{\n"
        f"  pto_task task = 0;\n  pto_tile_{name}_call_(runtime{passed}, options, &task);\n  return task;\n}}\n"
    )


def _c_body(call: Call) -> str:
    """Statements that make the call."""
    lines = []
    num_single = len(call.kernel.operands) - len(call.lists)
    if call.lists:
        count = f"num_{call.lists[0].name}"
        room = f"(PTO_MAX_TILES - {num_single}) / {len(call.lists)}"
        lines += ["pto_tile tiles[PTO_MAX_TILES];", "uint32_t at = 0, member;"]
        lines.append(f"const uint32_t members = {count} <= {room} ? {count} : {room};")
        total = f"{num_single} + {count} * {len(call.lists)}"
    else:
        lines.append(f"pto_tile tiles[{num_single}];")
        total = f"{num_single}"
    place, has_passed_lists = 0, False
    for operand in call.kernel.operands:
        if operand.is_list:
            if not has_passed_lists:
                copies = " ".join(f"tiles[at++] = {o.name}[member];" for o in call.lists)
                lines.append(f"for (member = 0; member < members; ++member) {{ {copies} }}")
            has_passed_lists = True
        elif call.lists:
            lines.append(f"pto_tile_put_(&tiles[at++], {operand.name});")
        else:
            lines.append(f"pto_tile_put_(&tiles[{place}], {operand.name});")
            place += 1
    num_ints, ints = _c_numbers(call.ints, "int64_t", "ints")
    num_floats, floats = _c_numbers(call.kernel.floats, "double", "floats")
    lines += [*ints, *floats]
    if call.lists:
        lines.append("(void)at;")
    lines.append(
        f"pto_tile_call call = {{-1, {total}, tiles, {num_ints}, {num_floats}, {'ints' if ints else 'NULL'}, "
        f"{'floats' if floats else 'NULL'}, options}};"
    )
    return "".join(f"  {line}\n" for line in lines)


def _c_numbers(numbers: Iterable[Integer | Float], type_: str, name: str) -> tuple[str, list[str]]:
    """The number of integers or floats, and the statements that put them into one array."""
    numbers = list(numbers)
    if not numbers:
        return "0", []
    single = [number for number in numbers if not number.is_list]
    lists = [number for number in numbers if number.is_list]
    if not lists:
        return f"{len(single)}", [f"const {type_} {name}[] = {{{', '.join(n.name for n in single)}}};"]
    lines = [f"{type_} {name}[PTO_MAX_TILE_INTS];", f"uint32_t num_{name} = 0, i_{name};"]
    lines += [f"{name}[num_{name}++] = {number.name};" for number in single]
    for number in lists:
        place = f"num_{name} + i_{name}"
        copy = f"if ({place} < PTO_MAX_TILE_INTS) {name}[{place}] = {number.name}[i_{name}];"
        lines.append(f"for (i_{name} = 0; i_{name} < num_{number.name}; ++i_{name}) {{ {copy} }}")
        lines.append(f"num_{name} += num_{number.name};")
    return f"num_{name}", lines


# ---- C++ ----


def cpp_header(calls: Iterable[Call]) -> str:
    """The functions of single kernels in C++."""
    return (
        f"// {GENERATED} Include tilewise/tile.hpp.\n//\n"
        "// Each kernel has a function that waits for its task, and one that returns the task's handle.\n"
        "#pragma once\n\n"
        '#include "tilewise/tile.hpp"\n\nnamespace tilewise::tile {\n\n'
        + "\n".join(_cpp_functions(call) for call in calls)
        + "\n}  // namespace tilewise::tile\n"
    )


def _cpp_functions(call: Call) -> str:
    declared, passed, tiles, before = [], [], [], []
    for operand in call.operands:
        if operand.is_list:
            declared.append(f"List<Tile> {operand.name}")
            before.append(f"const detail::Members {operand.name}_tiles({operand.name});")
            passed.append(f"{operand.name}_tiles.data()")
        else:
            declared.append(f"const Tile& {operand.name}")
            passed.append(f"{operand.name}.raw()")
        tiles.append(operand.name)
    if call.lists:
        passed.append(f"detail::length_of({{{', '.join(f'{o.name}.size()' for o in call.lists)}}})")
    for number in [*call.ints, *call.kernel.floats]:
        kind = "double"
        if isinstance(number, Integer):
            kind = "bool" if number.is_flag else "int64_t"
        declared.append(f"List<{kind}> {number.name}" if number.is_list else f"{kind} {number.name}")
        passed += [f"{number.name}.data()", f"{number.name}.size()"] if number.is_list else [number.name]
    for operand in call.optional:
        declared.append(f"const Tile& {operand.name} = {{}}")
        passed.append(f"{operand.name}.raw()")
        tiles.append(operand.name)
    runtime = f"detail::runtime_of({', '.join(tiles)})"
    members = "".join(f"  {line}\n" for line in before)
    joined = "".join(f", {text}" for text in passed)
    name = call.name
    return (
        f"/// {call.sentence()}\n"
        f"inline void {name}({', '.join(declared)}) {{\n{members}"
        f"  detail::check_run(pto_tile_{name}({runtime}{joined}));\n}}\n"
        f"inline TaskHandle {name}_async({', '.join([*declared, 'const Options& options = {}'])}) {{\n{members}"
        f"  PTORuntime* const runtime = {runtime};\n"
        f"  const pto_task_spec spec = detail::spec_of(runtime, options);\n"
        f"  return detail::handle_of(runtime, pto_tile_{name}_async(runtime{joined}, &spec));\n}}\n"
    )


# ---- Python ----


def python_module(calls: Iterable[Call]) -> str:
    """The module `tilewise.tile.functions`."""
    calls = list(calls)
    names = [name for call in calls for name in (call.name, f"{call.name}_async")]
    exported = "".join(f"    {name!r},\n" for name in sorted(names))
    return (
        f'"""The tile calls, a blocking and an asynchronous one per kernel.\n\n{GENERATED}\n"""\n\n'
        "from __future__ import annotations\n\n"
        "from collections.abc import Sequence\nfrom typing import TYPE_CHECKING\n\n"
        "from tilewise.runtime import TaskHandle\n"
        "from tilewise.runtime.tile_calls import Tile, find_kernel, joined, run, submit\n\n"
        "if TYPE_CHECKING:\n    from typing_extensions import Unpack\n\n"
        "    from tilewise.runtime.tile_calls import TaskOptions\n\n"
        f"__all__ = [\n{exported}]\n\n" + "\n\n".join(_python_functions(call) for call in calls)
    )


def _python_functions(call: Call) -> str:
    params, keywords = _python_params(call, "Tile")
    parts: list[str] = []
    lists = [operand.name for operand in call.lists]
    for operand in call.kernel.operands:
        if not operand.is_list:
            parts.append(operand.name)
        elif operand.name == lists[0]:
            parts.append(f"*{lists[0]}" if len(lists) == 1 else f"*joined({call.name!r}, {', '.join(lists)})")
    tiles = _tuple(parts)
    ints = _tuple(f"*{n.name}" if n.is_list else n.name for n in call.ints)
    floats = _tuple(f"*{n.name}" if n.is_list else n.name for n in call.kernel.floats)
    blocking = ", ".join([*params, *(["*", *keywords] if keywords else [])])
    options = ", ".join([*params, *(["*", *keywords] if keywords else []), "**options: Unpack[TaskOptions]"])
    constant = f"_{call.name.upper()}"
    doc = _python_doc(call)
    return (
        f"{constant} = find_kernel({call.name!r})\n\n\n"
        f"def {call.name}({blocking}) -> None:\n"
        f'    """Run `{call.name}` as a task, and wait for it.{doc}    """\n'
        f"    run({constant}, {tiles}, {ints}, {floats})\n\n\n"
        f"def {call.name}_async({options}) -> TaskHandle:\n"
        f'    """Submit `{call.name}` as a task.{doc}'
        f'        options: attributes of the task, as `Runtime.submit` has them.\n    """\n'
        f"    return submit({constant}, {tiles}, {ints}, {floats}, options)\n"
    )


def tensor_module(calls: Iterable[Call]) -> str:
    """The module `tilewise.tensor.functions`."""
    calls = list(calls)
    exported = "".join(f"    {call.name!r},\n" for call in sorted(calls, key=lambda call: call.name))
    return (
        f'"""The tensor calls: kernels over the tiles of matrices.\n\n{GENERATED}\n"""\n\n'
        "from __future__ import annotations\n\n"
        "from collections.abc import Sequence\nfrom typing import TYPE_CHECKING\n\n"
        "from tilewise.runtime import TaskGroup\n"
        "from tilewise.tensor.loops import Matrix, submit_tiles\n\n"
        "if TYPE_CHECKING:\n    from typing_extensions import Unpack\n\n"
        "    from tilewise.runtime.tile_calls import TaskOptions\n\n"
        f"__all__ = [\n{exported}]\n\n\n" + "\n\n".join(_tensor_function(call) for call in calls)
    )


def _tensor_function(call: Call) -> str:
    params, keywords = _python_params(call, "Matrix")
    keywords = [*keywords, "tile: tuple[int, int] | None = None"]
    signature = ", ".join([*params, "*", *keywords, "**options: Unpack[TaskOptions]"])
    operands = _tuple(operand.name for operand in call.kernel.operands)
    ints = _tuple(f"*{n.name}" if n.is_list else n.name for n in call.ints)
    floats = _tuple(f"*{n.name}" if n.is_list else n.name for n in call.kernel.floats)
    return (
        f"def {call.name}({signature}) -> TaskGroup:\n"
        f'    """Submit `{call.name}` for every tile; tiles divide {" and ".join(call.kernel.each)}.{_python_doc(call)}'
        "        tile: rows and columns of a tile; None for those of the tensors, or automatic ones.\n"
        f'        options: attributes of the tasks, as `Runtime.submit` has them.\n    """\n'
        f"    return submit_tiles({call.name!r}, {operands}, {ints}, {floats}, tile, options)\n"
    )


def _python_params(call: Call, tile: str) -> tuple[list[str], list[str]]:
    """Parameters and keyword-only parameters, with their types."""
    params, keywords = [], []
    for operand in call.operands:
        params.append(f"{operand.name}: {f'Sequence[{tile}]' if operand.is_list else tile}")
    for number in [*call.ints, *call.kernel.floats]:
        kind = "float" if isinstance(number, Float) else "bool" if number.is_flag else "int"
        keywords.append(f"{number.name}: {f'Sequence[{kind}]' if number.is_list else kind}")
    return params, keywords + [f"{operand.name}: {tile} | None = None" for operand in call.optional]


def _python_doc(call: Call) -> str:
    lines = ["", "", "Args:"]
    for operand in [*call.operands, *call.optional]:
        sizes = f"`[{', '.join(operand.sizes)}]`, " if operand.sizes else ""
        dtypes = " or ".join(
            ", ".join(call.kernel.types) if dtype == "dt" else dtype for dtype in operand.dtypes
        )
        role = {"in": "read", "out": "overwritten", "inout": "read and written"}[operand.role]
        packed = {True: ", in panels", None: ", in rows or panels", False: ""}[operand.packed]
        listed = "a list of tiles, " if operand.is_list else ""
        absent = "; may be absent" if operand.optional else ""
        lines.append(f"    {operand.name}: {listed}{sizes}{dtypes}{packed}; {role}{absent}.")
    for number in [*call.ints, *call.kernel.floats]:
        kind = "a float" if isinstance(number, Float) else "whether" if number.is_flag else "an integer"
        lines.append(f"    {number.name}: {'a list' if number.is_list else kind}, as the kernel declares.")
    return "\n".join(f"    {line}".rstrip() if line else "" for line in lines) + "\n"


def _tuple(items: Iterable[str]) -> str:
    items = list(items)
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


# ---- the program ----


def main(native: Path, output: Path, names: list[str]) -> int:
    """Write all files; returns the exit status."""
    try:
        calls = [
            Call(kernel)
            for name in names
            for kernel in read_source(native, name).kernels
            if not kernel.internal
        ]
        table = rules(calls)
    except DeclarationError as error:
        print(error, file=sys.stderr)
        return 1
    write(output / "tiles" / "rules_table.h", table)
    write(output / "tilewise" / "tile" / "kernels.h", c_header(calls))
    write(output / "tilewise" / "tile" / "kernels.hpp", cpp_header(calls))
    write(output / "tile" / "functions.py", python_module(calls))
    write(output / "tensor" / "functions.py", tensor_module(call for call in calls if call.kernel.each))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
