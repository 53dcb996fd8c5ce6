"""Random graphs, for comparing a tracked graph with the same graph without tracking."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage, ToolMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages
from langgraph.types import Command, Interrupt, Overwrite, RetryPolicy, Send, interrupt
from typing_extensions import TypedDict

from patchkv_langgraph import GraphHistory, track_edits, versioned_messages


class Merged(TypedDict):
    """The usual state."""

    messages: Annotated[list[AnyMessage], add_messages]
    plan: list[str]


class Versioned(TypedDict):
    """A state with ids that stay the same."""

    messages: Annotated[list[AnyMessage], versioned_messages]
    plan: list[str]


class Inner(TypedDict):
    """The state of a subgraph: what is merged of two nodes side by side."""

    messages: Annotated[list[AnyMessage], add_messages]


@dataclass
class NodeSpec:
    """What one node does.

    Attributes:
        name: of the node.
        actions: what it does at its first call, its second call, and so on; the last one repeats.
        is_async: whether it is a coroutine function.
        delay_s: how long it takes.
        form: how it returns its update.
        to: nodes behind it.
        sends: how many tasks it sends to the node `worker`.
        inner: nodes of the subgraph that it is, one after the other; none if it is a function.
    """

    name: str
    actions: list[str]
    is_async: bool
    delay_s: float | None
    form: str
    to: list[str] = field(default_factory=list)
    sends: int = 0
    inner: list[NodeSpec] = field(default_factory=list)


@dataclass
class GraphSpec:
    """A graph and the runs of it, the same for each seed.

    Attributes:
        seed: of the chance.
        state: its schema.
        nodes: in layers, each node leading to some of the next layer.
        first: the nodes that a run begins with.
        interrupts: names of nodes before which the graph stops.
        is_tracked: which nodes are tracked.
        durability: of its runs.
        is_async: whether its runs are.
        turns: what happens to a thread: `invoke`, `resume`, `update`, `travel`, `stream`.
    """

    seed: int
    state: Any
    nodes: list[NodeSpec]
    first: list[str]
    interrupts: list[str]
    is_tracked: dict[str, bool]
    durability: Any
    is_async: bool
    turns: list[str]

    @classmethod
    def of(cls, seed: int) -> GraphSpec:
        """The graph of a seed."""
        chance = random.Random(seed)
        is_async = chance.random() < 0.5
        layers = [
            [_node(chance, f"n{depth}{place}", is_async) for place in range(chance.randint(1, 3))]
            for depth in range(chance.randint(1, 4))
        ]
        for layer, below in zip(layers, layers[1:], strict=False):
            for node in layer:
                node.to = [each.name for each in below if chance.random() < 0.6]
            for each in below:
                if not any(each.name in node.to for node in layer):
                    chance.choice(layer).to.append(each.name)
        nodes = [node for layer in layers for node in layer]
        if chance.random() < 0.3:
            chance.choice(nodes).sends = chance.randint(1, 3)
        names = [node.name for node in nodes]
        if chance.random() < 0.3:
            outer = chance.choice(nodes)
            outer.inner = [
                _inner(chance, f"{outer.name}in{place}", is_async)
                for place in range(chance.randint(1, 2))
            ]
            names += [each.name for each in outer.inner]
        return cls(
            seed,
            chance.choice([Merged, Merged, Versioned]),
            nodes,
            [node.name for node in layers[0]],
            [chance.choice(nodes).name] if chance.random() < 0.15 else [],
            {name: chance.random() < 0.85 for name in [*names, "worker"]},
            chance.choice(["sync", "async", "exit"]),
            is_async,
            ["invoke", *chance.choices(_TURNS, k=chance.randint(1, 4))],
        )


_TURNS = ["invoke", "invoke", "resume", "update", "travel", "stream"]
_ACTIONS = [
    "append",
    "append",
    "append",
    "replace",
    "remove",
    "rewrite",
    "nothing",
    "plan",
    "fail",
    "interrupt",
    "overwrite",
    "flaky",
]


def _node(chance: random.Random, name: str, is_async: bool) -> NodeSpec:
    return NodeSpec(
        name,
        [chance.choice(_ACTIONS), chance.choice(_ACTIONS[:8])],
        is_async and chance.random() < 0.6,
        chance.choice([None, None, 0, 0.001]),
        chance.choice(["dict", "dict", "command", "list"]),
    )


def _inner(chance: random.Random, name: str, is_async: bool) -> NodeSpec:
    node = _node(chance, name, is_async)
    # The subgraph has no plan.
    node.actions = ["append" if action == "plan" else action for action in node.actions]
    node.to = [END]
    return node


class Failure(RuntimeError):
    """What a node raises on purpose."""


class Runner:
    """A graph that is built and run once, tracked if it has a history.

    Attributes:
        calls: how often each node was called.
        outcomes: of the turns: the state, or the exception.
    """

    def __init__(self, spec: GraphSpec, saver: Any, history: GraphHistory | None) -> None:
        self.spec = spec
        self.calls: Counter[str] = Counter()
        self.outcomes: list[Any] = []
        self.config = {"configurable": {"thread_id": f"seed {spec.seed}"}}
        self._history = history
        builder = StateGraph(spec.state)
        sending = [node for node in spec.nodes if node.sends]
        for node in spec.nodes:
            retry = RetryPolicy(max_attempts=2, initial_interval=0.0001, jitter=False)
            builder.add_node(
                node.name,
                self._wrapped(node.name, self._subgraph(node) or self._function(node)),
                retry_policy=retry if "flaky" in node.actions else None,
            )
            for name in node.to:
                builder.add_edge(node.name, name)
            if not node.to:
                builder.add_edge(node.name, END)
        for node in sending:
            builder.add_conditional_edges(node.name, partial(_fan, node.sends), ["worker"])
        if sending:
            builder.add_node("worker", self._wrapped("worker", self._worker))
        for name in spec.first:
            builder.add_edge(START, name)
        self.graph = builder.compile(checkpointer=saver, interrupt_before=spec.interrupts or None)

    async def arun(self) -> None:
        """Run all turns asynchronously."""
        for turn, kind in enumerate(self.spec.turns):
            self.outcomes.append(await self._outcome(turn, kind))

    def run(self) -> None:
        """Run all turns."""
        for turn, kind in enumerate(self.spec.turns):
            coroutine = self._outcome(turn, kind)
            try:
                coroutine.send(None)
            except StopIteration as end:
                self.outcomes.append(end.value)
            else:
                raise AssertionError("a synchronous run waits for nothing")

    @property
    def thread(self) -> str:
        """The thread's id."""
        return str(self.config["configurable"]["thread_id"])

    @property
    def is_through(self) -> bool:
        """Whether the last turn ended with no node left to run."""
        return not self.outcomes[-1][2]

    @property
    def messages(self) -> list[Any]:
        """Of the state after the last turn."""
        return self._values["messages"]

    async def _outcome(self, turn: int, kind: str) -> Any:
        given: Any = {"messages": [HumanMessage(f"q{turn}", id=f"q{turn}")], "plan": [f"p{turn}"]}
        where: Any = self.config
        how: Any = {"durability": self.spec.durability}
        try:
            if kind == "resume":
                given = Command(resume=f"resumed {turn}")
            elif kind == "travel":
                states = await self._states()
                where = states[(7 * turn + self.spec.seed) % len(states)].config
            elif kind == "update":
                where = await self._updated(turn)
            if kind == "stream" and self.spec.is_async:
                stream = self.graph.astream(given, where, stream_mode="values", **how)
                shown = [each async for each in stream]
            elif kind == "stream":
                shown = list(self.graph.stream(given, where, stream_mode="values", **how))
            elif self.spec.is_async:
                shown = await self.graph.ainvoke(given, where, **how)
            else:
                shown = self.graph.invoke(given, where, **how)
            result: Any = _said(shown)
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        state = await self._state()
        self._values = state.values or {"messages": []}
        return result, _said(state.values), state.next

    async def _state(self) -> Any:
        if self.spec.is_async:
            return await self.graph.aget_state(self.config)
        return self.graph.get_state(self.config)

    async def _states(self) -> list[Any]:
        if self.spec.is_async:
            return [each async for each in self.graph.aget_state_history(self.config)]
        return list(self.graph.get_state_history(self.config))

    async def _updated(self, turn: int) -> Any:
        states = await self._states()
        at = states[(5 * turn + self.spec.seed) % len(states)]
        messages = at.values.get("messages") or [HumanMessage("first", id="first")]
        changed = messages[0].model_copy(update={"content": f"updated {turn}"})
        arguments: Any = (at.config, {"messages": [changed]}, self.spec.first[0])
        if self.spec.is_async:
            return await self.graph.aupdate_state(*arguments)
        return self.graph.update_state(*arguments)

    def _subgraph(self, spec: NodeSpec) -> Any:
        """The subgraph that a node is; None if it is a function."""
        if not spec.inner:
            return None
        builder = StateGraph(Inner)
        before = START
        for node in spec.inner:
            builder.add_node(node.name, self._wrapped(node.name, self._function(node)))
            builder.add_edge(before, node.name)
            before = node.name
        builder.add_edge(before, END)
        return builder.compile()

    def _wrapped(self, name: str, function: Any) -> Any:
        if self._history is None or not self.spec.is_tracked[name]:
            return function
        has_plan = self.spec.seed % 3 == 0 and "in" not in name
        contexts = {"messages": None, "plan": None} if has_plan else None
        return track_edits(function, history=self._history, contexts=contexts, on_error="raise")

    def _function(self, spec: NodeSpec) -> Any:
        async def arun(state: Any) -> Any:
            if spec.delay_s is not None:
                await asyncio.sleep(spec.delay_s)
            return self._result(spec, state)

        def run(state: Any) -> Any:
            return self._result(spec, state)

        return arun if spec.is_async else run

    def _result(self, spec: NodeSpec, state: Any) -> Any:
        count = self.calls[spec.name]
        self.calls[spec.name] += 1
        action = spec.actions[min(count, len(spec.actions) - 1)]
        update = self._update(spec, action, count, state["messages"])
        if spec.form == "command":
            return Command(update=update)
        if spec.form == "list" and update:
            return [Command(update={key: value}) for key, value in update.items()]
        return update

    def _update(self, spec: NodeSpec, action: str, count: int, messages: list[Any]) -> Any:
        new = AIMessage(f"{spec.name} call {count}", id=f"{spec.name}-{count}")
        last = messages[-1] if messages else None
        is_alone = self._is_alone(spec)
        # Of the nodes beside one that fails, LangGraph keeps what happens to be through.
        if is_alone and (action == "fail" or (action == "flaky" and count == 0)):
            raise ConnectionError("flaky") if action == "flaky" else Failure(spec.name)
        if action == "interrupt":
            return {"messages": [ToolMessage(str(interrupt(spec.name)), tool_call_id="c")]}
        # The last nodes have something to record, so that the history ends with the last state.
        if action == "nothing" and spec.to:
            return {}
        if action == "plan" and spec.to:
            return {"plan": [f"{spec.name} {count}", "then"]} if is_alone else {}
        if action == "replace" and last is not None:
            changed = last.model_copy(update={"content": f"{last.content} by {spec.name}"})
            return {"messages": [changed, new]}
        if action == "remove" and last is not None:
            # Of nodes side by side only one can remove a message.
            return {"messages": [RemoveMessage(id=last.id), new] if is_alone else [new]}
        if action == "rewrite":
            return {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), new]}
        if action == "overwrite":
            return {"messages": Overwrite([*messages[:1], new]) if is_alone else [new]}
        return {"messages": new if count % 2 else [new]}

    def _is_alone(self, spec: NodeSpec) -> bool:
        """Whether no other task runs in the steps of a node."""
        beside = [each for each in self.spec.nodes if each.name[1] == spec.name[1]]
        return len(beside) == 1 and not any(each.sends for each in self.spec.nodes)

    def _worker(self, sent: Any) -> Any:
        self.calls["worker"] += 1
        return {"messages": [AIMessage(f"sent {sent['item']}")]}


def _fan(count: int, state: Any) -> list[Send]:
    return [Send("worker", {"item": item}) for item in range(count)]


def _said(value: Any) -> Any:
    """What a state says, without ids that are random."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], Interrupt):
        return sorted(str(each.value) for each in value)
    if isinstance(value, list):
        return [_said(each) for each in value]
    if isinstance(value, dict):
        return {key: _said(each) for key, each in value.items()}
    if hasattr(value, "type") and hasattr(value, "content"):
        is_random = value.id is None or len(value.id) == 36
        return value.type, value.content, None if is_random else value.id
    return value
