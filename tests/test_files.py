"""Files that survive a crash, and where the cache is."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from patchkv_agents.errors import PatchKVError
from patchkv_agents.files import (
    append_json_lines,
    cache_folder,
    drop_torn_line,
    read_lines,
    write_atomic,
)

posix = pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")


@posix
def test_a_new_file_follows_the_umask_which_is_never_changed(tmp_path: Path) -> None:
    """The umask was read by setting it to 0 for a moment: other threads' files became writable for
    everybody. The umask belongs to the whole process and is left alone.
    """
    before = os.umask(0o027)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "umask", lambda mask: pytest.fail("the umask was changed"))
            write_atomic(tmp_path / "profile.json", "{}")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "profile.json").stat().st_mode) == 0o640


@posix
def test_a_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("old")
    path.chmod(0o604)
    write_atomic(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "half a character: \ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["profile.json"]


def test_a_torn_line_is_dropped_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append_json_lines(path, [{"n": 1}, {"text": "a\u2028b\rc"}])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"n": ')
    lines, torn = read_lines(path)
    assert len(lines) == 2 and torn == b'{"n": '
    drop_torn_line(path)
    assert path.read_bytes() == whole
    append_json_lines(path, [{"n": 3}])
    assert read_lines(path) == ([*lines, b'{"n": 3}'], b"")


def test_nothing_is_written_where_one_record_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with pytest.raises(ValueError, match="JSON"):
        append_json_lines(path, [{"n": 1}, {"n": float("nan")}])
    append_json_lines(path, [])
    assert not path.exists() and read_lines(path) == ([], b"")
    drop_torn_line(path)


@pytest.mark.skipif(sys.platform != "linux", reason="the place differs by platform")
def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("PATCHKV_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/me/.cache/patchkv")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/patchkv")
    monkeypatch.setenv("PATCHKV_CACHE", "~/mine")
    assert cache_folder() == Path("/home/me/mine")
    monkeypatch.setenv("PATCHKV_CACHE", "~nobody-of-this-name/mine")
    with pytest.raises(PatchKVError, match="set PATCHKV_CACHE"):
        cache_folder()
