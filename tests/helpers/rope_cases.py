"""Ropes by every rule of scaling, and how a test rotates by them."""

import torch

from attnlib.rope.rope import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    ProportionalScaling,
    Rope,
    YaRNScaling,
    rotate,
)

SCALINGS = {
    "plain": None,
    "linear": LinearScaling(4.0),
    "ntk": NTKScaling(4.0),
    "dynamic": DynamicNTKScaling(2.0, original_max_position=1024),
    "llama3": Llama3Scaling(8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192),
    "yarn": YaRNScaling(40.0, original_max_position=4096, mscale=1.0, mscale_all_dim=0.707),
    "proportional": ProportionalScaling(0.5),
}

LENGTH = {"dynamic": 5000}  # the rule that needs one

FAR = (0, 1, 4096, 100_000)  # position 0 alone cannot see an error


def make(rule: str, dim: int, interleaved: bool = False, theta: float = 10_000.0):
    return Rope(dim, theta, SCALINGS[rule], interleaved)


def turn(x, rope, positions):
    """x rotated at integer positions, whatever the rule."""
    length = 5000 if rope.needs_length else None
    return rotate(x, rope.angles(torch.as_tensor(positions), length=length))


def pairs(x, width, interleaved):
    """The rotated channels of x as [..., width / 2, 2]."""
    x = x[..., :width]
    return x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
