"""The tasks of `vtoken eval` and their figures, on an engine whose answers are known by hand."""

from __future__ import annotations

import io
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from support.fake_eval_engine import FakeEngine
from vtoken.errors import Rejected
from vtoken.evaluation import passkey, perplexity, rouge, texts
from vtoken.evaluation.evaluate import Evaluation, Tasks
from vtoken.evaluation.plan import Plan, make_plan
from vtoken.evaluation.progress import Stages
from vtoken.evaluation.requests import FULL, Answer, Cell, Request
from vtoken.evaluation.table import show
from vtoken.evaluation.texts import Text

TEXT = Text("here", " ".join(f"word{n}" for n in range(2_000)))
CELLS = (Cell("random", 0.5), Cell("random", 0.25))


# ---- pass keys


@pytest.mark.parametrize("length", [100, 128, 333, 1024])
def test_a_pass_key_prompt_has_exactly_the_length_and_holds_its_key(length: int) -> None:
    engine = FakeEngine()
    samples = passkey.make_samples(engine.encode, opening=[], length=length, count=10, seed=3)
    for sample in samples:
        text = engine.decode(sample.prompt)
        assert len(sample.prompt) == length
        assert f"The pass key is {sample.key}. Remember it. {sample.key} is the pass key." in text
        assert text.startswith("There is an important info hidden")
        assert text.endswith("\nWhat is the pass key? The pass key is")
        assert text.count(sample.key) == 2


def test_special_tokens_in_front_count_towards_the_length() -> None:
    engine = FakeEngine()
    first = engine.encode("<s>")
    (sample,) = passkey.make_samples(engine.encode, opening=first, length=128, count=1, seed=0)
    assert sample.prompt[:1] == tuple(first)
    assert len(sample.prompt) == 128


def test_depths_are_spread_and_say_where_the_key_stands() -> None:
    engine = FakeEngine()
    samples = passkey.make_samples(engine.encode, opening=[], length=1024, count=20, seed=0)
    depths = [sample.depth for sample in samples]
    assert all(before <= after for before, after in pairwise(depths))
    assert depths[0] < 0.07
    assert depths[-1] > 0.9
    for sample in samples:
        words = engine.decode(sample.prompt).split()
        place = words.index(f"{sample.key}.") / len(words)
        assert place == pytest.approx(sample.depth, abs=0.05)


def test_pass_keys_depend_on_the_seed_and_on_nothing_else() -> None:
    def keys(seed: int) -> list[str]:
        samples = passkey.make_samples(
            FakeEngine().encode, opening=[], length=200, count=5, seed=seed
        )
        assert all(len(sample.key) == 5 for sample in samples)
        return [sample.key for sample in samples]

    assert keys(1) == keys(1) != keys(2)


def test_a_prompt_without_room_for_text_is_refused_with_the_least_length() -> None:
    def make(length: int) -> None:
        passkey.make_samples(FakeEngine().encode, opening=[], length=length, count=1, seed=0)

    with pytest.raises(Rejected, match=r"--length must be at least (\d+) here") as caught:
        make(30)
    least = int(str(caught.value).split("at least ")[1].split()[0])
    make(least)
    with pytest.raises(Rejected):
        make(least - 1)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (" 12345", True),
        (" 12345. Remember", True),
        ("12345 is 99999", True),
        (" 123456", False),
        (" 1234", False),
        (" 99999 or 12345", False),
        (" the pass key", False),
        ("", False),
    ],
)
def test_a_key_is_found_when_the_first_number_is_the_key(text: str, found: bool) -> None:
    assert passkey.is_found(text, "12345") is found


@pytest.mark.parametrize(
    ("length", "unit", "shares"),
    [(128, 32, True), (127, 32, False), (130, 32, False), (128, 0, False)],
)
def test_prompts_are_shared_only_where_policies_see_as_many_queries_as_without(
    length: int, unit: int, shares: bool
) -> None:
    samples = passkey.make_samples(FakeEngine().encode, opening=[], length=length, count=2, seed=0)
    requests = passkey.requests_for(samples, [FULL, *CELLS], share_unit=unit)
    assert {request.shares for request in requests} == {shares}
    # All rows of a prompt follow each other, so it is still in the cache.
    assert [request.sample for request in requests] == [0, 0, 0, 1, 1, 1]


# ---- perplexity


def asked(values: list[float], error: str | None = None) -> tuple[Request, Answer]:
    return Request(FULL, 0, (1,), len(values)), Answer(logprobs=values, error=error)


def test_perplexity_is_of_the_tokens_after_the_first_over_all_excerpts() -> None:
    half, eighth = math.log(1 / 2), math.log(1 / 8)
    found = perplexity.figure([asked([-50.0, half, half]), asked([-50.0, eighth, eighth])])
    assert found.value == pytest.approx(4.0)  # the geometric mean of 2 and 8
    assert (found.tokens, found.samples) == (4, 2)


def test_a_request_that_ended_early_is_no_sample() -> None:
    found = perplexity.figure([asked([-50.0, math.log(0.5)]), asked([-9.0, -9.0], "it broke")])
    assert found.value == pytest.approx(2.0)
    assert (found.tokens, found.samples) == (1, 1)
    assert math.isnan(perplexity.figure([asked([], "it broke")]).value)


def test_an_excerpt_is_split_into_prompt_and_forced_tokens() -> None:
    opening = [7]
    size = perplexity.excerpt_size(opening, scored=100)
    text = list(range(100, 100 + size))
    (first, _) = perplexity.requests_for([text], [FULL, CELLS[0]], opening=opening, share_unit=32)
    assert first.prompt + first.forced == (7, *text)
    assert len(first.prompt) == perplexity.CONTEXT
    assert first.max_tokens == len(first.forced) == 101


# ---- ROUGE-L


@pytest.mark.parametrize(
    ("candidate", "reference", "score"),
    [
        # Lin (2004), section 3: S1 with S2 and S3.
        ("police kill the gunman", "police killed the gunman", 3 / 4),
        ("the gunman kill police", "police killed the gunman", 2 / 4),
        ("the cat sat on the mat", "the cat lay on the mat", 5 / 6),
        # P = 2/2, R = 2/4
        ("one three", "one two three four", 2 * 1 * 0.5 / 1.5),
        ("The CAT, sat!", "the cat sat", 1.0),
        ("snake_case", "snake case", 1.0),
        ("über allem", "über allem", 1.0),
        ("a b c", "d e f", 0.0),
        ("", "words", 0.0),
        ("...", "", 1.0),
    ],
)
def test_rouge_l_of_known_pairs(candidate: str, reference: str, score: float) -> None:
    assert rouge.rouge_l(candidate, reference) == pytest.approx(score)
    assert rouge.rouge_l(reference, candidate) == pytest.approx(score)


def test_agreement_tells_sign_bound_and_sameness() -> None:
    pairs = [
        rouge.Pair(vtoken=0.50, naive=0.50, between=1.0, identical=True),
        rouge.Pair(vtoken=0.31, naive=0.30, between=0.9, identical=False),
        rouge.Pair(vtoken=0.20, naive=0.30, between=0.5, identical=False),
        rouge.Pair(vtoken=0.60, naive=0.60, between=1.0, identical=False),
    ]
    found = rouge.agreement(pairs)
    assert (found.pairs, found.close, found.identical) == (4, 3, 1)
    assert found.mean_difference == pytest.approx(-0.0225)
    assert rouge.figure(pairs).between == pytest.approx(0.85)


# ---- texts and plans


def test_excerpts_are_whole_distinct_and_spread_over_the_text() -> None:
    found = texts.excerpts(range(1_000), 100, 4, what="it")
    assert [piece[0] for piece in found] == [0, 250, 500, 750]
    assert {len(piece) for piece in found} == {100}
    assert len(texts.excerpts(range(1_000), 100, 50, what="it")) == 10
    with pytest.raises(Rejected, match="the text has 99 tokens and it needs at least 100"):
        texts.excerpts(range(99), 100, 1, what="it")


def test_the_default_text_is_prose_that_this_python_has() -> None:
    found = texts.default_text()
    assert len(found.content) > 50_000
    assert "A Python program is constructed from code blocks." in " ".join(found.content.split())
    assert len(found.sha256) == 64


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "is empty"), (b" \n ", "is empty"), (b"\xff\xfe", "is not UTF-8")]
)
def test_a_text_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "text"
    file.write_bytes(content)
    with pytest.raises(Rejected, match=reason):
        texts.read_text(file)


def test_lists_come_with_commas_or_repeated_and_hold_each_thing_once() -> None:
    plan = make_plan(
        policies=["h2o,random", "none", "h2o"],
        budgets=["0.5, 0.1", "0.50"],
        tasks=["rouge", "passkey"],
        samples=3,
    )
    assert plan.policies == ("h2o", "random")
    assert plan.budgets == (0.5, 0.1)
    assert plan.tasks == ("passkey", "rouge")
    assert plan.rows[0] == FULL
    assert plan.cells[:2] == [Cell("h2o", 0.5), Cell("h2o", 0.1)]
    assert set(plan.samples.values()) == {3}


def test_quick_is_smaller_in_every_respect() -> None:
    quick, whole = make_plan(policies=["random"], quick=True), make_plan(policies=["random"])
    assert quick.length < whole.length
    assert quick.scored < whole.scored
    assert all(quick.samples[task] < count for task, count in whole.samples.items())
    assert quick.cells == whole.cells
    assert make_plan(policies=["random"], quick=True, length=2048, samples=9).length == 2048


# ---- a whole evaluation


def run(engine: FakeEngine, plan: Plan) -> Evaluation:
    produced: dict[str, int] = {}

    def progress(task: str, tokens: int) -> None:
        produced[task] = produced.get(task, 0) + tokens

    tasks = Tasks(plan, TEXT, engine)
    found = tasks.run(engine, progress)
    assert produced == {task: tasks.tokens(task) for task in plan.tasks}, "the bar ends at 100 %"
    return found


@pytest.fixture
def plan() -> Plan:
    return make_plan(policies=["random"], budgets=["0.5", "0.25"], samples=4, length=256)


def test_every_row_has_the_figures_of_its_own_answers(plan: Plan) -> None:
    engine = FakeEngine()
    found = run(engine, plan)
    full, half, quarter = found.rows
    assert [row.cell for row in found.rows] == [FULL, *CELLS]
    # Depths lie in the four quarters of the text; the fake sees the newest half, or quarter.
    shares = [(row.passkey.found, row.passkey.samples) for row in found.rows if row.passkey]
    assert shares == [(4, 4), (2, 4), (1, 4)]
    values = [row.perplexity.value for row in found.rows if row.perplexity]
    assert values == pytest.approx([2.0, 4.0, 8.0])
    assert {row.perplexity.tokens for row in found.rows if row.perplexity} == {4 * 128}
    assert full.rouge is None
    assert half.rouge is not None
    assert quarter.rouge is not None
    assert half.rouge.vtoken == half.rouge.naive == pytest.approx(2 / 3)
    assert quarter.rouge.vtoken == pytest.approx(2 / 5)
    assert found.agreement == rouge.Agreement(pairs=8, mean_difference=0.0, close=8, identical=8)
    assert found.warnings == []


def test_naive_runs_see_the_same_requests_as_vtokens_own(plan: Plan) -> None:
    engine = FakeEngine()
    found = run(engine, plan)
    assert [reclaim for _, reclaim in engine.runs] == ["background"] * 4 + ["off"]
    assert engine.runs[3][0] == engine.runs[4][0]
    assert not any(request.shares for request in engine.runs[3][0])
    assert [(run["task"], run["reclaim"], run["requests"]) for run in found.served] == [
        ("passkey", "background", 12),
        ("perplexity", "background", 12),
        ("rouge", "none", 4),
        ("rouge", "background", 8),
        ("rouge", "off", 8),
    ]


def test_a_difference_from_naive_shows(plan: Plan) -> None:
    found = run(FakeEngine(naive_suffix=" five"), plan)
    assert found.agreement is not None
    assert found.agreement.identical == found.agreement.close == 0
    # Against four words: 2 of 2 or 3, and 1 of 1 or 2.
    expected = (2 * 2 / 6 - 2 * 2 / 7) / 2 + (2 * 1 / 5 - 2 * 1 / 6) / 2
    assert found.agreement.mean_difference == pytest.approx(expected)
    assert found.rows[1].rouge is not None
    assert found.rows[1].rouge.between < 1


def test_requests_that_end_early_are_not_counted_and_the_reason_is_told() -> None:
    plan = make_plan(policies=["random", "broken"], budgets=["0.5"], samples=2, length=256)
    found = run(FakeEngine(fails=["broken"]), plan)
    row = found.rows[2]
    assert (row.passkey, row.perplexity and row.perplexity.tokens) == (passkey.Retrieval(0, 0), 0)
    assert found.warnings == ["policy broken failed"]
    assert found.agreement is not None
    assert found.agreement.pairs == 2
    written = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert written["rows"][2]["perplexity"] == {"value": None, "tokens": 0, "samples": 0}
    assert "-" in shown(found)


def shown(found: Evaluation, width: int = 80) -> str:
    screen = io.StringIO()
    show(found, Console(file=screen, width=width))
    return " ".join(screen.getvalue().split())


def test_the_table_gives_every_figure_with_its_number_of_samples(plan: Plan) -> None:
    text = shown(run(FakeEngine(), plan))
    for expected in (
        "full cache 4/4 2.00 512",
        "random 50 % 2/4 4.00 512 0.6667 0.6667 1.0000 4",
        "random 25 % 1/4 8.00 512 0.4000 0.4000 1.0000 4",
        "passkey: 4 prompts of 256 tokens for each row",
        "text: here, 2,000 tokens; excerpts for each row: perplexity 4, ROUGE-L 4",
        "over 8 pairs: the same tokens in 8; ROUGE-L difference 0.0000 in the mean, at most 0.01 "
        "in 100.0 % of them (published: -0.0016, 93.1 %)",
    ):
        assert expected in text


@pytest.mark.parametrize("task", ["passkey", "perplexity", "rouge"])
def test_a_single_task_is_all_that_is_run_and_shown(task: str) -> None:
    plan = make_plan(policies=["random"], tasks=[task], samples=2, length=256)
    engine = FakeEngine()
    found = run(engine, plan)
    assert {entry["task"] for entry in found.served} == {task}
    headings = {"passkey": "keys", "perplexity": "perplex-", "rouge": "ROUGE-L"}
    text = shown(found)
    assert [name for name, heading in headings.items() if heading in text] == [task]
    assert set(found.as_dict()["rows"][0]) == {"policy", "budget_ratio", task}


def test_json_tells_what_was_run_and_on_what(plan: Plan) -> None:
    written = json.loads(json.dumps(run(FakeEngine(), plan).as_dict(), allow_nan=False))
    assert written["plan"]["policies"] == ["random"]
    assert written["plan"]["samples"] == {"passkey": 4, "perplexity": 4, "rouge": 4}
    assert written["text"] == {"source": "here", "sha256": TEXT.sha256, "tokens": 2_000}
    assert written["rows"][0]["passkey"] == {"found": 4, "samples": 4}
    assert set(written["rows"][1]["rouge"]) == {"vtoken", "naive", "between", "samples"}
    assert set(written["agreement"]) == {"pairs", "mean_difference", "close", "identical"}
    retrieval = written["retrievals"][0]
    assert set(retrieval) == {"policy", "budget_ratio", "key", "depth", "answer", "found"}
    assert len(written["retrievals"]) == 12
    assert sum(entry["found"] for entry in written["retrievals"]) == 7


def test_a_text_too_short_for_a_task_is_refused_before_anything_is_served(plan: Plan) -> None:
    engine = FakeEngine()
    with pytest.raises(Rejected, match="the text has 2 tokens and perplexity needs at least 385"):
        Tasks(plan, Text("short", "two words"), engine)
    assert engine.runs == []


def test_elsewhere_than_on_a_terminal_progress_is_a_line_for_each_stage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Stages(Console(file=io.StringIO())) as stages:
        stages.starting("starting vLLM")
        stages.expect({"passkey": 10, "rouge": 10})
        for task in ("passkey", "passkey", "rouge"):
            stages.advance(task, 5)
    assert capsys.readouterr().err == "starting vLLM ...\npasskey ...\nrouge ...\n"


def test_on_a_terminal_progress_is_a_bar_for_each_task() -> None:
    screen = io.StringIO()
    with Stages(Console(file=screen, force_terminal=True, width=100)) as stages:
        stages.starting("starting vLLM")
        stages.expect({"passkey": 10})
        stages.advance("passkey", 10)
    assert "starting vLLM (10 to 60 s)" in screen.getvalue()
    assert "100 %" in screen.getvalue()
