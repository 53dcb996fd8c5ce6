"""The report page: its numbers are those of the results, and its text is only text."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from patchkv_agents.cli.main import main
from patchkv_evals.errors import DataError, ReportError
from patchkv_evals.report import Written, write_report
from patchkv_evals.report.methods import in_order, style_of
from patchkv_evals.report.numbers import duration, kl
from patchkv_evals.running.results import read_run
from patchkv_evals.running.summary import summarise

from .page import Page
from .synthetic import (
    ABLATIONS,
    MACHINE,
    MAIN,
    records,
    resume_points,
    write_bench,
    write_run,
)

OTHER_MODEL = {"model": "Qwen/Qwen2.5-0.5B", "fingerprint": "c4b5a6"}
THREE = ("full_prefill", "prefix_cache", "patchkv")
ABLATED = (*THREE, *ABLATIONS[:3])


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Two data sets and ablations on one model, a second model, and one benchmark."""
    folder = tmp_path_factory.mktemp("results")
    failures = [
        {"row": "r-8", "edit": "flip", "method": None, "reason": "the answer is yes or no"},
        {"row": "r-9", "edit": "flip", "method": None, "reason": "the answer is yes or no"},
    ]
    edits = ("refresh", "flip")
    write_run(folder / "one" / "hotpotqa", records(edits=edits, rows=3), failures)
    lines = records("triviaqa", methods=THREE, edits=edits, rows=3)
    write_run(folder / "one" / "triviaqa", lines, dataset="triviaqa")
    lines = records(methods=ABLATED, edits=("refresh",), rows=2, seed=5)
    write_run(folder / "one" / "ablations", lines)
    lines = records(methods=THREE, rows=2, edits=("refresh",), seed=7, slower=3)
    write_run(folder / "two", lines, **OTHER_MODEL)
    write_bench(folder, "resume", resume_points("length"), variant="length")
    return folder


@pytest.fixture(scope="module")
def written(results) -> Written:
    return write_report([results], results / "out" / "report.html")


@pytest.fixture(scope="module")
def page(written) -> Page:
    return Page(written.page.read_text())


def small(folder: Path, lines: Any = (), failures: Any = (), **changes: Any) -> Page:
    """The page of one run without figures: drawing them takes the time of these tests."""
    write_run(folder / "run", lines, failures, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patchkv_evals.report.charts._render", lambda *_: b"")
        return Page(write_report([folder / "run"], folder / "report.html").page.read_text())


@pytest.mark.parametrize("folder, section", [("one", "model-1"), ("two", "model-2")])
def test_tables_hold_the_numbers_of_the_runs(folder, section, results, page):
    runs = [read_run(path.parent) for path in sorted((results / folder).rglob("config.json"))]
    runs.sort(key=lambda run: str(run.folder))
    unique: dict[tuple[Any, ...], Any] = {}
    for run in runs:
        for record in run.records:
            unique.setdefault((record["episode"], record["method"]), record)
    wanted_all = summarise({}, list(unique.values()), [])
    (table,) = page.in_section(f"{section}-tables")
    headers, *rows = table.rows
    groups: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        if len(row) == 1:
            group = groups.setdefault(row[0], {})
        else:
            group[row[0]] = dict(zip(headers, row, strict=True))
    wanted = dict(wanted_all["edits"])
    if len(wanted) > 1:
        wanted["all edits"] = wanted_all["methods"]
    assert groups.keys() == wanted.keys()
    for edit, methods in wanted.items():
        assert list(groups[edit]) == in_order(methods), "reference first"
        for method, metrics in methods.items():
            cells = groups[edit][method]
            f1, divergence = metrics["f1"], metrics["first_token_kl"]
            assert cells["n"] == str(f1["n"])
            low, high = (f"{100 * bound:.0f}" for bound in f1["ci"])
            assert cells["F1 [95 %]"] == f"{100 * f1['mean']:.1f} [{low}, {high}]"
            assert cells["KL median"] == kl(divergence["median"])
            low, high = (kl(bound) for bound in divergence["ci"])
            assert cells["KL mean [95 %]"] == f"{kl(divergence['mean'])} [{low}, {high}]"
            assert milliseconds(cells["TTFT median"]) == pytest.approx(
                metrics["resume_ttft_ms"]["median"], rel=0.01
            )
            assert percent(cells["same answer"]) == pytest.approx(
                100 * metrics["same_answer"]["mean"], abs=0.051
            )
            assert percent(cells["rows computed"]) == pytest.approx(
                100 * metrics["recompute_ratio"]["median"], abs=0.051
            )
            if method == "full_prefill":
                assert cells["payload of 16 bits"] == "–", "it reads none"


def milliseconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"ms": 1, "s": 1000}[unit]


def percent(text: str) -> float:
    return float(text.removesuffix(" %"))


def test_models_are_kept_apart(written, page):
    titles = ["smollm2, float32, cpu", "Qwen/Qwen2.5-0.5B, float32, cpu"]
    first = page.tables[0]
    assert [row[0] for row in first.rows[1:]] == titles
    for row, model in zip(first.rows[1:], written.models, strict=True):
        figures = model["methods"]["patchkv"]
        assert row[1] == f"{figures['n']} ({model['rows']})"
        speed = figures["speedups"]["prefix_cache"]
        assert row[2] == f"{speed['estimate']:.2f} × [{speed['low']:.2f}, {speed['high']:.2f}]"
    assert [model["episodes"] for model in written.models] == [12, 2]
    assert len(page.in_section("model-2-tables")) == 1


def test_the_same_model_on_another_machine_is_kept_apart(tmp_path):
    write_run(tmp_path / "slow", records(methods=THREE, rows=2))
    small(tmp_path, records(methods=THREE, rows=2), machine={**MACHINE, "cpu": "another"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patchkv_evals.report.charts._render", lambda *_: b"")
        both = write_report([tmp_path / "slow", tmp_path / "run"], tmp_path / "both.html")
    assert [model["episodes"] for model in both.models] == [6, 6]


def test_pooled_table_has_every_method_with_intervals(written, page):
    pooled = next(t for t in page.in_section("model-1-targets") if "pooled" in t.caption)
    rows = {row[0]: dict(zip(pooled.rows[0], row, strict=True)) for row in pooled.rows[1:]}
    assert list(rows) == [*MAIN[1:], *ABLATIONS[:3]]
    for name, row in rows.items():
        f1 = written.models[0]["methods"][name]["f1_difference"]
        text = f"{f1['estimate']:+.1f} [{f1['low']:+.1f}, {f1['high']:+.1f}]"
        assert row["F1 − full prefill's"] == text.replace("-", "−")
        speed = written.models[0]["methods"][name]["speedups"].get("prefix_cache")
        if speed is not None:
            text = f"{speed['estimate']:.2f} × [{speed['low']:.2f}, {speed['high']:.2f}]"
            assert row["speed-up over prefix_cache"] == text


def test_targets_that_are_missed_are_said_to_be(tmp_path):
    """PatchKV slower than wanted and with other answers."""
    lines = list(records(rows=4, methods=THREE))
    for line in lines:
        if line["method"] == "patchkv":
            line["metrics"] |= {"resume_ttft_ms": 1000.0, "same_answer": False}
    page = small(tmp_path, lines)
    verdicts = {row[0]: row[3] for row in page.in_section("model-1-targets")[0].rows[1:]}
    assert verdicts["resume TTFT against prefix_cache"] == "✗ missed"
    assert verdicts["same answer as full prefill"] == "✗ missed"


@pytest.mark.parametrize("rows, noted", [(29, True), (30, False)])
def test_few_rows_are_noted(rows, noted, tmp_path):
    page = small(tmp_path, records(methods=MAIN[:2], edits=("refresh",), rows=rows))
    assert (f"Only {rows} rows in all" in page.text) == noted


def test_text_from_outside_is_escaped_and_nothing_is_fetched(tmp_path):
    attack = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
    lines = list(records(rows=2, edits=("refresh",), methods=THREE))
    for line in lines:
        line["row"] += attack
        line["edit"] += attack
    failures = [{"row": "r", "edit": attack, "method": attack, "reason": attack}]
    changes = {"model": attack, "dataset": attack, "command": attack, "data": attack}
    page = small(tmp_path, lines, failures, **changes)
    html = (tmp_path / "report.html").read_text()
    assert "<script" not in html and "<img src=x" not in html
    assert page.text.count(attack) >= 5
    assert [cell for table in page.tables for row in table.rows for cell in row if cell == attack]
    assert not [a for a in page.addresses if not re.match(r"#|data:image/png;base64,|max-width", a)]


def test_text_that_is_no_utf8_is_shown_escaped(tmp_path):
    """As a command has it that names a file by other bytes."""
    page = small(tmp_path, records(rows=2, methods=MAIN[:2]), command="eval --data \udcff.jsonl")
    assert r"eval --data \udcff.jsonl" in page.text


def test_a_page_without_benchmarks_has_no_part_for_them(tmp_path):
    page = small(tmp_path, records(rows=2, methods=MAIN[:2]))
    assert "Benchmarks" not in page.text
    assert [image["alt"] for image in page.images if not image["alt"]] == []
    assert len(page.images) == 2


def test_a_run_that_only_failed_says_why(tmp_path):
    failures = [{"row": f"r-{n}", "edit": "flip", "method": None, "reason": "no"} for n in range(3)]
    failures += [{"row": "r-9", "edit": "flip", "method": None, "reason": "worse"}]
    page = small(tmp_path, failures=failures)
    assert "No method gave a result" in page.text and not page.images
    (table,) = page.in_section("failures")
    assert table.rows[1:] == [
        ["hotpotqa, 2,048 tokens", "flip", "all", "3", "no"],
        ["hotpotqa, 2,048 tokens", "flip", "all", "1", "worse"],
    ]


def test_how_to_reproduce_names_commands_and_data(page):
    assert "patchkv eval --dataset triviaqa --data triviaqa.jsonl --out triviaqa" in page.text
    assert "patchkv bench resume --out bench" in page.text
    assert f"hotpotqa.jsonl: SHA-256 {'ab' * 32}" in page.text
    assert "torch 2.13.0" in page.text and "Intel Xeon, 2 threads" in page.text


def test_figures_are_files_and_not_blank(written, page):
    names = [figure.name for figure in written.figures]
    assert names == [
        "model-1-speed.png",
        "model-1-edits.png",
        "model-2-speed.png",
        "model-2-edits.png",
    ]
    assert len(page.images) == len(names)
    for figure in written.figures:
        assert figure.parent.name == "report-figures"
        pixels = (255 * imread(figure)[..., :3]).round().astype(int)
        assert pixels[0, 0].tolist() == [255, 255, 255]
        assert 0.005 < (pixels != 255).any(-1).mean() < 0.5
        color = style_of("patchkv").color
        green = [int(color[place : place + 2], 16) for place in (1, 3, 5)]
        assert (pixels == green).all(-1).sum() > 100, "patchkv's marker is there"


def test_the_chart_by_edit_names_each_method_s_worst_kind(written, page):
    alt = next(image["alt"] for image in page.images if "kind of edit" in (image["alt"] or ""))
    table = page.in_section("model-1-tables")[0]
    headers, *rows = table.rows
    kls, group = [], ""
    for row in rows:
        group = row[0] if len(row) == 1 else group
        if row[0] == "patchkv" and group != "all edits":
            kls.append(float(row[headers.index("KL mean [95 %]")].split()[0]))
    shown = re.search(r"patchkv (\S+?)(;|$)", alt)
    assert shown is not None and float(shown[1]) == pytest.approx(max(kls), rel=0.07)


def test_a_benchmark_is_shown_as_its_command_prints_it(tmp_path):
    points = resume_points("precision")
    write_bench(tmp_path, "resume", points, variant="precision")
    page = Page(write_report([tmp_path], tmp_path / "report.html").page.read_text())
    (table,) = page.in_section("bench-resume-precision")
    assert "Resume by precision: smollm2" in page.text
    assert len(table.rows) == 1 + len(points)
    for point, row in zip(points, table.rows[1:], strict=True):
        cells = dict(zip(table.rows[0], row, strict=True))
        assert cells["method"] == point["method"].replace("_", " ")
        assert cells["value"] == (point["value"] or "-")
        assert cells["speedup"] == f"{point['speedup']:.2f}"
    assert not page.images and not (tmp_path / "report-figures").exists()


def test_an_unknown_benchmark_is_shown_as_it_is(tmp_path):
    write_bench(tmp_path, "something_new", [{"a": 1, "b": "<b>"}, {"a": None}])
    page = Page(write_report([tmp_path], tmp_path / "report.html").page.read_text())
    (table,) = page.in_section("bench-something_new")
    assert table.rows == [["a", "b"], ["1", '"<b>"'], ["null", "null"]]


def test_files_of_the_same_name_get_sections_of_their_own(tmp_path):
    for folder in ("a", "b"):
        write_bench(tmp_path / folder, "store", [])
    page = Page(write_report([tmp_path], tmp_path / "report.html").page.read_text())
    assert "bench-store-1" in (html := (tmp_path / "report.html").read_text())
    assert "bench-store-2" in html and page.text.count("The file holds no points.") == 2


def test_methods_differ_without_color():
    styles = [style_of(name) for name in (*MAIN, *ABLATIONS)]
    assert len({style.marker for style in styles}) == len(styles)
    assert all(style.explanation for style in styles)
    assert style_of("made_up").marker == "+"
    assert in_order(["made_up", "patchkv_int4", "patchkv", "full_prefill"]) == [
        "full_prefill",
        "patchkv",
        "patchkv_int4",
        "made_up",
    ]


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


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: None, "is not a folder"),
    "empty": (lambda folder: folder.mkdir(), "holds no results"),
    "no JSON": (
        lambda folder: (folder.mkdir(), (folder / "bench-plan.json").write_text("{")),
        "is not a file that 'patchkv bench' wrote",
    ),
    "another form": (
        lambda folder: write_bench(folder, "plan", [], schema=9),
        "run the benchmark again",
    ),
    "a field of the file is missing": (
        lambda folder: (
            path := write_bench(folder, "store", []),
            path.write_text(path.read_text().replace('"command"', '"order"')),
        ),
        "run the benchmark again",
    ),
    "no method": (
        lambda folder: write_bench(folder, "resume", [{"value": 1}], variant="length"),
        "run the benchmark again",
    ),
    "a field is missing": (
        lambda folder: write_bench(folder, "plan", [{"tokens": 3}]),
        "run the benchmark again",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_wrong_folders_and_files_are_errors_of_usage(case, tmp_path):
    make, message = BROKEN[case]
    make(tmp_path / "folder")
    with pytest.raises(DataError, match=message) as error:
        write_report([tmp_path / "folder"], tmp_path / "report.html")
    assert error.value.exit_status == 2
    assert str(tmp_path / "folder") in str(error.value)
    assert not (tmp_path / "report.html").exists()


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    write_run(tmp_path / "run", records(rows=1))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ReportError, match=r"pip install 'patchkv-agents\[report\]'"):
        write_report([tmp_path / "run"], tmp_path / "report.html")


def test_a_page_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    bench = write_bench(tmp_path / "run", "store", [])
    with pytest.raises(ReportError, match="choose another --out"):
        write_report([bench.parent], tmp_path / "file" / "report.html")


def run(capsys: pytest.CaptureFixture[str], *arguments: Any, status: int = 0) -> str:
    """Run the command, and give what it printed; its errors where it fails."""
    with pytest.raises(SystemExit) as exit:
        main(["report", *map(str, arguments)])
    output = capsys.readouterr()
    assert exit.value.code == status, output.err
    return output.err if status else output.out


def test_the_command_refuses_a_wrong_folder(tmp_path, capsys):
    assert "is not a folder" in run(capsys, tmp_path / "none", status=2)
    (tmp_path / "empty").mkdir()
    assert "holds no results" in run(capsys, tmp_path / "empty", "--json", status=2)
    assert "Missing argument" in run(capsys, status=2)


def test_the_command_prints_a_document_or_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("patchkv_evals.report.charts._render", lambda *_: b"")
    write_run(tmp_path / "run", records(methods=THREE, rows=2))
    out = tmp_path / "new" / "page.html"
    document = json.loads(run(capsys, tmp_path / "run", "--out", out, "--json"))
    assert document["page"] == str(out) and out.exists()
    names = ("model-1-speed.png", "model-1-edits.png")
    assert document["figures"] == [str(out.with_name("page-figures") / name) for name in names]
    (model,) = document["models"]
    assert model["targets"]["patchkv"][0]["name"] == "resume TTFT against prefix_cache"
    printed = run(capsys, tmp_path / "run", "--out", out)
    assert "smollm2, float32, cpu: patchkv" in printed and "2 figures in page-figures" in printed
