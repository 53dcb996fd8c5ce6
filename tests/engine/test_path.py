"""How long the way of a resume through the project is: files that it passes, and frames.

`pytest -s tests/engine/test_path.py` prints them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from patchkv_agents.recovery import RecoveryPolicy

from .models import edited, random_ids, sequence_of, tiny_model
from .test_thread import MESSAGES
from .test_thread import edited as edited_messages

PROJECT = Path(__file__).parents[2]
MAX_FILES = 30
"""Files in which something runs, from `KVSequence.resume` to the logits."""
MAX_FRAMES = 12
"""Frames of the project from `Thread.generate` to the model's call."""


def walk(model, call: Callable[[], object]) -> tuple[list[str], int]:
    """Files of the project in which something runs during a call, and frames up to the model."""
    files: set[str] = set()
    depths: list[int] = []

    def path_of(frame: FrameType) -> str | None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(PROJECT) or {"tests", ".venv"} & {*path.parts}:
            return None
        return str(path.relative_to(PROJECT))

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        path = path_of(frame)
        if path is not None:
            files.add(path)
        if frame.f_code.co_name == "forward" and frame.f_locals.get("self") is model:
            outer: FrameType | None = frame
            depths.append(0)
            while outer is not None:
                depths[-1] += path_of(outer) is not None
                outer = outer.f_back

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(files), max(depths, default=0)


def test_a_resume_passes_few_files():
    """About 60 files had to be read to follow one."""
    policy = RecoveryPolicy.default()
    model = tiny_model("llama")
    sequence = sequence_of(model)
    old = random_ids(1, 300)
    sequence.resume(old, policy)
    sequence.suspend()
    files, _ = walk(model, lambda: sequence.resume(edited(old, [(40, 9, 13)]), policy))
    print(f"\n{len(files)} files:", *files, sep="\n  ")
    assert len(files) <= MAX_FILES


def test_few_frames_lie_between_a_call_and_the_model(engine, thread):
    policy = RecoveryPolicy.default()
    thread.generate(MESSAGES, policy=policy, max_new_tokens=1)
    thread.suspend()
    files, frames = walk(
        engine.adapter.model,
        lambda: thread.generate(edited_messages(), policy=policy, max_new_tokens=1),
    )
    print(f"\n{frames} frames; {len(files)} files with rendering, history and sampling")
    assert 0 < frames <= MAX_FRAMES
