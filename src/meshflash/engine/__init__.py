"""The engine: a spec (a call without its tensors) is compiled once to an executable, which runs on any such tensors.

`spec`, `compile`, `executable`, `op` and `cache` are the path of a call; the other modules serve executables.
"""
