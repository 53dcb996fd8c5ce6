"""How the report names, explains and draws the methods.

Colours are the Okabe-Ito palette (Okabe and Ito, Color Universal Design, 2008), darkened for white
and lightened for dark ground; every method differs from every other by its marker too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from patchkv_evals.running.spec import FULL_PREFILL

REFERENCE = FULL_PREFILL
PREFIX_CACHE = "prefix_cache"
CACHEBLEND = "cacheblend"
PATCHKV = "patchkv"


@dataclass(frozen=True, slots=True)
class MethodStyle:
    """A method in tables and figures.

    Attributes:
        explanation: one line for the reader.
        colours: on white and on dark ground.
        marker: Matplotlib's name of the marker.
        hollow: drawn as an outline: a variant of the method that has the same colour filled.
        ablation: shown in the ablations' own figure, and not among the main methods.
    """

    name: str
    explanation: str
    colours: tuple[str, str]
    marker: str
    hollow: bool = False
    ablation: bool = False


_INK = ("#3a3a3a", "#d6d6d6")
_BLUE = ("#0072b2", "#56b4e9")
_ORANGE = ("#b85400", "#e69f00")
_PURPLE = ("#a1468a", "#d991bc")
_GREEN = ("#00795a", "#2cc295")
_GREY = ("#757575", "#a0a0a0")


def _main(
    name: str, explanation: str, colours: tuple[str, str], marker: str, hollow: bool = False
) -> MethodStyle:
    return MethodStyle(name, explanation, colours, marker, hollow)


def _ablation(name: str, explanation: str, marker: str) -> MethodStyle:
    return MethodStyle(name, explanation, _GREY, marker, hollow=True, ablation=True)


_STYLES = {
    style.name: style
    for style in (
        _main(REFERENCE, "everything computed anew: the reference of all comparisons", _INK, "D"),
        _main(
            PREFIX_CACHE,
            "keeps what precedes the first change, computes all that follows (exact)",
            _BLUE,
            "s",
        ),
        _main(
            "direct_reuse",
            "moves the old keys and values to their new positions and repairs nothing",
            _ORANGE,
            "v",
        ),
        _main(
            CACHEBLEND,
            "recomputes the share of tokens whose values differ most at an early layer",
            _PURPLE,
            "^",
        ),
        _main(
            "cacheblend_released",
            "CacheBlend with the attention mask of its public code",
            _PURPLE,
            "<",
            hollow=True,
        ),
        _main(
            "patchkv_published",
            "the published method: a window after the edit and the most attended tokens",
            _GREEN,
            "h",
            hollow=True,
        ),
        _main(
            PATCHKV,
            "the default: a window after each edit and the prompt's last tokens",
            _GREEN,
            "o",
        ),
        _ablation("patchkv_attention", "patchkv with the most attended blocks, 3 %", "P"),
        _ablation("patchkv_no_window", "patchkv without the window after the edit", "X"),
        _ablation("patchkv_no_tail", "patchkv without the prompt's last tokens", ">"),
        _ablation(
            "patchkv_contiguous", "as many rows as patchkv, all of them right after the edit", "p"
        ),
        _ablation("patchkv_edited", "patchkv with the blocks that attended most to the edit", "1"),
        _ablation("patchkv_combined", "patchkv with blocks by both kinds of attention", "2"),
        _ablation("patchkv_question", "patchkv with the blocks that the question attends to", "3"),
        _ablation("patchkv_uncapped", "patchkv with no limit on what is recomputed", "x"),
        _ablation("patchkv_fp16", "patchkv with all rows stored in 16 bits", "d"),
        _ablation("patchkv_int8", "patchkv with all rows stored in 8 bits", "8"),
        _ablation("patchkv_int4", "patchkv with all rows stored in 4 bits", "*"),
    )
}


def style_of(name: str) -> MethodStyle:
    """A method's style; methods that this page does not know are drawn as grey crosses."""
    return _STYLES.get(name) or MethodStyle(name, "", _GREY, "x")


def in_order(names: Iterable[str]) -> list[str]:
    """Each name once: reference, baselines, PatchKV, ablations, then others by name."""
    known = {name: place for place, name in enumerate(_STYLES)}
    return sorted(set(names), key=lambda name: (known.get(name, len(known)), name))


_SERIES = ((_BLUE, "o"), (_ORANGE, "s"), (_GREEN, "^"), (_PURPLE, "D"), (_INK, "v"), (_GREY, "X"))


def series_style(index: int, label: str) -> MethodStyle:
    """A style for a quantity that is no method; the marker and colour differ for six of them."""
    colours, marker = _SERIES[index % len(_SERIES)]
    return MethodStyle(label, "", colours, marker, hollow=index >= len(_SERIES))
