"""One voice for all ranks."""

import io
import logging

import pytest
import torch
from torch.utils.data import DataLoader

import unidist


def test_print_speaks_on_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    unidist.print("one", 2, sep="-")
    assert capsys.readouterr().out == ("one-2\n" if unidist.is_main() else "")


def test_rank_filter() -> None:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(rank)s %(message)s"))
    handler.addFilter(unidist.RankFilter())
    logger = logging.getLogger("unidist.tests")
    logger.setLevel(logging.INFO), logger.addHandler(handler)
    try:
        logger.info("quiet"), logger.warning("loud")
    finally:
        logger.removeHandler(handler)
    rank = unidist.rank()
    assert text.getvalue() == ("0 quiet\n0 loud\n" if rank == 0 else f"{rank} loud\n")


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    loader = unidist.shard_loader(DataLoader(torch.arange(10.0), 5, shuffle=True))
    text = io.StringIO()
    bar = unidist.progress(loader, desc="train", file=text, mininterval=0)
    batches = []
    for batch in bar:
        batches.append(batch)
        bar.set_postfix(loss=0.5)
        assert (bar.format_dict["rate"] or 0.0) >= 0.0  # on every rank, though most show nothing
    assert sum(map(len, batches)) == -(-10 // unidist.world_size())
    shown = text.getvalue()
    assert not shown if unidist.rank() else "train: 100%" in shown and "samples/s, loss=0.5" in shown
    pairs = [(torch.ones(4, 2), torch.ones(4)), {"x": torch.ones(3)}, 7]
    assert list(unidist.progress(iter(pairs), disable=True)) == pairs
    assert not capsys.readouterr().out
