"""Sparse gradients of any J up to 2^40 and any k, for hypothesis."""

import random

import torch
from hypothesis import strategies as st

from regtopk.core.codes import INDEX_CODES, VALUE_CODES, quantise
from regtopk.core.sparse import SparseGradient

dtypes = st.sampled_from([torch.float32, torch.float64])


@st.composite
def index_lists(draw: st.DrawFn, index_code: str, max_count: int = 400) -> tuple[list[int], int]:
    """Ascending distinct indices and the J they are below: scattered, all, or bunched at either end."""
    largest = 32 if index_code == "raw32" else 40
    numel = draw(st.one_of(st.integers(0, 600), st.integers(0, largest).map(lambda bits: 2**bits)))
    numel = max(0, min(2**largest, numel + draw(st.integers(-2, 2))))
    most = min(numel, max_count)
    k = draw(st.one_of(st.integers(0, most), st.sampled_from([0, most])))
    where = draw(st.sampled_from(["scattered", "first", "last", "bunched"]))
    generator = random.Random(draw(st.integers(0, 2**32)))
    if where == "scattered":
        return sorted(generator.sample(range(numel), k)), numel
    start = {"first": 0, "last": numel - k, "bunched": generator.randint(0, numel - k)}[where]
    return list(range(start, start + k)), numel


@st.composite
def sparse_gradients(draw: st.DrawFn, index_code: str | None = None) -> tuple[SparseGradient, str]:
    """A sparse gradient on the grid of its value code, and an index code that can hold it."""
    index_code = index_code or draw(st.sampled_from(INDEX_CODES))
    indices, numel = draw(index_lists(index_code))
    code, dtype = draw(st.sampled_from(VALUE_CODES)), draw(dtypes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(len(indices), generator=generator, dtype=dtype)
    values = values * 10.0 ** draw(st.sampled_from([-44, -3, 0, 30]))
    where = torch.tensor(indices, dtype=torch.int64)
    return SparseGradient(where, quantise(values, code), numel, code=code), index_code
