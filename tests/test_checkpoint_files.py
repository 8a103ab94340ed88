"""Files of checkpoints: which is the latest, what is damaged or hostile, what is in the way, what is left behind."""

import fcntl
import io
import os
import pickle
import random
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

from unidist.checkpoint import archive, files, shards

pytestmark = pytest.mark.unit
STATE = {"weights": torch.arange(7.0), "deep": {"a": [1, 2.5, "π", None]}, "half": torch.ones(300).bfloat16()}


def write(path: Path, **state: Any) -> None:
    files.write(path, state or STATE, Event())


def load(path: Path) -> dict[str, Any]:
    file, _ = files.opened(path)
    with file:
        for part in range(3):  # as of three ranks of a host
            archive.verify(file, part, 3)
        return files.read(file)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# ------------------------------------------------------------------------------------ which is the latest
def test_the_step_in_the_name_decides_and_not_the_time(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path / f"run2-step{step:04}.pt", step=step)
        files.prune(tmp_path / f"run2-step{step:04}.pt", 2)
        later = (2e9 - step, 2e9 - step)  # as of a host whose clock is ahead
        os.utime(tmp_path / f"run2-step{step:04}.pt", later if step < 4 else (1e9, 1e9))
    assert names(tmp_path) == ["run2-step0003.pt", "run2-step0004.pt"]
    assert files.latest(tmp_path, "*.pt") == tmp_path / "run2-step0004.pt"
    write(tmp_path / "run2-step2.pt")
    files.prune(tmp_path / "run2-step2.pt", 1)  # the one that was just written stays
    assert names(tmp_path) == ["run2-step2.pt"]
    write(tmp_path / "best.pt"), write(tmp_path / "run1-step02.pt")  # no number; an equal one, later
    assert files.latest(tmp_path, "*.pt") == tmp_path / "run1-step02.pt"
    assert files.latest(tmp_path, "b*.pt") == tmp_path / "best.pt"


def test_latest_while_another_job_saves_and_deletes(tmp_path: Path) -> None:
    """As a job does that evaluates each new checkpoint."""
    (tmp_path / "run-0.pt").touch()

    def save() -> None:
        for step in range(1, 3000):
            (tmp_path / f"run-{step}.pt").touch()
            files.prune(tmp_path / f"run-{step}.pt", 1)

    job = Thread(target=save)
    job.start()
    found = []
    while job.is_alive():
        found.append(files.latest(tmp_path, "*.pt"))
    job.join()
    steps = [int(path.stem.removeprefix("run-")) for path in found if path]
    assert len(found) == len(steps) > 10 and steps == sorted(steps)
    assert files.latest(tmp_path, "*.pt") == tmp_path / "run-2999.pt"


# ------------------------------------------------------------------------------------ damaged, truncated, foreign
def test_flipped_bits_are_noticed(tmp_path: Path) -> None:
    write(tmp_path / "run.pt")
    data, dice, harmless = (tmp_path / "run.pt").read_bytes(), random.Random(0), 0
    for bit in dice.sample(range(8 * len(data)), 600):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "run.pt").write_bytes(changed)
        try:
            assert same(load(tmp_path / "run.pt"), STATE), bit
            harmless += 1  # where nothing is read from
        except ValueError as error:
            assert re.match(r"it is (damaged|truncated)", str(error)), error
    assert harmless < 400


def test_truncated_files_and_others_that_are_no_checkpoints(tmp_path: Path) -> None:
    write(tmp_path / "run.pt")
    data, path = (tmp_path / "run.pt").read_bytes(), tmp_path / "other.pt"
    for size in (0, 4, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=f"it is truncated: its end is missing after {size} bytes"):
            load(path)
    torch.save([1], path)
    with pytest.raises(ValueError, match="it is not a checkpoint: it contains a list"):
        load(path)
    torch.save({files.FORMAT: 99}, path)
    with pytest.raises(ValueError, match="it has format 99, and this unidist reads formats up to 1: upgrade"):
        load(path)
    torch.save(STATE, path, _use_new_zipfile_serialization=False)  # has no checksums
    assert same(load(path), STATE)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, path)  # has none, either
        write(tmp_path / "run.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(load(path), STATE)
    assert (tmp_path / "run.pt").read_bytes()[-1000:] == data[-1000:]  # has them


# ------------------------------------------------------------------------------------ what is in the way
def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("directory", [False, True])
def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path, directory: bool) -> None:
    makers: dict[str, Callable[[Path], Any]] = {
        "FIFO": os.mkfifo,
        "socket": bind,
        "directory": lambda path: (path / "precious").mkdir(parents=True),
        # Nothing is renamed: only the check is called.
        "device": lambda path: path.symlink_to("/dev/null"),
    }
    for kind, make in makers.items():
        path = tmp_path / kind
        make(path)
        with pytest.raises(FileExistsError, match=f"{kind} is a {kind}, which a checkpoint does not replace"):
            files.Unfinished(path, directory)
        with pytest.raises(ValueError, match=f"it is not a checkpoint but a {kind}"):
            files.opened(path)
    assert names(tmp_path) == sorted(makers)


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path) -> None:
    """And no file stays open."""
    old, open_files = os.umask(0o027), os.listdir("/proc/self/fd")
    try:
        write(tmp_path / "run.pt")
        assert (tmp_path / "run.pt").stat().st_mode & 0o777 == 0o640
        for mode in (0o604, 0o444):
            (tmp_path / "run.pt").chmod(mode)
            write(tmp_path / "run.pt")
            assert (tmp_path / "run.pt").stat().st_mode & 0o777 == mode
        assert os.listdir("/proc/self/fd") == open_files
    finally:
        os.umask(old)


# ------------------------------------------------------------------------------------ killed in the middle
def test_the_name_of_a_checkpoint_whose_replacement_was_killed(tmp_path: Path) -> None:
    path, replaced = tmp_path / "run", tmp_path / ".run.replaced"
    assert files.found(path) == path
    replaced.mkdir()
    assert files.found(path) == replaced
    path.mkdir()  # the new one is complete
    assert files.found(path) == path


def test_the_next_save_of_the_name_removes_what_killed_processes_left(tmp_path: Path) -> None:
    host = socket.gethostname()
    left = [f".run.pt.{host}.01.unfinished", f".run.pt.{host}.02.unfinished", ".run.pt.elsewhere.old.unfinished"]
    kept = [f".run.pt.{host}.03.unfinished", ".run.pt.elsewhere.new.unfinished", f".other.pt.{host}.04.unfinished"]
    for name in (*left, *kept):
        (tmp_path / name).touch()
    (tmp_path / left[0]).write_bytes(b"half of it")
    os.utime(tmp_path / left[2], (1e9, 1e9))
    with (tmp_path / kept[0]).open("r+b") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        write(tmp_path / "run.pt")
    assert names(tmp_path) == sorted([*kept, "run.pt"])


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_directory_is_there_at_every_moment(tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system cannot exchange names, the old one is found by another name in between."""
    if not exchanges:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    rename = Path.rename

    def renamed(path: Path, to: Path) -> Path:
        found = rename(path, to)
        assert files.latest(tmp_path, "run-*") == tmp_path / "run-1"
        assert load(files.found(tmp_path / "run-1") / files.REST)["step"] in (1, 2)
        return found

    monkeypatch.setattr(Path, "rename", renamed)
    for step in (1, 2, 3):
        with files.Unfinished(tmp_path / "run-1", directory=True) as unfinished:
            write(unfinished.path / files.REST, step=step)
            if step < 3:
                unfinished.finish()
                assert files.found(tmp_path / "run-1") == tmp_path / "run-1"
        assert load(tmp_path / "run-1" / files.REST) == {"step": min(step, 2)} and names(tmp_path) == ["run-1"]


# ------------------------------------------------------------------------------------ hostile indexes
class Pickled:
    def __init__(self, function: Callable[..., Any], *arguments: Any, state: Any = None) -> None:
        self.reduced = function, arguments, state

    def __reduce__(self) -> Any:
        return self.reduced


def test_an_index_runs_nothing_and_changes_nothing(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import metadata

    canary = tmp_path / "canary"
    hostile = {
        "posix.mkdir": Pickled(os.mkdir, str(canary)),
        "KeyError: '__init__'": Pickled(getattr, torch.Size, "__init__"),
        "torch.serialization.load": Pickled(torch.load, str(canary)),
        "BytesStorageMetadata": metadata.Metadata({"x": metadata.BytesStorageMetadata()}, storage_data={}),
        "no index": metadata.Metadata({"x": 1}, storage_data={}),  # type: ignore[dict-item]
        "storage_data|items": 3,
    }
    for why, value in hostile.items():
        (tmp_path / shards.METADATA).write_bytes(pickle.dumps(value))
        with pytest.raises(ValueError, match=rf"^\.metadata in it is refused: .*({why})"):
            shards._read_index(tmp_path, None)
    # BUILD with a pair sets attributes of what is named, a class as well.
    change = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadataIndex\nN}U\x08__hash__K\x01s\x86b."
    with pytest.raises(ValueError, match="is refused"):
        (tmp_path / shards.METADATA).write_bytes(change)
        shards._read_index(tmp_path, None)
    assert metadata.MetadataIndex.__hash__ != 1 and not canary.exists()


def test_an_index_of_the_first_releases_of_python_3_11() -> None:
    """They pickle a member of an enum by getattr."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as FORMATS

    for member in FORMATS:
        data = pickle.dumps(Pickled(getattr, FORMATS, member.name))
        assert shards._Unpickler(io.BytesIO(data)).load() is member


def test_an_index_names_files_of_its_directory_only(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    (tmp_path / "here").touch(), os.mkfifo(tmp_path / "fifo")
    for name, error in (("/dev/zero", "refused"), ("../here", "refused"), ("fifo", r"\['fifo'\] are missing")):
        index = metadata.Metadata({}, storage_data={metadata.MetadataIndex("x"): _StorageInfo(name, 0, 1)})
        (tmp_path / shards.METADATA).write_bytes(pickle.dumps(index))
        with pytest.raises((ValueError, FileNotFoundError), match=error):
            shards._read_index(tmp_path, None)
    with pytest.raises(ValueError, match="does not have its checksum"):
        shards._read_index(tmp_path, "0")
    data = io.BytesIO()
    torch.save(torch.ones(100), data)
    archive.verify(data)
    data.getbuffer()[600] ^= 1
    with pytest.raises(ValueError, match="it is damaged"):
        archive.verify(data)


@pytest.mark.skipif(
    torch.__version__ >= "2.15", reason="PyTorch 2.15 refuses nested tensors: test_tensors_of_every_layout"
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_new_process_loads_jagged_tensors(tmp_path: Path) -> None:
    jagged = torch.nested.as_nested_tensor([torch.ones(2), torch.arange(3.0)], layout=torch.jagged)
    files.write(tmp_path / "jagged.pt", {"x": jagged}, Event())
    code = (
        "import sys; from unidist.checkpoint import files; print(files.read(open(sys.argv[1], 'rb'))['x'].unbind()[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "jagged.pt"], capture_output=True, text=True)
    assert done.stdout == "tensor([0., 1., 2.])\n", done.stderr
