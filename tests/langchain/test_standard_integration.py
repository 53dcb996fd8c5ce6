"""LangChain's standard integration tests of chat models.

The whole suite runs on a model whose words are scripted and whose prefill, recovery, streaming and
parsing are real (tiny random weights), and once more on the embedded model, where what 135M
parameters cannot do is left to the former.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("langchain_tests")

from langchain_core.messages import AIMessage  # noqa: E402
from langchain_tests.integration_tests import ChatModelIntegrationTests  # noqa: E402

from patchkv_langchain import ChatPatchKV  # noqa: E402

from .scripted import ScriptedChat  # noqa: E402

if TYPE_CHECKING:
    from patchkv_agents.engine import Engine

for _name, _test in inspect.getmembers(ChatModelIntegrationTests, inspect.iscoroutinefunction):
    pytest.mark.asyncio(_test)


class _Suite(ChatModelIntegrationTests):
    engine: Engine
    other_model: str

    @pytest.fixture(autouse=True)
    def use_other_model(self, tiny_model_folder: str) -> None:
        self.other_model = tiny_model_folder

    @property
    def model_override_value(self) -> str:
        return self.other_model

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2", "engine": self.engine, "max_tokens": 64}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = self.chat_model_class(**self.chat_model_params)
        model.invoke("Hello again", config={"configurable": {"thread_id": "cache_read"}})
        config: Any = {"configurable": {"thread_id": "cache_read"}}
        if not stream:
            return model.invoke("Hello again", config=config)
        full: Any = None
        for chunk in model.stream("Hello again", config=config):
            full = chunk if full is None else full + chunk
        return full  # type: ignore[no-any-return]


class TestScripted(_Suite):
    @pytest.fixture(autouse=True)
    def use_engine(self, tiny_chat_engine: Engine) -> None:
        self.engine = tiny_chat_engine

    @property
    def chat_model_class(self) -> type[ScriptedChat]:
        return ScriptedChat

    def test_cache_read_is_reported(self) -> None:
        usage = self.invoke_with_cache_read_input().usage_metadata
        assert usage is not None and usage["input_token_details"]["cache_read"] > 0


SCHEMA = "135M parameters repeat a tool's schema in the place of arguments"
CANNOT = {
    "test_tool_calling": SCHEMA,
    "test_tool_calling_async": SCHEMA,
    "test_tool_calling_with_no_arguments": SCHEMA,
    "test_unicode_tool_call_integration": SCHEMA,
    "test_structured_output": SCHEMA,
    "test_structured_output_async": SCHEMA,
    "test_structured_output_pydantic_2_v1": SCHEMA,
    "test_structured_output_optional_param": SCHEMA,
    "test_json_mode": "135M parameters give an object that does not fit the schema",
    "test_tool_choice": "135M parameters name a tool that does not exist",
    "test_agent_loop": "135M parameters do not call a tool of their own accord",
}
"""What fails by ability alone, and why. `TestScripted` passes these tests."""


@pytest.mark.slow
class TestEmbedded(_Suite):
    @pytest.fixture(autouse=True)
    def use_engine(self, embedded_chat_engine: Engine, request: pytest.FixtureRequest) -> None:
        self.engine = embedded_chat_engine
        if request.node.originalname in CANNOT:
            reason = CANNOT[request.node.originalname]
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))

    @property
    def chat_model_class(self) -> type[ChatPatchKV]:
        return ChatPatchKV
