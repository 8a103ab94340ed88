"""The world itself."""

import pytest
import torch

import unidist
from tests.support.frames import documented, frames
from unidist.context import current


def test_place() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    assert 0 <= rank < size and unidist.is_initialized()
    assert unidist.all_gather_object(rank) == list(range(size))
    assert (unidist.local_rank(), unidist.local_size()) == (rank, size)
    assert (unidist.node_rank(), unidist.num_nodes()) == (0, 1)
    assert unidist.is_main() == (rank == 0)
    assert unidist.device().type == ("cuda" if unidist.backend_name() == "nccl" else "cpu")


def test_barrier() -> None:
    unidist.barrier()


def test_second_init_is_a_no_op_unless_it_asks_for_something_else() -> None:
    backend = unidist.backend_name()
    unidist.init()
    unidist.init(backend, seed=3)
    with pytest.raises(unidist.BackendError, match="came after init"):
        unidist.init("gloo" if backend != "gloo" else "horovod")
    with pytest.raises(unidist.BackendError, match="timeout"):
        unidist.init(timeout=17)
    with pytest.raises(unidist.BackendError, match="device"):
        unidist.init(device="meta")
    assert unidist.backend_name() == backend


def test_shutdown_then_init() -> None:
    backend = unidist.backend_name()
    for _ in range(2):
        unidist.shutdown()
        assert not unidist.is_initialized()
        assert issubclass(unidist.NotInitializedError, ValueError)
        with pytest.raises(unidist.NotInitializedError, match=r"unidist\.init"):
            unidist.all_reduce(torch.ones(1))
        unidist.init(backend, timeout=60)
        assert unidist.all_reduce(torch.ones(1)).item() == unidist.world_size()
        group = unidist.new_group([unidist.world_size() - 1])
        if unidist.rank() in group.ranks:
            assert unidist.all_reduce(torch.ones(1), group=group).item() == 1


def test_set_seed() -> None:
    unidist.set_seed(5)
    first = torch.rand(2)
    unidist.set_seed(5)
    assert torch.equal(first, torch.rand(2))
    assert torch.equal(unidist.broadcast(first), first)
    with pytest.raises(ValueError, match="set_seed"):
        unidist.set_seed(-1)
    with pytest.raises(TypeError, match=r"set_seed\(1.5\): pass an integer"):
        unidist.set_seed(1.5)  # type: ignore[arg-type]


def test_allreduce_metric_calls_the_backend_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames that docs/architecture.md lists."""
    backend, seen = current(), []
    call = backend.all_reduce
    monkeypatch.setattr(backend, "calls", {None: 1000})  # else calls are compared first
    monkeypatch.setattr(backend, "all_reduce", lambda *args: [seen.append(frames()), call(*args)][1])
    unidist.allreduce_metric(1.0)
    assert seen == [documented("`unidist.allreduce_metric(x)`")]
