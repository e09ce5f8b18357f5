"""Hooking a host's module when it is imported, once, and checking that it is the code we know."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import wrapt

from hyv4_kvdequant.contract import HostError
from hyv4_kvdequant.hosts.revisions import Revision, class_signatures, match_revision, signature_text

logger = logging.getLogger(__name__)

_hooked: set[str] = set()


def on_import(module_name: str, hook: Callable[[ModuleType], None]) -> None:
    """Runs `hook` when the module is imported, or now if it has been. A module is hooked once, however often asked."""
    if module_name in _hooked:
        return
    _hooked.add(module_name)

    def run(module: ModuleType) -> None:
        try:
            hook(module)
        except Exception:
            # wrapt forgets a hook before it runs it, and a host that tries the import again must fail again.
            # It is registered anew as for a module that is not there, which this one will not be.
            sys.modules.pop(module_name, None)
            wrapt.register_post_import_hook(run, module_name)
            raise

    if module_name in sys.modules:
        hook(sys.modules[module_name])
    else:
        wrapt.register_post_import_hook(run, module_name)


def find_class(module: ModuleType, name: str) -> type[Any]:
    """The class `name` of a host's module; HostError when it is not there."""
    found = getattr(module, name, None)
    if not inspect.isclass(found):
        raise HostError(_unknown(module, f"it has no class {name}."))
    return found


def check_callable(module: ModuleType, owner: type[Any], name: str, arguments: int) -> None:
    """Raises HostError unless `owner.name`, which we only call, takes so many arguments by position."""
    method = getattr(owner, name, None)
    if not callable(method):
        raise HostError(_unknown(module, f"{owner.__name__} has no method {name}."))
    try:
        inspect.signature(method).bind(*range(arguments))
    except TypeError as error:
        raise HostError(
            _unknown(module, f"{owner.__name__}.{name} takes ({signature_text(method)}), not {arguments} arguments.")
        ) from error


def find_revision(
    module: ModuleType, owner: type[Any], known: Sequence[Revision], installed: str | None = None
) -> Revision:
    """The known revision that a host's class is.

    Args:
        module: the host's module, for the messages.
        owner: the class.
        known: the revisions that this release knows, oldest first.
        installed: the host and its installed version, for the log.

    Raises:
        HostError: a method is missing, or takes other arguments than in any known revision.
    """
    found = match_revision(class_signatures(owner, list(known[-1].signatures)), known, owner.__name__)
    if isinstance(found, str):
        raise HostError(_unknown(module, found))
    logger.info("%s is the revision of %s (installed: %s)", owner.__name__, found.versions, installed)
    return found


def _unknown(module: ModuleType, what: str) -> str:
    return (
        f"VLLM_HCU_HYV4_FP8_KV_DEQUANT is on, but {module.__name__} is not a revision this release of hyv4-kvdequant "
        f"knows: {what}\nWhat to do: use a vLLM between 0.29.0 and 0.34.0 (or a vllm_hcu made for one), upgrade "
        "hyv4-kvdequant, or unset VLLM_HCU_HYV4_FP8_KV_DEQUANT to run the host's own fp8 kernel."
    )


def wrap(owner: type[Any], name: str, wrapper: Callable[..., Any]) -> None:
    """Wraps `owner.name` with a wrapt wrapper, on the class itself, so that its base classes stay as they are."""
    wrapt.wrap_function_wrapper(owner, name, wrapper)
