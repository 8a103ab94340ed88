"""Datasets whose samples are their own indices."""

from collections.abc import Iterator

from torch.utils.data import Dataset, IterableDataset


class Numbers(Dataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Leaves the workers to whoever reads it."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))
