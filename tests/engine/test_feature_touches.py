"""A feature of attention is named by the public calls, the spec, the contract and the kernels, and nowhere else.

`softcap` stands for all features that are a number. A file mentions it if an identifier or a string of its code
contains it; docstrings and comments do not count.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import meshflash

SOURCE = Path(meshflash.__file__).parent
FEATURE = "softcap"
#: The files that must mention the feature, or folders whose files may, by their role.
ROLES = {
    "public calls and their checks": ("api.py", "arguments.py"),
    "spec": ("engine/spec.py",),
    "kernel contract": ("kernels/contract.py",),
    "kernels and their launch code": (
        "kernels/reference.py",
        "kernels/tiled.py",
        "kernels/triton/",
        "kernels/hopper/",
        "kernels/vendor/",
    ),
    "cases of the oracle and the suite": ("check/oracle.py", "check/suite.py"),
    "signatures of other projects": ("integrations/compat/", "integrations/transformers/"),
}


def words(source: str) -> set[str]:
    """Return all identifiers and strings of a module's code, without its docstrings."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node) is not None and isinstance(node.body[0], ast.Expr)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) not in docstrings:
            found.update(value for _, value in ast.iter_fields(node) if isinstance(value, str))
            if isinstance(node, ast.Global | ast.Nonlocal):
                found.update(node.names)
    return found


def mentions(folder: Path, word: str) -> list[str]:
    """Return the Python files of a folder whose code contains a word in any case, as paths from the folder."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if any(word in found.lower() for found in words(path.read_text()))
    )


def unexpected_and_missing(found: list[str]) -> tuple[list[str], list[str]]:
    """Return the files that no role allows, and the places of `ROLES` in which no file mentions the feature."""
    places = [place for role in ROLES.values() for place in role]
    unexpected = [path for path in found if not any(_is_in(path, place) for place in places)]
    missing = [place for place in places if not any(_is_in(path, place) for path in found)]
    return unexpected, missing


def _is_in(path: str, place: str) -> bool:
    return path.startswith(place) if place.endswith("/") else path == place


def test_softcap_is_named_only_where_a_feature_belongs():
    found = mentions(SOURCE, FEATURE)
    unexpected, missing = unexpected_and_missing(found)
    roles = "\n".join(f"  {role}: {', '.join(places)}" for role, places in ROLES.items())
    assert not unexpected, f"{unexpected} mention {FEATURE!r}; pass the spec or Features on instead of it.\n{roles}"
    assert not missing, f"no file mentions {FEATURE!r} in {missing}; if it moved, change ROLES.\n{roles}"


def test_engine_names_softcap_only_in_its_spec():
    assert mentions(SOURCE / "engine", FEATURE) == ["spec.py"]


@pytest.mark.parametrize(
    "line",
    [
        "softcap = 0.0",
        "def f(softcap): ...",
        "f(softcap=1.0)",
        "spec.softcap",
        "fields = ['softcap']",
        "text = f'a softcap of {x}'",
        "kernel(SOFTCAP=True)",
        "def softcap_slope(): ...",
        "from kernels import softcap_slope as slope",
        "class Softcap: ...",
        "def f():\n    global softcap",
    ],
)
def test_mention_in_another_engine_file_is_found(tmp_path, line):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "binding.py").write_text(f'"""Steps."""\n{line}\n')
    assert mentions(tmp_path, FEATURE) == ["engine/binding.py"]
    assert unexpected_and_missing(mentions(tmp_path, FEATURE))[0] == ["engine/binding.py"]


def test_docstrings_and_comments_do_not_count(tmp_path):
    (tmp_path / "memory.py").write_text(
        '"""softcap"""\n\n\nclass A:\n    """softcap"""\n\n    def f(self):\n        """softcap"""  # softcap\n'
    )
    assert mentions(tmp_path, FEATURE) == []
