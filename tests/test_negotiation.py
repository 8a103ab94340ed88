"""The coordinator of the drop-in's operations: which responses it gives to which requests."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unidist.hvd.negotiation import Coordinator, Payload, Request, Response, Signature, format_ranks

pytestmark = pytest.mark.unit
SUM = Signature("allreduce", ("float32",), ((4,),), "sum")


def request(name: str, signature: Signature = SUM, payload: Payload = (), set_id: int = 0) -> Request:
    return (set_id, name, signature, payload)


def submit(coordinator: Coordinator, rank: int, *requests: Request, now: float = 0.0) -> None:
    coordinator.receive(rank, requests, now)


def agreed(coordinator: Coordinator, *requests: Request) -> list[tuple[tuple[int, ...], Response]]:
    """The responses after all ranks of the world have submitted the same requests."""
    for rank in coordinator.sets[0]:
        submit(coordinator, rank, *requests)
    return coordinator.responses()


def test_an_operation_waits_for_all_ranks() -> None:
    coordinator = Coordinator(3, 0)
    for rank in (2, 0):
        submit(coordinator, rank, request("a"))
        assert coordinator.responses() == []
    submit(coordinator, 1, request("a"))
    assert coordinator.responses() == [((0, 1, 2), Response(0, ("a",), (SUM,)))]
    assert coordinator.responses() == []


def test_payloads_come_in_rank_order_and_only_if_all_sent_one() -> None:
    gather = Signature("allgather", ("int64",), ((-1, 2),))
    coordinator = Coordinator(2, 0)
    submit(coordinator, 1, request("g", gather, (5,)))
    submit(coordinator, 0, request("g", gather, (3,)))
    ((_, response),) = coordinator.responses()
    assert response.payloads == ((3,), (5,))
    submit(coordinator, 0, request("s", payload=b"1234"))
    submit(coordinator, 1, request("s"))
    ((_, response),) = coordinator.responses()
    assert response.payloads == () and not response.error


# ------------------------------------------------------------------------------------ fusion
def names(responses: list[tuple[tuple[int, ...], Response]]) -> list[tuple[str, ...]]:
    return [response.names for _, response in responses]


def test_fusion_keeps_to_the_threshold() -> None:
    requests = [request(name) for name in "abcde"]  # 16 bytes each
    assert names(agreed(Coordinator(2, 32), *requests)) == [("a", "b"), ("c", "d"), ("e",)]
    assert names(agreed(Coordinator(2, 0), *requests)) == [(name,) for name in "abcde"]
    assert names(agreed(Coordinator(2, 10**6), *requests)) == [tuple("abcde")]


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
    fused = names(agreed(Coordinator(2, 10**6), *requests))
    assert ("a", "c") in fused and not any({"a", "b"} <= set(group) for group in fused)


def test_what_has_a_payload_is_not_fused() -> None:
    requests = [request("a"), request("b", payload=b"1"), request("c")]
    assert names(agreed(Coordinator(2, 10**6), *requests)) == [("a", "c"), ("b",)]


# ------------------------------------------------------------------------------------ disagreement
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (SUM._replace(kind="broadcast"), "mismatched operations: allreduce on rank 0; broadcast on rank 1"),
        (SUM._replace(dtypes=("int32",)), "mismatched allreduce data types: float32 on rank 0; int32 on rank 1"),
        (SUM._replace(shapes=((5,),)), "mismatched allreduce tensor shapes: (4) on rank 0; (5) on rank 1"),
        (SUM._replace(op="min"), "mismatched allreduce reduction operations: sum on rank 0; min on rank 1"),
        (SUM._replace(root=1), "mismatched allreduce root ranks: -1 on rank 0; 1 on rank 1"),
        (SUM._replace(prescale=0.5), "mismatched allreduce prescale factors: 1.0 on rank 0; 0.5 on rank 1"),
        (SUM._replace(postscale=0.5), "mismatched allreduce postscale factors: 1.0 on rank 0; 0.5 on rank 1"),
        (SUM._replace(device="cuda"), "mismatched allreduce devices: cpu on rank 0; cuda on rank 1"),
    ],
)
def test_ranks_that_do_not_agree_get_the_difference(other: Signature, message: str) -> None:
    coordinator = Coordinator(2, 0)
    submit(coordinator, 0, request("a"))
    submit(coordinator, 1, request("a", other))
    ((ranks, response),) = coordinator.responses()
    assert ranks == (0, 1) and response.names == ("a",) and response.error == f"a: {message}"
    assert names(agreed(coordinator, request("a"))) == [("a",)]  # the name is free again


def test_an_operation_without_a_name_is_described_by_its_kind() -> None:
    coordinator = Coordinator(2, 0)
    submit(coordinator, 0, request("noname.0.1"))
    submit(coordinator, 1, request("noname.0.1", SUM._replace(op="min")))
    ((_, response),) = coordinator.responses()
    assert response.error.startswith("allreduce without a name (noname.0.1): mismatched")


# ------------------------------------------------------------------------------------ process sets
def add_set(coordinator: Coordinator, *ranks: int) -> int:
    ((_, response),) = agreed(coordinator, request("noname.0.0", Signature("add_process_set", ranks=ranks)))
    assert not response.error
    return response.number


def test_process_sets_have_operations_of_their_own() -> None:
    coordinator = Coordinator(3, 0)
    number = add_set(coordinator, 0, 2)
    assert number == 1 and add_set(coordinator, 1, 2) == 2
    submit(coordinator, 0, request("a", set_id=1))
    submit(coordinator, 1, request("a"))
    submit(coordinator, 2, request("a", set_id=1))
    assert coordinator.responses() == [((0, 2), Response(1, ("a",), (SUM,)))]


def test_a_removed_set_refuses_and_its_number_is_not_used_again() -> None:
    coordinator = Coordinator(2, 0)
    number = add_set(coordinator, 0, 1)
    agreed(coordinator, request("noname.0.1", Signature("remove_process_set", root=number)))
    submit(coordinator, 1, request("a", set_id=number))
    ((ranks, response),) = coordinator.responses()
    assert ranks == (1,) and response.error == f"a: process set {number} has been removed"
    assert add_set(coordinator, 0, 1) == number + 1


def test_ranks_that_ask_for_different_sets_get_an_error() -> None:
    coordinator = Coordinator(2, 0)
    for rank in (0, 1):
        submit(coordinator, rank, request("noname.0.0", Signature("add_process_set", ranks=(rank,))))
    ((_, response),) = coordinator.responses()
    assert "mismatched add_process_set process sets: [0] on rank 0; [1] on rank 1" in response.error
    assert coordinator.sets == {0: (0, 1)}


# ------------------------------------------------------------------------------------ join
def test_a_joined_rank_takes_part_in_allreduce_alone() -> None:
    coordinator = Coordinator(3, 10**6)
    submit(coordinator, 0, request("before"), request("gather", Signature("allgather", ("int64",), ((-1,),)), (1,)))
    submit(coordinator, 1, request("before"), request("gather", Signature("allgather", ("int64",), ((-1,),)), (1,)))
    coordinator.join(2)
    responses = coordinator.responses()
    assert [(ranks, response.names, response.error) for ranks, response in responses] == [
        (
            (0, 1),
            ("gather",),
            "gather: allgather is not supported while ranks 2 have joined (with sparse gradients: "
            "sparse_as_dense=True)",
        ),
        ((0, 1, 2), ("before",), ""),
    ]
    other = SUM._replace(shapes=((2,),))
    for rank in (0, 1):
        submit(coordinator, rank, request("a"), request("b", other))
    ((_, response),) = coordinator.responses()
    assert response.signatures == (SUM, other)  # the joined rank knows none of them


def test_payloads_of_a_joined_rank_are_missing() -> None:
    coordinator = Coordinator(2, 0)
    coordinator.join(1)
    submit(coordinator, 0, request("a", payload=b"1234"))
    ((ranks, response),) = coordinator.responses()
    assert ranks == (0, 1) and response.payloads == (b"1234",)


def test_the_last_rank_to_join_ends_the_join() -> None:
    coordinator = Coordinator(3, 0)
    for rank in (1, 2):
        coordinator.join(rank)
        assert coordinator.responses() == []
    coordinator.join(0)
    assert coordinator.responses() == [((0, 1, 2), Response(0, (), (), number=0))]
    assert coordinator.joined == []
    assert names(agreed(coordinator, request("a"))) == [("a",)]


def test_a_join_outside_a_set_changes_nothing_in_it() -> None:
    coordinator = Coordinator(3, 0)
    number = add_set(coordinator, 0, 1)
    coordinator.join(2)
    submit(coordinator, 0, request("a", set_id=number))
    assert coordinator.responses() == []
    submit(coordinator, 1, request("a", set_id=number))
    assert names(coordinator.responses()) == [("a",)]


# ------------------------------------------------------------------------------------ loss and stalls
def test_a_lost_rank_fails_what_waits_and_what_comes() -> None:
    coordinator = Coordinator(3, 0)
    submit(coordinator, 0, request("a"))
    submit(coordinator, 1, request("b"))
    coordinator.rank_lost(2, "is gone")
    coordinator.rank_lost(1, "has shut down")  # the first loss is the reason
    submit(coordinator, 0, request("c"))
    failed = {(ranks, response.error) for ranks, response in coordinator.responses()}
    assert failed == {((0,), "a: rank 2 is gone"), ((1,), "b: rank 2 is gone"), ((0,), "c: rank 2 is gone")}


def test_stalled_operations_name_ranks() -> None:
    coordinator = Coordinator(3, 0)
    submit(coordinator, 2, request("a"), now=10.0)
    submit(coordinator, 0, request("a"), now=15.0)
    assert coordinator.stalled(12.0, 5.0) == []
    assert coordinator.stalled(16.0, 5.0) == [("a", 6.0, [0, 2], [1])]
    coordinator.fail_all("enough")
    assert {(ranks, response.error) for ranks, response in coordinator.responses()} == {((2, 0), "a: enough")}
    assert coordinator.stalled(100.0, 0.0) == []


def test_many_ranks_are_listed_shortly() -> None:
    assert format_ranks([3, 4]) == "3, 4"
    assert format_ranks(range(20)) == "0, 1, 2, 3, 4, 5, 6, 7, ... (20 in all)"


# ------------------------------------------------------------------------------------ races
KINDS = [SUM, SUM._replace(op="max"), Signature("broadcast", ("int64",), ((2,),), root=0), Signature("barrier")]


@settings(deadline=None, max_examples=300)
@given(seed=st.integers(0, 10**9), size=st.integers(1, 5), operations=st.integers(1, 12), fusion=st.integers(0, 100))
def test_all_ranks_execute_the_same_in_the_same_order(seed: int, size: int, operations: int, fusion: int) -> None:
    """Whatever the order in which each rank submits, and in which the coordinator receives it."""
    draw = random.Random(seed)
    plan = {f"op{i}": draw.choice(KINDS) for i in range(operations)}
    wrong = draw.choice([None, *plan])  # one rank has another signature for it
    queues = []
    for rank in range(size):
        requests = [request(name, signature) for name, signature in plan.items()]
        if wrong is not None and rank == size - 1:
            requests = [request(name, s._replace(device="cuda") if name == wrong else s) for _, name, s, _ in requests]
        draw.shuffle(requests)
        queues.append(requests)
    coordinator = Coordinator(size, fusion)
    received: list[list[Response]] = [[] for _ in range(size)]
    while any(queues):
        rank = draw.choice([rank for rank in range(size) if queues[rank]])
        batch = [queues[rank].pop(0) for _ in range(draw.randint(1, len(queues[rank])))]
        submit(coordinator, rank, *batch)
        if draw.random() < 0.5 or not any(queues):
            for ranks, response in coordinator.responses():
                for each in ranks:
                    received[each].append(response)
    assert all(each == received[0] for each in received)
    done = [name for response in received[0] for name in response.names]
    assert sorted(done) == sorted(plan)
    failed = {name for response in received[0] if response.error for name in response.names}
    assert failed == ({wrong} if wrong is not None and size > 1 else set())


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 10**9), size=st.integers(2, 5))
def test_joins_at_any_time_leave_nobody_waiting(seed: int, size: int) -> None:
    """Each rank makes some of the allreduces, in one order, and joins; all that were submitted are executed by all
    ranks.
    """
    draw = random.Random(seed)
    steps = [draw.randint(0, 6) for _ in range(size)]
    queues: list[list[Request | None]] = [[*(request(f"step{i}") for i in range(n)), None] for n in steps]
    coordinator = Coordinator(size, 0)
    received: list[list[tuple[str, ...]]] = [[] for _ in range(size)]
    last = -1
    while any(queues):
        rank = draw.choice([rank for rank in range(size) if queues[rank]])
        item = queues[rank].pop(0)
        if item is None:
            coordinator.join(rank)
            last = rank
        else:
            submit(coordinator, rank, item)
        for ranks, response in coordinator.responses():
            assert ranks == tuple(range(size)) and not response.error
            for each in ranks:
                received[each].append(response.names)
            if not response.names:
                assert response.number == last
    expected = [(f"step{i}",) for i in range(max(steps))]
    assert all(sorted(each) == sorted([*expected, ()]) for each in received)
