"""Moving adapter versions from trainer rank 0 to the engines: buckets, transports, background receiving.

Importing this package imports torch.
"""

from selfplay.sync.bucket import Bucket, DtypeName, TransportName, check_header, pack, unpack, verify
from selfplay.sync.peft_folder import save_adapter
from selfplay.sync.staging import Staging
from selfplay.sync.transports import Receiver, Sender, make_receiver, make_sender

__all__ = [
    "Bucket",
    "DtypeName",
    "Receiver",
    "Sender",
    "Staging",
    "TransportName",
    "check_header",
    "make_receiver",
    "make_sender",
    "pack",
    "save_adapter",
    "unpack",
    "verify",
]
