"""The command line under test: every `meshflash` command, and `benchmarks NAME` for `python -m benchmarks NAME`."""

from __future__ import annotations

import copy

from benchmarks.__main__ import app as benchmarks_app
from meshflash.cli import app as meshflash_app

app = copy.copy(meshflash_app)
app.registered_groups = list(meshflash_app.registered_groups)
app.add_typer(benchmarks_app, name="benchmarks")
