"""The coordinator of the drop-in's operations: what it lets the ranks execute, with a cache of ids on each of them."""

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unidist.hvd.host_submissions import Forwarded, HostSubmissions
from unidist.hvd.messages import (
    AllJoined,
    AnnounceRounds,
    Complete,
    Execute,
    Failed,
    Join,
    Name,
    ProcessSetAdded,
    ProcessSetRemoved,
    Request,
    Rounds,
    Shutdown,
    Signature,
    Submit,
    decode,
    encode,
)
from unidist.hvd.negotiation import Coordinator, Stalled
from unidist.hvd.response_cache import ResponseCache

pytestmark = pytest.mark.unit
SUM = Signature("allreduce", ("float32",), ((4,),), "sum")
GATHER = Signature("allgather", ("int64",), ((-1, 2),))


class World:
    """The ranks around a coordinator. Each message is encoded and decoded.

    Args:
        size: number of ranks.
        fusion: threshold in bytes.
        per_host: ranks on each host; those of all but the first have a leader.
    """

    def __init__(self, size: int, fusion: int = 0, per_host: int = 100) -> None:
        self.size = size
        self.hosts = [HostSubmissions(range(at, min(at + per_host, size))) for at in range(0, size, per_host)]
        self.leaders = {rank: self.hosts[rank // per_host] for rank in range(per_host, size)}
        self.coordinator = Coordinator(size, fusion, lambda signature, values, size: b"+".join(values) + b"/%d" % size)
        self.caches = [ResponseCache() for _ in range(size)]
        #: What each rank has received: groups of names, or messages.
        self.received: list[list[Any]] = [[] for _ in range(size)]
        #: Submissions by ids, of each rank.
        self.cached = [0] * size

    def submit(self, rank: int, *requests: Request, now: float = 0.0) -> None:
        message = self.caches[rank].submit(requests)
        self.cached[rank] += message.cached.bit_count() + len(message.numbered)
        self.send(rank, message, now)

    def send(self, rank: int, message: Any, now: float = 0.0) -> None:
        if rank in self.leaders:
            self.forward(self.leaders[rank].forward(rank, message), now)
        else:
            self.forward([((rank,), message)], now)

    def forward(self, messages: Forwarded, now: float = 0.0) -> None:
        for ranks, message in messages:
            received = decode(encode(message))
            if isinstance(received, Submit):
                self.coordinator.submit(ranks, received, now)
            else:
                assert received == Join()
                self.coordinator.join(ranks[0], now)

    def release(self) -> None:
        """Time passes: leaders hold nothing any more."""
        for leader in self.leaders.values():
            self.forward(leader.take(range(self.size)))
            assert not leader.holds

    def deliver(self) -> list[tuple[tuple[int, ...], Any]]:
        """Send what the coordinator has decided; the ranks of each message, and the groups or the message."""
        sent = []
        for ranks, message in self.coordinator.outgoing():
            for rank in ranks:
                received = decode(encode(message))
                assert str(received) == str(message)  # NaN is not equal to itself
                if isinstance(received, Execute | Complete):
                    names = [tuple(name for name, _ in group) for group in self.caches[rank].groups(received)]
                    what: Any = names if isinstance(received, Execute) else (names[0][0], received.value)
                else:
                    what = received
                self.received[rank].append(what)
            sent.append((tuple(ranks), what))
        return sent

    def all_submit(self, *requests: Request) -> list[tuple[tuple[int, ...], Any]]:
        for rank in range(self.size):
            self.submit(rank, *requests)
        return self.deliver()

    def add_set(self, *ranks: int) -> int:
        ((_, message),) = self.all_submit(request(0, Signature("add_process_set", ranks=ranks)))
        assert isinstance(message, ProcessSetAdded) and message.ranks == ranks
        return message.set_id

    def remove_set(self, set_id: int) -> list[tuple[tuple[int, ...], Any]]:
        return self.all_submit(request(1, Signature("remove_process_set", root=set_id)))


def request(name: Name, signature: Signature = SUM, value: bytes = b"", set_id: int = 0) -> Request:
    return Request(set_id, name, signature, value)


def test_an_operation_waits_for_all_ranks() -> None:
    world = World(3)
    for turn in range(4):  # from the third turn on by its id
        for rank in (2, 0):
            world.submit(rank, request("a"))
            assert world.deliver() == []
        world.submit(1, request("a"))
        assert world.deliver() == [((0, 1, 2), [("a",)])]
        assert world.deliver() == []
        assert world.cached == [max(0, turn - 1)] * 3


def test_operations_without_a_name_have_ids_by_their_signatures() -> None:
    world = World(2)
    for turn in range(5):
        assert world.all_submit(request(turn), request(turn + 100, GATHER)) == [((0, 1), [(turn,), (turn + 100,)])]
    assert world.cached == [6, 6]


def test_values_are_reduced_in_rank_order_if_all_ranks_sent_one() -> None:
    world = World(2)
    for _ in range(4):
        world.submit(1, request("s", value=b"one"))
        world.submit(0, request("s", value=b"zero"))
        assert world.deliver() == [((0, 1), ("s", b"zero+one/2"))]
    world.submit(0, request("s", value=b"1234"))  # this rank waits at once, the other one does not
    world.submit(1, request("s"))
    assert world.deliver() == [((0, 1), [("s",)])]
    assert world.all_submit(request(7, Signature("barrier"))) == [((0, 1), (7, b""))]


# ------------------------------------------------------------------------------------ fusion
def groups(sent: list[tuple[tuple[int, ...], Any]]) -> list[tuple[Name, ...]]:
    return [group for _, each in sent for group in (each if isinstance(each, list) else [(each[0],)])]


def test_fusion_keeps_to_the_threshold() -> None:
    requests = [request(name) for name in "abcde"]  # 16 bytes each
    for fusion, expected in ((32, ["ab", "cd", "e"]), (0, list("abcde")), (10**6, ["abcde"])):
        world = World(2, fusion)
        for _ in range(4):
            assert groups(world.all_submit(*requests)) == [tuple(group) for group in expected]
        assert world.cached == [10, 10]


@pytest.mark.parametrize(
    "other",
    [
        SUM._replace(op="max"), SUM._replace(dtypes=("float64",)), SUM._replace(prescale=2.0),
        SUM._replace(postscale=2.0),
        SUM._replace(device="cuda"), SUM._replace(op="adasum"), Signature("broadcast", ("float32",), ((4,),), root=1),
        SUM._replace(dtypes=("float32", "int32"), shapes=((4,), (4,))),
    ],
)  # fmt: skip
def test_what_differs_is_not_fused(other: Signature) -> None:
    requests = [request("a"), request("b", other), request("c"), request("d", other)]
    world = World(2, 10**6)
    for _ in range(3):
        fused = groups(world.all_submit(*requests))
        assert ("a", "c") in fused and not any({"a", "b"} <= set(group) for group in fused)


def test_what_has_a_value_is_not_fused() -> None:
    requests = [request("a"), request("b", value=b"1"), request("c")]
    assert sorted(groups(World(2, 10**6).all_submit(*requests))) == [("a", "c"), ("b",)]


# ------------------------------------------------------------------------------------ disagreement
@pytest.mark.parametrize("turns", [0, 3])  # by names, by ids
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (SUM._replace(kind="broadcast"), "mismatched operations: allreduce on rank 0; broadcast on rank 1"),
        (SUM._replace(dtypes=("int32",)), "mismatched allreduce data types: float32 on rank 0; int32 on rank 1"),
        (SUM._replace(shapes=((5,),)), "mismatched allreduce tensor shapes: (4) on rank 0; (5) on rank 1"),
        (SUM._replace(op="min"), "mismatched allreduce reduction operations: sum on rank 0; min on rank 1"),
        (SUM._replace(root=1), "mismatched allreduce root ranks: -1 on rank 0; 1 on rank 1"),
        (SUM._replace(prescale=0.5), "mismatched allreduce prescale factors: 1.0 on rank 0; 0.5 on rank 1"),
        (SUM._replace(prescale=math.nan), "mismatched allreduce prescale factors: 1.0 on rank 0; nan on rank 1"),
        (SUM._replace(postscale=0.5), "mismatched allreduce postscale factors: 1.0 on rank 0; 0.5 on rank 1"),
        (SUM._replace(device="cuda"), "mismatched allreduce devices: cpu on rank 0; cuda on rank 1"),
    ],
)
def test_ranks_that_do_not_agree_get_the_difference(other: Signature, message: str, turns: int) -> None:
    for first in (0, 1):
        world = World(2)
        for _ in range(turns):
            world.all_submit(request("a"))
        for rank in (first, 1 - first):
            world.submit(rank, request("a", other if rank else SUM))
        assert world.deliver() == [((0, 1), Failed(0, "a", f"a: {message}"))]
        for _ in range(3):
            assert groups(world.all_submit(request("a"))) == [("a",)]  # the name is free again


def test_factors_that_are_not_a_number_are_equal() -> None:
    signature = SUM._replace(prescale=math.nan)
    world = World(2)
    for _ in range(4):
        assert groups(world.all_submit(request("a", signature))) == [("a",)]


def test_an_operation_without_a_name_is_described_by_its_kind() -> None:
    world = World(2)
    world.submit(0, request(5))
    world.submit(1, request(5, SUM._replace(op="min")))
    ((_, failed),) = world.deliver()
    assert failed.reason.startswith("allreduce without a name (number 5): mismatched")


def test_a_message_that_cannot_be_read_is_an_error() -> None:
    for data in (b"", b"not a message", b"\x01\x02", b"\x00" + b"not a pickle", b"\xff"):
        with pytest.raises(ValueError):
            decode(data)
    with pytest.raises(ValueError, match="unknown id"):
        World(2).coordinator.submit([1], Submit(cached=4), 0.0)


# ------------------------------------------------------------------------------------ process sets
def test_process_sets_have_operations_of_their_own() -> None:
    world = World(3)
    number = world.add_set(0, 2)
    assert number == 1 and world.add_set(1, 2) == 2
    for _ in range(4):
        world.submit(0, request("a", set_id=1))
        world.submit(1, request("a"))
        world.submit(2, request("a", set_id=1))
        assert world.deliver() == [((0, 2), [("a",)])]
        world.submit(0, request("a"))
        world.submit(2, request("a"))
        assert world.deliver() == [((0, 1, 2), [("a",)])]


@pytest.mark.parametrize("turns", [0, 3])
def test_a_removed_set_fails_what_waits_in_it_and_what_comes(turns: int) -> None:
    world = World(3)
    number = world.add_set(0, 1)
    for _ in range(turns):
        for rank in (0, 1):
            world.submit(rank, request("waits", set_id=number))
        world.deliver()
    world.submit(1, request("waits", set_id=number))
    assert world.deliver() == []
    why = f"process set {number} has been removed"
    failed, removed = world.remove_set(number)
    assert failed == ((1,), Failed(number, "waits", f"waits: {why}"))
    assert removed == ((0, 1, 2), ProcessSetRemoved(1, number))
    world.submit(0, request("waits", set_id=number))
    assert world.deliver() == [((0,), Failed(number, "waits", f"waits: {why}"))]
    assert world.coordinator.stalled(1e9, 0.0) == []
    assert world.add_set(0, 1) == number + 1


@pytest.mark.parametrize("value", [b"", b"1"])
@pytest.mark.parametrize("turns", [0, 3])
def test_what_is_ready_together_with_the_removal_of_its_set_fails(turns: int, value: bytes) -> None:
    world = World(2)
    number = world.add_set(0, 1)
    inside, removal = request("x", SUM, value, number), request(9, Signature("remove_process_set", root=number))
    for _ in range(turns):
        world.all_submit(inside)
    world.submit(0, inside, removal)
    world.submit(1, removal)
    world.submit(1, inside)
    removed, failed = world.deliver()
    assert removed == ((0, 1), ProcessSetRemoved(9, number))
    assert failed == ((0, 1), Failed(number, "x", f"x: process set {number} has been removed"))


def test_ranks_that_ask_for_different_sets_get_an_error() -> None:
    world = World(2)
    for rank in (0, 1):
        world.submit(rank, request(0, Signature("add_process_set", ranks=(rank,))))
    ((_, failed),) = world.deliver()
    assert "mismatched add_process_set process sets: [0] on rank 0; [1] on rank 1" in failed.reason
    assert world.add_set(0, 1) == 1


# ------------------------------------------------------------------------------------ join
@pytest.mark.parametrize("turns", [0, 3])
def test_a_joined_rank_takes_part_in_allreduce_alone(turns: int) -> None:
    world = World(3, 10**6)
    requests = (request("before"), request("gather", GATHER))
    for _ in range(turns):
        world.all_submit(*requests)
    for rank in (0, 1):
        world.submit(rank, *requests)
    world.coordinator.join(2, 0.0)
    why = "allgather is not supported while ranks 2 have joined (with sparse gradients: sparse_as_dense=True)"
    joined, *sent = world.deliver()
    assert joined == ((0, 1, 2), AnnounceRounds())
    assert sorted(sent, key=str) == [
        ((0, 1), Failed(0, "gather", f"gather: {why}")),
        ((0, 1, 2), [("before",)]),
    ]
    other = SUM._replace(shapes=((2,),))
    for rank in (0, 1):
        world.submit(rank, request("a"), request("b", other))
    assert world.deliver() == [((0, 1, 2), [("a", "b")])]  # the joined rank knows what they are
    for rank in (0, 1):
        world.submit(rank, request("adasum", SUM._replace(op="adasum")))
    why = "adasum: allreduce is not supported while ranks 2 have joined"
    assert world.deliver() == [((0, 1), Failed(0, "adasum", why))]


def test_values_of_a_joined_rank_are_missing() -> None:
    world = World(2)
    world.coordinator.join(1, 0.0)
    world.submit(0, request("a", value=b"1234"))
    assert world.deliver()[1:] == [((0, 1), ("a", b"1234/2"))]  # an average is over all ranks


def test_the_last_rank_to_join_ends_the_join() -> None:
    world = World(3)
    world.coordinator.join(1, 0.0)
    assert world.deliver() == [((0, 1, 2), AnnounceRounds())]
    world.coordinator.join(2, 0.0)
    world.coordinator.join(2, 0.0)  # a rank counts once
    assert world.deliver() == []
    world.coordinator.join(0, 0.0)
    assert world.deliver() == [((0, 1, 2), AllJoined(0))]
    for _ in range(4):
        assert groups(world.all_submit(request("a"))) == [("a",)]


def test_a_join_outside_a_set_changes_nothing_in_it() -> None:
    world = World(3)
    number = world.add_set(0, 1)
    world.coordinator.join(2, 0.0)
    world.deliver()
    for _ in range(4):
        world.submit(0, request("a", set_id=number))
        assert world.deliver() == []
        world.submit(1, request("a", set_id=number))
        assert groups(world.deliver()) == [("a",)]


def test_rounds_go_once_to_those_who_have_joined() -> None:
    world = World(4)
    number = world.add_set(0, 1, 2)
    world.coordinator.join(3, 0.0)
    world.coordinator.join(0, 0.0)
    world.deliver()
    world.coordinator.begin_rounds(Rounds(0, 3, (0, 1)))
    assert world.deliver() == [((3, 0), Rounds(0, 3, (0, 1)))]
    world.coordinator.begin_rounds(Rounds(0, 2, (0, 0, 1, 1)))  # another rank is one ahead
    assert world.deliver() == [((3, 0), Rounds(0, 5, (1,)))]
    world.coordinator.begin_rounds(Rounds(number, 1, (0,)))
    assert world.deliver() == [((0,), Rounds(number, 1, (0,)))]
    world.coordinator.join(1, 0.0)
    assert world.deliver() == [((1,), Rounds(0, 3, (0, 1, 1))), ((1,), Rounds(number, 1, (0,)))]


def test_rounds_that_arrive_after_the_last_join_are_dropped() -> None:
    world = World(3)
    for rank in (0, 1, 2):
        world.coordinator.join(rank, 0.0)
    world.deliver()
    world.coordinator.begin_rounds(Rounds(0, 1, (0, 0)))  # the announcement and the join have crossed
    world.coordinator.outgoing()
    world.coordinator.join(0, 0.0)
    world.coordinator.begin_rounds(Rounds(0, 20, (0,)))
    world.coordinator.join(1, 0.0)
    assert world.deliver()[1:] == [((0,), Rounds(0, 20, (0,))), ((1,), Rounds(0, 20, (0,)))]


# ------------------------------------------------------------------------------------ loss and stalls
def test_a_shutdown_is_sent_to_all_once() -> None:
    world = World(3)
    for _ in range(3):
        world.all_submit(request("a"))
    world.submit(0, request("a"), request("b"))
    world.coordinator.shutdown("rank 2 is gone")
    world.coordinator.shutdown("rank 1 has shut down")  # the first is the reason
    world.submit(0, request("c"))
    world.coordinator.join(1, 0.0)
    assert world.deliver() == [((0, 1, 2), Shutdown("rank 2 is gone"))]
    # But that calls which wait are aborted earlier is news.
    world.coordinator.shutdown("rank 1 is stopped", abort_after=0.0)
    world.coordinator.shutdown("rank 0 is gone", abort_after=3.0)
    assert world.deliver() == [((0, 1, 2), Shutdown("rank 2 is gone", 0.0))]
    assert world.coordinator.stalled(100.0, 0.0) == []


@pytest.mark.parametrize("turns", [0, 3])
def test_stalled_operations_name_ranks(turns: int) -> None:
    world = World(3)
    for _ in range(turns):
        world.all_submit(request("a"))
    assert world.coordinator.stalled(9.5, 0.0) == []
    world.submit(2, request("a"), now=10.0)
    world.coordinator.stalled(10.0, 0.0)
    world.submit(0, request("a"), now=15.0)
    assert world.coordinator.stalled(16.0, 6.0) == [Stalled("a", 6.0, [0, 2], [1])]
    assert world.coordinator.stalled(16.0, 6.1) == []
    world.submit(1, request("a"), now=17.0)
    world.submit(1, request("a"), now=17.0)
    world.deliver()
    world.submit(2, request("a"), now=17.5)
    assert all(entry.seconds <= 1.0 for entry in world.coordinator.stalled(18.0, 0.0))  # it is another one


# ------------------------------------------------------------------------------------ races
KINDS = [SUM, SUM._replace(op="max"), Signature("broadcast", ("int64",), ((2,),), root=0), Signature("barrier")]


@settings(max_examples=300)
@given(
    seed=st.integers(0, 10**9), size=st.integers(1, 7), operations=st.integers(1, 12), fusion=st.integers(0, 100),
    per_host=st.integers(1, 7),
)  # fmt: skip
def test_all_ranks_execute_the_same_in_the_same_order(
    seed: int, size: int, operations: int, fusion: int, per_host: int
) -> None:
    """In several turns, whatever the order in which each rank submits, and in which the coordinator receives it; with a
    name and without, with a value on some ranks, with a signature that differs on one; over hosts with leaders.
    """
    draw = random.Random(seed)
    world = World(size, fusion, per_host)
    plan = {name: draw.choice(KINDS) for name in [f"op{i}" for i in range(operations)]}
    for turn in range(4):
        names: dict[Name, Signature] = {**plan, **{100 * turn + i: draw.choice(KINDS) for i in range(3)}}
        wrong = draw.choice([None, *names])  # one rank has another signature for it
        queues = []
        for rank in range(size):
            requests = [
                request(name, s, b"1" if s.kind == "allreduce" and draw.random() < 0.3 else b"")
                for name, s in names.items()
            ]
            if wrong is not None and rank == size - 1:
                requests = [
                    each._replace(signature=each.signature._replace(device="cuda")) if each.name == wrong else each
                    for each in requests
                ]
            draw.shuffle(requests)
            queues.append(requests)
        before = [len(each) for each in world.received]
        while any(queues):
            rank = draw.choice([rank for rank in range(size) if queues[rank]])
            world.submit(rank, *[queues[rank].pop(0) for _ in range(draw.randint(1, len(queues[rank])))])
            if draw.random() < 0.1 or not any(queues):
                world.release()
            if draw.random() < 0.5 or not any(queues):
                world.deliver()
        received = [each[at:] for each, at in zip(world.received, before)]
        assert all(each == received[0] for each in received)
        done: list[Name] = []
        failed = set()
        for what in received[0]:
            if isinstance(what, list):
                done += [name for group in what for name in group]
            elif isinstance(what, Failed):
                failed.add(what.name)
            else:
                done.append(what[0])
        assert sorted([*done, *failed], key=str) == sorted(names, key=str)
        assert failed == ({wrong} if wrong is not None and size > 1 else set())
    assert world.coordinator.stalled(1e9, 0.0) == []


@settings(max_examples=200)
@given(seed=st.integers(0, 10**9), size=st.integers(2, 7), per_host=st.integers(1, 4))
def test_joins_at_any_time_leave_nobody_waiting(seed: int, size: int, per_host: int) -> None:
    """Each rank makes some of the allreduces, in one order, and joins; all that were submitted are executed by all
    ranks. Twice, with the same names.
    """
    draw = random.Random(seed)
    world = World(size, 0, per_host)
    for _ in range(3):
        steps = [draw.randint(0, 6) for _ in range(size)]
        queues: list[list[Request | None]] = [[*(request(f"step{i}") for i in range(n)), None] for n in steps]
        before = [len(each) for each in world.received]
        last = -1
        while any(queues):
            rank = draw.choice([rank for rank in range(size) if queues[rank]])
            item = queues[rank].pop(0)
            if item is None:
                world.send(rank, Join())
                last = rank
            else:
                world.submit(rank, item)
            if draw.random() < 0.2 or not any(queues):
                world.release()
            assert all(ranks == tuple(range(size)) for ranks, _ in world.deliver())
        for each, at in zip(world.received, before):
            done = [name for what in each[at:] if isinstance(what, list) for group in what for name in group]
            assert sorted(done) == sorted(f"step{i}" for i in range(max(steps)))
            assert each[-1] == AllJoined(last) and each[at:].count(AnnounceRounds()) == 1


# ------------------------------------------------------------------------------------ leaders
def test_a_leader_sends_what_all_of_its_host_submit_once() -> None:
    leader = HostSubmissions([4, 5, 6])
    assert leader.forward(5, Submit(0b1011)) == [] == leader.forward(4, Submit(0b0010))
    assert leader.forward(6, Submit(0b0110)) == [((4, 5, 6), Submit(0b0010))]
    assert leader.holds
    assert leader.forward(4, Submit(0b1001)) == []
    assert leader.take([4, 5, 6]) == [((4, 5), Submit(0b1001)), ((6,), Submit(0b0100))]
    assert leader.take([4, 5, 6]) == [] and not leader.holds
    # The last of them waits for nobody.
    assert leader.forward(6, Submit(0b1001)) == [((6,), Submit(0b1001))]
    assert leader.forward(6, Submit(0b1000)) == []


def test_a_leader_holds_nothing_for_long_that_does_not_come_from_all() -> None:
    leader = HostSubmissions([4, 5])
    for turn in range(5):
        sent = leader.forward(4, Submit(1))
        assert sent == [((4,), Submit(1))] * (turn > 1)  # in the first turns nobody knows
        leader.take([4, 5])
        if turn == 0:
            leader.forget()
    leader.forget()  # a rank that had joined is back
    assert leader.forward(4, Submit(1)) == [] and leader.forward(5, Submit(1)) == [((4, 5), Submit(1))]


def test_a_leader_keeps_the_order_of_what_may_change_the_process_sets() -> None:
    removal = Submit(requests=(request(9, Signature("remove_process_set", root=1)),))
    numbered = Submit(1, numbered=((3, 0, b"1"),))
    for message in (removal, Join(), Rounds(0, 1, (0,))):
        leader = HostSubmissions([4, 5])
        assert leader.forward(4, numbered) == [((4,), numbered._replace(cached=0))]
        assert leader.forward(4, message) == [((4,), Submit(1)), ((4,), message)]


@settings(max_examples=100)
@given(seed=st.integers(0, 10**9), per_host=st.integers(1, 4))
def test_process_sets_across_hosts(seed: int, per_host: int) -> None:
    """Operations of a set that is removed after all have submitted them are executed, before that they fail."""
    draw = random.Random(seed)
    world = World(6, 0, per_host)
    ranks = sorted(draw.sample(range(6), draw.randint(2, 6)))

    def together(*requests: Request, receivers: list[int] = ranks) -> list[tuple[tuple[int, ...], Any]]:
        queues = {rank: list(requests) for rank in receivers}
        while queues:
            rank = draw.choice(list(queues))
            world.submit(rank, queues[rank].pop(0))
            if not queues[rank]:
                del queues[rank]
            if draw.random() < 0.1 or not queues:
                world.release()
        return world.deliver()

    everybody = list(range(6))
    ((_, added),) = together(request(0, Signature("add_process_set", ranks=tuple(ranks))), receivers=everybody)
    inside = [request(f"op{i}", set_id=added.set_id) for i in range(3)]
    for _ in range(4):
        assert sorted(groups(together(*inside))) == [(each.name,) for each in inside]
        for leader in world.leaders.values():
            if draw.random() < 0.3:
                leader.forget()
    for rank in ranks:
        world.submit(rank, *inside)
    late = draw.choice(ranks)
    world.submit(late, request("late", set_id=added.set_id))
    sent = together(request(1, Signature("remove_process_set", root=added.set_id)), receivers=everybody)
    done = [each for ranks_, each in sent if isinstance(each, list)]
    assert [group for each in done for group in each] == [(each.name,) for each in inside]
    failed = [each.name for _, each in sent if isinstance(each, Failed)]
    assert failed == ["late"]
    assert world.coordinator.stalled(1e9, 0.0) == []
