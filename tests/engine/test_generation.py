"""How tokens are chosen where a caller has a say, and which of them are shown."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

from patchkv_agents.engine.generation import SamplingParams, TextStream, sampling_params
from patchkv_agents.errors import InputError

from .models import tiny_engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MESSAGES = [{"role": "user", "content": "Hello"}]


def test_an_answer_begins_as_it_was_told(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    thread = tiny_engine(smollm2_tokenizer, 512).thread("t")
    begin = smollm2_tokenizer.encode("Surely, I say")
    reply = thread.generate(MESSAGES, begin=begin, max_new_tokens=len(begin) + 4)
    assert reply.token_ids[: len(begin)] == tuple(begin)
    assert len(reply.token_ids) == len(begin) + 4 and reply.text.startswith("Surely, I say")
    # What comes behind is what the model says behind these tokens.
    again = thread.generate(MESSAGES, begin=reply.token_ids[:-2], max_new_tokens=len(begin) + 4)
    assert again.token_ids == reply.token_ids
    cut = thread.generate(MESSAGES, begin=begin, max_new_tokens=2)
    assert (cut.token_ids, cut.finish_reason) == (tuple(begin[:2]), "length")


def test_an_answer_ends_where_its_beginning_does(
    smollm2_tokenizer: PreTrainedTokenizerBase,
) -> None:
    thread = tiny_engine(smollm2_tokenizer, 512).thread("t")
    begin = [*smollm2_tokenizer.encode("That is all."), smollm2_tokenizer.eos_token_id]
    reply = thread.generate(MESSAGES, begin=begin)
    assert (reply.text, reply.finish_reason) == ("That is all.", "stop")
    assert thread.sequence.token_ids[-len(reply.token_ids) :].tolist() == begin[:-1]


@pytest.mark.parametrize("begin", [["a"], [-1], [True]])
def test_a_beginning_is_of_token_ids(
    smollm2_tokenizer: PreTrainedTokenizerBase, begin: Any
) -> None:
    with pytest.raises(InputError, match="token ids"):
        tiny_engine(smollm2_tokenizer, 512).thread("t").generate(MESSAGES, begin=begin)


@pytest.mark.parametrize(
    ("keep", "text"), [((), "A\n1B"), (("<call>",), "A\n<call>1</call>B"), (("no",), "A\n1B")]
)
def test_special_tokens_are_shown_where_they_are_kept(
    smollm2_tokenizer: PreTrainedTokenizerBase, keep: tuple[str, ...], text: str
) -> None:
    tokenizer: Any = copy.deepcopy(smollm2_tokenizer)
    tokenizer.add_tokens(["<call>", "</call>"], special_tokens=True)
    keep = (*keep, "</call>") if keep == ("<call>",) else keep
    stream = TextStream(tokenizer, (), keep)
    ids = tokenizer.encode("A\n<call>1</call>B<|im_start|>")
    pieces = [stream.add(token) for token in ids]
    assert "".join((*pieces, stream.finish())) == text == stream.text


def test_one_special_token_may_be_kept_by_its_name() -> None:
    """A single name was taken for its letters."""
    assert sampling_params({"keep_special": "<call>"}).keep_special == ("<call>",)
    assert sampling_params({"stop": "END", "begin": [1, 2]}) == SamplingParams(
        stop=("END",), begin=(1, 2)
    )
    for wrong in ([3], [""], 5):
        with pytest.raises(InputError, match="keep_special"):
            sampling_params({"keep_special": wrong})  # type: ignore[typeddict-item]
