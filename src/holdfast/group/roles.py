"""Which rank does what."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The ranks of a group. memory_ranks: how many of the last ranks own all rows and do nothing else; 0: every rank
    trains and owns. Writer w of the pool is rank ``owners[w]``. Raises ConfigError."""

    world_size: int
    memory_ranks: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.memory_ranks < self.world_size:
            raise ConfigError(
                f"--memory-ranks {self.memory_ranks}: of {self.world_size} ranks at least one must be left to train"
            )

    @property
    def trainers(self) -> range:
        return range(self.world_size - self.memory_ranks)

    @property
    def owners(self) -> range:
        return range(self.world_size - self.memory_ranks if self.memory_ranks else 0, self.world_size)

    @property
    def keeper(self) -> int:
        """The rank that has the dense states and the manifest in force: the first that does nothing but own rows, else
        rank 0."""
        return self.owners[0]

    def describe(self, rank: int) -> str:
        words = [word for word, ranks in (("trains", self.trainers), ("owns rows", self.owners)) if rank in ranks]
        return " and ".join(words)


def slice_of(batch_size: int, part: int, num_parts: int) -> tuple[int, int]:
    """The samples ``[begin, end)`` of a batch that are part `part`'s: contiguous, as even as can be."""
    return part * batch_size // num_parts, (part + 1) * batch_size // num_parts
