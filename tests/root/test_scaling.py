"""``attnlib.scaling`` has every public rule of ``attnlib.rope.scaling``, and the same objects."""

from dataclasses import is_dataclass

import attnlib.rope.scaling as rules
import attnlib.scaling


def test_every_rule_has_its_public_path():
    own = {name: x for name, x in vars(rules).items() if is_dataclass(x) and x.__module__ == rules.__name__}
    assert {"LinearScaling", "YaRNScaling"} <= {*own}
    public = {name: x for name, x in vars(attnlib.scaling).items() if is_dataclass(x)}
    assert public == {name: x for name, x in own.items() if name.endswith("Scaling")}
