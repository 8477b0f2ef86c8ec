"""The example that runs a model of transformers."""

import hf_generate


def test_a_small_model_says_the_same_with_each_attention(capsys):
    assert hf_generate.main(["--batch", "2", "--prompt", "9", "--new", "4"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == [
        "eager",
        "sdpa",
        "attnlib",
        "pages",
        "layers",
        "the",
    ]
    assert out.splitlines()[-1] == "the same tokens"
