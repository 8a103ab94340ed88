"""Checkpoints within one world; ``tests/test_checkpoint.py`` has those that change worlds."""

import copy
import fcntl
import gc
import os
import random
import socket
import threading
import time
from pathlib import Path
from threading import Event
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import unidist
from tests.contract.models import assert_same, make_model, my_batch, train
from unidist import context
from unidist.checkpoint import checkpoint
from unidist.checkpoint import files as checkpoint_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One folder for all ranks, which share it if they are threads."""
    return unidist.broadcast_object(tmp_path) if unidist.is_initialized() else tmp_path


def on_first(action: Any) -> Any:
    """What rank 0 finds, on every rank."""
    return unidist.broadcast_object(action() if unidist.is_main() else None)


def test_a_run_goes_on_from_its_checkpoint(folder: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any, torch.amp.GradScaler, Any]:
        model = unidist.wrap_model(make_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        return (
            model,
            optimizer,
            scheduler,
            torch.amp.GradScaler("cpu"),
            unidist.shard_loader(DataLoader(torch.arange(20.0), 2, shuffle=True)),
        )

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, scaler: Any) -> None:
        optimizer.zero_grad()
        scaler.scale(model(my_batch(0)[0] * torch.rand(())).square().sum()).backward()
        scaler.step(optimizer), scaler.update(), scheduler.step()

    torch.manual_seed(unidist.rank())
    *parts, loader = make()
    next(iter(loader))
    for _ in range(3):
        step(*parts)
    names = dict(zip(("model", "optimizer", "scheduler", "scaler", "loader"), (*parts, loader)))
    unidist.save_checkpoint(folder / "deep" / "run.pt", **names, epoch=3, note="π", best=torch.tensor([0.5]))
    drawn = torch.rand(3), random.random(), numpy.random.rand()
    step(*parts)

    torch.manual_seed(77), random.seed(77), numpy.random.seed(77)
    *others, loader_again = make()
    names = dict(zip(names, (*others, loader_again)))
    rest = unidist.load_checkpoint(folder / "deep" / "run.pt", **names)
    assert rest == {"epoch": 3, "note": "π", "best": torch.tensor([0.5])}
    assert torch.equal(torch.rand(3), drawn[0]) and random.random() == drawn[1] and numpy.random.rand() == drawn[2]
    assert loader_again.state_dict() == loader.state_dict()
    step(*others)
    # DDP lays out its buckets anew after the first step, and three numbers add up differently in another order.
    assert_same(others[0], parts[0], rtol=1e-6, atol=1e-7)
    assert others[2].get_last_lr() == parts[2].get_last_lr()

    if unidist.is_main():  # as files were written before: numbers in no tensor
        whole = torch.load(folder / "deep" / "run.pt", weights_only=True)
        for state in whole["unidist_rng"]:
            assert all(isinstance(state[name][1], torch.Tensor) for name in ("python", "numpy"))
            state["python"] = tuple(tuple(x.tolist()) if isinstance(x, torch.Tensor) else x for x in state["python"])
            state["numpy"][1] = state["numpy"][1].tolist()
        torch.save(whole, folder / "earlier.pt")
    unidist.load_checkpoint(folder / "earlier.pt")
    assert torch.equal(torch.rand(3), drawn[0]) and random.random() == drawn[1] and numpy.random.rand() == drawn[2]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch.compile imports it
def test_the_file_is_a_plain_one(folder: Path) -> None:
    model = unidist.wrap_model(torch.compile(make_model(), backend="eager"))
    unidist.save_checkpoint(folder / "model.pt", model=model)
    saved = torch.load(folder / "model.pt", weights_only=True)
    assert list(saved["model"]) == list(make_model().state_dict())
    assert on_first(lambda: os.listdir(folder)) == ["model.pt"]


def test_old_weights_for_a_new_run(folder: Path) -> None:
    unidist.save_checkpoint(folder / "old.pt", model=unidist.wrap_model(make_model()))
    model = make_model()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    unidist.load_checkpoint(folder / "old.pt", random_states=False, model=model)
    assert torch.equal(torch.rand(1), expected)


def test_a_file_that_a_script_without_unidist_saved(folder: Path) -> None:
    source = make_model()
    if unidist.is_main():
        torch.save(
            {"net": {f"module.{key}": value + 1 for key, value in source.state_dict().items()}, "epoch": 4},
            folder / "old.pt",
        )
    model = unidist.wrap_model(make_model())
    assert unidist.load_checkpoint(folder / "old.pt", net=model) == {"epoch": 4}
    for key, value in source.state_dict().items():
        torch.testing.assert_close(model.module.state_dict()[key], value + 1)


def test_keep_last_and_latest(folder: Path) -> None:
    assert unidist.latest_checkpoint(folder / "nothing") is None
    for name in ("best.pt", "other-1.pt", "2-step-9.pt"):
        unidist.save_checkpoint(folder / name, x=1)
    killed = f".step-3.pt.{socket.gethostname()}.4194305.unfinished"
    unfinished = {
        killed,
        f".step-3.pt.{socket.gethostname()}.1.unfinished",  # of a process that still writes
        ".step-3.pt.another-host.4194305.unfinished",
        ".unfinished",
    }
    if unidist.is_main():
        for name in unfinished:
            (folder / name).write_bytes(b"half of it")
        writing = (folder / f".step-3.pt.{socket.gethostname()}.1.unfinished").open("r+b")
        fcntl.flock(writing, fcntl.LOCK_EX)
        (folder / "step-1.pt").mkdir(), (folder / "step-0.pt").symlink_to("nowhere")
    for step in (8, 9, 10, 11):
        unidist.save_checkpoint(folder / f"step-{step}.pt", keep_last=2, x=step)
        assert unidist.latest_checkpoint(folder, "step-*.pt") == folder / f"step-{step}.pt"
    left = on_first(lambda: {path.name for path in folder.iterdir() if path.is_file()})
    assert left - unfinished == {"best.pt", "other-1.pt", "2-step-9.pt", "step-10.pt", "step-11.pt"}
    assert left & unfinished == unfinished - {killed}
    if unidist.is_main():
        writing.close()
    for step in (5, 6):  # went back to an older one
        unidist.save_checkpoint(folder / f"step-{step}.pt", keep_last=3, x=step)
    kept = {f"step-{step}.pt" for step in (6, 10, 11)}
    assert on_first(lambda: {path.name for path in folder.glob("step-*.pt") if path.is_file()}) == kept
    assert unidist.latest_checkpoint(folder) == folder / "step-11.pt"
    for bad in ({"keep_last": 0}, {"keep_last": 2}):
        with pytest.raises(ValueError, match="keep_last="):
            unidist.save_checkpoint(folder / ("best.pt" if bad["keep_last"] else "step-1.pt"), **bad)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_tensors_of_every_layout(folder: Path, wait: bool) -> None:
    parts, matrix = [torch.ones(2), torch.arange(3.0)], torch.eye(3)
    saved = {
        "nested": torch.nested.as_nested_tensor(parts),
        "jagged": torch.nested.as_nested_tensor(parts, layout=torch.jagged),
        "coo": matrix.to_sparse(),
    }
    if torch.__version__ >= "2.15":  # which loads nested tensors where they are allowed, and no others
        nested = torch.nested._internal.nested_tensor
        allowed = [torch._utils._rebuild_nested_tensor, nested.NestedTensor, nested._rebuild_njt]
        torch.serialization.add_safe_globals(allowed)
    unidist.save_checkpoint(folder / "layouts.pt", wait=wait, **saved)
    loaded = unidist.load_checkpoint(folder / "layouts.pt")
    for name in ("nested", "jagged"):
        assert all(map(torch.equal, loaded[name].unbind(), parts))
    assert torch.equal(loaded["coo"].to_dense(), matrix)


class Config(dict[str, int]):
    """A kind of dict that weights_only does not know."""


class Kind(torch.Tensor):
    """A kind of tensor that weights_only does not know."""


class Failing:
    def state_dict(self) -> dict[str, int]:
        if unidist.rank() == unidist.world_size() - 1:
            raise OSError("no space left")
        return {}


class Unfit:
    def load_state_dict(self, state: object) -> None:
        if unidist.rank() == unidist.world_size() - 1:
            raise KeyError("momentum")


def test_an_error_of_any_rank_is_raised_on_all(folder: Path) -> None:
    last = unidist.world_size() - 1
    path = folder / "run.pt"
    unidist.save_checkpoint(path, x=1, y=[1])
    with pytest.raises(
        unidist.CheckpointError, match=rf"run\.pt'\) failed on rank {last}: ValueError: part=: OSError: no space left"
    ):
        unidist.save_checkpoint(path, part=Failing())
    with pytest.raises(unidist.CheckpointError, match=rf"rank {last}: ValueError: x=: KeyError: 'momentum'"):
        unidist.load_checkpoint(path, x=Unfit())
    with pytest.raises(unidist.CheckpointError, match=r"rank 0: (NotADirectory|FileExists)Error"):
        unidist.save_checkpoint(path / "below.pt", x=1)
    with pytest.raises(unidist.CheckpointError, match=r"rank 0: FileNotFoundError"):
        unidist.load_checkpoint(folder / "none.pt")
    with pytest.raises(unidist.CheckpointError, match=r"contains \['x', 'y'\], but not \['model'\]"):
        unidist.load_checkpoint(path, model=make_model())
    with pytest.raises(unidist.CheckpointError, match="x=int has no load_state_dict"):
        unidist.load_checkpoint(path, x=3)
    place = r"at \['deep'\]\[1\]: "
    kind = torch.ones(1).as_subclass(Kind)
    for bad, where in ((folder, place), (Config(x=1), ""), (numpy.float64(3), place), (kind, place)):
        refused = rf"bad=: {where}torch.* refuses it, because it contains a \S*(path|Con|scalar|Kind).*; .*float\(x\)"
        with pytest.raises(unidist.CheckpointError, match=rf"{refused}.*add_safe_globals"):
            unidist.save_checkpoint(path, x=1, bad={"deep": [1, bad], "fine": torch.ones(1)})
    for bad in (lambda: 1, threading.Lock()):
        with pytest.raises(unidist.CheckpointError, match=r"0: ValueError: bad=: .*[pP]ickle.*; .* give an object a"):
            unidist.save_checkpoint(path, x=1, bad=bad)
    with pytest.raises(unidist.CheckpointError, match=r"bad=: ValueError: it has tensors on the meta device, which"):
        unidist.save_checkpoint(path, x=1, bad=torch.nn.Linear(2, 2, device="meta"))
    if unidist.is_main():
        (folder / "noise.pt").write_bytes(b"noise"), (folder / "empty.pt").touch(), os.mkfifo(folder / "fifo")
    with pytest.raises(unidist.CheckpointError, match=r"rank 0: .*fifo is a FIFO, which a checkpoint does not replace"):
        unidist.save_checkpoint(folder / "fifo", x=1)
    with pytest.raises(unidist.CheckpointError, match=r"rank 0: .*not a checkpoint but a FIFO"):
        unidist.load_checkpoint(folder / "fifo")
    for name, why in (("noise.pt", "it is not a checkpoint"), ("empty.pt", "it is truncated: .* after 0 bytes")):
        with pytest.raises(unidist.CheckpointError, match=why):
            unidist.load_checkpoint(folder / name)
    assert unidist.load_checkpoint(path) == {"x": 1, "y": [1]}  # as it was


def test_a_model_that_differs_between_ranks_is_not_saved(folder: Path) -> None:
    model = make_model()
    train(model, my_batch, steps=1)  # never wrapped
    if unidist.world_size() > 1:
        with pytest.raises(unidist.MismatchError, match=r"'0\.weight' of rank 0 differs"):
            unidist.save_checkpoint(folder / "model.pt", model=model)
    # What nobody trains, such as an average that rank 0 keeps, is rank 0's.
    unidist.save_checkpoint(folder / "model.pt", average=model.requires_grad_(False))


def test_a_group_of_its_own(folder: Path) -> None:
    rank, size = unidist.rank(), unidist.world_size()
    group = [unidist.new_group(range(half, size, 2)) for half in range(min(2, size))][rank % 2]
    path = folder / f"part{rank % 2}.pt"
    unidist.save_checkpoint(path, group=group, who=rank)
    assert unidist.load_checkpoint(path, group=group) == {"who": group.ranks[0]}
    assert unidist.latest_checkpoint(folder, f"part{rank % 2}.pt", group) == path


def make_run(seed: int) -> dict[str, Any]:
    """A model, its optimizer with momentum and whatever else a run has, all with values of this seed's."""
    torch.manual_seed(seed)
    model = unidist.wrap_model(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=seed, momentum=0.9)
    model(my_batch(seed)[0]).square().sum().backward()
    optimizer.step()
    loader = unidist.shard_loader(DataLoader(torch.arange(20.0), 2, shuffle=True))
    loader.set_epoch(seed)
    return {"model": model, "optimizer": optimizer, "loader": loader, "epoch": Epoch(seed)}


class Epoch:
    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]
        if self.number < 0 and unidist.rank() == unidist.world_size() - 1:
            raise ValueError("a negative number")


class Unkept:
    """It cannot be put back."""

    loaded = False

    def load_state_dict(self, state: object) -> None:
        self.loaded = True


def test_a_load_that_fails_changes_nothing_on_any_rank(folder: Path) -> None:
    saved = make_run(2)
    other = make_model()
    other.append(nn.Linear(1, 1))
    wrong: dict[str, Any] = {
        "model": other,
        "optimizer": torch.optim.SGD([{"params": [p]} for p in make_model().parameters()], lr=1.0),
        "loader": unidist.shard_loader(DataLoader(torch.arange(20.0), 2, shuffle=True), seed=9),
        "epoch": Epoch(-1),
    }
    for name, value in wrong.items():
        unidist.save_checkpoint(folder / f"{name}.pt", **{**saved, name: value}, unkept={})
    unidist.save_checkpoint(folder / "random.pt", **saved, unkept={})
    if unidist.is_main():
        whole = torch.load(folder / "random.pt", weights_only=True)
        whole["unidist_rng"][-1]["torch"] = torch.zeros(3, dtype=torch.uint8)
        torch.save(whole, folder / "random.pt")
    run, unkept = make_run(1), Unkept()
    before = {name: copy.deepcopy(thing.state_dict()) for name, thing in run.items()}
    random_state = torch.get_rng_state()
    for name in (*wrong, "random"):
        named = "" if name == "random" else f"ValueError: {name}=: "
        with pytest.raises(unidist.CheckpointError, match=rf"load_checkpoint\(.* failed on rank \d: {named}"):
            unidist.load_checkpoint(folder / f"{name}.pt", unkept=unkept, **run)
        after = {name: thing.state_dict() for name, thing in run.items()}
        assert after.pop("loader") == before["loader"]
        torch.testing.assert_close(after, {name: before[name] for name in after}, rtol=0, atol=0)
        assert torch.equal(torch.get_rng_state(), random_state) and not unkept.loaded
    unidist.load_checkpoint(folder / "epoch.pt", model=run["model"], unkept=unkept)
    assert unkept.loaded
    assert_same(run["model"], saved["model"])


def test_a_flipped_bit_anywhere_is_an_error_on_all_ranks(folder: Path) -> None:
    """Each rank compares a part of the file with its checksums."""
    path = folder / "run.pt"
    unidist.save_checkpoint(path, **{f"x{i}": torch.full((500,), float(i)) for i in range(6)})
    data = path.read_bytes()
    for i in range(1, 6):
        unidist.barrier()
        if unidist.is_main():
            changed = bytearray(data)
            changed[data.index(torch.full((500,), float(i)).numpy().tobytes()) + 1000] ^= 1
            path.write_bytes(changed)
        unidist.barrier()
        with pytest.raises(unidist.CheckpointError, match=r"it is damaged: .* does not have its checksum"):
            unidist.load_checkpoint(path)


def test_ranks_that_do_not_see_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on hosts without a common file system: one has none of this name, another has one of an earlier run."""
    monkeypatch.setattr(checkpoint, "_PIECE_BYTES", 1000)
    earlier, saved = make_run(3), make_run(2)
    path = tmp_path / "run.pt"  # each rank's own folder
    if unidist.rank() == 2:
        state = {name: checkpoint._state_of(thing) for name, thing in earlier.items()}
        checkpoint_files.write(path, {**state, "x": torch.zeros(3), "unidist_rng": []}, Event())
    unidist.save_checkpoint(path, **saved, x=torch.arange(3.0))
    assert path.exists() == (unidist.rank() in (0, 2))
    run = make_run(1)
    assert torch.equal(unidist.load_checkpoint(path, **run)["x"], torch.arange(3.0))
    assert_same(run["model"], saved["model"])
    momentum = [copy.deepcopy(thing["optimizer"].state_dict()["state"]) for thing in (run, saved)]
    torch.testing.assert_close(*momentum, rtol=0, atol=0)


def test_nothing_that_was_loaded_needs_the_file(folder: Path) -> None:
    path, run = folder / "run.pt", make_run(1)
    unidist.save_checkpoint(path, **run, x=torch.ones(10_000))
    found = unidist.load_checkpoint(path, **run)
    gc.collect()
    unidist.barrier()
    assert str(path) not in Path("/proc/self/maps").read_text() and found["x"].sum() == 10_000


def test_training_goes_on_while_a_checkpoint_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, write = Event(), checkpoint_files.write

    def write_later(*args: Any) -> None:
        assert ended.wait(60)
        write(*args)

    monkeypatch.setattr(checkpoint_files, "write", write_later)
    run = make_run(2)
    shared = torch.arange(6.0)
    unidist.save_checkpoint(folder / "a.pt", wait=False, **run, parts=[shared[:3], shared[3:], shared.view(2, 3)])
    expected = {name: copy.deepcopy(thing.state_dict()) for name, thing in run.items()}
    train(run["model"], my_batch, steps=1)
    shared.zero_()
    assert not on_first((folder / "a.pt").exists)
    ended.set()
    assert unidist.latest_checkpoint(folder) == folder / "a.pt"
    run = make_run(1)
    parts = unidist.load_checkpoint(folder / "a.pt", **run)["parts"]
    found = {name: thing.state_dict() for name, thing in run.items()}
    assert found.pop("loader") == expected.pop("loader")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.equal(torch.cat(parts[:2]), torch.arange(6.0)) and parts[2].data_ptr() == parts[0].data_ptr()


def test_what_goes_wrong_later_is_raised_by_the_next_call(folder: Path) -> None:
    path = folder / "run.pt"
    for call in (
        lambda: unidist.save_checkpoint(path, x=1),
        lambda: unidist.load_checkpoint(path),
        lambda: unidist.latest_checkpoint(folder),
    ):
        unidist.save_checkpoint(folder / "run.pt" / "below.pt", wait=False, x=1) if path.exists() else (
            unidist.save_checkpoint(folder / "bad.pt", wait=False, x=folder)
        )
        with pytest.raises(unidist.CheckpointError, match=r"(below|bad)\.pt'\) failed on rank 0"):
            call()
        call() if path.exists() else unidist.save_checkpoint(path, x=1)
    unidist.save_checkpoint(folder / "bad.pt", wait=False, x=folder)
    with pytest.raises(unidist.CheckpointError, match=r"bad\.pt'\) failed on rank 0"):
        context.of_world(checkpoint._Writing).finish()  # what shutdown() calls
    if unidist.world_size() > 1:  # another group does not wait for it
        group = unidist.new_group([0])
        unidist.save_checkpoint(path, wait=False, x=2)
        if unidist.is_main():
            unidist.save_checkpoint(folder / "alone.pt", group=group, x=3)
        unidist.save_checkpoint(path, x=4)
    assert unidist.load_checkpoint(path)["x"] in (1, 4)


def test_what_is_written_over_and_what_is_not(folder: Path) -> None:
    path, precious = folder / "run.pt", folder / "precious"
    names = [f".run.pt.{socket.gethostname()}.{os.getpid()}.unfinished", ".run.pt.unfinished"]
    if unidist.is_main():
        precious.write_text("precious")
        for name in names:
            (folder / name).symlink_to(precious)
        (folder / "deep").mkdir()
        path.symlink_to("deep/target.pt")
    for step in (1, 2):
        unidist.save_checkpoint(path, step=step)
        assert unidist.load_checkpoint(path) == {"step": step}
    assert on_first(precious.read_text) == "precious"
    assert on_first(lambda: path.is_symlink() and sorted(os.listdir(folder / "deep"))) == ["target.pt"]
    if unidist.is_main():
        (folder / "plain").touch()
        assert path.stat().st_mode == (folder / "plain").stat().st_mode


def test_an_interrupted_save_leaves_nothing(tmp_path: Path) -> None:
    stop = Event()
    stop.set()
    with pytest.raises((RuntimeError, InterruptedError)):
        checkpoint_files.write(tmp_path / "run.pt", {"x": torch.ones(1000)}, stop)
    assert not list(tmp_path.iterdir())


class ExtraState(nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.values = values

    def get_extra_state(self) -> torch.Tensor:
        return self.values

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.values = state


def test_lazy_conjugates_and_extra_states(folder: Path) -> None:
    path, values = folder / "odd.pt", torch.arange(4.0)
    conjugate, negative = torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag
    for wait in (True, False):
        unidist.save_checkpoint(path, wait=wait, z=conjugate, negative=negative, extra=ExtraState(values))
        loaded = ExtraState(torch.zeros(4))
        found = unidist.load_checkpoint(path, extra=loaded)
        assert found["z"].tolist() == [1 - 2j] and found["negative"].tolist() == [-2]
        unidist.barrier()
        if unidist.is_main():
            path.write_bytes(bytes(path.stat().st_size))  # as by a program that writes over a file in place
        unidist.barrier()
        assert loaded.values.tolist() == [0, 1, 2, 3]
        unidist.barrier()


def test_no_thread_is_left_that_frees_tensors(folder: Path) -> None:
    """At the end of the interpreter it would abort the process."""

    class Slow:
        def __del__(self) -> None:
            time.sleep(0.3)

    kept = [Slow()]

    def action(stop: Event) -> None:
        stop.kept = kept.pop()  # type: ignore[attr-defined]  # freed with the job's thread

    job = checkpoint._Job("call", None, action)
    job.result()
    assert job.thread is not None and not job.thread.is_alive()
