"""Finding LightOp's op, once per process. LightOp is imported here and nowhere else, and only when asked for.

What is known of LightOp, from public code that calls it: the op stands in the raw namespace `lightop.op`, and ops move
from there to public categories (`lightop.attention` and others, each with an `__all__`) from release to release.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.metadata
import inspect
import pkgutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch

PACKAGE = "lightop"
RAW_NAMESPACE = f"{PACKAGE}.op"
OP_NAME = "decode_gather_and_up_convert_with_indices"
ARGUMENTS = ("cache_u8", "indices", "out", "valid_lengths", "compact_indices", "tokens_per_request")
"""What this backend always passes, by position. The names are those of public callers; a build may use others."""
REUSE = "reuse_compact_indices"
_OPTIONAL = ("dedup_table", REUSE)

# An import may also end in SystemExit, and a vendor library may raise anything.
_IMPORT_FAILURES = (Exception, SystemExit)


@dataclass(frozen=True)
class Resolution:
    """What was found, or the reason why nothing usable was.

    Attributes:
        version: of the installed distribution, or None where there is none.
        op: fills `out` and `compact_indices` in place; None when there is a reason.
        found_in: the module that has the op.
        accepts_reuse: the op takes the keyword `reuse_compact_indices`.
        reason: one sentence on what is wrong and one on the remedy; None when the op is usable.
    """

    version: str | None
    op: Callable[..., object] | None = None
    found_in: str | None = None
    accepts_reuse: bool = False
    reason: str | None = None


_lock = threading.Lock()


def resolve() -> Resolution:
    """The op or the reason for its absence. Never raises; the outcome holds for the rest of the process."""
    with _lock:
        return _resolve_once()


@cache
def _resolve_once() -> Resolution:
    version = _installed_version()
    # A library that prints while it is imported must not end up in somebody's JSON.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            package = importlib.import_module(PACKAGE)
        except ModuleNotFoundError as error:
            # Without this name it is a dependency of LightOp that is missing.
            missing = error.name == PACKAGE
            return Resolution(version, reason=_missing(version) if missing else _does_not_load(version, PACKAGE, error))
        except _IMPORT_FAILURES as error:
            return Resolution(version, reason=_does_not_load(version, PACKAGE, error))
        return _search(package, version)


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def _search(package: ModuleType, version: str | None) -> Resolution:
    likely, unlikely = _public_modules(package)
    failures: dict[str, BaseException] = {}
    for name in (PACKAGE, *likely, RAW_NAMESPACE, *unlikely):
        try:
            op = _op_in(name, package)
        except _IMPORT_FAILURES as error:
            failures[name] = error
            continue
        if op is not None:
            return _check_signature(op, name, version)
    for name in (*likely, RAW_NAMESPACE):
        if name in failures:
            return Resolution(version, reason=_does_not_load(version, name, failures[name]))
    return Resolution(version, reason=_has_no_op(version, package, failures))


def _public_modules(package: ModuleType) -> tuple[list[str], list[str]]:
    """The package's own public modules: those that may list the op, and those whose source does not even mention it.

    The second are imported only before giving up, so that no more of LightOp is loaded than the op needs.
    """
    likely: list[str] = []
    unlikely: list[str] = []
    for info in pkgutil.iter_modules(getattr(package, "__path__", [])):
        name = f"{PACKAGE}.{info.name}"
        if not info.name.startswith("_") and name != RAW_NAMESPACE:
            source = _source(info, name)
            (likely if source is None or OP_NAME in source else unlikely).append(name)
    return likely, unlikely


def _source(info: pkgutil.ModuleInfo, name: str) -> str | None:
    """The module's source text, or None where there is none to read (a compiled module)."""
    try:
        spec = info.module_finder.find_spec(name, None)
        loader = spec.loader if spec is not None else None
        return loader.get_source(name) if isinstance(loader, importlib.abc.InspectLoader) else None
    except Exception:
        return None


def _op_in(name: str, package: ModuleType) -> Callable[..., object] | None:
    """The op if the module `name` has it: listed in `__all__`, or as an attribute of the raw namespace."""
    if name == RAW_NAMESPACE:
        op: Callable[..., object] | None = getattr(_raw_namespace(package), OP_NAME, None)
        return op
    module = importlib.import_module(name)
    return getattr(module, OP_NAME, None) if OP_NAME in getattr(module, "__all__", ()) else None


def _raw_namespace(package: ModuleType) -> object:
    try:
        return importlib.import_module(RAW_NAMESPACE)
    except ModuleNotFoundError as error:
        if error.name != RAW_NAMESPACE:
            raise
        # Not a module of its own: perhaps a namespace object that the package made.
        return getattr(package, "op", None)


def _check_signature(op: Callable[..., object], found_in: str, version: str | None) -> Resolution:
    try:
        signature = inspect.signature(op)
    except (ValueError, TypeError):
        # A built-in that does not tell its signature is the six-argument build.
        return Resolution(version, op, found_in)
    problem = _signature_problem(signature)
    if problem:
        return Resolution(version, reason=_unknown_signature(version, found_in, signature, problem))
    reuse = signature.parameters.get(REUSE)
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return Resolution(version, op, found_in, accepts_reuse=reuse is not None and reuse.kind in by_keyword)


def _signature_problem(signature: inspect.Signature) -> str | None:
    """Why six positional arguments would not mean to this op what they mean to us, or None."""
    try:
        signature.bind(*ARGUMENTS)
    except TypeError as error:
        return str(error)
    for position, name in enumerate(signature.parameters):
        moved = name in ARGUMENTS and ARGUMENTS.index(name) != position
        if moved or (name in _OPTIONAL and position < len(ARGUMENTS)):
            return f"{name} is parameter {position + 1}"
    return None


def _label(version: str | None) -> str:
    return f"LightOp {version}" if version else "LightOp (version unknown: no distribution metadata)"


def _missing(version: str | None) -> str:
    if version:
        what = f"The distribution {PACKAGE} {version} is installed, but it holds no package {PACKAGE!r}."
    else:
        what = f"LightOp is not installed: there is no package {PACKAGE!r} in {sys.prefix}."
    return f"{what} Install Hygon's LightOp for this DTK and PyTorch {torch.__version__}; it is on no package index."


def _does_not_load(version: str | None, name: str, cause: BaseException) -> str:
    return (
        f"{_label(version)} is installed but does not load: importing {name!r} raised {type(cause).__name__}: {cause}. "
        f"Make the libraries it was built against visible (DTK, LD_LIBRARY_PATH), or install the LightOp build made "
        f"for PyTorch {torch.__version__}."
    )


def _has_no_op(version: str | None, package: ModuleType, failures: dict[str, BaseException]) -> str:
    where = getattr(package, "__file__", None) or list(getattr(package, "__path__", []))
    unseen = "".join(f" {name} could not be looked into ({cause})." for name, cause in failures.items())
    return (
        f"{_label(version)} ({where}) has no {OP_NAME}: no public module lists it and {RAW_NAMESPACE} lacks it."
        f"{unseen} Upgrade LightOp to a release that has it."
    )


def _unknown_signature(version: str | None, found_in: str, signature: inspect.Signature, problem: str) -> str:
    return (
        f"{_label(version)}: the signature of {found_in}.{OP_NAME} is {signature}, not one this backend knows "
        f"({problem}); it passes {', '.join(ARGUMENTS)} by position. "
        "Install a LightOp release that takes these, or a hyv4-kvdequant release made for this one."
    )
