"""Malformed stored blocks, sealed."""

import msgspec

from dualpath.core.blocks import Protection
from dualpath.storage.block_file import BlockCodec
from dualpath.storage.sealed_blocks import KeyRing, SealedBlocks
from dualpath_lab.faults.fuzz.files import BlockSubject
from dualpath_lab.faults.fuzz.inputs import Inputs

_KEYS, _OTHER_KEYS = (KeyRing(digit * 64, "the fuzzer") for digit in "01")


class SealedBlockSubject(BlockSubject):
    """Encrypted blocks, some of them sealed with another key."""

    namespace = msgspec.structs.replace(BlockSubject.namespace, protection=Protection.ENCRYPTED)
    keys = _KEYS
    fields_bytes = 236

    def form(self, digest: str, inputs: Inputs) -> BlockCodec:
        """See ``BlockSubject``; random bytes of the seal are part of the input."""
        keys = _OTHER_KEYS if inputs.chance(0.1) else _KEYS
        return SealedBlocks(digest, Protection.ENCRYPTED, keys, inputs.random.randbytes)
