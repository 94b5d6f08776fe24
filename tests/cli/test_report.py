"""`specdec report` on hand-made runs: it shows exactly their numbers, escapes everything, and asks nobody."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import main
from specdec.cli.reporting.acceptance import wilson
from specdec.cli.reporting.records import read_records
from specdec.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "results" / "2026-11-30-cpu2-smollm2-135m"
NASTY = '<script>document.title="taken"</script>"\'&$x^2$'
Make = Callable[..., Path]


class Page(HTMLParser):
    """Text, tables and attributes of a page, as a reader meets them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.tables: list[list[list[str]]] = []
        self._cell = False
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._cell:
            self.tables[-1][-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def table(self, *first: str) -> list[list[str]]:
        """The one table that begins with these headings."""
        [found] = [table for table in self.tables if table[0][: len(first)] == list(first)]
        return found[1:]

    def column(self, heading: str, *first: str) -> list[str]:
        [found] = [table for table in self.tables if table[0][: len(first)] == list(first)]
        at = found[0].index(heading)
        return [row[at] for row in found[1:]]


def tile(page: Page, what: str) -> str:
    """The number of a key figure."""
    [found] = re.findall(rf"<dt>{what}</dt><dd class=\"number\">([^<]*)</dd>", page.source)
    return str(found)


def test_a_hand_made_run_is_shown_with_exactly_its_numbers(bench_record: Make, tmp_path: Path) -> None:
    """4 prompts; steps 10 a prompt; 12, 14, 16, 18 tokens committed: length 60 / 40 = 1.5.

    Plain takes 1 s for each of 4 x 20 tokens, speculation half: 40 tokens/s against 20, 2.00x.
    """
    out = tmp_path / "r.html"
    assert main(["report", str(bench_record()), "--out", str(out)]) == 0
    page = Page(out)
    assert tile(page, "speedup") == "2.00x"
    assert tile(page, "acceptance length") == "1.50"
    assert tile(page, "identical texts") == "3/4"
    assert tile(page, "tokens per second") == "40.0"
    assert (
        "draft chain:2 writes 2.00 (1.90..2.10) times the tokens per second of tiny without speculation "
        "(faster: the interval excludes 1); 3 of 4 texts identical; acceptance length 1.50 (1.35..1.65); "
        "n = 4 prompts of made, 95 % intervals." in page.text
    )
    rows = page.table("setting", "rule", "n")
    assert rows[0][:8] == ["plain", "greedy", "4", "1", "1..1", "-", "20", "-"]
    assert rows[1] == [
        "draft chain:2",
        "greedy",
        "4",
        "1.5",
        "1.35..1.65",
        "0.4",
        "40",
        "2",
        "1.9..2.1",
        "3/4",
    ]
    depths = [table for table in page.tables if table[0][:3] == ["series", "depth", "share accepted"]]
    assert [row[1:3] for row in depths[0][1:]] == [["1", "0.5"], ["2", "0.25"]]
    assert [row[1:3] for row in depths[1][1:]] == [["1", "0.5"], ["2", "0.5"]]
    low, high = wilson(0.25, 40)
    assert depths[0][2][3:] == [f"{low:.4g}", f"{high:.4g}"]
    [categories] = [table for table in page.tables if table[0][1] == "category"]
    assert [row[1:3] for row in categories[1:]] == [["a", "1.4"], ["b", "1.6"]]
    [tokens] = [table for table in page.tables if table[0][:3] == ["series", "n", "5 %"]]
    # 1000 ms for 20 tokens, and half of that
    medians = [(row[0], row[1], row[4]) for row in tokens[1:]]
    assert medians == [("plain", "4", "50"), ("draft chain:2", "4", "25")]
    fields = dict(row for row in page.table("field", "value"))
    assert fields["command"] == "specdec bench tiny --data 'my prompts.jsonl'"
    assert fields["revision"] == "abc123 (changed since)"
    assert fields["hardware.cpu"] == "A CPU"
    assert fields["seeds.sampling"] == "0"
    assert fields["dtype"] == "float32"
    assert "committed / verify_steps, recovered and bonus tokens included" in page.text
    assert "conditional" in page.text or "given the depth before" in page.text


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ([0.8, 0.95], "slower: the interval excludes 1"),
        ([0.9, 1.1], "no difference shown: the interval holds 1"),
        (None, "one prompt: no interval, so nothing is certain"),
    ],
)
def test_a_loss_is_called_one(
    interval: list[float] | None, words: str, bench_record: Make, tmp_path: Path
) -> None:
    run = bench_record(lambda body: body["settings"][1].update(speedup=0.9, speedup_interval=interval))
    assert main(["report", str(run), "--out", str(tmp_path / "r.html")]) == 0
    page = Page(tmp_path / "r.html")
    assert words in page.text
    assert tile(page, "speedup") == "0.90x"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lossless": False, "rule": "typical"}, "Only lossy settings speculate here"),
        ({"simulated": True}, "Acceptance was SIMULATED"),
    ],
)
def test_no_gain_is_claimed_of_texts_that_are_not_the_target_s(
    change: dict[str, Any], words: str, bench_record: Make, tmp_path: Path
) -> None:
    run = bench_record(lambda body: body["settings"][1].update(change))
    assert main(["report", str(run), "--out", str(tmp_path / "r.html")]) == 0
    page = Page(tmp_path / "r.html")
    assert words in page.text
    assert 'class="key"' not in page.source


@pytest.mark.parametrize(
    "conditions",
    [{"exact_against": "the target with int8 weights"}, {"weights": "int8", "kv_cache_dtype": "auto"}],
)
def test_a_gain_of_a_rounded_target_is_disclosed_as_its_own(
    conditions: dict[str, str], bench_record: Make, tmp_path: Path
) -> None:
    """New records say it, older ones only with which settings they ran."""
    for number, told in enumerate((conditions, {"weights": "auto", "kv_cache_dtype": "auto"})):
        run = bench_record(lambda body, told=told: body.update(conditions=told), f"{number}.json")
        assert main(["report", str(run), "--out", str(tmp_path / f"r{number}.html")]) == 0
        page = Page(tmp_path / f"r{number}.html")
        assert ("as the target with int8 weights writes without drafts" in page.text) is (number == 0)


def test_whatever_a_record_holds_stays_text(bench_record: Make, tmp_path: Path) -> None:
    """A prompt's category, a setting's name, a command, a path: none may become markup or mathematics."""

    def poison(body: dict[str, Any]) -> None:
        body["target"] = body["data"] = NASTY
        body["run"]["command"].append(NASTY)
        body["run"]["hardware"]["cpu"] = "a\u0000b\ud800c"
        row = body["settings"][1]
        row["acceptance"]["acceptance_length_by_category"] = {NASTY: 1.4, "b": 1.6}
        name = f"{NASTY} chain:2"
        body["per_prompt"][name] = body["per_prompt"].pop(row["setting"])
        row["setting"] = name

    out = tmp_path / "r.html"
    words = ["report", str(bench_record(poison)), "--out", str(out), "--format", "md", "--title", NASTY]
    assert main(words) == 0
    page = Page(out)
    assert not [tag for tag, _ in page.tags if tag == "script"]
    assert page.text.count(NASTY) > 5
    assert "<script" not in (tmp_path / "r.md").read_text()
    assert "a\ufffdb?c" in page.text


def test_the_page_has_no_outside_part_and_words_for_every_picture(tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    names = (
        "bench_served_batch1.json",
        "sweep/sweep.json",
        "layers/selection.json",
        "audit/bfloat16/audit.json",
    )
    names += ("compare.json", "study/study.json")
    draft = ROOT / "drafts" / "pretrained" / "smollm2-135m" / "metrics.jsonl"
    words = [str(MEASURED / name) for name in names]
    assert main(["report", *words, str(draft), "--out", str(out)]) == 0
    page = Page(out)
    for tag, attrs in page.tags:
        assert tag not in ("script", "iframe", "object", "base")
        for name in ("src", "href", "xlink:href"):
            given = attrs.get(name)
            assert given is None or given.startswith(("#", "data:")), given
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org)", page.source)
    pictures = [attrs for _, attrs in page.tags if attrs.get("role") == "img"]
    drawn = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(pictures) == len(drawn) > 10
    assert all((attrs["aria-label"] or "").startswith("Chart: ") for attrs in pictures)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids)), "pictures in one page must not share ids"
    served = json.loads((MEASURED / names[0]).read_text())["settings"]
    fastest = max(served, key=lambda one: one.get("speedup", 0.0))
    last = json.loads(draft.read_text().splitlines()[-1])["eval"]
    length = last["offline_acceptance"]["acceptance_length"]
    for words_of in (
        "{:.2f} ({:.2f}..{:.2f}) times".format(fastest["speedup"], *fastest["speedup_interval"]),
        "Boundaries 18, 20, 29 of 0..30",
        "Audit passed: smollm2-135m",
        "llama.cpp 1.45 (1.29..1.67)",
        "14 points, 10 of them not dominated",
        f"smollm2-135m {length:.2f} after ",
        "taps 21, 25, 30 differ from 2, 15, 27 by +0.024",
    ):
        assert words_of in page.text


def test_markdown_has_its_pictures_beside_it_and_a_sheet_has_them_all(
    bench_record: Make, tmp_path: Path
) -> None:
    out = tmp_path / "out" / "r.md"
    assert main(["report", str(bench_record()), "--out", str(out), "--format", "png"]) == 0
    text = out.read_text()
    linked = re.findall(r"!\[Chart: [^\]]*\]\(([^)]+)\)", text)
    assert len(linked) >= 5
    assert all((out.parent / name).read_bytes().startswith(b"\x89PNG") for name in linked)
    assert (out.parent / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "| draft chain:2 | greedy | 4 | 1.5 | 1.35..1.65 |" in text
    assert not (out.parent / "r.html").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.json"], "RUN (none.json) cannot be read: No such file"),
        (["list.json"], "is no record that a report can show"),
        (["bad.json"], "is not valid JSON"),
        (["half.json"], "lacks data, settings; a bench record has them"),
        (["empty"], "RUN (empty) holds no record of specdec"),
        (["bench.json", "--out", "r.pdf"], "--out (r.pdf) must end in .html, .md, .png"),
        (["bench.json", "--format", "pdf"], "--format (pdf) must be one of html, md, png"),
        (["bench.json", "--out", "missing/../bench.json"], "must end in"),
        (["run.json", "--out", "r.png"], "needs a chart"),
        (["bench.json", "--diff"], "--diff compares two records, not 1"),
        (["bench.json", "--allow-differences"], "--allow-differences needs --diff"),
    ],
)
def test_what_makes_no_report_is_wrong_usage(
    words: list[str],
    said: str,
    bench_record: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    record = json.loads(bench_record().read_text())
    Path("empty").mkdir()
    Path("list.json").write_text("[1]")
    Path("bad.json").write_text("{")
    Path("half.json").write_text('{"schema": "specdec.bench/1", "target": "t"}')
    Path("run.json").write_text(json.dumps(record["run"]))
    Path("bench.json").write_text(json.dumps(record))
    assert main(["report", *words]) == 2
    assert said in capsys.readouterr().err
    assert json.loads(Path("bench.json").read_text()) == record


def test_folders_are_searched_and_records_of_one_name_are_told_apart(
    bench_record: Make, tmp_path: Path
) -> None:
    body = bench_record().read_text()
    for folder in ("one", "two"):
        (tmp_path / "all" / folder).mkdir(parents=True)
        (tmp_path / "all" / folder / "bench.json").write_text(body)
        (tmp_path / "all" / folder / "config.json").write_text("{}")
    names = [record.name for record in read_records([tmp_path / "all"])]
    assert names == ["one/bench", "two/bench"]
    with pytest.raises(UsageError, match=r"config\.json"):
        read_records([tmp_path / "all" / "one" / "config.json"])
