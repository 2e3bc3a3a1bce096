"""The step on several ranks over gloo: reduction beside backward, recorded or not, is the reduction after it."""

from pathlib import Path

import pytest

from tests.distributed.test_reduction import run_worker


@pytest.mark.parametrize(("ranks", "local_size"), [(2, 2), (4, 2)])
def test_every_order_of_the_step_gives_the_same_weights(tmp_path: Path, ranks: int, local_size: int) -> None:
    """With one and with two micro-batches a step, padded to capacities that differ between ranks."""
    found = run_worker(tmp_path / "out.json", ranks, local_size, worker="step_worker")
    automatic = found.pop("automatic")
    assert len(set(automatic["ways"])) == 1
    assert automatic["ways"][0].startswith("reduction: ")
    if ranks == local_size:  # nothing to measure
        assert automatic["ways"][0] == "reduction: flat (one host)"
    else:
        assert all(f"{strategy} " in automatic["ways"][0].partition("(")[2] for strategy in ("flat", "hierarchical"))
    print(automatic)
    assert len(found) == 6
    for name, run in found.items():
        accumulation = int(name[-1])
        assert run["overlap_is_same"], name
        assert run["recording_is_same"], name
        # Backward fills the last bucket at its very end, so overlapped all have started by then; otherwise none has.
        assert run["buckets"] > 5
        assert run["early_after"] == [0] * 5
        assert run["early_overlapped"] == run["early_recorded"] == [run["buckets"]] * 5
        # Two sizes, of the last micro-batch and of the others if there are others, and the update. Of ten micro-batches
        # one has a size that is not recorded.
        assert run["recordings"] == 2 * accumulation + 1
        assert run["replays"] == (5 if accumulation == 1 else 9) + 5
        # Against one message after backward, as sums of two numbers are the same in any order.
        if ranks == 2 and name.startswith("flat"):
            assert run["one_message_is_same"], name
        assert run["difference"] < 1e-6, name
        assert max(run["moment_differences"]) < 1e-4, name
        assert run["losses"] == pytest.approx(run["whole_losses"], rel=1e-5)
        assert run["losses"][0] != run["losses"][-1]
