"""``python -m bert.train`` with captured steps and evaluations on a CPU, with stand-ins for CUDA graphs and NCCL."""

from contextlib import ExitStack
from unittest.mock import patch

import bert.execution.batches
import bert.run
import bert.setup
from bert.train import main
from tests.bert.recording import Recording, groups_that_wait_for_graphs, recordable_attention


def captured(mode: str, *arguments: str) -> int:
    """Run ``bert.train`` in a mode.

    The mode "eager" pads as a captured run does but captures nothing, "few" captures only the smallest shape, and
    "refused" raises an error after capturing.
    """
    with ExitStack() as stack:
        stack.enter_context(recordable_attention())
        stack.enter_context(groups_that_wait_for_graphs())
        patches = [
            patch.object(bert.execution.batches, "captures", lambda *_: True),
            patch.object(bert.run, "captures", lambda *_: mode != "eager"),
            patch.object(bert.run, "CudaCapturer", lambda _: Recording()),
        ]
        if mode == "few":
            choose = bert.setup.choose_shapes
            patches.append(patch.object(bert.setup, "choose_shapes", lambda *given: choose(*given)[:1]))
        if mode == "refused":
            patches.append(patch.object(bert.setup, "build_loader", side_effect=ValueError("no loader")))
        for each in patches:
            stack.enter_context(each)
        return main(arguments)
