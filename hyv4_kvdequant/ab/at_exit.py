"""What has to happen before a process ends, wherever hosts run their workers."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.util import Finalize

_BEFORE_CHILDREN_ARE_JOINED = 10


def call_at_exit(function: Callable[[], object]) -> Finalize:
    """Calls `function` when this process ends in order, unless the result is cancelled.

    `atexit` would miss workers that multiprocessing forked: they leave through `os._exit`, after its finalizers.
    """
    return Finalize(None, function, exitpriority=_BEFORE_CHILDREN_ARE_JOINED)
