"""The script to copy: on two machines (here two launchers), and resumed on one."""

import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def start(folder: Path, *words: str, script: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    command = [
        *TORCHRUN,
        *words,
        str(ROOT / "examples" / "train_ddp.py"),
        "--checkpoint",
        str(folder),
        *script,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> str:
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


def test_script_trains_on_two_machines_and_resumes_on_one(tmp_path: Path) -> None:
    meet = f"--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint localhost:{free_port()}"
    machines = [start(tmp_path, *meet.split(), script=("--epochs", "1")) for _ in range(2)]
    printed = [finish(machine) for machine in machines]
    assert sorted("23 steps on 2 workers" in out for out in printed) == [False, True]
    assert (tmp_path / "checkpoint.pt").exists()
    resumed = finish(start(tmp_path, "--standalone", "--nproc_per_node", "2", script=("--resume",)))
    for page in ("README.md", "docs/training.md"):
        shown = (ROOT / page).read_text(encoding="utf-8")
        for line in resumed.splitlines():
            if line.split()[0] in ("regtopk:", "sent", "dense", "payload"):
                assert line in shown, page
    accuracy = float(resumed.split(" %")[0])
    assert accuracy > 94  # 96.9 as this was written
