"""A game with one fault at a time, chosen by the parameter ``kind``: what ``selfplay env check`` must find, and training survive."""

import os
import random
import subprocess
import sys
import threading
import time
from typing import ClassVar

from selfplay import Environment


class Faulty(Environment):
    """Six moves in turn, x or y; a coin decides who won."""

    seats = ("a", "b")
    shared: ClassVar[list] = []
    at_the_table: ClassVar[list] = []

    def __init__(self, rng, kind: str = ""):
        super().__init__(rng)
        self.n, self.kind, self.coin, self.junk = 0, kind, rng.random(), ""
        self.concurrent = kind != "alone"
        if kind == "alone":
            self.shared = []  # whatever games of other kinds have left there
            if self.at_the_table:
                raise RuntimeError("the one table of this process is taken")
            self.at_the_table.append(self)

    def to_move(self):
        if self.kind == "simultaneous-leak":
            return list(self.seats) if self.n < 3 else []
        return [self.seats[self.n % 2]] if self.n < 6 or self.kind == "endless" else []

    def view(self, seat):
        if self.kind == "growing-view":
            self.junk += "x"
        words = {"leak": f"coin {self.coin}", "surrogate": "x\ud83d y", "hash-seed": str({"aa", "bb", "cc", "dd"})}
        return f"move {self.n} of {len(self.shared)} {words.get(self.kind, '')} {self.junk}"

    def private(self, seat):
        return None if self.kind == "undeclared" else ""

    def transcript(self):
        return str(self.n)

    def legal_moves(self, seat):
        return ["x", "y", "Y"] if self.kind == "ambiguous" else ["x", "y"]

    def parse(self, seat, text):
        if self.kind == "slow-parse" and len(text) > 10_000:
            time.sleep(1.2)
        if self.kind == "simultaneous-leak":
            self.junk = f"{seat} said {text[:5]}"
        if self.kind == "ambiguous":
            return super().parse(seat, text.lower())
        if self.kind == "lenient":
            return text
        return super().parse(seat, text)

    def step(self, moves):
        self.n += 1
        fault = getattr(self, f"_{self.kind.replace('-', '_')}", None)
        if fault is not None:
            fault()

    def _raise(self):
        if self.n == 3:
            raise ValueError("bad card 53")

    def _die(self):
        if self.n == 3:
            os._exit(7)

    def _sleep(self):
        if self.n == 3:
            time.sleep(1e6)

    def _print(self):
        print("hello " * 100)

    def _raw_print(self):
        os.write(1, b"raw!")

    def _thread(self):
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()

    def _fork(self):
        if self.n == 3 and os.fork() == 0:
            time.sleep(60)
            os._exit(0)

    def _process(self):
        if self.n == 3:
            self.shared.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)

    def _memory(self):
        self.shared.append(bytearray(1 << 20))

    def _random(self):
        self.coin = random.random()

    def _numpy(self):
        import numpy

        self.coin = numpy.random.rand()

    def _shared(self):
        self.shared.append(1)

    def close(self):
        if self in self.at_the_table:
            self.at_the_table.remove(self)
        if self.kind == "close":
            raise OSError("cannot close")

    def outcome(self):
        if self.kind == "rare" and self.coin < 0.1:
            raise NameError("the branch of the draw")
        outcome = self.win("a" if self.coin < 0.5 else "b")
        if self.kind == "nan":
            outcome.rewards["a"] = float("nan")
        if self.kind == "sum":
            outcome.rewards.update(a=1.0, b=1.0)
        return outcome
