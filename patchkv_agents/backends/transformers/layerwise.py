"""Running some of a model's layers: up to one of them, and from one of them on.

For models with a plain list of decoder layers. The contexts here change the model while they are
open, and put it back; to be entered with the model's lock held. Calls by other Python threads, such
as a program's own calls of the model, which know of no lock, go their usual way meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from patchkv_agents.errors import UnsupportedModelError


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder layers in order.

    Raises:
        UnsupportedModelError: the model has no plain list of them.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    if not isinstance(layers, torch.nn.ModuleList) or len(layers) != count:
        raise UnsupportedModelError(
            f"model type '{model.config.model_type}' has no plain list of decoder layers, between "
            "two of which rows could be chosen: use a method other than CacheBlend"
        )
    return layers


@contextmanager
def inputs_of(layer: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect the hidden states `[1, rows, hidden]` that go into a layer, call by call."""
    collected: list[torch.Tensor] = []
    owner = threading.get_ident()

    def collect(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == owner:
            collected.append(args[0] if args else kwargs["hidden_states"])

    handle = layer.register_forward_pre_hook(collect, with_kwargs=True)
    try:
        yield collected
    finally:
        handle.remove()


@contextmanager
def starting_at(layers: torch.nn.ModuleList, start: int, hidden: torch.Tensor) -> Iterator[None]:
    """Make calls of the model skip the layers in front of `start`, which gets `hidden`.

    Args:
        layers: of the model.
        start: index of the first layer that runs.
        hidden: its input, `[1, rows, hidden]`.
    """
    owner = threading.get_ident()

    def replace(
        _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if threading.get_ident() != owner:
            return args, kwargs
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    def skipping(usual: Callable[..., Any]) -> Callable[..., Any]:
        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == owner:
                return hidden_states
            return usual(hidden_states, *args, **kwargs)

        return forward

    skipped = [vars(layer) for layer in layers[:start]]
    usual = [layer.forward for layer in layers[:start]]
    # Accelerate puts a `forward` of its own on the instance.
    own = [attributes.get("forward") for attributes in skipped]
    handle = layers[start].register_forward_pre_hook(replace, with_kwargs=True)
    try:
        for attributes, usual_forward in zip(skipped, usual, strict=True):
            attributes["forward"] = skipping(usual_forward)
        yield
    finally:
        handle.remove()
        for attributes, forward in zip(skipped, own, strict=True):
            del attributes["forward"]
            if forward is not None:
                attributes["forward"] = forward
