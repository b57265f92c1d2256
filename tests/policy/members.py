"""How many members a class has: methods, fields, constants and nested types; friends and assertions are none.

Python classes are read with `ast`: names in the body, and fields that methods set on `self`. C and C++ classes are read
token by token: every declaration of the body counts (overloads each, declarators each), the members of an unnamed
struct or union as the outer class's own. Sources come from the caller; nothing is compiled.
"""

import ast
import re

TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/|^[ \t]*\#(?:\\\n|[^\n])*)
    |(?P<text>R"(?P<mark>\w*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])+')
    |(?P<token>\d[\w.']*|\w+|::|<<|->|<=>?|>=|[=!]=|&&|.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
CLOSING = {"(": ")", "[": "]", "{": "}"}
ATTRIBUTES = ("alignas", "__attribute__", "decltype", "explicit", "noexcept", "requires")
TYPES = ("class", "struct", "union", "enum")


def python_classes(tree):
    """Name and number of members of every class of a Python module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, len(_python_members(node))


def _python_members(node):
    members = {
        m.name for m in node.body if isinstance(m, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }
    for inner in ast.walk(ast.Module([m for m in node.body if not isinstance(m, ast.ClassDef)], [])):
        targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if (
                    isinstance(part, ast.Attribute)
                    and isinstance(part.value, ast.Name)
                    and part.value.id == "self"
                ):
                    members.add(part.attr)
                elif isinstance(part, ast.Name) and inner in node.body:
                    members.add(part.id)
    return members


def native_classes(text):
    """Name and number of members of every class, struct and union with a name of a C or C++ source."""
    tokens = [m["token"] or '""' for m in TOKEN.finditer(text) if m["skip"] is None]
    for at, token in enumerate(tokens):
        if token in TYPES[:3] and tokens[at - 1 : at] != ["enum"]:
            name, body = _head(tokens, at + 1)
            if name and body is not None:
                yield name, _native_members(tokens[body + 1 : _end(tokens, body)])


def _end(tokens, at):
    """The place of the bracket that closes the one at `at`."""
    opening, closing, depth = tokens[at], CLOSING[tokens[at]], 0
    for place in range(at, len(tokens)):
        depth += (tokens[place] == opening) - (tokens[place] == closing)
        if depth == 0:
            return place
    raise ValueError(f"{opening} is never closed")


def _head(tokens, at):
    """Name of the type whose keyword stands before `at`, and the place of its body's brace; None: it has no body."""
    name, angles, in_bases = "", 0, False
    while at < len(tokens):
        token = tokens[at]
        if token == "{" and angles <= 0:
            return name, at
        if token == "[" or (token in ("alignas", "__attribute__") and tokens[at + 1] == "("):
            at = _end(tokens, at if token == "[" else at + 1)
        elif token in "<>":
            if token == ">" and angles == 0:
                return name, None  # the end of a list of template parameters
            angles += 1 if token == "<" else -1
        elif token == ":":
            in_bases = True
        elif not in_bases and angles == 0 and not (re.match(r"\w", token) or token == "::"):
            return name, None
        elif not in_bases and angles == 0 and re.match(r"\w", token) and token != "final":
            if name and tokens[at - 1] != "::":
                return name, None  # a variable of that type
            name = token
        elif token == ";":
            return name, None
        at += 1
    return name, None


def _native_members(body):
    """Number of members that the tokens of a class's body declare."""
    count, at, types = 0, 0, set()
    while at < len(body):
        if body[at] in ("public", "private", "protected") and body[at + 1] == ":":
            at += 2
            continue
        declared, at = _declaration(body, at, types)
        count += declared
    return count


def _declaration(body, at, types):
    """Number of members that one declaration adds, and the place behind it."""
    if body[at] == "template":
        at = _behind_angles(body, at + 1)
    first, declarators, angles, is_function, is_value = at, 1, 0, False, False
    while at < len(body) and body[at] != ";":
        token = body[at]
        if token in TYPES and angles == 0 and first == at:
            return _nested_type(body, at, types)
        if token == "operator":
            is_function = True
            at += 1 if body[at + 1 : at + 3] != ["(", ")"] else 3
            while body[at] != "(":
                at += 1
            continue
        if token in CLOSING:
            is_attribute = body[at : at + 2] == ["[", "["] or body[at - 1] in ATTRIBUTES
            is_function |= token == "(" and angles == 0 and not is_value and not is_attribute
            at = _end(body, at)
            if is_attribute and first == at - 1:
                first = at + 1
            if token == "{" and is_function and body[at + 1 : at + 2] not in (["{"], [","]):
                break  # the body of a function, not a value in its list of initialisers
        elif token in ("inline", "static", "constexpr", "mutable", "const") and first == at:
            first += 1
        elif token in "<>":
            angles = max(0, angles + (1 if token == "<" else -1))
        elif token == "=":
            is_value = True
        elif token == "," and angles == 0 and not is_function:
            declarators, is_value = declarators + 1, False
        at += 1
    is_none = first >= len(body) or body[first] in (";", "friend", "static_assert")
    return (0 if is_none else declarators), at + 1


def _behind_angles(body, at):
    depth = 0
    while True:
        depth += (body[at] == "<") - (body[at] == ">")
        at += 1
        if depth == 0:
            return at


def _nested_type(body, at, types):
    """A nested type counts once, its declarators each; without name and declarator its members are the outer's."""
    is_enum = body[at] == "enum"
    name, brace = _head(body, at + 1 + (is_enum and body[at + 1] in ("class", "struct")))
    if brace is None:
        behind = body.index(";", at)
        is_forward = behind - at <= 2 + is_enum
        is_new = is_forward and name not in types
        types.update({name} if is_forward else ())
        return (int(is_new) if is_forward else 1), behind + 1
    end = _end(body, brace)
    behind = body.index(";", end)
    declarators = body[end + 1 : behind].count(",") + 1 if behind > end + 1 else 0
    is_new = bool(name) and name not in types
    types.add(name)
    inner = 1 if is_enum else _native_members(body[brace + 1 : end])
    return declarators + (int(is_new) if name else 0 if declarators else inner), behind + 1
