"""A LangChain chat model over the engine, whose context may be edited at any place."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field, PrivateAttr, field_validator, model_validator
from typing_extensions import Self, override

from patchkv_agents.context import ContextVersion, Message, from_langchain
from patchkv_agents.context.answers import AnswerPiece, AnswerStyle
from patchkv_langchain.chat_answers import FinalAnswer
from patchkv_langchain.chat_base import AnsweringChatModel
from patchkv_langchain.chat_engines import (
    EnginesByName,
    answers_key,
    context_tokens,
    policy_of,
    profile_key,
    shared_engine,
)
from patchkv_langchain.chat_options import (
    SAMPLING,
    STANDARD_SETTINGS,
    CallOptions,
    tool_choice_of,
    unknown_arguments,
    wants_one_call,
)
from patchkv_langchain.chat_requests import shown_messages, structured
from patchkv_langchain.chat_threads import chat_threads
from patchkv_langchain.chat_tokens import prompt_tokens, text_tokens
from patchkv_langchain.conversations import Conversation
from patchkv_langchain.graph_steps import GraphStep, parent_of
from patchkv_langchain.notes import served_by
from patchkv_langchain.records import declared_edits

if TYPE_CHECKING:
    from patchkv_agents.engine import Engine, Thread
    from patchkv_agents.engine.reply import StreamChunk


class ChatPatchKV(AnsweringChatModel):
    """Answers by a local model; of an edited context, only what the edit made wrong is computed.

    Weights are loaded at the first call, and shared between chat models of the same settings.

    The KV state belongs to a conversation: LangChain's `configurable.thread_id`, and within that
    each agent of a graph (by its path, over all turns), summarizer, set of tools and arguments of
    the chat template has its own. Calls of one conversation take turns; tasks side by side and
    subagents that are called again are conversations of their own. Without a thread id, a call goes
    on with a conversation whose messages it has, or has edited as far as ids tell; of others it
    shares the exact beginning alone. So give an id where contexts are edited.

    `response_metadata["recovery"]` is the report of the resume (see `RecoveryReport`), and
    `usage_metadata["input_token_details"]` says of the prompt's tokens how many were reused exactly
    (`cache_read`), restored (`recovered`) and recomputed; the rest is new.

    Sampling, policy, thread, template arguments and the model's name can also be given with a call,
    as in `model.invoke(..., seed=1)`, and the penalties of `SamplingParams` only there.

    Args:
        model: `smollm2` (the embedded model), a local folder or a Transformers model id. With
            `engine`, only what the model is called.
        engine: to use in place of one that is loaded.
        model_kwargs: further arguments of `Engine.from_pretrained`, such as `dtype` or `store`.
        policy: how edited contexts are recovered: `exact`, `default`, the name of a method or a
            `RecoveryPolicy`; the engine's own if left out, which is exact unless configured
            otherwise, and that of its profile if that has passed validation.
        recovery_profile: of the model, which is loaded with it: a file, the name of a profile that
            comes with PatchKV Agents, or a `Profile`. Other models by name are without.
        thread: id of the conversation, in place of LangChain's.
        temperature, top_p, top_k, seed: see `SamplingParams`; greedy by default.
        max_tokens: most tokens to generate.
        stop: strings that end the answer.
        template_args: arguments of the chat template, such as `{"enable_thinking": False}`.
        answer_style: how the model writes calls of tools (see `AnswerStyle`); found from the chat
            template if left out.
    """

    model: str = "smollm2"
    engine: Any = Field(default=None, exclude=True)
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    policy: Any = None
    recovery_profile: Any = None
    thread: str | None = None
    temperature: float = 0.0
    max_tokens: int = 1024
    top_p: float = 1.0
    top_k: int = 0
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    seed: int | None = None
    template_args: dict[str, Any] = Field(default_factory=dict)
    answer_style: str | None = None
    streaming: bool = False

    model_config = {"populate_by_name": True, "arbitrary_types_allowed": True}

    _engines: EnginesByName = PrivateAttr(default_factory=EnginesByName)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        if isinstance(given, dict):
            known = {name for name, field in cls.model_fields.items() if not field.deprecated}
            aliases = {field.alias for field in cls.model_fields.values() if field.alias}
            if unknown := sorted(given.keys() - known - aliases - STANDARD_SETTINGS):
                raise ValueError(unknown_arguments(unknown, sorted(known), cls.__name__))
        return given

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, policy: Any) -> Any:
        if policy is not None and not isinstance(policy, str):
            from patchkv_agents.recovery import RecoveryPolicy  # imports torch

            if not isinstance(policy, RecoveryPolicy):
                raise ValueError("policy must be None, a name or a RecoveryPolicy")
        return policy

    @field_validator("recovery_profile")
    @classmethod
    def _check_profile(cls, profile: Any) -> Any:
        if isinstance(profile, (str, Path)):
            from patchkv_agents.recovery.shipped import profile_file  # imports torch

            profile_file(profile)  # fails now, not at the first call
        elif profile is not None:
            from patchkv_agents.recovery.profile import Profile  # imports torch

            if not isinstance(profile, Profile):
                raise ValueError("recovery_profile must be None, a file, a name or a Profile")
        return profile

    @model_validator(mode="after")
    def _check_one_profile(self) -> Self:
        if self.engine is not None and self.recovery_profile is not None:
            raise ValueError("the engine has its own profile: give recovery_profile to the Engine")
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy with the same engine, stores and other objects among the settings."""
        memo = {} if memo is None else memo
        shared = [self.engine, self.policy, self.recovery_profile, *self.model_kwargs.values()]
        memo.update((id(value), value) for value in shared if value is not None)
        return super().__deepcopy__(memo)

    @property
    @override
    def _llm_type(self) -> str:
        return "patchkv"

    @property
    @override
    def _identifying_params(self) -> Mapping[str, Any]:
        shown = self.model_dump(include={"model", "temperature", "max_tokens", "top_p", "top_k"})
        policy = getattr(self.policy, "name", self.policy)
        return {**shown, "stop": self.stop, "seed": self.seed, "policy": policy}

    @override
    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """What LangChain's caches know answers by; an engine's weights and defaults among it."""
        recovery = self.policy, profile_key(self.recovery_profile)
        settings = self.template_args, self.answer_style, recovery, self.model_kwargs
        return f"{super()._get_llm_string(stop, **kwargs)}---{answers_key(self.engine, settings)}"

    @override
    def _resolve_model_profile(self) -> ModelProfile | None:
        limit = context_tokens(self.model) if self.engine is None else self.engine.max_tokens
        profile = ModelProfile(
            max_output_tokens=self.max_tokens,
            text_inputs=True,
            image_inputs=False,
            text_outputs=True,
            tool_calling=True,
        )
        if limit is not None:  # with room for the answer
            profile["max_input_tokens"] = max(1, limit - self.max_tokens)
        return profile

    def load(self, model: str | None = None) -> Engine:
        """The engine, loaded if it is not yet. Other models than the own one are loaded by name.

        Raises:
            ModelNotFoundError, ProfileError, UnsupportedModelError: see `Engine.from_pretrained`.
        """
        name = model or self.model
        if self.engine is not None and name == self.model:
            engine: Engine = self.engine
            return engine
        if name not in self._engines:
            options = self.model_kwargs
            if self.recovery_profile is not None and name == self.model:
                options = {**options, "recovery_profile": self.recovery_profile}
            self._engines[name] = shared_engine(name, options)
        return self._engines[name]

    @override
    def get_token_ids(self, text: str) -> list[int]:
        """The tokens of a text that stands in a message. Loads the model."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return text_tokens(self.load(), text)

    @override
    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """The tokens of the prompt for these messages, as in `input_tokens`. Loads the model.

        Args:
            messages: of the context; any part of one may be counted.
            tools: shown to the model, in any form that LangChain knows.

        Raises:
            ContextError: a message cannot be rendered.
        """
        return prompt_tokens(self.load(), messages, tools or (), self.template_args)

    @override
    def _answer(
        self,
        messages: Sequence[BaseMessage],
        stop: Sequence[str] | None,
        given: dict[str, Any],
        config: RunnableConfig,
    ) -> Generator[AnswerPiece | FinalAnswer, None, None]:
        from patchkv_agents.engine.answer_run import AnswerRun  # loads torch, as the engine does

        called_ns = time.perf_counter_ns()
        options = CallOptions.of(given)
        engine = self.load(options.model)
        natives = shown_messages(messages, options.response_format)
        shown = from_langchain(natives, keep="shown")
        template_args = {**self.template_args, **options.template_args}
        run = AnswerRun(
            AnswerStyle.of(engine.tokenizer, self.answer_style),
            options.tools,
            template_args=template_args,
            tool_choice=options.tool_choice,
            one_call=options.one_call,
            begin="{" if options.response_format is not None else "",
            salt=_salt(shown),
        )
        conversation = Conversation.of(
            thread=options.thread or self.thread,
            config=config,
            tools=options.tools,
            template_args=template_args,
        )
        step = GraphStep.of(config)
        policy = self.policy if options.policy is None else options.policy
        limit = self.max_tokens if options.max_tokens is None else options.max_tokens
        with chat_threads(engine).turn(
            conversation, shown, step, tools=options.tools, template_args=template_args
        ) as turn:
            thread = turn.thread
            served_by(thread)
            parent = None
            if step is not None:
                parent = parent_of(turn.versions, thread.history, step, shown)
            before = thread.base(shown) if parent is None else parent
            old = before.messages if isinstance(before, ContextVersion) else ()
            sampling = {name: getattr(self, name) for name in SAMPLING}
            chunks = self._replies(
                thread,
                shown,
                tools=options.tools,
                template_args=template_args,
                edits=declared_edits(old, natives, shown=shown),
                parent=before,
                checkpoint_id=None if step is None else step.checkpoint,
                policy=policy_of(policy, engine.profile),
                max_new_tokens=limit,
                stop=tuple(self.stop or () if stop is None else stop),
                called_ns=called_ns,
                **run.options,
                **{**sampling, **options.sampling},
            )
            with closing(run.pieces(chunks)) as pieces:
                for number, piece in enumerate(pieces):
                    if number == 0:
                        turn.placed()
                    yield from piece.pieces
            answer = FinalAnswer(run.answer, run.reply, options.model or self.model)
            turn.answered(run.answer.to_message())
        yield answer

    def _replies(
        self, thread: Thread, messages: Sequence[Message], **options: Any
    ) -> Generator[StreamChunk, None, None]:
        """Let the engine answer. What answers in another way overrides this.

        Args:
            thread: of the conversation; this call has its turn.
            messages: of the context.
            options: the other arguments of `Thread.stream`.
        """
        yield from thread.stream(messages, **options)

    @override
    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Show tools to the model.

        Args:
            tools: in any form that LangChain knows.
            tool_choice: `"auto"`; `"none"`, which shows the tools and takes nothing for a call;
                `"any"` (or `"required"`, or True) or a tool's name, for which the answer is made to
                begin as a call does. That the arguments fit the schema is up to the model. The
                forms of OpenAI and Anthropic are understood too.
            strict: goes into the schemas.
            kwargs: further arguments of calls, such as `parallel_tool_calls=False`: of several
                calls, the first is taken.

        Raises:
            InputError: there is no tool of the name.
        """
        schemas = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        if wants_one_call(tool_choice):
            kwargs = {"parallel_tool_calls": False, **kwargs}
        choice = tool_choice_of(tool_choice, [schema["function"]["name"] for schema in schemas])
        return self.bind(tools=schemas, tool_choice=choice, **kwargs)

    @override
    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: Literal["function_calling", "json_schema", "json_mode"] = "function_calling",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answers as values.

        Args:
            schema: a Pydantic class, a `TypedDict`, or a JSON schema.
            include_raw: see LangChain.
            method: `"function_calling"` makes the answer begin as a call; `"json_schema"` shows the
                schema behind the last message and makes the answer begin with `{`; `"json_mode"`
                does only the latter. Whether the answer fits is up to the model.
            strict: goes into the schema that is shown; not for `"function_calling"`.
        """
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        if kwargs:
            raise ValueError(f"unknown arguments {sorted(kwargs)}: use include_raw, method, strict")
        return structured(self.bind, schema, method=method, strict=strict, include_raw=include_raw)


def _salt(messages: Sequence[Message]) -> str:
    """What tells one answer's calls from those of another: the context that was answered."""
    hashes = "".join(message.content_hash for message in messages)
    return blake2b(hashes.encode(), digest_size=16).hexdigest()
