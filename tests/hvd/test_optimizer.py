import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hvd.api import REAL, hvd

alone = pytest.mark.skipif("hvd.size() == 1", reason="one rank has no other")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))  # type: ignore[no-any-return]


def net() -> Net:
    torch.manual_seed(7)
    return Net()


def batch(rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 4, generator=draw), torch.randint(0, 3, (5,), generator=draw)


def loss_of(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    x, y = batch(rank, step)
    return F.cross_entropy(model(x), y)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, **options)


def reference(
    size: int, steps: int, factor: float = 1.0, clip: float | None = None, passes: int = 1, frozen_from: int = -1
) -> Net:
    """Trained by one process on all ranks' batches."""
    model = net()
    optimizer = sgd(model)
    for step in range(steps):
        if step == frozen_from:
            model.a.requires_grad_(False)
        optimizer.zero_grad()
        for part in range(passes):
            for rank in range(size):
                (loss_of(model, rank, step * passes + part) * factor / size).backward()
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def assert_same(model: nn.Module, other: nn.Module, atol: float = 1e-5) -> None:
    for (name, a), b in zip(model.named_parameters(), other.parameters()):
        assert torch.allclose(a, b, atol=atol), name


def distributed(model: nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(), **options)


@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("named", [True, False])
def test_steps_are_those_of_one_process(op: str, named: bool, rank: int, size: int) -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(
        sgd(model), named_parameters=model.named_parameters() if named else None, op=getattr(hvd, op)
    )
    assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    assert_same(model, reference(size, 4, size if op == "Sum" else 1))


def test_predivided(rank: int, size: int) -> None:
    model = net()
    optimizer = distributed(model, gradient_predivide_factor=2.0)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    assert_same(model, reference(size, 3))


def test_fp16_compression(rank: int, size: int) -> None:
    model = net()
    optimizer = distributed(model, compression=hvd.Compression.fp16)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    assert_same(model, reference(size, 3), atol=2e-2)
    assert all(param.dtype == torch.float32 for param in model.parameters())


def test_small_numbers_survive_fp16(rank: int, size: int) -> None:
    """They are divided after the sum, not before."""
    values = [1e-7, 3e-7, 1e-6]
    for dtype, compression in ((torch.float32, hvd.Compression.fp16), (torch.float16, hvd.Compression.none)):
        param = nn.Parameter(torch.zeros(3, dtype=dtype))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], 1.0), [("small", param)], compression)
        (param * torch.tensor(values, dtype=dtype)).sum().backward()
        optimizer.step()
        assert torch.allclose(param.double(), -torch.tensor(values).double(), rtol=0, atol=4e-8), param


def test_a_compressor_of_the_users_own(rank: int, size: int) -> None:
    class Ten:
        @staticmethod
        def compress(tensor: Tensor) -> tuple[Tensor, Any]:
            return tensor * 10, "ten"

        @staticmethod
        def decompress(tensor: Tensor, ctx: Any) -> Tensor:
            assert ctx == "ten"
            return tensor / 10

    model = net()
    optimizer = distributed(model, compression=Ten)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    assert_same(model, reference(size, 2))


@alone
@pytest.mark.parametrize("predivide", [1.0, 2.0])
def test_factors_are_of_what_a_compressor_makes(predivide: float, rank: int, size: int) -> None:
    class Signs:
        """An object, as compressors with options are."""

        def compress(self, tensor: Tensor) -> tuple[Tensor, None]:
            return torch.sign(tensor), None

        def decompress(self, tensor: Tensor, ctx: None) -> Tensor:
            return tensor.clamp(-0.5, 0.5)

    param = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([param], 1.0), [("p", param)], Signs(), gradient_predivide_factor=predivide
    )
    (param * torch.tensor([1.5, -0.4])).sum().backward()
    optimizer.step()
    assert torch.allclose(param, torch.tensor([-0.5, 0.5]))


@pytest.mark.parametrize("in_one_tensor", [False, True])
def test_gradients_that_the_script_keeps_are_reduced(in_one_tensor: bool, rank: int, size: int) -> None:
    model = net()
    model.unused.requires_grad_(False)
    optimizer = distributed(model)
    params = [param for param in model.parameters() if param.requires_grad]
    whole = torch.zeros(sum(param.numel() for param in params))
    for step in range(3):
        if not in_one_tensor:
            model.zero_grad()
        elif step == 0:
            for param, part in zip(params, whole.split([param.numel() for param in params])):
                param.grad = part.view_as(param)
        else:
            whole.zero_()
        loss_of(model, rank, step).backward()
        kept = [param.grad for param in params]
        optimizer.synchronize()
        for param, grad in zip(params, kept):
            assert grad is not None and param.grad is grad
            grad.mul_(0.25)
        assert not in_one_tensor or torch.equal(whole, torch.cat([grad.reshape(-1) for grad in kept]))  # type: ignore[union-attr]
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_same(model, reference(size, 3, 0.25))


def test_gradients_of_any_size_in_a_tensor_of_the_scripts(rank: int, size: int) -> None:
    params = [nn.Parameter(torch.zeros(n)) for n in (400_000, 1_500_000, 3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, 1.0), [(f"p{i}", p) for i, p in enumerate(params)])
    whole = torch.zeros(sum(param.numel() for param in params))
    for param, part in zip(params, whole.split([param.numel() for param in params])):
        param.grad = part.view_as(param)
    for step in range(3):
        whole.zero_()
        sum((param * (rank + 1.0 + step)).sum() for param in params).backward()  # type: ignore[union-attr]
        optimizer.synchronize()
        assert torch.allclose(whole, torch.tensor((size + 1) / 2 + step))
        with optimizer.skip_synchronize():
            optimizer.step()
    assert all(torch.allclose(param, torch.tensor(-3 * (size + 1) / 2 - 3)) for param in params)


def test_an_operation_that_goes_on_beside_a_step(rank: int, size: int) -> None:
    model = net()
    optimizer = distributed(model)
    for step in range(3):
        optimizer.zero_grad()
        handle = hvd.allreduce_async(torch.tensor([float(rank)]), name="beside", op=hvd.Sum)
        loss_of(model, rank, step).backward()
        optimizer.step()
        assert hvd.synchronize(handle).item() == sum(range(size))
    assert_same(model, reference(size, 3))


def test_a_model_of_another_dtype_after_the_first_steps(rank: int, size: int) -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for step in range(4):
        if step == 2:
            model.double()
        optimizer.zero_grad()
        x, y = batch(rank, step)
        F.cross_entropy(model(x.to(model.a.weight.dtype)), y).backward()
        optimizer.step()
        means = hvd.allreduce(model.a.weight.grad.clone(), name="means")
        assert model.a.weight.grad.dtype == model.a.weight.dtype and torch.allclose(means, model.a.weight.grad)


@alone
def test_unused_parameters_become_zero_gradients(rank: int, size: int) -> None:
    model = net()
    optimizer = distributed(model)
    loss_of(model, rank).backward()
    optimizer.synchronize()
    assert model.unused.weight.grad is not None and not model.unused.weight.grad.any()
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()
    # Used on one rank only.
    loss = loss_of(model, rank) + (model.unused(torch.ones(1, 2)).sum() if rank == 0 else 0.0)
    loss.backward()
    optimizer.synchronize()
    assert torch.allclose(model.unused.bias.grad, torch.full((2,), 1.0 / size))
    with optimizer.skip_synchronize():
        optimizer.step()


@alone
def test_parameters_that_are_frozen_later_go_on_by_their_momentum(rank: int, size: int) -> None:
    """They get gradients of zeros, as if they were not used."""
    model = net()
    optimizer = distributed(model)
    for step in range(4):
        if step == 2:
            model.a.requires_grad_(False)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.synchronize()
        assert all(param.grad is not None for param in model.parameters())
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_same(model, reference(size, 4, frozen_from=2))


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.filterwarnings("ignore:optimizer.step:UserWarning")
def test_clipping_after_synchronize(skip: bool, rank: int, size: int) -> None:
    model = net()
    optimizer = distributed(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if skip:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:  # reduced twice, which changes nothing but the time
            optimizer.step()
    assert_same(model, reference(size, 3, clip=0.1))


def test_step_after_synchronize_warns(rank: int, size: int) -> None:
    model = net()
    optimizer = distributed(model)
    loss_of(model, rank).backward()
    optimizer.synchronize()
    sentence = (
        r"optimizer\.step\(\) called without optimizer\.skip_synchronize\(\) context after optimizer\.synchronize\(\)"
    )
    with pytest.warns(UserWarning, match=sentence):
        optimizer.step()


def test_accumulation(rank: int, size: int) -> None:
    model = net()
    optimizer = distributed(model, backward_passes_per_step=2)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            loss_of(model, rank, 2 * step + part).backward()
        optimizer.step()
    assert_same(model, reference(size, 3, passes=2))
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    loss_of(model, rank).backward()
    optimizer.step()
    # Before all passes are there, step() takes what is.
    optimizer.set_backward_passes_per_step(3)
    optimizer.zero_grad()
    loss_of(model, rank).backward()
    optimizer.step()
    gathered = hvd.allgather(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).unsqueeze(0))
    assert torch.equal(gathered, gathered[:1].expand_as(gathered))


@alone
def test_errors(rank: int, size: int) -> None:
    model = net()
    optimizer = distributed(model)
    loss_of(model, rank).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        loss_of(model, rank).backward()
    optimizer.synchronize()
    pairs = list(model.named_parameters())
    for bad, text in (
        ({"named_parameters": list(model.parameters())}, "tuples"),
        ({"named_parameters": [("same", p) for p in model.parameters()]}, "same"),
        ({"named_parameters": pairs[1:]}, "not named"),
        ({"backward_passes_per_step": 0}, "> 0"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "predivide"),
        ({"groups": [[1]]}, "Tensor"),
        ({"groups": [[pairs[0][1]], [pairs[0][1]]]}, "once"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(sgd(model), **bad)


def test_wrapping_twice_is_refused(rank: int, size: int) -> None:
    model = net()
    with pytest.raises(TypeError, match=r"required positional arguments|DistributedOptimizer already"):
        hvd.DistributedOptimizer(distributed(model), named_parameters=model.named_parameters())


@pytest.mark.parametrize("groups", [2, "lists"])
def test_groups(groups: Any, rank: int, size: int) -> None:
    model = net()
    del model.unused  # Horovod waits for whole groups
    chosen = [[model.a.weight, model.b.weight], [model.a.bias]] if groups == "lists" else groups
    optimizer = distributed(model, groups=chosen)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    expected = reference(size, 3)
    del expected.unused
    assert_same(model, expected)


def test_num_groups_is_deprecated(rank: int, size: int) -> None:
    with pytest.warns(DeprecationWarning, match="num_groups"):
        distributed(net(), num_groups=2)


def test_two_optimizers_with_the_same_names(rank: int, size: int) -> None:
    models = [net(), net()]
    optimizers = [distributed(model) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    for model in models:
        assert_same(model, reference(size, 3))


def test_learning_rate_schedules_and_loading(rank: int, size: int) -> None:
    model = net()
    optimizer = distributed(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loss_of(model, rank).backward()
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    state = copy.deepcopy(optimizer.state_dict())
    twin = copy.deepcopy(model)
    again = distributed(twin)
    again.load_state_dict(state)
    assert again.param_groups[0]["lr"] == 0.25 and len(again.state_dict()["state"]) == len(state["state"])
    for net_, optimizer_ in ((model, optimizer), (twin, again)):
        optimizer_.zero_grad()
        loss_of(net_, rank, 1).backward()
        optimizer_.step()
    assert_same(model, twin)
    gathered = hvd.allgather(twin.a.weight.detach().reshape(1, -1))
    assert torch.equal(gathered, gathered[:1].expand_as(gathered))


def test_sparse_gradients(rank: int, size: int) -> None:
    for as_dense in (False, True):
        torch.manual_seed(3)
        table = nn.Embedding(10, 2, sparse=True)
        start = table.weight.detach().clone()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0),
            named_parameters=table.named_parameters(),
            sparse_as_dense=as_dense,
        )
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([rank, 9, 9])).sum().backward()
            optimizer.step()
        expected = start.clone()
        for r in range(size):
            expected[r] -= 2.0 / size
        expected[9] -= 4.0
        assert torch.allclose(table.weight, expected, atol=1e-6)


@alone
def test_uneven_steps_with_join(rank: int, size: int) -> None:
    model = net()
    optimizer = distributed(model)
    for step in range(2 + rank):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    hvd.join()
    expected = net()
    plain = sgd(expected)
    for step in range(2 + size - 1):
        plain.zero_grad()
        for r in range(size):
            if step < 2 + r:
                (loss_of(expected, r, step) / size).backward()
        for param in expected.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        plain.step()
    if rank == size - 1:
        assert_same(model, expected)


@alone
def test_a_process_set(rank: int, size: int) -> None:
    some = hvd.add_process_set([0])
    model = net()
    optimizer = distributed(model, process_set=some)
    loss_of(model, rank).backward()
    optimizer.step()
    mine = net()
    plain = sgd(mine)
    loss_of(mine, rank).backward()
    if rank == 0:
        for param in mine.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    plain.step()
    assert_same(model, mine)
    hvd.barrier()
    hvd.remove_process_set(some)


def test_grad_scaler(rank: int, size: int) -> None:
    """The dance of mixed precision: synchronize, unscale, clip, step without synchronizing."""
    model = net()
    optimizer = distributed(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    assert_same(model, reference(size, 3, clip=0.1))


def test_gradients_reduced_by_hand(rank: int, size: int) -> None:
    model = net()
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        for name, param in model.named_parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            hvd.allreduce_(param.grad, name=name)
        optimizer.step()
    assert_same(model, reference(size, 3))


def test_one_gradient_by_itself(rank: int, size: int) -> None:
    """A private method, by which ignite recognises the optimizer."""
    model = nn.Linear(2, 2)
    named = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), named, hvd.Compression.fp16, gradient_predivide_factor=2.0
    )
    model.weight.grad = torch.full((2, 2), float(rank))
    handles = [optimizer._allreduce_grad_async(parameter) for parameter in (model.weight, model.bias)]
    weight, bias = (hvd.Compression.fp16.decompress(hvd.synchronize(handle), ctx) for handle, ctx in handles)
    assert torch.equal(weight, torch.full((2, 2), (size - 1) / 2)) and torch.equal(bias, torch.zeros(2))


def test_adasum(rank: int, size: int) -> None:
    if REAL and not hvd.mpi_enabled() and size > 1:
        pytest.skip("this Horovod has no Adasum on Gloo")
    if size == 3:
        pytest.skip("Adasum takes a power of 2 of ranks")
    model = net()
    del model.unused
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters(), op=hvd.Adasum
    )
    for step in range(2):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = net()
    del expected.unused
    for step in range(2):
        changes = []
        for r in range(size):
            grads = torch.autograd.grad(loss_of(expected, r, step), list(expected.parameters()))
            changes.append([(-0.5 * grad).double() for grad in grads])
        with torch.no_grad():
            for index, param in enumerate(expected.parameters()):
                a = changes[0][index]
                if size == 2:
                    b = changes[1][index]
                    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
                    a = (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b
                param.add_(a.to(param.dtype))
    assert_same(model, expected)
    if size > 1:
        with pytest.raises(AssertionError), optimizer.skip_synchronize():
            pass


@pytest.mark.skipif(REAL, reason="Horovod forgets it")
def test_state_loaded_before_wrapping_stays(rank: int, size: int) -> None:
    model = net()
    plain = sgd(model)
    loss_of(model, 0).backward()
    plain.step()
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    assert len(optimizer.state) == 4


@pytest.mark.skipif(REAL, reason="Horovod's takes no argument")
def test_zero_grad_takes_set_to_none(rank: int, size: int) -> None:
    model = net()
    optimizer = distributed(model)
    loss_of(model, rank).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is not None and not param.grad.any() for param in model.parameters()) or size == 1
    optimizer.zero_grad(set_to_none=True)
    assert all(param.grad is None for param in model.parameters())


@alone
@pytest.mark.skipif(REAL, reason="Horovod waits for ever")
def test_models_that_differ(rank: int, size: int) -> None:
    model = nn.Linear(2 + (rank == 0), 1)
    optimizer = distributed(model)
    with pytest.raises(hvd.HorovodInternalError, match=r"rank 1 differ from those of rank 0.*weight"):
        optimizer.step()


@alone
def test_a_backward_pass_through_two_optimizers(rank: int, size: int) -> None:
    """Which gradients come first may differ between ranks."""
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    first = hvd.DistributedOptimizer(torch.optim.SGD([a], 1.0), named_parameters=[("a", a)])
    second = hvd.DistributedOptimizer(torch.optim.SGD([b], 1.0), named_parameters=[("b", b)])
    for step in range(3):
        first.zero_grad()
        second.zero_grad()
        loss = b.sum()
        if rank == 0 or step == 0:
            loss = loss + (100 * a).sum()
        loss.backward()
        first.step()
        second.step()
    assert torch.allclose(b, torch.full((3,), -3.0)) and torch.allclose(a, torch.full((3,), -100.0 - 200.0 / size))


def test_gradients_that_are_kept_stay(rank: int, size: int) -> None:
    param = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], 0.0), named_parameters=[("kept", param)])
    kept, parts = [], []
    for step in range(4):
        optimizer.zero_grad()
        (param * (step + 1.0)).sum().backward()
        optimizer.step()
        kept.append(param.grad)
        parts.append(param.grad[:1])
    assert [grad.tolist() for grad in kept] == [[step + 1.0] * 2 for step in range(4)]
    assert [part.item() for part in parts] == [1.0, 2.0, 3.0, 4.0]


def test_a_model_is_wrapped_again_when_its_optimizer_is_gone(rank: int, size: int) -> None:
    model = net()

    def train() -> None:
        optimizer = distributed(model)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()

    train()
    gc.collect()
    for param in model.parameters():
        param.grad = None
    train()


@pytest.mark.skipif(REAL, reason="Horovod refuses them")
@pytest.mark.parametrize("fused", [True, False])
def test_parameters_that_are_not_contiguous(fused: bool, rank: int, size: int) -> None:
    param = nn.Parameter(torch.zeros(2, 3).t())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], 1.0, fused=fused), named_parameters=[("w", param)])
    for _ in range(2):
        optimizer.zero_grad()
        (param * torch.arange(6.0).view(3, 2)).sum().backward()
        optimizer.step()
    assert torch.equal(param.detach(), -2 * torch.arange(6.0).view(3, 2))


@alone
@pytest.mark.skipif(REAL, reason="Horovod trains them apart in silence")
def test_parameters_that_are_not_reduced_are_named(rank: int, size: int) -> None:
    """Unfrozen, or added, after wrapping: Horovod does not reduce them either."""
    model = net()
    model.a.requires_grad_(False)
    optimizer = distributed(model)
    later = nn.Parameter(torch.zeros(2, 5))
    optimizer.add_param_group({"params": [torch.zeros(1)]})  # trains nothing
    with pytest.warns(
        UserWarning, match=r"does not reduce 1 parameters, the first of shape \(2, 5\), which were added"
    ) as seen:
        optimizer.add_param_group({"params": [later]})
    assert len(seen) == 1 and seen[0].filename == __file__
    for step in range(4):
        optimizer.zero_grad()
        (loss_of(model, rank, step) + later.sum()).backward()
        if step == 2:
            with pytest.warns(
                UserWarning, match=r"does not reduce 2 parameters, the first a\.weight, which were frozen"
            ) as seen:
                optimizer.step()
            assert len(seen) == 1 and seen[0].filename == __file__
        else:
            optimizer.step()  # a warning is an error here
        model.a.requires_grad_(step >= 1)


@alone
@pytest.mark.skipif(REAL, reason="Horovod does not run where strides differ")
def test_a_memory_format_that_changes_between_steps(rank: int, size: int) -> None:
    conv = nn.Conv2d(3, 4, 3, bias=False)
    hvd.broadcast_parameters(conv.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(conv.parameters(), 0.0), conv.named_parameters())
    kept = []
    for step in range(3):
        optimizer.zero_grad()
        (conv.weight * torch.arange(108.0).view(4, 3, 3, 3)).sum().backward()
        optimizer.step()
        kept.append(conv.weight.grad)  # so the bucket is laid out again
        assert torch.allclose(conv.weight.grad, torch.arange(108.0).view(4, 3, 3, 3)), step  # type: ignore[arg-type]
        if rank == 0:
            conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@alone
@pytest.mark.skipif(REAL, reason="Horovod's copies fail in another way")
def test_copies_say_that_they_reduce_nothing(rank: int, size: int) -> None:
    model, optimizer = copy.deepcopy((model := net(), distributed(model)))
    loss_of(model, rank).backward()
    with pytest.raises(hvd.HorovodInternalError, match="copy"):
        optimizer.step()
