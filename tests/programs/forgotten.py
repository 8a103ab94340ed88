"""``examples/many_gpus.py`` as it is, and with one step forgotten at a time; rank 0 prints what came of each.

The page "From one GPU to many" says what goes wrong: ``tests/test_docs.py`` compares.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import unidist

SCRIPT = Path(__file__).parents[2] / "examples/many_gpus.py"
#: By the name of the step: what stands in the program, and what a program has that forgot it.
FORGOTTEN = {
    "nothing": ("", ""),
    "batch size": ("args.batch_size // unidist.world_size()", "args.batch_size"),
    "shard": ("unidist.shard_loader(DataLoader(train_set, batch_size, shuffle=True))", "plain(train_set, batch_size)"),
    "pad": (", pad=False", ""),
    "wrap": ("unidist.wrap_model(make_model().to(device))", "make_model().to(device)"),
    "total": ("unidist.Accuracy()", "own_accuracy(loader)"),
    "mean": ("mean_loss.compute()", "loss.item()"),
    "rank 0": ("        if unidist.is_main():\n            with open", "        if True:\n            with open"),
    "unwrap": ("unidist.unwrap(model).state_dict()", "model.state_dict()"),
}


def outcome(step: str, out: Path) -> dict[str, object]:
    text = SCRIPT.read_text()
    before, after = FORGOTTEN[step]
    assert before in text, step
    namespace = {"__name__": "many_gpus", "plain": Plain, "own_accuracy": OwnAccuracy}
    exec(compile(text.replace(before, after), str(SCRIPT), "exec"), namespace)
    sys.argv = [str(SCRIPT), "--epochs", "2", "--out", str(out)]
    main: Callable[[], None] = namespace["main"]  # type: ignore[assignment]
    try:
        main()
        error = ""
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    unidist.barrier()
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    steps = torch.load(next(out.glob("last-*.pt")))["schedule"]["last_epoch"] if any(out.glob("last-*.pt")) else None
    keys = list(torch.load(out / "best.pt"))[:1]
    unidist.barrier()
    return {"lines": lines, "error": error, "steps": steps, "keys": keys}


class Plain(torch.utils.data.DataLoader):  # type: ignore[type-arg]
    """A DataLoader that is not sharded, with what ``many_gpus.py`` asks of one that is."""

    epoch = 0

    def __init__(self, data: object, batch_size: int) -> None:
        super().__init__(data, batch_size, shuffle=True)  # type: ignore[arg-type]

    def __iter__(self):  # type: ignore[no-untyped-def]
        yield from super().__iter__()
        self.epoch += 1

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


class OwnAccuracy:
    """The share of right answers of this rank's part, of all samples."""

    def __init__(self, loader) -> None:  # type: ignore[no-untyped-def]
        self.right, self.samples = 0.0, len(loader.dataset)

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.right += float((outputs.argmax(1).cpu() == labels).sum())

    def compute(self) -> float:
        return self.right / self.samples


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    sys.path.insert(0, str(SCRIPT.parent))
    unidist.init()
    for step in FORGOTTEN:
        found = outcome(step, directory / step)
        if unidist.is_main():
            print("FORGOTTEN", json.dumps([step, found]), flush=True)
