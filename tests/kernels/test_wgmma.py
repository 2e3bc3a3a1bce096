"""The search for registers that change while an asynchronous matrix product still uses them, in synthetic machine code."""

import pytest

from tests.kernels.wgmma import WAIT, hazards

PRODUCT = "HGMMA.64x64x16.F32.BF16 R120, R56, gdesc[UR20].tnspB, R120, gsb0"


def found(*instructions: str) -> list[str]:
    """Return the instructions, with their addresses, that a search of this machine code complains about."""
    lines = (f"        /*{16 * place:04x}*/    {each} ;    /* 0x00 */" for place, each in enumerate(instructions))
    products, complaints = hazards("\tFunction : kernel\n" + "\n".join(lines))
    assert products == sum("GMMA" in each for each in instructions)
    return sorted(complaint.partition(" writes")[0] for complaint in complaints)


def test_writes_after_the_wait_or_to_other_registers_are_no_hazards() -> None:
    code = "LDG.E.128 R52, desc[UR4][R2.64]", PRODUCT, "LDG.E.128 R52, desc[UR4][R2.64]", "STG.E [R4], R56"
    after = "MOV R56, R3", "FADD R151, R151, R2", "EXIT"
    assert found(*code, "ISETP.GE.AND P0, PT, R56, R3, PT", "IMAD.WIDE R118, R2, R3, R4", WAIT, *after) == []
    assert found(*code, *after) == ["0x40 MOV R56, R3", "0x50 FADD R151, R151, R2"], "without the wait"
    assert found(*code, f"@P0 {WAIT}", after[0], "EXIT") == ["0x50 MOV R56, R3"], "not all threads wait"
    assert found(*code, WAIT.replace("0x0", "0x1"), after[0], "EXIT") == ["0x50 MOV R56, R3"], "a product may be left"


@pytest.mark.parametrize(
    ("write", "first", "last"),
    [
        ("MOV R{}, R3", 56, 59),
        ("@!P1 LDS.64 R{}, [R3]", 55, 59),
        ("IMAD.WIDE.U32 R{}, R2, R3, R4", 119, 151),
        ("CS2R R{}, SRZ", 119, 151),
        ("LDSM.16.M88.4 R{}, [R3]", 117, 151),
        ("SHF.L.U64.HI R{}, R2, 0x1, R3", 120, 151),
    ],
)
def test_the_search_finds_all_registers_that_an_instruction_writes(write: str, first: int, last: int) -> None:
    for register in range(first - 2, last + 3):
        complaints = found(PRODUCT, write.format(register), WAIT, "EXIT")
        assert bool(complaints) == (first <= register <= last), register


def test_the_size_of_an_accumulator_follows_from_the_products_shape_and_type() -> None:
    for product, registers in (
        ("HGMMA.64x32x16.F32.BF16 R8, gdesc[UR8], RZ, !UPT, gsb0", 16),
        ("HGMMA.64x32x16.F16 R8, gdesc[UR8], RZ, !UPT", 8),
    ):
        written = [register for register in range(64) if found(product, f"MOV R{register}, R3", WAIT, "EXIT")]
        assert written == list(range(8, 8 + registers))


def test_both_sides_of_a_branch_are_searched() -> None:
    write = "MOV R57, R3"
    assert found(PRODUCT, "@P0 BRA 0x40", write, WAIT, WAIT, "EXIT") == ["0x20 MOV R57, R3"]
    assert found(PRODUCT, "@P0 BRA 0x40", WAIT, "EXIT", write, WAIT, "EXIT") == ["0x40 MOV R57, R3"]
    assert found(PRODUCT, "BRA.U UP0, 0x40", WAIT, "EXIT", write, WAIT, "EXIT") == ["0x40 MOV R57, R3"]
    assert found(PRODUCT, "BRA 0x30", write, WAIT, "EXIT") == [], "nothing goes there"
    assert found(PRODUCT, "@P0 EXIT", write, WAIT, "EXIT") == ["0x20 MOV R57, R3"]
    assert found(PRODUCT, "EXIT", write) == []


def test_the_search_follows_a_jump_back_to_the_start_of_a_loop() -> None:
    loop = "MOV R58, R3", WAIT, PRODUCT, "IADD3 R4, R4, 0x1, RZ", "@!P0 BRA 0x0"
    assert found(*loop, WAIT, "EXIT") == ["0x0 MOV R58, R3"]
    assert found(WAIT, *loop[:1], *loop[2:], WAIT, "EXIT") == []


def test_products_may_share_an_accumulator_but_not_overwrite_an_operand() -> None:
    assert found(PRODUCT, PRODUCT.replace("R56", "R60"), WAIT, "EXIT") == []
    scores = "HGMMA.64x8x16.F32.BF16 R56, gdesc[UR8], RZ, !UPT, gsb0"
    assert found(PRODUCT, scores, WAIT, "EXIT") == [f"0x10 {scores}"]


def test_machine_code_that_cannot_be_followed_raises() -> None:
    with pytest.raises(ValueError, match="cannot follow the jump 0x10 BRX"):
        found(PRODUCT, "BRX R4 -0x10", "EXIT")
    with pytest.raises(ValueError, match="several functions"):
        hazards("/*0000*/ EXIT ;\n/*0000*/ EXIT ;")
