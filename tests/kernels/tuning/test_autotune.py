"""The measured choice: fair, bounded, harmless to the run, kept between runs, the same on all ranks."""

import dataclasses
import gc
import json
import multiprocessing
import os
import platform
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import OPS, captured, dropout_add_layer_norm, lamb_step
from kernels.registry import Implementation, Op
from kernels.tuning import autotune
from kernels.tuning import cache as autotune_cache
from kernels.tuning.autotune import Choices, KernelChoice, apply, measure, observed, tune
from kernels.tuning.cache import Cache, default_folder
from kernels.tuning.contest import Timer, contest, fastest
from kernels.tuning.examples import example_inputs
from kernels.tuning.request import CallKind

SHORT = 0.05
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("MLPERF_BERT_CACHE", str(tmp_path / "cache"))
    yield
    for op in OPS.values():
        op.ask_for("auto")
        op.prefer({})


def grown(x: Tensor) -> Tensor:
    """The definition."""
    return x * 2


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """An op with a slow, a broken and a fast implementation, in this order, and a list of the calls to them."""
    made: list[str] = []

    def slow(x: Tensor) -> Tensor:
        made.append("slow")
        for _ in range(200):
            x.mul(2)
        return x * 2

    def broken(_x: Tensor) -> Tensor:
        made.append("broken")
        raise RuntimeError("no such kernel\nmore")

    def fast(x: Tensor) -> Tensor:
        made.append("fast")
        return x * 2

    monkeypatch.syspath_prepend(tmp_path)
    implementations = []
    for function in (slow, broken, fast):
        name = function.__name__
        (tmp_path / f"{name}_grown.py").write_text("# source\n")
        module = ModuleType(f"{name}_grown")
        vars(module).update(grown=function, __spec__=None)
        monkeypatch.setitem(sys.modules, f"{name}_grown", module)
        implementations.append(Implementation(name, f"{name}_grown"))
    monkeypatch.setattr(autotune, "fingerprint", lambda each: (tmp_path / f"{each.name}_grown.py").read_text())
    order = tuple(implementations)
    monkeypatch.setitem(OPS, "grown", Op(grown, {"cpu": order, "cuda": order}))
    return made


def grow(x: Tensor) -> Tensor:
    op: Any = OPS["grown"]
    return op(x)


def request_for(x: Tensor) -> CallKind:
    return CallKind.of("grown", (x,), {})


def test_what_cannot_be_captured_is_measured_and_not_taken(calls: list[str], monkeypatch: pytest.MonkeyPatch):
    """The same measurement serves steps that are captured and others."""
    slow, _, fast = OPS["grown"].order("cpu")
    order = (slow, dataclasses.replace(fast, capturable=False))
    monkeypatch.setitem(OPS, "grown", Op(grown, {"cpu": order, "cuda": order}))
    monkeypatch.setattr(autotune, "_cache_key", lambda _: {})
    request = request_for(torch.ones(64))
    with captured():
        assert tune([request], seconds=SHORT).measured[0].taken == "fast", "a CPU captures nothing"
    calls.clear()
    on_gpu = dataclasses.replace(request, device=torch.device("cuda"))
    assert tune([on_gpu]).measured[0].taken == "fast"
    with captured():
        choice = tune([on_gpu]).measured[0]
    assert choice.taken == "slow"
    assert list(choice.milliseconds) == ["slow", "fast"]
    assert tune([on_gpu]).measured[0].taken == "fast"
    assert calls == [], "nothing is measured again"


def test_of_times_as_good_as_the_fastest_the_first_is_taken():
    assert fastest({"a": 1.0, "b": 0.99}) == "a"
    assert fastest({"a": 1.0, "b": 0.9, "c": 0.89}) == "b"
    assert fastest({"a": 0.9, "b": 1.0}) == "a"
    assert fastest({}) is None


def scripted(times: dict[str, list[float]]) -> tuple[dict[str, Callable[[], object]], Callable[..., float], list[str]]:
    """Works, a timer that gives them these times one after another (the last again and again), and the calls made."""
    made: list[str] = []
    left = {name: list(each) for name, each in times.items()}

    def timed(work: Callable[[], object]) -> float:
        name = str(work())
        made.append(name)
        seconds = left[name].pop(0) if len(left[name]) > 1 else left[name][0]
        if seconds < 0:
            raise RuntimeError("out of order")
        return seconds

    return {name: (lambda name=name: name) for name in times}, timed, made


def test_medians_of_calls_that_take_turns():
    works, timed, made = scripted({"a": [9.0, 2.0, 1.0, 8.0, 1.0, 1.0], "b": [9.0, 3.0]})
    assert contest(works, timed, 60) == ({"a": 1.0, "b": 3.0}, {})
    turns = made[4:]
    assert turns[:6] == ["a", "b", "b", "a", "a", "b"]  # each round is begun by another
    assert turns.count("a") == turns.count("b")


def test_what_is_hopeless_is_not_called_again():
    works, timed, made = scripted({"slow": [99.0, 21.0], "quick": [9.0, 1.0], "close": [9.0, 19.0]})
    assert contest(works, timed, 60)[0]["slow"] == 21.0
    assert made.count("slow") == 2
    assert made.count("close") > 3


def test_an_interruption_does_not_take_out_the_fastest():
    works, timed, _ = scripted({"a": [9.0, 2.0], "b": [9.0, 100.0, 1.0]})
    assert fastest(contest(works, timed, 2000)[0]) == "b"


def test_the_time_is_bounded():
    works, timed, made = scripted({"a": [1.0], "b": [1.0]})
    contest(works, timed, 0)
    assert len(made) == 2 * (2 + 3)


def test_an_error_takes_out_one_and_no_other():
    works, timed, made = scripted({"late": [1.0, 1.0, 1.0, -1.0], "never": [-1.0], "fine": [2.0]})
    why = "RuntimeError: out of order"
    assert contest(works, timed, 60) == ({"fine": 2.0}, {"late": why, "never": why})
    assert (made.count("never"), made.count("late")) == (1, 4)


def test_the_fastest_is_measured_and_taken(calls: list[str]):
    x = torch.rand(64, 64)
    assert grow(x).equal(x * 2)
    assert calls == ["slow"]
    choices = tune([request_for(x)], seconds=SHORT)
    (choice,) = choices.measured
    assert choice.taken == "fast"
    assert choice.milliseconds["slow"] > 5 * choice.milliseconds["fast"]
    assert choice.errors == {"broken": "RuntimeError: no such kernel"}
    assert "fast" in choices.text().split(",")[1]
    assert "broken failed (RuntimeError: no such kernel)" in choices.text()
    apply(Choices.from_json(choices.to_json()))
    calls.clear()
    grow(torch.rand(50, 64))  # of the same bucket
    grow(torch.rand(65, 64))
    assert calls == ["fast", "slow"]
    apply(Choices())
    grow(x)
    assert calls[-1] == "slow"


def test_what_was_measured_is_measured_once(calls: list[str], tmp_path: Path):
    x = torch.rand(64, 64)
    first = tune([request_for(x), request_for(x), request_for(torch.rand(64, 3))], seconds=SHORT)
    assert len(first.measured) == 2
    calls.clear()
    assert tune([request_for(x)]).measured == first.measured[:1]
    assert calls == []
    (tmp_path / "fast_grown.py").write_text("# another source\n")
    tune([request_for(x)], seconds=SHORT)
    assert "fast" in calls


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (torch, "__version__", "2.99.0"),
        (autotune, "package_version", lambda _: "9.9"),
        (torch, "get_num_threads", lambda: 77),
    ],
    ids=["torch", "triton", "threads"],
)
def test_another_version_or_device_is_measured_again(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, value: object
):
    request = request_for(torch.rand(64, 64))
    tune([request], seconds=SHORT)
    calls.clear()
    monkeypatch.setattr(module, name, value)
    tune([request], seconds=SHORT)
    assert calls


def test_the_fingerprint_follows_source_and_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "a_source_of_kernels.py"
    source.write_text("one")
    plain = Implementation("plain", "a_source_of_kernels")
    with_library = Implementation("with", "a_source_of_kernels", requires="hypothesis.strategies")
    before = autotune_cache.fingerprint(plain), autotune_cache.fingerprint(with_library)
    assert before == (autotune_cache.fingerprint(plain), autotune_cache.fingerprint(with_library))
    monkeypatch.setattr(autotune_cache.importlib.metadata, "version", lambda _package: "0.0.1")
    assert autotune_cache.fingerprint(plain) == before[0]
    assert autotune_cache.fingerprint(with_library) != before[1]
    source.write_text("two")
    assert autotune_cache.fingerprint(plain) != before[0]
    assert autotune_cache.package_version("no_such_package_at_all") == "0.0.1"
    monkeypatch.undo()
    assert autotune_cache.package_version("no_such_package_at_all") is None
    assert "bytes of" in str(autotune_cache.package_version("json"))
    assert autotune_cache.package_version("sys") == "unknown"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(content=st.binary(max_size=200))
@example(content=b"[" * 100_000)
@example(content=b'{"format": 1, "a": "' + b"x" * 2**20 + b'"}')
@example(content=b'{"format": 2, "key": {"a": 1}, "value": {"b": 2}}')
def test_any_bytes_in_the_cache_are_ignored(tmp_path: Path, content: bytes):
    cache = Cache(tmp_path)
    cache.store("grown", {"a": 1}, {"b": 2})
    (path,) = (tmp_path / "kernels").glob("grown-*.json")
    path.write_bytes(content)
    (tmp_path / "kernels" / "pins.json").write_bytes(content)
    assert cache.load("grown", {"a": 1}) is None
    assert cache.pins() == {}
    assert cache.entries() == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [field.name for field in dataclasses.fields(KernelChoice)]


@settings(max_examples=25)
@given(found=JSON | st.fixed_dictionaries(dict.fromkeys(FIELDS, JSON)))
def test_any_json_that_is_no_choice_is_refused(found: object):
    with pytest.raises(ValueError):  # noqa: PT011
        KernelChoice.of(found)
    with pytest.raises(ValueError):  # noqa: PT011
        Choices.from_json(json.dumps({"measured": [found], "pins": {}}))
    with pytest.raises(ValueError):  # noqa: PT011
        Choices.from_json(json.dumps(found))


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("value", {"taken": "gone"}),
        ("value", {"taken": "broken"}),
        ("value", {"op": "gone"}),
        ("value", {"signature": "of another call"}),
        ("value", {"milliseconds": {"fast": float("nan")}}),
        ("value", {"milliseconds": {"fast": True}}),
        ("value", {"errors": {"broken": 1}}),
        ("key", {"device": "another"}),
    ],
)
def test_a_choice_that_cannot_be_is_measured_again(
    calls: list[str], part: str, changes: dict[str, object], caplog: pytest.LogCaptureFixture
):
    request = request_for(torch.rand(64, 64))
    tune([request], seconds=SHORT)
    (path,) = (default_folder() / "kernels").glob("grown-*.json")
    content = json.loads(path.read_text())
    content[part] |= changes
    path.write_text(json.dumps(content))
    calls.clear()
    caplog.clear()
    assert tune([request], seconds=SHORT).measured[0].taken == "fast"
    assert "fast" in calls
    assert [message for message in caplog.messages if "ignored" in message]


def test_a_pipe_in_the_cache_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """To open one would wait for somebody to write to it."""
    cache = Cache(tmp_path)
    cache.store("grown", {}, 1)
    [path] = cache.folder.iterdir()
    path.unlink()
    os.mkfifo(path)
    assert cache.load("grown", {}) is None
    assert "is ignored: a pipe or the like" in caplog.text


def test_a_folder_that_cannot_be_written_stops_nothing(
    calls: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    del calls
    (tmp_path / "a file").write_text("")
    choices = tune([request_for(torch.rand(64, 64))], Cache(tmp_path / "a file"), seconds=SHORT)
    assert choices.measured[0].taken == "fast"
    assert any("not kept" in message for message in caplog.messages)


def _write_often(folder: Path, number: int) -> None:
    cache = Cache(folder)
    for turn in range(20):
        cache.store("grown", {"a": 1}, [number, turn] * 500)
        cache.pin("grown", f"{number}")


def test_writers_at_once_leave_whole_files(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(tmp_path, number)) for number in range(4)]
    for writer in writers:
        writer.start()
    cache = Cache(tmp_path)
    seen = 0
    while any(writer.is_alive() for writer in writers):
        found = cache.load("grown", {"a": 1})
        seen += found is not None
        assert found is None or (isinstance(found, list) and found == found[:2] * 500)
        assert set(cache.pins().values()) <= set("0123")
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert cache.load("grown", {"a": 1}) is not None
    assert caplog.messages == []
    assert sorted(path.name[:5] for path in (tmp_path / "kernels").iterdir()) == ["grown", "pins."]


def test_the_folder_of_the_cache_is_one_machines_and_one_checkouts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert default_folder() == tmp_path / "cache"
    monkeypatch.delenv("MLPERF_BERT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = default_folder()
    assert here.parent == tmp_path / "mlperf-bert"
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    assert default_folder() != here
    monkeypatch.undo()
    monkeypatch.delenv("MLPERF_BERT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "mlperf-bert" / here.name
    monkeypatch.setattr(autotune_cache, "__file__", str(tmp_path / "kernels" / "tuning" / "cache.py"))
    assert default_folder().name != here.name


def test_a_pin_overrides_what_is_measured(calls: list[str]):
    x = torch.rand(64, 64)
    Cache().pin("grown", "slow")
    choices = tune([request_for(x)], seconds=SHORT)
    assert calls == []
    assert choices == Choices((), {"grown": "slow"})
    apply(Choices.from_json(choices.to_json()))
    assert OPS["grown"].asked == "slow"
    OPS["grown"].ask_for("auto")
    with OPS["grown"].using("fast"):
        apply(choices)
        assert OPS["grown"].asked == "fast"  # the run's own word counts more
        assert tune([request_for(x)]).measured == ()
    Cache().pin("grown", "gone")
    assert tune([request_for(x)], seconds=SHORT).measured[0].taken == "fast"


def test_a_pin_that_cannot_work_raises_its_reasons():
    Cache().pin("dropout_add_layer_norm", "apex")
    args, kwargs = example_inputs("dropout_add_layer_norm", CPU, torch.float32)
    apply(tune([CallKind.of("dropout_add_layer_norm", args, kwargs)]))
    with pytest.raises(
        ValueError,
        match=r"_norm=apex cannot be used: fused_\w+ is not inst.*python -m kernels clear dropout_add_layer_norm",
    ):
        dropout_add_layer_norm(*args, **kwargs)


def test_requests_are_the_calls_that_were_made_and_keep_nothing_alive():
    weight = torch.ones(64, requires_grad=True)
    activation = torch.rand(6, 64).bfloat16()
    alive = weakref.ref(activation)

    def call(rows: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            dropout_add_layer_norm(rows, weight, rows, weight, weight, 1e-12)

    with observed() as requests:
        call(activation)
        call(activation)
        with torch.no_grad():
            call(activation)
    del activation
    gc.collect()
    assert alive() is None
    assert [(request.op, request.gradients, request.autocast) for request in requests] == [
        ("dropout_add_layer_norm", True, torch.bfloat16),
        ("dropout_add_layer_norm", False, torch.bfloat16),
    ]
    assert requests[1].label == "dropout_add_layer_norm (6 x 64, bfloat16, forward)"
    args, _ = requests[0].arguments()
    assert [(x.dtype, x.requires_grad) for x in args[:3]] == [
        (torch.bfloat16, False),
        (torch.float32, True),
        (torch.bfloat16, False),
    ]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        again = CallKind.of("dropout_add_layer_norm", *requests[1].arguments())
    assert again.signature == requests[1].signature
    choice = measure(requests[0], SHORT)
    assert choice is not None
    other = "reference" if choice.taken == "pytorch" else "pytorch"
    apply(Choices((dataclasses.replace(choice, taken=other),)))
    with torch.autocast("cpu", torch.bfloat16):
        assert dropout_add_layer_norm.chosen(*args).name == other
        with torch.no_grad():
            assert dropout_add_layer_norm.chosen(*args).name == "pytorch"


def test_made_tensors_lie_in_memory_as_those_of_the_call():
    packed = torch.rand(5, 3, 2, 4)
    one = torch.full((), 3.0)
    ids = torch.arange(5)
    request = CallKind.of("grown", (packed.unbind(1)[1], one, ids, torch.rand(0, 4), torch.rand(3).expand(2, 3)), {})
    (view, same, numbers, empty, expanded), _ = request.arguments()
    assert (view.shape, view.stride(), view.is_leaf) == ((5, 2, 4), (24, 4, 1), True)
    assert same == 3
    assert same is not one
    assert numbers.equal(ids)
    assert empty.shape == (0, 4)
    assert expanded.stride() == (0, 1)
    ids.zero_()
    assert request.arguments()[0][2].tolist() == [0, 1, 2, 3, 4]


def test_an_op_that_works_in_place_leaves_the_run_alone():
    args, kwargs = example_inputs("lamb_step", CPU, torch.float32)
    tensors = [args[0], args[1], *vars(args[2]).values(), kwargs["step"], kwargs["learning_rate"]]
    before = [tensor.clone() for tensor in tensors]
    random = torch.random.get_rng_state()
    choice = measure(CallKind.of("lamb_step", args, kwargs), SHORT)
    assert choice is not None
    assert choice.taken == "reference"  # the only one, as Triton's interpreter is not measured
    assert list(choice.milliseconds) == ["reference"]
    assert all(tensor.equal(old) for tensor, old in zip(tensors, before, strict=True))
    assert torch.random.get_rng_state().equal(random)
    assert lamb_step.asked == "auto"


def test_both_ways_are_measured_where_gradients_are(monkeypatch: pytest.MonkeyPatch):
    ways: list[str] = []

    def watched(x: Tensor) -> Tensor:
        ways.append("forward")
        output = x * 2
        if output.requires_grad:
            output.register_hook(lambda _: ways.append("backward"))
        return output

    module = ModuleType("watched_grown")
    vars(module)["grown"] = watched
    monkeypatch.setitem(sys.modules, "watched_grown", module)
    order = (Implementation("watched", "watched_grown"),)
    monkeypatch.setitem(OPS, "grown", Op(grown, {"cpu": order, "cuda": order}))
    x = torch.rand(3, requires_grad=True)
    measure(request_for(x), SHORT)
    assert ways == ["forward", "backward"] * 2
    ways.clear()
    with torch.no_grad():
        request = request_for(x)
    measure(request, SHORT)
    assert ways == ["forward"] * 2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float64], ids=str)
def test_low_precision_tensors_are_made_too(dtype: torch.dtype):
    like = torch.zeros(16, 32).to(dtype)
    (made, turned), _ = CallKind.of("grown", (like, like.t()), {}).arguments()
    assert (made.dtype, made.stride(), turned.stride()) == (dtype, (32, 1), (1, 32))
    assert made.float().std() > 0.1


def test_a_call_on_a_gpu_is_timed_with_a_cold_cache_and_the_host_ahead(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []

    class Event(SimpleNamespace):
        def record(self) -> None:
            order.append("record")
            self.time = float(len(order))

        def elapsed_time(self, end: "Event") -> float:
            return end.time - self.time

    def noted(name: str) -> Callable[..., None]:
        return lambda *_: order.append(name)

    def empty(count: int, dtype: torch.dtype, device: torch.device) -> SimpleNamespace:
        assert (count, dtype, device.type) == (100, torch.int8, "cuda")
        return SimpleNamespace(zero_=noted("flush"))

    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(on=enable_timing, synchronize=noted("wait")))
    monkeypatch.setattr(torch.cuda, "_sleep", noted("sleep"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(L2_cache_size=50))
    monkeypatch.setattr(torch, "empty", empty)
    assert Timer(torch.device("cuda"))(noted("work")) == 2e-3
    assert order == ["flush", "sleep", "record", "work", "record", "wait"]


def test_what_is_for_tests_is_not_measured_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Implementation, "unsupported_reasons", lambda *_args, **_kwargs: [])
    args, kwargs = example_inputs("dropout_add_layer_norm", CPU, torch.float32)
    request = CallKind.of("dropout_add_layer_norm", args, kwargs)
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_gpu = torch.empty(3, 3, device="cuda")
    names = [each.name for each in autotune._usable(request, (on_gpu,), {})[0]]
    assert names == ["triton", "apex", "pytorch"]
    assert [each.name for each in autotune._usable(request, args, kwargs)[0]] == ["apex", "pytorch", "reference"]


def test_arguments_that_do_not_fit_are_not_measured(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "rand", full)
    assert tune([request_for(torch.ones(3, 3))]) == Choices()
    assert calls == []
    assert "grown (3 x 3, float32) is not measured" in caplog.messages[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    device = torch.device("cuda")
    for op in ("dropout_add_layer_norm", "lamb_step"):
        args, kwargs = example_inputs(op, device, torch.bfloat16)
        choice = measure(CallKind.of(op, args, kwargs), SHORT)
        assert choice is not None
        assert choice.errors == {}
        assert all(0 < milliseconds < 1000 for milliseconds in choice.milliseconds.values())
