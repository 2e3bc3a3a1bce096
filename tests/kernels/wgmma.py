"""Search the machine code of kernels for sm_90 for registers that change while a matrix product still uses them.

The instruction ``HGMMA`` returns before it has read its left operand from registers and has written its accumulator.
Until the kernel waits, no other instruction may write these registers. The compiler inserts the waits and chooses the
registers. ptxas 12.8.93, which Triton 3.6 and 3.7 use for sm_90, does this wrong in some kernels that have an operand in
registers, as all attention kernels do (github.com/triton-lang/triton/pull/11781).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from kernels.configuration import Configuration

WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
"""The instruction that waits for all asynchronous products."""

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@\S+ )?([A-Z][\w.]*) *([^;]*?) *;", re.M)
_LEFT_REGISTERS = 4  # registers per thread: 128 threads hold 64 rows of 32 bytes
_WITHOUT_RESULT = ("BAR", "FCHK", "NANOSLEEP", "WARPSYNC")  # their first operand is only read


class _Instruction(NamedTuple):
    address: int
    predicated: bool
    code: list[str]
    """Name and modifiers, for example ``["LDG", "E", "128"]``."""
    operands: list[str]

    def __str__(self) -> str:
        return f"{self.address:#x} {'.'.join(self.code)} {', '.join(self.operands)}".rstrip()

    @property
    def is_product(self) -> bool:
        return self.code[0].endswith("GMMA")

    @property
    def waits(self) -> bool:
        return not self.predicated and str(self).endswith(WAIT)


def hazards(disassembly: str) -> tuple[int, list[str]]:
    """Return the number of asynchronous products in a disassembly by cuobjdump, and a description of each hazard."""
    instructions = [
        _Instruction(int(address, 16), bool(predicate), code.split("."), re.split(r",\s*", operands))
        for address, predicate, code, operands in _INSTRUCTION.findall(disassembly)
    ]
    places = {each.address: place for place, each in enumerate(instructions)}
    if len(places) < len(instructions):
        raise ValueError("the disassembly has several functions, expected one")
    following = [_following(each, place, places) for place, each in enumerate(instructions)]
    products = [place for place, each in enumerate(instructions) if each.is_product]
    return len(products), [found for place in products for found in _hazards_of(place, instructions, following)]


def variants(configurations: Iterable[Configuration]) -> Iterator[Configuration]:
    """Vary attention's configurations for sm_90 by type and head size, because each has registers of its own."""
    for plain in configurations:
        if plain.kernel.__name__.startswith("attention_") and 90 in plain.capabilities and "last" not in plain.name:
            signature = {name: kind.replace("bf16", "fp16") for name, kind in plain.signature.items()}
            both = plain, replace(plain, name=f"{plain.name}, fp16", signature=signature)
            yield both[1]
            if plain.constexprs["HEAD_SIZE"] == 32:
                narrow = plain.constexprs | {"HEADS": 8, "HEAD_SIZE": 16}  # the strides stay the same
                yield from (replace(each, name=f"{each.name}, E = 16", constexprs=narrow) for each in both)


def _hazards_of(start: int, instructions: list[_Instruction], following: list[list[int]]) -> Iterator[str]:
    """Follow all paths from a product to the next wait, and describe the writes to the product's registers."""
    product = instructions[start]
    left, accumulator = _left(product), _written(product)
    seen, ahead = set(), list(following[start])
    while ahead:
        place = ahead.pop()
        each = instructions[place]
        if place in seen or each.waits:
            continue
        seen.add(place)
        # The tensor cores execute products in order, so a product may add to the accumulator of an earlier one.
        needed = left if each.is_product else left | accumulator
        if needed & _written(each):
            yield f"{each} writes a register that {product} needs"
        ahead += following[place]


def _following(each: _Instruction, place: int, places: dict[int, int]) -> list[int]:
    """Return the places of the instructions that may be executed after this one."""
    after = [place + 1] if place + 1 < len(places) else []
    if each.code[0] in ("BRX", "JMP", "JMX"):
        raise ValueError(f"cannot follow the jump {each}")
    if each.code[0] in ("EXIT", "RET"):
        return after if each.predicated else []
    if each.code[0] in ("BRA", "CALL"):
        always = each.code == ["BRA"] and not each.predicated and len(each.operands) == 1
        return [places[int(each.operands[-1], 16)], *([] if always else after)]
    return after


def _left(product: _Instruction) -> set[int]:
    """Return the registers of a product's left operand, which may also be in shared memory."""
    return _registers(product.operands[1], _LEFT_REGISTERS)


def _written(each: _Instruction) -> set[int]:
    if each.code[0] in _WITHOUT_RESULT:
        return set()
    predicate_first = re.fullmatch(r"U?P[0-6T]", each.operands[0]) and len(each.operands) > 1
    return _registers(each.operands[1 if predicate_first else 0], _width(each.code))


def _width(code: list[str]) -> int:
    """Return the number of 32-bit registers that an instruction writes."""
    name, *modifiers = code
    if name.endswith("GMMA"):  # 64xNxK: 128 threads share 64 rows of N numbers
        columns = int(modifiers[0].split("x")[1])
        return columns // (4 if modifiers[1] == "F16" else 2)
    if "128" in modifiers or name == "HMMA" or (name == "LDSM" and modifiers[-1] == "4"):
        return 4
    wide = {"64", "WIDE"} & set(modifiers) or {"F64", "S64", "U64"} & set(modifiers[:1])
    double = name in ("DADD", "DFMA", "DMUL") or (name == "CS2R" and "32" not in modifiers)
    return 2 if wide or double or (name == "LDSM" and modifiers[-1] == "2") else 1


def _registers(operand: str, count: int) -> set[int]:
    first = re.fullmatch(r"R(\d+)(?:\.\w+)*", operand)
    return set(range(int(first[1]), int(first[1]) + count)) if first else set()
