"""What the page, the JSON and the terminal table hold, read back."""

import json
import re
import stat
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.evals import plots
from calyrex_jax.evals.report import INK, Report, text_table, write_json, write_text
from calyrex_jax.evals.stats import Figure, rate

FIGURE = Figure(160, 0.9375, 0.8921, 0.9649, percent=True)
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Text, tags and ids of a page; fails on tags closed in the wrong order."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.ids, self.words, self.addresses = [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        attrs = dict(attrs)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.addresses += [attrs[key] for key in ("src", "href", "xlink:href") if key in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data):
        self.words.append(data)


def svgs(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, flags=re.S)]


@pytest.fixture
def report():
    report = Report('Rules & "words"')
    report.text("First.\n\nSecond <b>.")
    report.text("user  <hi>\n  indented", title="Sample", verbatim=True)
    report.table("Cells", ["cell", "frozen", "adapted"], [["seen <w>", rate([]), FIGURE], ["n", 1234, None]], note="95 %")
    report.plot("Bars", plots.bars(["seen", "unseen"], {"frozen": [FIGURE, None], "adapted": [FIGURE, rate([])]}))
    report.plot("Loss", plots.curves({"a": ([0, 1, 2], [3.0, float("nan"), 1.0])}, "step", "loss", log=True), note="log")
    return report


def test_page_is_well_formed_and_shows_everything(report):
    page = Page(report.html())
    text = " ".join(page.words)
    for part in (
        'Rules & "words"',
        "Second <b>.",
        "user  <hi>\n  indented",
        "seen <w>",
        "93.8 %",
        "[89.2, 96.5] (n=160)",
        "1,234",
    ):
        assert part in text, part
    assert page.tags.count("p") == 4  # two paragraphs, two notes
    assert page.tags.count("tr") == 3 and page.tags.count("svg") == 2
    # the ids that plots refer to are hashes; those must not meet on one page
    hashes = [i for i in page.ids if re.fullmatch(r"[a-z]+[0-9a-f]{10,}", i)]
    assert hashes and len(hashes) == len(set(hashes))


def test_page_needs_no_network(report):
    text = report.html()
    page = Page(text)
    assert all(address.startswith("#") for address in page.addresses), page.addresses
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert "http" not in without_namespaces and "@import" not in text and "url(" not in re.sub(r"url\(#\w+\)", "", text)


def test_plots_follow_the_pages_ink_and_width(report):
    text = report.html()
    assert INK not in text and text.count("currentColor") > 20
    for svg in svgs(text):
        assert "viewBox" in svg.attrib and "width" not in svg.attrib and "height" not in svg.attrib
    words = ["".join(svg.itertext()) for svg in svgs(text)]
    assert "unseen" in words[0] and "adapted" in words[0] and "step" in words[1] and "loss" in words[1]


def test_pages_are_reproducible(report):
    assert report.html() == report.html()


def test_bars_are_as_long_as_the_values():
    figures = [rate([True] * k + [False] * (20 - k)) for k in (0, 5, 20)]
    plot = plots.bars(["a", "b", "c"], {"x": figures})
    axes = plot.axes[0]
    np.testing.assert_allclose([bar.get_width() for bar in axes.patches], [0, 25, 100])
    segments = np.array(axes.collections[0].get_segments())[:, :, 0]
    np.testing.assert_allclose(segments, [[100 * f.low, 100 * f.high] for f in figures])
    assert axes.get_xlim() == (0, 100)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]


def test_reports_do_not_import_pyplot(report):
    report.html()
    assert "matplotlib.pyplot" not in sys.modules


def test_rows_must_fit():
    with pytest.raises(ValueError, match="2 cells for 3 columns"):
        Report("x").table("t", ["a", "b", "c"], [["a", 1]])
    with pytest.raises(ValueError, match="2 cells for 3 columns"):
        text_table(["a", "b", "c"], [["a", 1]])


def test_text_table():
    rows = [["seen words", FIGURE, True], ["日本", 3, None], ["n", float("nan"), False]]
    assert text_table(["cell", "adapted", "ok"], rows).split("\n") == [
        "cell                            adapted   ok",
        "──────────  ───────────────────────────  ───",
        "seen words  93.8 % [89.2, 96.5] (n=160)  yes",
        "日本                                  3    –",
        "n                                     –   no",
    ]


def test_write_json(tmp_path):
    path = tmp_path / "new" / "report.json"
    content = {"a": FIGURE, "b": np.float32(1.5), "c": [float("nan"), np.int64(3)], "d": np.arange(2), "e": rate([]), 7: "é"}
    write_json(path, content)
    assert json.loads(path.read_text()) == {
        "a": {"n": 160, "value": 0.9375, "low": 0.8921, "high": 0.9649},
        "b": 1.5,
        "c": [None, 3],
        "d": [0, 1],
        "e": {"n": 0, "value": None, "low": None, "high": None},
        "7": "é",
    }
    assert "é" in path.read_text(encoding="utf-8")
    assert [p.name for p in path.parent.iterdir()] == ["report.json"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o044 == stat.S_IMODE((_touched(tmp_path / "plain")).stat().st_mode) & 0o044


def _touched(path):
    path.touch()
    return path


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    write_text(path, "old")
    monkeypatch.setattr("os.fsync", _no_space)
    with pytest.raises(UserError, match=r"report\.json: cannot be written \(No space left on device\)"):
        write_text(path, "new")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def _no_space(descriptor):
    raise OSError(28, "No space left on device")


def test_a_file_in_the_way_is_a_users_mistake(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_json(tmp_path / "runs" / "report.json", {})


def test_write_html(tmp_path, report):
    report.write_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == report.html()


def test_figures_against_a_number_show_every_point_with_its_interval():
    near, far = rate([True] * 9 + [False]), rate([True] * 2 + [False] * 8)
    plot = plots.figures_against({"cal": ([0, 500], [near, far]), "frozen": ([0, 500], [far, None])}, "tokens", "adherence")
    (axes,) = plot.axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "500"]
    assert axes.get_ylabel() == "adherence, %"
    values = [container.lines[0].get_ydata().tolist() for container in axes.containers]
    assert values == [pytest.approx([90.0, 20.0]), pytest.approx([20.0])]
