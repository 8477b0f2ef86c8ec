"""The check of a ``mesh`` argument."""

from types import SimpleNamespace

import pytest
import torch

from attnlib.internal.meshes import check_mesh


@pytest.mark.parametrize(
    ("mesh", "error", "message"),
    [
        (2, TypeError, "mesh: expected a DeviceMesh, .* got int"),
        (torch.zeros(2), TypeError, "mesh: expected a DeviceMesh, .* got Tensor"),
        (SimpleNamespace(ndim=2), ValueError, r"mesh: expected one dimension, as of mesh\['cp'\], got 2"),
    ],
)
def test_what_is_no_mesh_of_one_dimension_is_refused(mesh, error, message):
    with pytest.raises(error, match=message):
        check_mesh(mesh, "cp")
