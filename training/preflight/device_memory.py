"""The device memory that a rank of the built-in trainer needs, as a sum, against a device's.

Weights, gradients and both moments of AdamW are fp32 and exact; activations are counted by the
tensors that the decoder keeps for its backward pass, with fused attention. What the driver, CANN
and the allocator take is not in the sum but a reserve. Sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from perdure.training.config.engine import KubernetesEngineSpec
from perdure.training.config.job import Job
from perdure.training.config.model import ModelSpec, ParallelKind, Precision
from perdure.training.telemetry import vendor_tools
from perdure.training.telemetry.npu_smi import parse_table
from perdure.training.telemetry.sampling import NPU_SMI
from perdure.training.trainer.data.tokenizer import open_tokenizer
from perdure.training.wire.node import Check, CheckOutcome

NAME = "device_memory"
FIELD = "preflight.device_memory_gib"
GIB = 1 << 30
MIB = 1 << 20
# Of the chips of Atlas A2 and A3 training servers.
ASSUMED_OF, ASSUMED_BYTES = "huawei.com/Ascend910", 64 * GIB
RESERVE_BYTES = 4 * GIB  # of a device with 64 GiB, CANN and the driver hold about 3 GiB
_FP32 = 4
_HALF = 2
# Tensors of hidden size that a block keeps for its backward pass: inputs and outputs of both
# norms, query, output of the attention and its copy for the linear layer behind; of the inner
# width: gate, up, the activated gate and the product.
_HIDDEN_TENSORS = 7
_INNER_TENSORS = 4
_NORMS = 2  # of a block; in half precision each keeps its input in fp32 as well
# Scores of the vocabulary in the arithmetic's type; in fp32 as scores, log-probabilities, gradient.
_FP32_SCORES = 3
_COMMUNICATORS = {ParallelKind.HSDP: 3, ParallelKind.FSDP2: 2}  # of the world, and of mesh axes


@dataclass(frozen=True, slots=True)
class MemorySum:
    """The memory of one rank, by use.

    Attributes:
        gathered: whole blocks of a sharded model, or copies of the weights in half precision.
        collectives: two buffers for each communicator.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    collectives: int

    @property
    def state(self) -> int:
        """The part that is exact."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The whole sum, without the reserve."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def text(self) -> str:
        """The sum, written out."""
        parts = (f"{f.name} {getattr(self, f.name) / GIB:.1f}" for f in fields(self))
        return f"{' + '.join(parts)} = {self.total / GIB:.1f} GiB per rank"


def sum_memory(job: Job) -> MemorySum | None:
    """Add up the memory of one rank; None for programs of the user's own.

    Raises:
        ValueError: the tokenizer's file is none.
        OSError: it cannot be read.
    """
    if not job.is_reference:
        return None
    vocab_size = open_tokenizer(job.tokenizer).vocab_size
    parameters = job.model.num_parameters(vocab_size)
    kind = job.parallelism.kind
    is_sharded = kind in (ParallelKind.FSDP2, ParallelKind.HSDP)
    size = _FP32 if job.precision is Precision.FP32 else _HALF
    shards = job.layout.optimizer_shards if is_sharded else 1
    share = -(-parameters // shards)
    if is_sharded:
        gathered = _gathered_blocks(job.model, vocab_size, size)
    else:
        gathered = 0 if job.precision is Precision.FP32 else parameters * _HALF
    return MemorySum(
        weights=share * _FP32,
        gradients=share * _FP32,
        optimizer=share * 2 * _FP32,
        gathered=gathered,
        activations=_activations(job, vocab_size, size),
        collectives=2 * job.comm.buffsize_mb * MIB * _COMMUNICATORS.get(kind, 1),
    )


def _gathered_blocks(model: ModelSpec, vocab_size: int, size: int) -> int:
    """Count the block that computes, the one that is gathered next, the embedding, gradients."""
    outside = (vocab_size + 1) * model.hidden_size
    block = (model.num_parameters(vocab_size) - outside) // model.num_layers
    return (2 * block + outside) * size + block * _FP32


def _activations(job: Job, vocab_size: int, size: int) -> int:
    model = job.model
    kv_size = model.hidden_size // model.num_heads * model.kv_heads
    widths = _HIDDEN_TENSORS * model.hidden_size + 2 * kv_size + _INNER_TENSORS * model.ffn
    norms = _NORMS * model.hidden_size * _FP32 if size == _HALF else 0
    block = widths * size + norms + model.num_heads * _FP32  # the sums of fused attention
    scores = vocab_size * (size + _FP32_SCORES * _FP32)
    tokens = job.batch.micro_batch_size * model.seq_len
    return tokens * (model.num_layers * block + scores)


def check_device_memory(job: Job) -> Check | None:
    """Check that the built-in trainer fits; None for other programs, whose sizes are not known."""
    needed = sum_memory(job)
    if needed is None:
        return None
    layout = f"{job.parallelism.kind} over {job.world_size} ranks: {needed.text}"
    size_bytes = _device_bytes(job)
    if size_bytes is None:
        fact = f"{layout}; the memory of a device is not known, set {FIELD}"
        return Check(name=NAME, outcome=CheckOutcome.SKIPPED, seen=fact)
    room = size_bytes - RESERVE_BYTES
    outcome, advice = CheckOutcome.OK, ""
    if needed.total > room:
        # Activations are an estimate; weights, gradients and moments are not.
        is_certain = needed.state > size_bytes
        outcome = CheckOutcome.FAILED if is_certain else CheckOutcome.WARNING
        advice = f"; {_advise(job, needed)}"
    is_assumed = job.preflight.device_memory_gib is None and not job.engine.on_this_machine
    source = f" (assumed for {ASSUMED_OF}, else set {FIELD})" if is_assumed else ""
    reserve = f"{RESERVE_BYTES / GIB:.0f} of them in reserve"
    allowed = f"{size_bytes / GIB:.1f} GiB, {reserve}{source}"
    return Check(name=NAME, outcome=outcome, seen=f"{layout}{advice}", allowed=allowed)


def _advise(job: Job, needed: MemorySum) -> str:
    if job.parallelism.kind is ParallelKind.DDP and needed.state > needed.activations:
        return "shard the state: parallelism.kind hsdp with replicas, or fsdp2"
    if job.batch.micro_batch_size > 1:
        return "use a smaller batch.micro_batch_size"
    return "use fewer replicas or fsdp2, a shorter model.seq_len, or more nodes"


def _device_bytes(job: Job) -> int | None:
    """Return the memory of a device: the job's word, this machine's chips, or an assumption."""
    if job.preflight.device_memory_gib is not None:
        return int(job.preflight.device_memory_gib * GIB)
    if isinstance(job.engine, KubernetesEngineSpec):
        is_npu = any(name.startswith(ASSUMED_OF) for name in job.engine.resources)
        return ASSUMED_BYTES if is_npu else None
    if vendor_tools.find_tool(NPU_SMI) is None:
        return None
    try:
        chips = parse_table(vendor_tools.run_tool((NPU_SMI, "info")))
    except vendor_tools.NoAnswer:
        return None
    # A chip that is ill may show none.
    return min((c.memory_total_bytes for c in chips if c.memory_total_bytes), default=None)
