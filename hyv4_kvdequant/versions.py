"""Versions of the libraries that decide what runs, from their metadata; nothing is imported."""

from __future__ import annotations

import importlib.metadata

LIBRARIES = ("hyv4-kvdequant", "torch", "triton", "vllm", "vllm-hcu", "lightop")


def installed_version(distribution: str) -> str | None:
    """The installed version of a distribution, or None when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_versions() -> dict[str, str | None]:
    """`installed_version` of every library in `LIBRARIES`."""
    return {name: installed_version(name) for name in LIBRARIES}


def describe_versions() -> str:
    """`installed_versions` as one line."""
    return ", ".join(f"{name} {version or 'not installed'}" for name, version in installed_versions().items())
