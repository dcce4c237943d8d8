"""Playing one game: the loop that turns an environment, players and a match into an `Episode`."""

from selfplay.play.jury import ApiJury, FixedJury, Jury, PolicyJury
from selfplay.play.loop import play
from selfplay.play.seating import sit_down
from selfplay.play.text import clean, printable

__all__ = ["ApiJury", "FixedJury", "Jury", "PolicyJury", "clean", "play", "printable", "sit_down"]
