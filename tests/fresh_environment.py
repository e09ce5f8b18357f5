"""A Python environment with our wheel and no trace of the checkout, as a new user has it.

Third-party libraries are links to those of the environment that runs the tests (torch is too large to copy);
hyv4-kvdequant itself, and every plugin, is really built and really installed by pip.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLUGINS = Path(__file__).parent / "plugins"
_COMMANDS = ("pip", "pytest")


@dataclass(frozen=True)
class FreshEnvironment:
    """The environment's folder. Commands run in a scratch folder beside it, as a shell would run them."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "env" / "bin" / "python"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def run(self, *command: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of this environment; never raises for its exit status."""
        return subprocess.run(
            command, cwd=cwd or self.work, env=self.environ(**env), capture_output=True, text=True, check=False
        )

    def succeed(self, *command: str, cwd: Path | None = None, **env: str) -> str:
        """Runs a command that must succeed; returns its standard output."""
        done = self.run(*command, cwd=cwd, **env)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def environ(self, **env: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
        return {
            **kept,
            "PATH": f"{self.python.parent}:/usr/bin:/bin",
            "COLUMNS": "200",
            "OMP_NUM_THREADS": "1",  # tiny inputs; a second thread only costs
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this as --no-build-isolation: hatchling is already there
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_QUIET": "1",
            **env,
        }

    @contextmanager
    def installed(self, *plugins: str) -> Iterator[None]:
        """pip-installs plugins of `tests/plugins`, by folder name, for the length of a `with` block."""
        self.succeed("pip", "install", "--no-deps", *(str(PLUGINS / plugin) for plugin in plugins))
        try:
            yield
        finally:
            self.succeed("pip", "uninstall", "--yes", *(plugin.replace("_", "-") for plugin in plugins))


def make_fresh_environment(folder: Path) -> FreshEnvironment:
    """Builds our wheel and installs it into a new environment under `folder`."""
    fresh = FreshEnvironment(folder)
    fresh.work.mkdir(parents=True)
    env = folder / "env"
    _run(sys.executable, "-m", "venv", "--without-pip", str(env))
    (site,) = env.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(str(_link_libraries(folder / "libraries")))
    for command in _COMMANDS:
        script = fresh.python.with_name(command)
        script.write_text(f'#!/bin/sh\nexec {fresh.python} -m {command} "$@"\n')
        script.chmod(0o755)
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    fresh.succeed("pip", "install", "--no-deps", str(wheel))
    return fresh


def _link_libraries(folder: Path) -> Path:
    """Links to every installed library but ours; `.pth` files, which could lead back to the checkout, stay out."""
    folder.mkdir()
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for library in Path(site).iterdir():
            if "hyv4" not in library.name and library.suffix != ".pth":
                (folder / library.name).symlink_to(library)
    return folder


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> FreshEnvironment:
    return make_fresh_environment(tmp_path_factory.mktemp("fresh"))
