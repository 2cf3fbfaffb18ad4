"""Copy streams: one contract for all of them, real overlap in the thread, and the adversary.

S02 and S03 run on real bytes; their controls leave out one dependency, and are caught by the
bytes under the strategy that is worst for them, and by the law under every strategy.
"""

from __future__ import annotations

import gc
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from vtoken.errors import Rejected, VTokenError
from vtoken.kv import Mover, TokenRowLayout
from vtoken.kv.streams import (
    Copy,
    CopyEvent,
    CopyFailed,
    CopyStream,
    SynchronousCopyStream,
    ThreadCopyStream,
)
from vtoken.testing.device import (
    COMPUTE,
    COPY,
    STRATEGIES,
    AdversarialCopyStream,
    DeviceDeadlock,
    DeviceError,
    SimulatedDevice,
    Strategy,
)
from vtoken_spec.order import Op, races

PATIENCE_S = 30.0
"""How long a test waits for another thread before it fails."""


def copy(run: Callable[[], None], owner: str = "a", source: int = 1, target: int = 2) -> Copy:
    return Copy(run, torch.tensor([source]), torch.tensor([target]), owner)


# One contract -----------------------------------------------------------------------------------


@dataclass
class Rig:
    """A stream, and what makes the host see that the compute stream has got past its waits."""

    stream: CopyStream
    settle: Callable[[], None] = lambda: None


def rig_of(kind: str) -> Rig:
    if kind == "synchronous":
        return Rig(SynchronousCopyStream())
    if kind == "thread":
        return Rig(ThreadCopyStream())
    device = SimulatedDevice(kind)  # type: ignore[arg-type]
    return Rig(AdversarialCopyStream(device), lambda: device.synchronize(COMPUTE))


@pytest.fixture(params=["synchronous", "thread", *STRATEGIES])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = rig_of(request.param)
    yield made
    made.stream.close()


def test_copies_run_once_and_in_order_within_a_launch_and_across_launches(rig: Rig) -> None:
    ran: list[int] = []
    launches = [
        rig.stream.launch([copy(lambda i=3 * n + k: ran.append(i)) for k in range(3)])
        for n in range(4)
    ]
    rig.stream.wait(launches[-1])
    rig.settle()
    assert ran == list(range(12))
    assert all(rig.stream.done(event) and event.error is None for event in launches)


def test_waits_may_come_in_any_order_and_again(rig: Rig) -> None:
    launches = [rig.stream.launch([copy(lambda: None)]) for _ in range(3)]
    for event in [*reversed(launches), *launches]:
        rig.stream.wait(event)
    rig.settle()
    assert all(rig.stream.done(event) for event in launches)


def test_a_launch_of_nothing_is_done_like_any_other(rig: Rig) -> None:
    event = rig.stream.launch([])
    rig.stream.wait(event)
    rig.settle()
    assert rig.stream.done(event)


def test_a_failed_copy_is_reported_by_its_own_wait_and_later_launches_go_on(rig: Rig) -> None:
    """Claim: the launch does not raise; the rest of it is not run; others are unharmed."""
    ran: list[str] = []

    def fail() -> None:
        raise ValueError("no such device")

    before = rig.stream.launch([copy(lambda: ran.append("before"))])
    failing = rig.stream.launch(
        [copy(lambda: ran.append("first")), copy(fail, owner="b"), copy(lambda: ran.append("rest"))]
    )
    after = rig.stream.launch([copy(lambda: ran.append("after"))])
    rig.stream.wait(before)
    rig.stream.wait(after)
    rig.settle()
    assert ran == ["before", "first", "after"]
    assert rig.stream.done(failing)
    assert isinstance(failing.error, ValueError)
    for _ in range(2):
        with pytest.raises(CopyFailed, match=r"a, b: ValueError: no such device") as caught:
            rig.stream.wait(failing)
        assert caught.value.__cause__ is failing.error
    assert before.error is after.error is None
    rig.settle()


def test_closing_finishes_what_is_queued_and_may_be_repeated(rig: Rig) -> None:
    ran: list[int] = []
    event = rig.stream.launch([copy(lambda i=i: ran.append(i)) for i in range(5)])
    rig.stream.close()
    rig.stream.close()
    assert ran == list(range(5))
    assert rig.stream.done(event)
    rig.stream.wait(event)
    rig.settle()


def test_a_closed_stream_takes_no_launch(rig: Rig) -> None:
    rig.stream.close()
    with pytest.raises(Rejected, match="closed"):
        rig.stream.launch([copy(lambda: None)])


def test_an_event_of_another_kind_of_stream_is_rejected(rig: Rig) -> None:
    for use in (rig.stream.wait, rig.stream.done):
        with pytest.raises(Rejected, match="another kind"):
            use(CopyEvent(["a"]))


def test_a_failed_copy_s_error_is_vtoken_s_own_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(CopyFailed("a copy failed")))
    assert isinstance(error, VTokenError)
    assert str(error) == "a copy failed"


@pytest.mark.parametrize("kind", ["synchronous", "thread", *STRATEGIES])
def test_the_same_bytes_arrive_by_every_stream(kind: str) -> None:
    rig, cache = rig_of(kind), Cache()
    expected = cache.bytes()
    for pairs in ({1: 9, 5: 10}, {9: 13, 2: 12, 3: 8}):
        for source, target in pairs.items():
            expected[target] = expected[source].clone()
        event = rig.stream.launch(cache.copies(pairs))
        rig.stream.wait(event)
    rig.settle()
    assert torch.equal(cache.bytes(), expected)
    assert cache.mover.moved_tokens == 5
    rig.stream.close()


# The synchronous one ----------------------------------------------------------------------------


def test_nothing_is_in_flight_after_a_synchronous_launch() -> None:
    stream, ran = SynchronousCopyStream(), []
    event = stream.launch([copy(lambda: ran.append(1))])
    assert ran == [1]
    assert stream.done(event)


def test_an_interrupt_in_a_synchronous_copy_reaches_the_caller() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SynchronousCopyStream().launch([copy(interrupted)])


# The thread -------------------------------------------------------------------------------------


@pytest.fixture
def thread() -> Iterator[ThreadCopyStream]:
    stream = ThreadCopyStream()
    yield stream
    stream.close()


def reached(event: threading.Event) -> None:
    if not event.wait(PATIENCE_S):
        raise TimeoutError("the other thread did not get there")


def test_the_caller_goes_on_while_a_copy_runs(thread: ThreadCopyStream) -> None:
    """Claim: a copy is under way, in another thread, while the caller computes; it ends only
    after the caller has done something that it waits for, so the two do overlap."""
    cache, began, computed = Cache(), threading.Event(), threading.Event()
    where: list[int] = []

    def slow() -> None:
        where.append(threading.get_ident())
        began.set()
        reached(computed)

    event = thread.launch([copy(slow), *cache.copies({1: 9})])
    reached(began)
    assert not thread.done(event)
    product = torch.ones(8, 8) @ torch.ones(8, 8)
    assert not torch.equal(cache.bytes()[9], cache.bytes()[1])
    computed.set()
    thread.wait(event)
    assert torch.equal(cache.bytes()[9], cache.bytes()[1])
    assert float(product[0, 0]) == 8.0
    assert where != [threading.get_ident()]


def test_a_wait_lasts_until_its_own_launch_is_done_and_no_longer(thread: ThreadCopyStream) -> None:
    ran: list[str] = []
    release = threading.Event()
    first = thread.launch([copy(lambda: ran.append("first"))])
    second = thread.launch([copy(lambda: reached(release)), copy(lambda: ran.append("second"))])
    thread.wait(first)
    assert ran == ["first"]
    assert not thread.done(second)
    release.set()
    thread.wait(second)
    assert ran == ["first", "second"]


def test_a_wait_blocks_while_its_copy_runs(thread: ThreadCopyStream) -> None:
    began, release, passed = threading.Event(), threading.Event(), threading.Event()
    event = thread.launch([copy(began.set), copy(lambda: reached(release))])

    def waits() -> None:
        thread.wait(event)
        passed.set()

    waiting = threading.Thread(target=waits, daemon=True)
    waiting.start()
    reached(began)
    assert not passed.is_set()
    release.set()
    reached(passed)
    waiting.join(PATIENCE_S)


@pytest.mark.parametrize("error", [SystemExit("stop"), KeyboardInterrupt()])
def test_no_exception_of_a_copy_ends_the_thread(
    thread: ThreadCopyStream, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    failing = thread.launch([copy(fail)])
    with pytest.raises(CopyFailed):
        thread.wait(failing)
    thread.wait(thread.launch([copy(lambda: None)]))


def test_a_cache_allocated_in_inference_mode_can_be_copied(thread: ThreadCopyStream) -> None:
    """The mode belongs to a thread; an engine allocates its cache in it."""
    with torch.inference_mode():
        cache = Cache()
    assert cache.memory.is_inference()
    thread.wait(thread.launch(cache.copies({1: 9})))
    assert torch.equal(cache.bytes()[9], cache.bytes()[1])


def test_an_idle_thread_keeps_nothing_of_a_finished_launch_alive(thread: ThreadCopyStream) -> None:
    gone = threading.Event()
    large = copy(lambda: None)
    watch = weakref.ref(large, lambda _: gone.set())
    event = thread.launch([large])
    del large
    thread.wait(event)
    reached(gone)
    assert watch() is None


@pytest.mark.parametrize("closed", [True, False])
def test_the_thread_ends_when_its_stream_is_closed_or_dropped(closed: bool) -> None:
    stream = ThreadCopyStream()
    stream.wait(stream.launch([copy(lambda: None)]))
    worker = stream._thread
    assert worker.is_alive()
    assert worker.daemon
    if closed:
        stream.close()
    del stream
    gc.collect()
    worker.join(PATIENCE_S)
    assert not worker.is_alive()


# The simulated device ---------------------------------------------------------------------------


def journal(strategy: Strategy, *, seed: int = 0, linked: bool = False) -> list[str]:
    """Two copies and four compute operations, in the order in which they ran. `linked`: the copies
    follow the first two, and the last one follows the copies."""
    device, ran = SimulatedDevice(strategy, seed=seed), []

    def give(stream: str, name: str) -> None:
        device.submit(stream, lambda: ran.append(name), kind="attend")

    give(COMPUTE, "c1")
    give(COMPUTE, "c2")
    if linked:
        device.wait(COPY, device.record(COMPUTE))
    give(COPY, "m1")
    give(COPY, "m2")
    copied = device.record(COPY)
    give(COMPUTE, "c3")
    if linked:
        device.wait(COMPUTE, copied)
    give(COMPUTE, "c4")
    assert ran == [], "nothing runs before the host waits"
    device.synchronize(COMPUTE)
    device.synchronize(COPY)
    return ran


def test_copies_run_as_late_as_dependencies_allow() -> None:
    assert journal("copies last") == ["c1", "c2", "c3", "c4", "m1", "m2"]
    assert journal("copies last", linked=True) == ["c1", "c2", "c3", "m1", "m2", "c4"]


def test_copies_run_as_early_as_dependencies_allow() -> None:
    assert journal("copies first") == ["m1", "m2", "c1", "c2", "c3", "c4"]
    assert journal("copies first", linked=True) == ["c1", "c2", "m1", "m2", "c3", "c4"]


def test_random_orders_keep_each_stream_s_own_order_and_the_dependencies() -> None:
    """All 15 interleavings occur without a dependency; 3 are left with both."""
    free = {tuple(journal("random", seed=seed)) for seed in range(400)}
    linked = {tuple(journal("random", seed=seed, linked=True)) for seed in range(100)}
    names = ["c1", "c2", "c3", "c4", "m1", "m2"]
    allowed = {
        order
        for order in itertools.permutations(names)
        if [n for n in order if n[0] == "c"] == names[:4]
        and [n for n in order if n[0] == "m"] == names[4:]
    }
    assert free == allowed
    assert linked == {
        order
        for order in allowed
        if order.index("c2") < order.index("m1") and order.index("m2") < order.index("c4")
    }
    assert journal("random", seed=7) == journal("random", seed=7)


def test_waiting_for_one_stream_does_not_hurry_the_other() -> None:
    for strategy, left in (("copies last", 1), ("copies first", 0)):
        device = SimulatedDevice(strategy)  # type: ignore[arg-type]
        device.submit(COPY, lambda: None, kind="copy")
        device.submit(COMPUTE, lambda: None, kind="write")
        device.synchronize(COMPUTE)
        assert (device.queued(COMPUTE), device.queued(COPY)) == (0, left)
    device = SimulatedDevice("copies first")
    device.submit(COMPUTE, lambda: None, kind="write")
    device.synchronize(COPY)
    assert device.queued(COMPUTE) == 1, "compute lags: nobody needs it"


def test_an_eager_copy_starts_with_the_event_that_it_waits_for() -> None:
    """Also when that is the last thing the host waits for."""
    device, ran = SimulatedDevice("copies first"), []
    device.submit(COMPUTE, lambda: ran.append("write"), kind="write")
    AdversarialCopyStream(device).launch([copy(lambda: ran.append("copy"))])
    device.synchronize(COMPUTE)
    assert ran == ["write", "copy"]


def test_time_that_nobody_needs_finishes_a_copy_unless_copies_come_last() -> None:
    for strategy in STRATEGIES:
        device = SimulatedDevice(strategy)
        stream = AdversarialCopyStream(device)
        event = stream.launch([copy(lambda: None)])
        for _ in range(40):
            device.elapse()
        assert stream.done(event) == (strategy == "random")
        device.synchronize(COMPUTE)
        assert stream.done(event) == (strategy != "copies last")


def test_the_log_has_every_operation_as_it_was_given() -> None:
    device = SimulatedDevice("copies last")
    stream = AdversarialCopyStream(device)
    device.submit(COMPUTE, lambda: None, kind="write", owner="b", writes=torch.tensor([1]))
    stream.wait(stream.launch([copy(lambda: None)]))
    device.submit(COMPUTE, lambda: None, kind="attend", reads=[2, 1])
    assert device.log == [
        Op(COMPUTE, "write", "b", (), (1,)),
        Op(COMPUTE, "record", event=0),
        Op(COPY, "wait", event=0),
        Op(COPY, "copy", "a", (1,), (2,)),
        Op(COPY, "record", event=1),
        Op(COMPUTE, "wait", event=1),
        Op(COMPUTE, "attend", None, (2, 1), ()),
    ]
    assert list(races(device.log)) == []


def test_what_the_host_has_seen_to_be_done_orders_what_it_issues_later() -> None:
    """Claim: a plan whose event was polled needs no wait; one that was not seen done does."""
    for strategy, wrong in (("copies first", 0), ("copies last", 1)):
        device = SimulatedDevice(strategy)  # type: ignore[arg-type]
        stream = AdversarialCopyStream(device)
        event = stream.launch([copy(lambda: None)])
        device.synchronize(COMPUTE)
        for _ in range(2):
            stream.done(event)
        device.submit(COMPUTE, lambda: None, kind="attend", owner="a", reads=[2])
        assert len(list(races(device.log))) == wrong
        assert [op.kind for op in device.log].count("wait") == 2 - wrong


def test_the_log_can_be_dropped_when_nothing_is_queued() -> None:
    device = SimulatedDevice("copies last")
    stream = AdversarialCopyStream(device)
    event = stream.launch([copy(lambda: None)])
    device.synchronize(COMPUTE)
    assert not device.forget(), "a copy is queued"
    assert len(device.log) == 4
    device.synchronize(COPY)
    assert device.forget()
    assert device.log == []
    assert not device._complete, "bounded like the log"
    stream.wait(event)
    assert stream.done(event)
    device.submit(COMPUTE, lambda: None, kind="attend", reads=[2])
    stream.launch([copy(lambda: None, source=2, target=3)])
    assert list(races(device.log)) == [], "what is forgotten comes before everything"
    device.synchronize(COPY)


def test_a_wait_for_an_event_that_is_never_recorded_is_named() -> None:
    for event in (5, -1):
        device = SimulatedDevice("random")
        device.wait(COPY, event)
        copied = device.record(COPY)
        device.wait(COMPUTE, copied)
        with pytest.raises(DeviceDeadlock) as caught:
            device.synchronize(COMPUTE)
        assert f"'copy' waits for event {event}, which is never recorded" in str(caught.value)
        assert f"'compute' waits for event {copied}, which is not complete" in str(caught.value)
        assert [breach.law for breach in races(device.log)] == ["I3"]


def test_what_an_operation_raises_reaches_the_host_and_the_stream_goes_on() -> None:
    device, ran = SimulatedDevice("copies last"), []

    def fail() -> None:
        raise ValueError("attention reads other bytes")

    device.submit(COMPUTE, fail, kind="attend")
    device.submit(COMPUTE, lambda: ran.append(1), kind="attend")
    with pytest.raises(ValueError, match="other bytes"):
        device.synchronize(COMPUTE)
    device.synchronize(COMPUTE)
    assert ran == [1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_injected_failure_is_known_at_the_latest_when_the_host_waits(strategy: Strategy) -> None:
    """Claim: copy 1 of 4 fails and touches no byte; its launch's rest does not run; the wait that
    was queued before the failure raises as soon as the compute stream gets there."""
    device, cache = SimulatedDevice(strategy), Cache()
    stream = AdversarialCopyStream(device, fail={1})
    expected = cache.bytes()
    first = stream.launch(cache.copies({1: 9, 2: 10, 3: 11}, batch_tokens=1))
    second = stream.launch(cache.copies({4: 12}))
    stream.wait(first)
    with pytest.raises(CopyFailed, match="injected"):
        device.synchronize(COMPUTE)
    stream.wait(second)
    device.synchronize(COMPUTE)
    expected[9], expected[12] = expected[1].clone(), expected[4].clone()
    assert torch.equal(cache.bytes(), expected)
    assert isinstance(first.error, DeviceError)
    assert stream.done(first)
    with pytest.raises(CopyFailed):
        stream.wait(first)
    device.submit(COMPUTE, lambda: None, kind="write", owner="b", writes=[9, 10, 1])
    assert list(races(device.log)) == [], "a failed launch was waited for like any other"
    device.synchronize(COMPUTE)


def test_a_wait_that_reports_a_failure_orders_all_the_same() -> None:
    """Claim: the blocks of an aborted plan may be handed out after its event was waited for."""
    device = SimulatedDevice("copies first")
    stream = AdversarialCopyStream(device, fail={0})
    event = stream.launch([copy(lambda: None)])
    device.synchronize(COPY)
    with pytest.raises(CopyFailed):
        stream.wait(event)
    device.submit(COMPUTE, lambda: None, kind="write", owner="b", writes=[1, 2])
    assert list(races(device.log)) == []


# S02 and S03 on real bytes ----------------------------------------------------------------------


class Cache:
    """Four blocks of four tokens, two layers, every value another one."""

    def __init__(self) -> None:
        shape = (2, 4, 2, 4, 6)  # layers, blocks, heads, tokens, content
        self.memory = torch.arange(2 * 4 * 2 * 4 * 6, dtype=torch.float32).reshape(shape)
        self.layout = TokenRowLayout([self.memory])
        self.mover = Mover(self.layout)

    def bytes(self) -> torch.Tensor:
        """K and V of each of the 16 slots."""
        return self.layout.read(torch.arange(16))

    def copies(
        self, pairs: dict[int, int], *, owner: str = "a", batch_tokens: int = 64
    ) -> list[Copy]:
        self.mover.batch_tokens = batch_tokens
        sources, targets = torch.tensor(list(pairs)), torch.tensor(list(pairs.values()))
        return self.mover.copies(sources, targets, owner=owner)


class WithoutLaunchWait(AdversarialCopyStream):
    """Control: the copy stream does not wait for the compute stream."""

    def _follow_compute(self) -> None:
        pass


class WithoutWait(AdversarialCopyStream):
    """Control: the compute stream does not wait for the copies."""

    def wait(self, event: CopyEvent) -> None:
        pass


@dataclass
class Run:
    """A cache on a device, and what attention read that it should not have."""

    device: SimulatedDevice
    stream: AdversarialCopyStream
    cache: Cache = field(default_factory=Cache)
    wrong: list[str] = field(default_factory=list)

    def write(self, slot: int, owner: str, value: float, kind: str = "write") -> None:
        def run() -> None:
            self.cache.memory[:, slot // 4, :, slot % 4] = value

        self.device.submit(COMPUTE, run, kind=kind, owner=owner, writes=[slot])  # type: ignore[arg-type]

    def attend(self, slot: int, owner: str, expected: torch.Tensor | float) -> None:
        def run() -> None:
            found = self.cache.layout.read(torch.tensor([slot]))[0]
            if not torch.equal(found, torch.as_tensor(expected).expand_as(found)):
                self.wrong.append(f"{owner} reads other bytes in slot {slot}")

        self.device.submit(COMPUTE, run, kind="attend", owner=owner, reads=[slot])

    def launch(self, source: int, target: int) -> CopyEvent:
        return self.stream.launch(self.cache.copies({source: target}))

    def finish(self) -> tuple[bool, set[str]]:
        """Whether all bytes were right, and the laws that were broken."""
        self.device.synchronize(COMPUTE)
        self.device.synchronize(COPY)
        return not self.wrong, {breach.law for breach in races(self.device.log)}


def reader_of_the_target(run: Run) -> None:
    """S02. Given b's attention over block 2 that has not finished; when block 2 becomes the target
    of a copy of a's; then the copy is ordered behind the reader."""
    before = run.cache.bytes()
    run.attend(9, "b", before[9])
    event = run.launch(1, 9)
    run.stream.wait(event)
    run.attend(9, "a", before[1])


def written_source(run: Run) -> None:
    """S03. Given a copy whose source slot is written in the same step; then it waits for the write,
    and attention, which reads the target later, sees what was written."""
    run.write(1, "a", 7.0)
    event = run.launch(1, 9)
    run.attend(1, "a", 7.0)
    run.stream.wait(event)
    run.attend(9, "a", 7.0)


def source_handed_out(run: Run) -> None:
    """The source's block is another request's after the commit, which writes it at once."""
    before = run.cache.bytes()
    event = run.launch(1, 9)
    run.attend(1, "a", before[1])
    run.stream.wait(event)
    run.write(1, "b", 7.0)
    run.attend(9, "a", before[1])


def cleared_target(run: Run) -> None:
    """S19. Given a fresh block that is cleared and copied to in one step; then the order is clear,
    copy, attention."""
    before = run.cache.bytes()
    run.write(9, "a", 0.0, kind="zero")
    event = run.launch(1, 9)
    run.stream.wait(event)
    run.attend(9, "a", before[1])


SCENARIOS = [reader_of_the_target, written_source, source_handed_out, cleared_target]


def played(
    scenario: Callable[[Run], None],
    kind: type[AdversarialCopyStream],
    strategy: Strategy,
    *,
    seed: int = 0,
) -> tuple[bool, set[str]]:
    device = SimulatedDevice(strategy, seed=seed)
    run = Run(device, kind(device))
    scenario(run)
    return run.finish()


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_recorded_dependencies_keep_every_byte_right(
    scenario: Callable[[Run], None], strategy: Strategy
) -> None:
    for seed in range(20 if strategy == "random" else 1):
        assert played(scenario, AdversarialCopyStream, strategy, seed=seed) == (True, set())


@dataclass(frozen=True)
class Control:
    """`kind` in `scenario` gives wrong bytes under `worst`, and right ones under `blind`; it
    breaks `laws` under both."""

    scenario: Callable[[Run], None]
    kind: type[AdversarialCopyStream]
    worst: Strategy
    blind: Strategy
    laws: frozenset[str]


def control(
    scenario: Callable[[Run], None], kind: type[AdversarialCopyStream], worst: Strategy, *laws: str
) -> Control:
    blind: Strategy = "copies last" if worst == "copies first" else "copies first"
    return Control(scenario, kind, worst, blind, frozenset(laws))


CONTROLS = [
    control(reader_of_the_target, WithoutLaunchWait, "copies first", "L11"),
    control(reader_of_the_target, WithoutWait, "copies last", "I3"),
    control(written_source, WithoutLaunchWait, "copies first", "I3"),
    control(written_source, WithoutWait, "copies last", "I3"),
    control(source_handed_out, WithoutWait, "copies last", "I3", "L11"),
    control(cleared_target, WithoutLaunchWait, "copies first", "L11"),
    control(cleared_target, WithoutWait, "copies last", "I3"),
]


@pytest.mark.parametrize("case", CONTROLS, ids=lambda c: f"{c.scenario.__name__}-{c.kind.__name__}")
def test_a_dependency_left_out_shows_as_wrong_bytes_and_breaks_a_law(case: Control) -> None:
    assert played(case.scenario, case.kind, case.worst) == (False, case.laws)
    random = [played(case.scenario, case.kind, "random", seed=seed) for seed in range(40)]
    assert {right for right, _ in random} == {True, False}, "some orders hide it, some show it"
    assert all(laws == case.laws for _, laws in random)


@pytest.mark.parametrize("case", CONTROLS, ids=lambda c: f"{c.scenario.__name__}-{c.kind.__name__}")
def test_the_law_finds_it_even_where_the_bytes_are_right(case: Control) -> None:
    assert played(case.scenario, case.kind, case.blind) == (True, case.laws)


def test_a_thread_that_does_not_wait_reads_the_old_bytes(thread: ThreadCopyStream) -> None:
    """Control for the CPU: with the wait left out, attention may run before the copy has."""
    cache, release = Cache(), threading.Event()
    before = cache.bytes()
    event = thread.launch([copy(lambda: reached(release)), *cache.copies({1: 9})])
    assert torch.equal(cache.bytes()[9], before[9]), "read too early"
    release.set()
    thread.wait(event)
    assert torch.equal(cache.bytes()[9], before[1])
