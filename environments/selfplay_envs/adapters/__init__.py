"""Games of other libraries as environments: ``pettingzoo:``, ``openspiel:``, ``textarena:`` and ``gym:`` ids.

Each module holds one adapter, found through the entry-point group ``selfplay.adapters``; its library is imported when a
game is asked for. How numbers become text and text becomes a move is a `TextForm`, one small class per game where the
default does not read well; replace it by subclassing the game's class and setting ``form``.
"""
