"""Which generators the garbage collector has to close, since nobody else did."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def left_generators() -> Iterator[list[str]]:
    """The names of those that are left before their end, until the end of the block."""
    hooks, names = sys.get_asyncgen_hooks(), list[str]()

    def note(generator: Any) -> None:
        """Before the loop's own hook, which wakes it to close the generator."""
        names.append(generator.__qualname__)
        assert hooks.finalizer is not None, "a loop is running"
        hooks.finalizer(generator)

    sys.set_asyncgen_hooks(finalizer=note)
    try:
        yield names
    finally:
        gc.collect()
        sys.set_asyncgen_hooks(*hooks)
