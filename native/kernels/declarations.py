"""Reads the declarations of kernels, which stand in the native sources above the kernels' code, and
writes what the build and the Python package make from them.

A declaration is a comment:

    // kernel rms_norm  f32 bf16
    //   out y[m d]
    //   out rstd:f32[m h]
    //   in x[m d], gamma[1 g]
    //   float eps, offset
    //   flops 4 * m * d
    //   bytes 2 * item * m * d

The first line has the kernel's name and its dtypes. The full names are `rms_norm_f32` and
`rms_norm_bf16`; a kernel without dtypes has its name alone. `bf16=ProductBF16` names the C++ type
that stands for a dtype, if it is not the dtype's own. A line that is indented by more than three
spaces continues the line before it. The other lines, in the order of a call's operands and attributes:

    in, out, inout   operands, written `name[:dtype][!|~][...][?][[rows cols]]`
      :dtype         element type: the kernel's own (`dt`, if not written), f32, f64, i32, bf16 or `dt|f32`
      ! ~            stored in panels; stored in panels or in rows
      ...            a list of operands; adjacent lists alternate: a0, w0, a1, w1
      ?              may be absent
      [m n]          rows and columns; equal names have equal sizes, a number is that size, `_` is any, and `k*`
                     is a size of its own for every member of a list
    int, flag        integers, which are int64_t or bool in C++. `range...(2*n)` is a list of 2 * n integers.
                     `n=count(a)` is computed and never passed: the length of list a. So are `wide=f32(out)`,
                     whether the elements of operand out are f32, and `is_packed=packed(w)`, whether operand w is
                     stored in panels. Lists follow all other integers.
    float, double    floats, as the C++ type; the last one may be a list, `constant...`
    let n = ...      a name for an expression, for the lines below
    require ...      a condition on sizes, extents such as `x.rows`, and integers; tile calls (native/tiles) check it
    within range a   the only list of integers is begins and ends of k splits in the columns of operand a, per split and
                     per member if a is a list; tile calls check it. `within range a even`: those of bf16 begin at
                     even columns
    each m d         sizes whose elements are computed independently: a call may cover any part of them
    internal ...     why only tile programs can call the kernel: there is no tile call of it
    flops, bytes     the cost of a call. FLOPs count a multiply-add as two, and an exp or a division as one. Bytes
                     are those that a call reads and writes at least once.
    scratch          upper bound of the bytes of scratch memory, over all instruction-set levels and dtypes

Costs are Python expressions over sizes of operands, integers, and the dims in `COST_DIMS`; `item` is
the element size of the dtype. Scratch memory is an expression over integers (a list of integers is
a sequence) and extents such as `x.rows`. `// define name(a, b) = ...` outside of declarations, in the
source or in a header that it includes, defines a function for the expressions.

A kernel that computes elements of its outputs from the same elements of its inputs, and so has `each m d`, has a
short form:

    // kernel scale  f32 bf16: out out, in x, float factor, 1 flop per element

For each source, `kernels/declared/SOURCE.h` declares a struct per kernel, here `RmsNormKernel`, whose
members are the operands and attributes by name. The kernel's code is the struct's `run()`.
`kernels/declared/SOURCE_entries.h` is the table of these kernels, and `kernels/declared/families.h`
lists the tables. `declared.py` is the data from which `tilewise.kernels.table` makes the table in
Python. Files that do not change keep their time.

Usage: declarations.py NATIVE_FOLDER OUTPUT_FOLDER SOURCE...
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from pathlib import Path
from typing import NoReturn

TYPES = {"f32": "float", "bf16": "bf16", "f64": "double", "i32": "int32_t"}
COST_DIMS = ("m", "d", "k", "seq", "inputs", "states", "steps", "length", "item")  # of plan/costs.py
BUILTINS = ("abs", "bit_length", "len", "max", "min", "sum", "zip")  # bit_length(n) is n.bit_length()
RESERVED = ("row_begin", "scratch", "run", "fits", "args")  # other members of a kernel's struct

_HEAD = re.compile(r"// kernel +(.*)")
_NAMED = re.compile(r"([a-z]\w*)((?: +[\w=]+)*) *(?:: *(.+))?")
_LINE = re.compile(r"//( {3,})(\S.*)")
_DEFINE = re.compile(r"// define +(\w+)\(([\w, ]*)\) *= *(.+)")
_INCLUDE = re.compile(r'#include "(kernels/[\w/]+\.h)"')
_OPERAND = re.compile(r"([a-z]\w*)(?::([\w|]+))?([!~])?(\.\.\.)?(\?)?(?:\[(.*)\])?")
_INTEGER = re.compile(r"([a-z]\w*)(?:=(\w+)\((\w+)\)|(\.\.\.)(?:\((.*)\))?)?")
_FLOAT = re.compile(r"([a-z]\w*)(\.\.\.)?")
_SIZE = re.compile(r"_|\d+|[a-z]\w*\*?")
_PER_ELEMENT = re.compile(r"(\d+) flops? per element")

Place = tuple[Path, int]


class DeclarationError(Exception):
    """A mistake in a declaration: the file, the line, and the rule that it breaks."""

    def __init__(self, place: Place, message: str) -> None:
        super().__init__(f"{place[0]}:{place[1]}: error: {message}")


@dataclass(frozen=True)
class Operand:
    """One operand; the fields but `place` are those of `tilewise.kernels.OperandSpec`."""

    place: Place
    name: str
    role: str
    dtypes: tuple[str, ...] = ("dt",)
    packed: bool | None = False
    optional: bool = False
    is_list: bool = False
    sizes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Integer:
    """One integer; `source`, `is_list` and `length` are as in `tilewise.kernels.IntSpec`."""

    place: Place
    name: str
    source: tuple[str, str] | None
    is_list: bool
    length: tuple[str, ...]
    is_flag: bool


@dataclass(frozen=True)
class Float:
    """One float, of a C++ type."""

    place: Place
    name: str
    is_list: bool
    type: str


@dataclass(frozen=True)
class Expression:
    """An expression of a declaration. `params` are those of a function that `// define` defines."""

    place: Place
    text: str
    params: tuple[str, ...] = ()


@dataclass
class Kernel:
    """One declaration."""

    place: Place
    base: str
    types: dict[str, str]  # the C++ type of each dtype
    operands: list[Operand] = field(default_factory=list)
    ints: list[Integer] = field(default_factory=list)
    floats: list[Float] = field(default_factory=list)
    lets: dict[str, Expression] = field(default_factory=dict)
    costs: dict[str, Expression] = field(default_factory=dict)  # flops, bytes and scratch
    requires: list[Expression] = field(default_factory=list)
    each: tuple[str, ...] = ()
    within: tuple[str, bool] | None = None  # the operand, and whether bf16 splits begin at even columns
    internal: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.base}_{dtype}" for dtype in self.types) or (self.base,)

    @property
    def struct(self) -> str:
        return "".join(word.capitalize() for word in self.base.split("_")) + "Kernel"

    @property
    def lists(self) -> list[Operand]:
        return [operand for operand in self.operands if operand.is_list]


@dataclass(frozen=True)
class Source:
    """The kernels that a source declares, and the functions that their expressions can use."""

    family: str
    kernels: tuple[Kernel, ...]
    functions: Mapping[str, Expression]

    @property
    def entries(self) -> str:
        return self.family.replace("/", "_") + "_entries"


def fail(place: Place, rule: str, got: object, remedy: str = "") -> NoReturn:
    """Raise the error that names a rule, and the text that breaks it."""
    raise DeclarationError(place, f"{rule}; got {got!r}" + (f"; {remedy}" if remedy else ""))


# ---- reading ----


def read_source(native: Path, family: str) -> Source:
    """Read and check the declarations of `kernels/FAMILY.cc`.

    Raises:
        DeclarationError: a declaration has a mistake.
    """
    path = native / "kernels" / f"{family}.cc"
    lines = path.read_text(encoding="utf-8").splitlines()
    functions: dict[str, Expression] = {}
    for name in _INCLUDE.findall("\n".join(lines)):
        if (native / name).is_file():
            functions.update(
                _definitions(native / name, (native / name).read_text(encoding="utf-8").splitlines())
            )
    functions.update(_definitions(path, lines))
    kernels = tuple(_kernels(path, lines))
    if not kernels:
        fail((path, 1), "a source of FAMILIES in CMakeLists.txt must declare kernels", family)
    for kernel in kernels:
        _check(kernel)
    return Source(family, kernels, functions)


def _definitions(path: Path, lines: list[str]) -> Iterator[tuple[str, Expression]]:
    for index, line in enumerate(lines):
        if line.startswith("// define "):
            after = takewhile(bool, (_LINE.fullmatch(more) for more in lines[index + 1 :]))
            text = " ".join([line, *(more[2] for more in after if more)])
            match = _DEFINE.fullmatch(text)
            if match is None:
                fail((path, index + 1), "a definition must be `// define name(a, b) = expression`", text)
            yield match[1], Expression((path, index + 1), match[3], tuple(match[2].replace(",", " ").split()))


def _kernels(path: Path, lines: list[str]) -> Iterator[Kernel]:
    number = 0
    while number < len(lines):
        match = _HEAD.fullmatch(lines[number])
        number += 1
        if match is None:
            continue
        place = (path, number)
        kernel, short = _head(place, match[1])
        if short:
            _read_short(kernel, place, short)
        items: list[tuple[Place, str]] = []
        while number < len(lines) and (line := _LINE.fullmatch(lines[number])):
            number += 1
            if len(line[1]) > 3 and items:
                items[-1] = (items[-1][0], f"{items[-1][1]} {line[2]}")
            else:
                items.append(((path, number), line[2]))
        after = lines[number] if number < len(lines) else ""
        if after.startswith("//") and not after.startswith("///"):
            fail((path, number + 1), "lines of a declaration must be `//`, three spaces and text", after)
        for where, text in items:
            _read_line(kernel, where, text)
        yield kernel


def _head(place: Place, text: str) -> tuple[Kernel, str | None]:
    match = _NAMED.fullmatch(text)
    if match is None:
        fail(place, "a declaration must begin with `// kernel name dtype...`", text)
    types = {}
    for word in match[2].split():
        dtype, _, type_ = word.partition("=")
        if dtype not in TYPES or dtype in types or ("=" in word and not type_):
            fail(
                place, f"a kernel's dtypes must be different ones of {', '.join(TYPES)}, or dtype=type", word
            )
        types[dtype] = type_ or TYPES[dtype]
    return Kernel(place, match[1], types), match[3]


def _read_short(kernel: Kernel, place: Place, text: str) -> None:
    """Read the short form, in which all operands have the same rows and columns."""
    *items, last = (item.strip() for item in text.split(","))
    match = _PER_ELEMENT.fullmatch(last)
    if match is None:
        fail(place, "a short declaration must end with `N flops per element`", last)
    for item in items:
        word, _, rest = item.partition(" ")
        if word in ("in", "out", "inout"):
            _read_line(kernel, place, f"{word} {rest}[m d]")
        elif word in ("float", "double"):
            _read_line(kernel, place, item)
        else:
            fail(place, "a short declaration must consist of in, out, inout, float and double", item)
    kernel.each = ("m", "d")
    kernel.costs["flops"] = Expression(place, f"{match[1]} * m * d")
    kernel.costs["bytes"] = Expression(place, f"{len(kernel.operands)} * m * d * item")


def _read_line(kernel: Kernel, place: Place, text: str) -> None:
    word, _, rest = text.partition(" ")
    if word in ("in", "out", "inout"):
        kernel.operands += [_operand(place, word, item) for item in _items(rest)]
    elif word in ("int", "flag"):
        kernel.ints += [_integer(place, item, word == "flag") for item in _items(rest)]
    elif word in ("float", "double"):
        kernel.floats += [_float(place, item, word) for item in _items(rest)]
    elif word == "let":
        name, _, expression = (part.strip() for part in rest.partition("="))
        if not re.fullmatch(r"[a-z]\w*", name) or not expression or name in kernel.lets:
            fail(place, "a name must be given once, as `let name = expression`", text)
        kernel.lets[name] = Expression(place, expression)
    elif word == "require":
        kernel.requires.append(Expression(place, rest.strip()))
    elif word == "within":
        kernel.within = _within(kernel, place, rest)
    elif word == "each":
        kernel.each = tuple(rest.split())
        for size in kernel.each:
            if not any(size in operand.sizes for operand in kernel.operands):
                fail(place, "`each` must name sizes of operands, after the lines of operands", size)
    elif word == "internal":
        if not rest.strip():
            fail(place, "`internal` must say why only tile programs can call the kernel", text)
        kernel.internal = rest.strip()
    elif word in ("flops", "bytes", "scratch"):
        if word in kernel.costs:
            fail(place, f"a declaration must have one line `{word}`", text)
        kernel.costs[word] = Expression(place, rest.strip())
    else:
        words = "in, out, inout, int, flag, float, double, let, require, within, each, internal, "
        words += "flops, bytes or scratch"
        fail(place, f"a line of a declaration must begin with {words}", text)


def _within(kernel: Kernel, place: Place, text: str) -> tuple[str, bool]:
    name, operand, even = [*text.split(), "", "", ""][:3]
    lists = [number.name for number in kernel.ints if number.is_list]
    if lists != [name] or operand not in {o.name for o in kernel.operands} or even not in ("", "even"):
        rule = "`within` must name the kernel's only list of integers and an operand, after their lines"
        fail(place, rule, text)
    return operand, even == "even"


def _items(text: str) -> list[str]:
    """The parts of a list separated by commas."""
    return [item.strip() for item in text.split(",")]


def _operand(place: Place, role: str, text: str) -> Operand:
    match = _OPERAND.fullmatch(text.replace(" [", "["))
    if match is None:
        fail(place, "an operand must be written name[:dtype][!|~][...][?][[rows cols]]", text)
    name, dtypes, packed, dots, optional, sizes = match.groups()
    names = tuple((dtypes or "dt").split("|"))
    if any(dtype not in (*TYPES, "dt") for dtype in names):
        fail(place, f"an operand's dtype must be dt, {' or '.join(TYPES)}", text)
    extents = tuple(sizes.split()) if sizes is not None else ()
    if sizes is not None and (len(extents) != 2 or not all(_SIZE.fullmatch(size) for size in extents)):
        fail(place, "an operand's size must be [rows cols], each a name, a number or _", text)
    if any(size.endswith("*") for size in extents) and not dots:
        fail(place, "a size of its own for every member, such as `k*`, must belong to a list", text)
    if dots and optional:
        fail(place, "a list of operands must not be optional: it may be empty", text)
    storage = {"!": True, "~": None}.get(packed, False)
    return Operand(place, name, role, names, storage, optional is not None, dots is not None, extents)


def _integer(place: Place, text: str, is_flag: bool) -> Integer:
    match = _INTEGER.fullmatch(text)
    if match is None or (match[2] and match[2] not in ("count", "f32", "packed")):
        rule = "an integer must be written name, name...(length), name=count(list), name=f32(operand) or "
        fail(place, rule + "name=packed(operand)", text)
    name, kind, operand, dots, length = match.groups()
    if is_flag and (dots or kind == "count"):
        fail(place, "a flag must be one truth value", text, "declare an int")
    factors = tuple(factor.strip() for factor in length.split("*")) if length else ()
    return Integer(place, name, (kind, operand) if kind else None, dots is not None, factors, is_flag)


def _float(place: Place, text: str, type_: str) -> Float:
    match = _FLOAT.fullmatch(text)
    if match is None:
        fail(place, "a float must be written name or name...", text)
    if match[2] and type_ == "float":
        fail(place, "a list of floats must be double, as calls pass it", text)
    return Float(place, match[1], match[2] is not None, type_)


# ---- checks of a whole declaration ----


def _check(kernel: Kernel) -> None:
    for line in ("flops", "bytes"):
        if line not in kernel.costs:
            fail(kernel.place, f"a declaration must have a line `{line}`", kernel.base)
    if not kernel.operands:
        fail(kernel.place, "a kernel must have operands", kernel.base)
    seen: set[str] = set()
    items: list[Operand | Integer | Float] = [*kernel.operands, *kernel.ints, *kernel.floats]
    for item in items:
        if item.name in seen or item.name in RESERVED:
            fail(item.place, f"a name must be used once, and not be {', '.join(RESERVED)}", item.name)
        seen.add(item.name)
    groups = [group for group in groupby(kernel.operands, key=lambda o: o.is_list) if group[0]]
    if len(groups) > 1:
        fail(kernel.lists[-1].place, "lists of operands must be adjacent", kernel.lists[-1].name)
    for operand in kernel.operands:
        if "dt" in operand.dtypes and not kernel.types:
            fail(operand.place, "an operand of a kernel without dtypes must have a dtype", operand.name)
    _check_ints(kernel)
    for number in kernel.floats[:-1]:
        if number.is_list:
            fail(number.place, "a list of floats must be the last of the floats", number.name)


def _check_ints(kernel: Kernel) -> None:
    lists = [number.name for number in kernel.ints if number.is_list]
    before: set[str] = set()
    has_list = False
    for number in kernel.ints:
        if number.source is not None:
            kind, name = number.source
            operand = next((o for o in kernel.operands if o.name == name), None)
            if operand is None or operand.is_list != (kind == "count"):
                wanted = "a list of operands" if kind == "count" else "an operand that is no list"
                fail(number.place, f"{kind}(...) must name {wanted}", name)
        if number.is_list and not number.length and number.name != lists[-1]:
            fail(number.place, "a list of integers must have a length unless it is the last", number.name)
        for factor in number.length:
            if not factor.isdigit() and factor not in before:
                fail(number.place, "a length must be a product of numbers and earlier integers", factor)
        if number.is_list:
            has_list = True
        elif has_list:
            fail(number.place, "lists of integers must follow all other integers", number.name)
        else:
            before.add(number.name)


# ---- expressions ----


class _Names(ast.NodeTransformer):
    """Replaces the names in an expression by what they mean in the generated module.

    Attributes:
        used: names of the domain, in the order of their first use.
        lets: names of `let` lines.
    """

    ALLOWED = (
        ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.Constant,
        ast.Name, ast.Subscript, ast.Slice, ast.GeneratorExp, ast.comprehension, ast.Tuple, ast.Attribute,
        ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context,
    )  # fmt: skip

    def __init__(
        self, place: Place, domain: Mapping[str, str], lets: Iterable[str], functions: Iterable[str]
    ) -> None:
        self.place, self.domain, self.functions = place, domain, set(functions)
        self.known_lets = set(lets)
        self.bound: set[str] = set()
        self.used: dict[str, None] = {}
        self.lets: dict[str, None] = {}

    def visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, self.ALLOWED):
            fail(
                self.place,
                "an expression must consist of arithmetic, conditions, calls and sums",
                ast.unparse(node),
            )
        visited: ast.AST = super().visit(node)
        return visited

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        self.bound |= {
            name.id
            for part in node.generators
            for name in ast.walk(part.target)
            if isinstance(name, ast.Name)
        }
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
        if name not in (*BUILTINS, *self.functions) or node.keywords:
            choices = ", ".join(sorted((*BUILTINS, *self.functions)))
            fail(self.place, f"a function must be one of {choices}", name, "write `// define` for others")
        node.args = [self.visit(argument) for argument in node.args]  # type: ignore[misc]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._meaning(ast.unparse(node))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.bound:
            return node
        if node.id in self.known_lets:
            self.lets[node.id] = None
            return node
        return self._meaning(node.id)

    def _meaning(self, name: str) -> ast.AST:
        if name not in self.domain:
            choices = ", ".join(sorted({*self.domain, *self.known_lets}))
            fail(self.place, f"a name in an expression must be one of {choices}", name)
        self.used[name] = None
        return ast.parse(self.domain[name], mode="eval").body


def _translate(
    expression: Expression, domain: Mapping[str, str], lets: Iterable[str], functions: Iterable[str]
) -> tuple[str, _Names]:
    try:
        tree = ast.parse(expression.text, mode="eval")
    except SyntaxError:
        fail(expression.place, "an expression must be valid Python", expression.text)
    names = _Names(expression.place, domain, lets, functions)
    return ast.unparse(names.visit(tree)), names


def _cost_domain(kernel: Kernel) -> dict[str, str]:
    sizes = (size.rstrip("*") for operand in kernel.operands for size in operand.sizes)
    named = [size for size in sizes if size != "_" and not size.isdigit()]
    ints = [number.name for number in kernel.ints if not number.is_list]
    return {name: f"_sizes[{name!r}]" for name in (*named, *ints, *COST_DIMS)}


def require_domain(kernel: Kernel) -> list[str]:
    """Names that a condition may use."""
    sizes = {size for operand in kernel.operands if not operand.is_list for size in operand.sizes}
    named = sorted(size for size in sizes if size != "_" and not size.isdigit())
    extents = [f"{o.name}.{extent}" for o in kernel.operands if not o.is_list for extent in ("rows", "cols")]
    return [*named, *(number.name for number in kernel.ints if not number.is_list), *extents]


def _scratch_domain(kernel: Kernel) -> dict[str, str]:
    domain = {number.name: f"_ints[{number.name!r}]" for number in kernel.ints}
    for operand in kernel.operands:
        if not operand.is_list:
            for place, extent in enumerate(("rows", "cols")):
                domain[f"{operand.name}.{extent}"] = f"_shapes[{operand.name!r}][{place}]"
    return domain


def _function(
    kernel: Kernel, line: str, domain: Mapping[str, str], functions: Iterable[str]
) -> tuple[list[str], _Names, set[str]]:
    """Statements that compute a line's value, the names that they use, and the `let` lines among
    them.
    """
    order = list(kernel.lets)
    text, names = _translate(kernel.costs[line], domain, order, functions)
    statements: dict[str, str] = {}
    wanted = [*names.lets]
    while wanted:
        name = wanted.pop()
        if name in statements:
            continue
        value, inner = _translate(kernel.lets[name], domain, order[: order.index(name)], functions)
        statements[name] = f"{name} = {value}"
        names.used.update(inner.used)
        wanted += inner.lets
    body = [statements[name] for name in order if name in statements]
    return [*body, f"return {text}"], names, set(statements)


# ---- what the Python package reads ----


def python_module(sources: Iterable[Source]) -> str:
    """The module `tilewise.kernels.declared`.

    Raises:
        DeclarationError: an expression has a mistake, or a name is declared twice.
    """
    functions: list[str] = []
    entries: list[str] = []
    defined: dict[str, Expression] = {}
    places: dict[str, Place] = {}
    for source in sources:
        for name, expression in source.functions.items():
            if defined.setdefault(name, expression) != expression:
                fail(expression.place, "a function must be defined once", name)
    for name, expression in defined.items():
        text, _ = _translate(expression, {p: p for p in expression.params}, (), defined)
        functions.append(f"def {name}({', '.join(expression.params)}):\n    return {text}")
    for source in sources:
        for kernel in source.kernels:
            for name in kernel.names:
                if name in places:
                    first = f"{places[name][0].name}:{places[name][1]}"
                    fail(kernel.place, f"a kernel must be declared once, but {first} declares it too", name)
                places[name] = kernel.place
            made, entry = _python_kernel(kernel, source.functions)
            functions += made
            entries.append(entry)
    return (
        '"""The declarations of the native kernels, as `tilewise.kernels.table` reads them. Generated by\n'
        'native/kernels/declarations.py when the package is built.\n"""\n\n\n'
        + "bit_length = int.bit_length\n\n\n"
        + "\n\n\n".join(functions)
        + "\n\n\nDECLARED = [\n"
        + "".join(entries)
        + "]\n"
    )


def _python_kernel(kernel: Kernel, functions: Mapping[str, Expression]) -> tuple[list[str], str]:
    made: list[str] = []
    dims: dict[str, None] = {}
    used_lets: set[str] = set()
    for line in ("flops", "bytes"):
        body, names, lets = _function(kernel, line, _cost_domain(kernel), functions)
        made.append(f"def {line}_of_{kernel.base}(_sizes):\n    " + "\n    ".join(body))
        dims.update(names.used)
        used_lets |= lets
    scratch = "None"
    if "scratch" in kernel.costs:
        body, _, lets = _function(kernel, "scratch", _scratch_domain(kernel), functions)
        scratch = f"scratch_of_{kernel.base}"
        made.append(f"def {scratch}(_ints, _shapes):\n    " + "\n    ".join(body))
        used_lets |= lets
    for condition in kernel.requires:
        _translate(condition, {name: name for name in require_domain(kernel)}, (), ())
    for name, expression in kernel.lets.items():
        if name not in used_lets:
            fail(expression.place, "a name must be used", name)
    dims.pop("item", None)
    fields = {
        "base": kernel.base,
        "names": kernel.names,
        "operands": [
            (o.name, o.role, o.dtypes, o.packed, o.optional, o.is_list, o.sizes) for o in kernel.operands
        ],
        "ints": [(i.name, i.source, i.is_list, i.length) for i in kernel.ints],
        "floats": tuple(f.name + ("..." if f.is_list else "") for f in kernel.floats),
        "dims": (*dims, "item"),
        "each": kernel.each,
        "internal": kernel.internal,
    }
    lines = [f"        {name!r}: {value!r},\n" for name, value in fields.items()]
    calls = {"flops": f"flops_of_{kernel.base}", "bytes": f"bytes_of_{kernel.base}", "scratch": scratch}
    lines += [f"        {name!r}: {value},\n" for name, value in calls.items()]
    return made, "    {\n" + "".join(lines) + "    },\n"


# ---- what the native sources include ----

_OPEN = "namespace tilewise::kernels::TILEWISE_ISA_NS {\nnamespace {\n"


def header(source: Source) -> str:
    """The structs of a source's kernels."""
    structs = "\n".join(_struct(kernel) for kernel in source.kernels)
    return (
        f"// Generated from native/kernels/{source.family}.cc by native/kernels/declarations.py.\n#pragma once\n"
        f'#include "kernels/operands.h"\n\n{_OPEN}\n{structs}\n'
        "}  // namespace\n}  // namespace tilewise::kernels::TILEWISE_ISA_NS\n"
    )


def entries(source: Source) -> str:
    """The table of a source's kernels."""
    lines = []
    for kernel in source.kernels:
        if not kernel.types:
            lines.append(f'    entry_of<{kernel.struct}>("{kernel.base}"),\n')
        for name, type_ in zip(kernel.names, kernel.types.values()):
            struct = f"{kernel.struct}<{type_}>" if len(kernel.types) > 1 else kernel.struct
            lines.append(f'    entry_of<{struct}>("{name}"),\n')
    return (
        f"// Generated from native/kernels/{source.family}.cc by native/kernels/declarations.py.\n#pragma once\n"
        f"{_OPEN}\nconstexpr Entry kEntries[] = {{\n{''.join(lines)}}};\n\n}}  // namespace\n\n"
        f"EntryList {source.entries}() {{ return {{kEntries, {len(lines)}}}; }}\n\n"
        "}  // namespace tilewise::kernels::TILEWISE_ISA_NS\n"
    )


def families(sources: Iterable[Source]) -> str:
    """The list of the tables."""
    names = " ".join(f"X(level, {source.entries})" for source in sources)
    return (
        "// Generated from native/kernels/CMakeLists.txt by native/kernels/declarations.py.\n#pragma once\n\n"
        f"#define TILEWISE_EACH_FAMILY(X, level) {names}\n"
    )


def _struct(kernel: Kernel) -> str:
    members, made = _tiles(kernel)
    more, counted = _numbers(kernel)
    members += more
    made += counted
    template = "template <class D>\n" if len(kernel.types) > 1 else ""
    members += ["int64_t row_begin;", "Scratch scratch;"]
    made += ["row_begin(args.row_begin)", "scratch(args.scratch)"]
    text = "".join(f"  {member}\n" for member in members)
    return (
        f"/// The call of `{kernel.base}`, declared in line {kernel.place[1]}.\n{template}struct {kernel.struct} {{\n"
        f"{text}\n  TILEWISE_MEMBER explicit {kernel.struct}(const KernelArgs& args)\n"
        f"      : {_joined(made)} {{}}\n  TILEWISE_MEMBER void run() const;\n"
        f"  static bool fits(const KernelArgs& args) {{\n    return {_fits(kernel)};\n  }}\n}};\n"
    )


def _joined(made: list[str]) -> str:
    return ",\n        ".join(made)


def _element(kernel: Kernel, operand: Operand) -> str | None:
    """The C++ type of an operand's elements; None if it has one of several."""
    if len(operand.dtypes) > 1:
        return None
    const = "const " if operand.role == "in" else ""
    if operand.dtypes[0] != "dt":
        return const + TYPES[operand.dtypes[0]]
    if len(kernel.types) > 1:
        return f"{const}ElementOf<D>"
    return const + next(iter(kernel.types.values()))


def _tiles(kernel: Kernel) -> tuple[list[str], list[str]]:
    """Members of the operands and their initializers."""
    members, made = [], []
    num_lists = len(kernel.lists)
    num_single = len(kernel.operands) - num_lists
    position, in_list = 0, 0  # operands so far: single ones, and lists
    for operand in kernel.operands:
        element = _element(kernel, operand)
        if operand.is_list:
            members.append(f"Tiles<{element}, {num_lists}> {operand.name};")
            made.append(f"{operand.name}(args.tiles + {position + in_list}, {_members(kernel)})")
            in_list += 1
            continue
        place = f"{position}" if in_list == 0 else f"args.num_tiles - {num_single - position}"
        members.append(f"Tile<{element}> {operand.name};" if element else f"TileView {operand.name};")
        made.append(f"{operand.name}(args.tiles[{place}])")
        position += 1
    return members, made


def _members(kernel: Kernel) -> str:
    """The length of a call's lists of operands."""
    num_lists = len(kernel.lists)
    count = f"args.num_tiles - {len(kernel.operands) - num_lists}"
    return count if num_lists == 1 else f"({count}) / {num_lists}"


def _numbers(kernel: Kernel) -> tuple[list[str], list[str]]:
    """Members of the integers and floats, and their initializers."""
    members, made = [], []
    place = "0"
    for number in kernel.ints:
        if number.is_list:
            last = number is kernel.ints[-1]
            size = _length(kernel, number)
            if last:
                size = f"args.num_ints - {place}" if place.isdigit() else f"args.num_ints - ({place})"
            members.append(f"Span<int64_t> {number.name};")
            made.append(f"{number.name}(args.ints + {place}, {size})")
            place += f" + {size}"
            continue
        is_bool = number.is_flag or (number.source is not None and number.source[0] != "count")
        members.append(f"{'bool' if is_bool else 'int64_t'} {number.name};")
        made.append(f"{number.name}(args.ints[{place}]{' != 0' if is_bool else ''})")
        place = f"{int(place) + 1}" if place.isdigit() else f"{place} + 1"
    for index, real in enumerate(kernel.floats):
        if real.is_list:
            members.append(f"Span<double> {real.name};")
            made.append(
                f"{real.name}({_after('args.floats', '+', index)}, {_after('args.num_floats', '-', index)})"
            )
        else:
            members.append(f"{real.type} {real.name};")
            made.append(f"{real.name}(static_cast<{real.type}>(args.floats[{index}]))")
    return members, made


def _after(value: str, operator: str, count: int) -> str:
    return f"{value} {operator} {count}" if count else value


def _length(kernel: Kernel, number: Integer) -> str:
    """The length of a list of integers. Integers outside of lists precede all lists."""
    places = {i.name: place for place, i in enumerate(kernel.ints)}
    factors = (f if f.isdigit() else f"args.ints[{places[f]}]" for f in number.length)
    return f"length_of({', '.join(factors)})"


def _fits(kernel: Kernel) -> str:
    """The condition that a call has as many operands and attributes as declared."""
    num_lists = len(kernel.lists)
    num_single = len(kernel.operands) - num_lists
    conditions = []
    if num_lists:
        conditions.append(f"args.num_tiles >= {num_single}")
        if num_lists > 1:
            conditions.append(f"(args.num_tiles - {num_single}) % {num_lists} == 0")
    else:
        conditions.append(f"args.num_tiles == {num_single}")
    num_ints = sum(not number.is_list for number in kernel.ints)
    lengths = [_length(kernel, number) for number in kernel.ints if number.length]
    is_open = any(number.is_list and not number.length for number in kernel.ints)
    if lengths:
        conditions.append(f"args.num_ints >= {num_ints}")
    conditions += [f"{length} >= 0" for length in lengths]
    total = " - ".join(["args.num_ints", *lengths])
    conditions.append(f"{total} {'>=' if is_open else '=='} {num_ints}")
    for place, number in enumerate(kernel.ints):
        if number.source is not None and number.source[0] == "count":
            conditions.append(f"args.ints[{place}] == {_members(kernel)}")
    num_floats = sum(not real.is_list for real in kernel.floats)
    conditions.append(f"args.num_floats {'==' if num_floats == len(kernel.floats) else '>='} {num_floats}")
    return " &&\n           ".join(conditions)


# ---- the program ----


def write(path: Path, text: str) -> None:
    """Write a file unless it has this content already, so that the build keeps what was made from it."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def main(native: Path, output: Path, names: list[str]) -> int:
    """Write all files; print the first mistake of every source. Returns the exit status."""
    sources, mistakes = [], []
    for name in names:
        try:
            sources.append(read_source(native, name))
            python_module(sources[-1:])
        except DeclarationError as error:
            mistakes.append(str(error))
    try:
        module = "" if mistakes else python_module(sources)
    except DeclarationError as error:
        mistakes.append(str(error))
    if mistakes:
        print("\n".join(mistakes), file=sys.stderr)
        return 1
    folder = output / "kernels" / "declared"
    for source in sources:
        write(folder / f"{source.family}.h", header(source))
        write(folder / f"{source.family}_entries.h", entries(source))
    write(folder / "families.h", families(sources))
    write(output / "declared.py", module)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
