"""Methods pooled over seeds and compared at equal steps; when a curve reaches a level; the report's tables."""

from dataclasses import dataclass

import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.evals import ablation, stats
from calyrex_jax.evals.ablation import Method
from calyrex_jax.evals.tasks.api import Score, Verdict


@dataclass(frozen=True)
class Shout:
    name = "shout"
    headline = "loud"
    about = "x"


def method(name, runs, steps=400, marks=(100, 200, 400)):
    return Method(name, "cal", "last", (2,), 10, steps, 1e-3, runs, marks, 0.5, 60.0)


def verdicts(*hits):
    return {str(i): Verdict(str(i), (Score("loud", float(hit)),), {}) for i, hit in enumerate(hits)}


CAL = method("cal", {0: "cal_s0", 1: "cal_s1"})
MLP = method("mlp", {0: "mlp_s0"})
SHORT = method("short", {0: "short_s0"}, steps=200, marks=(100, 200))
FOUND = {
    "shout": {
        "cal_s0": verdicts(1, 1, 1, 1),
        "cal_s1": verdicts(1, 0, 0, 0),
        "cal_s0@100": verdicts(0, 0, 0, 0),
        "cal_s1@100": verdicts(1, 0, 0, 0),
        "cal_s0@200": verdicts(1, 1, 0, 0),
        "cal_s1@200": verdicts(0, 0, 0, 0),
        "mlp_s0": verdicts(0, 1, 1, 1),
        "mlp_s0@100": verdicts(0, 0, 0, 1),
        "mlp_s0@200": verdicts(0, 0, 1, 1),
        "short_s0": verdicts(0, 0, 0, 1),
        "short_s0@100": verdicts(0, 0, 0, 0),
        "frozen": verdicts(0, 0, 0, 0),
    }
}


def test_seeds_are_pooled_and_differences_taken_over_shared_ones():
    found = ablation.pooled(FOUND, [MLP, CAL, SHORT], "cal", 0)
    figures = found.figures["shout"]
    assert list(figures)[:3] == ["cal", "mlp", "short"] and list(figures)[-1] == "frozen"
    assert figures["cal"]["loud"].value == 5 / 8 and figures["cal"]["loud"].n == 4
    assert figures["cal@100"]["loud"].value == 1 / 8 and figures["mlp@200"]["loud"].value == 1 / 2
    differences = {pair: cells["loud"].value for pair, cells in found.differences["shout"].items()}
    assert differences == {
        "mlp - cal": -1 / 4,  # against the first seed alone
        "mlp@100 - cal@100": 1 / 4,
        "mlp@200 - cal@200": 0.0,
        "short - cal@200": -1 / 4,  # ends earlier: compared at equal steps
        "short@100 - cal@100": 0.0,
        "cal - frozen": 5 / 8,
        "cal@100 - frozen": 1 / 8,
        "cal@200 - frozen": 1 / 4,
    }


def test_a_task_without_curves_has_the_ends_alone():
    ends = {name: v for name, v in FOUND["shout"].items() if "@" not in name}
    found = ablation.pooled({"shout": ends}, [CAL, MLP, SHORT], "cal", 0)
    assert list(found.figures["shout"]) == ["cal", "mlp", "short", "frozen"]
    assert list(found.differences["shout"]) == ["mlp - cal", "short - cal", "cal - frozen"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.5, 0.8, 1.0], 300.0), ([0.9, 0.95, 1.0], 100.0), ([0.1, 0.9, 0.2], 200.0), ([0.1, 0.2, 0.3], None), ([], None)],
)
def test_steps_to_a_level_lie_on_straight_lines(values, expected):
    found = stats.first_reached([100, 200, 400][: len(values)], values, 0.9)
    assert found == pytest.approx(expected) if expected else found is None


def test_the_report_shows_curves_and_when_they_reach_ninety_percent(tmp_path):
    found = ablation.pooled(FOUND, [CAL, MLP, SHORT], "cal", 0)
    primary = ablation.primary_cells("shout: loud; shout: none of these", [Shout()])
    table = ablation.write(found, [CAL, MLP, SHORT], [Shout()], primary, "about", tmp_path / "report.html")
    assert "short" in table and "0.001" in table
    html = (tmp_path / "report.html").read_text()
    assert "shout: loud, by step" in html and "&gt; 400" in html and "&gt; 200" in html
    assert "fixed before the runs" in html and "short - cal@200" in html and "mlp@100" not in html


def test_primary_cells_name_tasks_that_are_evaluated():
    with pytest.raises(UserError, match=r"config\.ablate\.primary: 'rules: x' is not understood.*\(shout\)"):
        ablation.primary_cells("rules: x", [Shout()])
