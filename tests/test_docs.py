"""The documents that say what there is are held to it: the wire protocol, the public API, the README, the links."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from monarch._core import causes
from monarch._wire import messages
from sources import parsed

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "runtime" / "monarch"
PROTOCOL = (ROOT / "docs" / "wire-protocol.md").read_text(encoding="utf-8")
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def _dotted(path: Path) -> list[str]:
    """The parts of the name of a module."""
    parts = ["monarch", *path.relative_to(PACKAGE).with_suffix("").parts]
    return parts[:-1] if parts[-1] == "__init__" else parts


PUBLIC = sorted(
    ".".join(parts) for parts in map(_dotted, PACKAGE.rglob("*.py")) if not any(part.startswith("_") for part in parts)
)
MESSAGES = get_args(messages.AnyMessage)


def sections(text: str, mark: str) -> dict[str, str]:
    """The parts of a page by heading, for headings of one depth."""
    parts = re.split(rf"^{mark} (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def first_column(section: str) -> list[str]:
    """Return the names in backticks in the first column of the tables of a part."""
    return re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)


def readme_code() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))


def test_each_message_of_the_wire_is_documented() -> None:
    found = {heading for heading in sections(PROTOCOL, "###") if heading[0].isdigit()}
    assert found == {f"{each.__struct_config__.tag} {each.__name__}" for each in MESSAGES}


def test_all_messages_are_of_the_union() -> None:
    made = {each for each in vars(messages).values() if inspect.isclass(each) and issubclass(each, messages.Message)}
    assert made - {messages.Message} == set(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_the_fields_of_a_message_are_documented_in_order(message: Any) -> None:
    section = sections(PROTOCOL, "###")[f"{message.__struct_config__.tag} {message.__name__}"]
    assert first_column(section) == list(message.__struct_fields__)


def test_the_protocol_says_its_version() -> None:
    assert f"version {messages.VERSION}." in PROTOCOL


def test_names_that_are_imported_late_are_listed() -> None:
    """Tab in a notebook offers what ``dir`` lists."""
    for name in PUBLIC:
        module = importlib.import_module(name)
        assert set(getattr(module, "__all__", ())) <= set(dir(module)), name


def test_each_public_module_is_in_the_api_page() -> None:
    assert [heading.strip("`") for heading in sections(API, "##")] == PUBLIC


@pytest.mark.parametrize("module", PUBLIC)
def test_the_api_page_names_what_a_module_exports(module: str) -> None:
    named = first_column(sections(API, "##")[f"`{module}`"])
    assert sorted(named) == sorted(importlib.import_module(module).__all__)


def test_what_the_readme_imports_is_exported() -> None:
    imports = re.findall(r"^from (monarch\S*) import (.+)$", readme_code(), flags=re.MULTILINE)
    assert imports
    for module, names in imports:
        assert {name.strip() for name in names.split(",")} <= set(importlib.import_module(module).__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_named_in_pages_exist(page: Path) -> None:
    """Links between pages, headings that they lead to, and paths to files of the source."""
    text = page.read_text(encoding="utf-8")
    missing: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            missing.append(target)
        elif anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            if anchor not in slugs:
                missing.append(target)
    for name in re.findall(r"`(\w+(?:/\w+)*/\w+\.py)`", text):
        if not any((base / name).exists() for base in (ROOT, PACKAGE, PACKAGE.parent)):
            missing.append(name)
    assert not missing


@functools.cache
def members_of_classes() -> dict[str, set[str]]:
    """The methods and attributes of each class of the packages, with those of the base classes that are named."""
    members: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "monarch_kernel").rglob("*.py")]:
        for each in ast.walk(parsed(path)):
            if isinstance(each, ast.ClassDef):
                names = members.setdefault(each.name, set())
                bases.setdefault(each.name, set()).update(ast.unparse(base).split("[")[0] for base in each.bases)
                names.update(inner.name for inner in ast.walk(each) if isinstance(inner, ast.FunctionDef))
                names.update(inner.attr for inner in ast.walk(each) if isinstance(inner, ast.Attribute))
                names.update(inner.id for inner in ast.walk(each) if isinstance(inner, ast.Name))
    return {name: names.union(*(members.get(base, set()) for base in bases[name])) for name, names in members.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_methods_named_in_pages_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md" or page.parent.name == "decisions":
        # They tell what was.
        return
    members = members_of_classes()
    named = re.findall(r"`([A-Z]\w+)\.(\w+)", page.read_text(encoding="utf-8"))
    missing = [f"{name}.{member}" for name, member in named if name in members and member not in members[name]]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_pages_are_in_the_file_beside_them(page: Path) -> None:
    """As in `Gather` (`_node/replies/gather.py`)."""
    if page.name == "CHANGELOG.md" or page.parent.name == "decisions":
        # They tell what was.
        return
    missing: list[str] = []
    for name, file in re.findall(r"`([\w.]+)(?:\(\))?`\s+\(`([\w/]+\.py)`", page.read_text(encoding="utf-8")):
        path = next((base / file for base in (ROOT, PACKAGE, PACKAGE.parent) if (base / file).exists()), None)
        word = re.escape(name.rpartition(".")[2])
        if path is not None and not re.search(rf"\b{word}\b", path.read_text(encoding="utf-8")):
            missing.append(f"{name} in {file}")
    assert not missing


def test_files_of_the_front_end_are_listed() -> None:
    page = (ROOT / "docs" / "labextension.md").read_text(encoding="utf-8")
    files = {f"src/{path.name}" for path in (ROOT / "labextension" / "src").glob("*.ts") if ".spec." not in path.name}
    assert files == set(re.findall(r"`(src/\w+\.ts)`", sections(page, "##")["Layout"]))


def test_parts_of_a_node_are_listed() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = set(first_column(sections(page, "##")["A node and its parts"]))
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    used = {name for text in sources for name in re.findall(r"\.(?:find_)?part\(([A-Z_]\w+)\)", text)}
    assert used
    assert {name for name in listed if not name.startswith("node.")} == used


def test_causes_of_death_are_listed() -> None:
    section = sections(sections(PROTOCOL, "###")["9 Dead"], "####")["Causes of death"]
    rows = re.findall(r"^\| (\d+) \| (\w+) \|(.*)\|$", section, flags=re.MULTILINE)
    listed = [(int(tag), name, re.findall(r"`(\w+)`", fields)) for tag, name, fields in rows]
    kinds = get_args(causes.Cause)
    assert listed == [(kind.__struct_config__.tag, kind.__name__, list(kind.__struct_fields__)) for kind in kinds]


def test_statuses_of_replies_are_listed() -> None:
    row = next(line for line in sections(PROTOCOL, "###")["3 Reply"].splitlines() if line.startswith("| `status`"))
    listed = {int(number) for number in re.findall(r"\b(\d): ", row)}
    assert listed == {messages.RESULT, messages.ERROR, messages.FAILED, messages.STOPPED}


def test_fields_of_a_failure_are_listed() -> None:
    section = re.search(r"a packed \*\*Failure\*\*(.*?)\n###", PROTOCOL, flags=re.DOTALL)
    assert section is not None
    listed = [name for name in re.findall(r"`(\w+)`", section[1])]
    assert listed[: len(messages.Failure.__struct_fields__)] == list(messages.Failure.__struct_fields__)


def test_glossary_gives_a_word_one_meaning() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| \*\*([^*]+)\*\* \|", page, flags=re.MULTILINE)
    assert words
    assert not {word for word in words if words.count(word) > 1}


@pytest.mark.slow
def test_the_readmes_example_runs(program: Any) -> None:
    out = program(readme_code()).ok()
    assert "108" in out
    assert "\n105\n" in out and "]\n" in out
