"""The guide's scripts for Accelerate and Lightning, run twice in the same processes: the second goes on."""

import re
from pathlib import Path

import pytest

from tests.distributed.ranks import Ranks
from tests.integrations.scripts import TELL, bits_of, needs, replaced, run, script_of

pytestmark = pytest.mark.filterwarnings("default")  # what these libraries warn of is theirs
TWICE = """
for _ in range(2):
    exec(compile({source!r}, "recipe", "exec"), {{"__name__": "__main__"}})
"""

VALIDATE = """
    def validation_step(self, batch, index):
        bits = b"".join(p.detach().numpy().tobytes() for p in self.parameters())
        print("validated", __import__("hashlib").sha256(bits).hexdigest())

    def configure_optimizers(self):"""
SAVED = """
saved = torch.load(last, weights_only=True)
(start,) = [state["updates"]["start"] for state in saved["callbacks"].values() if "updates" in state]
assert all(torch.equal(saved["state_dict"][name], tensor) for name, tensor in start.items())
"""


def check(ranks: Ranks, source: str, folder: Path, first_step: str) -> list[str]:
    """The second run resumes, and both end with the same bits on both ranks; what they print."""
    here, elsewhere = run(ranks, TWICE.format(source=source), folder)
    assert len(bits_of([here, elsewhere])) == 4 and len(set(bits_of([here, elsewhere]))) == 1
    assert re.findall("resumed from (.*)", here) == ["None", first_step]
    assert here.count("on 2 workers; this rank:") == 2 and "workers" not in elsewhere
    return [here, elsewhere]


@needs("accelerate", "accelerate")
def test_accelerate(new_ranks: Ranks, tmp_path: Path) -> None:
    source = replaced(script_of("accelerate"), "every=2", "every=4, fragments=2")
    source = replaced(source, "first = int", 'print("resumed from", folder)\nfirst = int')
    source += TELL.format(model="accelerator.unwrap_model(model)")
    source = replaced(source, "accelerator.end_training()\n", "")  # the second run is in the same group
    check(new_ranks, source, tmp_path, "out/digits/checkpoint-54")


@needs("lightning", "lightning")
def test_lightning(new_ranks: Ranks, tmp_path: Path) -> None:
    source = replaced(script_of("lightning"), "every=2", "every=4, fragments=2")
    source = replaced(source, "max_epochs=2", "max_epochs=3")
    source = replaced(source, "save_last=True", "save_last=True, every_n_epochs=2")
    source = replaced(source, "trainer.fit(", "ckpt = os.path.exists(last)\ntrainer.fit(")
    source += '\nprint("resumed from", last if ckpt else None)\n' + TELL.format(model="module")
    check(new_ranks, source, tmp_path, "out/lightning/last.ckpt")
