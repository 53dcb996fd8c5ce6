"""Rows that are written beside the model, by streams that work when they like to."""

from __future__ import annotations

import pytest

from patchkv_agents.recovery import RecoveryPolicy, Window, restore

from .models import edited, full_logits, random_ids, sequence_of, tiny_model

PATCH = RecoveryPolicy("patch", Window(16, tail_tokens=8, block_size=32))
OLD = random_ids(1, 300)
NEW = edited(OLD, [(40, 9, 13)])


class LateStream:
    """A stream that does nothing before somebody waits for it."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.queued: list[tuple[int, object]] = []
        self._fails_at = fails_at

    def queue(self, layer, job):
        if layer == self._fails_at:
            raise MemoryError("no room to stage the rows")
        self.queued.append((layer, job))

    def wait(self, layer):
        while self.queued and self.queued[0][0] <= layer:
            self.queued.pop(0)[1]()

    def synchronize(self):
        self.wait(10**9)


def suspended_on(model):
    sequence = sequence_of(model)
    sequence.resume(OLD, PATCH)
    sequence.suspend()
    return sequence


def late_streams(monkeypatch, **options):
    streams: list[LateStream] = []

    def stream(device):
        streams.append(LateStream(**options))
        return streams[-1]

    monkeypatch.setattr(restore, "side_stream", stream)
    return streams


def test_rows_are_there_when_they_are_read(monkeypatch):
    expected = suspended_on(tiny_model("llama")).resume(NEW, PATCH).logits
    suspended = suspended_on(tiny_model("llama"))
    streams = late_streams(monkeypatch)
    assert suspended.resume(NEW, PATCH).logits.equal(expected)
    assert streams and not any(stream.queued for stream in streams)


def test_a_resume_that_fails_leaves_no_write_queued(monkeypatch):
    """The cache used to be freed while a stream was still to write into its memory."""
    streams = late_streams(monkeypatch)
    model = tiny_model("llama")
    suspended = suspended_on(model)

    def fails(*args, **kwargs):
        raise MemoryError("no room for activations")

    with monkeypatch.context() as patched:
        patched.setattr(model.model.layers[1].mlp, "forward", fails)
        with pytest.raises(MemoryError, match="activations"):
            suspended.resume(NEW, PATCH)
    assert streams and not any(stream.queued for stream in streams)
    assert not suspended.is_live
    exact = suspended.resume(NEW, RecoveryPolicy.exact())
    assert (exact.logits - full_logits(model, NEW)).abs().max() < 1e-4


def test_rows_that_cannot_be_staged_leave_no_write_queued(monkeypatch):
    suspended = suspended_on(tiny_model("llama"))
    streams = late_streams(monkeypatch, fails_at=2)
    with pytest.raises(MemoryError, match="stage"):
        suspended.resume(NEW, PATCH)
    assert streams and not any(stream.queued for stream in streams)
    assert not suspended.is_live
