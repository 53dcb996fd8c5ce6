"""`patchkv bench`: what recovery costs, part by part.

The measuring itself is in `patchkv_evals.benchmarks`, one module a command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from patchkv_agents.cli.bench_view import counts_of, show, told, values_of
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
Data = Annotated[Path | None, typer.Option(help="Rows of a data set instead of the demo's text.")]
Dataset = Annotated[str | None, typer.Option(help="What the rows are, such as hotpotqa.")]


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
    result = benchmark.resume(_engine(model), config, told)
    tables = [(benchmark.COLUMNS, result.points)]
    show(result, tables, as_json=as_json, out=out, notes=benchmark.notes(result))


@bench.command()
def align(
    tokens: Annotated[str, typer.Option(help="Lengths.")] = "1000,4000,16000,64000",
    hunks: Annotated[str, typer.Option(help="Numbers of edits.")] = "1,8,64",
    rounds: Rounds = 9,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure alignment and planning by length and number of edits. Needs no model."""
    from patchkv_evals.benchmarks import align as benchmark

    config = benchmark.AlignConfig(
        counts_of(tokens, "--tokens"), counts_of(hunks, "--hunks"), rounds
    )
    result = benchmark.align_and_plan(config, told)
    show(result, [(benchmark.COLUMNS, result.points)], as_json=as_json, out=out)


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
    result = benchmark.restore(config, told)
    show(result, [(benchmark.COLUMNS, result.points)], as_json=as_json, out=out)


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
    result = benchmark.store(config, told)
    show(result, [(benchmark.COLUMNS, result.points)], as_json=as_json, out=out)


@bench.command()
def formats(
    data: Data = None,
    dataset: Dataset = None,
    limit: Annotated[int, typer.Option(min=1, help="Contexts.")] = 12,
    tokens: Annotated[int, typer.Option(min=1, help="Longest context.")] = 1900,
    candidates: Annotated[
        int, typer.Option(min=0, help="Contexts on which all quantisers are compared.")
    ] = 0,
    model: ModelOption = "smollm2",
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure the bytes of the stored formats, and the KL of the next token that they cause."""
    from patchkv_evals.benchmarks import formats as benchmark

    config = benchmark.FormatsConfig(
        None if data is None else str(data), dataset, limit, tokens, candidates, model
    )
    result = benchmark.formats(_engine(model), config, told)
    mixes, others = (
        [point for point in result.points if (point["kind"] == "mix") is wanted]
        for wanted in (True, False)
    )
    tables = [(benchmark.COLUMNS, mixes), (benchmark.CANDIDATE_COLUMNS, others)]
    show(result, tables, as_json=as_json, out=out)


@bench.command()
def attention(
    tokens: Annotated[str, typer.Option(help="Lengths.")] = "1000,2000,4000",
    rounds: Rounds = 5,
    model: ModelOption = "smollm2",
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure what collecting attention scores adds to a prefill."""
    from patchkv_evals.benchmarks import attention as benchmark

    config = benchmark.AttentionConfig(counts_of(tokens, "--tokens"), rounds, model)
    result = benchmark.attention(_engine(model), config, told)
    show(result, [(benchmark.COLUMNS, result.points)], as_json=as_json, out=out)


@bench.command()
def plan(
    tokens: Annotated[str, typer.Option(help="Lengths.")] = "1000,4000,10000",
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
        RowShape(layers, kv_heads, head_dim, dtype, device),
        rounds,
    )
    result = benchmark.plan(config, told)
    show(result, [(benchmark.COLUMNS, result.points)], as_json=as_json, out=out)


@bench.command()
def packing(
    tokens: Annotated[int, typer.Option(min=1, help="Length of the contexts.")] = 2000,
    threads: Annotated[int, typer.Option(min=2, help="Threads that have rows to run.")] = 4,
    rows: Annotated[str, typer.Option(help="Rows of each thread.")] = "1,8,32,64,128,256,500",
    rounds: Rounds = 5,
    model: ModelOption = "smollm2",
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """What running the rows of several threads in one call could gain, at most."""
    from patchkv_evals.benchmarks import packing as benchmark

    config = benchmark.PackingConfig(tokens, threads, counts_of(rows, "--rows"), rounds, model)
    result = benchmark.packing(_engine(model), config, told)
    show(result, [(benchmark.COLUMNS, result.points)], as_json=as_json, out=out)


@bench.command()
def drift(
    data: Data = None,
    dataset: Dataset = None,
    edit: Annotated[
        str, typer.Option(help="Kind of the edits of rows: refresh, flip, ...")
    ] = "refresh",
    limit: Annotated[int, typer.Option(min=1, help="Episodes made of rows.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the contexts.")] = 2000,
    block: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 32,
    model: ModelOption = "smollm2",
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure the drift of old keys and values by distance from the edit."""
    from patchkv_evals.benchmarks import drift as benchmark

    config = benchmark.DriftConfig(
        tokens, None if data is None else str(data), dataset, edit, limit, block, model
    )
    result = benchmark.drift(_engine(model), config, told)
    lines = benchmark.by_distance(result.points)
    show(result, [(benchmark.COLUMNS, lines)], as_json=as_json, out=out)


@bench.command()
def sensitivity(
    data: Data = None,
    dataset: Dataset = None,
    edit: Annotated[str, typer.Option(help="Kind of the episodes made of rows.")] = "refresh",
    limit: Annotated[int, typer.Option(min=1, help="Contexts.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the contexts.")] = 1500,
    block: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 32,
    format: Annotated[
        str, typer.Option(help="In which one block is stored: k8v8, k8v4 or k4v4.")
    ] = "k8v4",
    model: ModelOption = "smollm2",
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure each block's sensitivity to precision: one block lossy, all others exact."""
    from patchkv_evals.benchmarks import sensitivity as benchmark

    config = benchmark.SensitivityConfig(
        tokens, None if data is None else str(data), dataset, edit, limit, block, format, model
    )
    result = benchmark.sensitivity(_engine(model), config, told)
    tables = [(benchmark.COLUMNS, benchmark.contexts_of(result.points))]
    show(result, tables, as_json=as_json, out=out, notes=benchmark.notes(result))


@bench.command()
def selection(
    data: Data = None,
    dataset: Dataset = None,
    edits: Annotated[
        str, typer.Option(help="Kinds of the edits of rows: refresh,flip,summarize, ...")
    ] = "refresh",
    limit: Annotated[int, typer.Option(min=1, help="Episodes of each kind.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the contexts.")] = 1500,
    budget: Annotated[
        float, typer.Option(help="Blocks that a rule adds, as a share of what is behind the edit.")
    ] = 0.05,
    window: Annotated[int, typer.Option(min=0, help="Window of all rules, tokens.")] = 32,
    tail: Annotated[int, typer.Option(min=1, help="Query tail of all rules, tokens.")] = 64,
    draws: Annotated[int, typer.Option(min=1, help="Draws of the random rule.")] = 3,
    model: ModelOption = "smollm2",
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Measure what recomputing further blocks gains, by the rule that chooses them."""
    from patchkv_evals.benchmarks import selection as benchmark
    from patchkv_evals.benchmarks.selection_summary import summed_up

    config = benchmark.SelectionConfig(
        tokens,
        None if data is None else str(data),
        dataset,
        values_of(edits, str, "--edits"),
        limit,
        budget,
        window,
        tail,
        draws,
        model,
    )
    result = benchmark.selection(_engine(model), config, told)
    tables = [(benchmark.COLUMNS, summed_up(result.points))]
    show(result, tables, as_json=as_json, out=out)


def _engine(model: str) -> Any:
    from patchkv_agents.engine import Engine

    told(f"loading {model}")
    return Engine.from_pretrained(model)


def _swept(sweep: str, text: str) -> tuple[Any, ...]:
    if sweep == "precision":
        return values_of(text, str, "--values")
    if sweep in ("position", "attention"):
        return values_of(text, float, "--values")
    return counts_of(text, "--values")
