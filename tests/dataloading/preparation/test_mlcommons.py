"""MLCommons' files: finding and verifying them, and estimates of the time and disk space that they need."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from dataloading.preparation import mlcommons as ml
from dataloading.preparation.mlcommons import CHECKPOINT, EVALUATION, KNOWN, TRAIN, VOCABULARY, Checksums, Inputs
from tests.conftest import REPOSITORY
from tests.dataloading.conftest import Run

G = 10**9  # bytes of a gigabyte (a gibibyte has more)


def sized(path: Path, size: int) -> Path:
    """Make a sparse file of ``size`` bytes, which takes no disk space."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, size)
    return path


def test_files_are_found_at_any_depth_but_not_twice(tmp_path: Path) -> None:
    one, other, checkpoint = tmp_path / "one", tmp_path / "other", tmp_path / "one" / "tf1_ckpt" / "model.ckpt-28252"
    files = [Path(f"{checkpoint}.{end}") for end in ("index", "data-00000-of-00002", "data-00001-of-00002")]
    articles = [other / "AA" / "wiki_00.bz2", other / "AA" / "wiki_01", other / "AB" / "wiki_00"]
    unused = {other / "dump.xml.bz2": "a dump: run WikiExtractor on it", other / "text.zip": "an archive: unpack it"}
    left_out = [one / ".git" / "vocab.txt", one / "out" / "eval.txt", other / "AB" / "wiki_000"]
    for path in (*files, *articles, *unused, *left_out, one / "vocab.txt", other / "some.md5"):
        sized(path, 0)
    (one / "up").symlink_to(one)
    inputs = Inputs(
        vocabulary=(one / "vocab.txt",),
        checkpoint=tuple(files),
        articles=tuple(articles),
        lists=(other / "some.md5",),
        others=tuple((TRAIN, f"{path} is {why}") for path, why in unused.items()),
    )
    assert ml.find_inputs([one, other], one / "out") == inputs
    assert inputs.uses_articles
    assert inputs.files == [one / "vocab.txt", *files]
    files[1].unlink()
    (other / "AA" / "eval.txt").symlink_to("nowhere")
    found = ml.find_inputs([one, other], one / "out")
    again = "download bert-input-files again, which fetches missing files"
    broken = f"{other / 'AA' / 'eval.txt'} is a broken link, a pipe or a device, expected a file"
    assert found.problems == (broken, f"the checkpoint lacks {files[1]}; {again}")
    assert found.checkpoint == (files[0], files[2])


def test_the_number_of_attention_heads_is_read_from_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "bert_config.json").write_text('{"num_attention_heads": 1}')
    assert ml.attention_heads(Inputs(config=(tmp_path / "bert_config.json",))) == 1
    assert ml.attention_heads(Inputs()) is None


def test_estimates_of_time_and_disk_space_are_proportional_to_file_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    names = ("vocab.txt", "bert_config.json", "eval.txt")
    vocabulary, config, held_out = ((sized(tmp_path / name, G),) for name in names)
    text = sized(tmp_path / "part-0", G), sized(tmp_path / "part-1", 3 * G)
    inputs = Inputs(vocabulary, config, (sized(tmp_path / "index", 3 * G),), text, held_out)
    # Two jobs check 10 GB at 2 ns a byte. Samples take 11 bytes for each byte of text.
    seconds = {"check": 10.0, CHECKPOINT: 11.0, EVALUATION: 170.0, "samples": 340.0, TRAIN: 480.0, "verify": 124.0}
    for jobs, shared in ((2, 1), (0, 2), (1, 2), (9, 0.5)):
        found, result, most = ml.estimate(inputs, [], jobs)
        of_jobs = {"check": 10.0 * shared, "samples": 340.0 * shared}
        assert list(found) == list(seconds)
        assert found == pytest.approx(seconds | of_jobs)
        assert (result, most) == pytest.approx((45 * G, 144 * G))
    found, *room = ml.estimate(inputs, [TRAIN, EVALUATION], 2)
    assert found == pytest.approx({name: seconds[name] for name in ("check", CHECKPOINT, "verify")})
    assert room == [G, G]
    assert (
        ml.estimate(inputs, [TRAIN, EVALUATION, CHECKPOINT], 2) == ml.estimate(Inputs(vocabulary), [], 2) == ({}, 0, 0)
    )
    assert ml.estimate(inputs, [TRAIN, EVALUATION, VOCABULARY], 2)[0].keys() == {"check", CHECKPOINT, "verify"}


def test_too_little_disk_space_is_an_error_after_the_estimates(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=139 * G))
    given, out = tmp_path / "given", tmp_path / "out"
    for index, size in enumerate((G, 3 * G)):
        sized(given / f"part-{index:05d}-of-00002", size)
    sized(given / "eval.txt", G)
    sized(out / "preparation" / "samples" / "left", 3 * G)
    shutil.copy(REPOSITORY / "bert" / "artifacts" / "tiny_cpu" / "vocab.txt", given)
    command = ["wikipedia", given, "--out", out, "--jobs", 2, "--checksums", sized(tmp_path / "empty.md5", 0)]
    for more, seconds in (
        ((), "18:39 (check 0:05, evaluation 2:50, samples 5:40, train 8:00, verify 2:04)"),
        (("--part", "1/2"), "2:53 (check 0:03, samples 2:50)"),
    ):
        room = "140.0 GB are needed, and 139.0 GB are free"
        assert run(*command, *more, fails=True).splitlines()[5:] == [
            f"{out}: the results will take 44.0 GB; while they are made, {room}",
            f"expected time with --jobs 2 on 4 cores: {seconds}",
            f"error: {out}: {room}; make room, or name another --out",
        ]


def test_known_md5_sums_take_precedence_over_lists_beside_the_files(tmp_path: Path) -> None:
    names = [f"part-{index:05d}-of-00012" for index in range(12)]
    (tmp_path / "list").write_text("".join(f"{'A' * 32} *text/{name}\n" for name in [*names, "eval.txt"]) + "x" * 99)
    beside = Checksums(None, [tmp_path / "list"])
    assert beside.expected(Path("elsewhere", names[0])) == {"a" * 32}
    assert beside.expected(Path("text/eval.txt")) == {KNOWN["eval.txt"][1]}
    name = "tf1_ckpt/model.ckpt-28252.index"
    assert beside.expected(tmp_path / name) == beside.expected(tmp_path / "model.ckpt-28252.index") == {KNOWN[name][1]}
    assert beside.check({}) == 0
    assert beside.check({Path(names[0]): "a" * 32, Path("one"): "b", Path("other"): "c"}) == 2
    for count, named in ((10, f"{names[9]} (MD5 b, expected {'a' * 32}); delete"), (12, ") and 2 more; delete")):
        with pytest.raises(ValueError, match=f"^{count} files with the wrong content: ") as caught:
            beside.check(dict.fromkeys(map(Path, names[:count]), "b"))
        assert named in str(caught.value)
    vocabulary = sized(tmp_path / "vocab.txt", KNOWN["vocab.txt"][0])
    assert beside.wrong_sizes([vocabulary, tmp_path / "list"]) == []
    (wrong,) = beside.wrong_sizes([sized(vocabulary, 231_509)])
    assert f"{vocabulary} (231,509 bytes, expected 231,508)" in wrong
    with pytest.raises(ValueError, match=r"line 14 is 'x{80}'; expected an MD5 sum"):
        Checksums(tmp_path / "list", [])
