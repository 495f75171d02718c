"""The tensor code against docs/wire-format.md: its examples, and a second decoder written from it."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from regtopk import wire
from regtopk.core.codes import quantise
from regtopk.core.sparse import SparseGradient
from tests.wire import slow_decoder
from tests.wire.test_message import sparse_gradients

PAGE = Path(__file__).parents[2] / "docs" / "wire-format.md"


@settings(deadline=None, max_examples=100)
@given(sparse_gradients())
def test_a_decoder_written_from_the_page_reads_what_we_send(case: tuple[SparseGradient, str]) -> None:
    sparse, index_code = case
    message = bytes(wire.encode(sparse, index_code).tolist())
    indices, values = slow_decoder.decode(message, sparse.numel)
    assert indices == sparse.indices.tolist()
    assert torch.equal(torch.tensor(values, dtype=sparse.values.dtype), sparse.values)


@pytest.mark.parametrize(("index_code", "value_code"), [("elias-fano", "float32"), ("rice", "4bit")])
def test_the_examples_on_the_page(index_code: str, value_code: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"```text {index_code} {value_code}\n(.*?)```", page, re.DOTALL)
    assert found is not None
    values = quantise(torch.tensor([1.0, -2.0, 0.5]), value_code)
    sparse = SparseGradient(torch.tensor([7, 40, 99]), values, 100, code=value_code)
    assert bytes(wire.encode(sparse, index_code).tolist()) == bytes.fromhex(found[1])
