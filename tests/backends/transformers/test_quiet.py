"""Transformers is silenced in one thread; what others write stays."""

from __future__ import annotations

import logging as standard
import threading
from io import StringIO

import pytest
from transformers.utils import logging

from patchkv_agents.backends.transformers.quiet import quiet_transformers

LOGGER = logging.get_logger("transformers.tests.quiet")


@pytest.fixture
def log():
    """What a handler of Transformers' logger writes."""
    text = StringIO()
    handler = standard.StreamHandler(text)
    logging.add_handler(handler)
    yield text
    logging.remove_handler(handler)


def shows_bar() -> bool:
    """Whether a progress bar of the calling thread would be drawn."""
    return not getattr(logging.tqdm(range(3)), "disable", True)


def test_warnings_and_bars_are_silenced_and_come_back(log):
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with pytest.raises(KeyError), quiet_transformers():
        LOGGER.warning("first")
        LOGGER.error("second")
        assert not shows_bar()
        raise KeyError
    LOGGER.warning("third")
    assert shows_bar()
    errors = log.getvalue()
    assert "first" not in errors and "second" in errors and "third" in errors
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_progress_may_be_shown_and_an_inner_call_cannot_show_what_an_outer_one_hides():
    with quiet_transformers(progress=True):
        assert shows_bar()
        with quiet_transformers():
            assert not shows_bar()
            with quiet_transformers(progress=True):
                assert not shows_bar()
        assert shows_bar()


def test_threads_do_not_change_each_others_output(log):
    """The settings were the process's: a thread that ended its silence last put back what it had
    found, the silence of the other, and Transformers stayed silent for good."""
    entered, left = threading.Event(), threading.Event()
    shown = []

    def loud_then_quiet():
        entered.wait(30)
        LOGGER.warning("of the second thread")
        shown.append(shows_bar())
        with quiet_transformers():
            left.wait(30)
            shown.append(shows_bar())

    other = threading.Thread(target=loud_then_quiet)
    other.start()
    with quiet_transformers():
        entered.set()
        while len(shown) < 1:
            pass
    left.set()
    other.join()
    LOGGER.warning("afterwards")
    assert shown == [True, False] and shows_bar()
    errors = log.getvalue()
    assert "of the second thread" in errors and "afterwards" in errors
