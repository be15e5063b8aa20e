"""The wait for the hosts of a launcher, and the news that it shows."""

from __future__ import annotations

import time
from collections.abc import Callable

from monarch._procs.launch.interface import Environment, Failed, Installing, Joined, Launch, News, Queued, Starting
from monarch._session.session import Session
from monarch.exceptions import ArgumentError, SpawnError

STEP_S = 1.0
"""The longest wait for news, in seconds."""
_GRACE_S = 10.0
"""Seconds to wait for the other hosts when enough have joined."""

Tell = Callable[[str, bool], None]
"""Shows a line about the wait, and whether it still matters after it."""


def check_counts(count: int, at_least: int | None, spare: int) -> None:
    """Compare numbers of hosts; a count of 0 is not known yet."""
    if count and at_least is not None and at_least > count:
        raise ArgumentError(
            f"at least {at_least} hosts are needed to start, but only {count} requested; request {at_least} or more, "
            f"or lower the minimum to {count}"
        )
    fewest = count if at_least is None else at_least
    if fewest and spare >= fewest:
        few = f"at least {fewest}" if at_least is not None else str(fewest)
        raise ArgumentError(
            f"{spare} spare {'host' if spare == 1 else 'hosts'} of {few} would leave none for ranks; "
            f"{f'keep at most {fewest - 1} spare, or ' if fewest > 1 else ''}request more hosts"
        )


def wait_for_hosts(
    session: Session, launch: Launch, at_least: int | None, timeout: float | None, tell: Tell
) -> tuple[list[Joined], dict[str, Failed]]:
    """Return the hosts that have joined, in their order, and those that have failed, by name.

    Args:
        session: the session of this program.
        launch: that of the hosts.
        at_least: see ``launch_hosts``.
        timeout: likewise.
        tell: likewise.

    Raises:
        SpawnError: too few have.
    """
    joined: list[Joined] = []
    failed: list[Failed] = []
    needed = launch.expected if at_least is None else min(at_least, launch.expected)
    begun = enough = time.monotonic()
    while len(joined) + len(failed) < launch.expected:
        now = time.monotonic()
        if at_least is not None and len(joined) >= needed and now > enough + _GRACE_S:
            break
        if timeout is not None and now > begun + timeout:
            if len(joined) >= needed:
                break
            raise SpawnError(f"only {len(joined)} of {launch.expected} hosts joined within {timeout:g} s")
        for news in launch.watch(STEP_S):
            if isinstance(news, Joined):
                joined.append(news)
                enough = time.monotonic() if len(joined) <= needed else enough
                # A worker has not answered yet.
                if news.listening.src:
                    tell(f"joined {len(joined)} of {launch.expected}: {news.host}", False)
            elif isinstance(news, Failed):
                if all(_sentence(each) != _sentence(news) for each in failed):
                    tell(f"failed: {_sentence(news)}", True)
                failed.append(news)
            else:
                if isinstance(news, Starting) and launch.agent_here:
                    # The agent of this host imports torch too, so let it begin at the same time.
                    session.need_agent()
                for line in describe_news(news):
                    tell(line, False)
                if isinstance(news, Environment):
                    for remark in news.remarks:
                        tell(f"warning: {news.host}: {remark}", True)
    if failed and len(joined) < needed:
        raise SpawnError("\n".join(dict.fromkeys(_sentence(each) for each in failed)))
    return sorted(joined, key=lambda each: each.index), {each.host: each for each in failed}


def _sentence(failed: Failed) -> str:
    advice = f"; {failed.advice}" if failed.advice else ""
    # Agents of this machine, and hosts that a scheduler has not named.
    if not failed.host or failed.host.startswith("a host agent"):
        return f"{failed.host} {failed.reason}{advice}".strip()
    named = failed.host if failed.host.startswith("Ray host ") else f"host {failed.host}"
    return f"{named}: {failed.reason}{advice}"


def describe_news(news: News) -> list[str]:
    """Return lines about a step of the wait."""
    if isinstance(news, Queued):
        parts = [f"queued: {news.what}"]
        parts += [f"{news.ahead} pending ahead of it"] if news.ahead is not None else []
        parts += [f"expected start {time.strftime('%H:%M', time.localtime(news.start))}"] if news.start else []
        return [", ".join(parts) + (f" ({news.reason})" if news.reason else "")]
    if isinstance(news, Starting):
        return [f"starting: {news.host}"]
    if isinstance(news, Installing):
        return [f"installing {news.what} on {news.host or 'a host'} ({news.by})"]
    if isinstance(news, Environment):
        return [f"environment of {news.host}: Python {news.python}, torch {news.torch or '(unknown version)'}"]
    return []
