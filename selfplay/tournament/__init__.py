"""Tournaments between frozen players: what is to be played, what was played, and what it says.

    spec ──► Scheduler ──Game──► (a pool plays it) ──► GameLog, one fsync'ed line each ──► standings ──► report

A game's id is a hash of all that decides it, so playing on after a crash never plays one twice.
"""
