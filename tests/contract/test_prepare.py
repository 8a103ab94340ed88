"""``prepare``."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unidist
from tests.contract.models import make_model
from unidist.training.model import is_wrapped


def test_prepare_is_wrap_model_and_shard_loader() -> None:
    net, teacher = make_model(), make_model().requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = TensorDataset(torch.arange(24.0).view(4, 6) + 1, torch.tensor([0, 1, 2, 0]))
    prepared = unidist.prepare(net, optimizer, teacher, nn.CrossEntropyLoss(), DataLoader(data, batch_size=4), "text")
    model, same, still, criterion, loader, text = prepared
    assert is_wrapped(model) and unidist.unwrap(model) is net and not is_wrapped(still)
    assert same is optimizer and text == "text" and isinstance(loader, unidist.ShardLoader)
    for inputs, labels in loader:
        optimizer.zero_grad()
        criterion(model(inputs), labels).backward()
        optimizer.step()
    unidist.assert_in_sync(model)


class MapStyle:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("data", [TensorDataset(torch.ones(4)), MapStyle(), [1, 2], torch.ones(4), (i for i in (1, 2))])
def test_data_that_is_in_no_loader_is_an_error(data: object) -> None:
    with pytest.raises(TypeError, match=f"prepare cannot shard this {type(data).__name__}.*optimizers, schedulers and"):
        unidist.prepare(data)


def test_one_object_is_returned_by_itself() -> None:
    loader = unidist.prepare(DataLoader(TensorDataset(torch.ones(4))))
    assert isinstance(loader, unidist.ShardLoader)
    assert unidist.unwrap(unidist.prepare(net := make_model())) is net
