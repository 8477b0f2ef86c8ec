"""The check of a ``mesh`` argument."""

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:  # importing it takes longer than importing this package
    from torch.distributed.device_mesh import DeviceMesh


def check_mesh(mesh: "DeviceMesh", example: str) -> None:
    """Raise unless ``mesh`` is a DeviceMesh of one dimension, such as ``mesh[example]``.

    Raises:
        TypeError: it is no DeviceMesh.
        ValueError: it has several dimensions.
    """
    if not hasattr(mesh, "ndim") or isinstance(mesh, Tensor):  # a process group, or a number of ranks
        made = "a DeviceMesh, as init_device_mesh() or DeviceMesh.from_group() makes"
        raise TypeError(f"mesh: expected {made}, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, as of mesh[{example!r}], got {mesh.ndim}")
