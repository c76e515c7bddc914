"""Compression of stored blocks: what it saves, and the rates of one core.

Blocks of 64 tokens are compressed and decompressed by the codec of engines (``storage_codec``),
with the checksums of headers and sections, and beside it, without checksums, by Zstandard's levels
alone: on the blocks as they are, and on the planes of their bytes.  KV is that of a model
(``--model``) which reads a text of Python's documentation, else random numbers of a normal
distribution.  CPU time of one thread, kinds interleaved in every round; medians.

The last table is time on the clock: threads read the blocks, plain and compressed, from memory
behind an emulated storage NIC.  Compression pays at rates where its column is above the plain one.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import numpy as np
from backports import zstd

from dualpath.core.blocks import BlockGeometry, StoreNamespace, block_keys
from dualpath.core.settings import Setting, Settings
from dualpath.storage.block_file import FileOrder, PlainBlocks
from dualpath.storage.compression import CompressedBlocks, Compressor
from dualpath.storage.posix import PosixStorage
from dualpath.storage.wrapping import ThrottledStorage
from dualpath_sim.harness.experiment import Experiment, Measure, Page, RawData, Stage, one_stage
from dualpath_sim.harness.numbers import Column, Numbers, key_results, number_table

BLOCK_TOKENS = 64
CODEC = "storage_codec zstd"
KEY = bytes(32)
READERS = 4
#: Rates of the emulated storage NIC, in GB/s.
NIC_GB_PER_S = (0.1, 0.3, 1.0, 3.0)


class CodecSettings(Settings, frozen=True, kw_only=True):
    """The KV that is compressed."""

    model: Annotated[
        str,
        Setting("folder of a Hugging Face model that computes KV; empty: random", metavar="FOLDER"),
    ] = ""
    dtype: Annotated[str, Setting("type of the KV: bfloat16, float16 or float32")] = "bfloat16"
    blocks: Annotated[int, Setting("blocks of 64 tokens", ge=1)] = 16
    repeat: Annotated[int, Setting("rounds", ge=1)] = 5


def kv_of_model(folder: Path, dtype: str, blocks: int) -> tuple[BlockGeometry, list[bytes]]:
    """Return Full Blocks of a text: for each layer keys, then values, by token and head."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "\n".join(topics[name] for name in sorted(topics))
    tokens = AutoTokenizer.from_pretrained(folder)(text[: blocks * BLOCK_TOKENS * 16])
    ids = torch.tensor([tokens["input_ids"][: blocks * BLOCK_TOKENS]])
    kind = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind)
    with torch.inference_mode():
        cache = model(ids, use_cache=True).past_key_values
    layers = [
        torch.stack((layer.keys[0], layer.values[0])).transpose(1, 2).to(kind).view(torch.uint8)
        for layer in cache.layers
    ]
    found = []
    for block in range(ids.shape[1] // BLOCK_TOKENS):
        here = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
        found.append(b"".join(layer[:, here].contiguous().numpy().tobytes() for layer in layers))
    return BlockGeometry.uniform(len(layers), BLOCK_TOKENS, len(found[0]) // len(layers)), found


def planes(block: bytes, width: int) -> bytes:
    return np.frombuffer(block, np.uint8).reshape(-1, width).T.tobytes()


def kv_of(settings: CodecSettings) -> tuple[BlockGeometry, list[bytes]]:
    if settings.model:
        return kv_of_model(Path(settings.model), settings.dtype, settings.blocks)
    geometry = BlockGeometry.uniform(39, BLOCK_TOKENS, 1 << 16)
    rng = np.random.default_rng(0)

    def block() -> bytes:
        numbers = rng.standard_normal(geometry.full_block_bytes // 4 * 2, np.float32)
        if settings.dtype == "bfloat16":
            return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return numbers.astype(settings.dtype).tobytes()[: geometry.full_block_bytes]

    return geometry, [block() for _ in range(settings.blocks)]


def _kinds(
    settings: CodecSettings, geometry: BlockGeometry, blocks: list[bytes]
) -> dict[str, Callable[[], Numbers]]:
    width = 4 if settings.dtype == "float32" else 2
    size_bytes = sum(map(len, blocks))
    order, codec = FileOrder(geometry), CompressedBlocks(PlainBlocks("0" * 16), Compressor())
    memory = memoryview(bytearray(geometry.full_block_bytes))

    def own() -> Numbers:
        stored, in_s, out_s = 0, 0.0, 0.0
        for block in blocks:
            began_s = time.thread_time()
            header, *parts = codec.encoded(KEY, order.of(memoryview(block)))
            in_s += time.thread_time() - began_s
            file = b"".join(parts)
            stored += len(file)
            began_s = time.thread_time()
            memory[: len(file)] = file
            assert codec.defect(KEY, header, order.of(memory)) is None
            out_s += time.thread_time() - began_s
            assert memory == block, "a block differs after decompression"
        return _numbers(size_bytes, stored, in_s, out_s)

    def library(level: int, split: int) -> Numbers:
        stored, in_s, out_s = 0, 0.0, 0.0
        for block in blocks:
            content = planes(block, split)
            began_s = time.thread_time()
            frame = zstd.compress(content, level)
            in_s += time.thread_time() - began_s
            stored += len(frame)
            began_s = time.thread_time()
            zstd.decompress(frame)
            out_s += time.thread_time() - began_s
        return _numbers(size_bytes, stored, in_s, out_s)

    return {
        CODEC: own,
        "Zstandard level 1": lambda: library(1, 1),
        "planes, Zstandard level 1": lambda: library(1, width),
        "planes, Zstandard level 3": lambda: library(3, width),
    }


def _numbers(size_bytes: int, stored_bytes: int, in_s: float, out_s: float) -> Numbers:
    return {
        "ratio": size_bytes / stored_bytes,
        "in_gb_per_s": size_bytes / in_s / 1e9,
        "out_gb_per_s": size_bytes / out_s / 1e9,
    }


def _reads(geometry: BlockGeometry, blocks: list[bytes]) -> Stage[float, Numbers]:
    """Read plain and compressed blocks behind each storage NIC, in turn."""
    namespace = StoreNamespace("benchmark", "bfloat16", "NHD", geometry)
    keys = block_keys(range(4 * len(blocks) * BLOCK_TOKENS), BLOCK_TOKENS)
    sources = [memoryview(block) for block in blocks] * 4

    @contextmanager
    def open_storages() -> Iterator[Measure[float, Numbers]]:
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm") as root,
            ThreadPoolExecutor(READERS) as pool,
        ):
            storages = {
                "plain_gb_per_s": PosixStorage(f"{root}/plain", namespace),
                "compressed_gb_per_s": PosixStorage(
                    f"{root}/compressed", namespace, compressor=Compressor()
                ),
            }
            for storage in storages.values():
                storage.write(keys, sources)

            def run(nic_gb_per_s: float, number: int) -> Numbers:
                found = {}
                for name, storage in storages.items():
                    throttled = ThrottledStorage(storage, nic_gb_per_s * 1e9)

                    def read(first: int, behind: ThrottledStorage = throttled) -> None:
                        into = memoryview(bytearray(geometry.full_block_bytes))
                        for key in keys[first::READERS]:
                            assert behind.read(key, into).is_good

                    began_s = time.perf_counter()
                    list(pool.map(read, range(READERS)))
                    passed_s = time.perf_counter() - began_s
                    found[name] = len(keys) * geometry.full_block_bytes / passed_s / 1e9
                return found | {"gain": found["compressed_gb_per_s"] / found["plain_gb_per_s"]}

            yield run

    return Stage({f"NIC of {rate:g} GB/s": rate for rate in NIC_GB_PER_S}, open_storages)


def _stages(settings: CodecSettings, progress: object) -> list[Stage[Any, Numbers]]:
    geometry, blocks = kv_of(settings)
    kinds = one_stage(_kinds(settings, geometry, blocks), lambda measure, number: measure())
    return [*kinds, _reads(geometry, blocks)]


def draw(raw: RawData[CodecSettings, Numbers]) -> Page:
    """Draw ratio and rates of one core, and reads behind each storage NIC."""
    columns = [
        Column("ratio", "ratio", "{:.3f}", tolerance=0.02),
        Column("in, GB/s", "in_gb_per_s", "{:.2f}", tolerance=0.3),
        Column("out, GB/s", "out_gb_per_s", "{:.2f}", tolerance=0.3),
    ]
    settings = raw.settings
    what = f"KV of {Path(settings.model).name}" if settings.model else "random numbers"
    title = f"{settings.dtype} {what}, {settings.blocks} blocks of {BLOCK_TOKENS} tokens, one core"
    reads = [
        Column("plain, GB/s of KV", "plain_gb_per_s", "{:.2f}"),
        Column("compressed, GB/s of KV", "compressed_gb_per_s", "{:.2f}"),
        Column("compressed / plain", "gain", "{:.2f}", tolerance=0.3),
    ]
    cores = len(os.sched_getaffinity(0))
    reading = f"{READERS} threads read on {cores} cores"
    return Page(
        tables=(
            number_table(raw, title, columns, "compression"),
            number_table(raw, reading, reads, "storage"),
        ),
        results=tuple(key_results(raw, [*columns, *reads])),
    )


STORAGE_CODEC = Experiment(
    name="storage-codec",
    title="Compression of stored blocks",
    settings=CodecSettings(),
    result=Numbers,
    stages=_stages,
    draw=draw,
)
