"""Forward and backward passes of N workers on one device.

A worker's mini-batch is too small to fill a GPU. So all workers' passes are captured once as one CUDA graph;
a step is then a single launch. In it they are parallel branches, or, where the network can be that of many
models, one pass. On a CPU the same code runs plainly, worker by worker.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regtopk.lab.experiments.data.examples import Examples
from regtopk.lab.experiments.networks.flat import FlatWeights
from regtopk.lab.experiments.networks.norm import record_statistics

NUM_WARM_UPS = 3  # passes before a capture, in which libraries choose their kernels
NUM_RECORDED = 2000  # training examples that batch norm's statistics are taken from before an evaluation
MOST_SCORES = 2**28  # of an evaluation at once: 2000 windows of 128 tokens of GPT-2's have 51 GB of scores


class Engine:
    """Gradients of N workers of each of R models, and how good a model is.

    Args:
        network: its kind; it is copied.
        examples: on the device.
        num_models: R, trained side by side (the seeds of an experiment).
        num_workers: N.
        batch_size: B.
        dtype: what convolutions and linear layers compute in; gradients are float32.
        has_own_weights: whether every worker has weights of its own (local steps).
        num_branches: how many workers run side by side on a GPU; 0: no graph, one after another.
        is_compiled: let torch.compile fuse the network's small operations first.
        is_stacked: let the network compute for all workers at once, its parameters (R N, ...).
    """

    def __init__(
        self,
        network: nn.Module,
        examples: Examples,
        *,
        num_models: int = 1,
        num_workers: int,
        batch_size: int,
        dtype: torch.dtype = torch.float32,
        has_own_weights: bool = False,
        num_branches: int = 8,
        is_compiled: bool = False,
        is_stacked: bool = False,
    ) -> None:
        device = examples.train.device
        self.examples = examples
        num_in_all = num_models * num_workers
        num_owners = num_in_all if has_own_weights or is_stacked else num_models
        self._weights = FlatWeights(network, num_owners, dtype, device)
        self.layout = self._weights.layout
        self._is_stacked = is_stacked
        owners: list[int | slice] = [slice(None)] if is_stacked else list(range(num_owners))
        self._networks = [self._weights.bind(copy.deepcopy(network).to(device), row) for row in owners]
        self._evaluated = self._weights.bind(copy.deepcopy(network).to(device), 0)
        for one in self._networks if is_compiled else ():
            for block in getattr(one, "blocks", [one]):  # blocks are alike, so the first one's code is theirs
                block.compile(dynamic=False)
        self._shape = num_models, num_workers
        self._rows = torch.zeros(num_in_all, batch_size, dtype=torch.int64, device=device)
        # rows without gaps, as a cluster's residuals are: selection reads both in the widest loads only if
        # they lie alike
        self._grads = torch.zeros(num_in_all, self.layout.numel, device=device)
        self._grad_views = [list(self._weights.views(own).values()) for own in self._grads]
        self._losses = torch.empty(num_in_all, device=device)
        num_streams = min(num_branches, num_in_all) if device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream() for _ in range(num_streams)]
        self._graph: torch.cuda.CUDAGraph | None = None

    def grads(self, params: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Each worker's gradient (R, N, J) and loss (R, N), in buffers that the next call overwrites.

        Weights are (R, J), or (R, N, J) where workers have their own. Rows (R, N, B) are training examples.
        """
        if self._is_stacked and params.dim() == 2:
            params = params.unsqueeze(1).expand(*self._shape, -1)
        self._weights.load_(params)
        self._rows.copy_(rows.view_as(self._rows))
        if not self._streams:
            self._all_workers()
        else:
            if self._graph is None:
                self._graph = self._capture()
            self._graph.replay()
        return self._grads.unflatten(0, self._shape), self._losses.view(self._shape)

    @torch.no_grad()
    def evaluate(self, params: Tensor) -> list[dict[str, float]]:
        """How good each of R models (R, J) is on the test examples: percent right, and mean loss."""
        return [self._evaluate(model) for model in params]

    def _evaluate(self, params: Tensor) -> dict[str, float]:
        self._weights.load_(params)
        network, examples = self._evaluated, self.examples
        stride = max(1, len(examples.train) // NUM_RECORDED)
        record_statistics(network, self._read(examples.train[::stride][:NUM_RECORDED]))
        num_right = torch.zeros((), device=params.device, dtype=torch.float64)
        loss = torch.zeros_like(num_right)
        num_each = examples.test_targets[0].numel()
        at_once = min(NUM_RECORDED, max(1, MOST_SCORES // (num_each * examples.num_classes)))
        parts = examples.test.split(at_once), examples.test_targets.split(at_once)
        for x, y in zip(*parts, strict=True):
            scores = network(self._read(x)).float().flatten(0, -2)
            num_right += (scores.argmax(-1) == y.flatten()).sum()
            loss += F.cross_entropy(scores, y.flatten()) * len(x)
        network.train()
        num = len(examples.test)
        return {"accuracy": 100 * float(num_right) / (num * num_each), "test_loss": float(loss) / num}

    def _capture(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(NUM_WARM_UPS):
                self._all_workers()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._all_workers()
        return graph

    def _all_workers(self) -> None:
        chosen = self._rows.flatten()
        x = self._read(self.examples.train[chosen]).split(self._rows.shape[1])
        y = self.examples.train_targets[chosen].split(self._rows.shape[1])
        if self._is_stacked:
            self._workers_at_once(torch.stack(x), torch.stack(y))
            return
        if not self._streams:
            for worker in range(len(x)):
                self._one_worker(worker, x[worker], y[worker])
            return
        main = torch.cuda.current_stream()
        for worker in range(len(x)):
            stream = self._streams[worker % len(self._streams)]
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                self._one_worker(worker, x[worker], y[worker])
        for stream in self._streams:
            main.wait_stream(stream)

    def _one_worker(self, worker: int, x: Tensor, y: Tensor) -> None:
        owner = worker * len(self._networks) // len(self._grads)
        with torch.enable_grad():
            scores = self._networks[owner](x).float()
            loss = F.cross_entropy(scores.flatten(0, -2), y.flatten())
            grads = torch.autograd.grad(loss, list(self._networks[owner].parameters()))
        torch._foreach_copy_(self._grad_views[worker], list(grads))
        self._losses[worker].copy_(loss.detach())

    def _workers_at_once(self, x: Tensor, y: Tensor) -> None:
        network = self._networks[0]
        with torch.enable_grad():
            scores = network(x).float()
            loss = F.cross_entropy(scores.flatten(0, -2), y.flatten(), reduction="none")
            losses = loss.view(len(x), -1).mean(-1)
            grads = torch.autograd.grad(losses.sum(), list(network.parameters()))
        # faster than copies into views
        torch.cat([grad.flatten(1).float() for grad in grads], 1, out=self._grads)
        self._losses.copy_(losses.detach())

    def _read(self, inputs: Tensor) -> Tensor:
        """As a network takes them: images in its precision, channels first in shape and last in memory."""
        if not inputs.is_floating_point():
            return inputs
        return inputs.to(self._weights.low.dtype).permute(0, 3, 1, 2)
