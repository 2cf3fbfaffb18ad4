"""The error types keep their fields, read well, and survive the way between processes."""

from __future__ import annotations

import pickle

import pytest

from vtoken import errors


def test_a_violation_names_law_request_token_slot_before_and_after() -> None:
    violation = errors.InvariantViolation(
        "I2",
        "slot 17 belongs to two tokens",
        req_id="req-3",
        token_id=0,
        slot=17,
        before={"owner": 4},
        after={"owner": 9},
    )
    assert str(violation).splitlines() == [
        "law I2 is violated: slot 17 belongs to two tokens",
        "  request  req-3",
        "  token    0",
        "  slot     17",
        "  before   {'owner': 4}",
        "  after    {'owner': 9}",
    ]


def test_a_report_leaves_out_the_fields_that_do_not_apply() -> None:
    violation = errors.InvariantViolation("L5", "free 3 + owned 4 is not pool 8")
    assert str(violation) == "law L5 is violated: free 3 + owned 4 is not pool 8"


def test_a_violation_survives_pickling_with_its_fields_and_notes() -> None:
    violation = errors.InvariantViolation("I1", "bytes differ", req_id="r", slot=5, before="aa")
    violation.add_note("replay with: vtoken replay trace.ndjson")
    copy = pickle.loads(pickle.dumps(violation))
    assert str(copy) == str(violation)
    assert vars(copy) == vars(violation)
    assert copy.__notes__ == violation.__notes__


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "InvariantViolation"])
def test_every_other_error_survives_pickling_and_is_a_vtoken_error(name: str) -> None:
    error = getattr(errors, name)("budget is 0, and must be positive")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, errors.VTokenError)
    assert type(copy) is type(error)
    assert str(copy) == "budget is 0, and must be positive"


def test_a_rejection_carries_its_reason() -> None:
    assert errors.Rejected("token 7 is dead").reason == "token 7 is dead"
