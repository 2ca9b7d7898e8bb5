"""Least squares from sums over tokens: a matrix fitted to give wanted outputs for its inputs.

Shape suffixes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 1e-3
"""Pull towards the given weights, as a share of the inputs' mean square."""


@dataclass
class LeastSquares:
    """Sums of a regression: float32 products, added up in float64."""

    gram_II: Tensor
    cross_OI: Tensor

    @staticmethod
    def over(samples: Iterable[tuple[Tensor, Tensor]]) -> LeastSquares:
        """Sums over at least one pair of inputs (..., I) and targets (..., O)."""
        gram_II = cross_OI = torch.zeros(1, 1).double()  # grows to (I, I) and (O, I)
        for inputs, targets in samples:
            inputs_NI, targets_NO = inputs.flatten(0, -2), targets.flatten(0, -2)
            gram_II = gram_II + inputs_NI.T @ inputs_NI
            cross_OI = cross_OI + targets_NO.T @ inputs_NI
        return LeastSquares(gram_II, cross_OI)

    def solve(self, weight_OI: Tensor, ridge: float = RIDGE) -> Tensor:
        """argmin over W of sum |t - W a|^2 + ridge * mean(|a|^2) * |W - weight|^2, (O, I) float32.

        Without inputs that is the given weight.
        """
        if not self.gram_II.any():
            return weight_OI.detach().float()
        weight = weight_OI.detach().double()
        damped = self.gram_II + ridge * self.gram_II.diagonal().mean() * torch.eye(len(self.gram_II)).double()
        change = torch.linalg.solve(damped, (self.cross_OI - weight @ self.gram_II).T).T
        solved: Tensor = (weight + change).float()
        return solved
