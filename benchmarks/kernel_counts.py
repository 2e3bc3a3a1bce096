"""Count what each Triton kernel takes of a GPU that need not be there, and say what that allows.

    python benchmarks/kernel_counts.py [--only TEXT] [--capability 80|90|100 ...]

Of every configuration (or those with TEXT in their line): instructions of a warp for a tile by kind, bytes that the block
asks of memory, registers, shared memory, blocks on a multiprocessor; and how long a tile takes the whole device if nothing
but its tensor cores, its issue slots or its memory kept it. A tile is one turn of the main loop, or the program where there
is none. A block of the loop that a branch can skip, such as the masks of a sequence's last keys, is taken to be skipped.

Tiles of a matrix product are read by many blocks and mostly from the cache: what memory would take for all of them is
printed, and not held to be the slowest. Products of sm_100 do not say their sizes, and no time is given there.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster.devices import Device, device_named
from kernels import ahead_of_time

DEVICES = {80: "A100-SXM-80GB", 90: "H100-SXM-80GB", 100: "B200-SXM-180GB"}
"""Of each compute capability, the one that times are given for."""

# Of a multiprocessor, from the CUDA C++ Programming Guide: the same for all three.
_REGISTERS, _WARPS, _BLOCKS, _SCHEDULERS = 65536, 64, 32, 4
_SHARED_KIB = {80: 164, 90: 228, 100: 228}

# Opcodes of NVIDIA's machine code.
_KINDS = {
    "tensor": r"HGMMA|HMMA|QGMMA|UTC\w*MMA",
    "float": r"F(ADD|MUL|FMA|MNMX|SEL|SETP|2FP)\w*|H(ADD|MUL|FMA)2\w*|DADD|DMUL|DFMA",
    "special": r"MUFU|F2F|F2I|I2F\w*",
    "shared": r"LDS\w*|STS\w*|ATOMS|LDT\w*|STT\w*|SHFL",
    "global": r"LDG\w*|STG|RED\w*|ATOMG?|UTMA\w*",
    "control": r"BRA|BAR|EXIT|NOP|WARP\w*|DEPBAR|SYNCS|BSSY|BSYNC|CALL|RET|FENCE|MEMBAR|ERRBAR|YIELD|CCTL",
}  # what is none of these is integer and address arithmetic
# A line of nvdisasm: address, predicate, opcode with modifiers, operands.
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z]\S*)(.*);")
_TARGET = re.compile(r"\((\.L_x_\d+)\)")


@dataclass(frozen=True)
class Tile:
    """Instructions that a warp executes for a tile, and the block with it."""

    instructions: tuple[str, ...]
    """Opcodes with their modifiers, such as ``HGMMA.64x64x16.F32.BF16``."""
    warps: int

    def by_kind(self) -> dict[str, int]:
        """Number of instructions of each kind; ``integer`` is the rest."""
        counts = Counter(_kind(each) for each in self.instructions)
        return {kind: counts[kind] for kind in (*_KINDS, "integer")}

    def flops(self) -> float | None:
        """Operations of the block's matrix products; None where their sizes are not in the instructions."""
        total = 0
        for each in self.instructions:
            if _kind(each) == "tensor":
                warpgroup, warp = re.match(r"[HQ]GMMA\.(\d+)x(\d+)x(\d+)", each), re.match(r"HMMA\.16816", each)
                if not (warpgroup or warp):
                    return None
                sizes = map(int, warpgroup.groups()) if warpgroup else (16, 8, 16)  # HMMA.16816
                total += 2 * prod(sizes) * self.warps // (4 if warpgroup else 1)  # four warps issue one together
        return total

    def bytes(self) -> int:
        """Bytes that the block's threads load from memory and store to it, if none is masked."""
        # Without a width an access has 32 bits.
        widths = [re.search(r"\.[US]?(8|16|64|128)\b", each) for each in self.instructions if _kind(each) == "global"]
        # 32 threads of a warp, each of so many bytes.
        return sum(int(width[1]) if width else 32 for width in widths) // 8 * 32 * self.warps


def _kind(instruction: str) -> str:
    opcode = instruction.partition(".")[0]
    return next((kind for kind, pattern in _KINDS.items() if re.fullmatch(pattern, opcode)), "integer")


def main_loop(sass: str) -> list[str]:
    """Return the instructions of one turn of a kernel's main loop; of all of it where there is none.

    That is the shortest loop with a matrix product, else with a load from memory.
    """
    found, labels = [], {}
    for line in sass.splitlines():
        if label := re.fullmatch(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(found)
        elif instruction := _INSTRUCTION.search(line):
            found.append((instruction[2], instruction[3]))
    jumps = [
        (place, labels[target[1]])
        # Branches to labels of this kernel; calls and returns are none of a loop.
        for place, (opcode, operands) in enumerate(found)
        if opcode.startswith("BRA") and (target := _TARGET.search(operands)) and target[1] in labels
    ]
    opcodes = [opcode for opcode, _ in found]
    # A jump back is a loop, from its target to itself.
    loops = [range(start, place + 1) for place, start in jumps if start < place]
    for wanted in ("tensor", "global"):
        # The shortest: an outer loop holds the inner one, and would count its instructions once.
        chosen = [loop for loop in loops if any(_is_source(opcodes[place], wanted) for place in loop)]
        if chosen:
            loop = min(chosen, key=len)
            # A jump forward inside of the loop skips what lies between: taken as skipped (see above).
            skipped = {
                each for place, to in jumps if place in loop and place < to in loop for each in range(place + 1, to)
            }
            return [opcodes[place] for place in loop if place not in skipped]
    return opcodes


def _is_source(opcode: str, wanted: str) -> bool:
    # A store writes results, and is no sign of the loop that reads tiles.
    return _kind(opcode) == wanted and not opcode.startswith("STG")


def blocks(registers: int, shared: int, warps: int, capability: int) -> int:
    """Return how many blocks are on a multiprocessor at once; registers are given out to warps by 256."""
    by_registers = _REGISTERS // (ceil(registers * 32 / 256) * 256 * warps)
    by_shared = _SHARED_KIB[capability] * 1024 // (shared + 1024)  # the system takes 1 KiB of each
    return min(by_registers, by_shared, _WARPS // warps, _BLOCKS)


def nanoseconds(tile: Tile, device: Device) -> dict[str, float] | None:
    """Return how long a tile takes the whole device by tensor cores, issue slots and memory alone; None if unknown."""
    flops = tile.flops()
    if flops is None or device.multiprocessors is None or device.clock_ghz is None:
        return None
    # A scheduler issues one instruction a cycle.
    issued = len(tile.instructions) * tile.warps / _SCHEDULERS
    return {
        "tensor": flops / device.bf16_tflops / 1e3,
        "issue": issued / device.clock_ghz / device.multiprocessors,
        "memory": tile.bytes() / device.memory_gb_s,
    }


def disassembled(cubin: bytes) -> str:
    """Return a kernel's machine code as text, by the tool that comes with Triton."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(cubin)
        binary.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", binary.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def lines(only: str, capabilities: Iterable[int]) -> Iterable[str]:
    """Compile what is asked for, and yield a line for each."""
    for module, configurations in ahead_of_time.all_configurations().items():
        for chosen in configurations:
            for capability in capabilities:
                name = f"{module}: {chosen.kernel.__name__}, {chosen.name}, sm_{capability}"
                if capability not in chosen.capabilities or only not in name:
                    continue
                # The worse of two compilations; the instructions below are those of aligned pointers.
                cost = ahead_of_time.cost(module, chosen, capability)
                cubin = ahead_of_time.compiled(chosen, capability, ("*",)).asm["cubin"]
                tile = Tile(tuple(main_loop(disassembled(cubin))), chosen.num_warps)
                yield line(name, tile, cost)


def line(name: str, tile: Tile, cost: ahead_of_time.Cost) -> str:
    """Return what is known of a kernel in a line."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in tile.by_kind().items() if count)
    fit = blocks(cost.registers, cost.shared, cost.num_warps, cost.capability)
    memory = f"{cost.registers} registers, {cost.shared / 1024:.1f} KiB, {fit} blocks of {cost.num_warps} warps"
    text = f"{name}: {len(tile.instructions)} instructions ({kinds}), {tile.bytes():,} bytes; {memory}"
    times = nanoseconds(tile, device_named(DEVICES[cost.capability]))
    if times is None:
        return text
    flops = tile.flops()
    # Memory is no limit for products: their tiles come from the cache.
    slowest = max(("tensor", "issue") if flops else times, key=lambda part: times[part])
    rates = ", ".join(f"{part} {time:.2f}" for part, time in times.items())
    rate = f", {flops / times[slowest] / 1e3:.0f} TFLOP/s" if flops else ""
    return f"{text}; ns a tile: {rates}; {slowest} allows {times[slowest]:.2f}{rate}"


def main(arguments: Sequence[str]) -> int:
    """Print the lines; 2 where there is nothing to compile with, or nothing that was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", default="", help="part of the lines that are wanted, such as 'forward, large, dropout'"
    )
    parser.add_argument("--capability", type=int, nargs="+", choices=DEVICES, default=list(DEVICES))
    chosen = parser.parse_args(arguments)
    printed = 0
    try:
        for text in lines(chosen.only, chosen.capability):
            print(text, flush=True)
            printed += 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not printed:
        print(f"error: no configuration has {chosen.only!r} in its name", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
