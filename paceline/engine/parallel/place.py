"""Which part of a model a process computes: some of the heads of every layer, or some of the layers."""

from dataclasses import dataclass

from paceline.core.kv_layout import ALL_HEADS, HeadPart


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` runs of layers, in order."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it begins with tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with logits."""
        return self.index == self.count - 1


@dataclass(frozen=True, slots=True)
class Place:
    """A process's own."""

    heads: HeadPart = ALL_HEADS
    stage: Stage = Stage()

    @classmethod
    def of(cls, rank: int, *, tp: int, pp: int) -> "Place":
        """That of a rank. Rank 0, which samples, has the last stage, and the others those before it, in order."""
        return cls(HeadPart(rank, tp) if tp > 1 else ALL_HEADS, Stage((rank - 1) % pp, pp))

    @property
    def count(self) -> int:
        """How many processes compute the model together: in parts, or in stages."""
        return self.heads.count * self.stage.count

    @property
    def in_group(self) -> int:
        """Its number among them."""
        return self.heads.index + self.stage.index


WHOLE = Place()
