"""Weights are put onto the ids that were at those places in the very step that they come from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vtoken.config import VTokenConfig
from vtoken.core import RequestTable
from vtoken.errors import InvariantViolation, Rejected
from vtoken.policies import ScoreNeed
from vtoken.policies.ledger import ScoreLedger
from vtoken.policies.taps import RowScores, TappedStep


def table_of(tokens: int, *, life: int = 1) -> RequestTable:
    table = RequestTable("r", 4)
    table.append(list(range(1, 2 + tokens // 4)), tokens)
    table.life = life
    return table


def ledger_of(**options: Any) -> Any:
    ledger = ScoreLedger()
    ledger.configure(VTokenConfig(**options))
    return ledger


def step_of(number: int, count: int) -> Any:
    return TappedStep(number, {"r": RowScores(np.arange(count, dtype=np.float32), 6)})


def test_ids_are_those_of_the_step_and_not_of_now() -> None:
    """With holes by id; dense by position, where a recycled hole holds the newest token."""
    ledger, table = ledger_of(), table_of(9)
    table.evict(np.array([2, 5], dtype=np.int32))
    ledger.row(table, ScoreNeed.TOKENS, count=1, prompt=False)
    assert ledger.end_step().rows["r"].queries == 1
    for hole in (5, 2):
        table.append((), table.logical_len + 1, hole=hole)
    ledger.row(table, ScoreNeed.TOKENS, count=1, prompt=False)
    ledger.end_step()
    ((_, first),) = ledger.arrived(step_of(1, 7), {"r": table})
    ((_, second),) = ledger.arrived(step_of(2, 9), {"r": table})
    assert first.token_ids.tolist() == [0, 1, 3, 4, 6, 7, 8]
    assert second.token_ids.tolist() == [0, 1, 10, 3, 4, 9, 6, 7, 8]
    assert (first.queries, first.heads, first.prompt) == (1, 6, False)
    assert first.token_ids.dtype == np.int32


@pytest.mark.parametrize(("count", "window", "observed"), [(1, 32, 1), (40, 32, 32), (5, 9, 5)])
def test_a_chunk_is_seen_through_its_last_queries(count: int, window: int, observed: int) -> None:
    ledger = ledger_of(score_window=window)
    ledger.row(table_of(50), ScoreNeed.HEADS, count=count, prompt=True)
    tap = ledger.end_step().rows["r"]
    assert (tap.queries, tap.per_head) == (observed, True)


def test_weights_for_another_life_are_dropped() -> None:
    ledger = ledger_of()
    for _ in range(2):
        ledger.row(table_of(9), ScoreNeed.TOKENS, count=1, prompt=False)
        ledger.end_step()
    assert list(ledger.arrived(step_of(1, 9), {"r": table_of(9, life=2)})) == []
    assert list(ledger.arrived(step_of(2, 9), {})) == []
    assert ledger.dropped == 2


def test_a_new_configuration_drops_what_is_under_way() -> None:
    ledger = ledger_of()
    ledger.row(table_of(9), ScoreNeed.TOKENS, count=1, prompt=False)
    ledger.end_step()
    ledger.configure(VTokenConfig())
    assert list(ledger.arrived(step_of(1, 9), {"r": table_of(9)})) == []


@pytest.mark.parametrize("number", [0, 2])
def test_lost_and_repeated_weights_are_noticed(number: int) -> None:
    ledger, tables = ledger_of(), {"r": table_of(9)}
    ledger.row(tables["r"], ScoreNeed.TOKENS, count=1, prompt=False)
    ledger.end_step()
    with pytest.raises(InvariantViolation, match="lost or came twice"):
        list(ledger.arrived(step_of(number, 9), tables))


def test_another_number_of_tokens_is_noticed() -> None:
    ledger, tables = ledger_of(), {"r": table_of(9)}
    ledger.row(tables["r"], ScoreNeed.TOKENS, count=1, prompt=False)
    ledger.end_step()
    with pytest.raises(InvariantViolation, match="another number of tokens"):
        list(ledger.arrived(step_of(1, 8), tables))


def test_sampling_goes_by_the_request_s_own_length() -> None:
    ledger = ledger_of(score_mode="sampled", score_every=8, score_layers=3)
    tapped = []
    for length in range(20, 45):
        ledger.row(table_of(length), ScoreNeed.TOKENS, count=1, prompt=False)
        if (taps := ledger.end_step()) is not None:
            tapped.append(length)
            assert taps.rows["r"].stride == 3
    assert tapped == [24, 32, 40]
    ledger.row(table_of(21), ScoreNeed.TOKENS, count=9, prompt=True)
    assert ledger.end_step() is not None, "prompts are always observed"


def test_a_request_has_its_own_way_of_being_looked_at() -> None:
    ledger, server = ledger_of(), VTokenConfig(policy="h2o", budget=64)
    asked = {"vtoken_score_mode": "sampled", "vtoken_score_every": 4, "vtoken_score_window": 5}
    own = server.for_request({**asked, "vtoken_score_layers": 2})
    ledger.row(table_of(21), ScoreNeed.TOKENS, count=1, prompt=False, settings=own)
    assert ledger.end_step() is None
    ledger.row(table_of(24), ScoreNeed.TOKENS, count=1, prompt=False, settings=own)
    assert ledger.end_step().rows["r"].stride == 2
    ledger.row(table_of(21), ScoreNeed.TOKENS, count=9, prompt=True, settings=own)
    assert ledger.end_step().rows["r"].queries == 5
    ledger.row(table_of(21), ScoreNeed.TOKENS, count=1, prompt=False, settings=server)
    assert ledger.end_step().rows["r"].stride == 1


def test_nothing_wanted_is_nothing_told() -> None:
    ledger = ledger_of()
    ledger.row(table_of(9), ScoreNeed.NONE, count=1, prompt=False)
    assert ledger.end_step() is None


@pytest.mark.engine  # imports vLLM
@pytest.mark.parametrize(
    ("names", "stride", "tapped"),
    [("abcd", 1, "abcd"), ("abcdefghij", 5, "ej"), ("abc", 5, "c"), ("abcdefg", 3, "cf")],
)
def test_sampled_layers_are_the_last_of_every_few(names: str, stride: int, tapped: str) -> None:
    from vtoken.vllm.scores import tapped_layers

    assert tapped_layers(list(names), stride) == list(tapped)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"score_mode": "guessed"}, "choose one of: exact, sampled"),
        ({"score_every": 4}, "option of score_mode sampled, not exact; give --score-mode sampled"),
        ({"score_mode": "sampled", "score_layers": 0}, "score_layers must be positive"),
        ({"score_window": 1.5}, "score_window must be a whole number"),
    ],
)
def test_bad_options_are_refused_with_a_reason(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(Rejected, match=reason):
        VTokenConfig(**values)


@pytest.mark.engine
def test_news_go_along_with_an_output_that_is_still_to_come() -> None:
    from vllm.v1.outputs import (
        EMPTY_MODEL_RUNNER_OUTPUT,
        AsyncModelRunnerOutput,
        ModelRunnerOutput,
    )

    from vtoken.vllm.metadata import StepNews, news_of, tell

    class Coming(AsyncModelRunnerOutput):
        def get_output(self) -> ModelRunnerOutput:
            return ModelRunnerOutput([], {})

    told = tell(Coming(), StepNews([3]))
    assert isinstance(told, AsyncModelRunnerOutput)
    assert news_of(told.get_output()).failed == [3]
    empty = tell(EMPTY_MODEL_RUNNER_OUTPUT, StepNews([4]))
    assert isinstance(empty, ModelRunnerOutput)
    assert news_of(empty).failed == [4]
    assert news_of(EMPTY_MODEL_RUNNER_OUTPUT).empty, "vLLM shares this one"
