"""Running figures, combined when they are asked for."""

import copy
import math
import warnings
from typing import Any

import numpy
import pytest
import torch

import unidist


def test_mean_is_that_of_all_values() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    meter = unidist.Mean()
    for step in range(rank + 1):  # another number on each rank
        meter.update(float(step), weight=step + 1)
        meter.update(torch.tensor([1.0, 2.0], requires_grad=True))
    pairs = [(float(step), step + 1) for r in range(size) for step in range(r + 1)]
    pairs += [(value, 1) for r in range(size) for _ in range(r + 1) for value in (1.0, 2.0)]
    expected = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
    assert meter.compute() == pytest.approx(expected) == meter.compute()
    meter.reset()
    assert math.isnan(meter.compute())


def test_half_precision_and_integers_add_up_in_float64() -> None:
    for values in (torch.full((200,), 1000.0, dtype=torch.half), torch.full((3,), 2**25 + 1, dtype=torch.int32)):
        mean, total = unidist.Mean(), unidist.Sum()
        mean.update(values), total.update(values)
        assert (
            mean.compute() == values[0].item()
            and total.compute() == values[0].item() * len(values) * unidist.world_size()
        )


def test_sum_and_empty_ranks() -> None:
    meter, mean = unidist.Sum(), unidist.Mean()
    assert meter.compute() == 0.0
    if unidist.rank() == unidist.world_size() - 1:
        meter.update(torch.tensor([1, 2])), meter.update(0.5)
        mean.update(3.0)
    assert meter.compute() == 3.5 and mean.compute() == 3.0


def test_arrays_and_lists() -> None:
    mean, total, accuracy = unidist.Mean(), unidist.Sum(), unidist.Accuracy()
    mean.update([1.0, 2.0], numpy.array([1, 3]))
    mean.update(numpy.float32(1.75), 4)
    exact = unidist.Mean()
    exact.update(torch.tensor(1.0), 2.0**24 + 1)
    exact.update([0.0])
    assert exact.compute() == (2.0**24 + 1) / (2.0**24 + 2)
    total.update(numpy.ones(3, dtype=numpy.float32))
    total.update(numpy.float64(2.0))
    accuracy.update([1, 0, 2], numpy.array([1, 1, 2]))
    assert mean.compute() == 1.75 and total.compute() == 5 * unidist.world_size() and accuracy.compute() == 2 / 3
    for call in (mean.update, total.update):
        with pytest.raises(TypeError, match=r"update takes tensors and numbers, not NoneType"):
            call(None)  # type: ignore[arg-type]


def test_nan_shows_unless_its_weight_is_0() -> None:
    last = unidist.rank() == unidist.world_size() - 1
    hidden, shown = unidist.Mean(), unidist.Mean()
    for meter in (hidden, shown):
        meter.update(1.0)
    hidden.update(math.nan if last else 1.0, weight=0)
    hidden.update(torch.tensor([math.nan, 1.0]), weight=torch.tensor([0, 1]))
    shown.update(math.nan if last else 1.0)
    assert hidden.compute() == 1.0 and math.isnan(shown.compute())


def test_accuracy() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    scores = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.1, 0.4], [0.2, 0.3, 0.5]])
    targets = torch.tensor([1, 2, -100])
    top1, top2, classes = (
        unidist.Accuracy(ignore_index=-100),
        unidist.Accuracy(top_k=2, ignore_index=-100),
        unidist.Accuracy(),
    )
    for _ in range(rank):
        top1.update(scores, targets), top2.update(scores, targets)
        classes.update(scores.argmax(1), targets)
    if size > 1:
        assert (top1.compute(), top2.compute(), classes.compute()) == pytest.approx((0.5, 1.0, 1 / 3))
    else:
        assert math.isnan(top1.compute())
    pixels = unidist.Accuracy()
    pixels.update(torch.eye(3).view(1, 3, 3, 1), torch.tensor([[[0], [1], [0]]]))
    assert pixels.compute() == pytest.approx(2 / 3)
    floats, one_hot = torch.rand(3), torch.eye(3)
    for output, target in (
        (scores, targets[:2]),
        (floats, targets),
        (floats[:, None], targets),
        (floats > 0.5, floats),
        (scores, one_hot),
    ):
        with pytest.raises(ValueError, match=r"2 classes or more .* not torch\..* with "):
            top1.update(output, target)
    with pytest.raises(ValueError, match="top_k=0"):
        unidist.Accuracy(top_k=0)


def test_one_collective_however_many_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    from unidist.context import current

    calls = []
    original = current().all_reduce
    monkeypatch.setattr(current(), "calls", {None: 1000})  # else calls are compared first
    monkeypatch.setattr(current(), "all_reduce", lambda *args: (calls.append(1), original(*args)))
    meter = unidist.Mean()
    for value in range(5):
        meter.update(torch.tensor(float(value)))
    assert not calls
    meter.compute()
    assert len(calls) == 1


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each rank's batches; rank 0 has none."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.rand(4 + rank, generator=generator), torch.randint(0, 2, (4 + rank,), generator=generator))
        for rank in range(unidist.world_size())
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torchmetrics', of compute before update
def test_torchmetrics_compute_over_all_ranks() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    rank, size = unidist.rank(), unidist.world_size()

    def make() -> dict[str, Any]:
        return {
            "mean": torchmetrics.MeanMetric(),
            "max": torchmetrics.MaxMetric(),
            "cat": torchmetrics.CatMetric(),
            "auroc": torchmetrics.AUROC(task="binary"),
            "both": torchmetrics.MetricCollection(
                [torchmetrics.Accuracy(task="binary"), torchmetrics.F1Score(task="binary")]
            ),
            "running": torchmetrics.MinMaxMetric(torchmetrics.Accuracy(task="binary")),
        }

    ours, alone = {name: unidist.wrap_metric(metric) for name, metric in make().items()}, make()
    for metric in alone.values():
        unidist.wrap_metric(metric)
        for part in (metric, *metric.modules()):
            part.distributed_available_fn = lambda: False
    for owner, (scores, targets) in enumerate(samples()):
        for metrics in (ours, alone) if owner == rank else (alone,):
            for name, metric in metrics.items():
                if size > 1 and owner == 0:
                    continue
                metric.update(*((scores, targets) if name in ("auroc", "both", "running") else (scores,)))
    for name, metric in ours.items():
        torch.testing.assert_close(metric.compute(), alone[name].compute(), msg=name)
    with pytest.raises(TypeError, match="not Mean"):
        unidist.wrap_metric(unidist.Mean())


def test_metrics_of_a_group() -> None:
    """Also those that are copied."""
    torchmetrics = pytest.importorskip("torchmetrics")
    rank, size = unidist.rank(), unidist.world_size()
    groups = [unidist.new_group(range(first, size, 2)) for first in range(min(2, size))]
    group = groups[rank % 2]
    theirs = unidist.wrap_metric(
        torchmetrics.MetricCollection([torchmetrics.SumMetric(), torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())]),
        group,
    )
    for ours, metric in ((unidist.Sum(group), theirs), copy.deepcopy((unidist.Sum(group), theirs))):
        ours.update(rank)
        metric.update(torch.tensor(float(rank)))
        found = metric.compute()
        assert ours.compute() == found["SumMetric"] == sum(group.ranks)
        assert found["raw"] == sum(group.ranks) / group.size()


def test_metrics_with_lists_of_different_lengths() -> None:
    """Ranks that have updated more or less often, or never; lists that torchmetrics does not join, and integers."""
    torchmetrics = pytest.importorskip("torchmetrics")
    rank, size = unidist.rank(), unidist.world_size()
    made = [
        (torchmetrics.retrieval.RetrievalMRR(), torchmetrics.AUROC(task="binary"), torchmetrics.CatMetric())
        for _ in range(2)
    ]
    ours, alone = [unidist.wrap_metric(metric) for metric in made[0]], made[1]
    for metric in alone:
        metric.distributed_available_fn = lambda: False
    for owner in range(size):
        for number in range(1 + owner if owner < size - 1 or size == 1 else 0):
            draw = torch.Generator().manual_seed(10 * owner + number)
            scores = torch.rand(4, generator=draw)
            targets = torch.tensor([0, 1, 1, number % 2])
            for metrics in (ours, alone) if owner == rank else (alone,):
                metrics[0].update(scores, targets, indexes=torch.full((4,), 10 * owner + number))
                metrics[1].update(scores, targets)
                metrics[2].update(scores)
    for mine, metric in zip(ours, alone):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The ``compute`` method of metric")  # before any update, here
            torch.testing.assert_close(mine.compute(), metric.compute())


def test_weights_fit_the_values() -> None:
    mean = unidist.Mean()
    mean.update(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [3.0]]))
    mean.update(torch.ones(2, 3), 2)
    assert mean.compute() == pytest.approx((7 + 12) / (4 + 12))
    with pytest.raises(ValueError, match=r"weights of shape \(3,\) do not fit values of shape \(3, 1\)"):
        mean.update(torch.ones(3, 1), torch.ones(3))
