"""The profile's file: what it keeps, what it refuses, and when its policy may be used."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from patchkv_agents import Profile as exported
from patchkv_agents.errors import ProfileError
from patchkv_agents.recovery.profile import Profile
from patchkv_agents.recovery.shipped import shipped_profiles
from tests.profiling.profiles import passed, profile_of


def written(folder: Path, **changes: object) -> Path:
    """A profile's file with some fields changed; `None` takes a field out."""
    document = {**passed(profile_of()).to_json(), **changes}
    file = folder / "profile.json"
    file.write_text(json.dumps({key: value for key, value in document.items() if value != "-"}))
    return file


def test_a_saved_profile_is_the_same_when_loaded(tmp_path: Path):
    profile = passed(profile_of())
    file = tmp_path / "profile.json"
    profile.save(file)
    assert exported is Profile
    assert Profile.load(file) == Profile.load(str(file)) == profile
    assert profile.has_passed and not profile.why_not_passed
    assert profile_of().validation is None and not profile_of().has_passed


def test_saving_replaces_the_file_or_leaves_it(tmp_path: Path):
    file = tmp_path / "profile.json"
    profile_of().save(file)
    file.chmod(0o640)
    profile_of(model="other").save(file)
    assert Profile.load(file).model == "other" and stat.S_IMODE(file.stat().st_mode) == 0o640
    with pytest.raises(ProfileError, match="not JSON compliant"):
        profile_of(fit={"kl": float("nan")}).save(file)
    with pytest.raises(ProfileError, match="choose another path"):
        profile_of().save(tmp_path / "none" / "profile.json")
    assert [each.name for each in tmp_path.iterdir()] == ["profile.json"]
    assert Profile.load(file).model == "other"


def test_another_models_profile_says_whose_it_is_and_what_to_run():
    profile = profile_of()
    profile.check("f" * 32, "smollm2")
    with pytest.raises(ProfileError) as caught:
        profile.check("a" * 32, "Qwen/Qwen3-4B")
    assert "smollm2" in str(caught.value) and "patchkv profile Qwen/Qwen3-4B" in str(caught.value)
    with pytest.raises(ProfileError, match="dtype"):
        profile.check("a" * 32, "smollm2")


def test_a_pass_is_of_one_policy_on_one_model(tmp_path: Path):
    profile = passed(profile_of())
    edited = json.loads(json.dumps(profile.to_json()))
    edited["policy"]["method"]["tail_tokens"] = 16  # by hand
    loaded = Profile.from_json(edited)
    assert not loaded.has_passed and "changed after" in loaded.why_not_passed
    assert not replace(profile, fingerprint="0" * 32).has_passed
    assert replace(profile, model="renamed").has_passed
    failed = passed(profile_of(), "the median is 2 nats")
    assert not failed.has_passed and "the median is 2 nats" in failed.why_not_passed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": 2}, "schema 2"),
        ({"schema": "-"}, "lacks 'schema'"),
        ({"model": 7}, "'model'"),
        ({"fit": "-"}, "lacks 'fit'"),
        ({"notes": "mine"}, "unknown fields"),
        ({"policy": {"name": "patchkv"}}, "policy cannot be used"),
        ({"policy": []}, "'policy'"),
        (
            {
                "published": {
                    "name": "patchkv_published",
                    "method": {"kind": "published", "kappa": 2.0},
                }
            },
            "kappa",
        ),
        ({"policy": {**profile_of().to_json()["policy"], "name": "mine"}}, "called 'mine'"),
        ({"data": [{"name": "d", "sha256": "a", "pairs": -1, "tasks": 1}]}, "'pairs'"),
        ({"data": {}}, "'data'"),
        ({"validation": {}}, "lacks 'validation.passed'"),
        ({"versions": {"torch": 2}}, "'versions.torch'"),
        ({"storage": {"tau_low": -1.0}}, "storage cannot be used.*tau_low"),
    ],
)
def test_a_broken_profile_is_refused_with_the_reason(tmp_path, changes, words):
    with pytest.raises(ProfileError, match=words) as caught:
        Profile.load(written(tmp_path, **changes))
    assert "profile.json" in str(caught.value)


def test_a_validation_that_contradicts_itself_is_refused(tmp_path: Path):
    document = passed(profile_of(), "too few pairs").to_json()
    document["validation"]["passed"] = True
    with pytest.raises(ProfileError, match="patchkv validate"):
        Profile.load(written(tmp_path, validation=document["validation"]))


def test_a_measure_without_an_interval_is_refused(tmp_path: Path):
    document = passed(profile_of()).to_json()
    document["validation"]["measures"]["first_token_kl_median"]["low"] = None
    with pytest.raises(ProfileError, match="validation.measures.first_token_kl_median.low"):
        Profile.load(written(tmp_path, validation=document["validation"]))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(tmp_path: Path, number: str):
    file = written(tmp_path)
    file.write_text(file.read_text().replace('"tau": 0.25', f'"tau": {number}'))
    with pytest.raises(ProfileError, match="weights and dtype"):
        Profile.load(file)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_profile_is_refused(tmp_path: Path, content: bytes):
    file = tmp_path / "other.json"
    file.write_bytes(content)
    with pytest.raises(ProfileError, match="patchkv profile"):
        Profile.load(file)


def test_a_name_is_a_shipped_profile_unless_there_is_such_a_file(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProfileError, match="there is no profile no-such"):
        Profile.load("no-such")
    with pytest.raises(ProfileError, match="is a folder"):
        Profile.load(tmp_path)
    for name in shipped_profiles():
        assert Profile.load(name).has_passed
    profile_of(model="mine").save(tmp_path / "smollm2")
    assert Profile.load("smollm2").model == "mine"
