"""What a piece of code sends: every collective that it calls, seen at torch's dispatcher."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# The bytes that a ring algorithm has a rank of N send, as multiples of (N-1)/N times the whole tensor.
ROUNDS = {"allreduce_": 2, "_allgather_base_": 1, "_reduce_scatter_base_": 1, "allgather_into_tensor_coalesced_": 1}
WHOLE = {"_allgather_base_": 0, "_reduce_scatter_base_": 1}  # the argument that is the whole tensor


class RecordedCollectives(TorchDispatchMode):
    """Inside the block, counts collectives by name and adds up what a rank sends, by the size of the group."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[int] = Counter()  # by group size
        self.unknown: set[str] = set()
        self.in_backward = 0  # calls while autograd was running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._record(func._overloadpacket.__name__, func, args)
        return func(*args, **(kwargs or {}))

    def _record(self, name: str, func: Any, args: tuple[Any, ...]) -> None:
        self.calls[name] += 1
        self.in_backward += torch._C._current_graph_task_id() >= 0
        names = [argument.name for argument in func._schema.arguments]
        group = torch.distributed.ProcessGroup.unbox(args[names.index("process_group")])
        ranks = group.size()
        if name in ("allreduce_", "broadcast_", "reduce_"):
            size = sum(tensor.nbytes for tensor in args[0])
        elif name in WHOLE:
            size = args[WHOLE[name]].nbytes
        else:
            self.unknown.add(name)
            return
        rounds = ROUNDS.get(name, 1)
        self.sent_bytes[ranks] += rounds * size * (ranks - 1) // ranks
