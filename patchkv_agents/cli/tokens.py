"""The tokenizer behind the option `--model`, local or hosted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchkv_agents.console import new_console

if TYPE_CHECKING:
    from patchkv_agents.context import ContextVersion, RenderedContext

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Model whose tokens are counted: smollm2 (embedded), a folder, a model id, or a "
        "hosted model such as gpt-4o.",
    ),
]


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """Rendering and decoding with the tokens of one model.

    Attributes:
        render: a version as the model reads it, with the prompt for its answer.
        decode: the text of a token id.
        counting: for a hosted model, how its tokens are counted; None for others.
        estimate: whether that is an estimate.
    """

    render: Callable[[ContextVersion], RenderedContext]
    decode: Callable[[int], str]
    counting: str | None = None
    estimate: bool = False


def load_tokens(model: str) -> ModelTokens:
    """Load the tokenizer of a model, with a note on stderr while that lasts.

    Raises:
        ModelNotFoundError: there is no such model, or it cannot be fetched.
        UnsupportedModelError: Transformers cannot load it.
    """
    from patchkv_agents.backends.transformers import loading
    from patchkv_agents.context import render
    from patchkv_agents.context.rendering.hosted import is_hosted, load_hosted

    with new_console(stderr=True).status(f"Loading the tokenizer of {model}"):
        # A folder of that name is meant, should there be one.
        if not Path(model).is_dir() and is_hosted(model):
            hosted = load_hosted(model)
            return ModelTokens(
                hosted.render, hosted.decode, hosted.counting, estimate=hosted.estimate
            )
        tokenizer = loading.load_tokenizer(model)
    return ModelTokens(
        lambda version: render(version, tokenizer), lambda token: str(tokenizer.decode([token]))
    )
