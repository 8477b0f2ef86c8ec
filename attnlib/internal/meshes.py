"""Validation of ``mesh`` arguments, which name the ranks to use."""

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:  # this import takes longer than importing attnlib
    from torch.distributed.device_mesh import DeviceMesh


def check_mesh(mesh: "DeviceMesh", example: str) -> None:
    """Raise unless ``mesh`` is a DeviceMesh of one dimension, such as ``mesh[example]``.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        ValueError: the mesh has several dimensions.
    """
    if not hasattr(mesh, "ndim") or isinstance(mesh, Tensor):  # a process group, or a number of ranks
        made = "a DeviceMesh, as init_device_mesh() or DeviceMesh.from_group() makes"
        raise TypeError(f"mesh: expected {made}, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, as of mesh[{example!r}], got {mesh.ndim}")
