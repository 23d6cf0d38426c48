"""The numbers of evidence pages follow from the records, and verdicts from their rule."""

import functools
import json
import re

import numpy as np
import pytest

from dms_jax.errors import DataError
from experiments.reproduction import claims, records

computed = functools.cache(claims.computed)  # some figures are on several pages


@pytest.mark.parametrize("name", claims.PAGES)
def test_page_numbers_follow_from_records(name):
    """`python -m experiments.reproduction.claims --write` corrects them."""
    text = claims.inlined((claims.ROOT / name).read_text(encoding="utf-8"))
    assert claims.formulas(text) > 0
    wrong = [
        f"{found['shown']} is {computed(found['formula'])}: {found['formula']}"
        for found in claims.TAGGED.finditer(text)
        if found["shown"] != computed(found["formula"])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [x for x in claims.PAGES if "README" in x or "CLAIMS" in x])
def test_no_error_bar_without_its_formula(name):
    """Except the first look at SmolLM2's adapter, whose table has its own commands."""
    page = (claims.ROOT / name).read_text(encoding="utf-8")
    text = claims.TAGGED.sub("", claims.inlined(page))
    if "smollm2" in name:
        text = text.partition("On an H200, afterwards")[2].partition("## Commands")[0]
    assert not re.findall(r".*\d ± .*", text)
    assert not re.findall(r".*\*\*(?:holds|does not hold).*", text)


def test_first_screen_of_the_readme_has_no_error_bars():
    lines = (claims.ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines[:40] if "±" in line]


@pytest.fixture
def made_up(monkeypatch):
    """Four problems, three trainings of one system, and votes of four chains."""
    rows = [
        dict(system="plain", run=1, measure="gsm8k", problems=4, peak=100, scores="1100"),
        dict(system="small", run=1, measure="gsm8k", problems=4, peak=25, scores="1000"),
        dict(system="small", run=2, measure="gsm8k", problems=4, peak=25, scores="1100"),
        dict(system="small", run=3, measure="gsm8k", problems=4, peak=40, scores="0110"),
        dict(system="one", measure="speed", by_seed=[0.5, 0.7], peak=9),
        dict(system="two", measure="speed", by_seed=[0.4], peak=9),
        dict(system="nine", run=1, measure="ruler-4k", problems=18, peak=1, scores=[0.5] * 18),
    ]
    rows[-1]["scores"][6] = 0.25
    told = dict(length=8, policy={}, new_tokens=5, ended=1)
    votes = [
        dict(told, system="plain", run=1, temperature=0, chains=1, scores={"1": "1110"}, reads=10),
        dict(
            told,
            system="plain",
            run=1,
            temperature=0.7,
            chains=4,
            scores={"1": "4210", "4": "1000"},
            reads=[10, 12, 8, 10],
        ),
        dict(told, system="small", run=1, temperature=0, chains=1, scores={"1": "1100"}, reads=2),
        dict(
            told,
            system="small",
            run=1,
            temperature=0.7,
            chains=36,
            scores={"1": "z000", "9": "4400"},
            reads=[2, 2, 2, 2],
        ),
    ]
    for each in votes[2:]:
        votes += [each | dict(system="twice", run=run) for run in (1, 2)]
    votes.append(votes[0] | dict(measure="math500"))
    for each in votes:
        each["peak"] = each["reads"]
    record = dict(rows=rows, votes=votes, groups={"pair": ["small:1", "small:3"]})
    monkeypatch.setattr(records, "record", lambda name: record)


@pytest.mark.usefixtures("made_up")
def test_figures_by_hand():
    computed = claims.computed
    assert computed("score m plain gsm8k") == "50.0"
    assert computed("score m small gsm8k") == "50.0"  # the last training
    assert computed("score m small:1 gsm8k") == "25.0"
    assert computed("trainings m small:* gsm8k") == "3"
    # Means over trainings 2/3, 2/3, 1/3, 0; to plain -1/3, -1/3, 1/3, 0. Over problems the error is
    # sd / 2, over trainings (25, 50 and 50%) sd / sqrt(3).
    gaps, means = np.array([-1, -1, 1, 0]) / 3, np.array([0.25, 0.5, 0.5])
    error = 100 * np.sqrt(gaps.var(ddof=1) / 4 + means.var(ddof=1) / 3)
    assert computed("gap m small:* plain gsm8k") == f"-8.3 ± {error:.1f}"
    assert computed("lost m small:* plain gsm8k") == f"8.3 ± {error:.1f}"
    assert computed("trainings m pair gsm8k") == "2"
    assert computed("times m pair plain gsm8k") == "3.1"  # 100 / 32.5
    # Means over seeds cannot be paired, and one seed has no error.
    assert computed("gap m one two speed") == "+20.0 ± unknown"
    assert computed("gap m one one speed") == f"+0.0 ± {np.hypot(10, 10):.1f}"
    assert computed("score m nine ruler-4k/vt") == "37.5"
    with pytest.raises(DataError, match="no nobody of gsm8k"):
        computed("score m nobody gsm8k")
    with pytest.raises(DataError, match=r"<!--= scor m plain gsm8k -->: KeyError"):
        computed("scor m plain gsm8k")


@pytest.mark.usefixtures("made_up")
def test_votes_by_hand():
    whole = records.points("m", ("plain",))
    assert [(point.label, point.greedy) for point in whole.points] == [
        *(("8-1@0", True), ("8-1@0.7", False), ("8-4@0.7", False))
    ]
    greedy, one, four = whole.points
    assert greedy.scores["vote"].tolist() == [[1, 1, 1, 0]]
    assert greedy.reads.tolist() == [[10, 10, 10, 10]]  # only their mean was recorded
    assert one.scores["vote"].tolist() == [[1, 0.5, 0.25, 0]]
    assert four.reads.tolist() == [[40, 48, 32, 40]]
    assert claims.computed("votes m small 1") == "24.3"  # z is 35 of 36 groups
    assert claims.computed("votes m small 9") == "50.0"
    assert claims.computed("votes m small 0") == "50.0"  # greedy
    assert claims.computed("votes-reads m small 9 plain 0") == "1.8"
    assert claims.computed("votes-gap m small 9 plain 0").startswith("-25.0 ± ")
    assert claims.computed("votes m plain 4@0.7 gsm8k") == claims.computed("votes m plain 4")
    assert claims.computed("votes m plain 0 math500") == "75.0"
    for asked, said in (("4@0.5", "8-1@0, 8-1@0.7, 8-4@0.7: which"), ("5", "which")):
        with pytest.raises(DataError, match=said):
            claims.computed(f"votes m plain {asked}")
    records.record("m")["votes"].append(records.record("m")["votes"][1] | dict(temperature=1.0))
    with pytest.raises(DataError, match=r"one of 8-4@0\.7, 8-4@1: which"):
        claims.computed("votes m plain 4")
    assert claims.computed("votes m plain 4@1") == claims.computed("votes m plain 4@0.7")
    # The small cache's best, 50%, is below one greedy plain chain, 75%, wherever both have budgets.
    assert claims.computed("gain m small plain reads").startswith("-25.0 ± ")
    # A single training of the other system is compared with each of several.
    twice = records.points("m", ("plain", "twice:*"))
    assert {point.reads.shape for point in twice.points} == {(2, 4)}
    assert twice.average_gain("twice:*", "plain").value == pytest.approx(-0.25)
    with pytest.raises(DataError, match="of math500"):
        claims.computed("score m small math500")
    # Among sampled points alone it seems equal: 43.6 against 43.8 from 10 to 18 reads.
    assert claims.computed("sampled m small plain reads").startswith("-0.2 ± ")


@pytest.mark.parametrize(
    ("gaps", "word"),
    [
        (["1.0 0.4"], "shown"),
        (["1.0 0.6"], "not shown"),
        (["-1.0 0.4"], "contradicted"),
        (["1.0 0.4", "-1.0 0.4"], "partly"),
        (["1.0 0.6", "-1.0 0.4"], "contradicted"),
        (["1.0 0.6", "1.0 nan"], "not shown"),
    ],
)
def test_verdict_needs_two_errors(monkeypatch, gaps, word):
    monkeypatch.setitem(
        claims.MEASURED, "gap", lambda *x: claims.Measured(*(float(each) / 100 for each in x))
    )
    assert claims.verdict(" and ".join(f"gap {gap} > 0" for gap in gaps)) == word
    bound = " and ".join(f"gap {float(gap.split()[0]) - 2} {gap.split()[1]} > -2" for gap in gaps)
    assert claims.verdict(bound) == word


def test_page_recomputed_and_stray_formula_refused(monkeypatch):
    monkeypatch.setattr(claims, "computed", lambda formula: f"<{formula}>")
    page = "loses 1.8 ± 0.8<!--= a b > -2 --> points: **not shown**<!--= c --> of 1,319<!--= d -->"
    assert claims.recomputed(page) == (
        "loses <a b > -2><!--= a b > -2 --> points: <c><!--= c --> of <d><!--= d -->"
    )
    assert claims.formulas(page) == 3
    with pytest.raises(DataError, match="1 formulas follow no number"):
        claims.formulas("words<!--= a -->")


QUOTED = """\
The best loses 1.8 ± 0.8 points, the
worst 17.4 ± 1.2 points. **Not** of 1,319, of 319.

<!-- Formulas of the numbers
best loses {a b > -2} points, the worst {c}
of {d},
-->
"""


def test_readme_formulas_match_their_numbers():
    got = claims.inlined(QUOTED)
    assert got.startswith(
        "The best loses 1.8 ± 0.8<!--= a b > -2 --> points, the\n"
        "worst 17.4 ± 1.2<!--= c --> points. **Not** of 1,319<!--= d -->, of 319."
    )
    assert claims.formulas(got) == 3
    for old, new, told in (
        ("The best loses", "It lost", "quotes 0 places"),
        ("of 319.", "of 319,", "quotes 2 places"),
        ("of {d},", "worst {d} points", "not a number of its own"),
        ("of {d},", "of 319.", "not a number of its own"),
    ):
        with pytest.raises(DataError, match=told):
            claims.inlined(QUOTED.replace(old, new))


def test_values_from_other_reports(monkeypatch, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"rows": [{"x": 3}, {"x": 1.5}]}))
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    assert claims.computed("json a.json rows 0 x .1f") == "3.0"
    assert claims.computed("json a.json rows 1 x / a.json rows 0 x .2f") == "0.50"
    assert claims.computed("json 4800 / a.json rows 1 x ,.0f") == "3,200"


def test_different_page_is_reported_and_corrected(monkeypatch, tmp_path, capsys):
    page = tmp_path / "page.md"
    quotes = "<!-- Formulas of the numbers\nsolves {score m plain gsm8k}%, {a}\n-->\n"
    page.write_text(f"solves 1.0%, **partly**\n{quotes}")
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    monkeypatch.setattr(claims, "PAGES", ("page.md",))
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    monkeypatch.setattr(claims, "PICTURES", {"m.png": lambda path: drawn.append(path)})
    monkeypatch.setattr(claims, "computed", lambda word: "**shown**" if word == "a" else "2.5")
    drawn = []
    assert claims.main(claims.Config()) == 1
    assert "2 differ from the records\n  1.0<!--= score" in capsys.readouterr().out
    assert drawn == []
    assert claims.main(claims.Config(write=True)) == 0
    assert page.read_text() == f"solves 2.5%, **shown**\n{quotes}"
    assert drawn == [tmp_path / "m.png"]
    assert claims.main(claims.Config()) == 0
