"""Jobs run, whatever becomes of the executor."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from patchkv_agents.jobs import submitted

AT_EXIT = """
import time
from concurrent.futures import ThreadPoolExecutor
from patchkv_agents.jobs import submitted

outer, inner = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

def save():
    time.sleep(0.3)  # the main thread is done by now
    print("saved", submitted(lambda: "in parts", inner).result())

outer.submit(save)
"""


def test_work_under_way_at_exit_is_finished():
    """A program whose last line suspended a thread lost that version: its store could not share
    the work out any more."""
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "saved in parts\n" and not done.stderr


@pytest.mark.parametrize("is_shut_down", [None, False, True])
def test_results_and_errors_come_from_anywhere(is_shut_down):
    worker = None if is_shut_down is None else ThreadPoolExecutor(1)
    if worker is not None and is_shut_down:
        worker.shutdown()
    assert submitted(lambda: 3, worker).result() == 3
    with pytest.raises(ZeroDivisionError):
        submitted(lambda: 1 / 0, worker).result()
