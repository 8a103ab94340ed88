"""What type checkers see of the public calls; ``# type: ignore`` marks what they must refuse."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, assert_type

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import unidist


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def features(self) -> int:
        return self.layer.in_features


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index))


def double(x: int) -> int:
    return 2 * x


def batches(loader: unidist.ShardLoader[Tensor]) -> Iterator[Tensor]:
    yield from loader


def main() -> None:
    unidist.init("gloo", timeout=30, seed=1)
    unidist.init("glo")  # type: ignore[arg-type]
    assert_type(unidist.rank(), int)
    unidist.wrap_modl(Net())  # type: ignore[attr-defined]
    unidist.elastic.TorchStat()  # type: ignore[attr-defined]
    assert_type(unidist.elastic.TorchState(), unidist.elastic.TorchState)
    model = unidist.wrap_model(Net())
    assert_type(model, unidist.WrappedModel[Net])
    assert_type(model.module.features(), int)
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    assert_type(unidist.unwrap(model), Net)
    assert_type(unidist.unwrap(Net()), Net)
    model.module.nothing()  # type: ignore[operator]
    loader = unidist.shard_loader(DataLoader(Numbers(), batch_size=2))
    for batch in batches(loader):
        assert_type(batch, Tensor)
    for images, labels in unidist.shard_loader(DataLoader(TensorDataset(torch.ones(4, 2), torch.ones(4)))):
        assert_type(images, Tensor)
        assert_type(labels, Tensor)
    assert_type(loader.epoch, int)
    bar = unidist.progress(loader, desc="train")
    for batch in bar:
        assert_type(batch, Tensor)
        bar.set_postfix(loss=1.0)
    assert_type(unidist.spawn(double, 2, (3,)), list[int])
    unidist.wrap_model(Net(), compression="int8")  # type: ignore[arg-type]


if TYPE_CHECKING:  # it is read, not run
    main()
