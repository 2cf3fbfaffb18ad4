"""Timing in turns, with a clock made by hand; the device's clock is for tests/gpu."""

from __future__ import annotations

from support.timing import Work, alternated


def test_works_run_once_untimed_and_are_then_timed_in_turns_from_either_end() -> None:
    ran: list[str] = []
    timed: list[str] = []
    works: list[Work] = [lambda: ran.append("a"), lambda: ran.append("b")]

    def clock(work: Work) -> float:
        work()
        timed.append(ran[-1])
        return {"a": 1.0, "b": 2.0}[ran[-1]] + len(timed)

    # a at turns 1, 4, 5 and b at turns 2, 3, 6
    assert alternated(works, rounds=3, clock=clock) == [1.0 + 4, 2.0 + 3]
    assert timed == ["a", "b", "b", "a", "a", "b"]
    assert ran == ["a", "b", *timed]
