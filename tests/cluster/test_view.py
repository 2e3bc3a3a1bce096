"""The file of a probe: written whole, read back as it was, refused in one line when it is anything else."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import view as module
from cluster.display.page import render
from cluster.display.summary import switch_tree
from cluster.view import (
    Card,
    Collective,
    ComputationTime,
    Contention,
    Host,
    Link,
    Outlier,
    Rank,
    Rate,
    View,
    read_view,
    write_view,
)
from tests.cluster.conftest import Command

COMPUTATIONS = (("gelu", (1.0, 4096.0), 1e-4), ("gelu", (1.0, 524288.0), 1e-3))


def made_up(hosts: int = 4, ranks: int = 2, name: str = "node") -> View:
    rates = (Rate("product", "fp32", 512, 1e-3, 0.01), Rate("launch", "fp32", 1, 1e-6, 0.0))
    pairs = [(one, other) for one in range(hosts * ranks) for other in range(hosts * ranks) if one != other]
    return View(
        "2026-01-01T00:00:00+00:00",
        "abc",
        "2.13",
        "gloo",
        12.5,
        "slurm",
        tuple(
            Host(f"{name}{h}", 2, 2, 64, 1 << 38, (Card("mlx5_0", -1, 200.0),), ("top", f"leaf{h // 2}"))
            for h in range(hosts)
        ),
        tuple(Rank(h, r, "CPU", 1 << 38, -1, "mlx5_0", "", rates) for h in range(hosts) for r in range(ranks)),
        tuple(Link(one, other, 1e-5, 1e-9 * (1 + one), 0.01) for one, other in pairs),
        (Collective("all-reduce", "world", 8, 1e-4, 1e-9, 0.03, ((65536, 1.6e-4, 1e-4), (262144, 3.6e-4, 3e-4))),),
        tuple(ComputationTime(*each, 0.01) for each in COMPUTATIONS),
        Contention(128 * hosts, 8, 0.01, 0.011, 0.011, 0.012),
        (Outlier("link", f"network link of host {name}1, sending", "bandwidth", 3.0, 40.0, 0.2, (2,)),),
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_view(made_up(), tmp_path / "cluster.json")
    return tmp_path / "cluster.json"


def test_a_view_is_read_back_as_it_was(file: Path) -> None:
    assert read_view(file) == made_up()
    view = made_up()
    of_two = dataclasses.replace(view, collectives=(dataclasses.replace(view.collectives[0], ranks=2),))
    write_view(of_two, file)
    assert read_view(file) == of_two


def test_nothing_is_left_of_a_view_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_view(dataclasses.replace(made_up(), seconds=float("nan")), tmp_path / "cluster.json")
    assert list(tmp_path.iterdir()) == []


def change(*path: Any, to: Any) -> Any:
    def apply(document: Any) -> None:
        for part in path[:-1]:
            document = document[part]
        document[path[-1]] = to

    return apply


DAMAGE = {
    "another version": (change("version", to=1), "version 1, expected 2"),
    "no view": (change("format", to="something"), "no view of a cluster"),
    "an edited number": (change("view", "links", 0, "seconds_per_byte", to=5e-9), "edited or damaged"),
    "a number as text": (change("view", "links", 3, "latency_s", to="fast"), "view.links[3].latency_s is fast"),
    "not finite": (change("view", "seconds", to=float("inf")), "view.seconds is inf, expected a finite number"),
    "a truth as number": (change("view", "hosts", 0, "cores", to=True), "view.hosts[0].cores is True"),
    "negative": (change("view", "ranks", 0, "host", to=-1), "expected no negative number"),
    "a host too many": (change("view", "ranks", 0, "host", to=4), "rank 0 is on host 4 of 4"),
    "uneven hosts": (change("view", "ranks", 0, "host", to=1), "different numbers of ranks"),
    "a link to nowhere": (change("view", "links", 0, "target", to=8), "to rank 8 of 8"),
    "a link twice": (change("view", "links", 1, "target", to=1), "a link is there twice"),
    "a collective of one": (change("view", "collectives", 0, "ranks", to=1), "of fewer than two or more than the 8"),
    "a collective too large": (change("view", "collectives", 0, "ranks", to=9), "of fewer than two or more than the 8"),
    "an outlier elsewhere": (
        change("view", "outliers", 0, "ranks", to=[99]),
        "an outlier is about more than the 8 ranks",
    ),
    "an unknown word": (
        change("view", "outliers", 0, "part", to="moon"),
        "view.outliers[0].part is moon, expected one of",
    ),
    "a list as a word": (change("view", "outliers", 0, "part", to=[1]), "expected one of"),
    "a text without end": (change("view", "hosts", 0, "name", to="x" * 1000), "no text of at most 400"),
    "a part missing": (change("view", "hosts", 0, to={}), "view.hosts[0] has"),
    "a list instead": (change("view", to=[]), "view has list"),
    "no hosts": (change("view", "hosts", to=[]), "no hosts or no ranks"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE)
def test_a_file_that_no_probe_wrote_is_refused(file: Path, damage: Any, said: str, refused: Callable[..., str]) -> None:
    document = json.loads(file.read_text())
    damage(document)
    file.write_text(json.dumps(document))
    assert said in refused("show", file)
    assert not file.with_suffix(".html").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"version": 1' + b"0" * 5000 + b"}"])
def test_what_is_no_json_is_refused(file: Path, content: bytes, refused: Callable[..., str]) -> None:
    file.write_bytes(content)
    assert "run `python -m cluster probe` again" in refused("show", file)


def test_a_file_that_is_too_large_is_not_read(
    file: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FILE", dataclasses.replace(module._FILE, largest_bytes=1000))
    assert "expected at most 1,000" in refused("show", file)


def test_show_prints_and_writes_a_page(file: Path, cluster: Command) -> None:
    done = cluster("show", file)
    assert done.status == 0
    assert "network link of host node1, sending" in done.out
    assert "leaf1" in done.out
    page = file.with_suffix(".html").read_text()
    assert page.count("<rect") == 2 * 4 * 3 + 2 * 2, "a cell for each pair of hosts, and each pair of places"
    assert "network link of host node1, sending" in page
    assert "takes 200 % longer than the others" in page


def test_a_narrow_terminal_shows_whole_words(file: Path, cluster: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def words(columns: int) -> set[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = cluster("show", file).out
        assert max(map(len, shown.splitlines()[:-1])) <= columns  # the last line is the page's path
        return {word.rstrip(":,") for word in shown.split()}

    figures = {word for word in words(200) if word[0].isdigit() or word.endswith("/s")}
    assert figures <= words(40)


def test_names_from_a_file_steer_neither_page_nor_terminal(file: Path, cluster: Command) -> None:
    write_view(made_up(name="<script>[red]\x1b[2J"), file)
    out, page = cluster("show", file).out, file.with_suffix(".html").read_text()
    assert "\x1b[2J" not in out + page
    assert "[red]" in out
    assert "<script" not in page


def test_a_page_of_many_hosts_stays_small() -> None:
    page = render(made_up(hosts=100, ranks=1))
    assert page.count("<rect") <= 2 * 96 * 96
    assert "A cell stands for 1.04 hosts in a row" in page


def test_hosts_are_under_their_switches() -> None:
    assert switch_tree(made_up()) == {"top": {"leaf0": {"": [0, 1]}, "leaf1": {"": [2, 3]}}}
