"""Exact evaluation: a small game's whole tree, what a policy is worth on it, and how far from unbeatable it is.

tree = build_tree("kuhn-poker-v0")
report = await exploitability(tree, score)       # score: a served model; see `exploit.Scorer`
report.headline, report.as_played.nash_conv
"""

from selfplay.evaluation.exploit import ExploitReport, Scorer, exploitability
from selfplay.evaluation.solve import Policy, Solution, solve, uniform_policy
from selfplay.evaluation.tree import GameTree, build_tree

__all__ = [
    "ExploitReport",
    "GameTree",
    "Policy",
    "Scorer",
    "Solution",
    "build_tree",
    "exploitability",
    "solve",
    "uniform_policy",
]
