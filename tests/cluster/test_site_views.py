"""Sites in a probe's file: `show` lists them, `place` keeps their hosts together, and files without them are read."""

from dataclasses import replace
from pathlib import Path

import msgspec

from cluster.view import Host, Link, View, read_view, write_view
from console.documents import FileKind
from tests.cluster.conftest import Command
from tests.cluster.test_view import VIEW, made_up


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
        assert "does not know the switches" not in out


def test_a_file_without_sites_is_read(tmp_path: Path) -> None:
    content = msgspec.to_builtins(VIEW)
    del content["sites_stated"]
    for host in content["hosts"]:
        del host["site"]
    FileKind(dict, "mlperf-bert cluster view", 4, "", "", 2**20, lambda _: None).write(content, tmp_path / "c.json")
    view = read_view(tmp_path / "c.json")
    assert (view, len(view.sites)) == (VIEW, 1)
    assert view.paths == [host.switches for host in view.hosts]
