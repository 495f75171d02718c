"""The CUDA kernels on a real GPU, against the reference there.

`python -m tests.kernels.on_gpu [NAME ...]` runs all checks, or those named, without pytest (PYTHONPATH=src
where regtopk is not installed). It prints a line per check, and exits with 1 if one failed. `pytest -m gpu`
runs them too.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import regtopk
from regtopk import kernels
from regtopk.core.algorithm import Algorithm
from regtopk.core.codes import quantise
from regtopk.core.precision import round_at_random
from regtopk.core.random import random_sequence
from regtopk.distributed.transport.collectives import Alone, Collectives
from regtopk.kernels import Damped, Support
from regtopk.kernels.cuda import pieces as cuda_pieces
from regtopk.kernels.cuda import replay
from regtopk.kernels.cuda import selection as kernel
from regtopk.kernels.reference import pieces as reference_pieces
from regtopk.kernels.reference import selection as reference
from regtopk.wire import decode_segment, encode_segment
from tests.kernels import checks
from tests.kernels.checks import choose_damped, rows_to_code
from tests.processes import passes

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def sizes() -> None:
    powers = [2**n + d for n in (1, 4, 8, 12, 13, 16, 17, 20) for d in (-1, 0, 1)]
    for numel in (1, *powers, 1_000_003, 10_000_019):
        all_of_it = {numel} if numel < 5000 else set()
        for k in sorted(all_of_it | {max(1, numel // n) for n in (numel, 1000, 80, 10, 3)}):
            residual, grad = normal(numel), normal(numel)
            checks.check_take_largest_(kernel, residual, grad, k)
            checks.check_take_largest_(kernel, residual, grad, k, *choose_damped(numel, k, device="cuda"))


def adversarial() -> None:
    numel = 1_000_003
    for make in checks.ADVERSARIAL.values():
        for density in (1e-5, 1e-3, 0.012, 0.1, 0.5):
            grad, k = make(numel, "cuda"), max(1, round(density * numel))
            checks.check_take_largest_(kernel, torch.zeros_like(grad), grad, k)
            damped = choose_damped(numel, k, device="cuda")
            checks.check_take_largest_(kernel, 0.5 * grad, grad, k, *damped)


def boundaries() -> None:
    numel, k = 300_007, 100
    grad = normal(numel)
    order = grad.abs().argsort(descending=True)
    for first in (0, k - 3, k - 1, k + 2, 5 * k):
        damped = order[first : first + 60].sort().values
        for factor in (0.0, 0.5, 1.0, 1.5):
            damping = torch.full((60,), factor, device="cuda")
            checks.check_take_largest_(kernel, torch.zeros_like(grad), grad, k, damped, damping)
        exact = grad[order[k - 1]].abs() / grad[damped].abs()
        checks.check_take_largest_(kernel, torch.zeros_like(grad), grad, k, damped, exact)
    for num_damped in (k // 2, 20_000):  # candidates that damping takes away: some, and all
        damped, nothing = order[:num_damped].sort().values, torch.zeros(num_damped, device="cuda")
        checks.check_take_largest_(kernel, torch.zeros_like(grad), grad, k, damped, nothing)


def dtypes() -> None:
    numel, k = 200_003, 200
    for residual_dtype in (torch.float32, torch.float64):
        damped, damping = choose_damped(numel, k, device="cuda")
        for dtype in DTYPES:
            for density in (1e-3, 0.5):
                residual, grad = normal(numel, dtype=residual_dtype), normal(numel, dtype=dtype)
                size = round(density * numel)
                damping = damping.to(residual_dtype)
                checks.check_take_largest_(kernel, residual, grad, size, damped, damping)
    for dtype in (torch.bfloat16, torch.float16):
        halves = torch.arange(2**16, dtype=torch.int32, device="cuda").to(torch.int16).view(dtype)
        halves = halves[torch.isfinite(halves)]
        checks.check_take_largest_(kernel, torch.zeros(len(halves), device="cuda"), halves, 1)


def batches() -> None:
    for batch in ((1,), (8,), (2, 3), (70,)):
        numel, k = 100_001, 100
        damped = choose_damped(numel, k, batch, device="cuda")
        residual, grad = normal(*batch, numel), normal(*batch, numel)
        residual.view(-1, numel)[0], grad.view(-1, numel)[0] = 0.0, 0.25
        checks.check_take_largest_(kernel, residual, grad, k, *damped)
    wide, wide_grad = normal(3, 70_000), normal(3, 80_000)
    around = wide[:, 60_001:].clone()
    checks.check_take_largest_(kernel, wide[:, :60_001], wide_grad[:, 7:60_008], 60)
    assert torch.equal(wide[:, 60_001:], around)


def thresholds_and_chunks() -> None:
    for numel in (1, 4097, 1_000_003):
        for threshold in (0.0, 1.0, 3.0, 100.0):
            for capacity in (1, max(1, numel // 100), numel):
                checks.check_take_above_(kernel, normal(numel), normal(numel), threshold, capacity)
    batch = normal(2, 3, 50_001), normal(2, 3, 50_001, dtype=torch.bfloat16)
    checks.check_take_above_(kernel, *batch, torch.rand(2, 3, device="cuda") * 4, 500)
    checks.check_take_above_(kernel, batch[0], None, 1.0, 500)
    for chunk, k in ((1, 1), (64, 3), (1000, 1000), (4096, 64), (5000, 40), (16_384, 16), (20_000, 7)):
        residual, grad = normal(2, 100_003), normal(2, 100_003, dtype=torch.float16)
        damped = choose_damped(100_003, 100, (2,), device="cuda")
        checks.check_take_largest_(kernel, residual, grad, k, chunk=chunk)
        checks.check_take_largest_(kernel, residual, grad, k, *damped, chunk)


def a_captured_graph() -> None:
    """A captured step does the same again on new input, and never waits for the device."""
    numel, k = 1_000_003, 1000
    residual, grad = normal(numel), normal(numel)
    damped, damping = choose_damped(numel, k, device="cuda")
    given = Damped(damped, torch.empty_like(damping))

    def step() -> tuple[Tensor, Tensor]:
        return kernel.take_largest_(residual, grad, k, given)

    given.scores.copy_((residual + grad)[damped].abs() * damping)
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step()
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indices, values = step()
    inputs = (normal(numel), torch.ones(numel, device="cuda"), torch.zeros(numel, device="cuda"))
    for new in inputs:  # both the usual path and the one for many equal entries
        residual.zero_()
        grad.copy_(new)
        given.scores.copy_(new[damped].abs() * damping)
        expected = torch.zeros_like(residual)
        graph.replay()
        torch.cuda.synchronize()
        again = checks.check_take_largest_(kernel, expected, new, k, damped, damping)
        assert torch.equal(indices, again[0]) and torch.equal(values, again[1])
        assert torch.equal(residual, expected)


def calls_that_are_repeated() -> None:
    """From the third call on a graph is replayed: on new input, on two streams; what was returned stays."""
    numel, k = 1_000_003, 1000
    residual, grad, streams = normal(numel), normal(numel), (torch.cuda.Stream(), torch.cuda.current_stream())
    returned: list[tuple[Tensor, Tensor]] = []
    num_before = len(replay._captured)
    for call in range(40):
        grad.copy_(normal(numel))
        damped, damping = choose_damped(numel, k, device="cuda")
        expected, scores = residual.clone(), (residual + grad)[damped].abs() * damping
        given = Damped(damped, scores) if call % 2 else None
        size = k if call % 8 < 4 else 7 * k  # it may change at any time
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[call // 2 % 2]):
            version = residual._version
            found = kernel.take_largest_(residual, grad, size, given)
            assert residual._version > version
        torch.cuda.synchronize()
        indices, values = reference.take_largest_(expected, grad, size, given)
        assert torch.equal(found[0], indices) and torch.equal(found[1], values)
        assert torch.equal(residual, expected)
        returned += [found, (indices, values)]
    assert len(replay._captured) == num_before + 8  # with damping or not, of two sizes, on two streams
    for found, expected_pair in zip(returned[::2], returned[1::2], strict=True):
        assert all(map(torch.equal, found, expected_pair))


def pieces() -> None:
    """Pieces of one type by a table of addresses, others by torch; and a NaN or inf is never missed."""
    shapes = [(3000, 401), (7,), (0,), (64, 3, 5, 5), (1_500_001,), (1,)]
    narrow, double = torch.bfloat16, torch.float64
    for dtype, wide in ((torch.float32, torch.float32), (narrow, torch.float32), (double, double)):
        parts = [normal(*shape, dtype=dtype) for shape in shapes]
        expected = torch.cat([part.flatten() for part in parts]).to(wide)
        vector = torch.full_like(expected, torch.nan)
        assert bool(cuda_pieces.join_(vector, parts)) and torch.equal(vector, expected)
        start = [normal(*shape, dtype=wide) for shape in shapes]
        difference = torch.full_like(expected, torch.nan)
        reference_pieces.join_(difference, parts, start)
        assert bool(cuda_pieces.join_(vector, parts, start)) and torch.equal(vector, difference)
        for where in (0, 401, expected.numel() - 1, 2_000_000):
            for bad in (torch.nan, torch.inf, -torch.inf):
                spoiled = expected.to(dtype)
                spoiled[where] = bad
                assert not bool(cuda_pieces.join_(vector, kernels.parts_of(spoiled, parts)))
        indices = torch.randint(expected.numel(), (3, 900), device="cuda").sort(-1).values
        sparse = torch.zeros_like(expected).scatter_(0, indices.flatten(), expected[indices.flatten()])
        cuda_pieces.spread_(parts, sparse, Support(indices, torch.full((3,), 900, device="cuda")))
        assert torch.equal(torch.cat([part.flatten() for part in parts]), sparse.to(dtype))
        no, yes = torch.tensor([False, True], device="cuda")
        old, ones = [part.clone() for part in parts], [torch.ones_like(part) for part in parts]
        cuda_pieces.overwrite_if_(no, parts, torch.nan)
        assert all(map(torch.equal, old, parts))
        cuda_pieces.overwrite_if_(yes, parts, ones)
        assert all(map(torch.equal, ones, parts))
        cuda_pieces.overwrite_if_(yes, parts, torch.nan)
        assert all(bool(part.isnan().all()) for part in parts)
        cuda_pieces.overwrite_if_(yes, parts, 0.0)
        assert not any(bool(part.any()) for part in parts)


def a_sharded_step() -> None:
    """The host does not wait in a backward of a sharded model, and a bad step changes nothing."""
    dist.init_process_group("nccl", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("replicate", "shard"))
        for algorithm in (regtopk.TopK(density=0.01, value_code="4bit"), regtopk.RegTopK(density=0.001)):
            straight = sharded_steps(mesh, algorithm, bad_step=None)
            with mock.patch.object(Collectives, "all_gather", gather_by_nccl):
                skipping = sharded_steps(mesh, algorithm, bad_step=3)
            assert all(map(torch.equal, straight, skipping))
    finally:
        dist.destroy_process_group()


def gather_by_nccl(collectives: Collectives, tensor: Tensor) -> Tensor:
    """What a group of one goes without; `Alone` looks for oracles, and has no group."""
    if isinstance(collectives, Alone):
        return tensor.unsqueeze(0)
    gathered = tensor.new_empty(1, tensor.numel())
    dist.all_gather_into_tensor(gathered.view(-1), tensor.contiguous(), group=collectives.group)
    return gathered


def sharded_steps(mesh: DeviceMesh, algorithm: Algorithm[Any], bad_step: int | None) -> list[Tensor]:
    """The gradients of six steps, and all that the algorithm remembers then."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(3)), nn.Linear(1500, 70)).cuda()
    for layer in net[:3]:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    exchange = regtopk.attach(net, algorithm, process_group=mesh["replicate"])
    batches = torch.randn(6, 32, 1500, device="cuda")
    found = []
    for number, batch in enumerate(batches):
        for is_bad in [True, False] if number == bad_step else [False]:
            net.zero_grad()
            loss = (net(batch) ** 2).mean() * (torch.nan if is_bad else 1.0)
            torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")  # ranks ask anew at first
            loss.backward()
            torch.cuda.set_sync_debug_mode("default")
            grads = [p.grad.to_local().clone() for p in net.parameters()]
            assert not is_bad or all(bool(grad.isnan().all()) for grad in grads)
        found += grads
    assert exchange.num_steps == 6 and exchange.total.num_skipped == int(bad_step is not None)
    states = [bucket.state.state_dict() for bucket in exchange._steps.buckets.all]
    return found + [tensor.clone() for state in states for tensor in state.values()]


def beyond_32_bits() -> None:
    """J, and N · J, above 2^31; what an oracle would need too much memory for is checked directly."""
    for shape in ((2**31 + 4099,), (3, 2**30)):
        for density in (1e-4, 2e-2):
            residual = torch.zeros(*shape, device="cuda")
            grad = torch.empty(*shape, dtype=torch.bfloat16, device="cuda").normal_()
            k = round(density * shape[-1])
            last = shape[-1] - 1
            grad[..., last] = 50.0
            indices, values = kernel.take_largest_(residual, grad, k)
            assert bool((indices.diff(dim=-1) > 0).all())
            assert bool((indices[..., -1] == last).all())
            assert torch.equal(values, grad.gather(-1, indices).float())
            assert not residual.gather(-1, indices).any()
            assert bool((residual.abs().amax(-1) <= values.abs().amin(-1)).all())
            grad.scatter_(-1, indices, 0.0)
            parts = (tensor.view(-1).split(2**28) for tensor in (residual, grad))
            assert all(torch.equal(part, expected.float()) for part, expected in zip(*parts, strict=True))
            del residual, grad, indices, values
    torch.cuda.empty_cache()


def draws() -> None:
    for numel, k in ((1, 1), (5, 5), (1025, 1025), (11_173_962, 130_000), (2**40 + 1, 1000)):
        for seed, step in ((0, 0), (7, 9), (-3, 123_456_789)):
            drawn = random_sequence(numel, k, seed, step, torch.device("cuda"))
            assert drawn.tolist() == random_sequence(numel, k, seed, step).tolist()
    for shape in ((11_173_962,), (3, 1, 2_000_003)):
        vector, index = normal(*shape), torch.arange(shape[0] if len(shape) > 1 else 1, device="cuda")
        index = index.view(-1, 1, 1) if len(shape) > 1 else index[0]
        rounded = round_at_random(vector, index, 77)
        assert torch.equal(rounded.cpu(), round_at_random(vector.cpu(), index.cpu(), 77))


def values_in_blocks() -> None:
    """The CPU's bits, of values and of messages."""
    for code, dtype in product(("4bit", "2bit", "sign"), (torch.float32, torch.float64)):
        values, counts = rows_to_code(dtype), torch.tensor([700, 129, 128, 1, 5, 0, 512])
        sent = quantise(values, code)
        assert torch.equal(quantise(values.cuda(), code).cpu(), sent)
        assert torch.equal(quantise(values.cuda(), code, counts.cuda()).cpu(), quantise(values, code, counts))
        assert torch.equal(encode_segment(sent.cuda(), code).cpu(), encode_segment(sent, code))
        found, status = decode_segment(encode_segment(sent.cuda(), code), 700, code, dtype)
        assert torch.equal(found.cpu(), sent) and not bool(status.any())


CHECKS = (
    sizes, adversarial, boundaries, dtypes, batches, thresholds_and_chunks, a_captured_graph,
    calls_that_are_repeated, pieces, a_sharded_step, beyond_32_bits, draws, values_in_blocks,
)  # fmt: skip


def run(check: Callable[[], None]) -> None:
    torch.manual_seed(0)
    check()
    torch.cuda.synchronize()


def main() -> None:
    names = [check.__name__ for check in CHECKS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="*", help=", ".join(names))
    wanted = parser.parse_args().name or names
    if unknown := set(wanted) - set(names):
        parser.error(f"no such check: {', '.join(sorted(unknown))}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {kernels.describe('cuda').reason}")
    results = [passes(check.__name__, partial(run, check)) for check in CHECKS if check.__name__ in wanted]
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
