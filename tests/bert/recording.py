"""Fake CUDA graphs for CPU tensors, which record operators and replay them on the same memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from bert.execution.cuda_graphs import CudaCapturer
from bert.parallel.reduction.gradients import CommunicationStream
from kernels import OPS, Dropout, varlen_attention


class CaptureError(AssertionError):
    """An action that CUDA or NCCL would reject or wait for forever."""


class Graph(TorchDispatchMode):
    """Fake CUDA graph. It records operators while it is active, and a replay runs only these operators."""

    live: ClassVar["WeakSet[Graph]"] = WeakSet()
    """Graphs that have captured something and have not been reset."""

    def __init__(self, note: Callable[[], object]) -> None:
        super().__init__()
        self._note = note
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self.groups: set[dist.ProcessGroup] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import Dynamo, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator and record it with its results, so that a replay can write to the same memory."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read = not isinstance(result, Tensor) and any(
            isinstance(each, bool | int | float) for each in tree_leaves(result)
        )
        if read and any(isinstance(each, Tensor) for each in tree_leaves((args, kwargs))):
            raise CaptureError(f"{func} hands a number to the host")
        if func.namespace == "c10d":
            boxes = [each for each in args if isinstance(each, torch.ScriptObject)]
            self.groups |= {dist.ProcessGroup.unbox(box) for box in boxes if "ProcessGroup" in str(box._type())}
        # Record detached aliases: recorded tensors would keep autograd's graph alive and affect which gradients it copies.
        self._calls.append((func, *map(_detached, (args, kwargs, result))))
        self.live.add(self)
        return result

    def replay(self) -> None:
        """Run the recorded operators."""
        if self not in self.live:
            raise CaptureError("a replay of a graph that is empty")
        self._note()
        with torch.no_grad():
            for func, args, kwargs, results in self._calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if isinstance(new, Tensor) and new.data_ptr() != old.data_ptr():
                        old.copy_(new)
                    elif isinstance(new, torch.ScriptObject):
                        new.wait()  # pyright: ignore[reportAttributeAccessIssue]  the work of a collective

    def reset(self) -> None:
        """Drop the recorded operators."""
        self.live.discard(self)
        self._calls.clear()


def _detached(value: Any) -> Any:
    """Detach all tensors in an operator's arguments or results; ``tree_map`` would take most of a recording's time."""
    if isinstance(value, (tuple, list)):
        return [_detached(each) for each in value]
    if isinstance(value, dict):
        return {name: _detached(each) for name, each in value.items()}
    return value.detach() if isinstance(value, Tensor) else value


class Recording(CudaCapturer):
    """``CudaCapturer`` that calls fakes in place of PyTorch's CUDA functions."""

    def __init__(self, note: Callable[[str], object] = lambda _: None) -> None:
        """``note`` is called with "run" before each run, and with "capture" before each capture."""
        self._note = note
        self.graphs: list[Graph] = []
        """Graphs in the order of their preparation."""
        self.replays: list[int] = []
        """Index in ``graphs`` of each replay."""
        with self._stand_ins():
            super().__init__(torch.device("cpu"))

    def prepare(self, function: Callable[[], None]) -> Callable[[], None]:
        self._note("run")
        with self._stand_ins():
            return super().prepare(function)

    def capture(self) -> None:
        self._note("capture")
        with self._stand_ins():
            super().capture()

    @contextmanager
    def _stand_ins(self) -> Iterator[None]:
        stream = SimpleNamespace(device=torch.device("cpu"), wait_stream=lambda _: None)
        with patch.multiple(
            torch.cuda,
            Stream=lambda _: stream,
            current_stream=lambda _: stream,
            stream=lambda _: nullcontext(),
            graph_pool_handle=lambda: None,
            CUDAGraph=self._new_graph,
            graph=_recorded,
        ):
            yield

    def _new_graph(self) -> Graph:
        number = len(self.graphs)
        self.graphs.append(Graph(lambda: self.replays.append(number)))
        return self.graphs[-1]


@contextmanager
def _recorded(graph: Graph, **_: object) -> Iterator[None]:
    def inline(_: CommunicationStream, work: Callable[[], None]) -> Callable[[], None]:
        work()  # in this thread, because the recording covers only one thread
        return lambda: None

    def refused(*_: object) -> None:
        raise CaptureError("values are read on the host")

    def waited(work: dist.Work, *limits: Any, wait: Any = dist.Work.wait) -> bool:
        with _disable_current_modes():  # gloo writes results in this wait, so a replay repeats it
            return wait(work, *limits)

    with (
        patch.object(CommunicationStream, "run", inline),
        patch.object(dist.Work, "wait", waited),
        patch.multiple(Tensor, tolist=refused, numpy=refused),
        graph,
    ):
        yield


@contextmanager
def groups_that_wait_for_graphs() -> Iterator[None]:
    """Raise an error if a process group is destroyed while a graph exists, as NCCL would wait forever."""
    destroy = dist.destroy_process_group

    def refusing(group: dist.ProcessGroup | None = None) -> None:
        live = [graph for graph in Graph.live if (graph.groups if group is None else group in graph.groups)]
        if live:
            raise CaptureError(f"NCCL would wait for {len(live)} graphs")
        destroy(group)

    with patch.object(dist, "destroy_process_group", refusing):
        yield


@contextmanager
def recordable_attention() -> Iterator[None]:
    """Compute attention by ``dense_attention``, because every CPU implementation reads lengths on the host."""
    implementations = varlen_attention.implementations
    dense = replace(implementations["reference"], functions={"varlen_attention": dense_attention})
    with ExitStack() as stack:
        stack.enter_context(patch.dict(implementations, reference=dense))
        stack.enter_context(
            patch.object(varlen_attention, "definition", dense_attention)
        )  # used by varlen_self_attention
        for name in ("varlen_attention", "varlen_self_attention"):
            stack.enter_context(OPS[name].using("reference"))
        yield


def dense_attention(
    query_QHE: Tensor,
    key_THE: Tensor,
    value_THE: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,
    dropout: Dropout | None = None,
) -> Tensor:
    """Compute ``kernels.reference.ops.varlen_attention`` with a mask over all pairs of tokens."""
    (queries, heads, _), sequences = query_QHE.shape, len(cu_seqlens_q) - 1
    query_Q, key_T = torch.arange(queries), torch.arange(len(key_THE))
    owner_Q = torch.bucketize(query_Q, cu_seqlens_q[1:].long(), right=True)
    owner_T = torch.bucketize(key_T, cu_seqlens_k[1:].long(), right=True)
    attends_Q1T = ((owner_Q[:, None] == owner_T) & (owner_Q < sequences)[:, None])[:, None]
    scores_QHT = torch.einsum("qhe,the->qht", query_QHE, key_THE) * query_QHE.shape[-1] ** -0.5
    scores_QHT = scores_QHT.masked_fill(~attends_Q1T, torch.finfo(scores_QHT.dtype).min)
    probabilities_QHT = torch.where(attends_Q1T, scores_QHT.softmax(dim=-1), 0.0)
    if dropout is not None:
        kept_QHL = dropout.mask(torch.arange(queries * heads), max_seqlen).view(queries, heads, max_seqlen)
        place_T = (key_T - cu_seqlens_k[owner_T]).clamp(max=max_seqlen - 1)
        probabilities_QHT = torch.where(kept_QHL[:, :, place_T], probabilities_QHT * dropout.scale, 0.0)
    return torch.einsum("qht,the->qhe", probabilities_QHT, value_THE)
