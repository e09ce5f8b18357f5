"""Hooking a host's module when it is imported, once, and checking that it is the code we know."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from hyv4_kvdequant.contract import HostError

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
        raise HostError(_unknown(module, f"it has no class {name}"))
    return found


def check_method(module: ModuleType, owner: type[Any], name: str, parameters: tuple[str, ...]) -> None:
    """Raises HostError unless `owner.name` exists and takes these parameters, more with defaults allowed."""
    method = getattr(owner, name, None)
    if not callable(method):
        raise HostError(_unknown(module, f"{owner.__name__} has no method {name}"))
    given = inspect.signature(method).parameters
    extra = list(given)[len(parameters) :]
    optional = all(given[key].default is not inspect.Parameter.empty for key in extra)
    if tuple(given)[: len(parameters)] != parameters or not optional:
        raise HostError(
            _unknown(
                module,
                f"{owner.__name__}.{name} takes ({', '.join(given)}), expected ({', '.join(parameters)})",
            )
        )


def _unknown(module: ModuleType, what: str) -> str:
    return (
        f"VLLM_HCU_HYV4_FP8_KV_DEQUANT is on, but {module.__name__} is not a revision this release of hyv4-kvdequant "
        f"knows: {what}.\nWhat to do: use a vLLM between 0.29.0 and 0.33.0 (or a vllm_hcu made for one), upgrade "
        "hyv4-kvdequant, or unset VLLM_HCU_HYV4_FP8_KV_DEQUANT to run the host's own fp8 kernel."
    )


def wrap(owner: type[Any], name: str, wrapper: Callable[..., Any]) -> None:
    """Wraps `owner.name` with a wrapt wrapper, on the class itself, so that its base classes stay as they are."""
    wrapt.wrap_function_wrapper(owner, name, wrapper)
