"""Adagrad, Adam and Momentum: one update of any number of tensors, as a graph."""

from collections.abc import Callable

from ..lowering.draft import Val
from .importer import Given, Importer, Results, Rule


def _of_each(states: int, update: Callable[..., tuple[Val, ...]]) -> Rule:
    """Inputs come by kind: all tensors, all gradients, all states of a kind; and so do results."""

    def rule(t: Importer, node: Given, rate: Val, count: Val, *inputs: Val) -> Results:
        n = len(inputs) // (2 + states)
        updated = [update(t, node, rate, count, *inputs[i::n]) for i in range(n)]
        return tuple(v for kind in zip(*updated, strict=True) for v in kind)

    return rule


def _adagrad(t: Importer, node: Given, rate: Val, count: Val, x: Val, grad: Val, squares: Val) -> tuple[Val, ...]:
    decay = t.emit("Mul", t.cast(count, rate.dtype), t.like(rate, node.attributes["decay_factor"]))
    rate = t.emit("Div", rate, t.emit("Add", decay, t.like(rate, 1)))
    grad = _regularized(t, node, x, grad)
    squares = t.emit("Add", squares, t.emit("Mul", grad, grad))
    return _moved(t, x, rate, t.emit("Div", grad, _root(t, node, squares))), squares


def _adam(
    t: Importer, node: Given, rate: Val, count: Val, x: Val, grad: Val, mean: Val, squares: Val
) -> tuple[Val, ...]:
    said = node.attributes
    grad = _regularized(t, node, x, grad)
    mean = _weighted(t, mean, said["alpha"], grad, 1 - said["alpha"])
    squares = _weighted(t, squares, said["beta"], t.emit("Mul", grad, grad), 1 - said["beta"])
    begun = t.emit("Greater", count, t.like(count, 0))
    steps = t.cast(t.emit("Max", count, t.like(count, 1)), rate.dtype)
    rest = [
        t.emit("Sub", t.like(rate, 1), t.emit("Pow", t.like(rate, said[k]), steps))  # of means that began with 0
        for k in ("alpha", "beta")
    ]
    unbiased = t.emit("Div", t.emit("Mul", rate, t.emit("Sqrt", rest[1])), rest[0])
    moved = _moved(t, x, t.emit("Where", begun, unbiased, rate), t.emit("Div", mean, _root(t, node, squares)))
    return _times(t, moved, 1 - said["norm_coefficient_post"]), mean, squares


def _momentum(t: Importer, node: Given, rate: Val, count: Val, x: Val, grad: Val, velocity: Val) -> tuple[Val, ...]:
    said = node.attributes
    grad = _regularized(t, node, x, grad)
    share = t.emit("Where", t.emit("Greater", count, t.like(count, 0)), t.like(x, said["beta"]), t.like(x, 1))
    velocity = t.emit("Add", _times(t, velocity, said["alpha"]), t.emit("Mul", share, grad))
    ahead = said["mode"] == "nesterov"
    return _moved(t, x, rate, _weighted(t, velocity, said["alpha"], grad, 1) if ahead else velocity), velocity


def _regularized(t: Importer, node: Given, x: Val, grad: Val) -> Val:
    return _weighted(t, x, node.attributes["norm_coefficient"], grad, 1)


def _root(t: Importer, node: Given, squares: Val) -> Val:
    return t.emit("Add", t.emit("Sqrt", squares), t.like(squares, node.attributes["epsilon"]))


def _moved(t: Importer, x: Val, rate: Val, direction: Val) -> Val:
    return t.emit("Sub", x, t.emit("Mul", t.cast(rate, x.dtype), direction))


def _weighted(t: Importer, a: Val, share: float, b: Val, other: float) -> Val:
    return t.emit("Add", _times(t, a, share), _times(t, b, other))


def _times(t: Importer, x: Val, number: float) -> Val:
    return x if number == 1 else t.emit("Mul", x, t.like(x, number))


adagrad, adam, momentum = _of_each(1, _adagrad), _of_each(2, _adam), _of_each(1, _momentum)
