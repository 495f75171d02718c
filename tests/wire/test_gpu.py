"""On a GPU: the same bytes as on the CPU, and nothing read back on the way."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from regtopk import wire
from regtopk.core.codes import VALUE_CODES, message_bytes, quantise
from regtopk.core.sparse import SparseGradient

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def vector(numel: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(numel, generator=generator)[:k].sort().values
    return indices, torch.randn(k, generator=generator).exp() * torch.randn(k, generator=generator)


@pytest.mark.parametrize("value_code", VALUE_CODES)
@pytest.mark.parametrize("index_code", ["elias-fano", "raw32"])
@pytest.mark.parametrize(("numel", "k"), [(1_000_000, 1000), (3000, 1500), (100, 0)])
def test_the_gpu_makes_the_same_bytes_without_waiting(
    value_code: str, index_code: str, numel: int, k: int
) -> None:
    rows = [vector(numel, k, seed) for seed in range(3)]
    indices, raw = (torch.stack(column) for column in zip(*rows, strict=True))
    expected = SparseGradient(indices, quantise(raw, value_code), numel, code=value_code)
    on_gpu_indices, on_gpu_raw = indices.cuda(), raw.cuda()
    with no_waiting():
        values = quantise(on_gpu_raw, value_code)
        sent = SparseGradient(on_gpu_indices, values, numel, code=value_code)
        messages = wire.encode(sent, index_code)
        found, status = wire.decode_rows(messages, numel, k, index_code, value_code)
        segments = wire.encode_segment(values, value_code)
        dense, dense_status = wire.decode_segment(segments, k, value_code)
        message_bytes(found.counts, numel, dtype=torch.float32, value_code=value_code, index_code=index_code)
    assert torch.equal(messages.cpu(), wire.encode(expected, index_code))
    assert torch.equal(wire.encode_rows(sent, index_code)[0], messages.flatten())
    assert torch.equal(segments.cpu(), wire.encode_segment(expected.values, value_code))
    wire.raise_for_status(torch.cat([status, dense_status]))
    assert torch.equal(found.indices.cpu(), indices) and torch.equal(found.values.cpu(), expected.values)
    assert torch.equal(dense.cpu(), expected.values)


@pytest.mark.parametrize("value_code", ["float32", "4bit"])
@pytest.mark.parametrize(("numel", "k"), [(10_000_000, 10_000), (30_000, 15_000)])
def test_messages_of_many_steps(value_code: str, numel: int, k: int) -> None:
    """From the third on both ways are replayed graphs: on new input, without waiting, and damage is found."""
    for step in range(6):
        indices, raw = vector(numel, k, seed=step)
        values = quantise(raw, value_code)
        expected = wire.encode(SparseGradient(indices, values, numel, code=value_code))
        on_gpu = SparseGradient(indices.cuda(), values.cuda(), numel, code=value_code)
        torch.cuda.synchronize()
        with no_waiting():
            message = wire.encode(on_gpu)
            rows = torch.stack([message, message])
            rows[1, 40 + 7 * step] ^= 4
            found, status = wire.decode_rows(rows, numel, k, value_code=value_code)
        assert torch.equal(message.cpu(), expected)
        assert status[0] == 0 and status[1] != 0
        assert found.counts.tolist() == [k, 0]
        assert torch.equal(found.indices[0].cpu(), indices) and torch.equal(found.values[0].cpu(), values)


@pytest.mark.parametrize("value_code", VALUE_CODES)
def test_rice_on_the_gpu(value_code: str) -> None:
    indices, raw = vector(1_000_000, 1000, seed=0)
    sparse = SparseGradient(indices, quantise(raw, value_code), 1_000_000, code=value_code)
    message = wire.encode(sparse, "rice").cuda()
    with no_waiting():
        found, status = wire.decode_rows(message[None], 1_000_000, 1200, "rice", value_code)
    wire.raise_for_status(status)
    assert found.counts.tolist() == [1000]
    assert torch.equal(found.indices[0, :1000].cpu(), indices)
    on_gpu = SparseGradient(indices.cuda(), sparse.values.cuda(), 1_000_000, code=value_code)
    assert torch.equal(wire.encode(on_gpu, "rice"), message)
