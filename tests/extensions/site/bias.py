"""A metric: the mean of predictions minus references."""

from accmt import Metric


class Bias(Metric):
    """The nearer to 0 from below the better."""

    def __init__(self, name: str = "bias") -> None:
        super().__init__(name)

    def compute(self, predictions, references) -> dict[str, float]:
        return {self.name: float((predictions - references).mean())}
