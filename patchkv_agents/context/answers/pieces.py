"""Collects the pieces of an answer, and decides which white space belongs to it."""

from __future__ import annotations

from hashlib import blake2b

from patchkv_agents.context.answers.answer import Answer, AnswerPiece, InvalidCall
from patchkv_agents.context.frozen import to_json
from patchkv_agents.context.messages import ToolCall


class TrimmedText:
    """A text that arrives in pieces, without white space at its ends.

    Args:
        lead: is left out once at the beginning.
        trims: whether white space at the ends is left out.
    """

    def __init__(self, lead: str = "", *, trims: bool = True) -> None:
        self.text = ""
        self.trims = trims
        self._lead = lead
        self._space = ""  # not given out yet: it may turn out to be the end
        self._after_gap = False

    def gap(self) -> None:
        """Something else stood here: white space behind it is left out."""
        self._after_gap = self.trims = True

    def add(self, text: str) -> str:
        """Take more of it; returns what is certain now and was not returned before."""
        if self._after_gap:
            text = text.lstrip()
            self._after_gap = not text
        whole = self._space + text
        core = whole.rstrip()
        self._space = whole[len(core) :]
        return self._say(core) if core else ""

    def finish(self) -> str:
        """The rest."""
        space, self._space = self._space, ""
        return "" if self.trims else self._say(space)

    def _say(self, text: str) -> str:
        if not self.text:
            text = text.lstrip() if self.trims else text.removeprefix(self._lead)
        self.text += text
        return text


class AnswerPieces:
    """The answer so far; hands out what is new as pieces.

    Args:
        lead: see `CallFormat.lead`.
        id_form: see `CallFormat.id_form`.
        salt: goes into the ids of calls, so that equal calls of several answers differ.
    """

    def __init__(self, *, lead: str, id_form: str, salt: str) -> None:
        self._content = TrimmedText(lead, trims=False)
        self._reasoning = TrimmedText()
        self._calls: list[ToolCall] = []
        self._invalid: list[InvalidCall] = []
        self._id_form, self._salt = id_form, salt
        self._new: list[AnswerPiece] = []

    @property
    def has_content(self) -> bool:
        """Whether there is content."""
        return bool(self._content.text)

    def content(self, text: str) -> None:
        """Add to the content."""
        if said := self._content.add(text):
            self._new.append(AnswerPiece(content=said))

    def reasoning(self, text: str) -> None:
        """Add to the reasoning."""
        self._content.gap()
        if said := self._reasoning.add(text):
            self._new.append(AnswerPiece(reasoning=said))

    def call(self, call: ToolCall) -> None:
        """Add a call; it gets an id if it has none."""
        self._content.gap()
        if call.id is None:
            place = [self._salt, len(self._calls), call.name, call.arguments_json]
            digest = blake2b(to_json(place).encode("utf-8", "surrogatepass"), digest_size=16)
            made = self._id_form.format(digest.hexdigest())
            call = ToolCall(call.name, call.arguments_json, call.raw, made, call.extra)
        self._calls.append(call)
        self._new.append(AnswerPiece(call=call))

    def invalid(self, text: str, error: str) -> None:
        """Add a call that cannot be read; its text becomes content."""
        self.content(text)
        invalid = InvalidCall(text, error)
        self._invalid.append(invalid)
        self._new.append(AnswerPiece(invalid=invalid))

    def finish(self) -> None:
        """Nothing will be added."""
        if said := self._content.finish():
            self._new.append(AnswerPiece(content=said))

    def take(self) -> list[AnswerPiece]:
        """The pieces that were not taken yet."""
        new, self._new = self._new, []
        return new

    @property
    def answer(self) -> Answer:
        """What was added so far."""
        return Answer(
            self._content.text,
            calls=tuple(self._calls),
            invalid=tuple(self._invalid),
            reasoning=self._reasoning.text or None,
        )
