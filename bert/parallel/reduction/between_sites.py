"""Sum of a vector over sites. Each rank exchanges a piece of it, so that all hosts of a site use the slow link at once."""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from bert.parallel.mesh import Mesh, level_groups, process_group


class BetweenSites:
    """Sum a vector over sites. All ranks of a site have equal vectors, and each piece belongs to one rank in every site.

    The vector is divided into as many pieces as the largest site has ranks. A rank of a smaller site owns several pieces.
    """

    def __init__(self, sites: Sequence[tuple[int, ...]], mesh: Mesh) -> None:
        """``sites`` lists the ranks of each site. All ranks of the run must call this at the same time."""
        level_groups(mesh)
        self._own = next(ranks for ranks in sites if mesh.rank in ranks)
        self._inside = process_group(self._own, alone=True)
        self.pieces = max(map(len, sites))
        self.owned: dict[int, dist.ProcessGroup] = {}
        """For the number of each piece that this rank owns, the group of the piece's owners in all sites."""
        for place in range(self.pieces):
            members = sorted(ranks[place % len(ranks)] for ranks in sites)
            # A rank without this piece creates a group of itself, so that all ranks have created equally many groups.
            group = process_group(members if mesh.rank in members else [mesh.rank], alone=True)
            if group is not None and mesh.rank in members:
                self.owned[place] = group

    def slices(self, size: int) -> list[slice]:
        """Return the slice of each piece. All pieces but the last have equal lengths."""
        length = -(-size // self.pieces)
        return [slice(min(size, place * length), min(size, (place + 1) * length)) for place in range(self.pieces)]

    def all_reduce_(self, vector_N: Tensor, add: Callable[[Tensor, dist.ProcessGroup | None], object]) -> None:
        """Sum a vector over the sites in place. ``add(piece, group)`` must sum a piece in place over the piece's owners."""
        slices = self.slices(len(vector_N))
        for place, group in self.owned.items():
            add(vector_N[slices[place]], group)
        self.spread(vector_N, slices)

    def spread(self, vector_N: Tensor, slices: Sequence[slice]) -> None:
        """Send each piece from its owner to the other ranks of the site."""
        for place, piece in enumerate(slices):
            dist.broadcast(vector_N[piece], src=self._own[place % len(self._own)], group=self._inside)
