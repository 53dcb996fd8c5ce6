"""Resume TTFT of PatchKV against prefix cache on the demo's episode, and where the time goes.

    python -m patchkv_evals.resume_bench [--model M] [--tokens 4000 8000] [--rounds 5] [--json FILE]

All methods run interleaved in one process, from the same stored state; figures are medians, with
the smallest and largest in brackets. The last columns compare PatchKV's TTFT with a bound: its
restore time, one decode step, and 1.25 times the computed rows at prefix cache's time per row.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from patchkv_agents.baselines import DIRECT_REUSE, PREFIX_CACHE, MethodResult, compare_methods
from patchkv_agents.cli.episode import Episode, build_episode
from patchkv_agents.context import Conversation, parse_messages, parse_tools, render
from patchkv_agents.engine import Engine
from patchkv_agents.recovery import RecoveryPolicy

BOUND_FACTOR = 1.25
"""Allowed cost of a computed row, in units of prefix cache's time per row."""

_GROUPS = {
    "aten::addmm": "linear layers",
    "aten::mm": "linear layers",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::bmm": "attention scores kept for later",
    "aten::_softmax": "attention scores kept for later",
    "aten::copy_": "copies (restore, scatter)",
}


@dataclass(frozen=True, slots=True)
class ResumeFigures:
    """One line of the benchmark; times in milliseconds."""

    tokens: int
    recompute_ratio: float
    first_token_kl: float
    prefix_cache_ms: tuple[float, ...]
    direct_reuse_ms: tuple[float, ...]
    patchkv_ms: tuple[float, ...]
    planning_ms: float
    restore_ms: float
    recompute_ms: float
    decode_step_ms: float
    bound_ms: float

    @property
    def speedup(self) -> float:
        """Median prefix cache / median PatchKV."""
        return median(self.prefix_cache_ms) / median(self.patchkv_ms)

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**values, "speedup": self.speedup}


def episode_of(engine: Engine, tokens: int) -> Episode:
    """The demo's episode at `tokens` tokens of the engine's model."""
    return build_episode(
        tokens,
        lambda messages, tools: len(render(messages, engine.tokenizer, tools=tools)),
    )


def measure(engine: Engine, tokens: int, rounds: int) -> ResumeFigures:
    """Measure one context length; see the module's text."""
    episode = episode_of(engine, tokens)
    tools = parse_tools(episode.tools)
    comparison = compare_methods(
        engine,
        Conversation(parse_messages(episode.old), tools),
        Conversation(parse_messages(episode.new), tools),
        (PREFIX_CACHE, DIRECT_REUSE, RecoveryPolicy.default()),
        rounds=rounds,
        progress=lambda step: print(f"{tokens} tokens: {step}", file=sys.stderr, flush=True),
    )
    prefix_cache, patchkv = (comparison.methods[name] for name in ("prefix_cache", "patchkv"))
    ms_per_row = prefix_cache.reply.report.recompute_ms / _rows(prefix_cache)
    decode_step_ms = _decode_step_ms(engine, episode, rounds)
    report = patchkv.reply.report
    return ResumeFigures(
        tokens=report.tokens,
        recompute_ratio=report.recompute_ratio,
        first_token_kl=patchkv.first_token_kl,
        prefix_cache_ms=prefix_cache.rounds_ms,
        direct_reuse_ms=comparison.methods["direct_reuse"].rounds_ms,
        patchkv_ms=patchkv.rounds_ms,
        planning_ms=report.planning_ms,
        restore_ms=report.restore_ms,
        recompute_ms=report.recompute_ms,
        decode_step_ms=decode_step_ms,
        bound_ms=report.restore_ms + decode_step_ms + BOUND_FACTOR * _rows(patchkv) * ms_per_row,
    )


def _rows(result: MethodResult) -> int:
    return len(result.reply.plan.rows)


def _decode_step_ms(engine: Engine, episode: Episode, rounds: int) -> float:
    thread = engine.thread("bench/decode")
    thread.generate(episode.new, tools=episode.tools, max_new_tokens=1)
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        thread.sequence.append(100)
        times.append((time.perf_counter() - started) * 1e3)
    engine.drop("bench/decode")
    return median(times[1:])


def profile(engine: Engine, tokens: int) -> dict[str, float]:
    """Milliseconds of one PatchKV resume by kind of work, from torch's profiler (CPU only)."""
    episode = episode_of(engine, tokens)
    thread = engine.thread("bench/profile")
    thread.generate(episode.old, tools=episode.tools, max_new_tokens=1)
    thread.suspend()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        thread.generate(
            episode.new, tools=episode.tools, policy=RecoveryPolicy.default(), max_new_tokens=1
        )
    engine.drop("bench/profile")
    groups: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        group = _GROUPS.get(event.key, "other operators (norms, RoPE, activations, rotation)")
        groups[group] += event.self_cpu_time_total / 1e3
    return dict(sorted(groups.items(), key=lambda entry: -entry[1]))


def _spread(values: tuple[float, ...]) -> str:
    return f"{median(values):,.0f} [{min(values):,.0f}, {max(values):,.0f}]"


def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4000, 8000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    engine = Engine.from_pretrained(options.model)
    lines, profiles = [], {}
    for tokens in options.tokens:
        lines.append(measure(engine, tokens, options.rounds))
        if engine.adapter.device.type == "cpu":
            profiles[lines[-1].tokens] = profile(engine, tokens)
    for line in lines:
        print(
            f"\n{line.tokens:,} tokens, {options.rounds} rounds, {options.model}, "
            f"{torch.get_num_threads()} threads, torch {torch.__version__}\n"
            f"  prefix cache  {_spread(line.prefix_cache_ms)} ms\n"
            f"  direct reuse  {_spread(line.direct_reuse_ms)} ms\n"
            f"  PatchKV       {_spread(line.patchkv_ms)} ms: restore {line.restore_ms:.0f}, "
            f"recompute {line.recompute_ms:.0f}; planning before it {line.planning_ms:.1f}\n"
            f"  speedup {line.speedup:.2f} at recompute ratio {line.recompute_ratio:.3f}, "
            f"first-token KL {line.first_token_kl:.5f}\n"
            f"  bound {line.bound_ms:,.0f} ms (one decode step {line.decode_step_ms:.0f} ms)"
        )
        for group, ms in profiles.get(line.tokens, {}).items():
            print(f"    {ms:8.1f} ms  {group}")
    if options.json:
        document = {
            "model": options.model,
            "lengths": [line.to_dict() for line in lines],
            "profiles_ms": profiles,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
