"""Compiles every Triton program as the kernels launch it, for a GPU that need not be there.

`python -m tests.kernels.compile_for_gpu` prints the programs (PYTHONPATH=src where regtopk is not installed).
The interpreter that the other tests use takes what the compiler refuses.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from regtopk import kernels
from regtopk.core.codes import quantise
from regtopk.core.sparse import SparseGradient
from regtopk.kernels import Damped, Support
from regtopk.kernels.cuda import blocks as cuda_blocks
from regtopk.kernels.cuda import codes as cuda_codes
from regtopk.kernels.cuda import pieces as cuda_pieces
from regtopk.kernels.cuda import rows as cuda_rows
from regtopk.kernels.cuda import selection as cuda
from regtopk.kernels.cuda.programs.random import round_rows, walk
from regtopk.wire import decode_rows, encode

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


def compile_only(
    program: Any,
    grid: tuple[int, int],
    arguments: dict[str, Any],
    num_warps: int = 4,
    max_registers: int | None = None,
) -> None:
    """In the place of `cuda.launch.launch`."""
    if arguments.get("DIGIT", 0) > 1:
        return  # the program for digit 1, with another shift
    if "facts" in arguments:
        arguments["facts"].zero_()  # what the program would write: no entries
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(program.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(place,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32" if value < 2**31 else "i64"
    options = {"num_warps": num_warps, "maxnreg": max_registers}
    compiled = triton.compile(ASTSource(program, signature, constants, attributes), TARGET, options)
    assert compiled.asm["cubin"]
    print(program.__name__, flush=True)


def compile_all(residual_dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    """Nothing is launched, so what the tensors hold does not matter."""
    num_rows, numel, k = 2, 50_003, 50
    residual = torch.zeros(num_rows, numel, dtype=residual_dtype)
    grad = torch.zeros(num_rows, numel, dtype=grad_dtype)
    indices = torch.arange(k).expand(num_rows, k)
    damped = Damped(indices, torch.zeros(num_rows, k, dtype=residual_dtype))
    cuda.take_largest_(residual, grad, k, damped)
    cuda.take_largest_(residual, grad, 4, damped, 4096)
    if residual_dtype == grad_dtype:  # other options of the same programs: one pair of dtypes is enough
        cuda.take_above_(residual, grad, 1.0, k)
        cuda.take_largest_(residual, grad, numel // 2, damped)
        cuda.take_largest_(residual, grad, numel // 2)
        cuda.take_above_(residual, None, 1.0, k)
        cuda.take_largest_(residual, grad, 4, chunk=4096)
    pieces = [grad[0], grad[1]]
    cuda_pieces.join_(residual.view(-1), pieces)
    if residual_dtype == grad_dtype:
        cuda_pieces.join_(residual.view(-1), pieces, list(residual))
    for source in (0.0, math.nan, [grad[1], grad[0]]):
        cuda_pieces.overwrite_if_(torch.tensor(True), pieces, source)
    cuda_pieces.overwrite_if_(torch.tensor(True), [torch.arange(k)], [torch.arange(k)])  # as of selections
    cuda_pieces.spread_(pieces, residual.view(-1), Support(indices, torch.full((num_rows,), k)))


def compile_codes() -> None:
    indices, values = torch.arange(0, 50_000, 1_000), torch.randn(50)
    for code in ("float32", "4bit"):
        message = encode(SparseGradient(indices, quantise(values, code), 50_003, code=code))
        decode_rows(message.expand(2, -1), 50_003, 50, value_code=code)


def compile_blocks() -> None:
    for dtype in (torch.float32, torch.float64):
        for bits in (4, 2, 1) if dtype == torch.float32 else (4,):
            values, count = torch.randn(2, 700, dtype=dtype), torch.tensor([700, 3])
            cuda_blocks.quantise(values, bits, count)
            cuda_blocks.unpack(cuda_blocks.pack(values, bits, None), count, 700, bits, dtype)


def compile_draws() -> None:
    state, numbers = 1 << 40, torch.arange(50)
    own = {"drawn": numbers, "numel": 50_003, "k": 50, "state": state, "bits": 16, "num_rounds": 16}
    compile_only(walk, (1, 1), own | {"BLOCK": 256})
    rows = {"rounded": torch.zeros(50, dtype=torch.bfloat16), "workers": numbers, "numel": 50, "state": state}
    for dtype in (torch.float32, torch.float64):
        vector = {"vector": torch.zeros(50, dtype=dtype)}
        compile_only(round_rows, (1, 1), rows | vector | {"WORDS": 256})


def main() -> None:
    for module in (cuda_rows, cuda_codes, cuda_pieces, cuda_blocks):
        vars(module)["launch"] = compile_only
    vars(kernels)["message_programs"] = lambda *_: cuda_codes
    compile_all(torch.float32, torch.float32)
    compile_all(torch.float64, torch.bfloat16)
    compile_codes()
    compile_blocks()
    compile_draws()


if __name__ == "__main__":
    main()
