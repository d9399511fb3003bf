"""The largest and smallest eigenvalues of the loss's Hessian, by Lanczos iteration.

The eigenvalues of the tridiagonal matrix of Lanczos (Golub and Van Loan, Matrix Computations, section 10.1) approach
the extreme ones of the Hessian H first. A product H v is the central difference of two gradients in fp64, which works
with every attention kernel:

    H v = (grad(w + e v) - grad(w - e v)) / 2 e,    |v| = 1,    e = 1e-4

Negative eigenvalues are directions in which the loss is not convex.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

STEP = 1e-4


def lanczos(product: Callable[[Tensor], Tensor], size: int, steps: int) -> Tensor:
    """Approximate eigenvalues of a symmetric matrix in ascending order, fp64 ``[steps]``, or ``[size]`` if smaller.

    Args:
        product: the matrix times a vector, fp64 ``[size]`` to the same shape.
    """
    vector = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis, diagonal, beside = [vector / vector.norm()], [], []
    for _ in range(min(steps, size)):
        image = product(basis[-1])
        diagonal.append(image @ basis[-1])
        for _ in range(2):  # rounding makes the basis oblique unless every vector is taken out, twice
            for each in basis:
                image = image - (image @ each) * each
        beside.append(image.norm())
        if beside[-1] <= 1e-10 * torch.stack(diagonal).abs().max():  # the basis spans every direction that matters
            break
        basis.append(image / beside[-1])
    count = len(diagonal)
    matrix = torch.diag(torch.stack(diagonal))
    if count > 1:
        off = torch.diag(torch.stack(beside[: count - 1]), 1)
        matrix = matrix + off + off.T
    return torch.linalg.eigvalsh(matrix)


def hessian_eigenvalues(model: nn.Module, loss: Callable[[nn.Module], Tensor], steps: int) -> Tensor:
    """Approximate eigenvalues of the Hessian of a loss by all weights, ascending, fp64 ``[steps]``.

    Args:
        model: stays as it is; a copy in fp64 is measured.
        loss: of such a copy, a scalar.
        steps: of Lanczos, two gradients each.
    """
    measured = copy.deepcopy(model).double().requires_grad_(True)
    weights = [*measured.parameters()]
    start = parameters_to_vector(weights).detach().clone()

    def gradient(at: Tensor) -> Tensor:
        vector_to_parameters(at, weights)
        with torch.enable_grad():
            parts = torch.autograd.grad(loss(measured), weights, materialize_grads=True)
        return parameters_to_vector(parts)

    def product(vector: Tensor) -> Tensor:
        change = STEP * vector.to(start.device)
        return ((gradient(start + change) - gradient(start - change)) / (2 * STEP)).cpu()

    return lanczos(product, len(start), steps)
