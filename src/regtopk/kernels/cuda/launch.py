"""Launches Triton programs, and remembers which compiled program belongs to which arguments.

Triton would look that up at every launch, which takes longer than a small program runs.
"""

from typing import Any

from regtopk.kernels.cuda.programs.words import SIZES

_compiled: dict[Any, Any] = {}
_sizes = frozenset(SIZES)
_NUMBERS = (int, bool)


def launch(
    program: Any,
    grid: tuple[int, int],
    arguments: dict[str, Any],
    num_warps: int = 4,
    max_registers: int | None = None,
) -> None:
    """Run a program of `triton.jit`, whose first argument is a tensor, (parts, rows) times.

    Arguments that the program does not have are ignored. With fewer registers, more threads run at a time.
    """
    key: list[Any] = [id(program), num_warps, max_registers]
    values = []  # as the compiled program takes them: addresses instead of tensors
    for name in program.arg_names:
        value = arguments[name]
        if type(value) in _NUMBERS:  # asking for a Tensor takes longer
            values.append(value)
            key.append(value < 2**31 if name in _sizes else value)
        else:
            address = value.data_ptr()
            values.append(address)
            key += (value.dtype, address % 16)
    device = arguments[program.arg_names[0]].get_device()
    compiled = _compiled.get((device, *key))
    if compiled is None:
        named = {name: arguments[name] for name in program.arg_names}
        options = {"num_warps": num_warps, "maxnreg": max_registers}
        compiled = program[grid](**named, **options)  # None in Triton's interpreter
        _compiled[(device, *key)] = compiled
    else:
        compiled[(*grid, 1)](*values)
