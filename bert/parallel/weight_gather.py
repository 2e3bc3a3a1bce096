"""Weights of a sharded optimizer on their way to all ranks, beside the forward pass that waits for them.

After an update a rank has new weights in its own shard alone. The next step hands all buckets over to be gathered, in the
order in which its forward pass needs them, and each part of the model waits for the buckets that its weights lie in.
"""

from collections.abc import Callable

from bert.model import BertForPreTraining
from bert.optimizer import FlatParameters
from bert.parallel.reduction import Reduction


class WeightGather:
    """Gathering of weights: all at once when called, or beside the forward pass that follows ``start``.

    The embeddings and every layer but the last wait for their own weights when they are called. When the last one of these
    returns, all the others have to be there, since the last layer and the heads are no modules that are called.
    """

    def __init__(self, model: BertForPreTraining, flat: FlatParameters, reduction: Reduction) -> None:
        self._reduction = reduction
        self._weights_N = flat.weights_N
        self.buckets = reduction.buckets[::-1]
        """From the start of the vector, as forward needs them."""
        self._arrivals: list[Callable[[], None]] = []
        parts = [model.embeddings, *model.layers[:-1]]
        for part in parts:
            stop = max(flat.places[parameter].stop for parameter in part.parameters())
            needed = sum(bucket.start < stop for bucket in self.buckets)
            part.register_forward_pre_hook(lambda *_, needed=needed: self.wait(needed))
        parts[-1].register_forward_hook(lambda *_: self.finish())

    def __call__(self) -> None:
        """Gather all weights before anything else is computed. Every rank must call it at the same time."""
        self.start()
        self.finish()

    def start(self) -> None:
        """Begin; the next forward pass waits for what it needs. Every rank must call it at the same time."""
        stream = self._reduction.stream
        self._arrivals = [stream.run(lambda bucket=bucket: self._gather(bucket)) for bucket in self.buckets]

    def wait(self, count: int) -> None:
        """Compute from now on with the first ``count`` buckets, if they are on their way."""
        if self._arrivals:
            self._arrivals[count - 1]()  # they come in order

    def finish(self) -> None:
        """Compute from now on with all of them."""
        if self._arrivals:
            self._arrivals = []
            self._reduction.stream.join()

    def _gather(self, bucket: slice) -> None:
        self._reduction.gather(self._weights_N, bucket)
