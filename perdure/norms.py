"""`perdure status RUN --norms`: proposes restart.abnormal_grad_norm from the run's own norms."""

from __future__ import annotations

from dataclasses import asdict

from perdure.console import WIDTH, make_console, print_json, sparkline
from perdure.monitor import RunMonitor
from perdure.training.errors import InputError
from perdure.training.reporting.norms import (
    MARGIN,
    MIN_STEPS,
    QUANTILE,
    NormProposal,
    norm_picture,
    norms_of_steps,
    propose_threshold,
)
from perdure.training.supervisor.run_handle import RunHandle

FIELD = "restart.abnormal_grad_norm"


def show_norms(run: RunHandle, *, as_json: bool) -> None:
    """Print the proposal and write its picture.

    Raises:
        InputError: the run has shown too few norms.
    """
    norms = norms_of_steps(RunMonitor(run).snapshot().records)
    proposal = propose_threshold(norms, warmup_steps=run.job.optimizer.warmup_steps)
    if proposal is None:
        why = "a command needs worker.progress with grad_norm" if run.job.worker.is_command else ""
        text = f"{run.job.run_id} has the gradient norms of {len(norms)} steps, at least"
        reason = f"{text} {MIN_STEPS} after the warm-up are needed{f'; {why}' if why else ''}"
        raise InputError("--norms", reason)
    picture = run.home / "runs" / run.job.run_id / "norms.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_bytes(norm_picture(norms, proposal))
    present = run.job.restart.abnormal_grad_norm
    if as_json:
        print_json({**asdict(proposal), "present": present, "picture": str(picture)})
        return
    _print(proposal, list(norms.values()), present)
    print(f"picture: {picture}")


def _print(proposal: NormProposal, norms: list[float], present: float | None) -> None:
    console = make_console()
    console.print(sparkline(norms, WIDTH), highlight=False)
    console.print(
        f"{proposal.num_steps} steps from {proposal.from_step}: median {proposal.median:.3g}, "
        f"{QUANTILE:.1%} quantile {proposal.quantile:.3g}, largest {proposal.largest:.3g} at step "
        f"{proposal.largest_step}"
    )
    console.print(
        f"proposed: restart: {{abnormal_grad_norm: {proposal.threshold:g}}}  "
        f"({MARGIN:g} x the quantile; {len(proposal.above)} of these steps would be abnormal; "
        f"the job has {present if present is not None else 'none'})"
    )
