"""The digest of a layout tells any two layouts apart that a rank could confuse."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.engine  # imports vLLM


def test_values_shapes_and_order_count_and_dtypes_do_not() -> None:
    from vtoken.vllm.fingerprint import fingerprint_of

    base = [np.arange(6, dtype=np.int32).reshape(2, 3), np.array([5, 7])]
    same = [np.arange(6, dtype=np.int64).reshape(2, 3), np.array([5, 7], dtype=np.int32)]
    others = [
        [base[0].reshape(3, 2), base[1]],
        [base[0], base[1][::-1]],
        [base[0] + (np.arange(6).reshape(2, 3) == 4), base[1]],
        [base[0][:, :2], base[1]],
        [base[1], base[0]],
    ]
    assert fingerprint_of(base) == fingerprint_of(same)
    found = {fingerprint_of(arrays) for arrays in [base, *others]}
    assert len(found) == len(others) + 1
    assert all(-(1 << 63) <= value < 1 << 63 for value in found)


def test_metadata_that_is_lost_or_comes_twice_is_noticed() -> None:
    from vtoken.errors import InvariantViolation
    from vtoken.vllm.metadata import Sequence, StepMetadata

    told, heard = Sequence(), Sequence()
    steps = [StepMetadata(number=told.next()) for _ in range(4)]
    heard.expect(steps[0])
    heard.expect(steps[1])
    with pytest.raises(InvariantViolation, match="I4"):
        heard.expect(steps[3])
    twice = Sequence()
    twice.expect(steps[0])
    with pytest.raises(InvariantViolation, match="came twice"):
        twice.expect(steps[0])
