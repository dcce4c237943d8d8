"""Settings of the port at which environment pools of other processes and hosts join a run."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class RemoteConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Remote environment pools: who may join, and where."""

    listen: Annotated[
        str, Meta(description="tcp://HOST:PORT at which pools join (selfplay pool --connect); port 0: any; empty: none")
    ] = ""
    key: Annotated[
        str, Meta(description="the run's .key_secret file (selfplay pool keys); empty: made in the run folder")
    ] = ""
    allow: Annotated[
        str, Meta(description="folder of the .key files of pools that may join; empty: keys/allowed in the run folder")
    ] = ""
    max_slots: Annotated[int, Meta(ge=1, le=100000, description="games at once that one pool may hold")] = 64
    silence_s: Annotated[
        float, Meta(gt=0, description="a pool that is not heard of for so long is gone, and what it held played again")
    ] = 15.0
