"""Reads pairs of contexts: from a JSONL file, or from a history database."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchkv_agents.context import (
    Conversation,
    Edit,
    EditKind,
    infer_edits,
    parse_messages,
    parse_tools,
)
from patchkv_agents.context.frozen import check_text
from patchkv_agents.context.stores import SQLiteHistoryStore
from patchkv_agents.errors import ContextError, InputError
from patchkv_agents.profiling.pairs import ContextPair, PairSet, Skipped, context_digest, pair_set

if TYPE_CHECKING:
    from patchkv_agents.context import ContextVersion, HistoryStore, ThreadKey

_PAIR_FIELDS = frozenset(
    ("old", "new", "tools", "task", "kind", "id", "dataset", "answers", "stale_answers")
)
_VERSIONS_FIELDS = frozenset(("versions", "tools", "task", "kind", "id", "dataset"))


def read_pairs(path: str | Path) -> PairSet:
    """Pairs of a JSONL file, one object a line, in one of two forms.

    - `{"old": [messages], "new": [messages]}`, and where wanted `tools`, `task` (without one, the
      old messages stand for it), `kind`, `id`, `dataset`, `answers`, `stale_answers`;
    - `{"versions": [[messages], [messages], ...]}`, and where wanted `tools`, `task`, `kind`, `id`,
      `dataset`: each version and the next one make a pair, if it did not only append.

    Raises:
        InputError: the file cannot be read, or a line has another form; with its number.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"there is no file {path}: check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text: {error}") from error
    pairs: list[ContextPair] = []
    skipped: list[Skipped] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            for made in _pairs_of_line(_object(line), number, path.stem):
                if isinstance(made, ContextPair):
                    pairs.append(made)
                else:
                    skipped.append(made)
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from error
    return pair_set(path.name, pairs, skipped)


def _object(line: str) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"this is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise InputError('write an object: {"old": [messages], "new": [messages]}')
    return document


def _pairs_of_line(
    document: Mapping[str, Any], number: int, dataset: str
) -> Iterator[ContextPair | Skipped]:
    known = _VERSIONS_FIELDS if "versions" in document else _PAIR_FIELDS
    if unknown := sorted(document.keys() - known):
        raise InputError(f"'{unknown[0]}' is not a field: use {', '.join(sorted(known))}")
    task = _text(document, "task")
    kind, dataset = _text(document, "kind"), _text(document, "dataset") or dataset
    tools = parse_tools(document.get("tools"))
    if "versions" in document:
        versions = document["versions"]
        if not isinstance(versions, list) or len(versions) < 2:
            raise InputError("'versions' is a list of at least two lists of messages")
        contexts = [
            Conversation(_messages(version, f"version {place}"), tools)
            for place, version in enumerate(versions)
        ]
        name = _text(document, "id") or f"line {number}"
        task = task or context_digest(contexts[0])
        for step, (old, new) in enumerate(zip(contexts, contexts[1:], strict=False), start=1):
            yield _pair(f"{name}/{step}", task, kind, dataset, old, new)
        return
    for name in ("old", "new"):
        if name not in document:
            raise InputError(f"'{name}' is missing: give the messages before and after the edit")
    old, new = (Conversation(_messages(document[name], name), tools) for name in ("old", "new"))
    id = _text(document, "id") or f"line {number}"
    task = task or context_digest(old)
    made = _pair(id, task, kind, dataset, old, new)
    if isinstance(made, ContextPair):
        answers, stale = (_texts(document, name) for name in ("answers", "stale_answers"))
        made = ContextPair(id, task, made.kind, dataset, old, new, made.edits, answers, stale)
    yield made


def _pair(
    id: str, task: str, kind: str | None, dataset: str, old: Conversation, new: Conversation
) -> ContextPair | Skipped:
    """A pair with the edits that are found by comparing, or why it is none."""
    if only_appends(old, new):
        return Skipped(id, "only appends: an exact prefix cache recovers it")
    edits = infer_edits(old, new)
    return ContextPair(id, task, kind or _kind(edits), dataset, old, new, edits)


def only_appends(old: Conversation, new: Conversation) -> bool:
    """Whether the new context is the old one with further messages behind it."""
    said = [message.content_hash for message in old.messages]
    now = [message.content_hash for message in new.messages[: len(said)]]
    return old.tools == new.tools and said == now and old != new


def _kind(edits: Sequence[Edit]) -> str:
    """The kind of the first edit that is not an append."""
    return next((str(e.kind) for e in edits if e.kind is not EditKind.APPEND), "other")


def _messages(value: Any, name: str) -> Any:
    if not isinstance(value, list) or not value:
        raise InputError(f"'{name}' is not a list of messages with at least one in it")
    try:
        return parse_messages(value)
    except ContextError as error:
        raise InputError(f"'{name}': {error}") from error


def _text(document: Mapping[str, Any], name: str) -> str | None:
    value = document.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise InputError(f"'{name}' is {value!r}: write a text that is not empty")
    if value is not None:
        check_text(value, f"'{name}'")
    return value


def _texts(document: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = document.get(name, [])
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InputError(f"'{name}' is {value!r}: write a list of texts")
    for text in value:
        check_text(text, f"'{name}'")
    return tuple(value)


def history_pairs(database: str | Path) -> PairSet:
    """Pairs of a history database: versions of all threads, each with the one it was made from.

    Versions that only append to theirs make none. Those whose chat template is given arguments,
    such as `enable_thinking`, are left out: pairs are rendered without any. The pairs of a thread,
    and of forks of it, are of one task.

    Raises:
        InputError: there is no such file.
        HistoryStoreError: the file is no history, or is damaged.
    """
    database = Path(database)
    if not database.exists():
        raise InputError(f"there is no file {database}: check the path")
    store = SQLiteHistoryStore(database, mode="r")
    try:
        found: dict[str, ContextPair | Skipped] = {}
        for thread in store.threads():
            # Versions are shared with forks: each counts once.
            task = str(min(store.related(thread), default=thread))
            for made in _thread_pairs(store, thread, task, database.stem):
                found.setdefault(made.id, made)
    finally:
        store.close()
    return pair_set(
        database.name,
        (made for made in found.values() if isinstance(made, ContextPair)),
        (made for made in found.values() if isinstance(made, Skipped)),
    )


def _thread_pairs(
    store: HistoryStore, thread: ThreadKey, task: str, dataset: str
) -> Iterator[ContextPair | Skipped]:
    versions: dict[str, ContextVersion] = {}
    for id in store.version_ids(thread):
        if (version := store.load(thread, id)) is None:  # deleted by another process meanwhile
            continue
        versions[id] = version
        parent = versions.get(version.parents[0]) if version.parents else None
        if parent is None:
            continue
        old, new = (Conversation(each.messages, each.tools) for each in (parent, version))
        if old == new or only_appends(old, new):
            continue
        arguments = {name for each in (parent, version) for name in each.template_args.load()}
        if arguments:
            names = ", ".join(sorted(arguments))
            yield Skipped(id, f"its chat template is given arguments ({names}): not supported")
            continue
        yield ContextPair(id, task, _kind(version.edits), dataset, old, new, version.edits)
