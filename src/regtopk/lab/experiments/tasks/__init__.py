"""What methods are trained on: gradients of simulated workers, and how good a model is."""

from collections.abc import Sequence

from regtopk.lab.experiments.tasks.classification import Digits, FashionMnist
from regtopk.lab.experiments.tasks.convex import LinearRegression, Toy
from regtopk.lab.experiments.tasks.deep import Gpt, ResNet18GroupNormTask, ResNet18Task, SmallCnnTask
from regtopk.lab.experiments.tasks.task import Task, TaskSettings

TASKS: dict[str, type[Task]] = {
    "toy": Toy,
    "linreg": LinearRegression,
    "digits": Digits,
    "fashion-mnist": FashionMnist,
    "gpt": Gpt,
    "resnet18": ResNet18Task,
    "resnet18-gn": ResNet18GroupNormTask,
    "small-cnn": SmallCnnTask,
}


class Problem:
    """A task for any seeds; its examples are read once."""

    def __init__(self, config: TaskSettings) -> None:
        self._config = config
        self._kind = TASKS[config.task]
        self._examples = self._kind.load(config)
        self._last: tuple[tuple[int, ...], Task] | None = None
        fingerprint = self._examples.fingerprint  # tells the examples from others
        self.contents = {self._kind.contents: fingerprint} if fingerprint else {}

    def task(self, seeds: Sequence[int], *, is_search: bool = False) -> Task:
        """The task of some seeds. A search is judged by validation examples, if there are any.

        The last one is kept, and no other: on a GPU its engine may hold half of the memory.
        """
        key = is_search, *seeds
        if self._last is None or self._last[0] != key:
            examples = self._examples
            if is_search and examples.validation is not None:
                test, test_targets = examples.validation
                examples = examples._replace(test=test, test_targets=test_targets)
            self._last = key, self._kind(self._config, seeds, examples)
        return self._last[1]


__all__ = ["TASKS", "Problem", "Task", "TaskSettings"]
