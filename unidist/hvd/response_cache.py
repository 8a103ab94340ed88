"""A rank's side of the ids: what it submits by them, and which operations they mean in what it receives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unidist.hvd.messages import Complete, Definition, Execute, Name, Request, Signature, Submit


class ResponseCache:
    """The operations to which the coordinator has given ids (Horovod's response cache)."""

    def __init__(self) -> None:
        self._definitions: dict[int, Definition] = {}
        #: The last of each name; of operations without a name by their signatures.
        self._last: dict[tuple[int, Name | Signature], Definition] = {}

    def submit(self, requests: Iterable[Request]) -> Submit:
        """Return the message that submits operations, by their ids where they have one."""
        cached = 0
        numbered: list[tuple[int, int, bytes]] = []
        others: list[Request] = []
        for request in requests:
            set_id, name, signature, value = request
            key = (set_id, signature if isinstance(name, int) else name)
            known = self._last.get(key)
            if known is None or (known.signature is not signature and known.signature != signature):
                others.append(request)
                continue
            if known.signature is not signature:  # the same object is compared faster the next time
                self._last[key] = known._replace(signature=signature)
            if isinstance(name, int):
                numbered.append((known.id, name, value))
            elif value:
                numbered.append((known.id, 0, value))
            else:
                cached |= 1 << known.id
        return Submit(cached, tuple(numbered), tuple(others))

    def groups(self, message: Execute | Complete) -> list[list[tuple[Name, Signature]]]:
        """Return the name and signature of each operation of a message, in the groups that are executed together."""
        for definition in message.new:
            if definition.id >= 0:
                self._definitions[definition.id] = definition
                name = definition.signature if definition.name is None else definition.name
                self._last[definition.set_id, name] = definition
        groups: Sequence[Sequence[tuple[int, int]]]
        groups = message.groups if isinstance(message, Execute) else [[message.operation]]
        return [[self._operation(id_, number, message.new) for id_, number in group] for group in groups]

    def _operation(self, id_: int, number: int, new: Sequence[Definition]) -> tuple[Name, Signature]:
        definition = self._definitions[id_] if id_ >= 0 else new[-1 - id_]
        return (number if definition.name is None else definition.name), definition.signature
