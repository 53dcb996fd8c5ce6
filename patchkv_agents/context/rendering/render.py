"""Renders a context, once and as a whole, to token ids with the place of each message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from patchkv_agents.context.frozen import FrozenJson
from patchkv_agents.context.messages import Conversation, Message
from patchkv_agents.context.parsing import parse_messages, parse_tools
from patchkv_agents.context.rendering.borders import Layout, message_ranges, opening_token
from patchkv_agents.context.rendering.encoding import Encoded, Encoder, IntArray
from patchkv_agents.context.rendering.marks import Marker, Piece, private_characters
from patchkv_agents.context.rendering.repair import paired
from patchkv_agents.context.rendering.sampled import SampledReply, match_replies
from patchkv_agents.context.rendering.splicing import keep_sampled
from patchkv_agents.context.rendering.template import ChatTemplate, Visit, notes
from patchkv_agents.context.versions import ContextVersion
from patchkv_agents.errors import ContextError, TemplateError

MAX_NOTES = 16


@dataclass(frozen=True, slots=True)
class PartSpan:
    """Tokens which hold a piece of a message's content, white space around it left out.

    Attributes:
        message: index of the message; -1 for tools.
        field: where in the message, e.g. `content`, `reasoning`, `tool_calls[0].arguments.path`.
        start: first token that holds a part of the piece.
        stop: the token behind the last one.
    """

    message: int
    field: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class RenderedContext:
    """A context as the model reads it.

    Attributes:
        token_ids: int64 [tokens], read-only.
        message_spans: first token and end of each message, half-open. Every token is in at most
            one; the template's head and the generation prompt are in none. A message that the
            template does not show has an empty span. Spans ascend, unless the template itself
            shows messages in another order.
        text: the text which the ids stand for.
        verified: the ids stand for the text, nothing in the content became a control token (but
            what the model itself sampled as one), and the spans are exact. Otherwise spans are
            guesses, and state must not be reused by them.
        reason: why not verified; None if verified.
        part_spans: the pieces of content, in the order of the text.
        omitted: message index and field of what the template does not show; -1 and `tools` where
            it shows no tools.
        notes: what it is shown in another form than the messages have, in words.
    """

    token_ids: IntArray
    message_spans: tuple[tuple[int, int], ...]
    text: str
    verified: bool
    reason: str | None
    part_spans: tuple[PartSpan, ...] = ()
    omitted: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


def render(
    context: ContextVersion | Conversation | Sequence[Mapping[str, Any] | Message],
    tokenizer: Any,
    *,
    tools: Sequence[Mapping[str, Any] | FrozenJson] | None = None,
    template_args: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    sampled: Sequence[SampledReply] = (),
) -> RenderedContext:
    """Render a context through the tokenizer's chat template.

    The template is applied to the whole context at once. Text in messages or tools that looks
    like a control token is encoded as text.

    Args:
        context: a version, a conversation, or messages (dicts or `Message`).
        tokenizer: a Transformers tokenizer with a chat template.
        tools: tool schemas; if left out, those of the version or conversation.
        template_args: arguments of the template; if left out, those of the version.
        add_generation_prompt: end with the beginning of the assistant's next message.
        sampled: what the model sampled in this conversation, in the order of time. Its ids are
            kept where the template shows their text again.

    Raises:
        InputError: there is no chat template, or it refuses the messages.
        ContextError: there are no messages, or they have the wrong shape.
    """
    if isinstance(context, ContextVersion | Conversation):
        messages: tuple[Message, ...] = context.messages
        schemas = context.tools if tools is None else parse_tools(tools)
    else:
        messages, schemas = parse_messages(context), parse_tools(tools)
    if template_args is None and isinstance(context, ContextVersion):
        template_args = context.template_args.load()
    if not messages:
        raise ContextError("The context has no messages, so there is nothing to render; add one.")
    arguments, replies = dict(template_args or {}), match_replies(messages, sampled)
    try:
        run = _Run(tokenizer, messages, schemas, arguments)
        return run.render(add_generation_prompt, replies)
    except TemplateError:
        mended, done = paired(messages)
        if not done:
            raise
        run = _Run(tokenizer, mended, schemas, arguments)
        rendered = run.render(add_generation_prompt, replies)
        return replace(rendered, notes=(*done, *rendered.notes)[:MAX_NOTES])


class _Run:
    """One rendering: what its steps share."""

    def __init__(
        self,
        tokenizer: Any,
        messages: tuple[Message, ...],
        tools: tuple[FrozenJson, ...],
        template_args: dict[str, Any],
    ) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._encoder = Encoder.of(tokenizer)
        self._messages = messages
        self._tools = tools
        self._template_args = template_args

    def render(
        self, add_generation_prompt: bool, sampled: Mapping[int, SampledReply]
    ) -> RenderedContext:
        taken: set[str] = set()  # characters for private use, whether shown or not

        def look(message: int, field: str, value: str) -> str:
            taken.update(private_characters(value))
            return value

        with_prompt = self._apply(True, look)
        without = self._apply(False, look)
        text = with_prompt if add_generation_prompt else without
        taken.update(private_characters(text))
        marked = self._mark(text, add_generation_prompt, taken)
        pieces, omitted = marked or self._search(text)
        encoded = self._encoder.encode(self._tokenizer, text, pieces)
        reason = encoded.reason
        if marked is None:
            reason = "the template changes content in a way that hides where it is"
        if self._hides_tools(text, add_generation_prompt, pieces):
            omitted = ((-1, "tools"), *omitted)
            reason = reason or "the template does not show the tools"
        is_prefix = with_prompt.startswith(without)
        prompt = with_prompt[len(without) :] if is_prefix else ""
        layout = Layout(
            text,
            encoded.controls,
            opening_token(prompt, self._encoder.controls),
            len(without) if is_prefix else len(text),
        )
        ranges = message_ranges(layout, pieces, len(self._messages))
        encoded = keep_sampled(
            self._encoder, self._tokenizer, text, encoded, ranges, pieces, sampled
        )
        encoded.ids.setflags(write=False)
        return RenderedContext(
            token_ids=encoded.ids,
            message_spans=_token_spans(encoded, ranges),
            text=text,
            verified=reason is None,
            reason=reason,
            part_spans=tuple(_part_spans(encoded, pieces)),
            omitted=omitted,
            notes=tuple(islice(notes(self._messages), MAX_NOTES)),
        )

    def _hides_tools(self, text: str, prompt: bool, pieces: Sequence[Piece]) -> bool:
        if not self._tools or any(piece.message < 0 for piece in pieces):
            return False
        without = self._template.apply(
            self._messages,
            (),
            self._template_args,
            add_generation_prompt=prompt,
            visit=lambda message, field, value: value,
        )
        return without == text

    def _apply(self, prompt: bool, visit: Visit) -> str:
        return self._template.apply(
            self._messages,
            self._tools,
            self._template_args,
            add_generation_prompt=prompt,
            visit=visit,
        )

    def _mark(
        self, text: str, prompt: bool, taken: set[str]
    ) -> tuple[list[Piece], tuple[tuple[int, str], ...]] | None:
        """The pieces of content in `text` and what is not shown; None if no way finds them."""
        for wants in self._ways():
            marker = Marker(taken, wants)
            found, pieces = marker.read(self._apply(prompt, marker))
            if found == text and marker.complete:
                return pieces, marker.omitted(pieces)
        return None

    def _ways(self) -> Iterator[Callable[[int, str, str], bool]]:
        """Which texts to mark: as many as the template bears, which may look at what is empty.

        Look-alikes of control tokens are marked in any case, wherever they are.
        """

        def way(empty: Callable[[int], bool], calls: bool) -> Callable[[int, str, str], bool]:
            def wants(message: int, field: str, text: str) -> bool:
                if self._encoder.has_lookalike(text):
                    return True
                if field.startswith("tool_calls"):
                    return calls and bool(text.strip()) and not field.endswith(" key")
                if message < 0:  # one mark is enough to see where the tools are
                    is_description = field.startswith("tools[0]") and field.endswith(".description")
                    return calls and is_description and bool(text.strip())
                if not field.startswith(("content", "reasoning")):
                    return False
                return bool(text.strip()) or empty(message)

            return wants

        yield way(lambda _: True, True)
        yield way(lambda message: not self._messages[message].tool_calls, True)
        yield way(lambda _: False, True)
        yield way(lambda _: False, False)

    def _search(self, text: str) -> tuple[list[Piece], tuple[tuple[int, str], ...]]:
        """Where the messages' contents are found one after the other: likely, but not sure.

        And those that are not found anywhere.
        """
        pieces, omitted = [], []
        place = 0
        for index, message in enumerate(self._messages):
            core = message.text.strip()
            start = text.find(core, place) if core else -1
            if start >= 0:
                place = start + len(core)
                pieces.append(Piece(index, "content", start, place))
            elif core and not isinstance(message.content, tuple) and core not in text:
                omitted.append((index, "content"))
        return pieces, tuple(omitted)


def _token_spans(
    encoded: Encoded, ranges: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Tokens that begin in each range of characters."""
    if encoded.starts is None:
        return tuple((0, 0) for _ in ranges)
    places = np.searchsorted(encoded.starts, np.array(ranges, dtype=np.int64))
    return tuple((int(start), int(stop)) for start, stop in places)


def _part_spans(encoded: Encoded, pieces: Sequence[Piece]) -> Iterator[PartSpan]:
    if encoded.starts is None or encoded.stops is None:
        return
    starts = np.searchsorted(encoded.stops, [piece.start for piece in pieces], side="right")
    stops = np.searchsorted(encoded.starts, [piece.stop for piece in pieces])
    for piece, start, stop in zip(pieces, starts, stops, strict=True):
        yield PartSpan(piece.message, piece.field, int(start), max(int(start), int(stop)))
