"""A program that trains while its processes are killed: a failed step is repeated by healed replicas.

A step is done when all ranks have answered. Each rank keeps the states before and after the last step, so that all live
ranks can begin the next step, whatever became of the last one. A new rank gets the states of a peer; if none has
survived, or a host is lost, the program goes back to its checkpoint.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from typing import Any

from chaos.training_actor import RANKS, Trainer
from chaos.training_faults import Faults
from chaos.training_ledger import HANG, Ledger, Lost, Trouble
from chaos.training_places import PLACES, OneHost
from monarch.actor import Restart, heal_mesh, shutdown_context, supervise
from monarch.exceptions import CallTimeoutError, SpawnError, StoppedError, SupervisionError

SAVED_EVERY = 8
TRIES = 60
"""Attempts at one step before a running program gives up."""
AT_LEAST = 5
"""Faults in a run, however short it is."""
AT_ONCE = 200
"""Steps of the fault-free run in one call."""
ALONE = 30
"""Steps that are compared with a single process as well."""


class Training:
    """The loop, with its knowledge of the run so far."""

    def __init__(self, place: OneHost, ledger: Ledger, chance: random.Random) -> None:
        self.place, self.ledger, self.chance = place, ledger, chance
        self.losses: list[float] = []
        self.digest = ""
        self.trainers: Any = None
        """The replicas, without the axes of their mesh."""
        self.made = self.attempts = self.healed = self.restored = self.given = 0
        self._procs: Any = None
        self._whole: Any = None
        self._lost = True
        self._saved = 0, b""
        self._policy = ExitStack()

    @property
    def done(self) -> int:
        return len(self.losses)

    def ask(self, what: str, begin: Callable[[], Any]) -> Any:
        return self.ledger.ask(f"{what} of mesh {self.made} at step {self.done}", begin)

    def step(self) -> None:
        """Do one more step, with all that it takes."""
        for attempt in range(TRIES):
            try:
                if attempt:
                    self._mend(attempt)
                self._try()
                return
            except (SpawnError, StoppedError) as error:
                self._lost = True
                self.ledger.tell(f"step {self.done}: {error!r}")
            except Trouble as error:
                self.ledger.tell(f"step {self.done}: {error!r}")
        raise Lost(f"step {self.done} was not done in {TRIES} attempts")

    def _try(self) -> None:
        if self._lost:
            self._make()
        self.attempts += 1
        number, attempt = self.done, self.attempts
        answers = list(self.ask("a step", lambda: self.trainers.step.call(number, attempt)).values())
        if len(set(answers)) != 1:
            self.ledger.complain(f"the ranks differ after step {number}: {answers}")
        self.losses.append(answers[0][0])
        self.digest = answers[0][1]
        if self.done - self._saved[0] >= SAVED_EVERY:
            number, rank = self.done, self.chance.randrange(RANKS)
            with suppress(*Trouble):
                self._saved = number, self.ask("a save", lambda: self._one(rank).save.call_one(number))
                # Sometimes continue with a mesh of another kind.
                self._lost = self.chance.random() < 0.15

    def _mend(self, attempt: int) -> None:
        """Heal the mesh, and send the state to ranks without it."""
        if attempt % 3 == 0:
            self._lost = True
        if attempt % 6 == 0:
            # Hosts may lose each other, while this program reaches both.
            self.place.renew()
        if self._lost:
            return
        begun = time.monotonic()
        try:
            heal_mesh(self._whole, copy_from="peer", timeout=HANG)
            self.healed += 1
        except SupervisionError:
            # No rank with the state has survived.
            pass
        except CallTimeoutError as error:
            self.ledger.complain(f"heal_mesh took {time.monotonic() - begun:.1f} s: {error}")
            raise Lost("heal_mesh") from error
        has = list(self.ask("a look at states", lambda: self.trainers.has.call()).values())
        blank = [rank for rank, numbers in enumerate(has) if self.done not in numbers]
        if not blank:
            return
        if len(blank) == RANKS:
            self._back()
            return
        self.given += 1
        giver = next(rank for rank in range(RANKS) if rank not in blank)
        number = self.done
        state = self.ask("a save", lambda: self._one(giver).save.call_one(number))
        for rank in blank:
            self.ask("a load", lambda rank=rank: self._one(rank).load.call(number, state))

    def _make(self) -> None:
        """Create a new mesh from the checkpoint."""
        self.made += 1
        self.ledger.tell(f"mesh {self.made}")
        if self._procs is not None:
            self._policy.close()
            with suppress(*Trouble):
                self.ask("a stop", self._procs.stop)
        hosts, per_host = self.place.hosts(self.chance)
        policy = self.chance.choice(["plain", "plain", "restart", "spare", "supervised"])
        self._procs = procs = hosts.spawn_procs(
            per_host,
            name=f"t{self.made}",
            restart=Restart(most=1000, within=60.0, backoff=0.01) if policy == "restart" else None,
            spares=int(policy == "spare"),
        )
        if policy == "supervised":
            self._policy.enter_context(supervise(procs, lambda failure: heal_mesh(failure.mesh, copy_from="peer")))
        self._whole = procs.spawn("trainers", Trainer)
        self.trainers = self._whole.flatten("ranks")
        self._lost = False
        self._back()

    def _back(self) -> None:
        """All ranks restore the checkpoint, and the steps since then are repeated."""
        self.restored += 1
        number, saved = self._saved
        del self.losses[number:]
        self.ask("a load", lambda: self.trainers.load.call(number, saved))

    def _one(self, rank: int) -> Any:
        return self.trainers.slice(ranks=rank)

    def finish(self) -> None:
        """With all faults over, the state is the same on all ranks, and matches a run without faults."""
        self.step()
        number = self.done
        digests = set(self.ask("the digests", lambda: self.trainers.digest.call(number)).values())
        self._saved, losses = (0, b""), self.losses[:]
        self._make()
        golden, digest = list[float](), ""
        for first in range(0, number, AT_ONCE):
            part = first, min(AT_ONCE, number - first)
            answer = self.ask("a run without faults", lambda part=part: self.trainers.train.call(*part))
            found, digest = next(iter(answer.values()))
            golden += found
        alone = self.ask("one process", lambda: self._one(0).alone.call_one(ALONE))
        far = [index for index, loss in enumerate(losses) if not abs(loss - golden[index]) < 1e-6]
        if far:
            self.ledger.complain(f"{len(far)} of {number} losses are others than without faults, the first at {far[0]}")
        if any(not abs(one - other) < 1e-6 for one, other in zip(losses, alone, strict=False)):
            self.ledger.complain(f"the losses are others than those of one process: {losses[:ALONE]}, {alone}")
        if digests != {self.digest} or digests != {digest}:
            self.ledger.complain(f"the states differ: {digests}, {self.digest}, {digest} without faults")
        self.losses = losses
        self._policy.close()
        self.ask("a stop", self._procs.stop)


def visit(number: int, seed: int, training: Training, ledger: Ledger, end: threading.Event) -> None:
    """Calls some ranks in between, several at a time."""
    chance = random.Random(f"{seed}.{number}")
    sent = 0
    while not end.wait(chance.random() * 0.03):
        mesh, flight = training.trainers, list[tuple[int, Any]]()
        if mesh is None:
            continue
        for _ in range(chance.choice([1, 1, 5, 20])):
            sent += 1
            some = mesh.slice(ranks=chance.randrange(RANKS)) if chance.random() < 0.5 else mesh
            with suppress(*Trouble):
                key = f"visitor {number}", sent
                flight.append((sent, ledger.send(f"look {key}", lambda key=key, some=some: some.look.call(*key))))
        chance.shuffle(flight)
        for key, call in flight:
            with suppress(*Trouble, Lost):
                answers = list(call.get().values())
                if any(answer[1:] != (f"visitor {number}", key) for answer in answers):
                    ledger.complain(f"look {key} of visitor {number} got the answers {answers}")


def main(where: str, seed: int, seconds: float) -> None:
    """Print the outcome as JSON; on stderr the events before it, if it is wrong or MONARCH_CHAOS_TELL is set."""
    faulthandler.dump_traceback_later(seconds * 4 + 150, exit=True)
    ledger, end = Ledger(), threading.Event()
    place = PLACES[where]()
    training = Training(place, ledger, random.Random(f"{seed}.loop"))
    faults = Faults(random.Random(f"{seed}.faults"), place.deck, place.own, lambda: training.done, ledger.tell)
    threads = [threading.Thread(target=faults.run, args=(end,), name="faults")]
    for number in range(2):
        told = number, seed, training, ledger, end
        threads.append(threading.Thread(target=visit, args=told, name=f"visitor {number}"))
    with closing(place):
        while training.done <= SAVED_EVERY:
            training.step()
        try:
            for thread in threads:
                thread.start()
            until = time.monotonic() + seconds
            # On a slow machine it continues until there were enough faults.
            while time.monotonic() < until or faults.done.total() < AT_LEAST:
                training.step()
        except Lost as lost:
            ledger.complain(f"lost: {lost}")
        finally:
            end.set()
            for thread in threads:
                thread.join()
        if not ledger.wrong:
            training.finish()
    shutdown_context().get(HANG)
    ledger.close()
    numbers = {name: getattr(training, name) for name in ("done", "attempts", "made", "healed", "restored", "given")}
    if ledger.wrong or os.environ.get("MONARCH_CHAOS_TELL"):
        print("\n".join(ledger.told), file=sys.stderr)
    print(json.dumps({**numbers, "calls": ledger.kinds, "faults": faults.done, "wrong": ledger.wrong[:10]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
