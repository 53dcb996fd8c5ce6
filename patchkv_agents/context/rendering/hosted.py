"""Token counts for hosted models, which publish no chat template and often no vocabulary.

OpenAI's vocabularies are read by tiktoken, which fetches them once over the network. Where that
fails, and for models whose makers publish none, tokens are estimated, and the result says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Thread
from typing import Any

import numpy as np

from patchkv_agents.context.messages import Message
from patchkv_agents.context.rendering.render import PartSpan, RenderedContext
from patchkv_agents.context.versions import ContextVersion
from patchkv_agents.errors import InputError

_TIMEOUT_S = 20.0  # tiktoken sets none of its own
# Their makers publish no vocabulary. Models behind tiktoken are asked of tiktoken.
_UNPUBLISHED = ("claude-", "gemini-", "grok-")
# tiktoken knows them, but their weights are public and Transformers loads them as they are.
_NOT_HOSTED = re.compile(r"gpt-?2|gpt-oss.*")

# Cuts as OpenAI's patterns do (words with the space before them, numbers by three digits, marks,
# line ends), and words once more after 10 letters, of other scripts after 2. Measured against the
# real o200k_base on 19 agent contexts of 1,800 to 6,600 tokens: 5 % too few to 6 % too many.
_PIECE = re.compile(
    r" ?[A-Za-z\u00c0-\u024f]{1,10}| ?[^\W\d_]{1,2}|\d{1,3}"
    r"| ?(?:[^\w\s]|_){1,3}\n*|\s*\n|\s+(?!\S)|\s"
)


@dataclass(frozen=True, slots=True)
class HostedTokenizer:
    """Counts the text of a context as a hosted model's tokenizer does, or about so.

    Attributes:
        model: the model's name.
        estimate: whether the counts are estimated.
        counting: how tokens are counted, a sentence or two for people.
        encode: token ids of a text.
        decode: the text of a token id.
    """

    model: str
    estimate: bool
    counting: str
    encode: Callable[[str], list[int]]
    decode: Callable[[int], str]

    def render(self, context: ContextVersion) -> RenderedContext:
        """Token ids of the tool schemas and of each message's text, one behind the other.

        The provider's own framing (role markers, the way in which tools are written) is not
        public and not in it, so the result never counts as verified.
        """
        ids: list[int] = []
        texts: list[str] = []
        spans: list[tuple[int, int]] = []
        parts: list[PartSpan] = []
        omitted: list[tuple[int, str]] = []

        def add(message: int, field: str, text: str) -> None:
            start = len(ids)
            ids.extend(self.encode(text))
            texts.append(text)
            parts.append(PartSpan(message, field, start, len(ids)))

        for number, tool in enumerate(context.tools):
            add(-1, f"tools[{number}]", tool.text)
        for index, message in enumerate(context.messages):
            start = len(ids)
            for field, text in _texts(message):
                if text is None:
                    omitted.append((index, field))
                else:
                    add(index, field, text)
            spans.append((start, len(ids)))
        token_ids = np.array(ids, dtype=np.int64)
        token_ids.setflags(write=False)
        return RenderedContext(
            token_ids=token_ids,
            message_spans=tuple(spans),
            text="".join(texts),
            verified=False,
            reason=self.counting,
            part_spans=tuple(parts),
            omitted=tuple(omitted),
        )


def is_hosted(model: str) -> bool:
    """Whether the name is that of a hosted model whose tokens can be counted or estimated."""
    return model.startswith(_UNPUBLISHED) or _encoding_name(model) is not None


def load_hosted(model: str) -> HostedTokenizer:
    """The tokenizer of a hosted model, or an estimate where its vocabulary cannot be had.

    Raises:
        InputError: the name is not that of a hosted model (`is_hosted`).
    """
    name = _encoding_name(model)
    if name is None and not model.startswith(_UNPUBLISHED):
        raise InputError(f"{model!r} is no hosted model whose tokens can be counted")
    if name is None:
        problem = f"the maker of {model} publishes no vocabulary"
    else:
        encoding, problem = _load(name)
        if encoding is not None:
            counting = f"Tokens of {model} by tiktoken's {name}. {_SCOPE}"
            return HostedTokenizer(
                model, False, counting, encoding.encode_ordinary, lambda i: encoding.decode([i])
            )
    ids: dict[str, int] = {}
    pieces: list[str] = []

    def encode(text: str) -> list[int]:
        return [number(piece) for piece in _PIECE.findall(text)]

    def number(piece: str) -> int:
        if piece not in ids:
            ids[piece] = len(pieces)
            pieces.append(piece)
        return ids[piece]

    counting = (
        f"All token counts are estimates: {problem}. Text is cut into words (of at most 10 "
        f"letters), numbers of three digits, punctuation and line ends. {_SCOPE}"
    )
    return HostedTokenizer(model, True, counting, encode, pieces.__getitem__)


_SCOPE = (
    "Counted is the text of tool schemas and messages, tools first; the provider's own framing "
    "around it (a few tokens a message) is not, nor are images."
)


def _encoding_name(model: str) -> str | None:
    """The name of tiktoken's encoding for a hosted model; None for any other name."""
    from tiktoken.model import encoding_name_for_model

    if _NOT_HOSTED.fullmatch(model):
        return None
    try:
        return encoding_name_for_model(model)
    except KeyError:
        return None


def _load(name: str) -> tuple[Any, str]:
    """The encoding, or None and what is the matter. Fetches it if it is not on this machine."""
    from tiktoken import get_encoding

    outcome: list[Any] = []

    def load() -> None:
        try:
            outcome.append(get_encoding(name))
        except Exception as error:  # whatever the HTTP client, the proxy or the disk raise
            outcome.append(error)

    # A thread, since there is no other way to give up; a daemon, so that it holds up no exit.
    loading = Thread(target=load, daemon=True)
    loading.start()
    loading.join(_TIMEOUT_S)
    if not outcome:
        return None, f"the vocabulary {name} did not arrive within {_TIMEOUT_S:.0f} s"
    if isinstance(outcome[0], Exception):
        return None, (
            f"the vocabulary {name} cannot be loaded ({type(outcome[0]).__name__}; it takes the "
            "network once, or a copy in the folder that TIKTOKEN_CACHE_DIR names)"
        )
    return outcome[0], ""


def _texts(message: Message) -> Iterator[tuple[str, str | None]]:
    """The texts of a message by field, in the order in which models are shown them.

    None stands for what is no text (an image).
    """
    if message.reasoning:
        yield "reasoning", message.reasoning
    if isinstance(message.content, tuple):
        for number, part in enumerate(part.load() for part in message.content):
            is_text = part.get("type") == "text"
            yield f"content[{number}]", str(part["text"]) if is_text else None
    elif message.content:
        yield "content", message.content
    for number, call in enumerate(message.tool_calls):
        yield f"tool_calls[{number}].name", call.name
        yield f"tool_calls[{number}].arguments", call.arguments_json
