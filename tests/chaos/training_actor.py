"""The replica of the chaos training loop: it can repeat a step, and knows what has reached it."""

from __future__ import annotations

import copy
import hashlib
import io
from typing import Any

from monarch.actor import Actor, current_rank, endpoint
from monarch.distributed import group

RANKS = 4
"""Of a whole mesh, in any arrangement of hosts and processes."""
TRACE = 50_000
"""Numbers in a state beside the network: enough for it not to go through a socket."""


class NotTogether(RuntimeError):
    """Some replica lacks the state that a step begins with."""


class Trainer(Actor):
    """A replica. It keeps the states before and after its last step; a new one has none."""

    def __init__(self) -> None:
        self.rank = current_rank().rank
        self.states: dict[int, dict[str, Any]] = {}
        self.seen: dict[str, int] = {}
        self._begin()

    def _begin(self) -> None:
        """The initial state."""
        import torch

        from tensors.training import make_net

        self.model = make_net()
        # A plain rule with momentum: torch.optim imports more than all the rest of a new rank takes.
        self.moments = [torch.zeros_like(each) for each in self.model.parameters()]
        self.trace = torch.zeros(TRACE, dtype=torch.double)
        self.at = 0

    # What a peer needs of it, without its own records.

    def __getstate__(self) -> dict[int, dict[str, Any]]:
        return self.states

    def __setstate__(self, states: dict[int, dict[str, Any]]) -> None:
        self.states, self.at = states, -1

    @endpoint
    def look(self, sender: str, number: int) -> tuple[int, str, int]:
        """For any number of senders at any time."""
        self._reached(sender, number)
        return self.rank, sender, number

    @endpoint
    def step(self, number: int, attempt: int) -> tuple[float, str]:
        """Take one step from the state of this number: return the loss of all ranks together, and a digest of the new
        state."""
        self._reached("step", attempt)
        return self._step(number), self._digest()

    @endpoint
    def has(self) -> list[int]:
        """The numbers of the states that it has."""
        return sorted(self.states)

    @endpoint
    def save(self, number: int) -> bytes:
        import torch

        if number not in self.states:
            raise NotTogether(f"rank {self.rank} has {sorted(self.states)}, and not {number}")
        out = io.BytesIO()
        torch.save(self.states[number], out)
        return out.getvalue()

    @endpoint
    def load(self, number: int, saved: bytes) -> None:
        """Take a state; None is the initial one."""
        import torch

        self._begin()
        self.states = {number: torch.load(io.BytesIO(saved)) if saved else self._state()}
        self.at = -1

    @endpoint
    def digest(self, number: int) -> str:
        """Of a state that it has."""
        self._set(number)
        return self._digest()

    @endpoint
    def train(self, first: int, steps: int) -> tuple[list[float], str]:
        """Take some steps without interruption."""
        return [self._step(number) for number in range(first, first + steps)], self._digest()

    @endpoint
    def alone(self, steps: int) -> list[float]:
        """Return the result of one process without a mesh on whole batches."""
        self._begin()
        losses: list[float] = []
        for number in range(steps):
            whole = self._gradient(number, 0, 1)
            self._apply(whole)
            losses.append(whole[0].item())
        return losses

    def _reached(self, sender: str, number: int) -> None:
        before, self.seen[sender] = self.seen.get(sender, -1), number
        assert before < number, f"{sender} {number} has reached rank {self.rank} after {before}: twice, or out of order"

    def _step(self, number: int) -> float:
        import torch
        import torch.distributed as dist

        here = group()
        # All take part in this; otherwise one without a state would leave the others waiting.
        common = torch.tensor([number if number in self.states else -1])
        dist.all_reduce(common, dist.ReduceOp.MIN, group=here)
        if common.item() != number:
            raise NotTogether(f"not all ranks have the state {number}; rank {self.rank} has {sorted(self.states)}")
        self._set(number)
        whole = self._gradient(number, self.rank, RANKS) / RANKS
        dist.all_reduce(whole, group=here)
        self._apply(whole)
        self.at = number + 1
        self.states = {number: self.states[number], number + 1: self._state()}
        return whole[0].item()

    def _gradient(self, number: int, part: int, parts: int) -> Any:
        """The loss on one part of a step's batch, and its gradient, in one tensor."""
        import torch
        from torch import nn

        from tensors.training import batch

        rows, targets = batch(number, part, parts)
        loss = nn.functional.mse_loss(self.model(rows), targets)
        found = torch.autograd.grad(loss, list(self.model.parameters()))
        return torch.cat([loss.detach().reshape(1), *(each.reshape(-1) for each in found)])

    def _apply(self, whole: Any) -> None:
        import torch

        parameters = list(self.model.parameters())
        parts = whole[1:].split([each.numel() for each in parameters])
        with torch.no_grad():
            for each, moment, part in zip(parameters, self.moments, parts, strict=True):
                moment.mul_(0.9).add_(part.view_as(each))
                each.sub_(0.05 * moment)
        self.trace.mul_(0.9).add_(whole.sum())

    def _state(self) -> dict[str, Any]:
        return copy.deepcopy({"model": self.model.state_dict(), "moments": self.moments, "trace": self.trace})

    def _set(self, number: int) -> None:
        if self.at == number:
            return
        state = copy.deepcopy(self.states[number])
        self.model.load_state_dict(state["model"])
        self.moments, self.trace, self.at = state["moments"], state["trace"], number

    def _digest(self) -> str:
        found = hashlib.blake2b(digest_size=12)
        for each in (*self.model.parameters(), *self.moments, self.trace):
            found.update(each.detach().numpy().data)
        return found.hexdigest()
