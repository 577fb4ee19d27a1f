"""Operators of torch_npu on an emulated device give what the CPU gives."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

functional = torch.nn.functional


def numbers(*shape):
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).sin().reshape(shape)


def out_of_place(x):
    made = torch.empty(0, device=x.device)
    torch.mul(x, 2, out=made)
    return made


def in_place(x):
    y = x.clone()
    y[1:, ::2] *= 3
    y.clamp_(min=0).index_put_((torch.tensor([0, 1], device=x.device),), x[0])
    return y


def foreach(x):
    many = [x, x[0], x * 2]
    torch._foreach_add_(many, 1.5)
    torch._foreach_lerp_(many, [one * 3 for one in many], 0.25)
    return torch.cat([one.flatten() for one in [*torch._foreach_norm(many), *many]])


def copied(x):
    made = [torch.empty(2, 6, device=x.device), torch.empty(3, 6, device=x.device)]
    torch.split_with_sizes_copy(torch.cat([x, x[:1]]), [2, 3], dim=0, out=made)
    torch._foreach_copy_(made, [one.flip(0) for one in made])
    return torch.cat(made)


CASES = {
    "matmul": lambda x: x @ x.T,
    "batched matmul": lambda x: torch.bmm(x[None].repeat(3, 1, 1), x.T.expand(3, 6, 4)),
    "broadcast": lambda x: x[:, :1] + x[:1] * torch.tensor(2.0, device=x.device),
    "types": lambda x: x.double().to(torch.bfloat16).float() + x.long(),
    "number of the host": lambda x: x * torch.tensor(3.0) + 1,
    "reductions": lambda x: torch.stack([x.sum(), x.mean(), x.std(), x.amax(), x.norm()]),
    "maximum with indices": lambda x: torch.cat([one.float() for one in x.max(dim=1)]),
    "sort": lambda x: torch.cat([one.float() for one in x.sort(descending=True)]),
    "top": lambda x: torch.cat([one.float() for one in x.topk(2)]),
    "cumulative": lambda x: x.cumsum(0) + x.logcumsumexp(1),
    "views": lambda x: x.view(2, 12)[:, 3:9].transpose(0, 1).contiguous().flatten(),
    "of other strides": lambda x: x.T.clone(memory_format=torch.preserve_format) + x.T,
    "gather and scatter": lambda x: x.gather(1, x.argsort(1)).scatter(1, x.argsort(1), x),
    "index": lambda x: x[x > 0],
    "nonzero": lambda x: (x > 0).nonzero().float(),
    "unique": lambda x: torch.unique((x * 3).round()),
    "where": lambda x: torch.where(x > 0, x, -x),
    "softmax": lambda x: functional.softmax(x, -1) + functional.log_softmax(x, 0),
    "layer norm": lambda x: functional.layer_norm(x, (6,)),
    "convolution": lambda x: functional.conv1d(x[None], numbers(2, 4, 3).to(x.device)),
    "padding": lambda x: functional.pad(x, (1, 2)),
    "one hot": lambda x: functional.one_hot(x.abs().long() + 1, 4).float(),
    "triangles": lambda x: x.tril() + x.triu(1),
    "factories": lambda x: torch.cat(
        [torch.arange(4, device=x.device), torch.full_like(x, 2).flatten(), x.new_zeros(2)]
    ),
    "solve": lambda x: torch.linalg.solve(x @ x.T + torch.eye(4, device=x.device), x),
    "fourier": lambda x: torch.view_as_real(torch.fft.rfft(x)),
    "conjugate": lambda x: torch.view_as_real((torch.complex(x, x).conj() * 2).resolve_conj()),
    "output": out_of_place,
    "in place": in_place,
    "foreach": foreach,
    "copies of FSDP2": copied,
    "empty": lambda x: x[:0].sum(0) + x[:0].mean(),
}


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_of_the_cpu(name):
    x = numbers(4, 6)
    expected = CASES[name](x.clone())
    result = CASES[name](x.to("npu:0"))
    assert result.device.type == "npu"
    torch.testing.assert_close(result.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_results_that_are_no_tensors_are_those_of_the_cpu():
    x = numbers(4).to("npu:0")
    assert torch.equal(x, x.clone())
    assert not torch.allclose(x, x + 1)
    assert x.sum().item() == numbers(4).sum().item()


def test_the_callers_mistake_is_the_callers_exception():
    x = torch.ones(3, device="npu:0")
    with pytest.raises(RuntimeError, match="must match the size"):
        x + torch.ones(4, device="npu:0")
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|shape|size"):
        torch.ones(2, 3, device="npu:0") @ torch.ones(2, 3, device="npu:0")
    assert (x + 1).tolist() == [2.0] * 3


def test_gradients_are_those_of_the_cpu():
    def gradient(device):
        x = numbers(4, 6).to(device).requires_grad_()
        w = numbers(6, 6).to(device).requires_grad_()
        y = functional.gelu(x @ w).softmax(-1).where(x > 0, x * w[0]).cumsum(0)
        (
            y.pow(2).mean() + functional.binary_cross_entropy_with_logits(x, (x > 0).float())
        ).backward()
        return x.grad.cpu(), w.grad.cpu()

    for one, other in zip(gradient("npu:0"), gradient("cpu"), strict=True):
        assert torch.equal(one, other)


def test_tensors_go_from_device_to_device():
    x = numbers(4, 6).to("npu:0")
    there = x.T.to("npu:1")
    assert there.device == torch.device("npu:1")
    assert torch.equal(there.cpu(), x.T.cpu())


def test_a_list_that_is_copied_to_the_host_is_there_when_the_call_returns():
    host = [torch.zeros(300, 300, pin_memory=pinned) for pinned in (True, False)]
    x = torch.ones(300, 300, device="npu:0")
    for _ in range(20):
        x = x @ x / 300
    torch._foreach_copy_(host, [x, x * 2])
    assert [one.sum().item() for one in host] == [300.0**2, 2 * 300.0**2]
