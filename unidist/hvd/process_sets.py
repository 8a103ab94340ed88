"""Process sets: some ranks of the world that run operations among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unidist import context
from unidist.hvd.messages import Signature
from unidist.hvd.operation import GLOBAL_SET, Operation
from unidist.hvd.session import ProcessSetGroups, current_session


class ProcessSet:
    """Some ranks; ``add_process_set`` or ``init`` gives it a number, by which operations know it.

    Args:
        ranks_or_comm: global ranks, in any order. MPI communicators are not taken.
    """

    process_set_id: int | None = None
    mpi_comm = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(f"ProcessSet({ranks_or_comm!r}) takes a list of ranks.")
        ranks = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"ProcessSet({ranks}) takes a list of ranks, which are integers.")
        self._ranks = ranks

    @property
    def ranks(self) -> list[int] | None:
        """Global ranks, in order; of the set of all ranks none before ``init``."""
        if self.process_set_id == GLOBAL_SET:
            return list(range(context.current().topology.world_size)) if context.is_initialized() else []
        return self._ranks

    def size(self) -> int | None:
        """Return the number of its ranks; None before it has a number."""
        return None if self.process_set_id is None else len(_group(self).ranks)

    def rank(self) -> int | None:
        """Return this process's rank in it; None before it has a number. Operations go by global ranks.

        Raises:
            ValueError: this process is not in it.
        """
        if self.process_set_id is None:
            return None
        if current_session().topology.rank not in _group(self).ranks:
            raise ValueError(f"rank {current_session().topology.rank} is not part of process set {self}.")
        return _group(self).ranks.index(current_session().topology.rank)

    def included(self) -> bool | None:
        """Return whether this process is in it; None where it has no ranks yet."""
        return None if self.ranks is None else current_session().topology.rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


#: All ranks.
global_process_set = ProcessSet([])
global_process_set.process_set_id = GLOBAL_SET


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set. Collective over the world, members or not.

    Returns:
        The process set, which has its number.

    Raises:
        ValueError: there is one of the same ranks, or a rank that does not exist.
        HorovodInternalError: on every rank, when the ranks ask for different ones.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    assert process_set.ranks is not None
    ranks = tuple(process_set.ranks)
    session = current_session()
    if any(group.ranks == ranks for group in session.process_sets.values()):
        raise ValueError(f"there is a process set of these ranks already: {process_set}. Keep and pass that one.")
    if len(set(ranks)) < len(ranks) or (ranks and not (ranks[0] >= 0 and ranks[-1] < session.topology.world_size)):
        raise ValueError(f"{process_set} needs ranks from 0 to {session.topology.world_size - 1}, none twice.")
    signature = Signature("add_process_set", ranks=ranks)
    process_set.process_set_id = session.run(Operation(session.next_name(GLOBAL_SET), signature))
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set. Collective over the world, members or not.

    Returns:
        Whether it was there; the set of all ranks stays.
    """
    set_id = process_set.process_set_id
    if set_id is None or set_id == GLOBAL_SET:
        return False
    session = current_session()
    signature = Signature("remove_process_set", root=set_id)
    session.run(Operation(session.next_name(GLOBAL_SET), signature))
    process_set.process_set_id = None
    return True


def _group(process_set: ProcessSet) -> ProcessSetGroups:
    return current_session().process_sets[process_set.process_set_id]  # type: ignore[index]
