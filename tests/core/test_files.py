"""Files that we write: whole or not at all, never through a planted link, for the owner alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyv4_kvdequant import files


@pytest.mark.parametrize(("group_readable", "mode"), [(False, 0o600), (True, 0o640)])
def test_a_file_is_readable_by_its_owner_unless_the_group_is_let_in(
    group_readable: bool, mode: int, tmp_path: Path
) -> None:
    before = os.umask(0)
    try:
        files.write_whole(tmp_path / "file", b"content", group_readable=group_readable)
        files.make_folder(tmp_path / "folder", group_readable=group_readable)
    finally:
        os.umask(before)
    assert (tmp_path / "file").read_bytes() == b"content"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) & 0o007 == 0


def test_a_link_at_the_files_name_is_replaced_and_its_target_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "file").symlink_to(target)
    files.write_whole(tmp_path / "file", b"new")
    assert target.read_text() == "precious"
    assert (tmp_path / "file").read_bytes() == b"new"
    assert not (tmp_path / "file").is_symlink()


def test_a_link_at_the_temporary_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if somebody could foresee the name."""
    target = tmp_path / "target"
    target.write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda _length: "foreseen")
    (tmp_path / ".foreseen.partial").symlink_to(target)
    with pytest.raises(FileExistsError):
        files.write_whole(tmp_path / "file", b"new")
    assert target.read_text() == "precious"
    assert not (tmp_path / "file").exists()


def test_what_cannot_be_written_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()  # a folder cannot be replaced by a file
    with pytest.raises(OSError, match="file"):
        files.write_whole(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@given(text=st.text(max_size=400) | st.sampled_from(["", ".", "..", "/etc/passwd", "a" * 300, "\ud800", "[/]l0", "\0"]))
def test_any_text_makes_a_legal_part_of_a_file_name(text: str) -> None:
    part = files.file_part(text)
    assert 0 < len(f"x{part}".encode()) <= 65
    assert "/" not in part
    assert "\0" not in part
    assert part.isascii()


def test_two_texts_stay_two_and_plain_ones_stay_as_they_are() -> None:
    texts = ["a/b", "a_b", "a b", "x" * 64, "x" * 65, "x" * 66, "", "layer"]
    assert len({files.file_part(text) for text in texts}) == len(texts)
    assert files.file_part("model.layers.0.self_attn.attn") == "model.layers.0.self_attn.attn"


def test_a_forked_process_has_another_name() -> None:
    ours = files.process_name()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, files.process_name().encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reading, 100).decode()
    assert theirs != ours == files.process_name()
