"""`patchkv models`: the list, and the verdict on a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, LlamaConfig, PreTrainedConfig

from patchkv_agents.backends.transformers.families import FAMILIES, REFUSED_FAMILIES
from patchkv_agents.backends.transformers.verdict import SupportLevel, judge_config
from patchkv_agents.cli.main import main

from ..backends.transformers.families import HEADS, PUBLISHED, SIZES, rope


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as exit:
        main(["models", *argv])
    output = capsys.readouterr()
    assert exit.value.code == 0, output.err
    return output.out


def folder_of(config: PreTrainedConfig, folder: Path, **changes: Any) -> str:
    """A folder with nothing but a configuration, edited by hand."""
    config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return str(folder)


def test_the_list_names_every_family(capsys, monkeypatch):
    document = json.loads(run(capsys, "--json"))
    assert [family["model_type"] for family in document["families"]] == list(FAMILIES)
    for columns in ("60", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        text = run(capsys)
        assert all(family.examples in text for family in FAMILIES.values())
        assert all(name in text for name in ("Qwen3.5", "DeepSeek-V3.2"))
        assert "Others are probed when they are loaded" in text


def test_the_table_of_the_documentation_is_this_commands(capsys):
    """`patchkv models --markdown`; replace the table where this fails."""
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert run(capsys, "--markdown").strip() in text


@pytest.mark.parametrize("family", REFUSED_FAMILIES, ids=lambda family: family.model_type)
def test_what_is_listed_as_refused_is_refused_by_its_configuration(family):
    for model_type in family.model_type.split(", "):
        if model_type not in CONFIG_MAPPING:
            pytest.skip(f"this Transformers does not have {model_type}")
        verdict, _ = judge_config(CONFIG_MAPPING[model_type]())
        assert (verdict.level, verdict.reason) == (SupportLevel.REFUSED, family.reason)


def test_the_embedded_model_is_recovered(capsys):
    document = json.loads(run(capsys, "smollm2", "--json"))
    assert (document["model_type"], document["level"]) == ("llama", "approximate")
    assert document["reason"] is None and document["remedy"] is None


@pytest.mark.parametrize("name", ["Llama-3.3-70B", "GLM-4.5", "gemma-3-4b", "Phi-3-mini-4k"])
def test_the_numbers_of_published_models_are_recovered(name, capsys, tmp_path):
    folder = folder_of(PUBLISHED[name](), tmp_path)
    assert json.loads(run(capsys, folder, "--json"))["level"] == "approximate"


LLAMA = LlamaConfig(**SIZES, **HEADS)


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        (
            {"rope_parameters": rope(1e4, rope_type="dynamic", factor=2.0)},
            "exact",
            ["Exact prefix reuse works", "RoPE type 'dynamic' changes frequencies"],
        ),
        ({"is_causal": False}, "refused", ["Its attention is not causal", "own `generate`"]),
        ({"model_type": "stablelm"}, "probed", ["not among the verified", "Loading it runs"]),
        ({"index_topk": 64}, "refused", ["an index of its own (DSA)", "own `generate`"]),
    ],
    ids=["dynamic", "bidirectional", "unknown", "dsa"],
)
def test_an_edited_configuration_is_judged_without_weights(changes, level, words, capsys, tmp_path):
    folder = folder_of(LLAMA, tmp_path, **changes)
    assert json.loads(run(capsys, folder, "--json"))["level"] == level
    text = run(capsys, folder)
    for word in words:
        assert word in text


def test_what_is_no_model_is_an_error(capsys, tmp_path):
    with pytest.raises(SystemExit) as exit:
        main(["models", str(tmp_path / "nothing here")])
    assert exit.value.code == 2
    assert "nothing here" in capsys.readouterr().err
