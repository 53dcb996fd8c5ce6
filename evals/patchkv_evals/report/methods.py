"""How the report orders, explains and draws the methods.

Colors are the Okabe-Ito palette (Okabe and Ito, Color Universal Design, 2008), darkened for a white
page. Ablations are gray; every method differs from every other by its marker too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from patchkv_evals.running.spec import FULL_PREFILL

PREFIX_CACHE = "prefix_cache"
CACHEBLEND = "cacheblend"
PATCHKV = "patchkv"


@dataclass(frozen=True, slots=True)
class MethodStyle:
    """A method in tables and charts.

    Attributes:
        name: of the method.
        explanation: one line for the reader.
        color: of its marker.
        marker: Matplotlib's name of the marker.
    """

    name: str
    explanation: str
    color: str
    marker: str


_GRAY = "#757575"
_STYLES = {
    style.name: style
    for style in (
        MethodStyle(
            FULL_PREFILL,
            "everything computed anew: the reference of all comparisons",
            "#3a3a3a",
            "D",
        ),
        MethodStyle(
            PREFIX_CACHE,
            "keeps what precedes the first change, computes all that follows (exact)",
            "#0072b2",
            "s",
        ),
        MethodStyle(
            "direct_reuse",
            "moves the old keys and values to their new positions and repairs nothing",
            "#b85400",
            "v",
        ),
        MethodStyle(
            CACHEBLEND,
            "recomputes the share of tokens whose values differ most at an early layer",
            "#a1468a",
            "^",
        ),
        MethodStyle(
            "cacheblend_released",
            "CacheBlend with the attention mask of its public code",
            "#a1468a",
            "<",
        ),
        MethodStyle(
            "patchkv_published",
            "the published method: a window after the edit and the most attended tokens",
            "#00795a",
            "h",
        ),
        MethodStyle(PATCHKV, "the default policy", "#00795a", "o"),
        MethodStyle(
            "patchkv_attention", "patchkv with rows by received attention alone", _GRAY, "P"
        ),
        MethodStyle("patchkv_no_window", "patchkv without the window after the edit", _GRAY, "X"),
        MethodStyle("patchkv_no_tail", "patchkv without the prompt's last tokens", _GRAY, ">"),
        MethodStyle(
            "patchkv_contiguous",
            "as many rows as patchkv, all of them right after the edit",
            _GRAY,
            "p",
        ),
        MethodStyle(
            "patchkv_edited", "patchkv with rows by attention to the edit alone", _GRAY, "1"
        ),
        MethodStyle("patchkv_no_attention", "patchkv without rows chosen by attention", _GRAY, "2"),
        MethodStyle(
            "patchkv_question", "patchkv with rows that the question attends to", _GRAY, "3"
        ),
        MethodStyle("patchkv_uncapped", "patchkv with no limit on what is recomputed", _GRAY, "x"),
        MethodStyle("patchkv_fp16", "patchkv with all rows stored in 16 bits", _GRAY, "d"),
        MethodStyle("patchkv_int8", "patchkv with all rows stored in 8 bits", _GRAY, "8"),
        MethodStyle("patchkv_int4", "patchkv with all rows stored in 4 bits", _GRAY, "*"),
    )
}


def style_of(name: str) -> MethodStyle:
    """A method's style; other methods are drawn as gray pluses."""
    return _STYLES.get(name) or MethodStyle(name, "", _GRAY, "+")


def in_order(names: Iterable[str]) -> list[str]:
    """Each name once: reference, baselines, PatchKV, ablations, then others by name."""
    order = {name: place for place, name in enumerate(_STYLES)}
    return sorted(set(names), key=lambda name: (order.get(name, len(order)), name))
