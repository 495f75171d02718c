"""What does an entry cost on the wire, in bits, time and error?

Every index and value code on what Top-k keeps of a vector, beside zstd of the raw bytes (int32 indices and
float32 values) and the entropy of the selection. Times are medians of encoding one message and of decoding
one, as a row of `decode_rows`. Errors are relative, ||x - Q(x)|| / ||x||, over the entries sent: of a normal
vector, and of a heavy-tailed one (Student's t with 3 degrees of freedom).

    python benchmarks/wire.py [--json] [--out FILE] [--numel J] [--device cuda]
"""

import math
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from reporting import give, parser_for
from torch import Tensor

from regtopk import wire
from regtopk.core.codes import INDEX_CODES, VALUE_CODES, quantise
from regtopk.core.sparse import SparseGradient

DENSITIES = (1e-4, 1e-3, 1e-2, 1e-1)


def vectors(numel: int, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(numel, generator=generator)
    heavy = normal.roll(1) / torch.randn(3, numel, generator=generator).square().mean(0).sqrt()
    return {"normal": normal.to(device), "heavy": heavy.to(device)}


def largest(vector: Tensor, k: int) -> tuple[Tensor, Tensor]:
    indices = vector.abs().topk(k).indices.sort().values
    return indices, vector[indices]


def median_s(call: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats + 1):  # the first warms up
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def entropy_bits(density: float) -> float:
    """Bits an index that no code of random indices can beat."""
    rest = 1 - density
    return -math.log2(density) - rest / density * math.log2(rest)


def zstd_bits(indices: Tensor, values: Tensor) -> dict[str, float] | None:
    """Bits an entry after zstd (level 3) of the raw arrays, and how long that takes on the CPU."""
    try:
        import zstandard
    except ImportError:
        return None
    raw = indices.int().cpu().numpy().tobytes() + values.float().cpu().numpy().tobytes()
    packer, unpacker = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    packed = packer.compress(raw)
    cpu = torch.device("cpu")
    return {
        "bits_per_entry": 8 * len(packed) / len(values),
        "encode_s": median_s(lambda: packer.compress(raw), cpu),
        "decode_s": median_s(lambda: unpacker.decompress(packed), cpu),
    }


def measure(
    found: dict[str, tuple[Tensor, Tensor]], numel: int, index_code: str, code: str
) -> dict[str, Any]:
    indices, raw = found["normal"]
    sparse = SparseGradient(indices, quantise(raw, code), numel, code=code)
    message = wire.encode(sparse, index_code)
    rows, k, device = message[None], len(indices), message.device
    values_only = wire.encode_segment(sparse.values, code)
    return {
        "index_code": index_code,
        "value_code": code,
        "num_bytes": message.numel(),
        "bits_per_entry": 8 * message.numel() / k,
        "bits_per_index": 8 * (message.numel() - values_only.numel()) / k,
        "quantise_s": median_s(lambda: quantise(raw, code), device),
        "encode_s": median_s(lambda: wire.encode(sparse, index_code), device),
        "decode_s": median_s(lambda: wire.decode_rows(rows, numel, k, index_code, code), device),
        "error": {name: float((x - quantise(x, code)).norm() / x.norm()) for name, (_, x) in found.items()},
    }


def run(numel: int, device: torch.device) -> dict[str, Any]:
    all_entries = vectors(numel, device)
    results = []
    for density in DENSITIES:
        k = round(density * numel)
        found = {name: largest(vector, k) for name, vector in all_entries.items()}
        rows = [measure(found, numel, i, v) for i in INDEX_CODES for v in VALUE_CODES]
        results.append(
            {
                "density": density,
                "k": k,
                "entropy_bits_per_index": entropy_bits(k / numel),
                "zstd": zstd_bits(*found["normal"]),
                "codes": rows,
            }
        )
    return {
        "command": "benchmarks/wire.py",
        "numel": numel,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "results": results,
    }


def show(report: dict[str, Any]) -> None:
    print(f"J = {report['numel']:,} on {report['device']}, {report['num_threads']} threads")
    for part in report["results"]:
        print(f"\ndensity {part['density']:g}, k = {part['k']:,}; ", end="")
        print(f"entropy {part['entropy_bits_per_index']:.2f} bits an index")
        print("index code  value code  bits/entry  bits/index  quantise  encode  decode  error normal  heavy")
        for row in part["codes"]:
            times = "".join(f"{1e3 * row[key]:>8.2f}" for key in ("quantise_s", "encode_s", "decode_s"))
            error = row["error"]
            print(
                f"{row['index_code']:<11} {row['value_code']:<10} {row['bits_per_entry']:>11.2f}"
                f" {row['bits_per_index']:>11.2f}  {times} ms {error['normal']:>10.5f} {error['heavy']:>8.5f}"
            )
        zstd = part["zstd"]
        if zstd is None:
            print("zstd of the raw bytes: not measured, zstandard is not installed")
        else:
            print(
                f"zstd of the raw bytes  {zstd['bits_per_entry']:>11.2f}                      "
                f"{1e3 * zstd['encode_s']:>8.2f}{1e3 * zstd['decode_s']:>8.2f} ms"
            )


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--numel", type=int, default=11_173_962, help="J; ResNet-18's by default")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    arguments = parser.parse_args()
    report = run(arguments.numel, arguments.device)
    give(report, arguments, show)


if __name__ == "__main__":
    main()
