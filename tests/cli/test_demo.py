"""`patchkv demo`: the whole line on the embedded model, and what users may get wrong."""

from __future__ import annotations

import json
import re

import pytest

from patchkv_agents.cli.main import main
from patchkv_agents.engine import Engine

DEEP = json.dumps([{"role": "user", "content": "x", "e": None}]).replace(
    "null", "[" * 900 + "]" * 900
)
METHODS = ["full_prefill", "prefix_cache", "direct_reuse", "patchkv"]
METHOD_FIELDS = {
    "resume_ttft_ms",
    "planning_ms",
    "restore_ms",
    "recompute_ratio",
    "repair_ratio",
    "first_token_kl",
    "top1_agree",
    "exact_continuation",
    "answer",
}


@pytest.fixture
def loaded(monkeypatch, smollm2_model, smollm2_tokenizer):
    """The embedded model, loaded once for all tests."""
    engine = Engine(smollm2_model, smollm2_tokenizer)
    monkeypatch.setattr(Engine, "from_pretrained", lambda name, **options: engine)


def run(capsys, *arguments):
    """Exit status, standard output and standard error of `patchkv demo`."""
    with pytest.raises(SystemExit) as exit:
        main(["demo", *map(str, arguments)])
    captured = capsys.readouterr()
    return exit.value.code, captured.out, captured.err


def conversation(tmp_path, name, *contents, roles=("system", "user", "tool", "user")):
    path = tmp_path / name
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=True)
    ]
    path.write_text(json.dumps({"messages": messages}))
    return path


def test_the_demo_as_promised(loaded, capsys):
    """4,000 tokens, edit at one fifth: at most 12 % of the rows, first-token KL at most 0.02,
    the answer of the full prefill, and a prefix cache that is the full prefill."""
    status, out, _ = run(capsys, "--json")
    assert status in (0, None)
    document = json.loads(out)
    assert set(document) == {
        "model",
        "tokens_old",
        "tokens_new",
        "edit",
        "plan",
        "methods",
        "speedup_vs_prefix_cache",
    }
    assert document["tokens_new"] >= 4000
    edit = document["edit"]
    assert edit["kind"] == "replace_tool_result" and edit["old_index"] == edit["new_index"]
    start = edit["hunks"][0]["new"][0]
    assert 0.17 < start / document["tokens_new"] < 0.23
    assert list(document["methods"]) == METHODS
    assert all(set(method) == METHOD_FIELDS for method in document["methods"].values())
    assert sum(document["plan"].values()) == document["tokens_new"]

    patchkv = document["methods"]["patchkv"]
    assert patchkv["recompute_ratio"] <= 0.12
    assert patchkv["first_token_kl"] <= 0.02
    assert patchkv["top1_agree"]
    assert (
        "Pier 9" in patchkv["answer"] and "Pier 9" in document["methods"]["full_prefill"]["answer"]
    )
    exact = document["methods"]["prefix_cache"]
    assert exact["recompute_ratio"] == 1 and exact["first_token_kl"] < 1e-6
    assert exact["exact_continuation"]
    assert document["methods"]["direct_reuse"]["recompute_ratio"] < 0.04
    # Loose on purpose, since machines are shared; `make bench` measures it.
    assert document["speedup_vs_prefix_cache"] > 2


def test_for_people_it_shows_versions_edit_plan_methods_and_answers(loaded, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(capsys, "--tokens", 900, "--rounds", 2)
    assert status in (0, None)
    for expected in (
        "Versions",
        "replace_tool_result: message",
        "restored: before the edit",
        "Pier 9",
    ):
        assert expected in out
    for method in METHODS:
        assert re.search(rf"^ {method.replace('_', ' ')} +[\d,]+ ", out, flags=re.M)
    assert "\x1b" not in out  # no colour codes where there is no terminal


def test_your_own_conversations(loaded, capsys, tmp_path):
    filler = "The museum opens at nine and closes at five. " * 30
    old = conversation(tmp_path, "old.json", "Be brief.", "Pier 4. " + filler, filler, "Which?")
    new = conversation(tmp_path, "new.json", "Be brief.", "Pier 9. " + filler, filler, "Which?")
    status, out, _ = run(capsys, "--old", old, "--new", new, "--json")
    document = json.loads(out)
    assert status in (0, None)
    assert document["edit"]["new_index"] == 1
    assert document["plan"]["restored"] > 0


def test_identical_contexts_cost_one_token(loaded, capsys, tmp_path):
    """Complete blocks were stored with loss, and are not called exact; the last rows are."""
    path = conversation(tmp_path, "same.json", "Be brief.", "Hello " * 60, "A result.", "Which?")
    _, out, _ = run(capsys, "--old", path, "--new", path, "--json")
    document = json.loads(out)
    tokens = document["tokens_new"]
    plan = document["plan"]
    assert plan["tail"] == 1 and plan["prefix"] + plan["restored"] == tokens - 1
    assert plan["restored"] == tokens // 32 * 32 > 0
    assert document["edit"]["hunks"] == [] and document["edit"]["kind"] is None
    assert document["methods"]["prefix_cache"]["first_token_kl"] < 1e-6
    assert document["methods"]["patchkv"]["first_token_kl"] < 0.02
    _, out, _ = run(capsys, "--old", path, "--new", path)
    assert "the same: all rows are there, one token is computed" in out
    assert "right but for the bits of storage" in out


def test_a_context_beyond_the_models_limit(loaded, capsys, tmp_path):
    old = conversation(tmp_path, "old.json", "Be brief.", "Hi", "word " * 9000, "Which?")
    status, out, err = run(capsys, "--old", old, "--new", old)
    assert status == 2 and out == ""
    assert "8192 tokens" in err and "shorten" in err


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{not json", "JSON"),
        ('{"messages": []}', "messages"),
        ('{"messages": [{"content": "x"}]}', "role"),
        ('{"messages": "hello"}', "list"),
        ("3", "list of objects"),
        (
            '{"messages": [{"role": "user", "content": "x", "e": %s}]}' % ("[" * 900 + "]" * 900),
            "deep",
        ),
        ("[" * 200_000, "deep"),
    ],
)
def test_files_that_are_no_conversation(capsys, tmp_path, text, complaint):
    path = tmp_path / "bad.json"
    path.write_text(text)
    status, out, err = run(capsys, "--old", path, "--new", path)
    assert status == 2 and out == ""
    assert complaint in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--old", "a.json"], "--old and --new belong together"),
        (["--old", "a.json", "--new", "b.json", "--tokens", 2000], "leave it out"),
        (["--old", "missing.json", "--new", "missing.json"], "missing.json"),
        (["--rounds", 0], "rounds"),
        (["--tokens", "many"], "tokens"),
        (["--model", "no/such/model at all"], "no/such/model"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--model", __file__], "is a file"),
    ],
)
def test_wrong_arguments(capsys, tmp_path, monkeypatch, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *arguments)
    assert status == 2 and out == ""
    assert complaint in err and "Traceback" not in err


def test_lengths_that_the_episode_cannot_have(loaded, capsys):
    for tokens, complaint in ((10, "shorter than"), (100_000, "ask for --tokens 8168")):
        status, _, err = run(capsys, "--tokens", tokens)
        assert status == 2 and complaint in err
