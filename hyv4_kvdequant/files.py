"""Writing files that others may be reading, into folders that others may write to."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from contextlib import suppress
from functools import cache
from pathlib import Path

OWNER_ALONE, GROUP_TOO = 0o600, 0o640


def write_whole(path: Path, content: bytes, *, group_readable: bool = False) -> None:
    """Puts `content` at `path`, at once: a process that is killed at any point leaves what was there before, or all.

    What is at `path` is replaced, a link itself and not what it points to. The temporary file beside it has a name
    that nobody can foresee, is made exclusively, and is readable by its owner alone, or by the group too.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    partial = path.with_name(f".{secrets.token_hex(16)}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(partial, flags, OWNER_ALONE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if group_readable:
                os.fchmod(file.fileno(), GROUP_TOO)
            file.write(content)
            file.flush()
            # Without it a machine that loses power may keep the new name and lose the content.
            os.fsync(file.fileno())
        os.replace(partial, path)  # noqa: PTH105 - atomic on POSIX, which Path.replace does not promise by name
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    # Not every file system can; the file itself is written by now.
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(folder: Path, *, group_readable: bool = False) -> None:
    """Makes a folder that is not there, for its owner alone, or the group too; leaves one that is there as it is.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o750 if group_readable else 0o700, parents=True, exist_ok=True)


def file_part(text: str, longest: int = 64) -> str:
    """`text` as a part of a file name: ASCII letters, digits, `_`, `.` and `-`, at most `longest` (over 8) of them.

    Text that has to be changed for that ends in a hash of the whole, so that two texts stay two.
    """
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", text)
    if plain == text and 0 < len(text) <= longest:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{plain[: longest - 9]}-{digest}"


def encodable(text: str) -> str:
    """`text` as a file or a log can hold it: half a surrogate pair, which is no character, is written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def unique_name() -> str:
    """A name that nobody else gives, here or elsewhere, now or later: this process's id and eight random digits."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def process_name() -> str:
    """The same for this process as a whole; a forked child has another."""
    return _process_name(os.getpid())


@cache
def _process_name(_pid: int) -> str:
    return unique_name()
