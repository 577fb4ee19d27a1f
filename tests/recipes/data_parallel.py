"""A user's session program of one rank that drives two devices with DataParallel."""

from __future__ import annotations

import torch
from torch import nn

import perdure
from perdure.training.trainer.pretrain import make_loader, open_data, seed_all


class Bigrams(nn.Module):
    """The next token from the last: no operator that an emulated device lacks."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 16)
        self.head = nn.Linear(16, vocab_size)

    def forward(self, inputs, targets):
        logits = self.head(self.embedding(inputs))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(job) -> None:
    seed_all(job.seed)
    session = perdure.join()
    dataset, manifest = open_data(job, session)
    model = Bigrams(manifest.vocab_size).to(session.device)
    is_on_npus = session.device.type == "npu"
    parallel = nn.DataParallel(model, device_ids=[0, 1] if is_on_npus else None)
    session.register(
        model=parallel,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        data=make_loader(job, session, dataset),
    )
    for step in session.steps(until=job.steps):
        with step:
            for inputs, targets in step.micro_batches():
                step.backward(parallel(inputs, targets).mean())
            step.apply()
