"""LangChain's standard unit tests of chat models."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("langchain_tests")

from langchain_tests.unit_tests import ChatModelUnitTests  # noqa: E402

from patchkv_langchain import ChatPatchKV  # noqa: E402


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatPatchKV]:
        return ChatPatchKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2"}

    @property
    def supports_json_mode(self) -> bool:
        return True
