"""The example that times models of transformers."""

import hf_speed
import pytest


@pytest.mark.parametrize("case", hf_speed.CASES)
def test_every_way_gives_the_same_tokens(case, capsys, monkeypatch):
    """The compiled one is left out: compiling takes longer than all others together."""
    whole = hf_speed.ways

    def fewer(made):
        return {name: run for name, run in whole(made).items() if "compiled" not in name}

    monkeypatch.setattr(hf_speed, "ways", fewer)
    assert hf_speed.main([case, "--small", "--new", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tokens in fp32: all the same\n")
    assert "attnlib, pages" in out
    assert ("a graph over pages" in out) == (case == "llama")


def test_models_have_attention_of_their_own():
    made = hf_speed.models(hf_speed.CASES["llama"], True, "cpu", hf_speed.torch.float32)
    assert {name: model.config._attn_implementation for name, model in made.items()} == {x: x for x in made}
