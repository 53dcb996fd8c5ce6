"""A tiny engine for each test module, and a thread of it for each test."""

from __future__ import annotations

import pytest

from .models import tiny_engine


@pytest.fixture(scope="module")
def engine(smollm2_tokenizer):
    return tiny_engine(smollm2_tokenizer, max_tokens=700)


@pytest.fixture
def thread(engine, request):
    yield engine.thread(request.node.name)
    engine.drop(request.node.name)
