"""A probe's file is read back unchanged or rejected with a one-line error. ``show`` prints it as lines and as a page."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.display import MOST_CELLS, bandwidth, heading, heat_map
from cluster.view import (
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
from console.documents import FileKind
from tests.cluster.conftest import Command, Refused


def made_up(hosts: int = 4, ranks: int = 2, name: str = "node") -> View:
    rates = (Rate("product", "fp32", 512, 1e-3), Rate("launch", "fp32", 1, 1e-6))
    pairs = [(one, other) for one in range(hosts * ranks) for other in range(hosts * ranks) if one != other]
    return View(
        *("2026-01-01T00:00:00+00:00", "abc", "2.13", "gloo", 12.5, "slurm"),
        tuple(Host(f"{name}{h}", 64, 1 << 38, ("mlx5_0",), ("top", f"leaf{h // 2}")) for h in range(hosts)),
        tuple(Rank(h, r, "CPU", 1 << 38, "mlx5_0", rates) for h in range(hosts) for r in range(ranks)),
        tuple(Link(one, other, 1e-5, 1e-9 * (1 + one)) for one, other in pairs),
        (Collective("all-reduce", "world", 8, ((65536, 1.6e-4, 1e-4), (262144, 3.6e-4, 3e-4))),),
        (ComputationTime("gelu", (1.0, 4096.0), 1e-4), ComputationTime("gelu", (1.0, 524288.0), 1e-3)),
        Contention(128 * hosts, 8, 0.01, 0.011, 0.011, 0.012),
        (Outlier(f"network link of host {name}1, sending", "bandwidth", 3.0, 40.0, 0.2, (2,)),),
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_view(made_up(), tmp_path / "cluster.json")
    return tmp_path / "cluster.json"


VIEW = made_up()


def test_a_view_is_read_back_unless_it_is_inconsistent(file: Path) -> None:
    for view in (replace(made_up(hosts=1), outliers=()), VIEW):
        write_view(view, file)
        assert read_view(file) == view
    first, *others = VIEW.ranks
    changes: list[dict[str, Any]] = [
        *({"ranks": (replace(first, **change), *others)} for change in ({"host": 4}, {"host": 1})),
        *({"ranks": (replace(first, place=place), *others)} for place in (1, 1 << 62)),
        {"links": (Link(0, 8, 1e-5, 1e-9),)},
        {"outliers": (replace(VIEW.outliers[0], ranks=(0, 8)),)},
        {"hosts": ()},
        {"hosts": (), "ranks": (), "links": (), "outliers": ()},
        {"collectives": (replace(VIEW.collectives[0], points=VIEW.collectives[0].points[:1] * 2),)},
    ]
    for change in changes:
        write_view(replace(VIEW, **change), file)
        with pytest.raises(ValueError, match=r"rank|not in ascending order"):
            read_view(file)
    # Pages and predictions divide by sizes, times, and differences of sizes, so these must not be 0.
    for points, said in (
        *((((number, 1e-3, 1e-3), (1 << 62, 1e-3, 1e-3)), "Expected `int`") for number in (-1, 0, 1 << 63)),
        (((1, 0.0, 1e-3), (2, 1e-3, 1e-3)), "Expected `float` > 0"),
        (((1, 1e-3, 1e-3),), "length >= 2"),
    ):
        with pytest.raises(ValueError, match=said):
            write_view(replace(VIEW, collectives=(replace(VIEW.collectives[0], points=points),)), file)
    with pytest.raises(ValueError, match="Expected `float` > 0"):
        write_view(replace(VIEW, links=(Link(0, 1, 1e-5, 0.0),)), file)


def test_a_view_of_another_version_or_with_edited_content_is_refused(file: Path, refused: Refused) -> None:
    written = json.loads(file.read_text())
    version = "mlperf-bert cluster view 1, expected mlperf-bert cluster view 4"
    for change, said in (({"version": 1}, version), ({"content": [1]}, "edited or damaged")):
        file.write_text(json.dumps(written | change))
        assert said in refused("show", file)
        assert not file.with_suffix(".html").exists()


def test_a_finding_states_slowdown_deviations_and_share_of_a_step() -> None:
    slow = Outlier("rank 3", "latency", 1.5, 999.0, 0.0, (3,))
    said = "latency, time 50 % above the others"
    assert slow.sentence == f"SLOW  rank 3: {said} (999 deviations)"
    assert replace(slow, deviations=999.1).finding == f"{said} (more than 999 deviations)"
    assert replace(slow, step_share=0.021).finding == f"{said} (999 deviations, 2.1 % of a step)"
    broken = replace(slow, ratio=0.0)
    assert (broken.sentence, broken.finding) == ("BROKEN  rank 3", "latency")


def test_show_prints_a_summary_and_writes_a_page(file: Path, cluster: Command) -> None:
    slow = replace(VIEW.ranks[3], rates=(Rate("product", "fp32", 512, 2e-3), VIEW.ranks[3].rates[1]))
    write_view(replace(VIEW, ranks=(*VIEW.ranks[:3], slow, *VIEW.ranks[4:])), file)
    done, page = cluster("show", file), file.with_suffix(".html")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "4 hosts, 8 ranks, CPU, gloo, 2026-01-01T00:00:00+00:00",
        VIEW.outliers[0].sentence,
        "product fp32 512 x 512: 268 GFLOP/s, slowest 134 GFLOP/s on rank 3 (100% longer)",
        "launch fp32: 1 us, slowest 1 us on rank 0 (0% longer)",
        "links between hosts: 222 MB/s (125 MB/s to 1 GB/s), latency 10 us, 48 directions",
        "links in hosts: 222 MB/s (125 MB/s to 1 GB/s), latency 10 us, 8 directions",
        "all-reduce (world, 8 ranks): 160 us for 64 KiB, 360 us for 256 KiB",
        "switches by Slurm's topology",
        "top / leaf0: node0, node1 (!)",
        "top / leaf1: node2, node3",
        str(page),
    ]
    page = page.read_text()
    for said in ("network link of host node1, sending", "time 200 % above the others", "leaf1", "134 GFLOP/s"):
        assert said in page
    assert page.count("<rect") == 2 * 4 * 3 + 2 * 2, "a cell for each pair of hosts, and each pair of places"
    names = (replace(rank, device=f"D{8 - number}") for number, rank in enumerate(VIEW.ranks))
    assert heading(replace(VIEW, ranks=tuple(names))) == "4 hosts, 8 ranks, D1, D2, D3"


def test_colours_compare_times_with_the_median_and_saturate() -> None:
    links = [Link(0, place, 1e-5, seconds) for place, seconds in enumerate((1e-9, 4e-9, 4e-9, 8e-9, 64e-9), 1)]
    found = heat_map("Title", links, range(6), [f"h{place}" for place in range(6)])
    assert found is not None
    assert (found["title"], found["size"], found["hosts_a_cell"]) == ("Title: 250 MB/s in the median", 6, "")
    colours = [("fast", "1.00"), ("fast", "0.00"), ("fast", "0.00"), ("slow", "0.50"), ("slow", "1.00")]
    assert [cell[:4] for cell in found["cells"]] == [(0, place, *colour) for place, colour in enumerate(colours, 1)]
    assert found["cells"][0][4] == "h0 to h1: 1 GB/s, latency 10 us"
    assert [len((heat_map("", links, range(count), "n" * count) or {})["names"]) for count in (48, 49)] == [48, 0]
    assert heat_map("", [], range(6), []) is None
    rates = [bandwidth(1 / number) for number in (1e3, 999.4e3, 999.6e3, 999.6e6, 2e12)]
    assert rates == ["0.001 MB/s", "0.999 MB/s", "1 MB/s", "1 GB/s", "2 TB/s"]


def test_a_page_of_many_hosts_has_bounded_size_and_escapes_host_names(file: Path, cluster: Command) -> None:
    write_view(made_up(hosts=100, ranks=1, name="<script>\x1b[2J"), file)
    out, page = cluster("show", file).stdout, file.with_suffix(".html").read_text()
    assert "\x1b[2J" not in out + page
    assert "<script" not in page
    assert page.count("<rect") <= 2 * MOST_CELLS**2
    assert "A cell stands for 1.04 hosts in a row" in page


def view_of(sites: str, between: float = 1e-7, inside: float = 1e-9, ranks: int = 1) -> View:
    """Return a view with a host for each letter, which names its site. ``between`` and ``inside`` are seconds per byte."""
    hosts = tuple(Host(f"h{number}", 8, 1 << 36, ("v0",), (), site) for number, site in enumerate(sites))
    view = made_up(len(hosts), ranks)

    def link(each: Link) -> Link:
        one, other = (sites[view.ranks[end].host] for end in (each.source, each.target))
        return replace(each, seconds_per_byte=inside if one == other else between)

    links = tuple(map(link, view.links))
    return replace(view, hosts=hosts, links=links, outliers=(), switches_from="unknown", sites_stated=True)


def test_show_lists_the_sites(tmp_path: Path, cluster: Command) -> None:
    for stated, source in ((True, "as stated"), (False, "by their links")):
        write_view(replace(view_of("abab"), sites_stated=stated), tmp_path / "c.json")
        shown = cluster("show", tmp_path / "c.json").stdout.splitlines()
        line = f"2 sites {source}: a (h0, h2), b (h1, h3); 10 MB/s between them, 1 GB/s inside"
        assert line in shown
        assert shown[-3:-1] == ["a: h0, h2", "b: h1, h3"]
        assert "10 MB/s between them" in (tmp_path / "c.html").read_text()
    for count, more in ((24, ""), (26, " and 2 more")):
        write_view(view_of("a" * count), tmp_path / "c.json")
        shown = cluster("show", tmp_path / "c.json").stdout.splitlines()
        assert shown[1] == "no part is slower than the others"
        assert shown[-2] == f"hosts: {', '.join(f'h{host}' for host in range(24))}{more}"
        assert not any(" sites " in line for line in shown)


def test_place_takes_the_hosts_of_one_site_if_they_suffice(tmp_path: Path, cluster: Command) -> None:
    write_view(view_of("abcbcbb"), tmp_path / "c.json")
    for nodes, expected in ((2, "h2 h4"), (3, "h1 h3 h5"), (7, "h0 h1 h3 h5 h6 h2 h4")):
        out = cluster("place", tmp_path / "c.json", "--nodes", nodes, "--out", tmp_path / "hosts").stdout
        assert (tmp_path / "hosts").read_text().split() == expected.split()
        assert "states no switches" not in out


def test_a_view_written_without_sites_has_one_site(tmp_path: Path) -> None:
    content = msgspec.to_builtins(VIEW)
    del content["sites_stated"]
    for host in content["hosts"]:
        del host["site"]
    FileKind(dict, "mlperf-bert cluster view", 4, "", "", 2**20, lambda _: None).write(content, tmp_path / "c.json")
    view = read_view(tmp_path / "c.json")
    assert (view, len(view.sites)) == (VIEW, 1)
    assert view.paths == [host.switches for host in view.hosts]
