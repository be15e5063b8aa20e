"""The process of a rank: a fork of the zygote that runs actors until it is stopped or its owner dies."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

from monarch._actors import interruptible
from monarch._actors.construction import construct
from monarch._actors.executors import ActionExecutor, MainExecutor, ThreadExecutor
from monarch._actors.halting import is_stuck, longest
from monarch._actors.interrupting import abort_paused
from monarch._actors.interrupts import NOTICE, listen, new_interrupt, notice, raise_again_after_finalizers
from monarch._actors.mailbox import NOTHING, Mailbox
from monarch._actors.pausing.breaking import take_breakpoints
from monarch._actors.pausing.gate import PAUSE, gate
from monarch._actors.pausing.tasks import awaiting
from monarch._actors.table import actors_of
from monarch._core.roster import Procs, split_proc
from monarch._groups.breaking import member_died
from monarch._groups.checking import set_checks
from monarch._groups.default_group import hook_torch
from monarch._groups.environment import set_mesh_variables, use_own_gpu
from monarch._node.current import set_node
from monarch._node.node import Node
from monarch._node.rank_config import RankConfig
from monarch._node.remote_errors import in_bootstrap, in_cleanup, pack_failure
from monarch._node.services.registry import declared, service
from monarch._procs.agent.gpu_shares import ORDER
from monarch._procs.os.child_stacks import serve_in_forks
from monarch._procs.os.helpers import let_helpers_use
from monarch._procs.os.shared_names import keep_names
from monarch._procs.rank import exit_functions
from monarch._procs.rank.cell_marker import mark_stopped
from monarch._procs.rank.ending import leave_term_to_agent
from monarch._procs.rank.foreground import interrupt_programs
from monarch._procs.rank.output import flush_streams
from monarch._procs.zygote.user_forks import watch_forks
from monarch._python.threads import spawn_thread
from monarch._session.rank.last_steps import LastSteps
from monarch._session.rank.looks import Looks
from monarch._session.rank.outbox import Outbox, RankReports
from monarch._session.wiring import wire
from monarch._supervision.faults import Faults
from monarch._tensors.collectives.made_groups import begin_observing
from monarch._wire import messages as m
from monarch._wire import rebuilding
from monarch._wire.deferred_signals import harmless_idle
from monarch._wire.pickling import loads
from monarch._wire.receiving.aside import flush as flush_told
from monarch.config import CHECK_COLLECTIVES

_LAST_WORDS = 2.0
"""Seconds to send remaining messages before a forced exit."""
_SWITCH_S = 0.001
"""Seconds after which a thread releases the GIL, so that actors answer while another one computes."""


@declared("reporter.begin")
def begin_reports(node: Node, running: Callable[[], Mailbox | None]) -> RankReports:
    """Return the reporter of a rank."""
    raise NotImplementedError


class Rank:
    """A rank process: handles the messages that create and stop actors."""

    def __init__(self, config: RankConfig, proc: str, place: int, folder: str) -> None:
        self.config = config
        self.node = node = Node(proc, folder, config.root)
        wire(node)
        node.rank = place
        node.config = config
        node.hosts.in_rank = True
        self._assumed: int | None = None if place < 0 else config.port
        """The owner's port for news that this rank is set up; None for a spare."""
        self._set_up: tuple[int, bytes] | None = None
        """The news for the owner."""
        self._ready_lock = threading.Lock()
        self._booted = threading.Event()
        """Set when the bootstrap has ended; actors are constructed after that."""
        self._broken: bytes | None = None
        """The failure of the bootstrap; written before ``_booted`` is set, read after it."""
        node.hosts.secret = config.secret
        rebuilding.in_rank = True
        if not config.bound:
            # The agent's affinity is all cores that the session may use.
            let_helpers_use(os.sched_getaffinity(os.getppid()))
        begin_observing(free_threads=not config.bound)
        hook_torch()
        if CHECK_COLLECTIVES():
            set_checks(True, 0)
        node.events.lost.subscribe(self._on_death)
        set_node(node)
        if place >= 0:
            set_mesh_variables()
        keep_names(folder, proc)
        self.main = MainExecutor(node)
        self.outbox = Outbox(node, config.procs.region().nelements, self._busy_call)
        self._halting = 0
        """The number of actors that have not ended; under ``_halt_lock``."""
        self._stuck = False
        """Whether an actor was given up while its code continues; set once under ``_halt_lock``."""
        self._halt_lock = threading.Lock()
        self._halted_at = 0.0
        """The time of the owner's wish that this process ends; receiving thread only."""
        actors_of(node).on_create = self._create
        actors_of(node).on_halt = self._halt
        # Written by the receiving thread only: the newest level of log records.
        self._log_level = logging.NOTSET
        node.dispatch.handle(m.Level, lambda level, _: self._on_level(level))
        self.outbox.reports = reports = begin_reports(node, self._busy_mailbox)
        self._looks = Looks(node, self.is_busy, (self.outbox.tick, reports.tick))
        node.output.idle = self.outbox.flush
        node.output.send_printed = self.outbox.send_printed
        node.output.taking = self.outbox.lock
        node.output.watch = self._looks.expect
        Faults(node)
        node.receive_loop.on_lost = self._lose_message
        node.receive_loop.start()

    def _on_death(self, dead: m.Dead) -> None:
        if dead.proc == self.config.owner:
            # A detached mesh outlives its program, and nobody is left who would resume it.
            gate.resume()
        if split_proc(dead.proc)[0] == self.config.procs.uid:
            member_died(dead)

    def run(self) -> None:
        """Run until stopped."""
        node, config = self.node, self.config
        owner = node.peers.get(config.owner)
        owner.send(m.encode(m.Ready(node.proc, os.getpid())))
        body = NOTHING
        status = m.RESULT
        try:
            if config.bootstrap is not None:
                self._bootstrap(config.bootstrap)
        except BaseException as error:
            status, body = m.ERROR, pack_failure(error)
            self._broken = in_bootstrap(body)
        # Not its reports: the first look at tensors is after the first call.
        flush_streams()
        self.outbox.send_new()
        with self._ready_lock:
            self._set_up = status, body
            self._tell_owner()
        self._booted.set()
        self._looks.look()
        self.main.run()
        flush_told(_LAST_WORDS)
        self.outbox.flush()
        node.close(linger_ms=1000)

    def assume(self, rank: int, port: int) -> None:
        """Take a rank of the mesh, as a former spare."""
        node = self.node
        node.rank = rank
        gpus = os.environ.get(ORDER, "").split(",")
        if os.environ.get("CUDA_VISIBLE_DEVICES") in gpus:
            # Like the dead rank, unless the user has set it.
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank % self.config.procs.per_host % len(gpus)]
        set_mesh_variables()
        with self._ready_lock:
            self._assumed = port
            self._tell_owner()

    def _tell_owner(self) -> None:
        """Tell the owner that this rank is set up."""
        if self._set_up is not None and self._assumed is not None:
            node, (status, body) = self.node, self._set_up
            view = m.pack(self.config.procs.region().pack())
            node.replies.answer(self.config.owner, self._assumed, view, status, body)

    def _bootstrap(self, packed: bytes) -> None:
        result = loads(packed)()
        if inspect.isawaitable(result):

            async def wait() -> None:
                await result

            asyncio.run(wait())

    def interrupt(self, *_: Any) -> None:
        """Handle SIGINT by interrupting the running endpoint, if any."""
        main = self.main
        notice()
        actors_of(self.node).interrupts += 1
        meant, main.meant = main.meant, None
        if meant is not None and meant[0].running is not meant[1]:
            return
        if main.interruptible:
            # The code that handles the interrupt is not to be paused.
            gate.resume()
            gate.tracer.end()
            interrupt_programs(threading.get_native_id())
            raise new_interrupt()
        if main.unwanted and main.loop is not None:
            task = main.running_task()
            if task in main.unwanted and task not in main.package_tasks:
                main.unwanted = set()
                raise KeyboardInterrupt

    def in_call(self) -> bool:
        """Return whether the main thread runs code of an endpoint or a cell."""
        return self.main.in_call()

    def awaiting_frame(self) -> FrameType | None:
        """Return the innermost frame of the user's code of a call that awaits; None if none does."""
        calls = (task for mailbox in list(actors_of(self.node).here.values()) for task in list(mailbox.turns.tasks))
        return next((frames[0] for task in calls if (frames := awaiting(task)[0])), None)

    def is_busy(self) -> bool:
        """Return whether an actor runs a call."""
        return self._busy_call() is not None

    def _busy_mailbox(self) -> Mailbox | None:
        found = self._busy_call()
        return found[0] if found is not None else None

    def _busy_call(self) -> tuple[Mailbox, m.Call] | None:
        for mailbox in list(actors_of(self.node).here.values()):
            running = mailbox.running
            if running is not None:
                return mailbox, running
        return None

    # Actors

    def _create(self, create: m.Create, more: Sequence[Any]) -> None:
        executor: ActionExecutor
        # The bootstrap runs in the main thread, and may wait for the actors that it makes.
        by_bootstrap = not self._booted.is_set() and create.src == self.node.proc
        if self.main.busy or by_bootstrap:
            try:
                executor = ThreadExecutor(self.node, f"monarch-{create.actor}")
            except Exception as error:
                # No thread can be started; the calls that come before the caller hears of it get the reason.
                actors_of(self.node).gone[create.actor] = (
                    f"its process could not start a thread for it ({error}; see ulimit -u)"
                )
                raise
            executor.awake = use_own_gpu
        else:
            self.main.busy = True
            executor = self.main
        mailbox = Mailbox(self.node, create.actor, executor, actors_of(self.node))
        actors_of(self.node).here[create.actor] = mailbox
        executor.post(lambda: self._construct(mailbox, create, more, by_bootstrap))

    def _construct(self, mailbox: Mailbox, create: m.Create, more: Sequence[Any], by_bootstrap: bool) -> None:
        """Construct an actor, after the bootstrap unless that made it; in the actor's thread."""
        if by_bootstrap:
            construct(mailbox, create, more)
            return
        self._booted.wait()
        construct(mailbox, create, more, self._broken)

    def _halt(self, halt: m.Halt) -> None:
        node = self.node
        if halt.actor:
            mailbox = actors_of(node).here.get(halt.actor)

            def answer(failure: bytes | None) -> None:
                status = m.RESULT if failure is None else m.ERROR
                if mailbox is not None and is_stuck(mailbox):
                    with self._halt_lock:
                        self._stuck = True
                node.replies.answer(halt.src, halt.port, halt.view, status, NOTHING if failure is None else failure)

            if mailbox is None:
                answer(None)
            else:
                mailbox.halt(halt.reason, answer)
            return
        mailboxes = list(actors_of(node).here.values())
        if gate.asked:
            abort_paused(mailboxes, halt.reason)
        gate.end()
        self._halting = len(mailboxes)
        self._halted_at = time.monotonic()
        if not mailboxes:
            self._end_process()
            return
        # The process is alive, so its actors get time to clean up.
        node.peers.to_agent(node.host, m.Stop(node.proc, [node.proc], longest()))
        for mailbox in mailboxes:
            mailbox.halt(halt.reason, partial(self._halted, mailbox), True, halt.drain)

    def _halted(self, mailbox: Mailbox, failure: bytes | None) -> None:
        """Note the end of an actor, and end the process after the last one."""
        if failure is not None:
            name = mailbox.spec.name if mailbox.spec is not None else mailbox.key
            fault = m.Fault(self.node.proc, name, self.node.rank, in_cleanup(failure))
            self.node.peers.get(self.config.owner).send(m.encode(fault))
        with self._halt_lock:
            self._halting -= 1
            self._stuck |= is_stuck(mailbox)
            last = self._halting == 0
        if last:
            self._end_process()

    def _end_process(self) -> None:
        if self._stuck:
            spawn_thread("monarch-exit", self._exit)
        else:
            last = LastSteps(self.node, self.main, self._halted_at, self._give_up)
            self.main.post(last.run)
            self.main.end()

    def _lose_message(self, _: BaseException) -> None:
        """End the process: who waits for its answer to a message that it cannot receive must hear that."""
        with contextlib.suppress(Exception):
            # Without memory, even telling an error may fail.
            self.outbox.flush()
        os.write(2, b"monarch: this rank has no memory left for a message, so it ends\n")
        os._exit(1)

    def _give_up(self, text: str) -> None:
        """End the process although a thread or an exit function still runs."""
        spawn_thread("monarch-exit", lambda: self._exit(text))

    def _exit(self, text: str = "") -> None:
        """End the process even though user code still runs.

        Args:
            text: why the exit functions are not run here; empty to run them.
        """
        timer = threading.Timer(_LAST_WORDS, self._exit_stopped)
        timer.name, timer.daemon = "monarch-exit-limit", True
        timer.start()
        if text:
            print(text, file=sys.stderr)
        else:
            exit_functions.run_functions()
        self.outbox.flush()
        self.node.close(linger_ms=1000)
        self._exit_stopped()

    def _exit_stopped(self) -> None:
        self.mark_stopped()
        os._exit(0)

    def mark_stopped(self) -> None:
        """Mark this end as requested, for the agent; a program that exits by itself does not come here."""
        with contextlib.suppress(OSError):
            # If the folder is gone or the disk is full, the agent still hears it from the owner.
            mark_stopped(self.node.folder, self.node.proc)

    def _on_level(self, level: m.Level) -> None:
        # Loggers may have user classes, and user code may hold the lock of logging. A running call is told in its
        # middle, and an actor that is about to take its next message, before that.
        self._log_level = level.level
        self.node.lanes.post("logging", self._set_log_level)
        for mailbox in list(actors_of(self.node).here.values()):
            mailbox.executor.post(self._set_log_level)

    def _set_log_level(self) -> None:
        logging.getLogger().setLevel(self._log_level)
        if not logging.getLogger().handlers:
            logging.basicConfig(level=self._log_level)


_this: Rank | None = None


@service("rank.assume", "quick")
def assume(procs: Procs, rank: int, port: int) -> None:
    """Service: turn this spare process into a replacement of a dead one."""
    assert _this is not None and _this.config.procs == procs
    _this.assume(rank, port)


def main(config: bytes) -> int:
    """Run a rank; ``config`` is its proc id, base rank, folder, and the configuration of its mesh."""
    proc, place, folder, packed = config.split(b"\0", 3)
    known: RankConfig = loads(packed)
    exit_functions.begin()
    global _this
    rank = _this = Rank(known, proc.decode(), int(place), folder.decode())
    interrupt = rank.interrupt
    harmless_idle.append(interrupt)
    signal.signal(signal.SIGINT, interrupt)
    leave_term_to_agent()
    listen()
    interruptible.install()
    raise_again_after_finalizers()
    gate.install(
        rank.in_call, rank.main.has_call, rank.is_busy, rank.node.receive_loop.receives_here, rank.awaiting_frame
    )
    take_breakpoints()
    sys.setswitchinterval(_SWITCH_S)
    watch_forks(signal.SIGINT, NOTICE, PAUSE)
    serve_in_forks()
    # Forget a node that the zygote's memory may hold.
    del config, packed
    rank.run()
    rank.mark_stopped()
    return 0
