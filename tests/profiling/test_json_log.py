"""The log of a run: it goes on from whole lines, and leaves what is not its own alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from patchkv_agents.errors import InputError
from patchkv_agents.profiling.json_log import JsonLog

HEAD = {"schema": 1, "of": "test"}
FIRST = json.dumps(HEAD) + "\n"


def number(line):
    return int(line["number"])


def test_lines_are_read_again_and_a_torn_one_is_dropped(tmp_path: Path):
    path = tmp_path / "work" / "log.jsonl"
    JsonLog(path, HEAD).append([{"number": 1}, {"number": 2}])
    with path.open("a") as file:
        file.write('{"number": ')
    log = JsonLog(path, HEAD)
    assert log.read(number) == [1, 2]
    log.append([{"number": 3}])
    assert JsonLog(path, HEAD).read(number) == [1, 2, 3]


def test_a_torn_head_is_written_again(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_text(FIRST[:7])
    assert JsonLog(path, HEAD).read(number) == []
    assert path.read_text() == FIRST


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("notes of somebody", "another run"),
        ('{"schema": 2}\n', "schema, of"),
        ("5\n", "damaged"),
        (FIRST + "[1]\n", "damaged"),
        (FIRST + "{\n", "damaged"),
    ],
)
def test_what_is_no_log_of_this_run_is_refused_and_left_alone(tmp_path: Path, content, told):
    path = tmp_path / "log.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=told):
        JsonLog(path, HEAD)
    assert path.read_text() == content


@pytest.mark.parametrize("line", ["{}", '{"number": "x"}', '{"number": null}'])
def test_lines_of_another_form_are_damage(tmp_path: Path, line):
    path = tmp_path / "log.jsonl"
    path.write_text(FIRST + line + "\n")
    with pytest.raises(InputError, match="damaged: delete it"):
        JsonLog(path, HEAD).read(number)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path):
    (tmp_path / "work").write_text("a file")
    with pytest.raises(InputError, match="choose another --out"):
        JsonLog(tmp_path / "work" / "log.jsonl", HEAD)
