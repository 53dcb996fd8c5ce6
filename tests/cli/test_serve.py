"""Wrong uses of `patchkv serve`. What it serves is tested in tests/server."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchkv_agents.cli.main import main


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--host", "example.org"], "--api-key"),
        (["--api-key", "short"], "fewer than 8"),
        (["--api-key", "a:long-enough", "--api-key", "b:long-enough"], "twice"),
        (["--api-keys-file", "{folder}/none"], "cannot be read"),
        (["--api-keys-file", "{folder}/empty"], "no API keys"),
        (["--policy", "hopeful"], "hopeful"),
        (["--recovery-profile", "{folder}/none"], "there is no profile"),
        (["--recovery-profile", "{folder}/empty"], "not JSON"),
        (["--shadow", "1.5"], "--shadow"),
    ],
)
def test_refuses_to_start(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").write_text("# none yet\n")
    with pytest.raises(SystemExit) as caught:
        main(["serve", "no-such-model", *(part.format(folder=tmp_path) for part in options)])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert not printed.out
