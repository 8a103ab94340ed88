"""Trains a model that is sharded (FSDP2), or a plain one, from and to a checkpoint, and prints a sum of its state.

python tests/programs/sharded.py save|load|plain DIRECTORY
"""

import shutil
import socket
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import unidist


def make(seed: int, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 7))
    if sharded:
        mesh = init_device_mesh("cpu", (unidist.world_size(),))
        for part in (model[0], model):
            fully_shard(part, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 * seed)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 24).view(4, 6)).square().sum().backward()
    optimizer.step()


def digits(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    whole = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]
    return " ".join(f"{tensor.detach().double().abs().sum().item():.4f}" for tensor in whole)


def main() -> None:
    how, directory = sys.argv[1:]
    unidist.init("gloo" if how != "plain" else "single")
    model, optimizer = make(1 if how == "save" else 2, how != "plain")
    if how == "save":
        step(model, optimizer)
        if unidist.is_main():  # as a process that was killed leaves it
            killed = Path(directory, f".run-1.{socket.gethostname()}.0123.unfinished")
            killed.mkdir()
            (killed / "__0_0.distcp").write_bytes(b"part")
        for number in (1, 2, 3, 3):  # the last one is written over
            run = {"model": model, "optimizer": optimizer, "done": {"steps": [number]}}
            unidist.save_checkpoint(f"{directory}/run-{number}", keep_last=2, **run)
        incomplete = Path(directory, "incomplete")
        if unidist.is_main():
            shutil.copytree(Path(directory, "run-3"), incomplete)
            next(incomplete.glob("__1_*.distcp")).unlink()
        unidist.barrier()
        try:
            unidist.load_checkpoint(incomplete, model=model)
        except unidist.CheckpointError as error:
            assert "__1_0.distcp" in str(error), error
        else:
            raise AssertionError("a shard is missing")
        unidist.barrier()
        if unidist.is_main():
            shutil.rmtree(incomplete)
        for options in ({"wait": False}, {"group": unidist.new_group(range(unidist.world_size()))}):
            try:
                unidist.save_checkpoint(f"{directory}/run-4", model=model, **options)
            except ValueError as error:
                assert "is saved by all ranks" in str(error)
            else:
                raise AssertionError(options)
    else:
        latest = unidist.latest_checkpoint(directory, "run-*")
        assert latest is not None
        assert unidist.load_checkpoint(latest, model=model, optimizer=optimizer) == {"done": {"steps": [3]}}
        assert unidist.load_checkpoint(latest, model=model) == {"done": {"steps": [3]}}
        before = digits(model, optimizer)
        other = nn.Sequential(nn.Linear(6, 11))
        try:
            unidist.load_checkpoint(latest, optimizer=optimizer, model=other)
        except unidist.CheckpointError as error:
            assert "model/0.weight of the checkpoint has shape [10, 6], and this one has [11, 6]" in str(error)
        assert digits(model, optimizer) == before
    step(model, optimizer)
    found = digits(model, optimizer)
    if unidist.is_main():
        print("STATE", found)
    unidist.shutdown()


if __name__ == "__main__":
    main()
