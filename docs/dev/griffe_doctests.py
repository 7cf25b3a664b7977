"""Griffe extension of mkdocs.yml: show the doctests of docstrings as code on the reference pages.

Griffe takes doctests for code only in a section "Examples:". Elsewhere Markdown would turn `>>>` into block quotes and
`[...][...]` into links.
"""

import re
from typing import Any

import griffe

#: A doctest with its output: lines from `>>>` on, up to an empty line or the end of the docstring.
DOCTEST = re.compile(r"^>>> .+(?:\n.+)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Put every doctest of every docstring into a code fence. mkdocstrings makes one and calls it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object after Griffe has loaded it.

        Args:
            obj: The module, class, function or attribute.
        """
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
