"""How tokens are chosen where a caller has a say, and which of them are shown."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from patchkv_agents.context.answers.markers import special_tokens
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


TEXTS = [
    "Hello, 你好世界! 🎉👩‍👩‍👧‍👦 naïve café\n\n  def f(x):\n\treturn x**2  # ünï\n",
    "  spaces before and behind   ",
    "नमस्ते दुनिया ไทย العربية 한국어",
    "don't � I'm . , ! ? 3.14159\r\n c",
]


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_text_of_all_tokens(smollm2_tokenizer, text: str) -> None:
    ids = smollm2_tokenizer.encode(text, add_special_tokens=False)
    for length in range(1, len(ids) + 1):  # also where it ends inside of a character
        stream = TextStream(smollm2_tokenizer, ())
        pieces = [stream.add(token) for token in ids[:length]]
        assert not any(piece.endswith("\ufffd") for piece in pieces)
        whole = smollm2_tokenizer.decode(ids[:length])
        assert "".join((*pieces, stream.finish())) == whole == stream.text


class SlowTokenizer:
    """A tokenizer without a backend, as Transformers' Python ones."""

    is_fast = False
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def __init__(self, fast: Any) -> None:
        self.decode = fast.decode


@pytest.mark.parametrize("text", TEXTS)
def test_a_slow_tokenizer_streams_too(smollm2_tokenizer: Any, text: str) -> None:
    slow: Any = SlowTokenizer(smollm2_tokenizer)
    streams = TextStream(smollm2_tokenizer, ()), TextStream(slow, ())
    for token in smollm2_tokenizer.encode(text, add_special_tokens=False):
        fast_piece, slow_piece = (stream.add(token) for stream in streams)
        assert fast_piece == slow_piece
    assert streams[0].finish() == streams[1].finish() and streams[1].text == text


def test_real_tokenizers_stream() -> None:
    """Those in `PATCHKV_TOKENIZERS`."""
    folder = os.environ.get("PATCHKV_TOKENIZERS")
    if not folder:
        pytest.skip("PATCHKV_TOKENIZERS names no folder with folders of tokenizers")
    from transformers import AutoTokenizer

    paths = sorted(Path(folder).glob("*/tokenizer.json"))
    assert paths
    for path in paths:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, local_files_only=True)
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            stream = TextStream(tokenizer, (), special_tokens(tokenizer).values())
            pieces = [*(stream.add(token) for token in ids), stream.finish()]
            whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            assert "".join(pieces) == whole, path


def test_one_special_token_may_be_kept_by_its_name() -> None:
    """A single name was taken for its letters."""
    assert sampling_params({"keep_special": "<call>"}).keep_special == ("<call>",)
    assert sampling_params({"stop": "END", "begin": [1, 2]}) == SamplingParams(
        stop=("END",), begin=(1, 2)
    )
    for wrong in ([3], [""], 5):
        with pytest.raises(InputError, match="keep_special"):
            sampling_params({"keep_special": wrong})  # type: ignore[typeddict-item]
