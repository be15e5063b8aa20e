"""``python -m monarch_kernel.views.typescript`` prints ``labextension/src/protocol.ts``, made of ``protocol.py``."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, get_args

import msgspec.inspect as msgspec
from msgspec import NODEFAULT

from monarch_kernel.views import protocol
from monarch_kernel.views.states import LOOKS, StateStyle

_WIDTH = 80
"""Columns of a comment."""
_ALIASES = {frozenset(get_args(getattr(protocol, name))): name for name in ("State", "Action")}
"""Names of literal types, by their values."""
_LOOK = list(StateStyle.__annotations__)
_PLAIN = {
    msgspec.StrType: "string",
    msgspec.IntType: "number",
    msgspec.FloatType: "number",
    msgspec.BoolType: "boolean",
    msgspec.NoneType: "null",
    msgspec.AnyType: "unknown",
}
_HEAD = "// Generated from monarch_kernel/views/protocol.py by `python -m monarch_kernel.views.typescript`.\n"


def text() -> str:
    """Return the file."""
    structs = [msgspec.type_info(each) for each in _structs()]
    comments = _comments(inspect.getsource(protocol))
    head = _HEAD + "\n".join(_comment(inspect.getdoc(protocol) or "", ""))
    parts = [head, *_constants(comments), *_aliases(), _looks(), *(_interface(each, comments) for each in structs)]
    return "\n\n".join([*parts, _defaults(structs), *_unions()]) + "\n"


def _structs() -> list[type]:
    return [each for each in vars(protocol).values() if _is_struct(each) and not each.__name__.startswith("_")]


def _is_struct(each: object) -> bool:
    return isinstance(each, type) and each.__module__ == protocol.__name__


# Parts of the file


def _constants(comments: dict[str, str]) -> Iterator[str]:
    for name in ("TARGET", "VERSION", "SPAN_SECONDS", "ALIVE_SECONDS", "MOST_SPANS", "DISPLAY"):
        value = _literal(getattr(protocol, name))
        yield "\n".join([*_comment(comments[name], ""), f"export const {name} = {value};"])


def _aliases() -> Iterator[str]:
    for values, name in _ALIASES.items():
        ordered = [each for each in get_args(getattr(protocol, name)) if each in values]
        yield f"export type {name} =" + "".join(f"\n  | {_literal(each)}" for each in ordered) + ";"


def _looks() -> str:
    fields = "".join(f"\n  {name}: string;" for name in _LOOK)
    rows = [f"  {state}: {{ {_pairs(dict(zip(_LOOK, look, strict=True)))} }}" for state, look in LOOKS.items()]
    comment = "/** How a state is shown, with its colours on light and dark pages. */"
    return (
        f"{comment}\nexport interface Look {{{fields}\n}}\n\nexport const LOOKS: Record<State, Look> = {{\n"
        + ",\n".join(rows)
        + "\n};"
    )


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {_literal(value)}" for name, value in values.items())


def _interface(struct: Any, comments: dict[str, str]) -> str:
    name = struct.cls.__name__
    lines = [*_comment(struct.cls.__doc__ or "", ""), f"export interface {name} {{"]
    if struct.tag is not None:
        lines.append(f"  {struct.tag_field}: {_literal(struct.tag)};")
    for field in struct.fields:
        lines += _comment(comments.get(f"{name}.{field.name}", ""), "  ")
        lines.append(f"  {field.encode_name}{'' if field.required else '?'}: {_type(field.type)};")
    return "\n".join([*lines, "}"])


def _defaults(structs: list[Any]) -> str:
    rows: list[str] = []
    for struct in structs:
        values = {field.encode_name: _default(field) for field in struct.fields if not field.required}
        if values:
            rows.append(f"  {struct.cls.__name__}: {{ {_pairs(values)} }}")
    return "/** Values of fields that a message leaves out. */\nexport const DEFAULTS = {\n" + ",\n".join(rows) + "\n};"


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not NODEFAULT else field.default


def _unions() -> Iterator[str]:
    for name in ("FromKernel", "FromView"):
        members = [each.__name__ for each in get_args(getattr(protocol, name))]
        yield f"export type {name} =" + "".join(f"\n  | {each}" for each in members) + ";"


# Types, values and comments


def _type(info: Any) -> str:
    """Return a type of msgspec as one of TypeScript."""
    match info:
        case msgspec.LiteralType():
            return _ALIASES.get(frozenset(info.values)) or " | ".join(_literal(each) for each in info.values)
        case msgspec.ListType():
            item = _type(info.item_type)
            return f"({item})[]" if " | " in item else f"{item}[]"
        case msgspec.DictType():
            return f"Record<string, {_type(info.value_type)}>"
        case msgspec.UnionType():
            return " | ".join(_type(each) for each in info.types)
        case msgspec.StructType():
            return info.cls.__name__
        case _:
            return _PLAIN[type(info)]


def _literal(value: Any) -> str:
    """Return a plain value as TypeScript, with single quotes around text."""
    if isinstance(value, str):
        return "'" + json.dumps(value, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"
    return json.dumps(value)


def _comment(text: str, indent: str) -> list[str]:
    words = " ".join(text.replace("``", "`").split())
    if not words:
        return []
    if len(words) <= _WIDTH - len(indent) - 7:
        return [f"{indent}/** {words} */"]
    lines = textwrap.wrap(words, _WIDTH - len(indent) - 3)
    return [f"{indent}/**", *(f"{indent} * {line}" for line in lines), f"{indent} */"]


def _comments(source: str) -> dict[str, str]:
    """Return the string below each assignment, by name or by class and name."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            found.update({f"{node.name}.{name}": text for name, text in _below(node.body)})
    found.update(_below(ast.parse(source).body))
    return found


def _below(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for before, node in pairwise(body):
        match before, node:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, text
            case _:
                pass


if __name__ == "__main__":
    print(text(), end="")
