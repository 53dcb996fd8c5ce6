"""`patchkv bench`: what recovery costs, part by part.

The measuring itself is in `patchkv_evals.benchmarks`, one module a command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from patchkv_agents.cli.bench_view import counts_of, show, show_step, values_of
from patchkv_agents.cli.options import AsJson, ModelOption
from patchkv_agents.errors import InputError

bench = typer.Typer(
    help="Measure what recovery costs: resumes, and each part of them.", no_args_is_help=True
)

Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds; figures are medians.")]
Out = Annotated[Path | None, typer.Option(help="Also write bench-<name>.json into this folder.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Layers = Annotated[int, typer.Option(min=1, help="Layers of the model whose rows these could be.")]
KvHeads = Annotated[int, typer.Option(min=1, help="Its key-value heads.")]
HeadDim = Annotated[int, typer.Option(min=8, help="Its head size, a multiple of 8.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]


@bench.command()
def resume(
    sweep: Annotated[
        str, typer.Option(help="length, position, edit_size, attention, block or precision.")
    ] = "length",
    values: Annotated[
        str | None,
        typer.Option(help="Of what is swept: 1000,2000 or 0.1,0.5 or int8,mixed."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of the context; 4000 if left out.")
    ] = None,
    position: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Where the edit is, as a share of the context."),
    ] = None,
    edit_size: Annotated[int | None, typer.Option(min=2, help="Tokens of the edit.")] = None,
    baselines: Annotated[
        str, typer.Option(help="What patchkv is compared with besides prefix_cache.")
    ] = "direct_reuse,cacheblend",
    rounds: Rounds = 3,
    model: ModelOption = "smollm2",
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure time to first token after an edit, and its KL, while one setting varies."""
    from patchkv_evals.benchmarks import resume as benchmark

    if sweep not in benchmark.SWEEPS:
        known = ", ".join(benchmark.SWEEPS)
        raise InputError(f"there is no sweep '{sweep}': use one of {known}")
    fixed = {"length": tokens, "position": position, "edit_size": edit_size}
    if fixed.get(sweep) is not None:
        raise InputError(f"the {sweep} is what is swept: give its values to --values alone")
    config = benchmark.ResumeConfig(
        sweep=sweep,
        values=() if values is None else _swept(sweep, values),
        tokens=tokens or benchmark.DEFAULT_TOKENS,
        position=position,
        edit_tokens=edit_size,
        baselines=tuple(name.strip() for name in baselines.split(",") if name.strip()),
        rounds=rounds,
        model=model,
    )
    result = benchmark.resume(_engine(model), config, show_step)
    show(result, benchmark.COLUMNS, as_json=as_json, out=out)


@bench.command()
def restore(
    tokens: Annotated[str, typer.Option(help="Lengths.")] = "1000,4000,8000",
    formats: Annotated[
        str, typer.Option(help="Formats of the stored rows.")
    ] = "native,f16,k8v8,k8v4,k4v4,mixed",
    layers: Layers = 30,
    kv_heads: KvHeads = 3,
    head_dim: HeadDim = 64,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    rounds: Rounds = 9,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure restoring rows by format and length. Sizes are those of the embedded model."""
    from patchkv_evals.benchmarks import restore as benchmark
    from patchkv_evals.benchmarks.synthetic import RowShape

    config = benchmark.RestoreConfig(
        counts_of(tokens, "--tokens"),
        values_of(formats, str, "--formats"),
        RowShape(layers, kv_heads, head_dim, dtype, device),
        rounds,
    )
    result = benchmark.restore(config, show_step)
    show(result, benchmark.COLUMNS, as_json=as_json, out=out)


@bench.command()
def store(
    tokens: Annotated[int, typer.Option(min=1, help="Length of the context.")] = 4000,
    folder: Annotated[
        Path | None, typer.Option(help="Where to put a temporary folder of checkpoints.")
    ] = None,
    redis: Annotated[
        str | None, typer.Option(help="Address of a server, instead of one of its own.")
    ] = None,
    layers: Layers = 30,
    kv_heads: KvHeads = 3,
    head_dim: HeadDim = 64,
    dtype: Dtype = "float32",
    rounds: Rounds = 5,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure saving and loading a checkpoint by store and format, in the embedded model's size."""
    from patchkv_evals.benchmarks import store as benchmark
    from patchkv_evals.benchmarks.synthetic import RowShape

    config = benchmark.StoreConfig(
        tokens,
        None if folder is None else str(folder),
        redis,
        RowShape(layers, kv_heads, head_dim, dtype),
        rounds,
    )
    result = benchmark.store(config, show_step)
    show(result, benchmark.COLUMNS, as_json=as_json, out=out)


@bench.command()
def plan(
    tokens: Annotated[str, typer.Option(help="Lengths.")] = "1000,4000,10000",
    edits: Annotated[int, typer.Option(min=1, help="Places that change.")] = 1,
    layers: Layers = 30,
    kv_heads: KvHeads = 3,
    head_dim: HeadDim = 64,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    rounds: Rounds = 9,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure the parts of planning: scores, alignment, repair set, precision. Needs no model."""
    from patchkv_evals.benchmarks import plan as benchmark
    from patchkv_evals.benchmarks.synthetic import RowShape

    config = benchmark.PlanConfig(
        counts_of(tokens, "--tokens"),
        edits,
        RowShape(layers, kv_heads, head_dim, dtype, device),
        rounds,
    )
    result = benchmark.plan(config, show_step)
    show(result, benchmark.COLUMNS, as_json=as_json, out=out)


def _engine(model: str) -> Any:
    from patchkv_agents.engine import Engine

    show_step(f"loading {model}")
    return Engine.from_pretrained(model)


def _swept(sweep: str, text: str) -> tuple[Any, ...]:
    if sweep == "precision":
        return values_of(text, str, "--values")
    if sweep in ("position", "attention"):
        return values_of(text, float, "--values")
    return counts_of(text, "--values")
