"""Counts of a kernel's machine code, and the command that prints them."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import kernel_counts
from benchmarks.kernel_counts import Tile, blocks, main_loop, nanoseconds
from cluster.devices import device_named

REPOSITORY = Path(__file__).resolve().parents[2]
LOOPS = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0010*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0020*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64], P0 ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0050*/              @!P1 BRA `(.L_x_3) ;
        /*0060*/                   FSEL R5, R5, -INF , P2 ;
        /*0070*/                   FSEL R6, R6, -INF , P2 ;
.L_x_3:
        /*0080*/                   FFMA R5, R5, R6, -R7 ;
        /*0090*/                   MUFU.EX2 R5, R5 ;
        /*00a0*/                   STG.E.U16 desc[UR4][R8.64], R5 ;
        /*00b0*/               @P0 BRA `(.L_x_2) ;
        /*00c0*/                   EXIT ;
"""


def test_the_main_loop_is_that_with_the_products_without_what_a_branch_skips() -> None:
    loop = main_loop(LOOPS)
    assert [each.partition(".")[0] for each in loop] == ["LDGSTS", "HGMMA", "BRA", "FFMA", "MUFU", "STG", "BRA"]
    tile = Tile(tuple(loop), warps=4)
    assert {kind: count for kind, count in tile.by_kind().items() if count} == {
        "tensor": 1, "float": 1, "special": 1, "global": 2, "control": 2,
    }  # fmt: skip
    assert tile.flops() == 2 * 64 * 64 * 16
    assert tile.bytes() == (16 + 2) * 32 * 4


def test_without_a_loop_all_of_a_kernel_counts() -> None:
    lines = [line for line in LOOPS.splitlines() if "BRA" not in line]
    assert len(main_loop("\n".join(lines))) == 10


def test_times_are_those_of_the_device() -> None:
    h100 = device_named("H100-SXM-80GB")
    times = nanoseconds(Tile(tuple(main_loop(LOOPS)), warps=4), h100)
    assert times is not None
    assert times["tensor"] == pytest.approx(2 * 64 * 64 * 16 / 989.4e12 * 1e9)
    assert times["issue"] == pytest.approx(7 / 132 / 1.83)
    assert times["memory"] == pytest.approx(18 * 128 / 3350, rel=0.01)
    assert nanoseconds(Tile(("UTCHMMA",), 4), h100) is None, "sizes are in a register"
    assert nanoseconds(Tile(("FFMA",), 4), device_named("Gaudi2")) is None


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "fit"),
    [(128, 0, 4, 4), (129, 0, 4, 3), (16, 0, 1, 32), (32, 57 * 1024, 4, 3), (16, 0, 8, 8)],
)
def test_blocks_on_a_multiprocessor(registers: int, shared: int, warps: int, fit: int) -> None:
    assert blocks(registers, shared, warps, 90) == fit


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_command_and_what_attention_may_take() -> None:
    """In a process where Triton compiles: this one's interprets."""
    command = [
        sys.executable,
        "benchmarks/kernel_counts.py",
        "--only",
        "large, dropout, from sm_90",
        "--capability",
        "90",
    ]
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=REPOSITORY, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = re.findall(r"^attention\.launches: attention_(\w+), .*?: (\d+) instructions", done.stdout, re.MULTILINE)
    most = {"forward": 560, "backward_queries": 340, "backward_keys": 480}
    assert {name for name, _ in counts} == set(most)
    assert all(int(count) <= most[name] for name, count in counts)


def test_what_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_counts.ahead_of_time, "all_configurations", dict)
    assert kernel_counts.main(["--only", "nothing"]) == 2
    assert capsys.readouterr().err == "error: no configuration has 'nothing' in its name\n"
