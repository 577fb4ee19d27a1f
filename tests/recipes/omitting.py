"""The reference program on a corpus from which some batches are missing.

OMIT has where each of them begins, in global samples.
"""

from __future__ import annotations

import os

from perdure.training.drill import recipe
from perdure.training.trainer import pretrain
from perdure.training.trainer.data.loader import ResumableLoader

make_loader = pretrain.make_loader


class Omitting:
    """A loader that never hands these batches out."""

    def __init__(self, loader: ResumableLoader, starts: set[int]) -> None:
        self.loader, self.starts = loader, starts

    def __getattr__(self, name: str):
        return getattr(self.loader, name)

    def next_step(self):
        while self.loader.position in self.starts:
            self.loader.next_step()
        return self.loader.next_step()


def main(job) -> None:
    starts = {int(text) for text in os.environ["OMIT"].split()}
    pretrain.make_loader = lambda *given: Omitting(make_loader(*given), starts)  # type: ignore[assignment]
    recipe.main(job)
