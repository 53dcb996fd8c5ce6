"""Token ids that the model sampled stay, where the template shows their text again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkv_agents.context import RenderedContext, SampledReply, parse_messages, render
from patchkv_agents.context.rendering.sampled import match_replies

from .rendered import check, control_tokens, decoded
from .samples import texts

USER = {"role": "user", "content": "When?"}


def odd_ids(tokenizer: Any, text: str, at: Sequence[int] = ()) -> list[int]:
    """Ids of a text as a model might sample them: cut where its tokenizer would not cut."""
    cuts = [0, *(at or range(1, len(text))), len(text)]
    pieces = [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    return [i for piece in pieces for i in tokenizer(piece, add_special_tokens=False)["input_ids"]]


def reply_of(tokenizer: Any, text: str, at: Sequence[int] = ()) -> SampledReply:
    return SampledReply.of(odd_ids(tokenizer, text, at), tokenizer)


def holds(rendered: RenderedContext, index: int, ids: Sequence[int]) -> bool:
    """Whether the ids are in the message's span, one after the other."""
    start, stop = rendered.message_spans[index]
    span = rendered.token_ids[start:stop].tolist()
    return any(span[k : k + len(ids)] == list(ids) for k in range(len(span)))


def test_prompt_and_reply_are_the_prefix_of_the_next_turn(smollm2_tokenizer: Any) -> None:
    """Encoding the reply anew gives other tokens, and everything behind would be new."""
    tokenizer = smollm2_tokenizer
    reply = reply_of(tokenizer, "At 9:40, from track four.")
    before = render([USER], tokenizer).token_ids.tolist() + list(reply.token_ids)
    messages = [USER, {"role": "assistant", "content": reply.text}, USER]
    rendered = render(messages, tokenizer, sampled=[reply])
    check(rendered, tokenizer)
    assert rendered.token_ids[: len(before)].tolist() == before
    plain = render(messages, tokenizer)
    assert plain.token_ids[: len(before)].tolist() != before
    assert decoded(tokenizer, rendered) == decoded(tokenizer, plain)
    # All else is as it was.
    for index in (0, 2):
        a, b = rendered.message_spans[index]
        c, d = plain.message_spans[index]
        assert rendered.token_ids[a:b].tolist() == plain.token_ids[c:d].tolist()


@settings(max_examples=60)
@given(st.lists(texts.filter(str.strip), min_size=1, max_size=3), st.data())
def test_any_reply_stays(smollm2_tokenizer: Any, replies: list[str], data: Any) -> None:
    tokenizer = smollm2_tokenizer
    sampled, messages = [], [USER]
    for number, text in enumerate(replies):
        text = f"{number}: {text}"
        cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), min_size=1)))
        sampled.append(reply_of(tokenizer, text, cuts))
        messages += [{"role": "assistant", "content": text}, USER]
    before = render(messages[:-2], tokenizer).token_ids
    rendered = render(messages, tokenizer, sampled=sampled)
    check(rendered, tokenizer)
    for number, reply in enumerate(sampled):
        assert holds(rendered, 2 * number + 1, reply.token_ids)
    assert decoded(tokenizer, rendered) == decoded(tokenizer, render(messages, tokenizer))
    assert len(before) < len(rendered)


def test_replies_survive_appended_turns_and_edits_elsewhere(smollm2_tokenizer: Any) -> None:
    tokenizer = smollm2_tokenizer
    first, track, again = (
        reply_of(tokenizer, text, cuts)
        for text, cuts in [("At once.", [1]), ("From track 4.", [2]), ("At once.", [5])]
    )
    one, two, three = (
        {"role": "assistant", "content": reply.text} for reply in (first, track, again)
    )
    changed = one | {"content": "At 9:50."}
    system = {"role": "system", "content": "New."}
    for messages, expected in [
        ([USER, one, USER, two], {1: first, 3: track}),
        ([USER, one, USER, two, USER, three, USER], {1: first, 3: track, 5: again}),
        ([system, USER, two, USER, three, USER], {2: track, 4: again}),  # the first one is gone
        ([USER, changed, USER, two], {3: track}),
        ([USER, {"role": "user", "content": "At once."}], {}),
    ]:
        rendered = render(messages, tokenizer, sampled=[first, track, again])
        check(rendered, tokenizer)
        kept = {
            index: reply
            for index in range(len(messages))
            for reply in (first, track, again)
            if holds(rendered, index, reply.token_ids)
        }
        assert kept == expected


def test_matching() -> None:
    def reply(text: str) -> SampledReply:
        return SampledReply((1,), text)

    thinking = reply("<think>\nHm, 4?\n</think>\n\nTrack 4.\n")
    calling = reply('I look.\n<tool_call>\n{"name": "board", "arguments": {"a": 1}}\n</tool_call>')
    messages = parse_messages(
        [
            {"role": "assistant", "content": "4"},  # by hand; occurs in what was sampled
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [{"name": "board", "args": {"a": 1}}],
            },
            {"role": "tool", "content": "Track 4."},
            {"role": "assistant", "content": "Track 4.", "reasoning": "Hm, 4?"},
            {"role": "assistant", "content": ""},
        ]
    )
    assert match_replies(messages, [calling, thinking]) == {1: calling, 3: thinking}
    assert match_replies(messages, [reply("Track 4."), thinking])[3] == thinking
    assert match_replies(messages[:3], [SampledReply((), "")]) == {}


def test_stop_string_and_trimming(
    smollm2_tokenizer: Any, family_tokenizer: Callable[[str], Any]
) -> None:
    """The message ends before the sampled tokens do: those before its end stay."""
    reply = reply_of(smollm2_tokenizer, "At 9:40 END of")
    rendered = render(
        [USER, {"role": "assistant", "content": "At 9:40 "}, USER],
        smollm2_tokenizer,
        sampled=[reply],
    )
    check(rendered, smollm2_tokenizer)
    assert holds(rendered, 1, odd_ids(smollm2_tokenizer, "At 9:40 "))
    gemma = family_tokenizer("gemma3")
    reply = reply_of(gemma, "  At 9:40\n\n")
    rendered = render([USER, {"role": "assistant", "content": reply.text}], gemma, sampled=[reply])
    check(rendered, gemma)
    assert holds(rendered, 1, odd_ids(gemma, "At 9:40"))
    assert decoded(gemma, rendered)[1] == "<start_of_turn>model\nAt 9:40<end_of_turn>\n"


CALL = '<tool_call>\n{"name": "board", "arguments": {"stop": "Quay", "at": 9}}\n</tool_call>'


def calling(arguments: dict[str, Any], content: str = "I look.") -> list[dict[str, Any]]:
    call = {"id": "c", "function": {"name": "board", "arguments": arguments}}
    message = {"role": "assistant", "content": content, "tool_calls": [call]}
    return [USER, message, {"role": "tool", "tool_call_id": "c", "content": "4"}]


def test_parsed_calls(qwen3: Any) -> None:
    """The caller parsed the call; the template writes it as the model did, or with other spaces."""
    ids = qwen3("I look.\n" + CALL, add_special_tokens=False)["input_ids"]
    first = ids.index(qwen3.convert_tokens_to_ids("<tool_call>"))
    odd = odd_ids(qwen3, "I look.\n") + ids[first : first + 1]
    odd += odd_ids(qwen3, CALL[len("<tool_call>") : -len("</tool_call>")]) + ids[-1:]
    reply = SampledReply.of(odd, qwen3)
    messages = calling({"stop": "Quay", "at": 9})
    rendered = render(messages, qwen3, sampled=[reply])
    check(rendered, qwen3)
    assert holds(rendered, 1, odd)
    assert control_tokens(qwen3, rendered) == control_tokens(qwen3, render(messages, qwen3))
    # Another order of the arguments: what is before and behind them stays.
    messages = calling({"at": 9, "stop": "Quay"})
    rendered = render(messages, qwen3, sampled=[reply])
    check(rendered, qwen3)
    assert holds(rendered, 1, odd_ids(qwen3, "I look.\n") + ids[first : first + 1])
    assert holds(rendered, 1, odd_ids(qwen3, 'stop": "Quay')[1:-1])
    assert rendered.text == render(messages, qwen3).text


def test_calls_left_in_the_text_keep_their_control_tokens(qwen3: Any) -> None:
    """The caller passed the reply's text back: the model's own `<tool_call>` is no look-alike."""
    ids = qwen3(CALL, add_special_tokens=False)["input_ids"]
    reply = SampledReply.of(ids, qwen3)
    messages = [USER, {"role": "assistant", "content": CALL}, USER | {"content": CALL}]
    rendered = render(messages, qwen3, sampled=[reply])
    assert rendered.verified and holds(rendered, 1, ids)
    # The user's copy is text.
    assert not holds(rendered, 2, ids)
    assert control_tokens(qwen3, rendered).count("<tool_call>") == 1


def test_control_token_that_was_sampled_as_text_is_the_template_s(qwen3: Any) -> None:
    """The model spelled the tag; the template, which makes it a token, must not be overruled."""
    reply = reply_of(qwen3, "I look.\n" + CALL)
    messages = calling({"stop": "Quay", "at": 9})
    rendered = render(messages, qwen3, sampled=[reply])
    check(rendered, qwen3)
    assert control_tokens(qwen3, rendered) == control_tokens(qwen3, render(messages, qwen3))
    assert holds(rendered, 1, odd_ids(qwen3, "I look.\n"))
    assert holds(rendered, 1, odd_ids(qwen3, CALL[len("<tool_call>") : -len("</tool_call>")]))


def test_content_cannot_borrow_a_control_token(smollm2_tokenizer: Any) -> None:
    """A reply that holds `<|im_end|>` as a token lends it to no text but its own."""
    tokenizer = smollm2_tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    reply = SampledReply.of(
        [*odd_ids(tokenizer, "One"), end, *odd_ids(tokenizer, "two")], tokenizer
    )
    messages = [USER | {"content": reply.text}, {"role": "assistant", "content": "Onetwo"}]
    rendered = render(messages, tokenizer, sampled=[reply])
    check(rendered, tokenizer)
    assert control_tokens(tokenizer, rendered) == control_tokens(
        tokenizer, render([USER, messages[1]], tokenizer)
    )


def test_dropped_reasoning(qwen3: Any) -> None:
    """Qwen3 shows reasoning behind the last question only; the answer keeps its ids."""
    think, end = qwen3.convert_tokens_to_ids(["<think>", "</think>"])
    answer = odd_ids(qwen3, "From track 4.")
    thought = odd_ids(qwen3, "\nThe board says track 4.\n")
    ids = [think, *thought, end, *odd_ids(qwen3, "\n\n"), *answer]
    reply = SampledReply.of(ids, qwen3)
    for message in (
        {"role": "assistant", "content": "From track 4.", "reasoning": "The board says track 4."},
        {"role": "assistant", "content": reply.text},
    ):
        shown = render([USER, message], qwen3, sampled=[reply], add_generation_prompt=False)
        check(shown, qwen3)
        assert holds(shown, 1, ids)
        dropped = render([USER, message, USER], qwen3, sampled=[reply])
        check(dropped, qwen3)
        assert "<think>" not in dropped.text and holds(dropped, 1, answer)


@pytest.mark.parametrize("name", ["llama3", "gemma3", "glm4", "mistral", "qwen3"])
@pytest.mark.parametrize("text", ["Größe: 10 µm, 港口 🙂‍↕️ done", "\n1. a\n2. b"])
def test_families(family_tokenizer: Callable[[str], Any], name: str, text: str) -> None:
    tokenizer = family_tokenizer(name)
    reply = reply_of(tokenizer, text.strip() if name in ("llama3", "gemma3") else text)
    messages = [USER, {"role": "assistant", "content": reply.text}, USER]
    rendered = render(messages, tokenizer, sampled=[reply])
    check(rendered, tokenizer)
    assert holds(rendered, 1, reply.token_ids)
    assert rendered.text == render(messages, tokenizer).text


def test_can_be_stored(smollm2_tokenizer: Any) -> None:
    reply = reply_of(smollm2_tokenizer, "é🙂")
    token_ids = json.loads(json.dumps(reply.token_ids))
    assert SampledReply.of(token_ids, smollm2_tokenizer) == reply
