"""A thread on every rank that knows who is alive and what each rank is doing.

Every rank publishes a counter (its pulse) and its current step in the store. A rank whose pulse stands
still for `DEAD_S` is gone or frozen; one whose pulse beats while its step stays behind hangs. Main
threads ask `verdict` when a collective fails; if they are themselves stuck in one, the watch ends the
process, because nothing else can.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

BEAT_S = 0.5
DEAD_S = 10.0
"""Twenty missed beats: longer than a busy machine keeps a thread waiting. Judgement."""
STUCK_S = 5.0
"""How long a main thread may take to notice by itself that a rank is gone."""
FAILED = 1


class Watch(threading.Thread):
    """The pulses of all ranks."""

    def __init__(self, store: dist.Store, *, rank: int, hosts: Sequence[str]) -> None:
        super().__init__(daemon=True, name="tpplan-watch")
        self._store, self._rank, self._hosts = store, rank, hosts
        self._over = threading.Event()
        self._step, self._what = 0, "starting"
        others = [other for other in range(len(hosts)) if other != rank]
        self._seen: dict[int, tuple[str, float]] = dict.fromkeys(others, ("", time.monotonic()))
        """The last pulse of every other rank and when it was new, until it takes its leave."""
        self._steps: dict[int, tuple[int, str]] = dict.fromkeys(others, (0, "starting"))
        self._failed: dict[int, str] = {}
        """What ranks said that ended by themselves with an error of their own."""
        self.store_lost = False
        self.hint = ""
        """Added to every message, such as where the measurements are kept."""

    def doing(self, what: str) -> None:
        """This rank begins its next step."""
        self._step, self._what = self._step + 1, what

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self.join(2 * BEAT_S)

    def hear_out(self, ending: signal.Signals) -> None:
        """A launcher that lost a rank ends the others with a signal: say whose fault it is before going."""

        def say(number: int, frame: object) -> None:
            if not self._over.is_set():
                raise RuntimeError(f"stopped by {signal.Signals(number).name}")

        if threading.current_thread() is threading.main_thread():
            signal.signal(ending, say)

    def leave(self, problem: str) -> None:
        """This rank fails for a reason of its own: tell the others."""
        self._over.set()
        self._take_leave(problem)

    def run(self) -> None:
        """Beat, look at the others, and end the process if the main thread cannot."""
        beat = 0
        while not self._over.wait(BEAT_S):
            beat += 1
            try:
                self._beat(beat)
                self._look()
            except RuntimeError:
                if self._over.is_set():
                    return
                self.store_lost = True
            lost_since = self._gone(time.monotonic() - STUCK_S)
            if lost_since and not self._over.is_set():
                self._end(self._sentence(lost_since))
            if self.store_lost:
                self._over.wait(STUCK_S)
                if not self._over.is_set():
                    self._end(self._lost_store())

    def _end(self, words: str) -> None:
        print(f"tpplan: error: {words}", file=sys.stderr, flush=True)
        os._exit(FAILED)

    def verdict(self, problem: str) -> str:
        """Who is to blame for `problem`: waits until a pulse has stood still long enough to tell."""
        self._over.set()  # from here on the main thread speaks
        words = self._judge(problem)
        self._take_leave()
        return words

    def _judge(self, problem: str) -> str:
        """A pulse that stands still tells soonest; else whoever is behind; else whoever noticed nothing."""
        deadline = time.monotonic() + DEAD_S + 2 * BEAT_S
        try:
            self._store.set(f"waiting/{self._rank}", "")
            while time.monotonic() < deadline:
                self._beat(time.monotonic_ns())
                self._look()
                if gone := self._gone(time.monotonic()):
                    return self._sentence(gone)
                time.sleep(BEAT_S)
            suspects = self._behind() or self._unaware()
        except RuntimeError:
            return self._lost_store()
        if suspects:
            return self._hanging(suspects)
        return f"rank {self._rank} ({self._hosts[self._rank]}): {problem}; {self._place()}"

    def _beat(self, beat: int) -> None:
        self._store.set(f"pulse/{self._rank}", json.dumps([beat, self._step, self._what]))

    def _take_leave(self, problem: str = "") -> None:
        """Let nobody mistake this rank for the dead one; rank 0 may keep the store, so it goes last."""
        others = [f"left/{rank}" for rank in self._seen if rank not in self._gone(time.monotonic())]
        deadline = time.monotonic() + DEAD_S + STUCK_S
        try:
            self._store.set(f"left/{self._rank}", problem)
            while self._rank == 0 and time.monotonic() < deadline and not self._store.check(others):
                time.sleep(BEAT_S)
        except RuntimeError:
            return

    def _look(self) -> None:
        now = time.monotonic()
        for rank in list(self._seen):
            key = f"pulse/{rank}"
            if self._store.check([f"left/{rank}"]):
                self._leaves(rank, now)
                continue
            if not self._store.check([key]):
                continue
            text = self._store.get(key).decode()
            if self._seen[rank][0] != text:
                _, step, what = json.loads(text)
                self._seen[rank] = (text, now)
                self._steps[rank] = (step, what)

    def _leaves(self, rank: int, now: float) -> None:
        """A rank ended: to blame if it failed for a reason of its own, else only following another."""
        problem = self._store.get(f"left/{rank}").decode()
        if not problem:
            self._seen.pop(rank, None)
        elif rank not in self._failed:
            self._failed[rank] = problem
            self._seen[rank] = ("left", now - DEAD_S)

    def _gone(self, now: float) -> list[int]:
        return [rank for rank, (_, seen) in sorted(self._seen.items()) if now - seen > DEAD_S]

    def _behind(self) -> list[int]:
        return [rank for rank, (step, _) in sorted(self._steps.items()) if step < self._step]

    def _unaware(self) -> list[int]:
        """Ranks that are alive but do not miss anybody: the others wait for them."""
        return [rank for rank in sorted(self._seen) if not self._store.check([f"waiting/{rank}"])]

    def _sentence(self, ranks: Sequence[int]) -> str:
        ends = (
            f"failed: {self._failed[rank]}" if rank in self._failed else "died or froze" for rank in ranks
        )
        who = " and ".join(
            f"rank {rank} ({self._hosts[rank]}) {end}" for rank, end in zip(ranks, ends, strict=True)
        )
        return f"{who}; {self._place()}"

    def _hanging(self, ranks: Sequence[int]) -> str:
        who = " and ".join(
            f"rank {rank} ({self._hosts[rank]}), which is still at: {self._steps[rank][1]}" for rank in ranks
        )
        return f"no answer from {who}; {self._place()}"

    def _lost_store(self) -> str:
        return f"rank 0 ({self._hosts[0]}), which hosts the rendezvous, is gone; {self._place()}"

    def _place(self) -> str:
        return f"rank {self._rank} ({self._hosts[self._rank]}) was at: {self._what}{self.hint}"
