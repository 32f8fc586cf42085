"""Pages, charts, comparisons and the command line."""

from __future__ import annotations

import dataclasses
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.bench_results import made_result
from tests.bench_stand_in import Script, scripted

from qwen_nvfp4_serve.bench.charts import draw_charts, footer_of
from qwen_nvfp4_serve.bench.compare import compare, comparison_markdown, differences, draw_comparison
from qwen_nvfp4_serve.bench.landscape import landscape_markdown
from qwen_nvfp4_serve.bench.published import find_published
from qwen_nvfp4_serve.bench.report import markdown
from qwen_nvfp4_serve.bench.result import Result, read_result, write_result
from qwen_nvfp4_serve.bench.samples import Failure
from qwen_nvfp4_serve.bench.series import lines
from qwen_nvfp4_serve.errors import QwenNvfp4Error, UsageError
from qwen_nvfp4_serve.gpus import find_gpu

COMMAND = Path(sys.executable).parent / "qwen-nvfp4"
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
SEEDS = find_published(["seed_35b", "seed_27b_marlin", "seed_27b_cutlass"])


def size_of(png: Path) -> tuple[int, int]:
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_markdown_names_card_failures_and_every_row() -> None:
    page = markdown(made_result(failure=Failure("dropped", "a|b")))
    assert "Measured on: **NVIDIA H200**" in page
    assert "1 of 30 measured requests failed." in page
    assert "- 1 x dropped: a\\|b" in page
    assert "| tg32 @ d4096 (c1) | 100.0 ±" in page
    assert "| 1/12 |" in page
    assert "| NVIDIA H200 | driver 580.1, SM 1980 of 1980 MHz" in page
    assert "| start to READY | 61 s |" in page
    assert "`Using MarlinLinearKernel for NVFP4 GEMM`" in page


@pytest.mark.parametrize("concurrencies", [(1,), (1, 4)])
def test_compare_one_run_gives_no_verdict(concurrencies: tuple[int, ...]) -> None:
    found = compare(*(made_result(rate, runs=1, concurrencies=concurrencies) for rate in (100.0, 200.0)))
    assert {(row.verdict, row.ratio_std) for row in found} == {("one run", None)}


def test_markdown_and_comparison_of_one_run_show_no_spread() -> None:
    one, other = made_result(runs=1, concurrencies=(1,)), made_result(200.0, runs=1, concurrencies=(1,))
    page = markdown(one)
    assert "±" not in page
    assert "One run. Measured on: **NVIDIA H200**." in page
    assert footer_of(one).endswith("· one run")
    assert footer_of(made_result(runs=1)).endswith("· one run, ± between its requests")
    assert "±" not in comparison_markdown(one, other, compare(one, other))
    assert "median of 3 runs ± standard deviation" in footer_of(made_result())


def test_markdown_names_the_processor_where_there_is_no_card() -> None:
    machine = dataclasses.replace(made_result().machine, card_name=None, cards_before=None, cards_after=None)
    page = markdown(made_result(machine=machine))
    assert f"| card | no card ({machine.cpu or 'unknown CPU'}) |" in page
    remote = dataclasses.replace(machine, remote=True)
    assert "| card | an unnamed card |" in markdown(made_result(machine=remote))


def test_markdown_published_rows_stand_beside_ours_with_their_card() -> None:
    page = markdown(made_result(), against=SEEDS)
    assert "| 35B stack (Marlin): decode at 4K | 196 | GeForce RTX 5090 |" in page
    assert "| 35B stack (Marlin): decode at 256K | 156 | GeForce RTX 5090 |" in page
    assert "| 27B stack, Marlin: decode depth not stated | 80 | GeForce RTX 5090 |" in page
    assert "| **tg32 @ d4096 (c1)** | 100.0 ±" in page
    assert "| NVIDIA H200 | this run |" in page


def test_markdown_goodput_and_interruption_are_said() -> None:
    page = markdown(made_result(ttft_limit_ms=150.0, tpot_limit_ms=9.95, complete=False))
    assert "**Interrupted: some cases are missing.**" in page
    assert "## Goodput within first token 150 ms, each token after 9.95 ms" in page
    assert "| pp2048 (c1), tg32 (c1) | 1/3 |" in page  # the run 1 % faster than 100 tokens/s


def test_lines_name_only_what_varies() -> None:
    result = made_result(prompts=(512, 2048))
    found = lines(result, "depth", lambda seen: seen.decode_total)
    assert [line.label for line in found] == [
        "pp512, 1 stream",
        "pp512, 4 streams",
        "pp2K, 1 stream",
        "pp2K, 4 streams",
    ]
    assert [point.x for point in found[0].points] == [0, 4096]
    (only,) = lines(made_result(concurrencies=(1,)), "depth", lambda seen: seen.decode_total)
    assert only.label == ""


def test_charts_are_drawn_from_the_file_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_result(tmp_path / "result.json", made_result(failure=Failure("http", "HTTP 500")))
    made = draw_charts(read_result(tmp_path), tmp_path, SEEDS)
    assert [png.name for png in made] == ["depth.png", "streams.png", "latency.png", "published.png"]
    for png in made:
        assert min(size_of(png)) > 400
        assert png.with_suffix(".svg").stat().st_size > 5000
    assert "RTX 5090, at 256K" in (tmp_path / "published.svg").read_text()


def test_charts_of_one_case_are_an_overview_and_equal_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = made_result(depths=(0,), concurrencies=(1,))
    first = draw_charts(result, tmp_path / "a")
    assert [png.name for png in first] == ["overview.png", "latency.png"]
    draw_charts(result, tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_charts_of_a_run_in_which_all_failed_are_still_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = made_result(depths=(0,), concurrencies=(1,), runs=1, failure=Failure("connect", "refused"))
    assert result.cases[0].metrics.decode_total is None
    assert len(draw_charts(result, tmp_path, SEEDS)) == 3


def test_prefill_that_a_small_request_outlasts_is_said_and_not_called_failed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = made_result(depths=(0,), concurrencies=(1,), runs=2)
    (case,) = result.cases
    late = dataclasses.replace(case.metrics, prefill_total=None, prefill_request=None)
    slow = dataclasses.replace(result, latency_ms=150.0, cases=(dataclasses.replace(case, metrics=late),))
    note = "2 first tokens came within the 150.00 ms of a small request: their prompts have no prefill rate."
    assert note in markdown(slow)
    assert "prefill rate" not in markdown(result)
    draw_charts(slow, tmp_path, SEEDS)
    for name in ("overview", "published"):
        drawn = (tmp_path / f"{name}.svg").read_text()
        assert "pp2048 tg32 (c1): not measured" in drawn
        assert "failed" not in drawn


def test_charts_without_matplotlib_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(QwenNvfp4Error, match="matplotlib is not installed"):
        draw_charts(made_result(), tmp_path)


def test_compare_ratio_spread_and_verdict() -> None:
    first, second = made_result(100.0, label="stock"), made_result(130.0, label="ours")
    found = {one.name: one for one in compare(first, second)}
    decode = found["tg32 @ d4096 (c1) t/s"]
    assert decode.ratio == pytest.approx(1.3)
    assert decode.ratio_std == pytest.approx(1.3 * 2**0.5 * 0.01 * (2 / 3) ** 0.5, rel=0.01)
    assert decode.verdict == "better"
    assert found["pp2048 (c1) t/s"].verdict == "noise"
    assert {one.verdict for one in compare(second, first) if one.name.startswith("tg")} == {"worse"}


def test_compare_unequal_settings_are_all_named() -> None:
    with pytest.raises(UsageError, match=r"runs 3 and 4; seed 0 and 7"):
        compare(made_result(), made_result(runs=4, seed=7))


def test_compare_interrupted_run_is_refused() -> None:
    with pytest.raises(UsageError, match="an interrupted run"):
        compare(made_result(), made_result(complete=False))


def with_decode(result: Result, **changes: float) -> Result:
    """The same with another spread of the first case's decode rate; without one where nothing is given."""
    case = result.cases[0]
    value = case.metrics.decode_total
    assert value is not None
    metrics = dataclasses.replace(case.metrics, decode_total=dataclasses.replace(value, **changes) if changes else None)
    return dataclasses.replace(result, cases=(dataclasses.replace(case, metrics=metrics), *result.cases[1:]))


@pytest.mark.parametrize("kind", ["median", "std"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300])
@pytest.mark.parametrize("side", [0, 1])
def test_compare_what_is_no_rate_is_refused(kind: str, value: float, side: int) -> None:
    runs = [made_result(), made_result()]
    runs[side] = with_decode(runs[side], **{kind: value})
    name = re.escape(runs[side].cases[0].case.decode)
    with pytest.raises(UsageError, match=f"run 'made', {kind} of {name} t/s: seen {re.escape(str(value))}"):
        compare(*runs)


def test_compare_runs_without_a_common_figure_is_refused() -> None:
    nothing = dataclasses.replace(made_result(), cases=())
    for pair in ((nothing, nothing), (made_result(), nothing), (nothing, made_result())):
        with pytest.raises(UsageError, match="no figure that both have"):
            compare(*pair)


def test_compare_names_the_rows_that_one_run_lacks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = with_decode(made_result(label="a")), made_result(label="b")
    shorter = dataclasses.replace(second, cases=second.cases[:-1])
    lost = second.cases[-1].case
    found = compare(first, shorter)
    page = comparison_markdown(first, shorter, found)
    assert f"- {first.cases[0].case.decode} t/s is left out: nothing measured by a\n" in page
    for name in (lost.prefill, lost.decode):
        assert f"- {name} t/s is left out: nothing measured by b\n" in page
    assert page.count("left out") == 4
    back = comparison_markdown(shorter, first, compare(shorter, first))
    assert f"- {lost.decode} t/s is left out: nothing measured by b\n" in back
    assert "left out" not in comparison_markdown(second, second, compare(second, second))
    draw_comparison(first, shorter, found, tmp_path)


def test_compare_of_runs_without_any_decode_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    whole = made_result()
    bare = dataclasses.replace(
        whole,
        cases=tuple(
            dataclasses.replace(case, metrics=dataclasses.replace(case.metrics, decode_total=None))
            for case in whole.cases
        ),
    )
    found = compare(bare, bare)
    assert {one.figure for one in found} == {"prefill", "ttft"}
    draw_comparison(bare, bare, found, tmp_path)


def test_compare_says_what_else_differs_and_draws_both(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = made_result(label="stock"), made_result(120.0, label="ours")
    second = dataclasses.replace(second, server=dataclasses.replace(second.server, kernels=("Using ours",)))
    assert [name for name, *_ in differences(first, second)] == ["kernels"]
    found = compare(first, second)
    page = comparison_markdown(first, second, found)
    assert "| tg32 (c1) t/s |" in page
    assert f"Both on: **{first.card}**.\n" in page
    assert "ratio: ours over stock" in page
    assert "\n\n\n" not in comparison_markdown(first, first, compare(first, first))
    assert min(size_of(draw_comparison(first, second, found, tmp_path))) > 400


def command(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, "bench", *words], cwd=folder, capture_output=True, text=True, check=False)


def test_command_measures_shows_failures_and_exits_1(tmp_path: Path) -> None:
    script = Script(tokens_per_s=4000, faults={1: "http"})
    with scripted(script) as url:
        words = ("--base-url", url, "--out", "run", "--prompt", "32", "--generate", "8", "--runs", "3", "--warmup", "0")
        done = command(*words, folder=tmp_path)
        again = command(*words, folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed measured requests: 1 http" in done.stdout
    assert "1/3" in done.stdout
    assert read_result(tmp_path / "run").failure_counts() == {"http": 1}
    assert (tmp_path / "run" / "README.md").is_file()
    assert again.returncode == 2
    assert "Name another folder" in again.stderr


def test_command_interrupted_keeps_finished_cases_and_no_result(tmp_path: Path) -> None:
    script = Script(tokens_per_s=100)
    with scripted(script) as url:
        words = ["--base-url", url, "--out", "run", "--prompt", "32", "--generate", "4,400", "--runs", "1"]
        process = subprocess.Popen(
            [COMMAND, "bench", *words, "--warmup", "0"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        deadline = time.monotonic() + 60
        while script.streamed < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["interrupted.json"]
    result = read_result(tmp_path / "run" / "interrupted.json")
    assert not result.complete
    assert [case.case.generate for case in result.cases] == [4]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--depth", "0,many", "--out", "x"], "--depth: seen '0,many'"),
        (["--out", "x", "--against", "nobody"], "--against: seen nobody"),
        ([], "--out: seen nothing"),
        (["compare", "a.json", "b.json"], "result a.json: seen No such file"),
        (["--out", "x", "--base-url", "http://user:secret@127.0.0.1:1/v1"], "--base-url: seen a URL with one of them"),
        (["--out", "x", "--env-file", "none.env"], "none.env"),
        (["--out", ""], "'--out': an empty path"),
        (["compare", "", ""], "'first': an empty path"),
        (["compare", "a.json", "b.json", "--out", ""], "'--out': an empty path"),
        (["report", "a.json", "--out", ""], "'--out': an empty path"),
        (["record", "--out", ""], "'--out': an empty path"),
    ],
)
def test_command_wrong_use_is_exit_2_and_one_sentence(tmp_path: Path, words: list[str], says: str) -> None:
    done = command(*words, folder=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_landscape_of_the_5090_has_both_seeds_and_the_bounds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = command("published", "rtx-5090", "--out", "results", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "results/rtx-5090.md" in done.stdout
    page = (tmp_path / "results" / "rtx-5090.md").read_text()
    for words in (
        "| 35B stack (Marlin) | 196 at 4K; 156 at 256K | 21,000 at 4K; 5,000 at 256K |",
        "| 27B stack, Marlin | 80 (depth not stated) | 4,000 (depth not stated) |",
        "| Qwen3.5-35B-A3B | 4K |",
        "| Qwen3.5-27B | 256K |",
        "Nothing here was measured by this project",
    ):
        assert words in page, words
    assert "GB10" not in page
    assert min(size_of(tmp_path / "results" / "rtx-5090.png")) > 400


def test_landscape_page_of_the_docs_is_what_the_command_writes_now() -> None:
    page = landscape_markdown(find_gpu("rtx-5090"), RESULTS / "rtx-5090.png")
    assert (RESULTS / "rtx-5090.md").read_text() == page, "run `qwen-nvfp4 bench published`"


@pytest.mark.parametrize(
    "words", [("compare", "one", "two", "--out", "file"), ("report", "one", "--out", "file/below")]
)
def test_command_out_that_cannot_be_a_folder_is_one_sentence(tmp_path: Path, words: tuple[str, ...]) -> None:
    for name in ("one", "two"):
        write_result(tmp_path / name / "result.json", made_result(label="[red]x[/red]\nnext [line"))
    (tmp_path / "file").write_text("kept")
    done = command(*words, folder=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: --out file")
    assert "Traceback" not in done.stdout + done.stderr
    assert (tmp_path / "file").read_text() == "kept"


def test_command_compare_shows_labels_as_they_are(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_result(tmp_path / name / "result.json", made_result(label=f"[red]{name}[/red]"))
    done = command("compare", "one", "two", folder=tmp_path)
    assert "[red]one[/red]" in done.stdout
    assert "[red]two[/red]" in done.stdout


@pytest.mark.parametrize(
    "words", [("compare", "one", "two", "--out", "."), ("report", "one", "--out", "."), ("--out", ".")]
)
def test_command_never_replaces_a_readme_that_bench_did_not_write(tmp_path: Path, words: tuple[str, ...]) -> None:
    for name in ("one", "two"):
        write_result(tmp_path / name / "result.json", made_result())
    (tmp_path / "README.md").write_text("# My project\n")
    done = command(*words, folder=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: --out .: seen a README.md that bench did not write")
    assert (tmp_path / "README.md").read_text() == "# My project\n"
    assert {file.name for file in tmp_path.iterdir()} == {"README.md", "one", "two"}


def test_command_writes_its_own_pages_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one", "two"):
        write_result(tmp_path / name / "result.json", made_result())
    for words in (("compare", "one", "two", "--out", "both"), ("report", "one")):
        assert [command(*words, folder=tmp_path).returncode for _ in range(2)] == [0, 0]


def test_charts_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    (tmp_path / "compare.svg").write_text("old")
    kept = figure.savefig

    def cut(self: object, file: object, **options: object) -> None:
        kept(self, file, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(figure, "savefig", cut)
    first, second = made_result(), made_result(120.0)
    with pytest.raises(KeyboardInterrupt):
        draw_comparison(first, second, compare(first, second), tmp_path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("compare.svg", "old")]
