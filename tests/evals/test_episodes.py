"""Episodes of invented rows, counted in words, and of real ones with the embedded tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkv_agents.context import ContextHistory, Conversation, Edit, EditKind, infer_edits
from patchkv_agents.context.edits import may_be
from patchkv_evals.datasets import Passage, QARow, load_rows
from patchkv_evals.episodes import (
    KINDS,
    Episode,
    EpisodeKind,
    EpisodeSpec,
    PassagePool,
    RenderedCounter,
    build_episode,
    build_episodes,
)
from patchkv_evals.episodes.script import CLEARED
from patchkv_evals.errors import EpisodeError
from patchkv_evals.text import flat, mentions
from tests.evals.samples import ROWS, WordCounter

POOL = PassagePool(ROWS)
FLIPPABLE = [row for row in ROWS if row.answers != ("yes",)]


def build(row: QARow, kind: EpisodeKind, **options: Any) -> Episode:
    spec = EpisodeSpec(kind, **{"tokens": 1500, **options})
    return build_episode(row, spec, pool=POOL, counter=WordCounter())


def places(edits: tuple[Edit, ...]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    return {(edit.old_indices, edit.new_indices) for edit in edits}


def text(context: Conversation, index: int) -> str:
    return context.messages[index].text


def everything(context: Conversation) -> str:
    calls = (call.arguments_json for m in context.messages for call in m.tool_calls)
    return flat("\n".join((*(message.text for message in context.messages), *calls)))


def check(episode: Episode) -> None:
    """What holds for every episode."""
    assert abs(episode.new.tokens - episode.provenance.spec.tokens) <= (
        0.02 * episode.provenance.spec.tokens
    )
    for version in episode.versions:
        last = version.context.messages[-1]
        assert last.role == "user"
        assert last.text.endswith(f"Question: {episode.question}")
        calls = [call.id for m in version.context.messages for call in m.tool_calls]
        results = [m.tool_call_id for m in version.context.messages if m.role == "tool"]
        assert calls == results
        assert len(set(calls)) == len(calls)
    assert episode.versions[0].edits == ()
    for before, after in zip(episode.versions, episode.versions[1:], strict=False):
        found = infer_edits(before.context, after.context)
        assert places(found) == places(after.edits)
        kinds = {(edit.old_indices, edit.new_indices): edit.kind for edit in after.edits}
        for edit in found:
            assert kinds[edit.old_indices, edit.new_indices] in may_be(edit.kind)


specs = st.builds(
    EpisodeSpec,
    st.sampled_from(KINDS),
    tokens=st.integers(1100, 3000),
    position=st.floats(0, 0.9),
    passage_words=st.integers(40, 150),
    seed=st.integers(0, 1000),
)


@given(st.sampled_from(FLIPPABLE), specs)
@settings(max_examples=60)
def test_edits_are_found_where_they_are_declared(row: QARow, spec: EpisodeSpec) -> None:
    episode = build_episode(row, spec, pool=POOL, counter=WordCounter())
    check(episode)
    assert episode == build_episode(row, spec, pool=PassagePool(ROWS), counter=WordCounter())


def test_another_seed_is_another_episode() -> None:
    first, second = (build(ROWS[0], "refresh", seed=seed) for seed in (1, 2))
    assert first.old.context != second.old.context


@pytest.mark.parametrize("position", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_position(kind: EpisodeKind, position: float) -> None:
    for row in FLIPPABLE[:3]:
        assert build(row, kind, tokens=3000, position=position).provenance.position == (
            pytest.approx(position, abs=0.03)
        )


def test_refresh_brings_the_evidence() -> None:
    before = set()
    for seed in range(8):
        episode = build(ROWS[0], "refresh", seed=seed)
        ((edit,), answer) = (episode.new.edits, ROWS[0].answers)
        assert edit.kind is EditKind.REFRESH_EVIDENCE
        (index,) = edit.old_indices
        assert episode.new.context.messages[index].role == "tool"
        assert mentions(flat(text(episode.new.context, index)), answer)
        assert not mentions(everything(episode.old.context), answer)
        assert (episode.old.answerable, episode.new.answerable) == (False, True)
        assert episode.stale_answers() == ()
        before.add(episode.provenance.before_refresh)
    assert before == {"missing", "stale"}


@pytest.mark.parametrize("row", FLIPPABLE, ids=lambda row: row.id)
def test_flip_changes_the_fact_and_nothing_else(row: QARow) -> None:
    episode = build(row, "flip")
    (index,) = episode.new.edits[0].old_indices
    old, new = episode.old, episode.new
    assert old.answers == row.answers == episode.stale_answers()
    assert not set(old.answers) & set(new.answers)
    assert mentions(flat(text(old.context, index)), old.answers)
    assert not mentions(everything(old.context), new.answers)
    assert mentions(flat(text(new.context, index)), new.answers)
    assert not mentions(everything(new.context), [*old.answers, old.answers[0].split()[-1]])
    lender = next(r for r in ROWS if r.id == episode.provenance.substitute_from)
    assert new.answers[0] in lender.answers
    assert lender.id != row.id


@pytest.mark.parametrize("tokens", [400, 1500])
def test_a_noted_flip_has_the_same_guess_behind_the_fact_in_both_versions(tokens: int) -> None:
    """What a model concludes of it as it reads it is wrong after the edit; the text is not."""
    episode = build(ROWS[0], "flip_noted", tokens=tokens)
    old, new = episode.old, episode.new
    (index,) = new.edits[0].old_indices
    for version in episode.versions:
        behind = version.context.messages[index + 1 :]
        (note,) = [m.text for m in behind if mentions(flat(m.text), new.answers)]
        assert f"could be {new.answers[0]}; the result for" in note
        assert not any(mentions(flat(m.text), old.answers) for m in behind)
    assert episode.stale_answers() == ROWS[0].answers
    assert mentions(flat(text(old.context, index)), old.answers)
    assert mentions(flat(text(new.context, index)), new.answers)


@pytest.mark.parametrize("tokens", [400, 1500])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("flip_answered", "My answer so far: {}, by the result for"),
        ("flip_planned", "3. If there is none, answer {}."),
        ("flip_summarized", "Summary so far:"),
        ("flip_called", 'No results for "{}".'),
    ],
)
def test_the_old_fact_is_repeated_behind_the_edit(
    kind: EpisodeKind, said: str, tokens: int
) -> None:
    """What an agent concluded of a fact stays in its context when the fact is edited."""
    for row in FLIPPABLE[:3]:
        episode = build(row, kind, tokens=tokens)
        old, new = episode.old, episode.new
        (index,) = new.edits[0].old_indices
        fact = old.answers[0]
        behind = [version.context.messages[index + 1 :] for version in episode.versions]
        assert behind[0] == behind[1]
        (repeat,) = [m for m in behind[1][:-1] if said.format(fact) in m.text]
        assert mentions(flat(repeat.text), [fact])
        assert not mentions(everything(old.context), new.answers)
        assert mentions(flat(text(new.context, index)), new.answers)
        assert episode.stale_answers() == row.answers
        if kind == "flip_called":
            arguments = [c.arguments for m in behind[1] for c in m.tool_calls]
            assert {"query": fact} in arguments


def test_where_a_fact_is_repeated_is_drawn_for_each_episode() -> None:
    places = set()
    for seed in range(6):
        context = build(ROWS[0], "flip_planned", tokens=3000, seed=seed).new.context
        named = [i for i, m in enumerate(context.messages) if "Plan from here" in m.text]
        places.add((len(context.messages) - named[0]) // 2)
    assert len(places) > 2


def test_clear_leaves_placeholders_and_the_evidence() -> None:
    episode = build(ROWS[1], "clear")
    assert len(episode.new.edits) == 2
    for edit in episode.new.edits:
        assert text(episode.new.context, edit.new_indices[0]) == CLEARED
    assert mentions(everything(episode.new.context), episode.new.answers)
    assert episode.old.tokens > episode.new.tokens + 100


def test_summaries_keep_the_evidence() -> None:
    for row in FLIPPABLE:
        episode = build(row, "summarize")
        assert episode.new.answerable
        (edit,) = episode.new.edits
        assert edit.kind is EditKind.SUMMARIZE
        assert len(edit.old_indices) == 6
        assert mentions(everything(episode.old.context), row.answers)
        assert mentions(everything(episode.new.context), row.answers)


def test_revised_plan() -> None:
    episode = build(ROWS[2], "revise_plan", position=0.4)
    (edit,) = episode.new.edits
    assert edit.kind is EditKind.REVISE_PLAN
    old, new = (text(v.context, edit.old_indices[0]) for v in episode.versions)
    assert old.startswith("Plan:\n1. Look up")
    assert new.startswith("Revised plan:\n1. Look up")
    assert old.split("\nNote:")[1] == new.split("\nNote:")[1]


def test_multi_edits_three_messages_at_once() -> None:
    episode = build(ROWS[0], "multi")
    assert len(episode.versions) == 2
    assert [edit.kind for edit in episode.new.edits] == [
        EditKind.REVISE_PLAN,
        EditKind.REPLACE_TOOL_RESULT,
        EditKind.REFRESH_EVIDENCE,
    ]


def test_chain_is_five_edits_with_known_answers() -> None:
    episode = build(ROWS[0], "chain")
    assert [version.edits[0].kind for version in episode.versions[1:]] == [
        EditKind.REFRESH_EVIDENCE,
        EditKind.REPLACE_TOOL_RESULT,
        EditKind.REPLACE_TOOL_RESULT,
        EditKind.REVISE_PLAN,
        EditKind.SUMMARIZE,
    ]
    first, flipped = ROWS[0].answers, episode.new.answers
    assert [v.answers for v in episode.versions] == [first] * 3 + [flipped] * 3
    assert [episode.stale_answers(n) for n in range(6)] == [()] * 3 + [first] * 3
    for version in episode.versions:
        assert mentions(everything(version.context), version.answers) == version.answerable


def test_retries_are_ten_edits_of_one_result() -> None:
    episode = build(ROWS[0], "retries", tokens=3000)
    edits = [version.edits[0] for version in episode.versions[1:]]
    assert [edit.kind for edit in edits] == [EditKind.REFRESH_EVIDENCE] * 10
    assert len({edit.old_indices for edit in edits} | {edit.new_indices for edit in edits}) == 1
    found = [text(version.context, edits[0].old_indices[0]) for version in episode.versions]
    assert len(set(found)) == 11
    assert [version.answerable for version in episode.versions] == [False] * 10 + [True]
    lenders = {
        row.id for row in ROWS if any(p.title in shown for p in row.passages for shown in found)
    }
    assert lenders - {ROWS[0].id} <= set(episode.provenance.distractors)
    for version in episode.versions:
        assert mentions(everything(version.context), version.answers) == version.answerable


def test_fillers_are_of_other_rows_and_never_name_the_answer() -> None:
    episode = build(ROWS[4], "clear", tokens=3000)
    assert episode.provenance.distractors
    assert ROWS[4].id not in episode.provenance.distractors
    context = episode.new.context
    named = [m for m in context.messages if mentions(flat(m.text), ROWS[4].answers)]
    assert [message.role for message in named] == ["tool"]
    others = [name for row in ROWS for name in row.answers if row is not ROWS[4]]
    assert mentions(everything(context), others)  # their gold passages are distractors here


def test_declared_edits_reach_the_history() -> None:
    episode = build(ROWS[0], "multi")
    history = ContextHistory()
    for version in episode.versions:
        committed = history.commit(
            version.context.messages, tools=version.context.tools, edits=version.edits
        )
    assert [edit.kind for edit in committed.edits] == [edit.kind for edit in episode.new.edits]
    assert all(edit.declared and not edit.corrected for edit in committed.edits)


def test_long_passages_are_cut_around_what_is_needed() -> None:
    """TriviaQA's documents have thousands of words, and the answer stands anywhere in them."""
    filling = "The pier is long and old. " * 200
    document = f"{filling}On its end Ines Varga put a lamp. {filling}"
    row = QARow(
        "long", "triviaqa", "Who put a lamp on the pier?", ("Ines Varga",),
        (Passage("Pier", document, True),),
    )  # fmt: skip
    episode = build(row, "refresh")
    shown = text(episode.new.context, episode.new.edits[0].new_indices[0])
    assert "On its end Ines Varga put a lamp." in shown
    assert len(shown.split()) < 130


def test_a_sentence_without_an_end_is_cut_around_the_answer() -> None:
    filling = "the pier is long and old and " * 200
    row = QARow(
        "long", "triviaqa", "Who put a lamp on the pier?", ("Ines Varga",),
        (Passage("", f"{filling} (Ines Varga's lamp stands) {filling}", True),),
    )  # fmt: skip
    episode = build(row, "refresh")
    shown = text(episode.new.context, episode.new.edits[0].new_indices[0])
    assert "(Ines Varga's lamp stands)" in shown
    assert len(shown.split()) == 120


def test_rows_without_flags_are_judged_by_the_answer() -> None:
    passages = tuple(Passage(p.title, p.text) for p in ROWS[0].passages)
    unflagged = QARow("unknown", "longbench/hotpotqa", ROWS[0].question, ROWS[0].answers, passages)
    check(build(unflagged, "flip"))
    with pytest.raises(EpisodeError, match="no passage is known"):
        build(QARow("none", "x", "Who?", ("Nobody Else",), passages), "refresh")


def test_skipped_rows_are_reported() -> None:
    found = build_episodes(
        ROWS,
        [EpisodeSpec("flip", tokens=1500), EpisodeSpec("refresh", tokens=1500)],
        pool=POOL,
        counter=WordCounter(),
        limit=4,
    )
    kinds = [episode.provenance.spec.kind for episode in found.episodes]
    assert kinds == ["flip"] * 4 + ["refresh"] * 4
    assert [(entry.row_id, entry.kind) for entry in found.skipped] == [("row-3", "flip")]
    assert found.report() == "8 episodes\n1 rows skipped for flip: the answer is yes or no"


def test_lengths_that_cannot_be_had() -> None:
    with pytest.raises(EpisodeError, match="more than 200 tokens are needed"):
        build(ROWS[0], "refresh", tokens=200)
    with pytest.raises(EpisodeError, match="too few other passages"):
        build(ROWS[0], "refresh", tokens=100_000)


@pytest.mark.parametrize(
    "wrong",
    [{"kind": "swap"}, {"position": 1.5}, {"passage_words": 5}, {"tokens": 0}],
)
def test_wrong_specs(wrong: dict[str, Any]) -> None:
    with pytest.raises(EpisodeError):
        EpisodeSpec(**{"kind": "flip", **wrong})


@pytest.mark.parametrize("kind", KINDS)
def test_real_tokenizer(kind: EpisodeKind, smollm2_tokenizer: Any) -> None:
    counter = RenderedCounter(smollm2_tokenizer)
    spec = EpisodeSpec(kind, tokens=2000, position=0.3)
    episode = build_episode(ROWS[1], spec, pool=POOL, counter=counter)
    check(episode)
    for version in episode.versions:
        assert counter.measure(version.context).tokens == version.tokens
    assert episode.provenance.position == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("dataset", ["hotpotqa", "2wikimqa", "triviaqa", "musique"])
def test_real_rows(dataset: str, shared_dir: Path, smollm2_tokenizer: Any) -> None:
    rows = load_rows(shared_dir / "data" / f"{dataset}.jsonl", dataset).rows
    found = build_episodes(
        rows,
        [EpisodeSpec(kind, tokens=2048) for kind in KINDS],
        pool=PassagePool(rows),
        counter=RenderedCounter(smollm2_tokenizer),
        limit=3,
    )
    assert len(found.episodes) == 3 * len(KINDS)
    for episode in found.episodes:
        check(episode)
