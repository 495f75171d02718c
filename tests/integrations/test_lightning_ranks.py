"""The callback of Lightning's Trainer on two ranks: manual optimization, and a validation that fails."""

from pathlib import Path

import pytest

from tests.distributed.ranks import Ranks
from tests.integrations.scripts import needs, replaced, run, script_of

pytestmark = [needs("lightning", "lightning"), pytest.mark.filterwarnings("default")]
STEP = "        return nn.functional.cross_entropy(self.network(inputs), targets)\n"
MANUAL_STEP = """\
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.network(inputs), targets))
        grads.append(self.network[0].weight.grad.sum().item())
        optimizer.step()
"""


def test_with_manual_optimization_ddp_sends_nothing(new_ranks: Ranks, tmp_path: Path) -> None:
    source = replaced(script_of("lightning"), STEP, MANUAL_STEP)
    source = replaced(source, "module = Digits()", "module = Digits()\nmodule.automatic_optimization = False")
    source = replaced(source, "    gradient_clip_val=1.0,\n", "    limit_train_batches=3,\n")
    source = "grads = []\n" + source + "print('grads', *grads)"
    mine, theirs = (printed.splitlines()[-1].split() for printed in run(new_ranks, source, tmp_path))
    assert len(mine) == 1 + 2 * 3 and mine[0] == theirs[0] == "grads"
    assert all(own != elsewhere for own, elsewhere in zip(mine[1:], theirs[1:], strict=True))


def test_after_a_validation_that_failed_fit_may_be_called_again(new_ranks: Ranks, tmp_path: Path) -> None:
    fails = (
        "    def validation_step(self, batch, index):\n        assert not self.trainer.global_step, 'bad'\n\n"
    )
    source = replaced(script_of("lightning"), "    def configure_opt", fails + "    def configure_opt")
    source = replaced(source, "    gradient_clip_val=1.0,\n", "    limit_train_batches=3,\n")
    source = replaced(source, "trainer.fit(module, loader, ", "trainer.fit(module, loader, loader, ")
    fit, end = source.split("trainer.fit(")[1].split("\n", 1)
    again = f"""
try:
    trainer.fit({fit}
except AssertionError as error:
    assert str(error) == "bad"
Digits.validation_step = lambda *_: None
trainer.fit({fit}
print("steps", sparse.exchange.num_steps)
"""
    source = source.split("trainer.fit(")[0] + again + end
    assert all("steps 6" in printed for printed in run(new_ranks, source, tmp_path))
