"""The report's figures and tables of benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from patchkv_evals.report import write_report
from patchkv_evals.report.bench_analyses import _concentration
from patchkv_evals.report.bench_sections import bench_order
from patchkv_evals.report.charts import Chart, Dot, Line, chart_picture
from patchkv_evals.report.methods import _STYLES, in_order, series_style, style_of
from patchkv_evals.report.numbers import duration, kl
from patchkv_evals.report.sources import read_sources
from patchkv_evals.report.style import DARK, KL_FLOOR, LIGHT, drawn_kl

from .page import Page
from .synthetic import other_benches, resume_points, write_bench

KINDS = (
    "restore", "formats", "drift", "selection", "sensitivity", "plan", "align", "attention",
    "packing", "store",
)  # fmt: skip


@pytest.fixture(scope="module")
def benches(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("benches")
    other_benches(folder)
    for sweep in ("attention", "precision"):
        write_bench(folder, "resume", resume_points(sweep), variant=sweep)
    return folder


@pytest.fixture(scope="module")
def page(benches) -> Page:
    return Page(write_report([benches], benches / "report.html").page.read_text())


def points_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return json.loads((folder / f"bench-{name}.json").read_text())["points"]


@pytest.mark.parametrize("kind", [*KINDS, "resume-attention", "resume-precision"])
def test_each_kind_has_a_section_with_its_figure(kind, benches, page):
    tables = page.in_section(f"bench-{kind}")
    assert tables and all(len(row) in (1, len(t.rows[0])) for t in tables for row in t.rows)
    assert f"bench-{kind}.json" in page.text
    figure = benches / "report-figures" / f"bench-{kind}.png"
    if kind == "store":
        assert not figure.exists()
    else:
        pixels = imread(figure)[..., :3]
        assert 0.005 < (pixels < 1).any(-1).mean() < 0.5
        # All panels are drawn: no third of the picture is empty.
        assert all((part < 1).any() for part in np.array_split(pixels, 3, axis=1))


def test_tables_hold_the_points(benches, page):
    points = points_of(benches, "resume-precision")
    rows = page.in_section("bench-resume-precision")[0].rows
    for point, row in zip(points, rows[1:], strict=True):
        cells = dict(zip(rows[0], row, strict=True))
        assert cells["method"] == point["method"]
        assert cells["precision"] == (point["value"] or "–")
        assert cells["speed-up"] == f"{point['speedup']:.2f} ×"
        low, high = (duration(each) for each in (point["ttft_rounds_ms"][0::2]))
        text = f"{duration(point['ttft_ms'])} [{low}, {high}]"
        assert cells["TTFT [range]"] == text.replace("\N{NO-BREAK SPACE}", " ")
    points = points_of(benches, "restore")
    rows = page.in_section("bench-restore")[0].rows
    assert len(rows) == 1 + len(points)
    assert [row[3] for row in rows[1:]] == [f"{100 * p['payload_ratio']:.1f} %" for p in points]
    (image,) = (image for image in page.images if "Payload and restore" in (image["alt"] or ""))
    longest = [point for point in points if point["tokens"] == 8000]
    for point in longest:
        assert f"{100 * point['payload_ratio']:.1f} %, {point['restore_ms']:.0f} ms" in image["alt"]


def test_drift_is_summed_up_by_distance(benches, page):
    (table,) = page.in_section("bench-drift")
    cells = next(row for row in table.rows if row[:2] == ["summarize", "64 to 128"])
    own = [
        point
        for point in points_of(benches, "drift")
        if point["edit"] == "summarize" and 64 <= point["distance"] < 128
    ]
    assert cells[2] == str(len(own))
    assert float(cells[3]) == pytest.approx(np.median([p["value_drift"] for p in own]), abs=1e-4)
    assert float(cells[6]) == pytest.approx(np.median([p["key_cosine"] for p in own]), abs=1e-4)


def test_selection_shows_gains_against_the_base_for_each_kind_of_edit(benches, page):
    (table,) = page.in_section("bench-selection")
    titles = [row[0] for row in table.rows if len(row) == 1]
    assert titles == ["all edits", "refresh", "flip"]
    points = points_of(benches, "selection")
    by_rule = {
        rule: [p["kl"] for p in points if p["rule"] == rule] for rule in ("base", "attention")
    }
    ratio = np.exp(np.mean(np.log(by_rule["base"])) - np.mean(np.log(by_rule["attention"])))
    row = next(row for row in table.rows if row[0] == "+ most attended")
    assert row[1] == "12" and row[4].startswith(f"{ratio:.2f} [")
    assert row[5] == "100 %" and row[6].startswith("+33.3 [")
    assert "Only 12 contexts" in page.text


def test_sensitivity_shows_how_concentrated_the_divergence_is(benches, page):
    (table,) = page.in_section("bench-sensitivity")
    assert [row[0] for row in table.rows[1:]] == ["row-0", "row-1", "row-2"]
    assert table.rows[1][5] == "85 %" and table.rows[1][-1] == "–"
    assert any("tenth has 85%" in (image["alt"] or "") for image in page.images)
    assert (benches / "report-figures" / "bench-sensitivity-place.png").exists()


def test_the_curve_starts_with_the_largest_and_reaches_all():
    blocks = [
        {"kl": kl, "risk": risk, "scored": kl != 1.0}
        for kl, risk in ((3.0, 1.0), (1.0, 2.0), (0.0, 3.0))
    ]
    own = {dot.x: dot.y for dot in _concentration([blocks], "kl")}
    assert own[0.0] == 0 and own[100.0] == 100
    assert own[50.0] == pytest.approx(87.5)  # half way between the first and the second
    # What is not scored comes first, then the risky block without any divergence.
    by_risk = {dot.x: dot.y for dot in _concentration([blocks], "risk")}
    assert by_risk[50.0] == pytest.approx(25.0) and by_risk[100.0] == 100


def test_packing_has_its_gain_in_words_and_figures(benches, page):
    (table,) = page.in_section("bench-packing")
    assert [row[-1] for row in table.rows[1:]] == ["2.10 ×", "1.20 ×", "0.99 ×"]
    assert any("64 rows: 1.20 times" in (image["alt"] or "") for image in page.images)


def test_the_published_sweep_comes_first_and_kinds_in_order(benches, tmp_path):
    write_bench(tmp_path, "resume", [], variant="length")
    write_bench(tmp_path, "something_new", [])
    found = sorted(read_sources([benches, tmp_path]).benches, key=bench_order)
    names = [f"{bench.name} {bench.config.get('sweep', '')}".strip() for bench in found]
    assert names == [
        "resume length",
        "resume attention",
        "resume precision",
        *KINDS,
        "something_new",
    ]


def test_an_unknown_benchmark_is_shown_as_it_is(tmp_path):
    write_bench(tmp_path, "something_new", [{"a": 1, "b": "<b>"}, {"a": None}])
    page = Page(write_report([tmp_path], tmp_path / "report.html").page.read_text())
    (table,) = page.in_section("bench-something_new")
    assert table.rows == [["a", "b"], ["1", '"<b>"'], ["null", "null"]]
    assert not page.images and not (tmp_path / "report-figures").exists()


def test_files_of_the_same_name_get_figures_of_their_own(tmp_path):
    for folder in ("a", "b"):
        write_bench(tmp_path / folder, "store", [])
    page = Page(write_report([tmp_path], tmp_path / "report.html").page.read_text())
    assert "bench-store-1" in (html := (tmp_path / "report.html").read_text())
    assert "bench-store-2" in html and page.text.count("The file holds no points.") == 2


def test_methods_and_series_differ_without_colour():
    marks = [(style.marker, style.hollow) for style in _STYLES.values()]
    assert len(set(marks)) == len(marks)
    assert all(style.explanation for style in _STYLES.values())
    series = [series_style(index, "") for index in range(12)]
    assert len({(style.marker, style.hollow) for style in series}) == 12
    assert style_of("made_up").marker == "x"
    assert in_order(["made_up", "patchkv_int4", "patchkv", "full_prefill"]) == [
        "full_prefill",
        "patchkv",
        "patchkv_int4",
        "made_up",
    ]


def test_charts_are_drawn_for_both_grounds_and_take_zero_divergence(tmp_path):
    line = Line(style_of("patchkv"), (Dot(1, 0.0, 0.0, 0.0), Dot(4, 0.01, 0.001, 0.1)))
    picture = chart_picture("n", "a", "c", [Chart("x", "y", (line,), "values", "kl")])
    for content, theme in ((picture.light, LIGHT), (picture.dark, DARK)):
        path = tmp_path / "picture.png"
        path.write_bytes(content)
        corner = (255 * imread(path)[0, 0, :3]).round().astype(int)
        assert "#" + "".join(f"{value:02x}" for value in corner) == theme.ground
    assert drawn_kl(0.0) == KL_FLOOR and drawn_kl(0.5) == 0.5


@pytest.mark.parametrize(
    "ms, text", [(0.314, "0.31 ms"), (3.14, "3.1 ms"), (314.2, "314 ms"), (999.6, "1.00 s")]
)
def test_durations_have_the_digits_that_matter(ms, text):
    assert duration(ms) == text.replace(" ", "\N{NO-BREAK SPACE}")


def test_divergences_are_never_shown_as_zero_unless_they_are():
    assert [kl(value) for value in (0, 2e-8, 4e-4, 0.0123, None)] == [
        "0",
        "2.0e-08",
        "4.0e-04",
        "0.0123",
        "–",
    ]
