"""A child process that writes checkpoints until it is killed. Runs in a forkserver."""

from __future__ import annotations

import resource
from dataclasses import replace
from multiprocessing.connection import Connection

from patchkv_agents.checkpoint.checkpoint import Checkpoint
from patchkv_agents.checkpoint.stores import BlobCheckpointStore
from patchkv_agents.checkpoint.stores.conformance import KEY, sample_checkpoint, sample_payload
from patchkv_agents.checkpoint.stores.objects import open_objects
from patchkv_agents.errors import CheckpointError

VERSIONS = 3


def sample(seed: int) -> Checkpoint:
    """What the child writes in its round `seed`: about 1 MB."""
    return sample_checkpoint([sample_payload(423, seed, shape=(4, 9, 8))], seed)


def write_until_killed(folder: str, seed: int, started: Connection) -> None:
    """Save new contents under the same few keys, one after the other, for ever."""
    store = BlobCheckpointStore(open_objects(folder), part_bytes=1 << 16)
    samples = [sample(seed + number) for number in range(VERSIONS)]
    started.send("started")
    while True:
        for number, checkpoint in enumerate(samples):
            store.save(replace(KEY, version=f"version-{number}"), checkpoint)
            # The payload counts as new each time.
            store = BlobCheckpointStore(open_objects(folder), part_bytes=1 << 16)


def write_with_small_files(folder: str, limit: int, answer: Connection) -> None:
    """Save where no file may grow beyond `limit` bytes, and say what happened."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        BlobCheckpointStore(open_objects(folder)).save(KEY, sample(0))
        answer.send("saved")
    except CheckpointError as error:
        answer.send(str(error))
